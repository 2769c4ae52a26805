"""Rounding of a full matrix: to the nearest level, with feedback, and by descent on the error under two factors.

The error is ``tr(G D A D^T)``. ``D`` is the change by rounding, ``A`` the second moment of the inputs, and ``G`` the
second moment of the gradients at the outputs. Half of the error is the KL divergence of the model's outputs to second
order (YAQA, arXiv 2505.22988). Kernels add in a fixed order, so results depend neither on threads nor on the
instruction set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from ingot.core.runtime import native
from ingot.core.runtime.parallel import check_cancelled
from ingot.model.tensor import Array
from ingot.quantization.blocks import BLOCK, blocks_of, rows_of, spans_between
from ingot.quantization.coded import choose_steps
from ingot.quantization.descent import Descent
from ingot.quantization.factors import Factors, Feedback, feedback_factor
from ingot.quantization.feedback import feed_back
from ingot.quantization.grid import Grid, Rounded
from ingot.quantization.products import Pairs, multiply, unit_of
from ingot.quantization.scales import choose, second_of
from ingot.quantization.table import learn_levels
from ingot.quantization.threads import each_block, share

IMPORTANCE, GPTQ, TWO_SIDED = QUANTIZERS = ("importance", "gptq", "two-sided")
PASSES = 2
PASSES_LEARNT = 6
"""The passes for learnt tables. Compared with ``PASSES``, they reduce the divergence by 4 % for tables of 2 bits, and
by 2 % for 3 bits.
"""
PASSES_ALONE = 6
"""The passes if there is no G; feedback, which comes before descent, has then not moved targets of other rows."""
_LARGE = 1 << 20  # weights of a matrix whose error is computed with products in bf16
_WIDE = 512  # columns whose errors are summed at once


@dataclass(frozen=True, slots=True)
class How:
    """Options of rounding: the quantizer and the order of columns. ``round_matrix`` describes both."""

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
        then passes of coordinate descent on codes and scales under A and G.
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
    work.round([rounded], weights)
    return rounded


def round_bands(weights: Array, grid: Grid, factors: Factors, how: How, rows: int) -> list[Rounded]:
    """Return the matrix rounded to a learnt grid in bands of ``rows`` rows, each with its own levels.

    Parameters and errors are those of ``round_matrix``. Feedback and descent cover all rows together.
    """
    work = _Work(factors, how)
    bands = [work.start(weights[first : first + rows], grid) for first in range(0, len(weights), rows)]
    work.round(bands, weights)
    return bands


class _Work:
    """The rounding of one matrix, in one band of rows, or in several bands with one table each."""

    def __init__(self, factors: Factors, how: How) -> None:
        self._factors = factors
        self._how = how

    def start(self, weights: Array, grid: Grid, levels: Array | None = None) -> Rounded:
        """Return an unrounded band for the rows ``weights``, with its table and second scale."""
        if levels is None:
            levels = learn_levels(weights, grid, self._factors.weights) if grid.learnt else grid.levels
        rounded = Rounded.start(grid, (len(weights), weights.shape[1]), levels)
        if grid.second:
            rounded.second = second_of(weights, grid)
        return rounded

    def round(self, bands: Sequence[Rounded], weights: Array) -> None:
        """Choose the scales and codes of ``bands``, which together are the rows of ``weights``."""
        if self._how.quantizer == IMPORTANCE:
            self._choose_all(bands, weights)
            each_block(_blocks(bands, len(weights)), lambda pair: _nearest(pair[0], weights[pair[1]]))
            return
        self._feed_back(bands, weights)
        if self._how.quantizer == TWO_SIDED:
            descent = Descent(bands, weights, self._factors)
            alone = self._factors.outputs is None
            for turn in range(PASSES_ALONE if alone else PASSES_LEARNT if bands[0].grid.learnt else PASSES):
                descent.run(refit=bands[0].grid.coded is None and (not alone or turn > 0))

    def _choose_all(self, bands: Sequence[Rounded], weights: Array) -> None:
        def choose_spans(pair: tuple[Rounded, slice]) -> None:
            block, rows = pair
            for first, last in spans_between(block.grid.span, 0, weights.shape[1]):
                check_cancelled()
                targets = np.ascontiguousarray(weights[rows, first:last])
                choose(block, targets, self._factors.weights[first:last], first)

        each_block(_blocks(bands, len(weights)), choose_spans)

    def _feed_back(self, bands: Sequence[Rounded], weights: Array) -> None:
        """Round column by column; under both factors also row by row, from the last row to the first.

        With ``act_order``, all scales are chosen first. Then the columns are rounded in descending order of weight.
        Groups consist of adjacent columns of the matrix, not of columns in the new order.
        """
        factors = self._factors
        two_sided = self._how.quantizer == TWO_SIDED
        outputs = factors.outputs if two_sided else None
        ordered = list(bands)
        if not self._how.act_order:
            feedback = feedback_factor(factors.new_inputs)
            chosen = bands[0].grid.coded is not None
            if chosen:
                choose_steps(bands[0], weights, factors, feedback)
            targets = feed_back(bands, weights, feedback, outputs, exact=not two_sided, chosen=chosen)
        else:
            self._choose_all(bands, weights)
            order = np.argsort(-factors.weights, kind="stable")
            feedback = feedback_factor(lambda: factors.inputs[np.ix_(order, order)])
            weights = np.ascontiguousarray(weights[:, order])
            ordered = [
                replace(band, codes=np.zeros_like(band.codes), groups=np.ascontiguousarray(band.groups[order]))
                for band in bands
            ]
            targets = feed_back(ordered, weights, feedback, outputs, exact=not two_sided, chosen=True)
            for band, permuted in zip(bands, ordered, strict=True):
                band.codes[:, order] = permuted.codes
        for band, permuted, rows in zip(bands, ordered, rows_of(bands), strict=True):
            band.more_damping = feedback.more
            if not two_sided and factors.outputs is None:
                band.error_sums = _error_sums(feedback, weights[rows], targets[rows], permuted.values())


def _blocks(bands: Sequence[Rounded], rows: int) -> list[tuple[Rounded, slice]]:
    """Return the bands in blocks of rows that do not depend on each other, about one block for each thread."""
    return blocks_of(bands, max(BLOCK, -(-rows // share())))


def _nearest(block: Rounded, weights: Array) -> None:
    native.kernels.rounding_nearest(block.kernel_grid, weights, block.codes, block.groups, block.scales, block.zeros)


def _error_sums(feedback: Feedback, weights: Array, targets: Array, values: Array) -> tuple[float, float]:
    """Return ``tr(D A D^T)`` and ``tr(W A W^T)``, computed from ``A = (U + I) D (U + I)^T``.

    Columns are in the order of U. ``D (U + I)`` is targets minus results, because targets include the effect of all
    earlier errors. The second number is only for reports, so NumPy may add in any order.
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
    """Return ``tr(G D A D^T)`` and ``tr(G W A W^T)``: W are the weights, D is ``values`` minus the weights.

    ``values`` is f32 [rows, cols]. Products of large matrices are in bf16 with sums in f32, because rounding errors
    average out.
    """

    exact = weights.size < _LARGE
    inputs = factors.inputs if exact else Pairs.pack(factors.inputs)

    def weigh(matrix: Array) -> float:
        unit = unit_of(matrix)
        product = _times(matrix, inputs, unit)
        if factors.outputs is not None:
            product = _times(factors.outputs, product if exact else Pairs.pack(product, unit))
        return sum(float(np.vdot(row.astype(np.float64), sums)) for row, sums in zip(matrix, product, strict=True))

    total = weigh(weights)
    return (weigh(values - weights) if total > 0 else 0.0), total


def _times(a: Array, b: Array | Pairs, unit: float = 1.0) -> Array:
    return b.multiply(a, unit) if isinstance(b, Pairs) else multiply(a, b)
