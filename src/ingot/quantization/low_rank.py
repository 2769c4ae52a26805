"""The best product of two thin matrices under both factors: its error D has the least ``tr(G D A D^T)``.

With ``A = L L^T`` and ``G = M M^T`` that error is the squared norm of ``M^T D L``: the leading singular vectors of
``M^T W L`` (Eckart and Young, 1936), mapped back by ``M^-T`` and ``L^-1``. SVD-LLM (arXiv 2403.07378) whitens in this
way for the inputs alone.
"""

from __future__ import annotations

import numpy as np

from ingot.codecs.wrap.low_rank_fit import factors as plain_factors
from ingot.model.tensor import Array
from ingot.quantization.factors import Factors

_TINY = np.finfo(np.float64).tiny


def factors_under(rows: Array, max_rank: int, error: float | None, factors: Factors) -> tuple[Array, Array]:
    """Return left [rows, r] and right [r, cols] in f64; see ``low_rank_fit.factors`` for ``max_rank`` and ``error``.

    ``error`` is a fraction of the norm under the factors. Columns of left have the norms of the rows of right.
    """
    inner, outer = _roots(factors)
    left_factor, right = plain_factors(_white(rows, inner, outer), max_rank, error)
    if outer is not None:
        left_factor = np.linalg.solve(outer.T, left_factor)
    right = np.linalg.solve(inner.T, right.T).T
    norms = np.maximum(np.linalg.norm(left_factor, axis=0), _TINY)
    even = np.sqrt(np.maximum(np.linalg.norm(right, axis=1), _TINY) / norms)
    return left_factor * even, right / even[:, None]


def whiten(rows: Array, factors: Factors) -> Array:
    """Return ``M^T W L``, f64 [rows, cols]: its squared norm is that of the matrix under the factors."""
    return _white(rows, *_roots(factors))


def _roots(factors: Factors) -> tuple[Array, Array | None]:
    inner = np.linalg.cholesky(factors.inputs.astype(np.float64))
    return inner, None if factors.outputs is None else np.linalg.cholesky(factors.outputs.astype(np.float64))


def _white(rows: Array, inner: Array, outer: Array | None) -> Array:
    white: Array = rows.astype(np.float64) @ inner
    return white if outer is None else outer.T @ white
