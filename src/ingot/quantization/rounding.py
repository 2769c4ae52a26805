"""Rounding of a full matrix: to the nearest level, with feedback, and by descent on the error under two factors.

The error is ``tr(G D A D^T)``. ``D`` is the change by rounding, ``A`` the second moment of the inputs, and ``G`` the
second moment of the gradients at the outputs. Half of the error is the divergence of the model's outputs to second
order (YAQA, arXiv 2505.22988). Kernels add in a fixed order, so results depend neither on threads nor on the
instruction set.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np

from ingot.core.runtime import native
from ingot.core.runtime.parallel import check_cancelled
from ingot.model.tensor import Array
from ingot.quantization.factors import Factors, Feedback, feedback_factor
from ingot.quantization.grid import Grid, Rounded
from ingot.quantization.scales import choose, second_of
from ingot.quantization.table import learn_levels

IMPORTANCE, GPTQ, TWO_SIDED = QUANTIZERS = ("importance", "gptq", "two-sided")
PASSES = 6
_BLOCK = 64  # rows that descend together
_STEP = 128  # columns after which errors are added to the targets of all following columns
_WIDE = 512  # columns whose errors are summed at once


@dataclass(frozen=True, slots=True)
class How:
    """The quantizer and the order of columns; ``round_matrix`` describes both."""

    quantizer: str = TWO_SIDED
    act_order: bool = False


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
        ``gptq``: scales and codes column by column, with error feedback (``feedback_factor``). ``two-sided``: the same,
        then ``PASSES`` passes of coordinate descent on codes and scales under A and G.
    levels : f32 [2 ** bits], optional
        The table, if it was learnt before.
    act_order : bool
        Feedback rounds columns in order of the weight of their errors, the heaviest first, after all scales are chosen.

    Raises
    ------
    CodecError
        ``quantizer.scale-overflow``: the scales' type cannot hold a group's scale.
    """
    work = _Work(factors, How(quantizer, act_order))
    rounded = work.start(weights, grid, levels)
    work.end([rounded], weights)
    return rounded


def round_bands(weights: Array, grid: Grid, factors: Factors, how: How, rows: int) -> list[Rounded]:
    """Return the matrix rounded to a learnt grid in bands of ``rows`` rows, each with its own levels.

    Parameters and errors are those of ``round_matrix``. Descent covers all rows together.
    """
    work = _Work(factors, how)
    bands = [work.start(weights[first : first + rows], grid) for first in range(0, len(weights), rows)]
    work.end(bands, weights)
    return bands


class _Work:
    """The rounding of one matrix, with factors that are computed once for all bands of its rows."""

    def __init__(self, factors: Factors, how: How) -> None:
        self._factors = factors
        self._how = how

    @cached_property
    def _order(self) -> Array:
        return np.argsort(-self._factors.weights, kind="stable")

    @cached_property
    def _feedback(self) -> Feedback:
        if self._how.act_order:
            return feedback_factor(lambda: self._factors.inputs[np.ix_(self._order, self._order)])
        return feedback_factor(self._factors.new_inputs)

    def start(self, weights: Array, grid: Grid, levels: Array | None = None) -> Rounded:
        """Return ``weights``, rows of the matrix, rounded to ``grid`` without regard to other rows."""
        if levels is None:
            levels = learn_levels(weights, grid, self._factors.weights) if grid.learnt else grid.levels
        rounded = Rounded.start(grid, (len(weights), weights.shape[1]), levels)
        if grid.second:
            rounded.second = second_of(weights, grid)
        if self._how.quantizer == IMPORTANCE:
            self._choose_all(rounded, weights)
            native.kernels.rounding_nearest(
                rounded.kernel_grid, weights, rounded.codes, rounded.groups, rounded.scales, rounded.zeros
            )
            return rounded
        rounded.more_damping = self._feedback.more
        (self._feed_back_in_order if self._how.act_order else self._feed_back)(rounded, weights)
        return rounded

    def end(self, bands: Sequence[Rounded], weights: Array) -> None:
        """Finish all ``bands`` of the matrix: if the quantizer is ``two-sided``, run coordinate descent on all rows
        together.
        """
        if self._how.quantizer == TWO_SIDED:
            self.__dict__.pop("_feedback", None)  # as large as A, and no longer needed
            for turn in range(PASSES):
                descend(bands, weights, self._factors, refit=turn > 0)

    def _choose_all(self, rounded: Rounded, weights: Array) -> None:
        for first, last in _spans(rounded):
            choose(rounded, weights, self._factors.weights, first, last)

    def _feed_back(self, rounded: Rounded, weights: Array) -> None:
        """Round group by group; the weighted error of each column moves the targets of the columns after it."""
        factor, diagonal, _ = self._feedback
        targets = weights.copy()
        errors = np.zeros_like(weights)
        for first, last in _spans(rounded):
            check_cancelled()
            choose(rounded, targets, diagonal, first, last)
            _feed(rounded, weights, targets, factor, errors, (first, last))
        del errors
        self._note_error(rounded, weights, targets, rounded.values())

    def _feed_back_in_order(self, rounded: Rounded, weights: Array) -> None:
        """Round columns in order of weight, the heaviest first.

        All scales are chosen first. Groups consist of adjacent columns of the matrix, not of columns in the new order.
        """
        self._choose_all(rounded, weights)
        order = self._order
        ordered = np.ascontiguousarray(weights[:, order])
        groups = np.ascontiguousarray(rounded.groups[order])
        permuted = replace(rounded, codes=np.zeros_like(rounded.codes), groups=groups)
        targets = ordered.copy()
        _feed(permuted, ordered, targets, self._feedback.upper, np.zeros_like(ordered), (0, weights.shape[1]))
        rounded.codes[:, order] = permuted.codes
        self._note_error(rounded, ordered, targets, permuted.values())

    def _note_error(self, rounded: Rounded, weights: Array, targets: Array, values: Array) -> None:
        """Compute and store the error sums, if no descent follows feedback and errors are weighted by A alone."""
        if self._how.quantizer == GPTQ and self._factors.outputs is None:
            rounded.error_sums = _error_sums(self._feedback, weights, targets, values)


