"""Search for scales and zeros of groups of columns, under weights of the columns."""

from __future__ import annotations

import numpy as np

from ingot.codecs.blocks.compose import numbers_of
from ingot.codecs.scaled_codebook.tables import codes_of, largest, numbers
from ingot.core.runtime import native
from ingot.errors import CodecError
from ingot.model.layouts.scaled_codebook import DIVIDE
from ingot.model.tensor import Array
from ingot.quantization.grid import Grid, Rounded

_FACTORS = np.linspace(0.6, 1.4, 17, dtype=np.float32)  # times the scale that the largest magnitude needs
_TRIED = 1 << 17  # elements that are tried at a time


def choose(rounded: Rounded, targets: Array, importance: Array, first: int) -> None:
    """Choose the scales and zeros of the span of columns that begins at column ``first``.

    Parameters
    ----------
    rounded : Rounded
        Updated in place.
    targets : f32 [rows, span]
        The values to approximate.
    importance : f32 [span]
        The weights of the columns' squared errors, greater than 0.

    Raises
    ------
    CodecError
        ``quantizer.scale-overflow``: the scales' type cannot represent a group's scale or zero.
    """
    if not rounded.grid.scaled:
        return
    if rounded.grid.nested is not None:
        _choose_nested(rounded, targets, importance, first)
        return
    cols = targets.shape[1]
    group = first // rounded.grid.group
    if rounded.grid.small:
        step = max(1, _TRIED // cols)
        for above in range(0, len(targets), step):
            rows = slice(above, above + step)
            rounded.scales[rows, group] = _small(rounded, targets[rows], importance)
        return
    row = native.kernels.rounding_scales(
        rounded.kernel_grid, targets, 0, cols, importance, rounded.scales, rounded.zeros, group
    )
    if row < len(targets):
        raise overflow_error(rounded.grid.scales, row, first, "; use scales=bf16 or scales=f32")


def second_of(weights: Array, grid: Grid) -> float:
    """Return the second scale of a matrix: ``grid.second`` states whether it multiplies or divides all scales.

    With it, the group with the largest magnitude has the largest scale of the scales' type.
    """
    amax = float(np.abs(weights).max(initial=0)) if grid.amax is None else grid.amax
    limit = float(grid.levels.max()) * largest(grid.scales)
    if not amax:
        return 1.0
    if grid.second == DIVIDE:
        return float(np.float32(min(limit / amax, float(np.finfo(np.float32).max))))
    return float(np.float32(amax / limit)) or 1.0


def apply_second(scales: Array, grid: Grid, second: float, *, inverse: bool = False) -> Array:
    """Return scales of an 8-bit type as f32, multiplied or divided by the second scale; ``inverse`` undoes it."""
    number = np.float32(second)
    result: Array = scales / number if (grid.second == DIVIDE) != inverse else scales * number
    return result


def _small(rounded: Rounded, targets: Array, importance: Array) -> Array:
    """Return the scale of least error for each row of ``targets``, among candidates of an 8-bit type."""
    levels = rounded.levels
    dtype = rounded.grid.scales
    grid = rounded.grid
    middle = (levels[1:] + levels[:-1]) / 2
    representable = numbers(dtype)
    smallest = representable[representable > 0].min()
    peaks = np.abs(targets).max(1) / levels.max()
    ideal = np.maximum(apply_second(peaks, grid, rounded.second, inverse=True), smallest)
    best = np.full(len(targets), np.inf)
    chosen = np.ones(len(targets), np.float32)
    for factor in (0.5, 1, 2) if dtype == "f8_e8m0fnu" else _FACTORS:
        stored = np.maximum(representable[codes_of(ideal * np.float32(factor), dtype)], smallest)
        scales = apply_second(stored, grid, rounded.second)
        near = levels[np.searchsorted(middle, targets / scales[:, None])] * scales[:, None]
        error = np.square(targets - near, dtype=np.float64) @ importance
        chosen = np.where(error < best, scales, chosen)
        best = np.minimum(error, best)
    return chosen


def _choose_nested(rounded: Rounded, targets: Array, importance: Array, first: int) -> None:
    grid = rounded.grid
    nested = rounded.grid.nested
    assert nested is not None
    cols = targets.shape[1]
    weights = np.ascontiguousarray(importance / importance.max(), np.float32)
    block_numbers = numbers_of(nested.type, targets, weights)
    if isinstance(block_numbers, int):
        raise overflow_error("f16", block_numbers // cols, first, "")
    groups = slice(first // grid.group, -(-(first + cols) // grid.group))
    rounded.scales[:, groups] = block_numbers.scales
    assert rounded.units is not None
    rounded.units[:, groups] = block_numbers.d
    if block_numbers.minima is not None and rounded.zeros is not None and rounded.zero_units is not None:
        rounded.zeros[:, groups] = block_numbers.minima
        rounded.zero_units[:, groups] = block_numbers.dmin


def overflow_error(scales: str, row: int, column: int, hint: str) -> CodecError:
    """Return the error for a scale that the type of the scales cannot hold."""
    return CodecError(
        "quantizer.scale-overflow",
        f"{scales} cannot hold the scale of the group at row {row}, column {column}{hint}",
    )
