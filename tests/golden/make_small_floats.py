"""Layers as bitsandbytes 0.50.2 and compressed-tensors 0.20.0 write them, and what these packages decode of them.

    python tests/golden/make_small_floats.py tests/golden/small_floats

Run by a Python that has both beside torch and safetensors; nothing here imports Ingot.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

RANDOM = torch.Generator().manual_seed(0)


def codes(*shape: int, most: int = 256) -> torch.Tensor:
    return torch.randint(0, most, shape, generator=RANDOM, dtype=torch.uint8)


def e4m3(*shape: int) -> torch.Tensor:
    return codes(*shape, most=120).view(torch.float8_e4m3fn)


def powers(*shape: int) -> torch.Tensor:
    return codes(*shape, most=20) + 115


def scales(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (torch.rand(shape, generator=RANDOM) * 0.01 + 1e-4).to(dtype)


def save(root: Path, name: str, tensors: dict[str, Any], wanted: dict[str, Any], quantization: dict[str, Any]) -> None:
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    save_file({key: value.contiguous() for key, value in tensors.items()}, folder / "model.safetensors")
    save_file({key: value.contiguous() for key, value in wanted.items()}, root / f"{name}.safetensors")
    config = {"dtype": "bfloat16", "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def bitsandbytes(root: Path) -> None:
    import bitsandbytes.functional as package

    tensors, wanted = {}, {}
    for kind in ("nf4", "fp4"):
        for nested in (False, True):
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                name = f"{kind}-{'nested' if nested else 'plain'}-{str(dtype)[6:]}.weight"
                weight = (torch.randn(9, 66, generator=RANDOM) * 0.1).to(dtype)
                packed, state = package.quantize_4bit(weight, blocksize=64, quant_type=kind, compress_statistics=nested)
                tensors[name] = packed
                tensors |= {f"{name}.{key}": value for key, value in state.as_dict(packed=True).items()}
                wanted[name] = package.dequantize_4bit(packed, state)
    packed, absmax, _ = package.int8_vectorwise_quant(torch.randn(9, 64, generator=RANDOM).half())
    tensors |= {"int8.weight": packed, "int8.SCB": absmax, "int8.weight_format": torch.zeros((), dtype=torch.uint8)}
    wanted["int8.weight"] = package.int8_vectorwise_dequant(packed, absmax)
    save(root, "bitsandbytes", tensors, wanted, {"quant_method": "bitsandbytes", "load_in_4bit": True})


def compressed_tensors(root: Path) -> None:
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    def packed(columns: int, scale: torch.Tensor, **more: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"weight_packed": codes(6, columns), "weight_scale": scale, **more}

    def plain(scale: torch.Tensor, rows: int = 6, cols: int = 64) -> dict[str, torch.Tensor]:
        return {"weight": e4m3(rows, cols), "weight_scale": scale}

    floats, block = "float-quantized", {"strategy": "block", "block_structure": [128, 32]}
    cases: tuple[tuple[str, str, dict[str, Any], dict[str, torch.Tensor]], ...] = (
        (
            "nvfp4",
            "nvfp4-pack-quantized",
            {"num_bits": 4, "group_size": 16, "strategy": "tensor_group"},
            packed(32, e4m3(6, 4), weight_global_scale=torch.tensor([37.3])),
        ),
        (
            "mxfp4",
            "mxfp4-pack-quantized",
            {"num_bits": 4, "group_size": 32, "strategy": "group"},
            packed(32, powers(6, 2)),
        ),
        (
            "mxfp6",
            "mxfp6-pack-quantized",
            {"num_bits": 6, "group_size": 32, "strategy": "group"},
            packed(48, powers(6, 2)),
        ),
        ("mxfp8", "mxfp8-quantized", {"group_size": 32, "strategy": "group"}, plain(powers(6, 2))),
        ("fp8-tensor", floats, {"strategy": "tensor"}, plain(scales(1))),
        ("fp8-channel", floats, {"strategy": "channel"}, plain(scales(6, 1, dtype=torch.float32))),
        ("fp8-group", floats, {"strategy": "group", "group_size": 16}, plain(scales(6, 4))),
        ("fp8-block", floats, block, plain(scales(2, 2), 130, 40)),
    )
    for name, format, keys, parts in cases:
        weights = QuantizationArgs(type="float", symmetric=True, **keys)
        scheme = QuantizationScheme(targets=["Linear"], weights=weights)
        compressor = BaseCompressor.get_value_from_registry(format)
        wanted = compressor.decompress(dict(parts), scheme)["weight"].detach()
        group = {"targets": ["Linear"], "weights": json.loads(weights.model_dump_json()), "format": format}
        stated = {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group}}
        save(root, name, {f"l.{key}": value for key, value in parts.items()}, {"l.weight": wanted}, stated)


if __name__ == "__main__":
    bitsandbytes(Path(sys.argv[1]))
    compressed_tensors(Path(sys.argv[1]))
