"""NumPy reference of products with packed weights (``spec/affine.md``, "Multiplying"): the order of every sum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

LANES = 16
BLOCK = 32


@dataclass(frozen=True)
class Weights:
    """``numbers`` [rows, cols], f32: codes as integers less the constant zero point; scales and zeros f32.

    ``group`` columns share a scale [rows, groups]; None for one per row [rows] or per tensor [1].
    """

    numbers: Array
    bits: int
    group: int | None
    scales: Array
    zeros: Array | None
    offset: bool


def matmul(x: Array, weights: Weights, bias: Array | None = None) -> Array:
    """Return ``x @ w.T + bias`` [m, rows] in f32, bit for bit as the kernels sum it."""
    with np.errstate(all="ignore"):
        q = _blocks(weights.numbers.astype(np.float32), weights.bits)  # [rows, blocks, lanes, steps]
        values = _blocks(x.astype(np.float32), weights.bits)
        out = np.stack([_column(column, q, weights) for column in values])
        return out if bias is None else out + bias.astype(np.float32)


def gemm(x: Array, weights: Weights, bias: Array | None = None) -> Array:
    """Return ``x @ w.T + bias`` [m, rows] in f32, bit for bit as the kernels for many rows sum it."""
    rows, cols = weights.numbers.shape
    group = cols if weights.group is None else weights.group
    q, values = weights.numbers.astype(np.float32), x.astype(np.float32)
    with np.errstate(all="ignore"):
        total = np.zeros((len(values), rows), np.float32)
        for index, start in enumerate(range(0, cols, group)):
            part = slice(start, start + group)
            product = _chain(values[:, None, part], q[None, :, part])
            shift = _chain(values[:, None, part], np.ones_like(q[None, :1, part]))
            scales, zeros = (
                None if held is None else held.reshape(len(held), -1)[:, index]
                for held in (weights.scales, weights.zeros)
            )
            total = total + _scaled(product, shift, scales, zeros, weights.offset)
        return total if bias is None else total + bias.astype(np.float32)


def int8(x: Array, weights: Weights, bias: Array | None = None) -> Array:
    """Return ``x @ w.T + bias`` [m, rows] in f32 with x in 8 bits, bit for bit as the kernels sum it."""
    with np.errstate(all="ignore"):
        numbers, steps = rounded(x)  # [m, blocks, 32], [m, blocks]
        rows, blocks = len(weights.numbers), steps.shape[1]
        q = np.zeros((rows, blocks * BLOCK), np.int64)
        q[:, : weights.numbers.shape[1]] = weights.numbers
        products = np.einsum("mbk,rbk->mrb", numbers, q.reshape(rows, blocks, BLOCK)).astype(np.float32)
        sums = numbers.sum(-1).astype(np.float32)[:, None]
        scales, zeros = (_of_blocks(held, weights, rows, blocks) for held in (weights.scales, weights.zeros))
        total = np.zeros((4, len(x), rows), np.float32)
        for b in range(blocks):
            value, step, one = products[..., b], steps[:, None, b], total[b % 4]
            if zeros is not None and not weights.offset:
                value = fused(-zeros[:, b], sums[..., b], value)
            one = fused(scales[:, b] * step, value, one)
            if zeros is not None and weights.offset:
                one = fused(zeros[:, b], step * sums[..., b], one)
            total[b % 4] = one
        found = (total[0] + total[2]) + (total[1] + total[3])
        return np.asarray(found if bias is None else found + bias.astype(np.float32))


def rounded(x: Array) -> tuple[Array, Array]:
    """Return x as integers [m, blocks, 32] and steps [m, blocks]: the largest magnitude of a block is 127 steps."""
    values = np.zeros((len(x), -(-x.shape[1] // (4 * BLOCK)) * 4 * BLOCK), np.float32)
    values[:, : x.shape[1]] = x.astype(np.float32)
    values = values.reshape(len(x), -1, BLOCK)
    most = np.abs(values).max(-1)
    some = np.isfinite(most) & (most >= np.float32(2.0**-119))
    factor = np.where(some, np.float32(127) / np.where(some, most, np.float32(1)), np.float32(0))
    steps = np.where(some, most / np.float32(127), np.where(np.isfinite(most), np.float32(0), np.float32(np.nan)))
    numbers = np.rint(np.where(some[..., None], values * factor[..., None], 0))
    return numbers.astype(np.int64), steps


def fused(a: Array, b: Array, c: Array) -> Array:
    """Return a * b + c of f32, rounded once: the sum in f64 is rounded to odd first."""
    product, c = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + c
    back = total - product
    error = (product - (total - back)) + (c - back)
    even = total.view(np.int64) % 2 == 0
    towards = np.where(error > 0, np.inf, -np.inf)
    moved = np.where(np.isfinite(total) & (error != 0) & even, np.nextafter(total, towards), total)
    return np.asarray(moved.astype(np.float32))


def _of_blocks(values: Array | None, weights: Weights, rows: int, blocks: int) -> Any:
    """Give every block of every row [rows, blocks] the value of its group; 0 past the last."""
    if values is None:
        return None
    if weights.group is None:
        return np.broadcast_to(values.reshape(-1, 1), (rows, blocks))
    groups = np.arange(blocks) * BLOCK // weights.group
    padded = np.zeros((rows, max(int(groups[-1]) + 1, values.shape[1])), np.float32)
    padded[:, : values.shape[1]] = values
    return padded[:, groups]


def _chain(x: Array, q: Array) -> Array:
    """Add products: of 32 columns the even ones in order, the odd ones in order, then both; then the blocks."""
    total = np.zeros(np.broadcast_shapes(x.shape[:-1], q.shape[:-1]), np.float32)
    for start in range(0, x.shape[-1], BLOCK):
        stop = min(start + BLOCK, x.shape[-1])
        sums = np.zeros((2, *total.shape), np.float32)
        for column in range(start, stop):
            sums[(column - start) % 2] += x[..., column] * q[..., column]
        total = total + (sums[0] + sums[1])
    return total


def _blocks(values: Array, bits: int) -> Array:
    """Cut rows into blocks of 16 lanes, each the columns of 32 bits of codes, filled up with 0."""
    rows, cols = values.shape
    steps = 32 // bits
    padded = np.zeros((rows, -(-cols // (LANES * steps)) * LANES * steps), np.float32)
    padded[:, :cols] = values
    return padded.reshape(rows, -1, LANES, steps)


def _column(x: Array, q: Array, weights: Weights) -> Array:
    parts, sums = _neighbours(q * x), _neighbours(x)  # [rows, blocks, lanes], [blocks, lanes]
    if weights.group is None:
        total, shift = _lanes(parts), _lanes(sums[None])[0]
        return _scaled(total, shift, weights.scales, weights.zeros, weights.offset)
    scales, zeros = (_spread(values, weights, parts.shape) for values in (weights.scales, weights.zeros))
    return _lanes(_scaled(parts, sums, scales, zeros, weights.offset))


def _scaled(part: Array, total: Any, scales: Any, zeros: Array | None, offset: bool) -> Array:
    if zeros is None:
        return np.asarray(scales * part)
    return np.asarray(scales * part + zeros * total if offset else scales * (part - zeros * total))


def _spread(values: Array | None, weights: Weights, shape: tuple[int, ...]) -> Any:
    """Give every lane of every block the value of its group; 0 past the last."""
    if values is None:
        return None
    assert weights.group is not None
    rows, blocks, lanes = shape
    lane_of = np.arange(blocks * lanes) // (weights.group * weights.bits // 32)
    padded = np.zeros((rows, int(lane_of[-1]) + 1), np.float32)
    padded[:, : values.shape[1]] = values
    return padded[:, lane_of].reshape(shape)


def _neighbours(values: Array) -> Array:
    """Add steps 0 and 1, 2 and 3, ..., then the sums likewise."""
    while values.shape[-1] > 1:
        values = values[..., 0::2] + values[..., 1::2]
    return values[..., 0]


def _lanes(parts: Array) -> Array:
    """Add blocks in order, lane by lane; then the upper half of the lanes to the lower, four times."""
    total = np.zeros((len(parts), LANES), np.float32)
    for block in parts.transpose(1, 0, 2):
        total = total + block
    while total.shape[1] > 1:
        half = total.shape[1] // 2
        total = total[:, :half] + total[:, half:]
    return total[:, 0]
