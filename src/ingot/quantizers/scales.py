"""Scales, and zeros, of the groups of some columns, by a search under weights of the columns."""

from __future__ import annotations

import numpy as np

from ingot.codecs.blocks.compose import numbers_of
from ingot.codecs.scaled_codebook.tables import codes_of, largest, numbers
from ingot.core import native
from ingot.errors import CodecError
from ingot.model.tensor import Array
from ingot.quantizers.grid import Grid, Rounded

_FACTORS = np.linspace(0.6, 1.4, 17, dtype=np.float32)  # of the scale that the largest magnitude asks for
_TRIED = 1 << 17  # elements, at a time


def choose(rounded: Rounded, targets: Array, importance: Array, first: int, last: int) -> None:
    """Choose the scales (and zeros) of the columns ``first`` to ``last``: those of a span of the grid.

    Parameters
    ----------
    rounded : Rounded
        Gets them.
    targets : f32 [rows, cols]
        What the columns are to be.
    importance : f32 [cols]
        What squared errors of the columns weigh: above 0.

    Raises
    ------
    CodecError
        ``quantizer.scale-overflow``: the scales' type cannot hold a group's scale or zero.
    """
    if not rounded.grid.scaled:
        return
    if rounded.grid.nested is not None:
        _choose_nested(rounded, targets, importance, first, last)
        return
    group = first // rounded.grid.group
    if rounded.grid.small:
        step = max(1, _TRIED // (last - first))
        for above in range(0, len(targets), step):
            some = slice(above, above + step)
            rounded.scales[some, group] = _small(rounded, targets[some, first:last], importance[first:last])
        return
    row = native.kernels.rounding_scales(
        rounded.kernel_grid, targets, first, last, importance[first:last], rounded.scales, rounded.zeros, group
    )
    if row < len(targets):
        raise _overflow(rounded.grid.scales, row, first, "; use scales=bf16 or scales=f32")


def second_of(weights: Array, grid: Grid) -> float:
    """Return what the scales of a matrix are multiples of: the largest scale is then for the largest magnitude."""
    most = float(np.abs(weights).max(initial=0))
    return float(np.float32(most / (float(grid.levels.max()) * largest(grid.scales)))) or 1.0


def _small(rounded: Rounded, targets: Array, importance: Array) -> Array:
    """Return scales of a type of 8 bits, one for each row of ``targets``: of several, that of least error."""
    levels, kind, second = rounded.levels, rounded.grid.scales, np.float32(rounded.second)
    middle, held = (levels[1:] + levels[:-1]) / 2, numbers(kind)
    smallest = held[held > 0].min()
    wanted = np.maximum(np.abs(targets).max(1) / levels.max() / second, smallest)
    best, found = np.full(len(targets), np.inf), np.ones(len(targets), np.float32)
    for factor in _FACTORS if rounded.grid.second else (0.5, 1, 2):
        scales = np.maximum(held[codes_of(wanted * np.float32(factor), kind)], smallest) * second
        near = levels[np.searchsorted(middle, targets / scales[:, None])] * scales[:, None]
        error = np.square(targets - near, dtype=np.float64) @ importance
        found, best = np.where(error < best, scales, found), np.minimum(error, best)
    return found


def _choose_nested(rounded: Rounded, targets: Array, importance: Array, first: int, last: int) -> None:
    grid, nested = rounded.grid, rounded.grid.nested
    assert nested is not None
    weights = importance[first:last]
    weights = np.ascontiguousarray(weights / weights.max(), np.float32)
    found = numbers_of(nested.type, np.ascontiguousarray(targets[:, first:last]), weights)
    if isinstance(found, int):
        raise _overflow("f16", found // (last - first), first, "")
    groups = slice(first // grid.group, -(-last // grid.group))
    rounded.scales[:, groups] = found.scales
    assert rounded.units is not None
    rounded.units[:, groups] = found.d
    if found.minima is not None and rounded.zeros is not None and rounded.zero_units is not None:
        rounded.zeros[:, groups] = found.minima
        rounded.zero_units[:, groups] = found.dmin


def _overflow(scales: str, row: int, column: int, way_out: str) -> CodecError:
    return CodecError(
        "quantizer.scale-overflow",
        f"expected a scale that {scales} can hold, found a larger one for the group at row {row}, column {column}"
        f"{way_out}",
    )
