"""What errors of a matrix weigh, as quantizers take it: second moments, damped, and their triangular factor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ingot.core.runtime import native
from ingot.errors import ResourceError
from ingot.model.statistics import MatrixStatistics
from ingot.model.tensor import Array

DAMPING = 0.01
_TRIES = 8
_PIECE = 1 << 20  # numbers that change places at once


@dataclass(frozen=True)
class Factors:
    """Second moments of a matrix's inputs and of the gradients at its outputs.

    Parameters
    ----------
    moment : f32 [cols, cols], or a callable that makes it
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

    moment: Array | Callable[[], Array]
    outputs: Array | None
    weights: Array
    scale: float = 1.0
    damping: float = 0.0
    dead: int = 0

    @cached_property
    def inputs(self) -> Array:
        """A, damped: f32 [cols, cols]."""
        return self.moment() if callable(self.moment) else self.moment

    def made(self) -> Array:
        """Return A, damped, in memory that nobody else looks at."""
        if callable(self.moment) and "inputs" not in self.__dict__:
            return self.moment()
        return self.inputs.copy()


def factors_of(statistics: MatrixStatistics, damping: float = DAMPING) -> Factors:
    """Return the factors of a matrix, ``damping`` of the mean of the diagonal added to it.

    Where only mean squares were taken, A is diagonal. A matrix whose inputs were all zero gets the identity. A is made
    of the statistics when it is wanted, which stay open until then.
    """
    moment, diagonal = statistics.inputs, statistics.diagonal
    own = diagonal if moment is None else moment.diagonal()
    mean = float(own.mean(dtype=np.float64))
    dead, outputs = int(np.count_nonzero(diagonal == 0)), statistics.outputs

    def made() -> Array:
        return _damped(np.diag(diagonal) if moment is None else moment, mean, damping)

    weights = np.ascontiguousarray(_weights(own, mean, damping))
    if outputs is None:
        return Factors(made, None, weights, max(mean, 0.0), damping, dead)
    more = float(outputs.diagonal().mean(dtype=np.float64))
    return Factors(made, _damped(outputs, more, damping), weights, max(mean, 0.0) * max(more, 0.0), damping, dead)


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


def feedback_factor(made: Callable[[], Array]) -> Feedback:
    """Return the triangular factor of A; raises ``ResourceError`` ``quantizer.singular``.

    Column k says how errors of the columns before it move its target (LDLQ: arXiv 2307.13304, section 3.1; the same
    rounding as GPTQ's, arXiv 2210.17323); D is what is left of each column's error to weigh when it is rounded.

    Parameters
    ----------
    made : callable
        Makes A, f32 [cols, cols], in memory that becomes U's.
    """
    extra = mean = 0.0
    for _ in range(_TRIES):
        upper = np.ascontiguousarray(made(), np.float32)
        mean = float(upper.diagonal().mean())
        upper[np.diag_indices_from(upper)] += np.float32(extra)
        own = np.empty(len(upper), np.float64)
        if native.kernels.matrix_factor(upper, own):
            return Feedback(upper, own.astype(np.float32), extra / mean if extra else 0.0)
        extra = max(extra * 10, mean * DAMPING)
    raise ResourceError("expected a positive definite second moment", rule="quantizer.singular")


class Links(NamedTuple):
    """``G = (L + I) D (L + I)^T``: strictly lower L, f32 [rows, rows], and the diagonal D, f32 [rows]."""

    below: Array
    left: Array


def links_of(outputs: Array) -> Links:
    """Return the triangular factor of G; raises ``ResourceError`` ``quantizer.singular``.

    Row k says how an error of row k moves the targets of the rows before it. Of G with both axes turned round this is
    the factor of ``feedback_factor``.
    """
    turned = outputs[::-1, ::-1]
    found = feedback_factor(lambda: np.array(turned, np.float32, order="C"))
    _turn_round(found.upper)
    return Links(found.upper, np.ascontiguousarray(found.left[::-1]))


def _turn_round(matrix: Array) -> None:
    """Turn both axes round, where the matrix lies."""
    flat = matrix.reshape(-1)
    half = len(flat) // 2
    for first in range(0, half, _PIECE):
        last = min(first + _PIECE, half)
        front, back = flat[first:last], flat[len(flat) - last : len(flat) - first]
        front[:], back[:] = back[::-1].copy(), front[::-1].copy()


def _damped(moment: Array, mean: float, damping: float) -> Array:
    """Return a moment over its mean, damped: f32, of its own memory."""
    if mean <= 0:
        return np.eye(len(moment), dtype=np.float32)
    # Scaled to a mean of 1: sums of squares of tiny gradients stay within f32.
    found = np.divide(moment, np.float32(mean), dtype=np.float32, order="C")
    found[np.diag_indices_from(found)] += np.float32(damping)
    return found


def _weights(diagonal: Array, mean: float, damping: float) -> Array:
    """Return the diagonal of that."""
    if mean <= 0:
        return np.ones(len(diagonal), np.float32)
    return diagonal / np.float32(mean) + np.float32(damping)
