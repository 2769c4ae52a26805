"""Better scales and zeros of a group for its present codes; the algorithm of ``native/kernels/rounding_refit.h``.

A value is ``scale * level + base``, so the error is quadratic in scale and base.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ingot.quantization.device.levels import DeviceLevels

_LEAST_SPREAD = 2.0**-18


@dataclass(frozen=True, slots=True)
class Scales:
    """The scales of one group, f32 [rows]; ``zero`` is None for grids without zeros."""

    scale: Any
    zero: Any


@dataclass(frozen=True, slots=True)
class _Error:
    """The coefficients of each row's error as a quadratic function of changes of scale and base."""

    along: Any
    shift: Any
    squares: Any
    both: Any
    ones: Any

    def change(self, scale: Any, base: Any) -> Any:
        with_scale = scale * (2 * self.along + scale * self.squares)
        return with_scale + base * (2 * self.shift + base * self.ones) + 2 * scale * base * self.both


def better_scales(levels: DeviceLevels, present: Any, scales: Scales, slope: Any, square: Any, diagonal: Any) -> Scales:
    """Return the scales and zeros of a group that reduce the error; each row is fitted as if the others did not change.

    Parameters
    ----------
    present : f32 [size, rows]
        The levels of the codes.
    slope : f32 [size, rows]
        ``A D^T G`` of these weights: half of the error's gradient.
    square : f32 [size, size]
        The rows and columns of A that belong to the group.
    diagonal : f32 [rows]
        G's diagonal.
    """
    torch = levels.torch
    product = square @ present
    squares = (present * product).sum(0) * diagonal
    along = (slope * present).sum(0)
    scale = scales.scale
    if scales.zero is None:
        better = levels.stored(scale - along / torch.where(squares > 0, squares, 1.0))
        gain = (better - scale) * (2 * along + (better - scale) * squares)
        accepted = (squares > 0) & (better != 0) & better.isfinite() & (gain < 0)
        return Scales(torch.where(accepted, better, scale), None)
    sums = square.sum(1)
    both = (present * sums[:, None]).sum(0) * diagonal
    return _both(levels, _Error(along, slope.sum(0), squares, both, diagonal * sums.sum()), scales)


def _both(levels: DeviceLevels, error: _Error, scales: Scales) -> Scales:
    """Return the best result of three fits: of the base alone, of the scale alone, and of both."""
    torch = levels.torch
    scale = scales.scale
    zero = scales.zero
    start = _base(levels, scale, zero)
    best_scale = scale
    best_zero = zero
    smallest = torch.zeros_like(scale)
    squares = torch.where(error.squares > 0, error.squares, 1.0)
    ones = torch.where(error.ones > 0, error.ones, 1.0)
    spread = error.squares * error.ones - error.both * error.both
    has_spread = spread > _LEAST_SPREAD * (error.squares * error.ones)
    joint = levels.stored(
        scale + (error.both * error.shift - error.ones * error.along) / torch.where(has_spread, spread, 1.0)
    )
    attempts = (
        (error.ones > 0, scale, start - error.shift / ones),
        (error.squares > 0, levels.stored(scale - error.along / squares), start),
        (has_spread, joint, start - (error.shift + error.both * (joint - scale)) / ones),
    )
    for possible, new_scale, base in attempts:
        allowed = possible & new_scale.isfinite() & (new_scale > 0)
        divisor = torch.where(allowed, new_scale, 1.0)
        points = (-base / divisor).clamp(levels.first, levels.last).round()
        new_zero = levels.stored(base) if levels.offsets else points
        result = error.change(new_scale - scale, _base(levels, new_scale, new_zero) - start)
        better = allowed & new_zero.isfinite() & (result < smallest)
        best_scale = torch.where(better, new_scale, best_scale)
        best_zero = torch.where(better, new_zero, best_zero)
        smallest = torch.where(better, result, smallest)
    return Scales(best_scale, best_zero)


def _base(levels: DeviceLevels, scale: Any, zero: Any) -> Any:
    """Return ``base``: the decoded value of level 0."""
    return zero if levels.offsets else -(scale * zero)
