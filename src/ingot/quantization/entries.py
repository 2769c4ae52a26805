"""Rounding of a full matrix to ggml's grid types, whose entries encode eight columns each (``spec/gguf.md``).

The error is that of ``rounding``: ``tr(G D A D^T)``. The block encoder chooses the scales for the targets of 256
columns. Then each run of eight columns gets its nearest entry, and its error changes the targets of later columns.
Descent finally replaces entries, eight columns of all rows at a time, if that reduces the error.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ingot.codecs.blocks.entries import BLOCK, RUN, Codes, compose, nearest, search_scales
from ingot.core.runtime import native
from ingot.core.runtime.parallel import check_cancelled
from ingot.model.tensor import Array
from ingot.quantization.factors import Factors, Feedback, feedback_factor
from ingot.quantization.products import multiply
from ingot.quantization.rounding import IMPORTANCE, TWO_SIDED

PASSES = 12  # rows change together, which takes more passes than one row after the other
_TRIES = 3  # how often rows whose changes add up to a larger error are left out


@dataclass(slots=True)
class Entries:
    """A matrix as entries of a grid type.

    Parameters
    ----------
    block_type : str
    codes : Codes
        The codes of all columns.
    d : u16 [rows, blocks]
        Bits of f16.
    steps : u8 [rows, blocks, groups]
    scales : f32 [rows, cols / 8]
        The scale of each run of eight columns.
    more_damping : float
        See ``grid.Rounded``.
    levels : None
        There is no learnt table.
    """

    block_type: str
    codes: Codes
    d: Array
    steps: Array
    scales: Array
    more_damping: float = 0.0
    levels: Array | None = None

    def values(self) -> Array:
        """Return the decoded matrix: f32 [rows, cols]."""
        return self.codes.values

    def blocks(self) -> Array:
        """Return the matrix in ggml's blocks: u8."""
        return compose(self.block_type, self.codes, self.d, self.steps)


