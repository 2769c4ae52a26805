"""The best approximation of a matrix by a product of two thin ones, by randomized subspace iteration.

Halko, Martinsson, Tropp, "Finding structure with randomness", SIAM Review 53 (2011): algorithm 4.4 for the range, 5.1
for the factors. Computed in f64 from a fixed seed, and rounded once at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from ingot.model.tensor import Array

OVERSAMPLING = 8
ITERATIONS = 3
_SEED = 0x1A60
_BLOCK = 512  # rows that are widened to f64 at a time


def factors(rows: Array, max_rank: int, error: float | None) -> tuple[Array, Array]:
    """Return left [rows, r] and right [r, cols] in f64, whose product approximates ``rows``.

    Parameters
    ----------
    rows : [rows, cols]
        Finite values.
    max_rank : int
        The largest allowed r.
    error : float or None
        If set, r is the smallest number with which the Frobenius norm of the residual is at most this fraction of the
        matrix's norm, or ``max_rank`` if that is smaller. If None, r is ``max_rank``, or the rank of the matrix if that
        is smaller.

    Both factors contain the square root of each singular value. In each pair of vectors, the largest element of the
    left vector is positive.
    """
    basis, values, right = _leading_vectors(rows, min(max_rank, *rows.shape))
    total = sum(
        float(np.square(rows[start : start + _BLOCK].astype(np.float64)).sum()) for start in range(0, len(rows), _BLOCK)
    )
    rank = int(np.count_nonzero(values > values[0] * 1e-12)) if values.size and values[0] > 0 else 0
    if error is not None and rank:
        residual = total - np.cumsum(np.square(values[:rank]))
        enough = np.flatnonzero(residual <= total * error**2)
        rank = int(enough[0]) + 1 if enough.size else rank
    basis = basis[:, :rank]
    values = np.sqrt(values[:rank])
    right = right[:rank]
    largest = (
        np.take_along_axis(basis, np.abs(basis).argmax(axis=0)[None], axis=0) if len(basis) else np.ones((1, rank))
    )
    sign = np.where(largest[0] < 0, -1.0, 1.0)
    return basis * (values * sign), right * (values * sign)[:, None]


def spectrum(blocks: Callable[[], Iterable[Array]], cols: int, max_rank: int) -> Array:
    """Return an upper bound of the residual for each rank from 0 to ``max_rank``, as a fraction of the squared norm.

    As in ``factors``, a randomized iteration finds a subspace, here of the row space alone (algorithm 4.4 with one
    step). The matrix is read twice, in blocks of rows, and is never in memory in full. The bounds are the exact
    residuals of this subspace.

    Parameters
    ----------
    blocks : callable
        Returns the matrix's rows in blocks [any, cols], from the first row on; all values are finite. Called twice.
    """
    size = min(max_rank + OVERSAMPLING, cols)
    start = np.random.Generator(np.random.PCG64(_SEED)).standard_normal((cols, size))
    span = np.zeros((cols, size))
    total = 0.0
    for rows in blocks():
        for first in range(0, len(rows), _BLOCK):
            wide = rows[first : first + _BLOCK].astype(np.float64)
            total += float(np.square(wide).sum())
            span += wide.T @ (wide @ start)
    del start
    if not total:
        return np.zeros(max_rank + 1)
    span = orthonormal(span)
    inner = np.zeros((span.shape[1],) * 2)
    for rows in blocks():
        for first in range(0, len(rows), _BLOCK):
            projected = rows[first : first + _BLOCK].astype(np.float64) @ span
            inner += projected.T @ projected
    captured = np.concatenate(([0.0], np.cumsum(np.linalg.eigvalsh(inner)[::-1][:max_rank])))
    captured = np.concatenate((captured, np.full(max_rank + 1 - len(captured), captured[-1])))
    return np.clip(1 - captured / total, 0.0, 1.0)


def orthonormal(columns: Array) -> Array:
    """Return an orthonormal base of the columns' space, without directions that vanish in rounding.

    It is computed from inner products of the columns, twice (CholeskyQR2 with eigenvalues; Yamamoto et al., ETNA 44,
    2015). For a tall matrix this is an order of magnitude faster than Householder's method.
    """
    for _ in range(2):
        columns = columns / np.maximum(np.linalg.norm(columns, axis=0), np.finfo(np.float64).tiny)
        values, vectors = np.linalg.eigh(columns.T @ columns)
        good = values > values[-1] * 1e-13
        columns = columns @ (vectors[:, good] / np.sqrt(values[good]))
    return columns


def _leading_vectors(rows: Array, count: int) -> tuple[Array, Array, Array]:
    """Return the leading ``count`` singular vectors and values."""
    height, width = rows.shape
    size = count + OVERSAMPLING
    if min(height, width) <= 2 * size:
        basis, values, right = np.linalg.svd(rows.astype(np.float64), full_matrices=False)
        return basis[:, :count], values[:count], right[:count]
    span = np.linalg.qr(_times(rows, np.random.Generator(np.random.PCG64(_SEED)).standard_normal((width, size))))[0]
    for _ in range(ITERATIONS):
        span = np.linalg.qr(_times(rows, np.linalg.qr(_times_transposed(rows, span))[0]))[0]
    inner, values, right = np.linalg.svd(_times_transposed(rows, span).T, full_matrices=False)
    return span @ inner[:, :count], values[:count], right[:count]


def _times(rows: Array, factor: Array) -> Array:
    """Return ``rows @ factor`` in f64, computed in blocks of rows."""
    out = np.empty((len(rows), factor.shape[1]))
    for start in range(0, len(rows), _BLOCK):
        out[start : start + _BLOCK] = rows[start : start + _BLOCK].astype(np.float64) @ factor
    return out


def _times_transposed(rows: Array, factor: Array) -> Array:
    """Return ``rows.T @ factor`` in f64, computed in blocks of rows."""
    out = np.zeros((rows.shape[1], factor.shape[1]))
    for start in range(0, len(rows), _BLOCK):
        out += rows[start : start + _BLOCK].astype(np.float64).T @ factor[start : start + _BLOCK]
    return out
