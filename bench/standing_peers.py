"""A model's matrices rounded by other packages: run by a Python that has them, for ``bench/standing.py``.

    python standing_peers.py list MODEL                 prints the rows that the model's columns allow
    python standing_peers.py ROW MODEL FOLDER OUT       writes decoded matrices, f32; prints the bytes that they took

FOLDER has ``calibration.npy``, i64 [windows, tokens]; packages that want data get it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

LAYERS = ("self_attn", "mlp")
Made = tuple[int, dict[str, torch.Tensor]]


def matrices(model: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(model.glob("*.safetensors")):
        found |= {n: w.float() for n, w in load_file(path).items() if w.ndim == 2 and any(s in n for s in LAYERS)}
    return found


def each(model: Path, one: Callable[[torch.Tensor], tuple[int, torch.Tensor]]) -> Made:
    made = {name: one(weights.contiguous()) for name, weights in matrices(model).items()}
    return sum(size for size, _ in made.values()), {name: values for name, (_, values) in made.items()}


def hqq(bits: int, group: int, model: Path, folder: Path) -> Made:
    """Its own search of zeros; scales and zeros in f16, as they are stored."""
    from hqq.core.quantize import Quantizer

    def one(weights: torch.Tensor) -> tuple[int, torch.Tensor]:
        packed, meta = Quantizer.quantize(
            weights, nbits=bits, group_size=group, axis=1, device="cpu", compute_dtype=torch.float32
        )
        meta["scale"], meta["zero"] = meta["scale"].half().float(), meta["zero"].half().float()
        values = Quantizer.dequantize(packed, meta).reshape(weights.shape)
        return packed.numel() * packed.element_size() + 2 * (meta["scale"].numel() + meta["zero"].numel()), values

    return each(model, one)


def mlx(bits: int, group: int, model: Path, folder: Path) -> Made:
    import mlx.core as mx

    def one(weights: torch.Tensor) -> tuple[int, torch.Tensor]:
        parts = mx.quantize(mx.array(weights.numpy()).astype(mx.float16), group_size=group, bits=bits)
        values = mx.dequantize(*parts, group_size=group, bits=bits).astype(mx.float32)
        return sum(part.nbytes for part in parts), torch.from_numpy(np.array(values))

    return each(model, one)


def bitsandbytes(group: int, double: bool, model: Path, folder: Path) -> Made:
    """NF4, scales in f32 or in 8 bits of their own.

    Given and decoded as rows of one block: its AVX-512 code for CPUs (0.50.2) counts blocks from each row's begin,
    where its encoder counts over the whole tensor, so that 288 columns in blocks of 64 come back wrong.
    """
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    def one(weights: torch.Tensor) -> tuple[int, torch.Tensor]:
        codes, state = quantize_4bit(
            weights.reshape(-1, group), blocksize=group, quant_type="nf4", compress_statistics=double
        )
        scales = [state.absmax] if state.state2 is None else [state.absmax, state.state2.absmax]
        values = dequantize_4bit(codes, state).reshape(weights.shape)
        return sum(part.numel() * part.element_size() for part in (codes, *scales)), values

    return each(model, one)


def gptqmodel(bits: int, group: int, model: Path, folder: Path) -> Made:
    """The whole package, from the model's folder to a folder of its own, whose words are read by its own formula."""
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # it wants two, and takes half of the processors
    from gptqmodel import GPTQModel, QuantizeConfig

    windows = np.load(folder / "calibration.npy")
    data = [{"input_ids": row.tolist(), "attention_mask": [1] * len(row)} for row in windows]
    config = QuantizeConfig(bits=bits, group_size=group, desc_act=False, sym=True)
    loaded = GPTQModel.load(str(model), config, device="cpu")
    loaded.quantize(data, batch_size=1)
    out = folder / "gptqmodel"
    loaded.save(str(out))
    return read_gptq(out, bits, matrices(model))


