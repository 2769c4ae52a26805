"""Rounding with feedback and descent under two factors as ``spec/quantizers.md`` states them, one weight at a time."""

from __future__ import annotations

import numpy as np

from ingot.model.tensor import Array


def nearest(levels: Array, among: Array) -> Array:
    """Return codes; of two levels as near the even one of integers, the lower one of a table."""
    if (np.diff(levels) == 1).all():
        codes: Array = np.clip(np.rint(among) - levels[0], 0, len(levels) - 1).astype(np.uint8)
        return codes
    found: Array = np.abs(levels - among[..., None]).argmin(axis=-1).astype(np.uint8)
    return found


def feedback(levels: Array, scales: Array, width: int, wanted: Array, factor: Array) -> Array:
    """Return codes; column j takes in ``sum_k<j error_k * factor[k, j]``. Scales are [rows, groups of ``width``]."""
    codes, errors = np.zeros(wanted.shape, np.uint8), np.zeros_like(wanted)
    for column in range(wanted.shape[1]):
        scale = scales[:, column // width]
        target = wanted[:, column] + errors[:, :column] @ factor[:column, column]
        codes[:, column] = nearest(levels, target / scale)
        errors[:, column] = wanted[:, column] - scale * levels[codes[:, column]]
    return codes


def descend(
    levels: Array, scales: Array, width: int, wanted: Array, codes: Array, factors: tuple[Array, Array]
) -> Array:
    """Return codes after one pass, group by group and row by row: each the least of ``tr(G D A D')`` in itself."""
    inputs, outputs = factors
    spread = np.repeat(scales, width, axis=1)
    codes, values = codes.copy(), spread * levels[codes]
    for first in range(0, wanted.shape[1], width):
        for row in range(len(wanted)):
            for column in range(first, first + width):
                slope = outputs[row] @ (values - wanted) @ inputs[:, column]
                curve = outputs[row, row] * inputs[column, column]
                goal = (values[row, column] - slope / curve) / spread[row, column]
                codes[row, column] = nearest(levels, np.asarray(goal))
                values[row, column] = spread[row, column] * levels[codes[row, column]]
    return codes
