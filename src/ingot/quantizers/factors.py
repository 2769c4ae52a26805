"""What errors of a matrix weigh, as quantizers take it: second moments, damped, and their triangular factor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ingot.core import native
from ingot.errors import ResourceError
from ingot.model.statistics import MatrixStatistics
from ingot.model.tensor import Array

DAMPING = 0.01
_TRIES = 8


@dataclass(frozen=True, slots=True)
class Factors:
    """Second moments of a matrix's inputs and of the gradients at its outputs.

    Parameters
    ----------
    inputs : f32 [cols, cols]
        A, damped: symmetric, positive definite.
    outputs : f32 [rows, rows] or None
        G, damped.
    weights : f32 [cols]
        A's diagonal.
    scale : float
        What A and G were divided by: half of ``scale * tr(G D A D^T)`` is a divergence in nats a token where both are
        known.
    damping : float
        What was added to the diagonal of A, as a share of its mean.
    dead : int
        Columns whose input was 0 for every token: nothing but the damping weighs their errors.
    """

    inputs: Array
    outputs: Array | None
    weights: Array
    scale: float = 1.0
    damping: float = 0.0
    dead: int = 0


def factors_of(statistics: MatrixStatistics, damping: float = DAMPING) -> Factors:
    """Return the factors of a matrix, ``damping`` of the mean of the diagonal added to it.

    Where only mean squares were taken, A is diagonal. A matrix whose inputs were all zero gets the identity.
    """
    inputs = statistics.inputs
    if inputs is None:
        inputs = np.diag(statistics.diagonal)
    damped, scale = _damped(inputs, damping)
    dead = int(np.count_nonzero(statistics.diagonal == 0))
    weights, outputs = np.ascontiguousarray(damped.diagonal()), statistics.outputs
    if outputs is None:
        return Factors(damped, None, weights, scale, damping, dead)
    of_outputs, more = _damped(outputs, damping)
    return Factors(damped, of_outputs, weights, scale * more, damping, dead)


def no_factors(cols: int) -> Factors:
    """Return the factors of a matrix of which nothing is known: all errors weigh alike."""
    return Factors(np.eye(cols, dtype=np.float32), None, np.ones(cols, np.float32))


class Feedback(NamedTuple):
    """``A = (U + I) D (U + I)^T``: strictly upper U, f32 [cols, cols], and the diagonal D, f32 [cols].

    ``more`` is what had to be added to A's diagonal, as a share of its mean, for this to exist.
    """

    upper: Array
    left: Array
    more: float


def feedback_factor(inputs: Array) -> Feedback:
    """Return the triangular factor of A; raises ``ResourceError`` ``quantizer.singular``.

    Column k says how errors of the columns before it move its target (LDLQ: arXiv 2307.13304, section 3.1; the same
    rounding as GPTQ's, arXiv 2210.17323); D is what is left of each column's error to weigh when it is rounded. They
    come from Cholesky's factor of A with both axes turned round, in f64.
    """
    lower, more = _lower(inputs[::-1, ::-1])
    upper = lower[::-1, ::-1]
    own = upper.diagonal().copy()
    strict = np.ascontiguousarray(np.triu(upper / own, 1), np.float32)
    return Feedback(strict, np.square(own).astype(np.float32), more)


class Links(NamedTuple):
    """``G = (L + I) D (L + I)^T``: strictly lower L, f32 [rows, rows], and the diagonal D, f32 [rows]."""

    below: Array
    left: Array


def links_of(outputs: Array) -> Links:
    """Return the triangular factor of G; raises ``ResourceError`` ``quantizer.singular``.

    Row k says how an error of row k moves the targets of the rows before it.
    """
    lower, _ = _lower(outputs)
    own = lower.diagonal().copy()
    return Links(np.ascontiguousarray(np.tril(lower / own, -1), np.float32), np.square(own).astype(np.float32))


def _lower(moment: Array) -> tuple[Array, float]:
    """Return Cholesky's factor in f64, and what was added to the diagonal for it as a share of its mean."""
    extra, mean = 0.0, float(moment.diagonal().mean())
    for _ in range(_TRIES):
        lower = np.ascontiguousarray(moment, np.float64)
        lower[np.diag_indices_from(lower)] += extra
        if native.kernels.matrix_cholesky(lower):
            return lower, extra / mean if extra else 0.0
        extra = max(extra * 10, mean * DAMPING)
    raise ResourceError("expected a positive definite second moment", rule="quantizer.singular")


def _damped(moment: Array, damping: float) -> tuple[Array, float]:
    """Return a moment of mean 1, damped, and its mean."""
    mean = float(moment.diagonal().mean(dtype=np.float64))
    if mean <= 0:
        return np.eye(len(moment), dtype=np.float32), 0.0
    # Scaled to a mean of 1: sums of squares of tiny gradients stay within f32.
    found = moment / np.float32(mean)
    found[np.diag_indices_from(found)] += np.float32(damping)
    return np.ascontiguousarray(found, np.float32), mean