def _error_sums(feedback: Feedback, weights: Array, targets: Array, values: Array) -> tuple[float, float]:
    """Return ``tr(D A D^T)`` and ``tr(W A W^T)`` by ``A = (U + I) D (U + I)^T``; columns are in U's order.

    ``D (U + I)`` is the difference of targets and results, because targets include the effect of all earlier errors.
    The second number is only reported, so NumPy may compute it in any order of sums.
    """
    upper = feedback.upper
    diagonal = feedback.diagonal.astype(np.float64)
    cols = weights.shape[1]
    error = total = 0.0
    for first in range(0, cols, _WIDE):
        last = min(first + _WIDE, cols)
        away = np.square(targets[:, first:last] - values[:, first:last]).sum(0, dtype=np.float64)
        product = weights[:, :last] @ upper[:last, first:last]
        product += weights[:, first:last]
        error += float(away @ diagonal[first:last])
        total += float(np.square(product).sum(0, dtype=np.float64) @ diagonal[first:last])
    return error, total


class HasValues(Protocol):
    """A rounded matrix, or a band of its rows."""

    def values(self) -> Array:
        """Return the decoded values: f32 [rows, cols]."""
        ...


def values_of(bands: Sequence[HasValues]) -> Array:
    """Return the decoded values of a matrix whose rows are split into bands: f32 [rows, cols]."""
    return np.concatenate([band.values() for band in bands]) if len(bands) > 1 else bands[0].values()


def error_under(weights: Array, values: Array, factors: Factors) -> float:
    """Return ``tr(G D A D^T) / tr(G W A W^T)``; see ``error_sums``."""
    error, total = error_sums(weights, values, factors)
    return error / total if total > 0 else 0.0


def error_sums(weights: Array, values: Array, factors: Factors) -> tuple[float, float]:
    """Return ``tr(G D A D^T)`` and ``tr(G W A W^T)``, where W are the weights and D is ``values`` minus the weights.

    ``values`` is f32 [rows, cols].
    """

    def weigh(matrix: Array) -> float:
        product = multiply(matrix, factors.inputs)
        if factors.outputs is not None:
            product = multiply(factors.outputs, product)
        return float(np.vdot(matrix.astype(np.float64), product))

    total = weigh(weights)
    return (weigh(values - weights) if total > 0 else 0.0), total


def multiply(a: Array, b: Array) -> Array:
    """Return ``a @ b`` in f32, with sums in one order on every machine."""
    out = np.empty((len(a), b.shape[1]), np.float32)
    native.kernels.matrix_multiply(np.ascontiguousarray(a), np.ascontiguousarray(b), out)
    return out


def _spans(rounded: Rounded) -> Iterator[tuple[int, int]]:
    cols = rounded.codes.shape[1]
    span = rounded.grid.span
    for first in range(0, cols, span):
        yield first, min(first + span, cols)


def _feed(
    rounded: Rounded, weights: Array, targets: Array, factor: Array, errors: Array, columns: tuple[int, int]
) -> None:
    """Round columns whose scales are chosen.

    ``columns`` are the first column and the one after the last. Their errors are added to the ``targets`` of all later
    columns.
    """
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


def descend(bands: Sequence[Rounded], weights: Array, factors: Factors, *, refit: bool) -> None:
    """Change codes one by one to the code of least error, in blocks of rows; the error never grows."""
    product = multiply(values_of(bands) - weights, factors.inputs)
    above = 0
    for band in bands:
        grid = band.kernel_grid
        rows = len(band.codes)
        for first in range(0, rows, _BLOCK):
            block_rows = slice(first, min(first + _BLOCK, rows))
            block = slice(above + block_rows.start, above + block_rows.stop)
            if factors.outputs is None:
                outputs = np.eye(block_rows.stop - first, dtype=np.float32)
                gradient = product[block].copy()
            else:
                outputs = np.ascontiguousarray(factors.outputs[block, block])
                gradient = multiply(factors.outputs[block], product)
            native.kernels.rounding_descend(
                grid,
                factors.inputs,
                outputs,
                gradient,
                product[block],
                refit and band.grid.scaled and not band.grid.small,
                band.codes[block_rows],
                band.groups,
                band.scales[block_rows],
                _rows(band.zeros, block_rows),
                _rows(band.units, block_rows),
                _rows(band.zero_units, block_rows),
            )
        above += rows


def _rows(numbers: Array | None, block: slice) -> Array | None:
    return None if numbers is None else numbers[block]
