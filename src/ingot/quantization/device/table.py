"""A table of levels learnt on a device, in turn with scales of groups; the algorithm of ``quantization.table``."""

from __future__ import annotations

from typing import Any

import numpy as np

from ingot.core.border import require
from ingot.core.runtime.device import widest_float
from ingot.model.tensor import Array
from ingot.quantization.device.feedback import DeviceMatrix
from ingot.quantization.device.levels import DeviceLevels
from ingot.quantization.grid import Grid
from ingot.quantization.table import ROUNDS, SAMPLE, TURNS, normalize


def learn_on_device(weights: Any, grid: Grid, importance: Any, elements: int) -> Array:
    """Return the ``2 ** bits`` levels learnt for a matrix, ascending: f32, exactly representable in f16.

    Parameters
    ----------
    weights : f32 [rows, cols]
        A tensor on the device.
    grid : Grid
    importance : f32 [cols]
    elements : int
        See ``search_scales``.
    """
    torch = require("torch", "torch")
    rows = weights[:: max(1, weights.numel() // SAMPLE)]
    wide = widest_float(torch, weights.device)
    groups = torch.arange(rows.shape[1], device=rows.device) // grid.group
    count = 1 << grid.bits
    levels = normalize(_quantiles(torch, _over_rms(torch, rows.to(wide), groups).flatten(), count))
    for _ in range(TURNS):
        matrix = DeviceMatrix.start(DeviceLevels(grid, levels, weights.device), rows)
        for span in matrix.spans():
            matrix.choose(matrix.weights, importance, span, elements)
        scales = matrix.scales[groups].T
        nonzero = scales != 0
        values = (rows / torch.where(nonzero, scales, 1.0))[nonzero]
        heavy = (importance * scales.square())[nonzero]
        device, dtype = matrix.levels.exact
        levels = _lloyd(torch, values.to(device, dtype), heavy.to(device, dtype), levels)
    return levels


def _over_rms(torch: Any, rows: Any, groups: Any) -> Any:
    """Return rows divided by the root mean square of each group."""
    count = int(groups[-1]) + 1
    squares = torch.zeros(len(rows), count, dtype=rows.dtype, device=rows.device)
    squares.index_add_(1, groups, rows.square())
    sizes = torch.zeros(count, dtype=rows.dtype, device=rows.device)
    sizes.index_add_(0, groups, torch.ones_like(groups, dtype=rows.dtype))
    rms = (squares / sizes).sqrt()[:, groups]
    return rows / torch.where(rms > 0, rms, 1.0)


def _quantiles(torch: Any, values: Any, count: int) -> Array:
    """Return the interpolated quantiles at the middles of ``count`` equal intervals of probability: f64."""
    ordered = values.sort().values
    positions = (np.arange(count) + 0.5) / count * (len(ordered) - 1)
    below = np.floor(positions).astype(np.int64)
    above = np.minimum(below + 1, len(ordered) - 1)
    low, high = (ordered[torch.from_numpy(ids).to(ordered.device)].cpu().double().numpy() for ids in (below, above))
    quantiles: Array = low + (high - low) * (positions - below)
    return quantiles


def _lloyd(torch: Any, values: Any, weights: Any, levels: Array) -> Array:
    values, order = values.sort(stable=True)
    weights = weights[order]
    none = values.new_zeros(1)
    mass = torch.cat([none, weights.cumsum(0)])
    moment = torch.cat([none, (weights * values).cumsum(0)])
    centroids = torch.from_numpy(levels.astype(np.float64)).to(values.device)
    ends = torch.tensor([0, len(values)], device=values.device)
    for _ in range(ROUNDS):
        cuts = torch.searchsorted(values, (centroids[1:] + centroids[:-1]) / 2)
        cuts = torch.cat([ends[:1], cuts, ends[1:]])
        heavy = mass[cuts].diff()
        means = moment[cuts].diff() / torch.where(heavy > 0, heavy, 1.0)
        centroids = torch.where(heavy > 0, means, centroids).cummax(0).values
    return normalize(centroids.cpu().numpy())
