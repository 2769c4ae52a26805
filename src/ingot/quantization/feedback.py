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
from ingot.quantization.blocks import BLOCK, blocks_of, spans_between
from ingot.quantization.factors import Feedback, links_of
from ingot.quantization.grid import Rounded
from ingot.quantization.products import PANEL, Pairs, unit_of
from ingot.quantization.scales import choose
from ingot.quantization.threads import each_block, in_steps, share

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
    work.run()
    return work.targets


class _RowLinks:
    """The effect of errors on earlier rows: the factor L, and the changes of targets in the present steps."""

    def __init__(self, outputs: Array, blocks: Sequence[slice], unit: float, *, exact: bool) -> None:
        below = links_of(outputs).below
        self._below = [np.ascontiguousarray(below[block, block]) for block in blocks]
        self._blocks = blocks
        exact = exact or any(block.start % 2 for block in blocks)
        self._matrix = below if exact else Pairs.pack(below)
        self._unit = unit
        self._shifts: dict[int, Array] = {}

    def of_block(self, index: int, first: int, last: int) -> tuple[Array, Array, Array, int]:
        """Return L within a block of rows, the changes of its targets, an array for its errors, and the first
        column.
        """
        if index == len(self._blocks) - 1:
            self._shifts[first] = np.zeros((last - first, self._blocks[-1].stop), np.float32)
        shifts = np.ascontiguousarray(self._shifts[first][:, self._blocks[index]].T)
        return self._below[index], shifts, np.zeros_like(shifts), first

    def spread(self, index: int, first: int, changes: Array) -> None:
        """Add the effect of a block's errors, ``changes`` f32 [rows, columns], to the targets of all earlier rows."""
        rows = self._blocks[index]
        if not rows.start:
            del self._shifts[first]
            return
        step_shifts = self._shifts[first]
        transposed = np.ascontiguousarray(changes.T)
        if isinstance(self._matrix, Pairs):
            self._matrix.add(transposed, (rows.start, rows.stop), (0, rows.start), step_shifts, self._unit)
        else:
            count = rows.stop - rows.start
            native.kernels.matrix_multiply_add(transposed, self._matrix[rows], step_shifts, 0, count, 0, rows.start)


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
        # Without G, rows are independent: as few blocks as threads.
        self._blocks = blocks_of(bands, BLOCK if outputs is not None else max(BLOCK, -(-len(weights) // share())))
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

    def run(self) -> None:
        """Round all columns, in steps that overlap on threads."""
        cols = self._weights.shape[1]
        steps = [(first, min(first + self.step, cols)) for first in range(0, cols, self.step)]
        blocks = range(len(self._blocks))
        if self._links is not None:
            in_steps(len(steps), len(blocks), lambda step, index: self._round(index, *steps[step]))
        else:
            each_block(blocks, lambda index: self._round_all(index, steps))

    def _round_all(self, index: int, steps: Sequence[tuple[int, int]]) -> None:
        for first, last in steps:
            self._round(index, first, last)

    def _round(self, index: int, first: int, last: int) -> None:
        """Round the columns of a step in a block of rows, and update the targets of all later columns."""
        check_cancelled()
        block, rows = self._blocks[index]
        cols = self._weights.shape[1]
        if self._before and first % self._span < self.step:
            start = first - first % self._span
            stop = min(start + self._span, cols)
            targets = np.ascontiguousarray(self.targets[rows, start:stop])
            choose(block, targets, self._feedback.diagonal[start:stop], start)
        self._round_block(index, first, last)
        if last == cols:
            return
        errors = self._errors[rows]
        targets = self.targets[rows]
        if self._pairs is not None:
            self._pairs.add(errors, (first, last), (last, cols), targets, self._unit, first=first)
        else:
            upper = self._feedback.upper
            native.kernels.matrix_multiply_add(errors, upper, targets, first, last, last, cols - last)

    def _round_block(self, index: int, first: int, last: int) -> None:
        block, rows = self._blocks[index]
        linked: tuple[Any, ...] = () if self._links is None else self._links.of_block(index, first, last)
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
            self._links.spread(index, first, linked[2])
