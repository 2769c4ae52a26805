"""Rounding of a whole matrix: nearest, with feedback, and by descent on the error under two factors.

The error is ``tr(G D A D^T)``, ``D`` what rounding changes, ``A`` the second moment of the inputs and ``G`` that of the
gradients at the outputs: half of it is the divergence of the model's outputs to second order (YAQA, arXiv 2505.22988).
The kernels make every sum in one order: results depend neither on threads nor on the instruction set in use.
"""

from __future__ import annotations

import numpy as np

from ingot.core import native
from ingot.errors import CodecError
from ingot.model.tensor import Array
from ingot.quantizers.factors import Factors, feedback_factor
from ingot.quantizers.grid import Grid, Rounded, kernel_grid
from ingot.quantizers.table import learn_levels

IMPORTANCE, GPTQ, TWO_SIDED = QUANTIZERS = ("importance", "gptq", "two-sided")
PASSES = 6
_BLOCK = 64  # rows that descend together
_STEP = 128  # columns between which errors are carried over at once


def round_matrix(
    weights: Array, grid: Grid, factors: Factors, quantizer: str = TWO_SIDED, levels: Array | None = None
) -> Rounded:
    """Return the matrix rounded to a grid.

    Parameters
    ----------
    weights : f32 [rows, cols]
        Finite.
    grid : Grid
    factors : Factors
    quantizer : str
        ``importance``: scales (and a table) of least error weighted by A's diagonal, then the nearest levels.
        ``gptq``: scales and codes column by column, errors fed back (``feedback_factor``). ``two-sided``: after that
        ``PASSES`` passes of coordinate descent on codes and scales under A and G.
    levels : f32 [2 ** bits], optional
        The table, where it was learnt before.

    Raises
    ------
    CodecError
        ``quantizer.scale-overflow``: the scales' type cannot hold a group's scale.
    """
    if levels is None:
        levels = learn_levels(weights, grid, factors.weights) if grid.learnt else grid.integers
    groups = grid.groups(weights.shape[1])
    shape = (len(weights), int(groups[-1]) + 1)
    rounded = Rounded(np.zeros(weights.shape, np.uint8), np.zeros(shape, np.float32), levels, groups)
    if quantizer == IMPORTANCE:
        for group in range(shape[1]):
            _choose_scales(rounded, grid, weights, factors.weights, group)
        native.kernels.rounding_nearest(kernel_grid(grid, levels), weights, rounded.codes, groups, rounded.scales, None)
        return rounded
    _feed_back(rounded, grid, weights, factors)
    if quantizer == TWO_SIDED:
        for number in range(PASSES):
            _descend(rounded, grid, weights, factors, refit=number > 0)
    return rounded


def error_under(weights: Array, rounded: Rounded, factors: Factors) -> float:
    """Return ``tr(G D A D^T)`` over ``tr(G W A W^T)``."""

    def weighed(matrix: Array) -> float:
        product = multiplied(matrix, factors.inputs)
        if factors.outputs is not None:
            product = multiplied(factors.outputs, product)
        return float(np.vdot(matrix.astype(np.float64), product))

    whole = weighed(weights)
    return weighed(rounded.values() - weights) / whole if whole > 0 else 0.0


def multiplied(a: Array, b: Array) -> Array:
    """Return ``a @ b`` in f32, sums in one order on every machine."""
    out = np.empty((len(a), b.shape[1]), np.float32)
    native.kernels.matrix_multiply(np.ascontiguousarray(a), np.ascontiguousarray(b), out)
    return out


def _choose_scales(rounded: Rounded, grid: Grid, targets: Array, weights: Array, group: int) -> None:
    first, last = group * grid.group, min((group + 1) * grid.group, targets.shape[1])
    row = native.kernels.rounding_scales(
        kernel_grid(grid, rounded.levels), targets, first, last, weights[first:last], rounded.scales, None, group
    )
    if row < len(targets):
        raise CodecError(
            "quantizer.scale-overflow",
            f"expected a scale that {grid.scales} can hold, found a larger one for the group at row {row}, column "
            f"{first}; use scales=bf16 or scales=f32",
        )


def _feed_back(rounded: Rounded, grid: Grid, weights: Array, factors: Factors) -> None:
    """Round group by group; what is left of each column's error moves the targets of those after it."""
    cols, (factor, left) = weights.shape[1], feedback_factor(factors.inputs)
    targets, errors = weights.copy(), np.zeros_like(weights)
    taken = kernel_grid(grid, rounded.levels)
    for first in range(0, cols, grid.group):
        last = min(first + grid.group, cols)
        _choose_scales(rounded, grid, targets, left, first // grid.group)
        for start in range(first, last, _STEP):
            stop = min(start + _STEP, last)
            native.kernels.rounding_feedback(
                taken,
                (start, stop),
                weights,
                targets,
                factor,
                errors,
                rounded.codes,
                rounded.groups,
                rounded.scales,
                None,
            )
            if stop < cols:
                native.kernels.matrix_multiply_add(errors, factor, targets, start, stop, stop, cols - stop)


def _descend(rounded: Rounded, grid: Grid, weights: Array, factors: Factors, *, refit: bool) -> None:
    """Move codes one by one to the least of the error, rows in blocks; the error never grows."""
    rows, taken = len(weights), kernel_grid(grid, rounded.levels)
    product = multiplied(rounded.values() - weights, factors.inputs)
    for first in range(0, rows, _BLOCK):
        block = slice(first, min(first + _BLOCK, rows))
        if factors.outputs is None:
            outputs, gradient = np.eye(block.stop - first, dtype=np.float32), product[block].copy()
        else:
            outputs = np.ascontiguousarray(factors.outputs[block, block])
            gradient = multiplied(factors.outputs[block], product)
        codes, scales = rounded.codes[block], rounded.scales[block]
        native.kernels.rounding_descend(
            taken, factors.inputs, outputs, gradient, product[block], refit, codes, rounded.groups, scales, None
        )
