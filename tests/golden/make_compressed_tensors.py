"""Makes tests/golden/compressed_tensors with compressed-tensors itself; needs torch and compressed-tensors==0.20.0.

    python tests/golden/make_compressed_tensors.py [FOLDER]

Each folder holds one packed layer as the package compresses it, and in expected.safetensors the values that the package
decompresses it to.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.naive_quantized import IntQuantizationCompressor
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import save_file

NAME = "model.layers.0.mlp.up_proj"
ROWS, COLS = 40, 96


def layer(folder: Path, compressor: Any, format: str, dtype: torch.dtype, **stated: Any) -> None:
    """Quantize a random matrix as ``stated`` and compress it."""
    torch.manual_seed(1)
    args = QuantizationArgs(type="int", **stated)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=format)
    groups = COLS // args.group_size if args.group_size else 1
    half = 1 << (args.num_bits - 1)
    zero = torch.zeros(ROWS, groups, dtype=torch.int8)
    if not args.symmetric:
        zero = torch.randint(-half, half, (ROWS, groups), dtype=torch.int8)
    state = {
        "weight": torch.randn(ROWS, COLS).to(dtype),
        "weight_scale": (torch.rand(ROWS, groups) / half + 0.01).to(dtype),
        "weight_zero_point": zero,
    }
    packed = compressor.compress(dict(state), scheme)
    values = compressor.decompress(dict(packed), scheme)["weight"]
    folder.mkdir(parents=True, exist_ok=True)
    save_file({f"{NAME}.{key}": value.contiguous() for key, value in packed.items()}, folder / "model.safetensors")
    save_file({f"{NAME}.weight": values.contiguous()}, folder / "expected.safetensors")
    config = {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
    }
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": config}, indent=1))


def main(root: Path) -> None:
    for bits in (2, 3, 4, 8):
        for symmetric in (True, False):
            dtype = torch.bfloat16 if symmetric else torch.float16
            name = f"pack{bits}-{'sym' if symmetric else 'asym'}-{str(dtype).removeprefix('torch.')}"
            stated = {"num_bits": bits, "symmetric": symmetric, "strategy": "group", "group_size": 32}
            layer(root / name, PackedQuantizationCompressor, "pack-quantized", dtype, **stated)
    stated = {"num_bits": 4, "symmetric": True, "strategy": "channel"}
    layer(root / "pack4-channel", PackedQuantizationCompressor, "pack-quantized", torch.bfloat16, **stated)
    for symmetric in (True, False):
        stated = {"num_bits": 8, "symmetric": symmetric, "strategy": "channel"}
        name = f"int8-{'sym' if symmetric else 'asym'}"
        layer(root / name, IntQuantizationCompressor, "int-quantized", torch.bfloat16, **stated)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("compressed_tensors"))
