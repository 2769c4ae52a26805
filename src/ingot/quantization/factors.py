"""The factors that weight the rounding errors of a matrix: damped second moments of its inputs and gradients."""

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
from ingot.quantization.threads import pool_threads

DAMPING = 0.01
_TRIES = 8
_CHUNK = 1 << 20  # numbers that are swapped at once


@dataclass(frozen=True)
class Factors:
    """Second moments of a matrix's inputs and of the gradients at its outputs.

    Parameters
    ----------
    moment : f32 [cols, cols], or a callable that computes it
        A, damped: symmetric, positive definite.
    outputs : f32 [rows, rows] or None
        G, damped.
    weights : f32 [cols]
        A's diagonal.
    scale : float
        The factor that undoes the normalization of A and G: if both were collected, half of ``scale * tr(G D A D^T)``
        is a divergence in nats per token.
    damping : float
        The number added to the diagonal of A, as a fraction of its mean.
    dead : int
        The number of columns whose input was 0 for every token; only the damping gives their errors a weight.
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

    def new_inputs(self) -> Array:
        """Return A, damped, as a new array that the caller may overwrite."""
        if callable(self.moment) and "inputs" not in self.__dict__:
            return self.moment()
        return self.inputs.copy()


def factors_of(statistics: MatrixStatistics, damping: float = DAMPING) -> Factors:
    """Return the factors of a matrix, with ``damping`` times the diagonal's mean added to the diagonal.

    If only mean squares were collected, A is diagonal. If all inputs of the matrix were zero, A is the identity. A is
    computed on demand, so the statistics must stay open until then.
    """
    moment, diagonal = statistics.inputs, statistics.diagonal
    inputs_diagonal = diagonal if moment is None else moment.diagonal()
    mean = float(inputs_diagonal.mean(dtype=np.float64))
    dead = int(np.count_nonzero(diagonal == 0))
    outputs = statistics.outputs

    def damped_inputs() -> Array:
        return _damp(np.diag(diagonal) if moment is None else moment, mean, damping)

    weights = np.ascontiguousarray(_weights(inputs_diagonal, mean, damping))
    if outputs is None:
        return Factors(damped_inputs, None, weights, max(mean, 0.0), damping, dead)
    outputs_mean = float(outputs.diagonal().mean(dtype=np.float64))
    scale = max(mean, 0.0) * max(outputs_mean, 0.0)
    return Factors(damped_inputs, _damp(outputs, outputs_mean, damping), weights, scale, damping, dead)


def no_factors(cols: int) -> Factors:
    """Return the factors of a matrix without statistics: all errors weigh the same."""
    return Factors(np.eye(cols, dtype=np.float32), None, np.ones(cols, np.float32))


class Feedback(NamedTuple):
    """The triangular factor of the second moment A, by which the error of a column changes the targets of later
    columns.

    ``A = (U + I) D (U + I)^T``: strictly upper U, f32 [cols, cols], and the diagonal D, f32 [cols]. ``more`` is the
    additional damping that the factorization needed, as a fraction of the mean of A's diagonal.
    """

    upper: Array
    diagonal: Array
    more: float


def feedback_factor(compute: Callable[[], Array]) -> Feedback:
    """Return the triangular factor of A; raises ``ResourceError`` ``quantizer.singular``.

    Column k of U contains the effect of earlier columns' errors on the target of column k. D is the weight of each
    column's remaining error. The method is LDLQ (arXiv 2307.13304, section 3.1), which is equal to GPTQ (arXiv
    2210.17323).

    Parameters
    ----------
    compute : callable
        Returns A, f32 [cols, cols], as a new array that becomes U.
    """
    extra = mean = 0.0
    for _ in range(_TRIES):
        upper = np.ascontiguousarray(compute(), np.float32)
        mean = float(upper.diagonal().mean())
        upper[np.diag_indices_from(upper)] += np.float32(extra)
        diagonal = np.empty(len(upper), np.float64)
        if native.kernels.matrix_factor(upper, diagonal, pool_threads()):
            return Feedback(upper, diagonal.astype(np.float32), extra / mean if extra else 0.0)
        extra = max(extra * 10, mean * DAMPING)
    raise ResourceError(
        "the second moment is not positive definite: collect statistics from more samples", rule="quantizer.singular"
    )


class Links(NamedTuple):
    """The triangular factor of the second moment G, by which the error of a row changes the targets of earlier rows.

    ``G = (L + I) D (L + I)^T``: strictly lower L, f32 [rows, rows], and the diagonal D, f32 [rows].
    """

    below: Array
    diagonal: Array


def links_of(outputs: Array) -> Links:
    """Return the triangular factor of ``outputs``, the damped G; raises ``ResourceError`` ``quantizer.singular``.

    Element [k, j] of L is the effect of an error of row k on the target of row j, for j before k. The function applies
    ``feedback_factor`` to G with both axes reversed.
    """
    reverse = outputs[::-1, ::-1]
    factor = feedback_factor(lambda: np.array(reverse, np.float32, order="C"))
    _reverse(factor.upper)
    return Links(factor.upper, np.ascontiguousarray(factor.diagonal[::-1]))


def _reverse(matrix: Array) -> None:
    """Reverse the rows and the columns of ``matrix`` in place."""
    flat = matrix.reshape(-1)
    half = len(flat) // 2
    for first in range(0, half, _CHUNK):
        last = min(first + _CHUNK, half)
        front = flat[first:last]
        back = flat[len(flat) - last : len(flat) - first]
        front[:], back[:] = back[::-1].copy(), front[::-1].copy()


def _damp(moment: Array, mean: float, damping: float) -> Array:
    """Return ``moment / mean`` with ``damping`` added to its diagonal, as a new f32 array.

    If ``mean`` is 0, return the identity.
    """
    if mean <= 0:
        return np.eye(len(moment), dtype=np.float32)
    # Scaled to a mean of 1: sums of squares of tiny gradients stay within f32.
    damped = np.divide(moment, np.float32(mean), dtype=np.float32, order="C")
    damped[np.diag_indices_from(damped)] += np.float32(damping)
    return damped


def _weights(diagonal: Array, mean: float, damping: float) -> Array:
    """Return the diagonal of ``_damp``'s result, from the ``diagonal`` of the moment."""
    if mean <= 0:
        return np.ones(len(diagonal), np.float32)
    return diagonal / np.float32(mean) + np.float32(damping)
