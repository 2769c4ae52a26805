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


def value(levels: Array, codes: Array, scale: Array, zero: Array, *, offsets: bool) -> Array:
    """Return what codes stand for: ``scale * level + zero`` with offsets, else ``scale * (level - zero)``."""
    found: Array = scale * levels[codes] + zero if offsets else scale * (levels[codes] - zero)
    return found


def refit(levels: Array, wanted: Array, inputs: Array) -> tuple[Array, Array]:
    """Return ``scale`` and ``base`` of least ``d A d'`` for ``d = scale * levels + base - wanted``: f64 [2], and A of
    that basis, f64 [2, 2]. Levels and wanted values are [columns] of one group, by themselves."""
    basis = np.stack([levels, np.ones_like(levels)]).astype(np.float64)
    square = basis @ inputs.astype(np.float64) @ basis.T
    return np.linalg.solve(square, basis @ inputs.astype(np.float64) @ wanted.astype(np.float64)), square


def triangular(moment: Array) -> tuple[Array, Array]:
    """Return strictly upper ``U`` and ``D`` with ``moment = (U + I) D (U + I)'``, in f64."""
    left = moment.astype(np.float64)
    upper, own = np.zeros_like(left), np.zeros(len(left))
    for column in range(len(left) - 1, -1, -1):
        own[column] = left[column, column]
        upper[:column, column] = left[:column, column] / own[column]
        left -= own[column] * np.outer(upper[:, column], upper[:, column])
    return upper, own


def feedback(levels: Array, scales: Array, zeros: Array | None, width: int, wanted: Array, factor: Array) -> Array:
    """Return codes; column j takes in ``sum_k<j error_k * factor[k, j]``. Scales, and offsets, are [rows, groups of
    ``width``]."""
    codes, errors = np.zeros(wanted.shape, np.uint8), np.zeros_like(wanted)
    for column in range(wanted.shape[1]):
        scale = scales[:, column // width]
        zero = np.zeros_like(scale) if zeros is None else zeros[:, column // width]
        target = wanted[:, column] + errors[:, :column] @ factor[:column, column]
        codes[:, column] = nearest(levels, (target - zero) / scale)
        errors[:, column] = wanted[:, column] - value(levels, codes[:, column], scale, zero, offsets=True)
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
