"""Layers as GPTQModel 7.7.0 packs them in planes and as AutoAWQ 0.2.9 packs them for gemv, and their values.

    python tests/golden/make_gptq_awq.py tests/golden/gptq_awq

Run by a Python that has both beside torch, transformers 4.51.3 and safetensors; nothing here imports Ingot. Of
GPTQModel only the module that packs planes is loaded.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import torch
from awq.modules.linear.gemv import WQLinear_GEMV
from safetensors.torch import save_file

ROWS, COLS = 64, 256


def planar() -> Any:
    package = importlib.util.find_spec("gptqmodel")
    assert package is not None
    assert package.submodule_search_locations
    path = Path(package.submodule_search_locations[0]) / "utils" / "planar_packing.py"
    spec = importlib.util.spec_from_file_location("planar_packing", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def save(folder: Path, entries: dict[str, Any], expected: dict[str, Any], stated: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({key: value.contiguous() for key, value in entries.items()}, folder / "model.safetensors")
    save_file({key: value.contiguous() for key, value in expected.items()}, folder / "expected.safetensors")
    config = {"model_type": "llama", "quantization_config": stated}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def numbers(bits: int, group: int, *, sym: bool) -> tuple[Any, Any, Any]:
    """Codes [rows, cols], scales and zero points [rows, groups]."""
    groups = COLS // group
    zeros = torch.randint(0, 1 << bits, (ROWS, groups))
    if sym:
        zeros[:] = 1 << (bits - 1)
    scales = (torch.rand(ROWS, groups) / (1 << bits) + 0.01).half()
    return torch.randint(0, 1 << bits, (ROWS, COLS)), scales, zeros


def values(codes: Any, scales: Any, zeros: Any) -> Any:
    group = COLS // scales.shape[1]
    wide = [item.repeat_interleave(group, 1) for item in (scales, zeros)]
    return ((codes - wide[1]) * wide[0]).half()


def gptq(root: Path, *, sym: bool) -> None:
    pack, entries, expected, dynamic = planar(), {}, {}, {}
    for bits in (3, 4, 5, 6, 7):
        name = f"model.layers.{bits}.mlp.up_proj"
        group = 64 if bits == 6 else 32
        codes, scales, zeros = numbers(bits, group, sym=sym)
        entries[f"{name}.qweight"] = pack.planar_pack_rows(codes.T, bits)
        entries[f"{name}.qzeros"] = pack.planar_pack_cols(zeros.T, bits)
        entries[f"{name}.scales"] = scales.T
        entries[f"{name}.g_idx"] = (torch.arange(COLS) // group).int()
        expected[f"{name}.weight"] = values(codes, scales, zeros)
        if bits != 5:
            dynamic[rf"+:^model\.layers\.{bits}\.mlp\.up_proj$"] = {"bits": bits, "group_size": group}
    stated = {
        "quant_method": "gptq",
        "bits": 5,
        "group_size": 32,
        "desc_act": False,
        "sym": sym,
        "lm_head": False,
        "checkpoint_format": "gptq_p",
        "pack_dtype": "int32",
        "dynamic": dynamic,
    }
    save(root / f"gptq-planes-{'sym' if sym else 'asym'}", entries, expected, stated)


def gemv(root: Path, group: int, *, sym: bool) -> None:
    codes, scales, zeros = numbers(4, group, sym=sym)
    linear = torch.nn.Linear(COLS, ROWS, bias=False)
    wide = [item.float().repeat_interleave(group, 1) for item in (scales, zeros)]
    linear.weight.data = (codes - wide[1]) * wide[0]
    made = WQLinear_GEMV.from_linear(linear, 4, group, scales=scales, zeros=zeros)
    entries = {f"model.layers.0.mlp.up_proj.{key}": value for key, value in made.state_dict().items()}
    expected = {"model.layers.0.mlp.up_proj.weight": values(codes, scales, zeros)}
    stated = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "zero_point": not sym,
        "version": "gemv",
        "modules_to_not_convert": None,
    }
    save(root / f"awq-gemv-{group}-{'sym' if sym else 'asym'}", entries, expected, stated)


if __name__ == "__main__":
    torch.manual_seed(0)
    for symmetric in (True, False):
        gptq(Path(sys.argv[1]), sym=symmetric)
        for size in (32, 64, 128):
            gemv(Path(sys.argv[1]), size, sym=symmetric)
