"""Rounding with error feedback on a device: one column after the other, all rows at once.

Matrices are transposed, so that a column of weights is contiguous. The error of a column first changes the targets of
the other columns of its step, one by one. One product per step then changes the targets of all later columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ingot.core.runtime.parallel import check_cancelled
from ingot.errors import ResourceError
from ingot.quantization.device.levels import DeviceLevels
from ingot.quantization.device.refit import Scales
from ingot.quantization.device.scales import search_scales
from ingot.quantization.factors import DAMPING

STEP = 128
"""The number of columns after which errors are added to the targets of all following columns."""
_TRIES = 8


@dataclass(frozen=True, slots=True)
class DeviceFeedback:
    """The triangular factor of A on a device; see ``factors.Feedback``."""

    upper: Any
    diagonal: Any
    more: float


def device_feedback(levels: DeviceLevels, inputs: Any) -> DeviceFeedback:
    """Return the triangular factor of ``inputs``, f32 [cols, cols].

    The factor is computed in f64, on the CPU if the device has no f64. Raises ``ResourceError`` ``quantizer.singular``.
    """
    torch = levels.torch
    device, dtype = levels.exact
    reversed_inputs = inputs.flip(0, 1).to(device, dtype)
    diagonal = reversed_inputs.diagonal()
    mean = float(diagonal.mean())
    extra = 0.0
    for _ in range(_TRIES):
        lower, failed = torch.linalg.cholesky_ex(reversed_inputs)
        roots = lower.diagonal().clone()
        if not int(failed) and bool(roots.isfinite().all()):
            lower /= roots
            upper = lower.flip(0, 1).to(torch.float32).to(levels.device).triu_(1)
            return DeviceFeedback(upper, roots.square().flip(0).to(torch.float32).to(levels.device), extra / mean)
        more = max(extra * 10, mean * DAMPING)
        diagonal += more - extra
        extra = more
    raise ResourceError(
        "the second moment is not positive definite: collect statistics from more samples", rule="quantizer.singular"
    )


@dataclass(slots=True)
class DeviceMatrix:
    """A matrix during rounding on a device, transposed.

    Parameters
    ----------
    levels : DeviceLevels
    weights : f32 [cols, rows]
    codes : u8 [cols, rows]
    scales : f32 [groups, rows]
    zeros : f32 [groups, rows] or None
    overflows : bool [groups, rows]
        Marks scales that exceed the range of their type.
    """

    levels: DeviceLevels
    weights: Any
    codes: Any
    scales: Any
    zeros: Any
    overflows: Any

    @classmethod
    def start(cls, levels: DeviceLevels, weights: Any) -> DeviceMatrix:
        """Return the unrounded matrix of ``weights``, f32 [rows, cols]: all codes and scales are 0."""
        torch = levels.torch
        rows, cols = weights.shape
        groups = -(-cols // levels.grid.group)
        scales = torch.zeros(groups, rows, device=levels.device)
        return cls(
            levels,
            weights.T.contiguous(),
            torch.zeros(cols, rows, dtype=torch.uint8, device=levels.device),
            scales,
            torch.zeros_like(scales) if levels.with_zeros else None,
            torch.zeros(groups, rows, dtype=torch.bool, device=levels.device),
        )

    def spans(self) -> list[tuple[int, int]]:
        """Return the first column of each group and the column after its last."""
        cols = len(self.weights)
        group = self.levels.grid.group
        return [(first, min(first + group, cols)) for first in range(0, cols, group)]

    def zeros_of(self, group: int) -> Any:
        """Return the zeros of a group; None for grids without zeros."""
        return None if self.zeros is None else self.zeros[group]

    def scales_of(self, group: int, rows: slice) -> Scales:
        """Return the scales of a group for ``rows``."""
        return Scales(self.scales[group, rows], None if self.zeros is None else self.zeros[group, rows])

    def set_scales(self, group: int, rows: slice, scales: Scales, selected: Any) -> None:
        """Replace the scales of a group in those of ``rows`` that ``selected`` marks."""
        torch = self.levels.torch
        self.scales[group, rows] = torch.where(selected, scales.scale, self.scales[group, rows])
        if self.zeros is not None:
            self.zeros[group, rows] = torch.where(selected, scales.zero, self.zeros[group, rows])

    def choose(self, targets: Any, importance: Any, span: tuple[int, int], elements: int) -> None:
        """Choose the scales of one group for ``targets``, f32 [cols, rows]."""
        first, last = span
        group = first // self.levels.grid.group
        self.choose_rows(targets[first:last], importance[first:last], group, slice(None), elements)

    def choose_rows(self, targets: Any, importance: Any, group: int, rows: slice, elements: int) -> None:
        """Choose the scales of a group for ``rows``; ``targets`` is f32 [columns of the group, rows]."""
        result = search_scales(self.levels, targets.T, importance, elements)
        self.scales[group, rows] = result.scales
        self.overflows[group, rows] = result.overflows
        if self.zeros is not None:
            self.zeros[group, rows] = result.zeros

    def decode(self) -> Any:
        """Return the decoded values: f32 [cols, rows]."""
        values = self.levels.torch.empty_like(self.weights)
        for group, (first, last) in enumerate(self.spans()):
            stored = self.levels.of_codes(self.codes[first:last])
            values[first:last] = self.levels.values(stored, self.scales[group], self.zeros_of(group))
        return values

    def nearest(self, importance: Any, elements: int) -> None:
        """Choose all scales, then round each weight to its nearest level.

        ``importance``, f32 [cols], weights the squared errors of the columns. ``elements`` limits memory; see
        ``search_scales``.
        """
        for group, (first, last) in enumerate(self.spans()):
            check_cancelled()
            self.choose(self.weights, importance, (first, last), elements)
            self.codes[first:last] = self.levels.target_codes(
                self.weights[first:last], self.scales[group], self.zeros_of(group)
            )

    def feed_back(self, feedback: DeviceFeedback, elements: int) -> None:
        """Round group by group; the weighted error of each column changes the targets of later columns."""
        targets = self.weights.clone()
        columns = range(len(self.weights))
        for first, last in self.spans():
            check_cancelled()
            self.choose(targets, feedback.diagonal, (first, last), elements)
            self._feed(self.weights, targets, feedback.upper, columns, (first, last))

    def choose_all(self, importance: Any, elements: int) -> None:
        """Choose the scales of all groups, with weights ``importance`` of the columns."""
        for span in self.spans():
            check_cancelled()
            self.choose(self.weights, importance, span, elements)

    def feed_back_in_order(self, feedback: DeviceFeedback, order: Sequence[int]) -> None:
        """Round the columns in ``order``; all scales must be chosen. ``feedback`` is the factor of A in this order."""
        ordered = self.weights[self.levels.torch.tensor(order, device=self.levels.device)]
        self._feed(ordered, ordered.clone(), feedback.upper, order, (0, len(order)))

    def _feed(self, weights: Any, targets: Any, upper: Any, columns: Sequence[int], span: tuple[int, int]) -> None:
        """Round the columns of ``span``, whose scales are chosen, and update the targets of all later columns.

        ``columns`` maps positions in ``weights``, ``targets`` and ``upper`` to columns of the matrix.
        """
        levels = self.levels
        begin, end = span
        for start in range(begin, end, STEP):
            stop = min(start + STEP, end)
            errors = levels.torch.empty_like(targets[start:stop])
            for index in range(start, stop):
                column = columns[index]
                group = column // levels.grid.group
                scale = self.scales[group]
                zero = self.zeros_of(group)
                codes = levels.target_codes(targets[index], scale, zero)
                self.codes[column] = codes
                error = weights[index] - levels.values(levels.of_codes(codes), scale, zero)
                errors[index - start] = error
                if index + 1 < stop:
                    targets[index + 1 : stop] += upper[index, index + 1 : stop, None] * error
            if stop < len(targets):
                targets[stop:] += upper[start:stop, stop:].T @ errors
