"""Random tensors of every codec, encoded by Ingot or made of random parts, compared with the oracles bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from ingot.codecs.delta.base import delta_codec
from ingot.codecs.table import CODECS
from ingot.core.numeric.dtypes import DTYPES, numpy_dtype
from ingot.errors import CodecError, IngotError, UnsupportedError
from ingot.model.layouts.trellis import TrellisLayout
from ingot.model.part import memory_part
from ingot.model.tensor import Array, Tensor
from ingot.testing.codecs import encode_tensor
from ingot.testing.values import random_bits

from . import deltas, exact, textures, weights
from .common import RefusedError, Stored, as_float, rounded

TARGETS = ("f32", "f16", "bf16")
Random = np.random.Generator


@dataclass(frozen=True)
class Made:
    """A tensor, and the base where it is a difference of bits."""

    tensor: Tensor
    base: Array | None = None

    @property
    def stored(self) -> Stored:
        item = self.tensor
        parts = {role: (part.dtype, bytes(part.view())) for role, part in item.parts.items()}
        return Stored(item.shape, item.dtype, item.codec, dict(item.params), parts)


def pick(rng: Random, *choices: Any) -> Any:
    return choices[int(rng.integers(len(choices)))]


def shape_of(rng: Random, *, rank: int | None = None, most: int = 24) -> tuple[int, ...]:
    rank = int(rng.integers(0, 5)) if rank is None else rank
    sizes = [int(rng.integers(0, 5 if rank > 2 else most)) for _ in range(rank)]
    return tuple(size or (0 if rng.random() < 0.1 else 1) for size in sizes)


def values_of(rng: Random, shape: tuple[int, ...], dtype: str, *, exponents: tuple[int, int] = (-12, 4)) -> Array:
    """Ordinary weights of any size, with zeros and outliers."""
    found = rng.normal(0, 1, shape) * 2.0 ** rng.integers(*exponents)
    found = np.where(rng.random(shape) < 0.05, found * 30, np.where(rng.random(shape) < 0.1, 0.0, found))
    return np.asarray(found, np.float32).astype(numpy_dtype(dtype))


def encoded(rng: Random, codec: str, options: Mapping[str, Any], *, rank: int | None = None) -> Made | None:
    dtype, shape = pick(rng, "f32", "f16", "bf16"), shape_of(rng, rank=rank)
    if dtype == "f32" and rng.random() < 0.15:
        source = values_of(rng, shape, dtype, exponents=(-120, 110))
    else:
        source = values_of(rng, shape, dtype)
    return made(codec, source, options, dtype)


def made(codec: str, source: Array, options: Mapping[str, Any], dtype: str) -> Made | None:
    """None where the codec refuses this shape or these values, by a rule."""
    try:
        with np.errstate(all="ignore"):
            return Made(encode_tensor(CODECS[codec], source, dict(options), dtype=dtype))
    except (UnsupportedError, CodecError):
        return None


def affine_options(rng: Random) -> dict[str, Any]:
    bits = int(rng.integers(2, 9))
    options: dict[str, Any] = {"bits": bits, "group": pick(rng, "row", "tensor", 1, 3, 8, 32)}
    options["scales"] = pick(rng, "f16", "bf16", "f32", "source")
    options["quantizer"] = quantizer = pick(rng, "absmax", "minmax", "mse")
    options["bit_order"] = pick(rng, "lsb", "msb")
    if quantizer != "absmax" and rng.random() < 0.6:
        options["symmetric"] = False
        if options["group"] != "tensor" and rng.random() < 0.4:
            options["zero_kind"] = "offset"
        elif rng.random() < 0.5:
            options["signed"] = True
    elif quantizer != "minmax" and options["group"] != "tensor" and rng.random() < 0.3:
        options["zero_point"] = int(rng.integers(1, 2**bits - 1))
    if options["group"] != "tensor" and options.get("zero_kind") != "offset" and rng.random() < 0.2:
        options["unbiased"] = True
    if options["group"] != "tensor" and rng.random() < 0.3:
        options["cut"] = "axis0"
    if rng.random() < 0.1:
        options = {"bits": 1, "quantizer": pick(rng, "sign", "sign-rms"), "group": pick(rng, "row", 5)}
    return options


def affine_encoded(rng: Random) -> Made | None:
    return encoded(rng, "affine", affine_options(rng))


def affine_parts(rng: Random) -> Made | None:
    """Any parameters, with codes, scales and zero points of any bits."""
    bits, shape = int(rng.integers(1, 9)), shape_of(rng, most=13)
    rows, cols = (prod(shape[:-1]), shape[-1]) if shape else (1, 1)
    kind = pick(rng, "f16", "bf16", "f32")
    granularity = pick(rng, "group", "row", "tensor", "blocks") if len(shape) and prod(shape) else "row"
    params: dict[str, Any] = {"codec_version": 1, "bits": bits, "granularity": granularity, "axis": -1}
    params |= {"packing": pick(rng, "rows_lsb", "rows_msb", "flat_lsb"), "signed": bool(rng.random() < 0.5)}
    zeros = bool(rng.random() < 0.6)
    params |= {"zeros": zeros, "dtype": pick(rng, "f32", "f16", "bf16")}
    if granularity != "blocks" and prod(shape) and rng.random() < 0.25:
        params["matrix"] = [rows, cols] = pick(rng, [1, prod(shape)], [prod(shape), 1], [shape[0] if shape else 1, -1])
        if cols < 0:
            params["matrix"] = [rows, cols] = [rows, prod(shape) // rows]
    count = {"row": rows, "tensor": 1}.get(granularity, 0)
    if granularity == "group":
        params["group_size"] = size = int(rng.integers(1, cols + 3))
        count = rows * -(-cols // size)
    if granularity == "blocks":
        params["block"] = block = [pick(rng, *(k for k in range(1, n + 1) if n % k == 0)) for n in shape]
        count = prod(n // k for n, k in zip(shape, block, strict=True))
    if zeros and rng.random() < 0.4:
        params["zero_kind"] = "offset"
    elif not zeros and rng.random() < 0.3:
        half = 1 << bits - 1
        params["zero_point"] = int(rng.integers(-half, half)) if params["signed"] else int(rng.integers(0, 2 * half))
    size = -(-rows * cols * bits // 8) if params["packing"] == "flat_lsb" else rows * -(-cols * bits // 8)
    parts = {"packed_weight": memory_part(rng.integers(0, 256, size).astype(np.uint8), "u8")}
    for role in ("scales", "zeros") if zeros else ("scales",):
        wild = rng.random() < 0.3
        numbers = random_bits(rng, (count,), kind) if wild else rng.normal(0, 1, count).astype(numpy_dtype(kind))
        parts[role] = memory_part(numbers, kind)
    if params["packing"] == "flat_lsb" and size and rows * cols * bits % 8:
        last = parts["packed_weight"].array().copy()
        last[-1] &= (1 << rows * cols * bits % 8) - 1
        parts["packed_weight"] = memory_part(last, "u8")
    return Made(Tensor("t", shape, params["dtype"], "affine", parts, params, CODECS["affine"]))


def affine_plain(rng: Random) -> Made | None:
    """zTensor's own attributes."""
    bits = pick(rng, 1, 2, 4, 8)
    word = pick(rng, "u8", "i32", "u64", "u16")
    width = int(word[1:])
    rows, cols = shape_of(rng, rank=2)
    params = {"bits": bits, "group_size": int(rng.integers(1, cols + 3)), "packing": f"{width // bits}_per_{word}"}
    size = rows * -(-cols * bits // width)
    packed = np.frombuffer(rng.bytes(size * width // 8), f"<{word[0]}{width // 8}")
    scales = rng.normal(0, 1, rows * -(-cols // params["group_size"])).astype(np.float16)
    parts = {"packed_weight": memory_part(packed, word), "scales": memory_part(scales, "f16")}
    if rng.random() < 0.5:
        parts["zeros"] = memory_part(rng.integers(0, 1 << bits, scales.size).astype(np.float16), "f16")
    return Made(Tensor("t", (rows, cols), "f16", "affine", parts, params, CODECS["affine"]))


def palette_options(rng: Random, *, vectors: bool = True) -> dict[str, Any]:
    options: dict[str, Any] = {"bits": pick(rng, 1, 2, 3, 4, 6, 8), "entries": pick(rng, "f16", "bf16", "f32", "i8")}
    options |= {"scales": pick(rng, "f16", "f32"), "group": pick(rng, "tensor", 1, 2, 4)}
    if vectors and rng.random() < 0.4:
        options |= {"vector": 2, "group": pick(rng, "tensor", 2, 4), "vector_axis": pick(rng, 0, -1)}
    return options


def palette(rng: Random) -> Made | None:
    return encoded(rng, "palette", palette_options(rng), rank=int(rng.integers(1, 4)))


def sparse_mask(rng: Random) -> Made | None:
    options: dict[str, Any] = pick(rng, {}, {"sparsity": 0.5}, {"threshold": 0.01})
    options = {**options, **pick(rng, {}, {"row_alignment": 64})}
    inner = pick(rng, "dense", "palette", "affine")
    if inner == "palette":
        return encoded(rng, "sparse_mask", {**options, "inner": inner, "options": palette_options(rng, vectors=False)})
    if inner == "affine":
        within = {"bits": int(rng.integers(2, 9)), "group": pick(rng, "row", 3, 8), "cut": pick(rng, "rows", "axis0")}
        return encoded(rng, "sparse_mask", {**options, "inner": inner, "options": within})
    return encoded(rng, "sparse_mask", options)


def inner_of(rng: Random) -> dict[str, Any]:
    inner = pick(rng, "dense", "palette", "affine", "low_rank", "sparse_csr")
    within = {"palette": palette_options(rng), "affine": affine_options(rng), "low_rank": {"rank": 3}}
    return {"inner": inner, "options": within.get(inner, {})}


def sparse_blocks(rng: Random) -> Made | None:
    shape, axis, block = shape_of(rng, rank=2), int(rng.integers(2)), int(rng.integers(1, 6))
    count = -(-shape[axis] // block)
    mask = np.packbits(rng.random(count) < 0.6, bitorder="little").tobytes()
    options = {"axis": axis, "block": block, "mask": mask, "whole": bool(rng.integers(2)), **inner_of(rng)}
    dtype = pick(rng, "f32", "f16", "bf16")
    return made("sparse_blocks", values_of(rng, shape, dtype), options, dtype)


def with_outliers(rng: Random) -> Made | None:
    options = {"count": int(rng.integers(0, 4)), "values": pick(rng, "f16", "bf16", "f32"), **inner_of(rng)}
    return encoded(rng, "with_outliers", options)


def low_rank(rng: Random) -> Made | None:
    rows, cols, rank = (int(rng.integers(0, 9)) for _ in range(3))
    rank, kinds = min(rank, rows, cols), [pick(rng, "f16", "bf16", "f32") for _ in range(2)]
    wild = rng.random() < 0.4
    factors = [
        random_bits(rng, shape, kind) if wild else values_of(rng, shape, kind)
        for shape, kind in (((rows, rank), kinds[0]), ((rank, cols), kinds[1]))
    ]
    parts = {role: memory_part(item, kind) for role, item, kind in zip(("left", "right"), factors, kinds, strict=True)}
    params = {"codec_version": 1, "rank": rank, "dtype": "f32"}
    return Made(Tensor("t", (rows, cols), "f32", "low_rank", parts, params, CODECS["low_rank"]))


def with_low_rank(rng: Random) -> Made | None:
    inner = pick(rng, "affine", "palette", "scaled_codebook")
    within = {"affine": affine_options(rng), "palette": {"bits": 3}, "scaled_codebook": scaled_options(rng)}
    options = {"rank": int(rng.integers(0, 5)), "factors": pick(rng, "f16", "bf16", "f32")}
    return encoded(rng, "with_low_rank", {**options, "inner": inner, "options": within[inner]})


def scaled_options(rng: Random) -> dict[str, Any]:
    table = pick(rng, "nf4", "fp4", "iq4_nl", "f4_e2m1fn", "f6_e2m3fn", "f6_e3m2fn", "f8_e4m3fn", "f8_e5m2", "i8")
    scales = pick(rng, "f16", "bf16", "f32", "f8_e8m0fnu", "f8_e4m3fn", "f8_e5m2")
    options: dict[str, Any] = {"table": table, "scales": scales, "group": pick(rng, "row", "tensor", 1, 2, 4, (3, 5))}
    if isinstance(options["group"], int):
        options["flat"] = bool(rng.integers(0, 2))
    if scales != "f8_e8m0fnu":
        options["second"] = pick(rng, None, "multiply", "divide")
    if "4" in table.split("_")[0]:
        options["order"] = pick(rng, "low_first", "high_first")
    return options


def scaled_codebook(rng: Random) -> Made | None:
    item = encoded(rng, "scaled_codebook", scaled_options(rng))
    return item if item is None or rng.random() < 0.4 else Made(scaled_otherwise(rng, item.tensor))


def scaled_otherwise(rng: Random, tensor: Tensor) -> Tensor:
    """The same tensor with what no encoder makes."""
    params, parts, shape = {**tensor.params, "codec_version": 2}, dict(tensor.parts), tensor.shape
    if rng.random() < 0.5:
        params["factor"] = float(np.float32(rng.normal()))
    if len(shape) > 1 and rng.random() < 0.5:
        params["transposed"], shape = True, (*shape[:-2], shape[-1], shape[-2])
    if "second" not in params and rng.random() < 0.5:
        count = parts["scales"].nbytes // DTYPES[parts["scales"].type or parts["scales"].dtype].nbytes(1)
        params["nested"] = {"group_size": 3, "offset": float(np.float32(rng.normal() * 0.01))}
        params.pop("scale_dtype", None)
        parts["scales"] = memory_part(rng.integers(0, 256, count, dtype=np.uint8), "u8")
        parts["scale_codebook"] = memory_part(rng.normal(0, 1, 256).astype(np.float32), "f32")
        parts["scale_scales"] = memory_part(rng.normal(0, 1, -(-count // 3)).astype(np.float32), "f32")
    return replace(tensor, params=params, parts=parts, shape=shape)


def trellis(rng: Random) -> Made | None:
    """Streams and scales of any bits, in bands that no encoder makes too."""
    shape, bits, kind = shape_of(rng, most=40), int(rng.integers(2, 5)), pick(rng, "f16", "bf16", "f32")
    cols = shape[-1] if shape else 1
    group = pick(rng, *(size for size in range(1, cols + 1) if cols % size == 0)) if cols else 1
    layout = TrellisLayout(bits, group, pick(rng, 16, 32, 256), pick(rng, "f32", "f16", "bf16"), kind)
    item = made("trellis", np.ones(shape, np.float32), {"bits": bits, "group": group, "scales": kind}, layout.dtype)
    if item is None or rng.random() < 0.3:
        return item
    size, count = 2 * layout.words(shape), prod(shape) // group
    wild = rng.random() < 0.3
    numbers = random_bits(rng, (count,), kind) if wild else rng.normal(0, 1, count).astype(numpy_dtype(kind))
    streams = rng.integers(0, 256, size).astype(np.uint8)
    parts = {"streams": memory_part(streams, "u8"), "scales": memory_part(numbers, kind)}
    return Made(replace(item.tensor, dtype=layout.dtype, params=layout.attributes(), parts=parts))


def sparse(codec: str) -> Callable[[Random], Made | None]:
    def case(rng: Random) -> Made | None:
        dtype = pick(rng, "f32", "f16", "bf16")
        shape = shape_of(rng, rank=2 if codec == "sparse_csr" else int(rng.integers(1, 4)))
        return made(codec, random_bits(rng, shape, dtype, zeros=0.7), {}, dtype)

    return case


def difference(codec: str) -> Callable[[Random], Made | None]:
    def case(rng: Random) -> Made | None:
        options: dict[str, Any] = {}
        if codec == "delta_int4":
            options = {"layout": pick(rng, 1, 2), "outlier_fraction": pick(rng, 0, 0.1, 1)}
        if codec == "delta_sparse":
            options = {"sparsity": pick(rng, 0, 0.5, 0.9)}
        source = values_of(rng, shape_of(rng), "f32", exponents=(-20, 12))
        return made(codec, source, options, "f32")

    return case


def float_entropy(rng: Random) -> Made | None:
    dtype = pick(rng, "f64", "f32", "f16", "bf16", "f8_e4m3fn", "f8_e5m2")
    shape = pick(rng, (), (0, 3), (int(rng.integers(1, 700)),), (20, 61))
    options = {"level": pick(rng, "fast", "max"), "chunk": pick(rng, 256, 512, 4096)}
    if rng.random() < 0.04:  # large enough for rANS
        shape, options = (int(rng.integers(65_536, 67_000)),), {"level": "max"}
    way = rng.random()
    if way < 0.3:
        source = random_bits(rng, shape, dtype, zeros=0.3)
    elif way < 0.4:
        source = np.zeros(shape, numpy_dtype(dtype))
    else:
        source = np.asarray(rng.normal(0, 0.02, shape), np.float32).astype(numpy_dtype(dtype))
    return made("float_entropy", source, options, dtype)


def tca_tbe(rng: Random) -> Made | None:
    shape = pick(rng, (), (0, 3), (int(rng.integers(1, 70)), int(rng.integers(1, 140))), (65, 64))
    source = random_bits(rng, shape, "bf16") if rng.random() < 0.3 else values_of(rng, shape, "bf16")
    return made("tca_tbe", source, pick(rng, {}, {"start": int(rng.integers(-1, 249))}), "bf16")


def astc(rng: Random) -> Made | None:
    footprint = pick(rng, "4x4", "5x4", "6x6", "8x5", "10x8", "12x12")
    return encoded(rng, "astc", {"footprint": footprint, "quality": 0}, rank=int(rng.integers(0, 3)))


EXACT = tuple(row.name for row in DTYPES.values() if row.bits >= 8 and row.category != "c")


def exact_delta(codec: str) -> Callable[[Random], Made | None]:
    def case(rng: Random) -> Made | None:
        dtype, shape = pick(rng, *EXACT), pick(rng, (), (0, 3), (int(rng.integers(1, 900)),), (9, 80))
        large = codec == "delta_exact" and rng.random() < 0.04  # enough for rANS
        if large:
            shape = (int(rng.integers(65_536, 67_000)),)
        base = random_bits(rng, shape, dtype, zeros=0.2)
        word = np.dtype(f"u{base.dtype.itemsize}")
        steps = rng.integers(-pick(rng, 1, 5, 40), 6, shape) * (rng.random(shape) < pick(rng, 0.02, 0.3, 1.0))
        tuned = (base.view(word) + np.asarray(steps).astype(word)).view(base.dtype)
        if DTYPES[dtype].category == "b" or rng.random() < 0.2:
            tuned = np.where(rng.random(shape) < 0.3, random_bits(rng, shape, dtype), base).astype(base.dtype)
        old, new = base.reshape(-1, 1), np.asarray(tuned).reshape(-1, 1)
        options: dict[str, Any] = {"chunk": 1 << 17 if large else pick(rng, 256, 512)} if codec == "delta_exact" else {}
        encoder = delta_codec(codec).encoder(shape, dtype, options)
        for _ in range(encoder.fit_passes):
            encoder.fit_pass(old, new)
        found = encoder.encode(old, new)
        kinds = {part.role: part for part in encoder.parts}
        parts = {role: memory_part(array, kinds[role].dtype, kinds[role].type) for role, array in found.items()}
        return Made(Tensor("t", shape, dtype, codec, parts, dict(encoder.params), CODECS[codec]), base)

    return case


CASES: dict[str, Callable[[Random], Made | None]] = {
    "affine": affine_encoded,
    "affine, random parts": affine_parts,
    "affine, zTensor's attributes": affine_plain,
    "palette": palette,
    "sparse_mask": sparse_mask,
    "sparse_blocks": sparse_blocks,
    "sparse_csr": sparse("sparse_csr"),
    "sparse_coo": sparse("sparse_coo"),
    "with_outliers": with_outliers,
    "low_rank": low_rank,
    "with_low_rank": with_low_rank,
    "scaled_codebook": scaled_codebook,
    "trellis": trellis,
    "delta_sparse": difference("delta_sparse"),
    "delta_sign": difference("delta_sign"),
    "delta_int4": difference("delta_int4"),
    "float_entropy": float_entropy,
    "tca_tbe": tca_tbe,
    "astc": astc,
    "delta_exact": exact_delta("delta_exact"),
    "sparse_patch": exact_delta("sparse_patch"),
}


def differs(item: Made) -> str | None:
    """Compare what Ingot makes of a tensor with what the spec says; None where they agree."""
    stored = item.stored
    if item.base is not None:
        word = f"u{item.base.dtype.itemsize}"
        out = np.empty_like(item.base)
        applier = delta_codec(stored.codec).applier(item.tensor, stored.dtype)
        applier.apply(item.base.reshape(-1, 1), out.reshape(-1, 1))
        applier.finish()
        how = exact.delta_exact if stored.codec == "delta_exact" else deltas.sparse_patch
        return None if out.view(word).tobytes() == how(stored, item.base.view(word)).tobytes() else "bits"
    if stored.codec in ("float_entropy", "tca_tbe"):
        wanted = (exact.float_entropy if stored.codec == "float_entropy" else exact.tca_tbe)(stored)
        return None if item.tensor.numpy().tobytes() == wanted.tobytes() else "bits"
    decode = {**deltas.DELTAS, "astc": textures.astc}.get(stored.codec, weights.decode)
    return next((found for target in TARGETS if (found := _target(item.tensor, stored, decode, target))), None)


def _target(tensor: Tensor, stored: Stored, decode: weights.Decoder, target: str) -> str | None:
    try:
        wanted: Array | None = rounded(decode(stored, target), target)
    except RefusedError:
        wanted = None
    try:
        found = tensor.numpy(target)
    except IngotError as error:
        return None if wanted is None else f"{target}: refused by {error.rule}, and should not"
    if wanted is None:
        return f"{target}: should have been refused"
    words = found.view(wanted.dtype)
    both = np.isnan(as_float(words, target)) & np.isnan(as_float(wanted, target))
    same = (words.view(f"u{words.itemsize}") == wanted.view(f"u{words.itemsize}")) | both
    return None if bool(same.all()) else f"{target}: {int((~same).sum())} of {same.size} values"
