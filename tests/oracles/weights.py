"""Weights in codes, from ``spec/affine.md``, ``palette.md``, ``sparse*.md``, ``with_outliers.md``,
``low_rank.md``, ``with_low_rank.md``, ``scaled_codebook.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import numpy as np

from .common import Array, RefusedError, Stored, as_float, require_range, rounded, stream

Decoder = Callable[[Stored, str], Array]


def dense(tensor: Stored, target: str) -> Array:
    values = tensor.wide("data")
    require_range(values, np.isfinite(values), target)
    return values.reshape(tensor.shape)


def affine(tensor: Stored, target: str) -> Array:
    """``w = s (q - z)`` or ``s q + z``, each step in f32."""
    params = tensor.params
    rows, cols = params.get("matrix", tensor.matrix)
    if "codec_version" not in params:  # zTensor's own attributes
        count, word = params["packing"].split("_per_")
        per_row = -(-cols // int(count)) * int(word[1:]) // 8
        settings: Mapping[str, Any] = {"granularity": "group", "signed": False, "zeros": "zeros" in tensor.parts}
    else:
        per_row, settings = -(-cols * params["bits"] // 8), params
    bits, data = params["bits"], tensor.parts["packed_weight"][1]
    if params["packing"] == "flat_lsb":
        codes = stream(data, bits, rows * cols).reshape(rows, cols)
    else:
        high = params["packing"] == "rows_msb"
        each = [stream(data[r * per_row : (r + 1) * per_row], bits, cols, high_first=high) for r in range(rows)]
        codes = np.array(each, np.int64).reshape(rows, cols)
    if settings["signed"]:
        codes = np.where(codes >= 1 << bits - 1, codes - (1 << bits), codes)
    index = _scale_index(tensor, settings["granularity"], rows, cols)
    scale = tensor.wide("scales")[index] if codes.size else np.empty(codes.shape, np.float32)
    point = params.get("zero_point", 0)
    zero = np.full(codes.shape, point, np.float32)
    if settings["zeros"] and codes.size:
        zero = tensor.wide("zeros")[index]
    number = codes.astype(np.float32)
    with np.errstate(all="ignore"):
        values = scale * number + zero if params.get("zero_kind") == "offset" else scale * (number - zero)
    require_range(values, np.isfinite(scale) & np.isfinite(zero), target)
    return values.reshape(tensor.shape)


def _scale_index(tensor: Stored, granularity: str, rows: int, cols: int) -> Array:
    row, column = np.indices((rows, cols))
    if granularity == "tensor":
        return np.zeros((rows, cols), np.int64)
    if granularity == "row":
        return row
    if granularity == "group":
        size = tensor.params["group_size"]
        return row * -(-cols // size) + column // size
    place, index = np.indices(tensor.shape), np.zeros(tensor.shape, np.int64)
    for axis, step in enumerate(tensor.params["block"]):
        index = index * (tensor.shape[axis] // step) + place[axis] // step
    return index.reshape(rows, cols)


def palette(tensor: Stored, target: str) -> Array:
    params, shape = tensor.params, list(tensor.shape)
    size, axis, bits, groups = (params[key] for key in ("vector_size", "vector_axis", "bits", "groups"))
    if size > 1:
        shape[axis] //= size
    index = stream(tensor.parts["indices"][1], bits, prod(shape)).reshape(shape)
    entries = tensor.wide("codebook").reshape(prod(groups), 1 << bits, size)
    values = entries
    if "codebook_scales" in tensor.parts:
        scales = tensor.wide("codebook_scales")
        if not np.isfinite(scales).all():
            raise RefusedError
        with np.errstate(all="ignore"):
            values = entries * scales.reshape(-1, 1, 1)
        require_range(values, np.isfinite(entries), "f32")
    require_range(values, np.isfinite(values), target)
    book, place = np.zeros(shape, np.int64), np.indices(shape) if shape else []
    for dimension, count in enumerate(groups):
        span = max(shape[dimension] // count, 1)
        book = book * count + place[dimension] // span
    found = values[book, index]  # [..., size]
    return np.moveaxis(found, -1, axis + 1).reshape(tensor.shape) if shape else found.reshape(())


def sparse_csr(tensor: Stored, target: str) -> Array:
    values, columns, starts = tensor.wide("values"), tensor.numbers("indices"), tensor.numbers("indptr")
    require_range(values, np.isfinite(values), target)
    out = np.zeros(tensor.shape, np.float32)
    for row in range(tensor.shape[0]):
        for at in range(int(starts[row]), int(starts[row + 1])):
            out[row, int(columns[at])] = values[at]
    return out


def sparse_coo(tensor: Stored, target: str) -> Array:
    values = tensor.wide("values")
    require_range(values, np.isfinite(values), target)
    out = np.zeros(tensor.shape, np.float32)
    out[tuple(tensor.numbers("coords").reshape(len(tensor.shape), -1).astype(np.int64))] = values
    return out


def sparse_mask(tensor: Stored, target: str) -> Array:
    inner = tensor.params["inner"]
    keep = stream(tensor.parts["mask"][1], 1, prod(tensor.shape)).astype(bool)
    out = np.zeros(keep.size, np.float32)
    if inner["codec"] == "dense":
        values = tensor.wide("nonzeros")
        require_range(values, np.isfinite(values), target)
        out[keep] = values
        return out.reshape(tensor.shape)
    bits = inner["params"]["bits"]
    codes = np.zeros(keep.size, np.int64)
    codes[keep] = stream(tensor.parts["nonzeros"][1], bits, int(keep.sum()))
    role = "indices" if inner["codec"] == "palette" else "packed_weight"
    packed = _packed(codes, inner["params"], role, tensor)
    parts = {name: part for name, part in tensor.parts.items() if name not in ("mask", "nonzeros")}
    whole = tensor.within(codec=inner["codec"], params=inner["params"], parts={**parts, role: ("u8", packed)})
    return np.where(keep, decode(whole, target).reshape(-1), np.float32(0)).reshape(tensor.shape)


def _packed(codes: Array, params: Mapping[str, Any], role: str, tensor: Stored) -> bytes:
    """Lay codes out as the dense tensor has them: one stream, or rows that begin at a byte."""
    bits = params["bits"]
    raw = (codes[:, None] >> np.arange(bits) & 1).astype(np.uint8)
    if role == "indices" or params["packing"] == "flat_lsb":
        return np.packbits(raw.reshape(-1), bitorder="little").tobytes()
    rows, cols = params.get("matrix", tensor.matrix)
    return np.packbits(raw.reshape(rows, cols * bits), axis=1, bitorder="little").tobytes()


def sparse_blocks(tensor: Stored, target: str) -> Array:
    params = tensor.params
    axis, size = params["axis"], params["block"]
    blocks = stream(tensor.parts["mask"][1], 1, -(-params["channels"] // size))
    kept = [channel for channel in range(params["channels"]) if blocks[channel // size]]
    shape = list(tensor.shape)
    shape[axis] = len(kept)
    parts = {role: part for role, part in tensor.parts.items() if role != "mask"}
    within = tensor.within(shape=tuple(shape), codec=params["inner"], params=params["inner_params"], parts=parts)
    out = np.zeros(tensor.shape, np.float32)
    if params.get("stored") == "whole":
        found = decode(within.within(shape=tensor.shape), target)
        found = found[:, kept] if axis else found[kept]
    else:
        found = decode(within, target)
    if axis:
        out[:, kept] = found
    else:
        out[kept] = found
    return out


def with_outliers(tensor: Stored, target: str) -> Array:
    params = tensor.params
    own = ("outlier_positions", "outlier_values")
    parts = {role: part for role, part in tensor.parts.items() if role not in own}
    rest = tensor.within(codec=params["inner"], params=params["inner_params"], parts=parts)
    out = decode(rest, target).reshape(tensor.matrix).copy()
    values = tensor.wide("outlier_values").reshape(len(out), params["per_row"])
    require_range(values, np.isfinite(values), target)
    columns = tensor.numbers("outlier_positions").reshape(len(out), params["per_row"])
    for row in range(len(out)):
        out[row, columns[row].astype(np.int64)] = values[row]
    return out.reshape(tensor.shape)


def low_rank(tensor: Stored, target: str) -> Array:
    rows, cols = tensor.matrix
    rank = tensor.params["rank"]
    left, right = tensor.wide("left").reshape(rows, rank), tensor.wide("right").reshape(rank, cols)
    total = np.zeros((rows, cols), np.float32)
    with np.errstate(all="ignore"):
        for k in range(rank):
            total = total + left[:, k : k + 1] * right[k]
    sound = np.logical_and.outer(np.isfinite(left).all(axis=1), np.isfinite(right).all(axis=0))
    require_range(total, sound, target)
    return total.reshape(tensor.shape)


def with_low_rank(tensor: Stored, target: str) -> Array:
    params = tensor.params
    thin = {role: tensor.parts[role] for role in ("left", "right")}
    rest = {role: part for role, part in tensor.parts.items() if role not in thin}
    inner = tensor.within(codec=params["inner"], params=params["inner_params"], parts=rest, dtype="f32")
    product = tensor.within(codec="low_rank", params={"rank": params["rank"]}, parts=thin, dtype="f32")
    base, more = decode(inner, "f32"), low_rank(product, "f32")
    with np.errstate(all="ignore"):
        total = (base + more).astype(np.float32)
    require_range(total, np.isfinite(base) & np.isfinite(more), target)
    return total


def scaled_codebook(tensor: Stored, target: str) -> Array:
    params = tensor.params
    (rows, cols), table = tensor.matrix, tensor.wide("codebook")
    if not rows * cols:
        return np.zeros(tensor.shape, np.float32)
    indices = stream(tensor.parts["indices"][1], params["bits"], rows * cols).reshape(rows, cols)
    groups = 1 if params["granularity"] == "row" else cols // params["group_size"]
    scales = tensor.wide("scales").reshape(rows, groups).repeat(cols // groups, axis=1)
    entries = table[indices.astype(np.int64)]
    with np.errstate(all="ignore"):
        total = (scales * entries).astype(np.float32)
    require_range(total, np.isfinite(entries) & np.isfinite(scales), target)
    return total.reshape(tensor.shape)


DECODERS: dict[str, Decoder] = {
    "dense": dense,
    "affine": affine,
    "quantized_group": affine,  # as attributes name it
    "palette": palette,
    "sparse_csr": sparse_csr,
    "sparse_coo": sparse_coo,
    "sparse_mask": sparse_mask,
    "sparse_blocks": sparse_blocks,
    "with_outliers": with_outliers,
    "low_rank": low_rank,
    "with_low_rank": with_low_rank,
    "scaled_codebook": scaled_codebook,
}


def decode(tensor: Stored, target: str) -> Array:
    """The values in f32, before the one rounding to ``target``; ``RefusedError`` where that has no room for one."""
    return DECODERS[tensor.codec](tensor, target)


__all__ = ["DECODERS", "as_float", "decode", "rounded"]
