"""Matrices of the affine family for tests of what computes from packed weights."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ingot.codecs.affine.matmul import PackedMatrix
from ingot.core.numeric.dtypes import numpy_dtype
from ingot.model.layouts.affine import NO_ZERO, OFFSETS, PER_TENSOR, POINTS, ROW, AffineLayout, Constant, Group
from tests.support.reference import affine
from tests.support.reference.affine_matmul import Weights

PLAIN = AffineLayout(4, Group(32), "rows_lsb", True, NO_ZERO, "f32")
KINDS = (
    PLAIN,
    replace(PLAIN, signed=False, zero=POINTS),
    replace(PLAIN, signed=False, zero=OFFSETS, grid=Group(64)),
    replace(PLAIN, signed=False, zero=Constant(7)),
    replace(PLAIN, bits=8, grid=ROW),
    replace(PLAIN, bits=8, grid=PER_TENSOR, signed=False, zero=POINTS),
    replace(PLAIN, bits=3, grid=Group(7)),
    replace(PLAIN, bits=5, packing="rows_msb", grid=ROW, zero=POINTS),
    replace(PLAIN, packing="rows_msb"),
    replace(PLAIN, packing="8_per_i32", signed=False),
)


def matrix(params: AffineLayout, rows: int, cols: int, scale_dtype: str = "f16", seed: int = 0) -> PackedMatrix:
    """Return a matrix of random codes."""
    rng = np.random.default_rng(seed)
    packed = rng.integers(0, 256, rows * params.row_bytes(cols), np.uint8)
    shape = params.scale_shape(rows, cols)
    scales = rng.normal(0, 0.02, shape).astype(numpy_dtype(scale_dtype))
    return PackedMatrix(
        params, (rows, cols), packed, scales, rng.normal(3, 1, shape).astype(scales.dtype) if params.zeros else None
    )


def weights_of(held: PackedMatrix) -> Weights:
    """Return the numbers of a matrix as the references of products take them."""
    rows, cols = held.shape
    params = held.params
    codes = affine.unpack(held.packed.reshape(rows, -1), cols, params.bits, msb=False)
    numbers = affine.values_of(codes, params.bits, signed=params.signed) - np.float32(params.zero_point or 0)
    group = params.group_size if (params.group_size or cols) < cols else None
    shape = (rows, -1) if group else (-1,)
    scales = held.scales.astype(np.float32).reshape(shape)
    zeros = None if held.zeros is None else held.zeros.astype(np.float32).reshape(shape)
    return Weights(numbers, params.bits, group, scales, zeros, params.offset)
