"""Rounding of a whole matrix: nearest, with feedback, and by descent on the error under two factors.

The error is ``tr(G D A D^T)``, ``D`` what rounding changes, ``A`` the second moment of the inputs and ``G`` that of the
gradients at the outputs: half of it is the divergence of the model's outputs to second order (YAQA, arXiv 2505.22988).
The kernels make every sum in one order: results depend neither on threads nor on the instruction set in use.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np

from ingot.core.runtime import native
from ingot.core.runtime.parallel import go_on
from ingot.model.tensor import Array
from ingot.quantization.factors import Factors, Feedback, feedback_factor
from ingot.quantization.grid import Grid, Rounded
from ingot.quantization.scales import choose, second_of
from ingot.quantization.table import learn_levels

IMPORTANCE, GPTQ, TWO_SIDED = QUANTIZERS = ("importance", "gptq", "two-sided")
PASSES = 6
_BLOCK = 64  # rows that descend together
_STEP = 128  # columns between which errors are carried over at once
_WIDE = 512  # columns whose errors are summed at once


@dataclass(frozen=True, slots=True)
class How:
    """How a matrix is rounded: see ``round_matrix``."""

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
    work = _Work(factors, How(quantizer, act_order))
    found = work.begun(weights, grid, levels)
    work.end([found], weights)
    return found


def round_bands(weights: Array, grid: Grid, factors: Factors, how: How, rows: int) -> list[Rounded]:
    """Return the matrix rounded to a learnt grid, so many rows at a time with levels of their own.

    Parameters, and errors, are those of ``round_matrix``. Descent goes over all rows.
    """
    work = _Work(factors, how)
    found = [work.begun(weights[first : first + rows], grid) for first in range(0, len(weights), rows)]
    work.end(found, weights)
    return found


class _Work:
    """The rounding of one matrix."""

    def __init__(self, factors: Factors, how: How) -> None:
        self._factors, self._how = factors, how

    @cached_property
    def _order(self) -> Array:
        return np.argsort(-self._factors.weights, kind="stable")

    @cached_property
    def _feedback(self) -> Feedback:
        if self._how.act_order:
            return feedback_factor(lambda: self._factors.inputs[np.ix_(self._order, self._order)])
        return feedback_factor(self._factors.made)

    def begun(self, weights: Array, grid: Grid, levels: Array | None = None) -> Rounded:
        """Return rows of the matrix rounded one by one."""
        if levels is None:
            levels = learn_levels(weights, grid, self._factors.weights) if grid.learnt else grid.levels
        rounded = Rounded.begun(grid, (len(weights), weights.shape[1]), levels)
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
        """Let all rows descend together, if they are to."""
        if self._how.quantizer == TWO_SIDED:
            self.__dict__.pop("_feedback", None)  # as large as A, and done with
            for number in range(PASSES):
                descend(bands, weights, self._factors, refit=number > 0)

    def _choose_all(self, rounded: Rounded, weights: Array) -> None:
        for first, last in _spans(rounded):
            choose(rounded, weights, self._factors.weights, first, last)

    def _feed_back(self, rounded: Rounded, weights: Array) -> None:
        """Round group by group; what is left of each column's error moves the targets of those after it."""
        factor, left, _ = self._feedback
        targets, errors = weights.copy(), np.zeros_like(weights)
        for first, last in _spans(rounded):
            go_on()
            choose(rounded, targets, left, first, last)
            _feed(rounded, weights, targets, factor, errors, (first, last))
        del errors
        self._tell(rounded, weights, targets, rounded.values())

    def _feed_back_in_order(self, rounded: Rounded, weights: Array) -> None:
        """Round the columns that weigh most first, by scales that are chosen before: groups are those of the matrix."""
        self._choose_all(rounded, weights)
        order = self._order
        wanted = np.ascontiguousarray(weights[:, order])
        groups = np.ascontiguousarray(rounded.groups[order])
        turned = replace(rounded, codes=np.zeros_like(rounded.codes), groups=groups)
        targets = wanted.copy()
        _feed(turned, wanted, targets, self._feedback.upper, np.zeros_like(wanted), (0, weights.shape[1]))
        rounded.codes[:, order] = turned.codes
        self._tell(rounded, wanted, targets, turned.values())

    def _tell(self, rounded: Rounded, wanted: Array, targets: Array, values: Array) -> None:
        """Note the error where it follows from what feedback left of each column, and nothing changes any more."""
        if self._how.quantizer == GPTQ and self._factors.outputs is None:
            rounded.told = _error_left(self._feedback, wanted, targets, values)


