"""What errors of a matrix weigh, as quantizers take it: second moments, damped, and their triangular factor."""

from __future__ import annotations

from dataclasses import dataclass

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
    """

    inputs: Array
    outputs: Array | None
    weights: Array
    scale: float = 1.0


def factors_of(statistics: MatrixStatistics, damping: float = DAMPING) -> Factors:
    """Return the factors of a matrix, ``damping`` of the mean of the diagonal added to it.

    Where only mean squares were taken, A is diagonal. A matrix whose inputs were all zero gets the identity.
    """
    inputs = statistics.inputs
    if inputs is None:
        inputs = np.diag(statistics.diagonal)
    damped, scale = _damped(inputs, damping)
    weights, outputs = np.ascontiguousarray(damped.diagonal()), statistics.outputs
    if outputs is None:
        return Factors(damped, None, weights, scale)
    of_outputs, more = _damped(outputs, damping)
    return Factors(damped, of_outputs, weights, scale * more)


def no_factors(cols: int) -> Factors:
    """Return the factors of a matrix of which nothing is known: all errors weigh alike."""
    return Factors(np.eye(cols, dtype=np.float32), None, np.ones(cols, np.float32))


def feedback_factor(inputs: Array) -> tuple[Array, Array]:
    """Return the strictly upper U and the diagonal D of ``A = (U + I) D (U + I)^T``: f32 [cols, cols], [cols].

    Column k says how errors of the columns before it move its target (LDLQ: arXiv 2307.13304, section 3.1; the same
    rounding as GPTQ's, arXiv 2210.17323); D is what is left of each column's error to weigh when it is rounded. They
    come from Cholesky's factor of A with both axes turned round, in f64.
    """
    extra = 0.0
    for _ in range(_TRIES):
        turned = np.ascontiguousarray(inputs[::-1, ::-1], np.float64)
        turned[np.diag_indices_from(turned)] += extra
        if native.kernels.matrix_cholesky(turned):
            break
        extra = max(extra * 10, float(inputs.diagonal().mean()) * DAMPING)
    else:
        raise ResourceError("expected a positive definite second moment of the inputs", rule="quantizer.singular")
    upper = turned[::-1, ::-1]
    own = upper.diagonal().copy()
    return np.ascontiguousarray(np.triu(upper / own, 1), np.float32), np.square(own).astype(np.float32)


def _damped(moment: Array, damping: float) -> tuple[Array, float]:
    """Return a moment of mean 1, damped, and its mean."""
    mean = float(moment.diagonal().mean(dtype=np.float64))
    if mean <= 0:
        return np.eye(len(moment), dtype=np.float32), 0.0
    # Scaled to a mean of 1: sums of squares of tiny gradients stay within f32.
    found = moment / np.float32(mean)
    found[np.diag_indices_from(found)] += np.float32(damping)
    return np.ascontiguousarray(found, np.float32), mean
