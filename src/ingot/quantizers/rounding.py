"""Rounding of a whole matrix: nearest, with feedback, and by descent on the error under two factors.

The error is ``tr(G D A D^T)``, ``D`` what rounding changes, ``A`` the second moment of the inputs and ``G`` that of the
gradients at the outputs: half of it is the divergence of the model's outputs to second order (YAQA, arXiv 2505.22988).
The kernels make every sum in one order: results depend neither on threads nor on the instruction set in use.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ingot.core import native
from ingot.model.tensor import Array
from ingot.quantizers.factors import Factors, feedback_factor
from ingot.quantizers.grid import Grid, Rounded
from ingot.quantizers.scales import choose
from ingot.quantizers.table import learn_levels

IMPORTANCE, GPTQ, TWO_SIDED = QUANTIZERS = ("importance", "gptq", "two-sided")
PASSES = 6
_BLOCK = 64  # rows that descend together
_STEP = 128  # columns between which errors are carried over at once


def round_matrix(
    weights: Array,
    grid: Grid,
    factors: Factors,
    quantizer: str = TWO_SIDED,
    levels: Array | None = None,
    *,
    act_order: bool = False,
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
    act_order : bool
        Feedback takes the columns by what their errors weigh, the heaviest first, and all scales are chosen before.

    Raises
    ------
    CodecError
        ``quantizer.scale-overflow``: the scales' type cannot hold a group's scale.
    """
    if levels is None:
        levels = learn_levels(weights, grid, factors.weights) if grid.learnt else grid.levels
    rounded = Rounded.begun(grid, (len(weights), weights.shape[1]), levels)
    if quantizer == IMPORTANCE:
        _choose_all(rounded, weights, factors.weights)
        native.kernels.rounding_nearest(
            rounded.kernel_grid, weights, rounded.codes, rounded.groups, rounded.scales, rounded.zeros
        )
        return rounded
    if act_order:
        _feed_back_in_order(rounded, weights, factors)
    else:
        _feed_back(rounded, weights, factors)
    if quantizer == TWO_SIDED:
        for number in range(PASSES):
            _descend(rounded, weights, factors, refit=number > 0)
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


def _choose_all(rounded: Rounded, weights: Array, importance: Array) -> None:
    for first, last in _spans(rounded):
        choose(rounded, weights, importance, first, last)


def _spans(rounded: Rounded) -> Iterator[tuple[int, int]]:
    cols, span = rounded.codes.shape[1], rounded.grid.span
    for first in range(0, cols, span):
        yield first, min(first + span, cols)


def _feed_back(rounded: Rounded, weights: Array, factors: Factors) -> None:
    """Round group by group; what is left of each column's error moves the targets of those after it."""
    factor, left, rounded.more_damping = feedback_factor(factors.inputs)
    targets, errors = weights.copy(), np.zeros_like(weights)
    for first, last in _spans(rounded):
        choose(rounded, targets, left, first, last)
        _feed(rounded, weights, targets, factor, errors, (first, last))


def _feed_back_in_order(rounded: Rounded, weights: Array, factors: Factors) -> None:
    """Round the columns that weigh most first, by scales that are chosen before: groups are those of the matrix."""
    _choose_all(rounded, weights, factors.weights)
    order = np.argsort(-factors.weights, kind="stable")
    turned_inputs = np.ascontiguousarray(factors.inputs[np.ix_(order, order)])
    factor, _, rounded.more_damping = feedback_factor(turned_inputs)
    wanted = np.ascontiguousarray(weights[:, order])
    turned = replace(rounded, codes=np.zeros_like(rounded.codes), groups=np.ascontiguousarray(rounded.groups[order]))
    _feed(turned, wanted, wanted.copy(), factor, np.zeros_like(wanted), (0, weights.shape[1]))
    rounded.codes[:, order] = turned.codes


def _feed(
    rounded: Rounded, weights: Array, targets: Array, factor: Array, errors: Array, columns: tuple[int, int]
) -> None:
    """Round some columns, which have their scales; ``targets`` of all after them take in their errors."""
    cols, (first, last) = weights.shape[1], columns
    for start in range(first, last, _STEP):
        stop = min(start + _STEP, last)
        native.kernels.rounding_feedback(
            rounded.kernel_grid,
            (start, stop),
            weights,
            targets,
            factor,
            errors,
            rounded.codes,
            rounded.groups,
            rounded.scales,
            rounded.zeros,
        )
        if stop < cols:
            native.kernels.matrix_multiply_add(errors, factor, targets, start, stop, stop, cols - stop)


def _descend(rounded: Rounded, weights: Array, factors: Factors, *, refit: bool) -> None:
    """Move codes one by one to the least of the error, rows in blocks; the error never grows."""
    rows, taken = len(weights), rounded.kernel_grid
    product = multiplied(rounded.values() - weights, factors.inputs)
    for first in range(0, rows, _BLOCK):
        block = slice(first, min(first + _BLOCK, rows))
        if factors.outputs is None:
            outputs, gradient = np.eye(block.stop - first, dtype=np.float32), product[block].copy()
        else:
            outputs = np.ascontiguousarray(factors.outputs[block, block])
            gradient = multiplied(factors.outputs[block], product)
        native.kernels.rounding_descend(
            taken,
            factors.inputs,
            outputs,
            gradient,
            product[block],
            refit,
            rounded.codes[block],
            rounded.groups,
            rounded.scales[block],
            _rows(rounded.zeros, block),
            _rows(rounded.units, block),
            _rows(rounded.zero_units, block),
        )


def _rows(numbers: Array | None, block: slice) -> Array | None:
    return None if numbers is None else numbers[block]
