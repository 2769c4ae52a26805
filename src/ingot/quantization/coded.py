"""Steps of integers for an entropy coder: codes of 8 bits, of which frequent ones are stored in few bits.

The stored size of these matrices follows from their steps: half a step adds about one bit to each code of the row.
The total error is smallest for a size if errors of one step's width weigh the same in all rows of all matrices
(``equal_steps``). One number, the step of the model, then determines the size (``find_step``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ingot.core.numeric.dtypes import cast
from ingot.model.tensor import Array
from ingot.quantization.factors import Factors, Feedback, links_of
from ingot.quantization.grid import Rounded

_LARGEST = 120  # the largest magnitude of a code before feedback, which may add to it
_SAMPLE = 1 << 18  # weights of a matrix whose code lengths are measured, in evenly spaced rows
_STEPS = np.arange(-6, 3, 0.5)  # base-2 logarithms of the measured steps, relative to the root of the mean square
_RESOLUTION = 256  # the step of a model is a power of two to a multiple of 1 / 256, so that sums' order has no effect
_BISECTIONS = 60
_SPREAD = 40.0  # octaves above and below all measured steps that are searched


@dataclass(frozen=True, slots=True)
class CodeLengths:
    """The mean number of bits of a matrix's codes for several steps of the model, by their entropy.

    Parameters
    ----------
    weights : int
        The number of the matrix's weights.
    steps : f64 [n]
        Base-2 logarithms of steps, ascending.
    bits : f64 [n]
        The mean bits of a code for each step.
    """

    weights: int
    steps: Array
    bits: Array

    def bits_for(self, step: float) -> float:
        """Return the mean bits of a code for a step, given as its base-2 logarithm."""
        finer = max(0.0, float(self.steps[0]) - step)  # one bit for each octave
        return float(np.interp(step, self.steps, self.bits)) + finer


class RowSteps(NamedTuple):
    """The steps of a matrix's rows, as multiples of the step of the model.

    Parameters
    ----------
    rows : f64 [rows]
    row_noise : f64 [rows]
    column_noise : f64 [cols]
        The variance that feedback adds to the targets of each row, by errors of other rows, and of each column, by
        errors of earlier columns. Both are multiples of the variance of a rounding error.
    comparable : bool
        Whether an error of one step has the same weight in all matrices of a model. It has not if the statistics lack
        gradients; the steps of all rows are then equal.
    """

    rows: Array
    row_noise: Array
    column_noise: Array
    comparable: bool


def equal_steps(factors: Factors, feedback: Feedback) -> RowSteps:
    """Return the steps of rows at which an error of one step has the same weight in all rows.

    ``feedback`` is the triangular factor of the second moment of the inputs.
    """
    column_noise = np.square(feedback.upper).sum(0, dtype=np.float64)
    if factors.outputs is None or not factors.scale > 0:
        rows = 1 if factors.outputs is None else len(factors.outputs)
        return RowSteps(np.ones(rows), np.zeros(rows), column_noise, comparable=False)
    links = links_of(factors.outputs)
    outputs = links.diagonal.astype(np.float64)
    steps = 1 / np.sqrt(outputs * (feedback.diagonal.mean(dtype=np.float64) * factors.scale))
    row_noise = (np.square(steps) @ np.square(links.below)) / np.square(steps)
    return RowSteps(steps, row_noise, column_noise, comparable=True)


def code_lengths(weights: Array, steps: RowSteps) -> CodeLengths:
    """Return the code lengths of a matrix, f32 [rows, cols], for several steps of the model.

    They are measured on some rows, whose codes are those of the nearest values after adding the noise of feedback.
    """
    rows, cols = weights.shape
    count = min(rows, max(1, _SAMPLE // cols))
    chosen = np.arange(count) * rows // count
    sample = weights[chosen].astype(np.float64)
    relative = np.broadcast_to(steps.rows, rows)[chosen, None]
    limits = np.abs(sample).max(1, keepdims=True) / _LARGEST
    middle = float(np.log2(max(np.sqrt(np.square(sample / relative).mean()), np.finfo(np.float32).tiny)))
    row_noise = np.broadcast_to(steps.row_noise, rows)[chosen, None]
    variance = ((1 + row_noise) * (1 + steps.column_noise) - 1) / 12  # that of a rounding error is 1 / 12
    noise = np.sqrt(variance) * np.random.default_rng(0).standard_normal(sample.shape)
    tried = middle + _STEPS
    bits = [_entropy(sample, np.maximum(relative * 2.0**step, limits), noise) for step in tried]
    return CodeLengths(weights.size, tried, np.minimum.accumulate(bits))


def _entropy(weights: Array, steps: Array, noise: Array) -> float:
    codes = np.clip(np.rint(weights / np.where(steps > 0, steps, 1) + noise), -128, 127).astype(np.int16) + 128
    counts = np.bincount(codes.reshape(-1))
    shares = counts[counts > 0] / codes.size
    return float(-(shares * np.log2(shares)).sum())


def find_step(lengths: Sequence[CodeLengths], bits: float) -> float:
    """Return the step of a model at which the codes of all its matrices have ``bits`` bits on average."""
    low = min(float(item.steps[0]) for item in lengths) - _SPREAD
    high = max(float(item.steps[-1]) for item in lengths) + _SPREAD
    weights = sum(item.weights for item in lengths)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if sum(item.weights * item.bits_for(middle) for item in lengths) > bits * weights:
            low = middle
        else:
            high = middle
    return float(2.0 ** (round(high * _RESOLUTION) / _RESOLUTION))


def choose_steps(rounded: Rounded, weights: Array, factors: Factors, feedback: Feedback) -> None:
    """Set the scales of ``rounded``, which are the steps of its rows, from the step of the model in its grid.

    If the grid has no step, or if errors of different matrices cannot be compared, the step of this matrix is chosen.
    Its codes then have the bits of the grid on average. ``feedback`` is the triangular factor of the second moment of
    the inputs.
    """
    grid = rounded.grid
    assert grid.coded is not None
    steps = equal_steps(factors, feedback)
    step = grid.step if steps.comparable else None
    if step is None:
        step = find_step([code_lengths(weights, steps)], grid.coded)
    smallest = float(np.finfo(np.float16 if grid.scales == "f16" else np.float32).smallest_subnormal)
    limits = np.abs(weights).max(1).astype(np.float64) / _LARGEST
    scales = np.maximum(np.maximum(steps.rows * step, limits), smallest)
    rounded.scales[:, 0] = cast(cast(scales.astype(np.float32), grid.scales), "f32")
