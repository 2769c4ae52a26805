"""NumPy reference of the affine kernels (``spec/affine.md``): bit streams, decoding, quantizers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ingot.core.numeric.dtypes import numpy_dtype

Array = np.ndarray[Any, np.dtype[Any]]

SHRINK = np.arange(32, 8, -1, dtype=np.float32) / np.float32(32)
SMALLEST = {"f32": 2.0**-149, "f16": 2.0**-24, "bf16": 2.0**-133}


@dataclass(frozen=True)
class Grid:
    """How a matrix is quantized: ``group`` columns share a scale, or all rows do (``per_tensor``)."""

    bits: int
    group: int
    symmetric: bool
    scale_dtype: str
    search: bool = False
    per_tensor: bool = False
    offset: bool = False
    zero_point: int | None = None


def unpack(packed: Array, cols: int, bits: int, *, msb: bool) -> Array:
    """Return codes [rows, cols] (u8) of packed rows [rows, row_bytes]."""
    flat = np.unpackbits(packed.view(np.uint8), axis=1, bitorder="big" if msb else "little")
    stream = flat[:, : cols * bits].reshape(len(packed), cols, bits)
    weights = 1 << np.arange(bits)[:: -1 if msb else 1]
    return np.asarray((stream * weights).sum(axis=2), np.uint8)


def pack(codes: Array, bits: int, *, msb: bool) -> Array:
    """Return packed rows [rows, ceil(cols * bits / 8)] of codes [rows, cols]."""
    places = np.arange(bits)[:: -1 if msb else 1]
    stream = (codes[:, :, None] >> places & 1).astype(np.uint8).reshape(len(codes), codes.shape[1] * bits)
    return np.packbits(stream, axis=1, bitorder="big" if msb else "little")


def values_of(codes: Array, bits: int, *, signed: bool) -> Array:
    """Return the integers that codes stand for, as f32."""
    wide = codes.astype(np.int32)
    return (np.where(wide >= 1 << (bits - 1), wide - (1 << bits), wide) if signed else wide).astype(np.float32)


def to_signed(codes: Array, zeros: Array, bits: int) -> tuple[Array, Array]:
    """Return unsigned codes and their zero points as two's complement and theirs: both less by 2^(bits - 1)."""
    half = 1 << (bits - 1)
    return codes ^ half, (zeros.astype(np.float32) - half).astype(zeros.dtype)


def from_flat(packed: Array, shape: tuple[int, int], bits: int) -> Array:
    """Return codes [rows, cols] (u8) of ``flat_lsb``: one bit stream, the lowest bit of a code and of a byte first."""
    stream = int.from_bytes(packed.tobytes(), "little")
    codes = [stream >> (bits * index) & ((1 << bits) - 1) for index in range(shape[0] * shape[1])]
    return np.array(codes, np.uint8).reshape(shape)


def dequantize(codes: Array, grid: Grid, scales: Array, zeros: Array | None, dtype: str) -> Array:
    """Return s * (q - z), or s * q + z, in f32, rounded to ``dtype``; scales and zeros are [rows, groups] or [1]."""
    q = values_of(codes, grid.bits, signed=grid.symmetric)
    scale = _spread(scales.astype(np.float32), grid, codes.shape)
    with np.errstate(all="ignore"):
        if zeros is not None and grid.offset:
            return np.asarray(scale * q + _spread(zeros.astype(np.float32), grid, codes.shape)).astype(
                numpy_dtype(dtype)
            )
        if zeros is not None:
            q = q - _spread(zeros.astype(np.float32), grid, codes.shape)
        return np.asarray(scale * q).astype(numpy_dtype(dtype))