def round_entries(weights: Array, block_type: str, factors: Factors, quantizer: str = TWO_SIDED) -> Entries:
    """Return the matrix rounded to a grid type by ``importance``, ``gptq`` or ``two-sided`` (see ``round_matrix``).

    Raises ``CodecError`` ``quantizer.scale-overflow``.
    """
    rows, cols = weights.shape
    codes = Codes.empty(rows, cols, block_type)
    scales = np.zeros((rows, cols // RUN), np.float32)
    if quantizer == IMPORTANCE:
        feedback = None
        diagonal = factors.weights
    else:
        feedback = feedback_factor(factors.new_inputs)
        diagonal = feedback.diagonal
    targets = weights.copy()
    errors = np.zeros_like(weights)
    d = []
    steps = []
    for first in range(0, cols, BLOCK):
        check_cancelled()
        last = first + BLOCK
        span = slice(first, last)
        searched = search_scales(block_type, targets[:, span], _normalized(diagonal[span]))
        d.append(searched.d)
        steps.append(searched.steps)
        for column in range(first, last, RUN):
            run = slice(column, column + RUN)
            scale = searched.column(column - first, block_type)
            scales[:, column // RUN] = scale
            chosen = _choose(block_type, weights[:, run], targets[:, run], scale, diagonal[run], feedback, column)
            codes.put(np.ones(rows, bool), column, chosen)
            if feedback is None:
                continue
            errors[:, run] = weights[:, run] - chosen.values
            if column + RUN < last:
                native.kernels.matrix_multiply_add(
                    errors, feedback.upper, targets, column, column + RUN, column + RUN, last - column - RUN
                )
        if feedback is not None and last < cols:
            native.kernels.matrix_multiply_add(errors, feedback.upper, targets, first, last, last, cols - last)
    rounded = Entries(block_type, codes, np.stack(d, 1), np.stack(steps, 1), scales)
    if feedback is not None:
        rounded.more_damping = feedback.more
    if quantizer == TWO_SIDED:
        for _ in range(PASSES):
            if not _descend(rounded, weights, factors):
                break
    return rounded


def _normalized(weights: Array) -> Array:
    largest = float(weights.max())
    return np.ascontiguousarray(weights / np.float32(largest if largest > 0 else 1), np.float32)


def _choose(
    block_type: str,
    weights: Array,
    targets: Array,
    scale: Array,
    diagonal: Array,
    feedback: Feedback | None,
    column: int,
) -> Codes:
    """Return the codes of the eight columns from ``column`` on that are nearest to ``targets``.

    With ``feedback``, a second candidate considers how the errors of the eight columns interact. Each row gets the
    candidate with the smaller error.
    """
    plain = nearest(block_type, targets, scale, _normalized(diagonal))
    if feedback is None:
        return plain
    run = slice(column, column + RUN)
    inner = feedback.upper[run, run].astype(np.float64) + np.eye(RUN)
    metric = inner @ np.diag(diagonal.astype(np.float64)) @ inner.T
    best = weights + (targets - weights) @ np.linalg.inv(inner).astype(np.float32)
    metric32 = metric.astype(np.float32)
    corrected = nearest(block_type, best, scale, _normalized(np.ascontiguousarray(metric.diagonal(), np.float32)))
    better = _quadratic(best - corrected.values, metric32) < _quadratic(best - plain.values, metric32)
    plain.put(better, 0, corrected)
    return plain


def _quadratic(change: Array, metric: Array) -> Array:
    """Return ``c M c^T`` for each row c of ``change``; M is ``metric``. Sums have the same order on every machine."""
    return _dot(change, _times(change, metric))


def _times(change: Array, metric: Array) -> Array:
    result: Array = change[:, :1] * metric[0]
    for index in range(1, RUN):
        result = result + change[:, index : index + 1] * metric[index]
    return result


def _dot(a: Array, b: Array) -> Array:
    result: Array = a[:, 0] * b[:, 0]
    for index in range(1, RUN):
        result = result + a[:, index] * b[:, index]
    return result


def _descend(rounded: Entries, weights: Array, factors: Factors) -> bool:
    """Replace entries that reduce the error, eight columns at a time; return whether any changed."""
    codes = rounded.codes
    outputs = factors.outputs
    product = multiply(codes.values - weights, factors.inputs)
    curvature = np.ones(len(weights), np.float32) if outputs is None else np.ascontiguousarray(outputs.diagonal())
    changed = False
    for column in range(0, weights.shape[1], RUN):
        check_cancelled()
        run = slice(column, column + RUN)
        metric = np.ascontiguousarray(factors.inputs[run, run])
        gradient = np.ascontiguousarray(product[:, run])
        if outputs is not None:
            gradient = multiply(outputs, gradient)
        candidate = _candidate(rounded, column, gradient / curvature[:, None], metric)
        change = candidate.values - codes.values[:, run]
        accepted = _accepted(change, gradient, metric, curvature, outputs)
        if not accepted.any():
            continue
        changed = True
        change[~accepted] = 0
        codes.put(accepted, column, candidate)
        product += multiply(change, np.ascontiguousarray(factors.inputs[run]))
    return changed


def _candidate(rounded: Entries, column: int, gradient: Array, metric: Array) -> Codes:
    """Return new codes for the eight columns from ``column`` on: for each row the better of two candidates.

    One is nearest to the result of a Newton step, the values of least error. The other is nearest to the result of a
    gradient step that is divided by the metric's diagonal.
    """
    run = slice(column, column + RUN)
    values = rounded.codes.values[:, run]
    scale = np.ascontiguousarray(rounded.scales[:, column // RUN])
    diagonal = np.ascontiguousarray(metric.diagonal())
    weights = _normalized(diagonal)
    inverse = np.linalg.inv(metric.astype(np.float64)).astype(np.float32)
    best = nearest(rounded.block_type, values - _times(gradient, inverse), scale, weights)
    scaled = nearest(rounded.block_type, values - gradient / diagonal, scale, weights)

    def error(codes: Codes) -> Array:
        change = codes.values - values
        result: Array = 2 * _dot(gradient, change) + _quadratic(change, metric)
        return result

    best.put(error(scaled) < error(best), 0, scaled)
    return best


def _accepted(change: Array, gradient: Array, metric: Array, curvature: Array, outputs: Array | None) -> Array:
    """Return the rows whose changes together reduce the error: bool [rows]."""
    product = _times(change, metric)
    own_term = curvature * _dot(change, product)
    alone = 2 * _dot(gradient, change) + own_term
    accepted: Array = alone < 0
    if outputs is None:
        return accepted
    for _ in range(_TRIES):
        selected = np.where(accepted[:, None], product, np.float32(0))
        shared = _dot(change, multiply(outputs, selected)) - np.where(accepted, own_term, np.float32(0))
        fits = accepted & (alone + 2 * shared < 0)
        total = float(np.where(accepted, alone + shared, np.float32(0)).sum(dtype=np.float64))
        if total < 0 and np.array_equal(fits, accepted):
            return accepted
        accepted = fits
    selected = np.where(accepted[:, None], product, np.float32(0))
    shared = _dot(change, multiply(outputs, selected)) - np.where(accepted, own_term, np.float32(0))
    if float(np.where(accepted, alone + shared, np.float32(0)).sum(dtype=np.float64)) < 0:
        return accepted
    single = np.zeros_like(accepted)
    single[int(np.argmin(alone))] = bool(alone.min() < 0)
    return single
