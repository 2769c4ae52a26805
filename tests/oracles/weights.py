"""Weights in codes: a stored tensor as the references take it.

What no reference has is written from ``spec/affine.md``, ``sparse*.md``, ``with_outliers.md``, ``low_rank.md``,
``with_low_rank.md``, ``scaled_codebook.md`` and ``trellis.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from statistics import NormalDist
from typing import Any

import numpy as np

from tests.support.reference import affine as affine_reference
from tests.support.reference import palette as palette_reference
from tests.support.reference import trellis as trellis_reference

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
    number = affine_reference.values_of(codes, bits, signed=settings["signed"])
    index = _scale_index(tensor, settings["granularity"], rows, cols)
    scale = tensor.wide("scales")[index] if codes.size else np.empty(codes.shape, np.float32)
    point = params.get("zero_point", 0)
    zero = np.full(codes.shape, point, np.float32)
    if settings["zeros"] and codes.size:
        zero = tensor.wide("zeros")[index]
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
    parts = {role: tensor.wide(role) for role in tensor.parts if role != "indices"}
    values = parts["codebook"]
    if "codebook_scales" in parts:
        scales = parts["codebook_scales"]
        if not np.isfinite(scales).all():
            raise RefusedError
        entries = values.reshape(scales.size, -1)
        with np.errstate(all="ignore"):
            values = entries * scales.reshape(-1, 1)
        require_range(values, np.isfinite(entries), "f32")
    require_range(values, np.isfinite(values), target)
    parts["indices"] = np.frombuffer(tensor.parts["indices"][1], np.uint8)
    with np.errstate(all="ignore"):
        return palette_reference.decode(parts, tensor.params, tensor.shape)


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
    rows, cols = tensor.matrix
    width = cols + -cols % tensor.params.get("row_alignment", 1)
    keep = stream(tensor.parts["mask"][1], 1, rows * width).astype(bool).reshape(rows, width)[:, :cols].reshape(-1)
    if inner["codec"] == "dense":
        values = tensor.wide("nonzeros")
        require_range(values, np.isfinite(values), target)
        return palette_reference.expand(np.packbits(keep, bitorder="little"), values, keep.size).reshape(tensor.shape)
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


def small(codes: Array, exponent: int, mantissa: int, *, name: str) -> Array:
    """Numbers of a sign, ``exponent`` and ``mantissa`` bits as OCP has them, as f32."""
    bias, sign = (1 << (exponent - 1)) - 1, np.where(codes >> (exponent + mantissa) & 1, -1.0, 1.0)
    power, rest = codes >> mantissa & ((1 << exponent) - 1), codes & ((1 << mantissa) - 1)
    found = np.where(power > 0, (1 + rest / 2.0**mantissa) * 2.0 ** (power - bias), rest * 2.0 ** (1 - bias - mantissa))
    if name == "f8_e4m3fn":
        found = np.where(codes & 127 == 127, np.nan, found)
    if name == "f8_e5m2":
        found = np.where(power == 31, np.where(rest > 0, np.nan, np.inf), found)
    return np.asarray(sign * found, np.float32)


FIELDS = {"f4_e2m1fn": (2, 1), "f6_e2m3fn": (2, 3), "f6_e3m2fn": (3, 2), "f8_e4m3fn": (4, 3), "f8_e5m2": (5, 2)}


_NORMAL = "-1 -0.6961928 -0.52507305 -0.3949175 -0.28444138 -0.18477343 -0.091050036 0 0.0795803 0.1609302 0.2461123"
_NORMAL += " 0.33791524 0.44070983 0.562617 0.72295684 1"
NAMED = {
    "nf4": np.array([np.float32(text) for text in _NORMAL.split()]),
    "fp4": np.array([sign * entry for sign in (1, -1) for entry in (0, 1 / 16, 8, 12, 4, 6, 2, 3)], np.float32)
    / np.float32(12),
    "iq4_nl": np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32),
}


def numbers(codes: Array, name: str) -> Array:
    if name in NAMED:
        return NAMED[name][codes.astype(np.int64)]
    if name == "i8":
        return codes.astype(np.uint8).view(np.int8).astype(np.float32)
    if name == "f8_e8m0fnu":
        return np.where(codes == 255, np.nan, 2.0 ** (codes.astype(np.float64) - 127)).astype(np.float32)
    return small(codes.astype(np.int64), *FIELDS[name], name=name)


def stored_scales(tensor: Stored) -> Array:
    params = tensor.params
    if "nested" in params:
        nested, codes = params["nested"], tensor.numbers("scales")
        outer = tensor.wide("scale_scales")[np.arange(codes.size) // nested["group_size"]]
        return (tensor.wide("scale_codebook")[codes] * outer).astype(np.float32) + np.float32(nested["offset"])
    kind = params.get("scale_dtype")
    scales = numbers(tensor.numbers("scales"), kind) if kind else tensor.wide("scales")
    if "second" not in params:
        return scales
    second = tensor.wide("second_scale")[0]
    return np.asarray(scales * second if params["second"] == "multiply" else scales / second, np.float32)


def scale_index(params: Mapping[str, Any], shape: tuple[int, ...]) -> Array:
    """Which scale each element has, in the shape as stored."""
    inner, cols = (1, *shape)[-2:] if shape else (1, 1)
    flat = np.arange(prod(shape))
    row, col = flat // cols, flat % cols
    match params["granularity"]:
        case "tensor":
            return flat * 0
        case "row":
            return row
        case "flat":
            return flat // params["group_size"]
        case "group":
            return row * (cols // params["group_size"]) + col // params["group_size"]
    tall, wide = params["block"]
    matrix, line = row // inner, row % inner
    return (matrix * -(-inner // tall) + line // tall) * -(-cols // wide) + col // wide


def scaled_codebook(tensor: Stored, target: str) -> Array:
    params, count = tensor.params, prod(tensor.shape)
    if not count:
        return np.zeros(tensor.shape, np.float32)
    shape = tensor.shape
    if params.get("transposed"):
        shape = (*shape[:-2], shape[-1], shape[-2])
    high = params.get("order") == "high_first"
    indices = stream(tensor.parts["indices"][1], params["bits"], count, high_first=high)
    named = params.get("values")
    entries = numbers(indices, named) if named else tensor.wide("codebook")[indices.astype(np.int64)]
    with np.errstate(all="ignore"):
        scales = stored_scales(tensor)[scale_index(params, shape)]
        total = (scales * entries).astype(np.float32)
        if "factor" in params:
            total = total * np.float32(params["factor"])
    require_range(total, np.isfinite(entries) & np.isfinite(scales), target)
    found = total.reshape(shape)
    return np.ascontiguousarray(found.swapaxes(-1, -2)) if params.get("transposed") else found


def trellis(tensor: Stored, target: str) -> Array:
    params, bits = tensor.params, tensor.params["bits"]
    count = prod(tensor.shape)
    if not count:
        return np.zeros(tensor.shape, np.float32)
    cols, inner = (tensor.shape or (1,))[-1], tensor.shape[-2] if len(tensor.shape) > 1 else 1
    normal, step = NormalDist(), {2: 3043, 3: 1543, 4: 263}[bits]
    ranks = [step * window % 4096 for window in range(4096)]
    upper = {rank: np.float16(normal.inv_cdf((rank + 0.5) / 4096)) for rank in range(2048, 4096)}
    values = np.array([upper[r] if r >= 2048 else -upper[4095 - r] for r in ranks], np.float32)
    words, found, place = np.frombuffer(tensor.parts["streams"][1], "<u2"), np.zeros((count // cols, cols), np.int64), 0
    for first in range(0, count // cols, inner):
        for start in range(first, first + inner, params["band"]):
            rows = min(params["band"], first + inner - start)
            held = -(-rows * bits // 16)
            band = words[place : place + held * cols]
            if rows * bits % 16 and (band[-cols:] >> rows * bits % 16).any():
                raise RefusedError
            found[start : start + rows] = trellis_reference.windows(band, bits, rows, cols)
            place += held * cols
    with np.errstate(all="ignore"):
        scales = np.repeat(tensor.wide("scales").reshape(count // cols, -1), params["group_size"], 1)
        product = (scales * values[found]).astype(np.float32)
    require_range(product.reshape(-1), np.isfinite(scales).reshape(-1), target)
    return product.reshape(tensor.shape)


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
    "trellis": trellis,
}


def decode(tensor: Stored, target: str) -> Array:
    """The values in f32, before the one rounding to ``target``; ``RefusedError`` where that has no room for one."""
    return DECODERS[tensor.codec](tensor, target)


__all__ = ["DECODERS", "as_float", "decode", "rounded"]