def quantize(values: Array, grid: Grid) -> tuple[Array, Array, Array]:
    """Return codes [rows, cols] (u8), scales and zeros in the scale dtype, [rows, groups] or [1]."""
    with np.errstate(all="ignore"):
        weights = values.astype(np.float32)
        rows, cols = weights.shape
        codes = np.empty((rows, cols), np.uint8)
        if grid.per_tensor:
            scale, zero = _choose_for_tensor(weights, grid)
            codes[...] = _codes(weights, np.full(rows, scale, np.float32), np.full(rows, zero, np.float32), grid)
            scales, zeros = np.array([scale]), np.array([zero])
        else:
            groups = -(-cols // grid.group)
            scales, zeros = np.empty((rows, groups), np.float32), np.empty((rows, groups), np.float32)
            for index in range(groups):
                span = slice(index * grid.group, (index + 1) * grid.group)
                scales[:, index], zeros[:, index] = _choose(weights[:, span], grid)
                codes[:, span] = _codes(weights[:, span], scales[:, index], zeros[:, index], grid)
        stored = numpy_dtype(grid.scale_dtype)
        return codes, scales.astype(stored), zeros.astype(stored)


def _spread(values: Array, grid: Grid, shape: tuple[int, ...]) -> Array:
    if grid.per_tensor:
        return np.broadcast_to(values.reshape(1, 1), shape)
    return np.repeat(values, grid.group, axis=1)[:, : shape[1]]


def candidates(low: Array, high: Array, grid: Grid) -> tuple[Array, Array]:
    """Return scales and zeros [24, n] (f32, already rounded to the scale dtype) for ranges that include 0."""
    shrink, levels = SHRINK[:, None], np.float32(2**grid.bits - 1)
    if grid.offset:
        return _offset_candidates(low, high, grid)
    if grid.symmetric:
        most = 2 ** (grid.bits - 1) - 1
        if grid.zero_point is not None:
            most = min(grid.zero_point, 2**grid.bits - 1 - grid.zero_point)
        scale = _rounded(np.maximum(-low, high) * shrink / np.float32(most), grid)
        zero = np.full_like(scale, grid.zero_point or 0)
        return np.where((low == 0) & (high == 0), np.float32(1), scale), zero
    scale = _rounded((high * shrink - low * shrink) / levels, grid)
    zero = np.rint(np.minimum(-(low * shrink) / scale, levels)) + np.float32(0)
    flat = (low == 0) & (high == 0)
    return np.where(flat, np.float32(1), scale), np.where(flat, np.float32(0), zero)


def _offset_candidates(low: Array, high: Array, grid: Grid) -> tuple[Array, Array]:
    """Ranges that need not hold 0, shrunk towards their middle; infinite scales where a type has no room."""
    off = (high - low) * (np.arange(24, dtype=np.float32) / np.float32(64))[:, None]
    bottom, top = low + off, high - off
    offset = bottom.astype(numpy_dtype(grid.scale_dtype)).astype(np.float32)
    scale = _rounded((top - bottom) / np.float32(2**grid.bits - 1), grid)
    scale = np.where(low == high, np.float32(1), scale)
    return np.where(np.isfinite(offset), scale, np.float32(np.inf)), offset


def squared_errors(weights: Array, scale: Array, zero: Array, grid: Grid) -> Array:
    """Return each row's sum of (w - s (q - z))^2 in f32: 16 partial sums, then added in halves."""
    level = _levels(weights, scale, zero, grid)
    error = weights - (scale[:, None] * level + (zero[:, None] if grid.offset else np.float32(0)))
    squares = error * error
    padded = np.zeros((len(weights), -(-weights.shape[1] // 16) * 16), np.float32)
    padded[:, : weights.shape[1]] = squares
    sums = np.zeros((len(weights), 16), np.float32)
    for block in padded.reshape(len(weights), -1, 16).transpose(1, 0, 2):
        sums = sums + block
    for width in (8, 4, 2, 1):
        sums = sums[:, :width] + sums[:, width : 2 * width]
    return np.asarray(sums[:, 0])


def _rounded(scale: Array, grid: Grid) -> Array:
    stored = scale.astype(numpy_dtype(grid.scale_dtype)).astype(np.float32)
    return np.asarray(np.where(stored > 0, stored, np.float32(SMALLEST[grid.scale_dtype])))


def _levels(weights: Array, scale: Array, zero: Array, grid: Grid) -> Array:
    """Return rint(w / s), clipped: q - z."""
    if grid.offset:
        level = np.rint((weights - zero[:, None]) / scale[:, None])
        return np.asarray(np.clip(level, np.float32(0), np.float32(2**grid.bits - 1)))
    if grid.symmetric and grid.zero_point is None:
        half = np.float32(2 ** (grid.bits - 1))
        low, high = np.full_like(zero, -half), np.full_like(zero, half - 1)
    else:
        low, high = -zero, np.float32(2**grid.bits - 1) - zero
    return np.asarray(np.clip(np.rint(weights / scale[:, None]), low[:, None], high[:, None]))


def _codes(weights: Array, scale: Array, zero: Array, grid: Grid) -> Array:
    level = _levels(weights, scale, zero, grid) + (np.float32(0) if grid.offset else zero[:, None])
    return np.asarray(level.astype(np.int32) & (2**grid.bits - 1), np.uint8)


def _range(weights: Array, grid: Grid) -> tuple[Array, Array]:
    if grid.offset:
        return weights.min(axis=1), weights.max(axis=1)
    zero = np.zeros((len(weights), 1), np.float32)
    both = np.concatenate([weights, zero], axis=1)
    return both.min(axis=1), both.max(axis=1)


def _choose(weights: Array, grid: Grid) -> tuple[Array, Array]:
    scales, zeros = candidates(*_range(weights, grid), grid)
    if not grid.search:
        return scales[0], zeros[0]
    errors = np.stack([squared_errors(weights, s, z, grid) for s, z in zip(scales, zeros, strict=True)])
    return _pick(scales, zeros, np.where(np.isfinite(scales), errors, np.nan))


def _pick(scales: Array, zeros: Array, errors: Array) -> tuple[Array, Array]:
    """Return the first candidate of the smallest error; NaN marks one that is out."""
    best = np.zeros(scales.shape[1], np.intp)
    for column in range(scales.shape[1]):
        fits = [k for k in range(len(errors)) if not np.isnan(errors[k, column])]
        best[column] = min(fits, key=lambda k: (errors[k, column], k), default=0)
    columns = np.arange(scales.shape[1])
    return scales[best, columns], zeros[best, columns]


def _choose_for_tensor(weights: Array, grid: Grid) -> tuple[Any, Any]:
    low, high = _range(weights.reshape(1, -1), grid)
    scales, zeros = candidates(low, high, grid)
    if not grid.search:
        return scales[0, 0], zeros[0, 0]
    errors = np.zeros((len(scales), 1))
    for k, (scale, zero) in enumerate(zip(scales[:, 0], zeros[:, 0], strict=True)):
        row_scales, row_zeros = np.full(len(weights), scale, np.float32), np.full(len(weights), zero, np.float32)
        for error in squared_errors(weights, row_scales, row_zeros, grid):
            errors[k, 0] += float(error)
    chosen = _pick(scales, zeros, np.where(np.isfinite(scales), errors, np.nan))
    return chosen[0][0], chosen[1][0]
