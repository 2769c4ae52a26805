"""Feedback along columns and rows on a device; the algorithm of ``quantization.feedback``.

An element can be rounded after all earlier columns of its row and all later rows of its column. In a block of rows, all
elements of a diagonal are therefore rounded together. The first diagonal is the element of the last row and the first
column.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ingot.core.runtime.parallel import check_cancelled
from ingot.quantization.blocks import BLOCK, spans_between
from ingot.quantization.device.feedback import STEP, DeviceFeedback, DeviceMatrix, device_feedback


def feed_back_both(
    matrix: DeviceMatrix, feedback: DeviceFeedback, outputs: Any, elements: int, order: Sequence[int] | None = None
) -> None:
    """Round all columns; errors change the targets of later columns and of earlier rows.

    Parameters
    ----------
    matrix : DeviceMatrix
        Updated in place.
    feedback : DeviceFeedback
        The factor of A, with its columns in ``order``.
    outputs : f32 [rows, rows]
        G, damped.
    elements : int
        See ``search_scales``.
    order : sequence of int, optional
        The order in which columns are rounded, if all scales are chosen. Otherwise the scales of a group are chosen
        when its first column is reached.
    """
    _Both(matrix, feedback, outputs, elements, order).run()


@dataclass(slots=True)
class _Step:
    """A step of columns: their weights, their targets after earlier columns, and the changes of these targets by later
    rows.

    All arrays are f32 [columns, rows]. Exception: ``upper`` is the part of A's factor within the step.
    """

    first: int
    weights: Any
    targets: Any
    shifts: Any
    errors: Any
    upper: Any


class _Both:
    """The state of feedback along columns and rows."""

    def __init__(
        self,
        matrix: DeviceMatrix,
        feedback: DeviceFeedback,
        outputs: Any,
        elements: int,
        order: Sequence[int] | None,
    ) -> None:
        torch = matrix.levels.torch
        self._matrix = matrix
        self._feedback = feedback
        self._elements = elements
        cols = len(matrix.weights)
        group = matrix.levels.grid.group
        columns = torch.arange(cols) if order is None else torch.tensor(order)
        self._columns = columns.to(matrix.levels.device)
        self._groups = (columns // group).to(matrix.levels.device)
        # The factor of G with its rows and columns reversed, as ``factors.links_of`` has it.
        self._below = device_feedback(matrix.levels, outputs.flip(0, 1)).upper.flip(0, 1).contiguous()
        self._span = group
        self._before = order is None and group > 2 * STEP
        self._within = order is None and not self._before
        self._step = -(-STEP // group) * group if self._within else STEP

    def run(self) -> None:
        weights = self._matrix.weights[self._columns]
        targets = weights.clone()
        cols, rows = targets.shape
        upper = self._feedback.upper
        for first in range(0, cols, self._step):
            last = min(first + self._step, cols)
            if self._before and first % self._span < self._step:
                start = first - first % self._span
                span = start, min(start + self._span, cols)
                self._matrix.choose(targets, self._feedback.diagonal, span, self._elements)
            shifts = self._matrix.levels.torch.zeros_like(targets[first:last])
            errors = shifts.clone()
            step = _Step(first, weights[first:last], targets[first:last], shifts, errors, upper[first:last, first:last])
            for start in reversed(range(0, rows, BLOCK)):
                check_cancelled()
                stop = min(start + BLOCK, rows)
                changes = self._round_block(step, slice(start, stop))
                if start:
                    shifts[:, :start] += _half(changes) @ _half(self._below[start:stop, :start])
            if last < cols:
                targets[last:] += _half(upper[first:last, last:]).T @ _half(errors)

    def _round_block(self, step: _Step, rows: slice) -> Any:
        """Round the columns of a step in a block of rows; return targets minus values: f32 [columns, rows]."""
        count = len(step.weights)
        changes = self._matrix.levels.torch.zeros_like(step.targets[:, rows])
        for start, stop in spans_between(self._span, 0, count) if self._within else [(0, count)]:
            if self._within:
                aims = step.targets[start:stop, rows] + step.shifts[start:stop, rows]
                span = step.first + start, step.first + stop
                importance = self._feedback.diagonal[slice(*span)]
                self._matrix.choose_rows(aims, importance, span[0] // self._span, rows, self._elements)
            self._round_span(step, slice(start, stop), rows, changes)
        return changes

    def _round_span(self, step: _Step, columns: slice, rows: slice, changes: Any) -> None:
        """Round the elements of ``columns`` and ``rows``, one diagonal after the other, and update ``changes``.

        The first diagonal is the element of the last row and the first column.
        """
        matrix = self._matrix
        levels = matrix.levels
        groups = self._groups[step.first + columns.start : step.first + columns.stop]
        scales = matrix.scales[groups, rows]
        zeros = None if matrix.zeros is None else matrix.zeros[groups, rows]
        weights = step.weights[columns, rows]
        targets = step.targets[:, rows]
        shifts = step.shifts[columns, rows]
        links = self._below[rows, rows]
        upper = step.upper[columns]
        codes = levels.torch.zeros_like(weights, dtype=levels.torch.uint8)
        width, height = weights.shape
        for diagonal in range(width + height - 1):
            first = max(0, height - 1 - diagonal)  # row; each next row is one column further
            column = diagonal - (height - 1 - first)
            size = min(height - first, width - column)
            across = slice(column, column + size)
            down = slice(first, first + size)
            scale = scales[across, down].diagonal()
            zero = None if zeros is None else zeros[across, down].diagonal()
            target = targets[columns, :][across, down].diagonal().clone()
            chosen = levels.target_codes(target + shifts[across, down].diagonal(), scale, zero)
            value = levels.values(levels.of_codes(chosen), scale, zero)
            error = weights[across, down].diagonal() - value
            codes[across, down].diagonal().copy_(chosen)
            step.errors[columns, rows][across, down].diagonal().copy_(error)
            changes[columns][across, down].diagonal().copy_(target - value)
            targets[:, down] += upper[across].T * error
            shifts[across] += (target - value)[:, None] * links[down]
        matrix.codes[self._columns[step.first + columns.start : step.first + columns.stop], rows] = codes


def _half(values: Any) -> Any:
    """Return values rounded to bf16, as f32; products of the native kernels have factors in bf16."""
    return values.bfloat16().float()
