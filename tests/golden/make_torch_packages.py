"""Layers as torchao 0.18 and optimum-quanto 0.2.7 write them, and what these packages decode of them.

    python tests/golden/make_torch_packages.py tests/golden/torch_packages

Run by a Python that has both beside torch, transformers and safetensors; nothing here imports Ingot.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

LAYERS = {"a": (6, 64), "b": (10, 32)}


def model() -> torch.nn.ModuleDict:
    torch.manual_seed(0)
    layers = {name: torch.nn.Linear(cols, rows, bias=name == "a") for name, (rows, cols) in LAYERS.items()}
    return torch.nn.ModuleDict(layers).to(torch.bfloat16)


def save(root: Path, name: str, tensors: dict[str, Any], wanted: dict[str, Any], stated: Any, told: Any = None) -> None:
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    save_file({key: value.contiguous() for key, value in tensors.items()}, folder / "model.safetensors", told)
    save_file({key: value.detach().contiguous() for key, value in wanted.items()}, root / f"{name}.safetensors")
    config = {"dtype": "bfloat16", **({"quantization_config": stated} if stated else {})}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def torchao(root: Path) -> None:
    from torchao.core.config import config_to_dict
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, IntxWeightOnlyConfig, quantize_
    from torchao.quantization.granularity import PerGroup
    from torchao.quantization.quant_primitives import MappingType

    cases = {
        "torchao-int8": Int8WeightOnlyConfig(version=2),
        "torchao-fp8": Float8WeightOnlyConfig(version=2),
        "torchao-int4": IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32), version=2),
        "torchao-int3-asymmetric": IntxWeightOnlyConfig(
            weight_dtype=torch.int3, granularity=PerGroup(16), mapping_type=MappingType.ASYMMETRIC, version=2
        ),
    }
    for name, how in cases.items():
        made = model()
        quantize_(made, how)
        state = made.state_dict()
        tensors, told = flatten_tensor_state_dict(state)
        wanted = {key: value.dequantize() if hasattr(value, "qdata") else value for key, value in state.items()}
        stated = {"quant_method": "torchao", "quant_type": {"default": config_to_dict(how)}}
        save(root, name, tensors, wanted, stated, {"format": "pt", **told})


def quanto(root: Path) -> None:
    from optimum.quanto import freeze, qfloat8, qint8, quantize

    for name, kind in (("quanto-int8", qint8), ("quanto-fp8", qfloat8)):
        made = model()
        quantize(made, weights=kind)
        freeze(made)
        wanted = {key: made[key].weight.dequantize() for key in made}
        bias = {"a.bias": made["a"].bias}
        save(root, name, made.state_dict(), {f"{key}.weight": value for key, value in wanted.items()} | bias, None)
        (root / name / "quanto_qmap.json").write_text(json.dumps({key: {"weights": kind.name} for key in made}) + "\n")


if __name__ == "__main__":
    torchao(Path(sys.argv[1]))
    quanto(Path(sys.argv[1]))