def read_gptq(folder: Path, bits: int, originals: Mapping[str, torch.Tensor]) -> Made:
    """Decode 2-, 4- and 8-bit words as GPTQ's first version has them: ``scales * (q - (zeros + 1))``."""
    parts: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        parts |= load_file(path)
    found, total, shifts = {}, 0, torch.arange(0, 32, bits, dtype=torch.int32)
    for name, weights in originals.items():
        layer = name.removesuffix(".weight")
        words, zeros, scales, groups = (parts[f"{layer}.{part}"] for part in ("qweight", "qzeros", "scales", "g_idx"))
        total += sum(part.numel() * part.element_size() for part in (words, zeros, scales))
        mask = (1 << bits) - 1
        codes = ((words[:, None, :] >> shifts[None, :, None]) & mask).reshape(-1, words.shape[1])
        offsets = ((zeros[:, :, None] >> shifts[None, None, :]) & mask).reshape(zeros.shape[0], -1) + 1
        values = scales.float()[groups.long()] * (codes - offsets[groups.long()]).float()
        found[name] = values.T.contiguous().reshape(weights.shape)
    return total, found


def llmcompressor(bits: int, group: int, model: Path, folder: Path) -> Made:
    """GPTQModifier of llm-compressor, from the model's folder to a folder of compressed-tensors."""
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from torch.utils.data import DataLoader

    windows = torch.from_numpy(np.load(folder / "calibration.npy"))
    data = DataLoader([{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in windows], batch_size=1)
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": group}
    modifier = GPTQModifier(config_groups={"group_0": {"targets": ["Linear"], "weights": weights}}, ignore=["lm_head"])
    out = folder / "llmcompressor"
    oneshot(
        model=str(model),
        dataset=data,
        recipe=[modifier],
        num_calibration_samples=len(windows),
        max_seq_length=windows.shape[1],
        output_dir=str(out),
    )
    return read_packed(out, bits, group, matrices(model))


def read_packed(folder: Path, bits: int, group: int, originals: Mapping[str, torch.Tensor]) -> Made:
    """Decode 4-bit words of pack-quantized: columns from the low bits up, 8 for zero."""
    parts: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        parts |= load_file(path)
    decoded, total, shifts = {}, 0, torch.arange(0, 32, bits, dtype=torch.int32)
    for name, weights in originals.items():
        words, scales = parts[f"{name}_packed"], parts[f"{name}_scale"]
        total += sum(part.numel() * part.element_size() for part in (words, scales))
        codes = ((words[:, :, None] >> shifts) & ((1 << bits) - 1)).reshape(weights.shape) - (1 << bits - 1)
        decoded[name] = codes.float() * scales.float().repeat_interleave(group, 1)
    return total, decoded


ROWS: Mapping[str, tuple[int, Callable[[Path, Path], Made]]] = {
    **{
        f"hqq {bits} bits g{group}": (group, lambda m, f, b=bits, g=group: hqq(b, g, m, f))
        for bits, group in ((4, 32), (4, 64), (3, 32), (3, 64), (2, 32), (2, 64))
    },
    **{
        f"mlx {bits} bits g{group}": (group, lambda m, f, b=bits, g=group: mlx(b, g, m, f))
        for bits, group in ((8, 32), (6, 32), (4, 32), (4, 64), (3, 32), (3, 64), (2, 32), (2, 64))
    },
    **{
        f"bitsandbytes NF4 g{group}{', double' * double}": (0, lambda m, f, g=group, d=double: bitsandbytes(g, d, m, f))
        for group, double in ((32, False), (64, False), (64, True))
    },
    **{
        f"gptqmodel {bits} bits g{group}": (group, lambda m, f, b=bits, g=group: gptqmodel(b, g, m, f))
        for bits, group in ((4, 32), (4, 64), (2, 32))
    },
}
LLM_COMPRESSOR: Mapping[str, tuple[int, Callable[[Path, Path], Made]]] = {
    f"llmcompressor 4 bits g{group}": (group, lambda m, f, g=group: llmcompressor(4, g, m, f)) for group in (32, 64)
}
"""Rows of a Python of its own: llm-compressor 0.14 wants another release of compressed-tensors than the other rows."""


def main() -> None:
    name, model = sys.argv[1], Path(sys.argv[2])
    if name == "list":
        columns = {each.shape[1] for each in matrices(model).values()}
        for row, (group, _) in ROWS.items():
            if not group or all(cols % group == 0 for cols in columns):
                print(row)
        return
    folder, out = Path(sys.argv[3]), Path(sys.argv[4])
    size, found = {**ROWS, **LLM_COMPRESSOR}[name][1](model, folder)
    save_file({key: value.float().contiguous() for key, value in found.items()}, out)
    print(size)


if __name__ == "__main__":
    main()
