"""Makes the folders marlin24-* of tests/golden/compressed_tensors; needs torch and compressed-tensors==0.12.2, the last
release that packs so.

    python tests/golden/make_marlin_24.py [FOLDER]

The package cannot decompress what it packs: expected.safetensors holds its own values from before packing, codes times
scales. Nothing here imports Ingot.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from compressed_tensors.compressors.sparse_quantized_compressors.marlin_24 import Marlin24Compressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
from safetensors.torch import save_file

NAME = "model.layers.0.mlp.up_proj"
LAYERS = {
    "marlin24-4-group": (4, 128, 512),
    "marlin24-8-two-groups": (8, 128, 256),
    "marlin24-4-channel": (4, None, 96),
}


def main(root: Path) -> None:
    for name, (bits, group, cols) in LAYERS.items():
        torch.manual_seed(bits)
        strategy = "group" if group else "channel"
        args = QuantizationArgs(num_bits=bits, type="int", symmetric=True, strategy=strategy, group_size=group)
        scheme = QuantizationScheme(targets=["Linear"], weights=args, format="marlin-24")
        rows = 128 if group is None else 64
        dense = torch.randn(rows, cols // 4, 4)
        smallest = dense.abs().argsort(dim=2)[:, :, :2]
        dense = dense.scatter(2, smallest, 0).reshape(rows, cols).half()
        groups = dense.reshape(rows, -1, group or cols)
        scale = (groups.abs().amax(dim=2) / ((1 << (bits - 1)) - 0.5)).half()
        codes = quantize(x=dense, scale=scale, zero_point=None, args=args)
        values = dequantize(x_q=codes, scale=scale.float(), args=args, dtype=torch.float32)
        values = values.half() + 0  # codes have no -0
        state = {f"{NAME}.weight": dense, f"{NAME}.weight_scale": scale}
        packed = Marlin24Compressor().compress(state, {NAME: scheme})
        folder = root / name
        folder.mkdir(parents=True, exist_ok=True)
        save_file({key: value.contiguous() for key, value in packed.items()}, folder / "model.safetensors")
        save_file({f"{NAME}.weight": values.contiguous()}, folder / "expected.safetensors")
        config = {
            "quant_method": "compressed-tensors",
            "format": "marlin-24",
            "quantization_status": "compressed",
            "ignore": ["lm_head"],
            "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
        }
        whole = {"model_type": "llama", "quantization_config": config}
        (folder / "config.json").write_text(json.dumps(whole, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("compressed_tensors"))