def _error_left(feedback: Feedback, wanted: Array, targets: Array, values: Array) -> tuple[float, float]:
    """Return ``tr(D A D^T)`` and ``tr(W A W^T)`` by ``A = (U + I) D (U + I)^T``; columns are in U's order.

    ``D (U + I)`` is what targets, moved by all errors before them, were from what they became. The second is a figure
    to tell alone: NumPy multiplies.
    """
    upper, left, cols = feedback.upper, feedback.left.astype(np.float64), wanted.shape[1]
    error = whole = 0.0
    for first in range(0, cols, _WIDE):
        last = min(first + _WIDE, cols)
        away = np.square(targets[:, first:last] - values[:, first:last]).sum(0, dtype=np.float64)
        turned = wanted[:, :last] @ upper[:last, first:last]
        turned += wanted[:, first:last]
        error += float(away @ left[first:last])
        whole += float(np.square(turned).sum(0, dtype=np.float64) @ left[first:last])
    return error, whole


class Standing(Protocol):
    """What stands for a matrix, or for some of its rows."""

    def values(self) -> Array:
        """Return them: f32 [rows, cols]."""
        ...


def values_of(bands: Sequence[Standing]) -> Array:
    """Return what the codes of a matrix stand for, of which each band has some rows: f32 [rows, cols]."""
    return np.concatenate([band.values() for band in bands]) if len(bands) > 1 else bands[0].values()


def error_under(weights: Array, values: Array, factors: Factors) -> float:
    """Return ``tr(G D A D^T)`` over ``tr(G W A W^T)``, ``D`` what ``values`` (f32 [rows, cols]) differ by."""

    def weighed(matrix: Array) -> float:
        product = multiplied(matrix, factors.inputs)
        if factors.outputs is not None:
            product = multiplied(factors.outputs, product)
        return float(np.vdot(matrix.astype(np.float64), product))

    whole = weighed(weights)
    return weighed(values - weights) / whole if whole > 0 else 0.0


def multiplied(a: Array, b: Array) -> Array:
    """Return ``a @ b`` in f32, sums in one order on every machine."""
    out = np.empty((len(a), b.shape[1]), np.float32)
    native.kernels.matrix_multiply(np.ascontiguousarray(a), np.ascontiguousarray(b), out)
    return out


def _spans(rounded: Rounded) -> Iterator[tuple[int, int]]:
    cols, span = rounded.codes.shape[1], rounded.grid.span
    for first in range(0, cols, span):
        yield first, min(first + span, cols)


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


def descend(bands: Sequence[Rounded], weights: Array, factors: Factors, *, refit: bool) -> None:
    """Move codes one by one to the least of the error, rows in blocks; the error never grows."""
    product = multiplied(values_of(bands) - weights, factors.inputs)
    above = 0
    for band in bands:
        taken, rows = band.kernel_grid, len(band.codes)
        for first in range(0, rows, _BLOCK):
            some = slice(first, min(first + _BLOCK, rows))
            block = slice(above + some.start, above + some.stop)
            if factors.outputs is None:
                outputs, gradient = np.eye(some.stop - first, dtype=np.float32), product[block].copy()
            else:
                outputs = np.ascontiguousarray(factors.outputs[block, block])
                gradient = multiplied(factors.outputs[block], product)
            native.kernels.rounding_descend(
                taken,
                factors.inputs,
                outputs,
                gradient,
                product[block],
                refit and band.grid.scaled and not band.grid.small,
                band.codes[some],
                band.groups,
                band.scales[some],
                _rows(band.zeros, some),
                _rows(band.units, some),
                _rows(band.zero_units, some),
            )
        above += rows


def _rows(numbers: Array | None, block: slice) -> Array | None:
    return None if numbers is None else numbers[block]
