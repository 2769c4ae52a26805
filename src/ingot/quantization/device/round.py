"""Rounding of full matrices on a device: the quantizers of ``quantization.rounding`` as torch operations."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from ingot.core.border import require
from ingot.core.runtime.device import is_out_of_memory, no_device_memory, release_cached
from ingot.model.tensor import Array
from ingot.quantization.device.descent import PASSES, PASSES_ALONE, descend
from ingot.quantization.device.feedback import DeviceMatrix, device_feedback
from ingot.quantization.device.levels import DeviceLevels
from ingot.quantization.device.rows import feed_back_both
from ingot.quantization.device.table import learn_on_device
from ingot.quantization.factors import Factors
from ingot.quantization.grid import Grid, Rounded
from ingot.quantization.rounding import IMPORTANCE, TWO_SIDED, How
from ingot.quantization.scales import overflow_error

_ELEMENTS = 1 << 26, 1 << 22  # values of candidates that are measured together; the second if memory runs out
_LOCK = threading.Lock()  # one matrix at a time takes the device's memory


T = TypeVar("T")


def rounds_on_device(grid: Grid) -> bool:
    """Return whether a device can round to a grid: false for nested scales and for scales of 8 bits."""
    return grid.scaled and grid.nested is None and not grid.small


def round_on_device(
    weights: Array, grid: Grid, factors: Factors, how: How, device: Any, levels: Array | None = None
) -> Rounded:
    """Return the matrix rounded to a grid, with ``error_sums``. The parameters are those of ``round_matrix``.

    Raises
    ------
    CodecError
        ``quantizer.scale-overflow``: the scales' type cannot represent a group's scale.
    ResourceError
        ``device.memory``: the device has too little memory for the matrix and its factors.
    """

    def compute(elements: int) -> Rounded:
        return _round(weights, grid, factors, how, device, levels, elements)

    return with_less_memory(device, compute)


def with_less_memory(device: Any, compute: Callable[[int], T]) -> T:
    """Return ``compute(elements)``; if the device runs out of memory, retry with fewer elements at a time.

    Only one thread computes at a time. Raises ``ResourceError`` ``device.memory`` if the smallest number does not fit.
    """
    torch = require("torch", "torch")
    failure: Exception | None = None
    with _LOCK, torch.no_grad():
        for elements in _ELEMENTS:
            try:
                return compute(elements)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                failure = no_device_memory(device, error)
            release_cached(torch, device)
    assert failure is not None
    raise failure


def _round(
    weights: Array,
    grid: Grid,
    factors: Factors,
    how: How,
    device: Any,
    levels: Array | None,
    elements: int,
) -> Rounded:
    torch = require("torch", "torch")
    values = torch.from_numpy(weights).to(device)
    importance = torch.from_numpy(factors.weights).to(device)
    if levels is None:
        levels = learn_on_device(values, grid, importance, elements) if grid.learnt else grid.levels
    matrix = DeviceMatrix.start(DeviceLevels(grid, levels, device), values)
    inputs = torch.from_numpy(factors.inputs).to(device)
    outputs = None if factors.outputs is None else torch.from_numpy(factors.outputs).to(device)
    more_damping = 0.0
    if how.quantizer == IMPORTANCE:
        matrix.nearest(importance, elements)
    else:
        more_damping = _feed_back(matrix, inputs, outputs, importance, factors, how, elements)
    _require_scales(matrix)
    if how.quantizer == TWO_SIDED:
        for turn in range(PASSES_ALONE if outputs is None else PASSES):
            descend(matrix, inputs, outputs, refit=turn > 0)
    return _result(matrix, inputs, outputs, levels, more_damping)


def _feed_back(
    matrix: DeviceMatrix, inputs: Any, outputs: Any, importance: Any, factors: Factors, how: How, elements: int
) -> float:
    """Round the matrix with error feedback; return the additional damping that the factor of A needed."""
    if how.quantizer != TWO_SIDED:
        outputs = None
    if not how.act_order:
        feedback = device_feedback(matrix.levels, inputs)
        if outputs is None:
            matrix.feed_back(feedback, elements)
        else:
            feed_back_both(matrix, feedback, outputs, elements)
        return feedback.more
    matrix.choose_all(importance, elements)
    order = np.argsort(-factors.weights, kind="stable")
    permutation = matrix.levels.torch.from_numpy(order).to(inputs.device)
    feedback = device_feedback(matrix.levels, inputs[permutation][:, permutation])
    if outputs is None:
        matrix.feed_back_in_order(feedback, order.tolist())
    else:
        feed_back_both(matrix, feedback, outputs, elements, order.tolist())
    return feedback.more


def _require_scales(matrix: DeviceMatrix) -> None:
    """Raise ``CodecError`` ``quantizer.scale-overflow`` for the first scale that exceeds the range of its type."""
    if not bool(matrix.overflows.any()):
        return
    group, row = matrix.overflows.nonzero()[0].tolist()
    grid = matrix.levels.grid
    raise overflow_error(grid.scales, row, group * grid.group, "; use scales=bf16 or scales=f32")


def _result(matrix: DeviceMatrix, inputs: Any, outputs: Any, levels: Array, more_damping: float) -> Rounded:
    """Return the matrix, copied to the CPU, with the error ``tr(G D A D^T)`` and the norm ``tr(G W A W^T)``."""
    rounded = Rounded.start(matrix.levels.grid, tuple(matrix.codes.T.shape), levels)
    rounded.codes = np.ascontiguousarray(matrix.codes.T.cpu().numpy())
    rounded.scales = np.ascontiguousarray(matrix.scales.T.cpu().numpy())
    if matrix.zeros is not None:
        rounded.zeros = np.ascontiguousarray(matrix.zeros.T.cpu().numpy())
    rounded.more_damping = more_damping
    change = matrix.decode() - matrix.weights
    error, total = (_weigh(matrix.levels, values, inputs, outputs) for values in (change, matrix.weights))
    rounded.error_sums = error, total
    return rounded


def _weigh(levels: DeviceLevels, values: Any, inputs: Any, outputs: Any) -> float:
    """Return ``tr(G V A V^T)``; ``values`` is V transposed, f32 [cols, rows]."""
    product = inputs @ values
    if outputs is not None:
        product = product @ outputs
    sums = (values * product).sum(1)
    device, dtype = levels.exact
    return float(sums.to(device, dtype).sum())
