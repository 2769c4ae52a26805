"""Native kernels on one thread, as ratios to memcpy and to gguf-py's NumPy kernels in the same run.

    python bench/kernels.py --json kernels.json

Buffers are touched beforehand and larger than any cache. Every kernel takes turns with memcpy of the same output, and
the best time of each counts. ``--isa`` runs a lower instruction set.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from clock import turns
from gguf import GGMLQuantizationType, quants

import ingot
from ingot.codecs.affine.codec import AffineCodec
from ingot.codecs.affine.rows import decode_rows
from ingot.codecs.blocks.codec import EXACT, LEVELS, BlocksCodec
from ingot.codecs.lossless.tca_tbe import TcaCodec
from ingot.codecs.scaled_codebook.codec import ScaledCodebookCodec
from ingot.codecs.scaled_codebook.decode import ArrayWindow, decoder_of
from ingot.codecs.trellis.codec import TrellisCodec
from ingot.core.bytes import checksums
from ingot.core.numeric.dtypes import as_bits, cast, cast_into, numpy_dtype
from ingot.core.numeric.stats import measure
from ingot.core.runtime import native
from ingot.model.layouts.affine import AffineLayout
from ingot.testing.codecs import encode_tensor

Row = dict[str, Any]

DECODE = (
    ("INT4 g128", {"bits": 4, "group": 128}),
    ("INT4 g128 min-max", {"bits": 4, "group": 128, "symmetric": False}),
    ("INT8 per row", {"bits": 8}),
    ("INT3 g128", {"bits": 3, "group": 128}),
    ("INT2 g128", {"bits": 2, "group": 128}),
    ("INT2 g64", {"bits": 2, "group": 64}),
    ("INT4 g32", {"bits": 4, "group": 32}),
    ("INT4 g128 msb", {"bits": 4, "group": 128, "bit_order": "msb"}),
)
CODEBOOKS = (
    ("NF4 g64", {}),
    ("MXFP4", {"table": "f4_e2m1fn", "group": 32, "scales": "f8_e8m0fnu"}),
    ("NVFP4", {"table": "f4_e2m1fn", "group": 16, "scales": "f8_e4m3fn", "second": "multiply"}),
    ("FP8 128x128", {"table": "f8_e4m3fn", "group": [128, 128]}),
)
ENCODE = (
    ("INT4 g128 absmax", {"bits": 4, "group": 128}, 0.8),
    ("INT8 per row absmax", {"bits": 8}, 0.8),
    ("INT3 g128 absmax", {"bits": 3, "group": 128}, None),
    ("INT4 g128 min-max", {"bits": 4, "group": 128, "symmetric": False}, None),
    ("INT4 g32 absmax", {"bits": 4, "group": 32}, None),
    ("INT4 g128 MSE", {"bits": 4, "group": 128, "quantizer": "mse"}, 0.1),
    ("INT4 g128 min-max MSE", {"bits": 4, "group": 128, "quantizer": "mse", "symmetric": False}, 0.1),
)


def memcpy(source: np.ndarray, target: np.ndarray) -> Callable[[], object]:
    return partial(np.copyto, target.view(np.uint8), source.view(np.uint8))


def touched(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    array = np.empty(shape, numpy_dtype(dtype))
    array.view(np.uint8).fill(1)
    return array


def dequantize(weights: np.ndarray, repeat: int) -> list[Row]:
    rows = []
    for dtype in ("bf16", "f16", "f32"):
        out, copy = touched(weights.shape, dtype), touched(weights.shape, dtype)
        for name, options in DECODE:
            tensor = encode_tensor(AffineCodec(), weights, options, dtype="bf16")
            parts = {role: part.array() for role, part in tensor.parts.items()}
            arguments = (
                AffineLayout.from_tensor(tensor),
                parts["packed_weight"],
                parts["scales"],
                parts.get("zeros"),
                out,
            )
            plain, ours = turns(repeat, memcpy(out, copy), partial(decode_rows, *arguments))
            target = 0.8 if name != "INT4 g32" and "msb" not in name else None
            rows.append(entry(f"dequantize {name} to {dtype}", out.nbytes / ours / 1e9, "GB/s", plain / ours, target))
        rows.append(entry(f"memcpy {dtype} output", out.nbytes / plain / 1e9, "GB/s", None, None))
    return rows


def codebooks(weights: np.ndarray, repeat: int) -> list[Row]:
    """Values times scales of any type: ``scaled_codebook``."""
    rows = []
    for dtype in ("bf16", "f32"):
        out, copy = touched(weights.shape, dtype), touched(weights.shape, dtype)
        for name, options in CODEBOOKS:
            tensor = encode_tensor(ScaledCodebookCodec(), weights, options, dtype="bf16")
            decoder = decoder_of(tensor, tensor.layout, {"scales": ArrayWindow(tensor.parts["scales"].array())})
            ours = partial(decoder.decode, tensor.parts["indices"].array(), 0, out, "low_first")
            plain, took = turns(repeat, memcpy(out, copy), ours)
            rows.append(entry(f"decode {name} to {dtype}", out.nbytes / took / 1e9, "GB/s", plain / took, 0.6))
    return rows


def trellises(weights: np.ndarray, repeat: int) -> list[Row]:
    """Streams through a trellis beside a table of 16 values and memcpy; encoding, of less rows."""
    rows, ways = [], [("NF4 g64", ScaledCodebookCodec(), {"group": 64})]
    ways += [(f"trellis {bits} bits g64", TrellisCodec(), {"bits": bits, "group": 64}) for bits in (2, 3, 4)]
    some = weights[:256]
    os.environ["OMP_NUM_THREADS"] = "1"
    for dtype in ("bf16", "f32"):
        out, copy = touched(some.shape, dtype), touched(some.shape, dtype)
        for name, codec, options in ways:
            tensor = encode_tensor(codec, some, options, dtype="bf16")
            plain, took = turns(repeat, memcpy(out, copy), partial(tensor.numpy, out=out), clock=time.process_time)
            rows.append(entry(f"decode {name} to {dtype}", out.size / took / 1e9, "G weights/s", plain / took, None))
    for name, codec, options in ways:
        seconds = turns(2, partial(codec.encoder(some.shape, "bf16", options).encode, some), clock=time.process_time)[0]
        rows.append(entry(f"encode {name} from bf16", some.size / seconds / 1e6, "M weights/s", None, None))
    return rows


def tensors(weights: np.ndarray, repeat: int) -> list[Row]:
    """``Tensor.numpy`` of a mapped file: processor time, beside memcpy into memory of the same kind."""
    os.environ["OMP_NUM_THREADS"] = "1"
    rows, source, out = [], touched(weights.shape, "bf16"), touched(weights.shape, "bf16")
    with tempfile.TemporaryDirectory() as folder:
        for name, options in (DECODE[0], DECODE[2]):
            path = Path(folder, "one.zt")
            ingot.save(path, {"w": encode_tensor(AffineCodec(), weights, options, dtype="bf16")}, overwrite=True)
            with ingot.open(path) as checkpoint:
                tensor = checkpoint["w"]
                ways = (
                    (tensor.numpy, lambda: np.copyto(np.empty_like(source), source), "fresh", 0.6),
                    (partial(tensor.numpy, out=out), memcpy(source, out), "given", 1.0),
                )
                for ours, copy, kind, target in ways:
                    took, plain = turns(repeat, ours, copy, clock=time.process_time)
                    label = f"Tensor.numpy {name}, {kind} memory"
                    rows.append(entry(label, out.nbytes / took / 1e9, "GB/s", plain / took, target))
    return rows


def quantize(weights: np.ndarray, repeat: int) -> list[Row]:
    rows = []
    for name, options, target in ENCODE:
        encoder = AffineCodec().encoder(weights.shape, "bf16", options)
        seconds = turns(repeat if target != 0.1 else 2, partial(encoder.encode, weights))[0]
        rows.append(entry(f"quantize {name} from bf16", weights.size / seconds / 1e9, "G weights/s", None, target))
    return rows


def peers(weights: np.ndarray, repeat: int) -> list[Row]:
    """gguf-py's Q4_0 and Q8_0 (groups of 32, f16 scales) on the f32 weights, beside our nearest."""
    rows = []
    small = weights[: max(1, weights.shape[0] // 8)].astype(np.float32)
    for name, kind, bits in (
        ("Q4_0", GGMLQuantizationType.Q4_0, 4),
        ("Q8_0", GGMLQuantizationType.Q8_0, 8),
    ):
        options = {"bits": bits, "group": 32, "scales": "f16"}
        tensor = encode_tensor(AffineCodec(), small, options, dtype="f32")
        encoder, packed = AffineCodec().encoder(small.shape, "f32", options), quants.quantize(small, kind)
        parts = {role: part.array() for role, part in tensor.parts.items()}
        out = touched(small.shape, "f32")
        theirs, ours = turns(max(3, repeat // 2), partial(quants.quantize, small, kind), partial(encoder.encode, small))
        label = f"{bits}-bit g32 f32"
        rows.append(entry(f"quantize {label}: gguf-py {name}", small.size / theirs / 1e9, "G weights/s", None, None))
        rows.append(entry(f"quantize {label}: Ingot", small.size / ours / 1e9, "G weights/s", theirs / ours, None))
        decode = partial(
            decode_rows, AffineLayout.from_tensor(tensor), parts["packed_weight"], parts["scales"], None, out
        )
        theirs, ours = turns(max(3, repeat // 2), partial(quants.dequantize, packed, kind), decode)
        rows.append(entry(f"dequantize {label}: gguf-py {name}", small.size / theirs / 1e9, "G weights/s", None, None))
        rows.append(entry(f"dequantize {label}: Ingot", small.size / ours / 1e9, "G weights/s", theirs / ours, None))
    return rows


def blocks(weights: np.ndarray, repeat: int) -> list[Row]:
    """Searches of ggml's blocks on the f32 weights, beside gguf-py where it encodes the type."""
    rows = []
    small = weights[: max(1, weights.shape[0] // 8)].astype(np.float32)
    for kind in LEVELS:
        encoder = BlocksCodec().encoder(small.shape, "f32", {"type": kind})
        ours = turns(max(3, repeat // 2), partial(encoder.encode, small))[0]
        ratio = None
        if kind in EXACT:
            peer = partial(quants.quantize, small, GGMLQuantizationType[kind.upper()])
            ratio = turns(1, peer)[0] / ours
            rows.append(entry(f"gguf-py {kind}", small.size / (ratio * ours) / 1e6, "M weights/s", None, None))
        rows.append(entry(f"search {kind} from f32", small.size / ours / 1e6, "M weights/s", ratio, None))
    return rows


def bitmaps(weights: np.ndarray, repeat: int) -> list[Row]:
    """tca_tbe: rates are of bf16 values read or written."""
    encoder = TcaCodec().encoder(weights.shape, "bf16", {})
    seconds = turns(1, partial(encoder.fit_pass, weights))[0]
    rows = [entry("tca_tbe fit pass", weights.nbytes / seconds / 1e9, "GB/s", None, None)]
    parts = encoder.encode(weights)
    bits = sum(part.nbytes for part in parts.values()) * 8 / weights.size
    out, copy = touched(weights.shape, "bf16"), touched(weights.shape, "bf16")
    seconds = turns(repeat, partial(encoder.encode, weights))[0]
    rows.append(entry("tca_tbe encode", weights.nbytes / seconds / 1e9, "GB/s", None, 1.5))
    plain, ours = turns(repeat, memcpy(out, copy), partial(encoder.decode, parts, out))
    rows.append(entry(f"tca_tbe decode, {bits:.2f} bits per weight", out.nbytes / ours / 1e9, "GB/s", None, 4.0))
    rows.append(entry("memcpy bf16 output", out.nbytes / plain / 1e9, "GB/s", None, None))
    return rows


def others(weights: np.ndarray, repeat: int) -> list[Row]:
    rows = []
    wide = cast(weights, "f32")
    for source, dtype in (("f32", "bf16"), ("f32", "f16"), ("bf16", "f32"), ("bf16", "f16"), ("f16", "bf16")):
        values = cast(wide, source)
        out, copy = touched(weights.shape, dtype), touched(weights.shape, dtype)
        plain, ours = turns(repeat, memcpy(out, copy), partial(cast_into, values, out))
        rows.append(entry(f"cast {source} to {dtype}", out.nbytes / ours / 1e9, "GB/s", plain / ours, None))
    seconds = turns(repeat, lambda: measure(wide, weights))[0]
    rows.append(entry("error statistics f32, bf16", weights.size / seconds / 1e9, "G elements/s", None, 1.0))
    data = memoryview(as_bits(wide).view(np.uint8).reshape(-1))
    seconds = turns(repeat, lambda: checksums.digest("crc32c", data))[0]
    rows.append(entry("CRC-32C", data.nbytes / seconds / 1e9, "GB/s", None, 15.0))
    seconds = turns(1, lambda: native.kernels.crc32c_by_table(data))[0]
    rows.append(entry("CRC-32C by table", data.nbytes / seconds / 1e9, "GB/s", None, None))
    return rows


def entry(name: str, rate: float, unit: str, ratio: float | None, target: float | None) -> Row:
    """One line: ``target`` is for the ratio where there is one, else for the rate."""
    value = rate if ratio is None else ratio
    return {
        "name": name,
        "rate": round(rate, 3),
        "unit": unit,
        "ratio": None if ratio is None else round(ratio, 3),
        "target": target,
        "met": None if target is None else value >= target,
    }


def table(rows: list[Row]) -> str:
    lines = [f"{'':44}{'rate':>22}{'ratio':>8}{'target':>8}"]
    for row in rows:
        rate = f"{row['rate']:.2f} {row['unit']}"
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
        target = "" if row["target"] is None else f"{row['target']:g}" + ("" if row["met"] else " !")
        lines.append(f"{row['name']:44}{rate:>22}{ratio:>8}{target:>8}")
    return "\n".join(lines)


PARTS = (dequantize, codebooks, trellises, tensors, quantize, bitmaps, peers, blocks, others)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=8192, help="rows of 4096 columns (default %(default)s)")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--isa", choices=native.available_isas(), default=native.isa())
    parser.add_argument("--only", choices=[part.__name__ for part in PARTS])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    native.set_isa(arguments.isa)
    shape = (arguments.rows, 4096)
    weights = cast(np.random.default_rng(0).standard_normal(shape, np.float32) * np.float32(0.05), "bf16")
    rows = []
    for part in PARTS:
        if arguments.only in (None, part.__name__):
            rows += part(weights, arguments.repeat)
    print(f"one thread, instruction set {arguments.isa}, {shape[0]} x {shape[1]} weights; ratio: to memcpy of the")
    print("output, or to the peer named in the line before; '!' marks a target that was missed")
    print(table(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps({"isa": arguments.isa, "shape": shape, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
