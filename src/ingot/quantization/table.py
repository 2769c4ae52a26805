"""A table of levels learnt for a tensor (Lloyd, IEEE Trans. Inf. Theory 28, 1982), in turn with scales of groups."""

from __future__ import annotations

import numpy as np

from ingot.codecs.palette.fit import Histogram, entries_of, require_finite
from ingot.model.tensor import Array
from ingot.quantization.grid import Grid, Rounded
from ingot.quantization.scales import choose

TURNS = 2
ROUNDS = 12
SAMPLE = 1 << 20
"""The number of sampled weights from which a table with scales is learnt, rounded up to full rows."""


def learn_levels(weights: Array, grid: Grid, importance: Array) -> Array:
    """Return the ``2 ** bits`` levels learnt for a matrix, ascending: f32, exactly representable in f16.

    With scales, the largest magnitude is 1. Without scales, levels exactly minimize the weighted squared error
    (``spec/palette.md``).

    Parameters
    ----------
    weights : f32 [rows, cols]
    grid : Grid
    importance : f32 [cols]
        The weight of each column's squared errors.

    Raises
    ------
    CodecError
        ``palette.entry-overflow``: f16 cannot represent a level.
    """
    if not grid.scaled:
        return _values(weights, grid, importance)
    step = max(1, weights.size // SAMPLE)
    rows = np.ascontiguousarray(weights[::step])
    groups = grid.groups(rows.shape[1])
    levels = _start(rows, grid, groups)
    weighted = np.broadcast_to(importance, rows.shape)
    for _ in range(TURNS):
        rounded = Rounded.start(grid, rows.shape, levels)
        for first in range(0, rows.shape[1], grid.span):
            columns = slice(first, min(first + grid.span, rows.shape[1]))
            choose(rounded, np.ascontiguousarray(rows[:, columns]), importance[columns], first)
        scales = rounded.scales[:, groups]
        nonzero = scales != 0
        values = rows[nonzero] / scales[nonzero]
        heavy = (weighted * np.square(scales))[nonzero]
        levels = _lloyd(values.astype(np.float64), heavy.astype(np.float64), levels)
    return levels


def _values(weights: Array, grid: Grid, importance: Array) -> Array:
    histogram = Histogram("f32", require_finite(weights, 0, weights.shape[1]))
    histogram.add(weights, importance.astype(np.float64))
    return entries_of(histogram.centroids(1 << grid.bits), "f16", "f16")[2]


def _start(rows: Array, grid: Grid, groups: Array) -> Array:
    """Return the initial levels: quantiles of the values, each divided by the RMS of its group."""
    edges = np.arange(0, rows.shape[1], grid.group)
    squares = np.add.reduceat(np.square(rows, dtype=np.float64), edges, axis=1)
    counts = np.diff(np.append(edges, rows.shape[1]))
    rms = np.sqrt(squares / counts)[:, groups]
    values = (rows / np.where(rms > 0, rms, 1)).reshape(-1)
    count = 1 << grid.bits
    return normalize(np.quantile(values, (np.arange(count) + 0.5) / count))


def _lloyd(values: Array, weights: Array, levels: Array) -> Array:
    order = np.argsort(values, kind="stable")
    values = values[order]
    weights = weights[order]
    mass = np.concatenate([[0.0], np.cumsum(weights)])
    moment = np.concatenate([[0.0], np.cumsum(weights * values)])
    centroids = levels.astype(np.float64)
    for _ in range(ROUNDS):
        cuts = np.searchsorted(values, (centroids[1:] + centroids[:-1]) / 2)
        cuts = np.concatenate([[0], cuts, [len(values)]])
        heavy = np.diff(mass[cuts])
        centroids = np.where(heavy > 0, np.diff(moment[cuts]) / np.where(heavy > 0, heavy, 1), centroids)
        centroids = np.maximum.accumulate(centroids)
    return normalize(centroids)


def normalize(levels: Array) -> Array:
    """Return levels in ascending order, rounded to f16, whose largest magnitude is 1."""
    amax = np.abs(levels).max()
    return np.sort((levels / amax if amax > 0 else levels).astype(np.float16)).astype(np.float32)
