"""Differences, from ``spec/wdelta.md`` and ``spec/sparse_patch.md``."""

from __future__ import annotations

from math import prod

import numpy as np

from .common import Array, Stored, require_range


def delta_sparse(tensor: Stored, target: str) -> Array:
    out = np.zeros(prod(tensor.shape), np.float32)
    out[tensor.numbers("indices")] = tensor.wide("values")
    require_range(out, np.isfinite(out), target)
    return out.reshape(tensor.shape)


def delta_sign(tensor: Stored, target: str) -> Array:
    scales = tensor.wide("scales")
    require_range(scales, np.isfinite(scales), target)
    bits = np.unpackbits(np.frombuffer(tensor.parts["packed_signs"][1], np.uint8))[: prod(tensor.shape)]
    rows = tensor.shape[0] if len(tensor.shape) > 1 else 1
    scale = np.repeat(scales, bits.size // rows if rows else 0)
    return np.where(bits == 1, scale, -scale).astype(np.float32).reshape(tensor.shape)


def delta_int4(tensor: Stored, target: str) -> Array:
    size, positions = prod(tensor.shape), tensor.numbers("outlier_idx").astype(np.int64)
    packed = np.frombuffer(tensor.parts["packed"][1], np.uint8)
    codes = np.stack([packed >> 4, packed & 15], axis=1).reshape(-1)
    scale, zero = (float(tensor.wide(role)[0]) for role in ("scale", "zero_point"))
    table = np.arange(16, dtype=np.float32) / np.float32(15) * np.float32(scale * 15) + np.float32(zero)
    require_range(table, np.isfinite(table), target)
    out = np.empty(size, np.float32)
    rest = np.ones(size, bool)
    rest[positions] = tensor.params["layout"] == 2
    out[rest] = table[codes[: int(rest.sum())]]
    values = tensor.wide("outlier_vals")
    require_range(values, np.isfinite(values), target)
    out[positions] = values
    return out.reshape(tensor.shape)


def sparse_patch(tensor: Stored, base: Array) -> Array:
    """The fine-tune's words from the base's."""
    positions = tensor.numbers("indices").astype(np.int64)
    if tensor.params["encoding"] == "gap_delta":
        positions = np.cumsum(positions + 1) - 1
    out = base.reshape(-1).copy()
    out[positions] = np.frombuffer(tensor.parts["values"][1], base.dtype)
    return out.reshape(base.shape)


DELTAS = {"delta_sparse": delta_sparse, "delta_sign": delta_sign, "delta_int4": delta_int4}
