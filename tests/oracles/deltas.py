"""Differences: a stored tensor as the reference takes it, and ``spec/sparse_patch.md``."""

from __future__ import annotations

from math import prod

import numpy as np

from tests.support.reference import delta_add

from .common import Array, Stored, require_range


def delta_sparse(tensor: Stored, target: str) -> Array:
    values = tensor.wide("values")
    require_range(values, np.isfinite(values), target)
    return delta_add.placed(tensor.numbers("indices"), values, count=prod(tensor.shape)).reshape(tensor.shape)


def delta_sign(tensor: Stored, target: str) -> Array:
    scales = tensor.wide("scales")
    require_range(scales, np.isfinite(scales), target)
    bits = np.frombuffer(tensor.parts["packed_signs"][1], np.uint8)
    if not prod(tensor.shape):
        return np.zeros(tensor.shape, np.float32)
    return delta_add.sign(bits, 0, scales, count=prod(tensor.shape)).astype(np.float32).reshape(tensor.shape)


def delta_int4(tensor: Stored, target: str) -> Array:
    scale, zero = (float(tensor.wide(role)[0]) for role in ("scale", "zero_point"))
    table = np.arange(16, dtype=np.float32) / np.float32(15) * np.float32(scale * 15) + np.float32(zero)
    require_range(table, np.isfinite(table), target)
    values = tensor.wide("outlier_vals")
    require_range(values, np.isfinite(values), target)
    packed = np.frombuffer(tensor.parts["packed"][1], np.uint8)
    positions, gaps = tensor.numbers("outlier_idx").astype(np.int64), tensor.params["layout"] != 2
    return delta_add.int4(packed, 0, table, positions, values, gaps=gaps, count=prod(tensor.shape)).reshape(
        tensor.shape
    )


def sparse_patch(tensor: Stored, base: Array) -> Array:
    """The fine-tune's words from the base's."""
    positions = tensor.numbers("indices").astype(np.int64)
    if tensor.params["encoding"] == "gap_delta":
        positions = np.cumsum(positions + 1) - 1
    out = base.reshape(-1).copy()
    out[positions] = np.frombuffer(tensor.parts["values"][1], base.dtype)
    return out.reshape(base.shape)


DELTAS = {"delta_sparse": delta_sparse, "delta_sign": delta_sign, "delta_int4": delta_int4}
