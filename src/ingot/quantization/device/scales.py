"""Search for scales and zeros of groups of columns on a device; the algorithm of ``native/kernels/rounding_scales.cc``.

The candidates of many rows are measured at once. Sums are added in the order of the kernels, so equal targets get equal
scales.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ingot.quantization.device.levels import DeviceLevels, ordered_sums

_FACTORS = np.float32(0.40) + np.float32(0.052) * np.arange(16, dtype=np.float32)
_TURNS = 3
_LEAST_SPREAD = 2.0**-18  # of the weighted variance of levels, below which regression is not stable


@dataclass(frozen=True, slots=True)
class GroupScales:
    """The scales of one group: f32 [rows]; ``zeros`` is None for grids without zeros.

    ``overflows`` marks rows whose scale or zero exceeds the range of the scales' type.
    """

    scales: Any
    zeros: Any
    overflows: Any


def search_scales(levels: DeviceLevels, values: Any, weights: Any, elements: int) -> GroupScales:
    """Return the scales of least weighted squared error, for each row.

    Parameters
    ----------
    levels : DeviceLevels
    values : f32 [rows, cols]
        The columns of one group.
    weights : f32 [cols]
        The weights of squared errors.
    elements : int
        The number of candidate values in memory at a time.
    """
    torch = levels.torch
    cols = values.shape[1]
    step = max(1, elements // (cols * 2 * len(_FACTORS)))
    batches = []
    for rows in values.split(step):
        group = _Group(levels, rows, weights)
        batches.append(_with_zeros(group, rows) if levels.with_zeros else _without_zeros(group, rows))
    if len(batches) == 1:
        return batches[0]
    columns = zip(*((batch.scales, batch.zeros, batch.overflows) for batch in batches), strict=True)
    return GroupScales(*(None if column[0] is None else torch.cat(column) for column in columns))


@dataclass(frozen=True, slots=True)
class _Group:
    """The values of a group, f32 [rows, cols], and the weights of its columns, f32 [cols]."""

    levels: DeviceLevels
    values: Any
    weights: Any

    def measure(self, scales: Any, zeros: Any) -> tuple[Any, Any, Any]:
        """Return the levels, errors and weighted levels from which a regression improves each candidate.

        ``scales`` and ``zeros`` are the candidates, f32 [rows, candidates]. Levels are relative to the zero point, f32
        [rows, candidates, cols]. Errors are weighted sums of squares, f32 [rows, candidates].
        """
        values = self.values[:, None]
        wide = None if zeros is None else zeros[..., None]
        scale = scales[..., None]
        inverse = 1.0 / scale
        if wide is None:
            nearest = self.levels.nearest(values * inverse)
            away = values - scale * nearest
        elif self.levels.offsets:
            nearest = self.levels.nearest((values - wide) * inverse)
            away = (values - wide) - scale * nearest
        else:
            nearest = self.levels.nearest(values * inverse + wide) - wide
            away = values - scale * nearest
        return nearest, ordered_sums(self.weights * away * away), self.weights * nearest


class _Best:
    """The best scale and zero of each candidate among all iterations."""

    def __init__(self, torch: Any, scales: Any, zeros: Any) -> None:
        self._torch = torch
        self.errors = torch.full_like(scales, float("inf"))
        self.scales = torch.zeros_like(scales)
        self.zeros = None if zeros is None else torch.zeros_like(scales)

    def update(self, alive: Any, errors: Any, scales: Any, zeros: Any) -> None:
        better = alive & (errors < self.errors)
        self.errors = self._torch.where(better, errors, self.errors)
        self.scales = self._torch.where(better, scales, self.scales)
        if self.zeros is not None:
            self.zeros = self._torch.where(better, zeros, self.zeros)

    def select(self) -> tuple[Any, Any, Any]:
        """Return the scale, zero and error of each row's best candidate; of equal errors, the first."""
        torch = self._torch
        smallest = self.errors.amin(1, keepdim=True)
        indices = torch.arange(self.errors.shape[1], device=self.errors.device)
        first = torch.where(self.errors == smallest, indices, self.errors.shape[1] - 1).amin(1, keepdim=True)
        zeros = None if self.zeros is None else self.zeros.gather(1, first)[:, 0]
        return self.scales.gather(1, first)[:, 0], zeros, smallest[:, 0]


