"""A table of levels learnt for a tensor (Lloyd, IEEE Trans. Inf. Theory 28, 1982), by turns with the groups' scales."""

from __future__ import annotations

import numpy as np

from ingot.codecs.palette.fit import Histogram, entries_of, require_finite
from ingot.model.tensor import Array
from ingot.quantizers.grid import Grid, Rounded
from ingot.quantizers.scales import choose

_TURNS, _ROUNDS = 2, 12
SAMPLE = 1 << 20
"""Weights that a table with scales is learnt of, or some more: whole rows."""


def learn_levels(weights: Array, grid: Grid, importance: Array) -> Array:
    """Return ``2 ** bits`` ascending levels for a matrix: f32 that f16 holds.

    With scales the largest magnitude is 1. Without, levels are values: those of least squared error under the weights
    of the columns, exactly (``spec/palette.md``).

    Parameters
    ----------
    weights : f32 [rows, cols]
    grid : Grid
    importance : f32 [cols]
        What squared errors of each column weigh.

    Raises
    ------
    CodecError
        ``palette.entry-overflow``: values that f16 cannot hold.
    """
    if not grid.scaled:
        return _values(weights, grid, importance)
    step = max(1, weights.size // SAMPLE)
    rows = np.ascontiguousarray(weights[::step])
    groups = grid.groups(rows.shape[1])
    levels = _start(rows, grid, groups)
    weighed = np.broadcast_to(importance, rows.shape)
    for _ in range(_TURNS):
        found = Rounded.begun(grid, rows.shape, levels)
        for first in range(0, rows.shape[1], grid.span):
            choose(found, rows, importance, first, min(first + grid.span, rows.shape[1]))
        spread = found.scales[:, groups]
        known = spread != 0
        values, heavy = rows[known] / spread[known], (weighed * np.square(spread))[known]
        levels = _lloyd(values.astype(np.float64), heavy.astype(np.float64), levels)
    return levels


def _values(weights: Array, grid: Grid, importance: Array) -> Array:
    histogram = Histogram("f32", require_finite(weights, 0, weights.shape[1]))
    histogram.add(weights, importance.astype(np.float64))
    return entries_of(histogram.centroids(1 << grid.bits), "f16", "f16")[2]


def _start(rows: Array, grid: Grid, groups: Array) -> Array:
    """Quantiles of the values over their groups' RMS."""
    edges = np.arange(0, rows.shape[1], grid.group)
    squares = np.add.reduceat(np.square(rows, dtype=np.float64), edges, axis=1)
    counts = np.diff(np.append(edges, rows.shape[1]))
    rms = np.sqrt(squares / counts)[:, groups]
    values = (rows / np.where(rms > 0, rms, 1)).reshape(-1)
    count = 1 << grid.bits
    return _stored(np.quantile(values, (np.arange(count) + 0.5) / count))


def _lloyd(values: Array, weights: Array, levels: Array) -> Array:
    order = np.argsort(values, kind="stable")
    values, weights = values[order], weights[order]
    mass = np.concatenate([[0.0], np.cumsum(weights)])
    moment = np.concatenate([[0.0], np.cumsum(weights * values)])
    found = levels.astype(np.float64)
    for _ in range(_ROUNDS):
        cuts = np.searchsorted(values, (found[1:] + found[:-1]) / 2)
        cuts = np.concatenate([[0], cuts, [len(values)]])
        heavy = np.diff(mass[cuts])
        found = np.where(heavy > 0, np.diff(moment[cuts]) / np.where(heavy > 0, heavy, 1), found)
        found = np.maximum.accumulate(found)
    return _stored(found)


def _stored(levels: Array) -> Array:
    most = np.abs(levels).max()
    return np.sort((levels / most if most > 0 else levels).astype(np.float16)).astype(np.float32)
