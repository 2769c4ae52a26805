"""Rounding with feedback: the error of each element changes the targets of later columns and of earlier rows.

Under ``G = (L + I) D (L + I)^T`` and ``A = (U + I) D (U + I)^T``, the error ``tr(G D A D^T)`` is the weighted sum of
the squares of ``(L + I)^T D (U + I)``. Each element is rounded to the target that minimizes its square, with all
earlier elements fixed. Columns are rounded from first to last, rows from last to first (YAQA, arXiv 2505.22988).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ingot.core.runtime import native
from ingot.core.runtime.parallel import check_cancelled
from ingot.model.tensor import Array
from ingot.quantization.blocks import blocks_of, rows_of, spans_between
from ingot.quantization.factors import Feedback, links_of
from ingot.quantization.grid import Rounded
from ingot.quantization.products import PANEL, Pairs, unit_of
from ingot.quantization.scales import choose

_STEP = 128  # columns after which errors are added to the targets of all following columns, at least


def feed_back(
    bands: Sequence[Rounded],
    weights: Array,
    feedback: Feedback,
    outputs: Array | None,
    *,
    exact: bool = True,
    chosen: bool = False,
) -> Array:
    """Round all columns; return their targets, f32 [rows, cols], without the effect of rows on each other.

    Parameters
    ----------
    bands : sequence of Rounded
        Updated in place.
    weights : f32 [rows, cols]
    feedback : Feedback
    outputs : f32 [rows, rows], optional
        G, damped. With it, the errors of a row change the targets of earlier rows, by L.
    exact : bool
        Whether products are computed in f32; otherwise in bf16 with sums in f32.
    chosen : bool
        Whether all scales are chosen; if not, the scales of a span are chosen when its first column is reached.
    """
    work = _Work(bands, weights, feedback, outputs, exact, chosen)
    for first in range(0, weights.shape[1], work.step):
        work.round(first, min(first + work.step, weights.shape[1]))
    return work.targets


class _RowLinks:
    """The effect of errors on earlier rows: the factor L, and the changes of targets in the present step of columns."""

    def __init__(self, outputs: Array, blocks: Sequence[slice], unit: float, *, exact: bool) -> None:
        below = links_of(outputs).below
        self._below = [np.ascontiguousarray(below[block, block]) for block in blocks]
        self._blocks = blocks
        exact = exact or any(block.start % 2 for block in blocks)
        self._matrix = below if exact else Pairs.pack(below)
        self._unit = unit
        self._shifts = np.zeros((0, 0), np.float32)
        self._first = 0

    def begin(self, first: int, last: int) -> None:
        """Begin a step of columns; no target of it is changed yet."""
        self._first = first
        self._shifts = np.zeros((last - first, self._blocks[-1].stop), np.float32)

    def of_block(self, index: int) -> tuple[Array, Array, Array, int]:
        """Return L within a block of rows, the changes of its targets, an array for its errors, and the first
        column.
        """
        shifts = np.ascontiguousarray(self._shifts[:, self._blocks[index]].T)
        return self._below[index], shifts, np.zeros_like(shifts), self._first

    def spread(self, index: int, changes: Array) -> None:
        """Add the effect of a block's errors, ``changes`` f32 [rows, columns], to the targets of all earlier rows."""
        rows = self._blocks[index]
        if not rows.start:
            return
        transposed = np.ascontiguousarray(changes.T)
        if isinstance(self._matrix, Pairs):
            self._matrix.add(transposed, (rows.start, rows.stop), (0, rows.start), self._shifts, self._unit)
        else:
            count = rows.stop - rows.start
            native.kernels.matrix_multiply_add(transposed, self._matrix[rows], self._shifts, 0, count, 0, rows.start)


class _Work:
    """Rounding with feedback in steps of columns: targets and errors."""

    def __init__(
        self,
        bands: Sequence[Rounded],
        weights: Array,
        feedback: Feedback,
        outputs: Array | None,
        exact: bool,
        chosen: bool,
    ) -> None:
        self._bands = bands
        self._weights = weights
        self._feedback = feedback
        self._unit = unit_of(weights)
        self._blocks = blocks_of(bands, len(weights)) if outputs is None else blocks_of(bands)
        self._links = None
        if outputs is not None:
            self._links = _RowLinks(outputs, [rows for _, rows in self._blocks], self._unit, exact=exact)
        self._span = bands[0].grid.span
        # The scales of a span that takes several steps are chosen before, without the effect of rows.
        self._before = not chosen and self._span > 2 * _STEP
        self._within = not chosen and not self._before
        self.step = -(-_STEP // self._span) * self._span if self._within else _STEP
        self._pairs = None if exact or self.step % PANEL else Pairs.pack(feedback.upper)
        self.targets = weights.copy()
        self._errors = np.zeros_like(weights)

    def round(self, first: int, last: int) -> None:
        """Round the columns of a step and update the targets of all later columns."""
        if self._before and first % self._span < self.step:
            self._choose_before(first - first % self._span)
        if self._links is not None:
            self._links.begin(first, last)
        for index in reversed(range(len(self._blocks))):
            check_cancelled()
            self._round_block(index, first, last)
        cols = self._weights.shape[1]
        if last == cols:
            return
        if self._pairs is not None:
            self._pairs.add(self._errors, (first, last), (last, cols), self.targets, self._unit, first=first)
        else:
            upper = self._feedback.upper
            native.kernels.matrix_multiply_add(self._errors, upper, self.targets, first, last, last, cols - last)

    def _choose_before(self, first: int) -> None:
        last = min(first + self._span, self._weights.shape[1])
        for band, rows in zip(self._bands, rows_of(self._bands), strict=True):
            targets = np.ascontiguousarray(self.targets[rows, first:last])
            choose(band, targets, self._feedback.diagonal[first:last], first)

    def _round_block(self, index: int, first: int, last: int) -> None:
        block, rows = self._blocks[index]
        linked: tuple[Any, ...] = () if self._links is None else self._links.of_block(index)
        for start, stop in spans_between(self._span, first, last) if self._within else [(first, last)]:
            if self._within:
                aims = self.targets[rows, start:stop]
                aims = aims + linked[1][:, start - first : stop - first] if linked else np.ascontiguousarray(aims)
                choose(block, aims, self._feedback.diagonal[start:stop], start)
            native.kernels.rounding_feedback(
                block.kernel_grid,
                (start, stop, last),
                self._weights[rows],
                self.targets[rows],
                self._feedback.upper,
                self._errors[rows],
                block.codes,
                block.groups,
                block.scales,
                block.zeros,
                *linked,
            )
        if self._links is not None:
            self._links.spread(index, linked[2])