def _factors(levels: DeviceLevels) -> Any:
    return levels.torch.from_numpy(_FACTORS).to(levels.device)


def _without_zeros(group: _Group, rows: Any) -> GroupScales:
    levels = group.levels
    torch = group.levels.torch
    amax = max(abs(levels.first), abs(levels.last))
    magnitude = rows.abs().amax(1)
    sizes = (magnitude / amax)[:, None] * _factors(levels)
    scales = torch.cat([sizes, -sizes], 1)
    best = _Best(torch, scales, None)
    alive = torch.ones_like(scales, dtype=torch.bool)
    for _ in range(_TURNS):
        scales = levels.stored(scales)
        alive = alive & (scales != 0) & scales.isfinite()
        nearest, errors, weighted = group.measure(torch.where(alive, scales, 1.0), None)
        best.update(alive, errors, scales, None)
        squares = ordered_sums(weighted * nearest)
        alive = alive & (squares > 0)
        products = ordered_sums(weighted * group.values[:, None])
        better = levels.stored(products / torch.where(squares > 0, squares, 1.0))
        alive = alive & (better != scales)
        scales = better
    best_scales, _, smallest = best.select()
    overflows = (magnitude > 0) & (best_scales == 0) & (smallest > 0) & (magnitude / amax > 1)
    return GroupScales(best_scales, None, overflows)


def _with_zeros(group: _Group, rows: Any) -> GroupScales:
    levels = group.levels
    torch = group.levels.torch
    low = rows.amin(1)
    high = rows.amax(1)
    if not levels.offsets:  # a zero point is one of the levels
        low = low.clamp(max=0.0)
        high = high.clamp(min=0.0)
    factors = _factors(levels)
    reach = (high - low)[:, None]
    scales = reach * factors / (levels.last - levels.first)
    starts = low[:, None] + reach * (1 - factors) / 2
    zeros = starts - scales * levels.first if levels.offsets else levels.first - starts / scales
    scales, zeros, errors = _regress(group, scales, zeros)
    flat = low == high
    flat_zero = levels.stored(low) if levels.offsets else torch.full_like(low, levels.middle)
    scales = torch.where(flat, 0.0, scales)
    zeros = torch.where(flat | errors.isinf(), flat_zero, zeros)
    errors = torch.where(flat, 0.0, errors)
    magnitude = rows.abs().amax(1)
    amax = max(abs(levels.first), abs(levels.last))
    none_fits = (scales == 0) & (errors > 0) & (magnitude / amax > 1)
    return GroupScales(scales, zeros, (magnitude > 0) & (none_fits | ~zeros.isfinite()))


def _regress(group: _Group, scales: Any, zeros: Any) -> tuple[Any, Any, Any]:
    """Return the best scale, zero and error of each row, by repeated linear regression.

    ``scales`` and ``zeros`` are the first candidates, f32 [rows, candidates].
    """
    levels = group.levels
    torch = group.levels.torch
    weight = ordered_sums(group.weights)
    best = _Best(torch, scales, zeros)
    alive = torch.ones_like(scales, dtype=torch.bool)
    for _ in range(_TURNS):
        scales = levels.stored(scales)
        zeros = levels.stored(zeros) if levels.offsets else zeros.clamp(levels.first, levels.last).round()
        alive = alive & (scales > 0) & scales.isfinite() & zeros.isfinite()
        nearest, errors, weighted = group.measure(torch.where(alive, scales, 1.0), torch.where(alive, zeros, 0.0))
        best.update(alive, errors, scales, zeros)
        level = ordered_sums(weighted)
        value = ordered_sums(group.weights * group.values)[:, None]
        square = ordered_sums(weighted * nearest)
        product = ordered_sums(weighted * group.values[:, None])
        spread = weight * square - level * level
        alive = alive & (spread > _LEAST_SPREAD * (weight * square))
        slope = (weight * product - value * level) / torch.where(alive, spread, 1.0)
        remainder = (value - slope * level) / weight
        alive = alive & (slope > 0)
        next_zeros = remainder if levels.offsets else zeros - remainder / slope
        alive = alive & ((slope != scales) | (next_zeros != zeros))
        scales = slope
        zeros = next_zeros
    return best.select()
