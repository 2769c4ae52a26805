"""Coordinate descent on a device: many rows change at once if their changes together reduce the error.

The native kernel changes one code after the other, which would leave a device idle. Here the rows of a group of columns
are split into classes that change in turn. Each row of a class descends column by column, as if the other rows of the
class did not change. If the change of a row does not help together with the others, the row waits for a later pass.
Many codes differ from those of the kernel, while the error is about the same (``spec/quantizers.md``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ingot.core.runtime.parallel import check_cancelled
from ingot.quantization.device.feedback import DeviceMatrix
from ingot.quantization.device.levels import DeviceLevels
from ingot.quantization.device.refit import Scales, better_scales

PASSES = 3
"""The passes after feedback along rows; they leave no larger error than two passes of the native kernel."""
PASSES_ALONE = 10
"""The passes if there is no G."""
_CLASSES = 16
_TRIES = 3  # how often rows whose moves add up to a larger error are left out


@dataclass(slots=True)
class _Rows:
    """The rows of one class in a group of columns, with their values and the derivatives of the error.

    Parameters
    ----------
    present : f32 [columns, rows]
        The levels of the codes.
    scales : Scales
    slope : f32 [columns, rows]
        Half of the error's gradient.
    square : f32 [columns, columns]
        A of these columns.
    diagonal : f32 [rows]
        G's diagonal.
    """

    levels: DeviceLevels
    present: Any
    scales: Scales
    slope: Any
    square: Any
    diagonal: Any

    def propose(self, *, refit: bool) -> tuple[Any, Scales, Any]:
        """Return better levels and scales for each row, and the change of its values.

        Each row is improved as if the other rows did not change.
        """
        levels = self.levels
        torch = self.levels.torch
        scale = self.scales.scale
        zero = self.scales.zero
        active = (scale != 0) & (self.diagonal > 0)
        divisor = torch.where(scale == 0, 1.0, scale)
        curves = self.square.diagonal()[:, None] * torch.where(active, self.diagonal, 1.0)
        before = levels.values(self.present, scale, zero)
        values = before.clone()
        present = self.present.clone()
        slope = self.slope.clone()
        for column in range(len(present)):
            target = levels.among(values[column] - slope[column] / curves[column], divisor, zero)
            present[column] = levels.nearest(target)
            moved = levels.values(present[column], scale, zero)
            step = self.diagonal * (moved - values[column])
            values[column] = moved
            slope += step * self.square[column][:, None]
        better = self.scales
        if refit:
            better = better_scales(levels, present, self.scales, slope, self.square, self.diagonal)
            values = levels.values(present, better.scale, better.zero)
        return present, better, torch.where(active, values - before, 0.0)

    def accept(self, step: Any, outputs: Any, rows: slice) -> tuple[Any, Any]:
        """Return the rows whose changes together reduce the error, bool [rows], and the accepted changes times G.

        ``step`` are the proposed changes of values, f32 [columns, rows]. ``outputs`` are the rows of G for this class.
        If it is None, the second result is the accepted changes.
        """
        torch = self.levels.torch
        product = self.square @ step
        alone_term = self.diagonal * (step * product).sum(0)
        alone = 2 * (self.slope * step).sum(0) + alone_term
        accepted = alone < 0
        if outputs is None:
            return accepted, torch.where(accepted, step, 0.0)
        for last in [False] * _TRIES + [True]:
            effect = torch.where(accepted, step, 0.0) @ outputs
            shared = (product * effect[:, rows]).sum(0) - torch.where(accepted, alone_term, 0.0)
            if last:
                break
            accepted = accepted & (alone + 2 * shared < 0)
        lowers = torch.where(accepted, alone + shared, 0.0).sum() < 0
        return accepted & lowers, torch.where(lowers, effect, 0.0)


def descend(matrix: DeviceMatrix, inputs: Any, outputs: Any, *, refit: bool) -> None:
    """Change codes, and with ``refit`` scales, to reduce ``tr(G D A D^T)`` in one pass; the error never grows.

    Parameters
    ----------
    matrix : DeviceMatrix
        Updated in place.
    inputs : f32 [cols, cols]
        A.
    outputs : f32 [rows, rows] or None
        G.
    """
    levels = matrix.levels
    torch = matrix.levels.torch
    product = inputs @ (matrix.decode() - matrix.weights)  # A D^T
    count = product.shape[1]
    diagonal = torch.ones(count, device=product.device) if outputs is None else outputs.diagonal()
    classes = min(_CLASSES, count) if outputs is not None else 1
    for group, (first, last) in enumerate(matrix.spans()):
        check_cancelled()
        slope = product[first:last].clone() if outputs is None else product[first:last] @ outputs
        square = inputs[first:last, first:last].contiguous()
        moved = torch.zeros_like(slope)
        for start in range(classes):
            rows = slice(start, None, classes)
            scales = matrix.scales_of(group, rows)
            codes = matrix.codes[first:last, rows]
            work = _Rows(levels, levels.of_codes(codes), scales, slope[:, rows], square, diagonal[rows])
            present, better, step = work.propose(refit=refit)
            accepted, effect = work.accept(step, None if outputs is None else outputs[rows], rows)
            codes.copy_(torch.where(accepted, levels.codes(present).to(codes.dtype), codes))
            matrix.set_scales(group, rows, better, accepted)
            moved[:, rows] = torch.where(accepted, step, 0.0)
            if start + 1 < classes:
                slope += square @ effect
        product += inputs[:, first:last] @ moved
