"""The best approximation of a matrix by a product of two thin ones, by randomized subspace iteration.

Halko, Martinsson, Tropp, "Finding structure with randomness", SIAM Review 53 (2011): algorithm 4.4 for the range, 5.1
for the factors. Everything is in double precision with a fixed start, and rounded once at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from ingot.model.tensor import Array

OVERSAMPLING, ITERATIONS = 8, 3
_SEED = 0x1A60
_BLOCK = 512  # rows widened to double precision at a time


def factors(rows: Array, most: int, error: float | None) -> tuple[Array, Array]:
    """Return left [rows, r] and right [r, cols] in double precision whose product is near ``rows``.

    Parameters
    ----------
    rows : [rows, cols]
        Finite values.
    most : int
        The largest r.
    error : float or None
        The smallest r whose residual has at most this share of the norm (Frobenius) is taken, if ``most`` reaches it;
        None for ``most``, or the rank of the matrix if that is less.

    The singular values are split evenly between both; of each pair of vectors, left's largest element is positive.
    """
    left, values, right = _leading(rows, min(most, *rows.shape))
    total = sum(
        float(np.square(rows[start : start + _BLOCK].astype(np.float64)).sum()) for start in range(0, len(rows), _BLOCK)
    )
    rank = int(np.count_nonzero(values > values[0] * 1e-12)) if values.size and values[0] > 0 else 0
    if error is not None and rank:
        residual = total - np.cumsum(np.square(values[:rank]))
        enough = np.flatnonzero(residual <= total * error**2)
        rank = int(enough[0]) + 1 if enough.size else rank
    left, values, right = left[:, :rank], np.sqrt(values[:rank]), right[:rank]
    largest = np.take_along_axis(left, np.abs(left).argmax(axis=0)[None], axis=0) if len(left) else np.ones((1, rank))
    sign = np.where(largest[0] < 0, -1.0, 1.0)
    return left * (values * sign), right * (values * sign)[:, None]


def spectrum(blocks: Callable[[], Iterable[Array]], cols: int, most: int) -> Array:
    """Return the share of a matrix's squared norm that is left after rank 0, 1, ... ``most``, at the most.

    The same iteration on the row space alone (algorithm 4.4 with one step): the matrix passes twice, in blocks of
    rows, and is never in memory. What is left of the subspace that is found is exact; a better one leaves no more.

    Parameters
    ----------
    blocks : callable
        Returns the matrix's rows from the first on, [any, cols] each, finite; called twice.
    """
    size = min(most + OVERSAMPLING, cols)
    start = np.random.Generator(np.random.PCG64(_SEED)).standard_normal((cols, size))
    span, total = np.zeros((cols, size)), 0.0
    for rows in blocks():
        for first in range(0, len(rows), _BLOCK):
            wide = rows[first : first + _BLOCK].astype(np.float64)
            total += float(np.square(wide).sum())
            span += wide.T @ (wide @ start)
    del start
    if not total:
        return np.zeros(most + 1)
    span = _orthonormal(span)
    inner = np.zeros((span.shape[1],) * 2)
    for rows in blocks():
        for first in range(0, len(rows), _BLOCK):
            seen = rows[first : first + _BLOCK].astype(np.float64) @ span
            inner += seen.T @ seen
    kept = np.concatenate(([0.0], np.cumsum(np.linalg.eigvalsh(inner)[::-1][:most])))
    kept = np.concatenate((kept, np.full(most + 1 - len(kept), kept[-1])))
    return np.clip(1 - kept / total, 0.0, 1.0)


def _orthonormal(columns: Array) -> Array:
    """Return an orthonormal base of the columns' space, what is lost in rounding left out.

    By the columns' inner products, twice (CholeskyQR2 with eigenvalues; Yamamoto et al., ETNA 44, 2015): products of
    matrices alone, an order of magnitude faster than Householder's on a tall matrix.
    """
    for _ in range(2):
        columns = columns / np.maximum(np.linalg.norm(columns, axis=0), np.finfo(np.float64).tiny)
        values, vectors = np.linalg.eigh(columns.T @ columns)
        good = values > values[-1] * 1e-13
        columns = columns @ (vectors[:, good] / np.sqrt(values[good]))
    return columns


def _leading(rows: Array, count: int) -> tuple[Array, Array, Array]:
    """Return the leading ``count`` singular vectors and values."""
    height, width = rows.shape
    size = count + OVERSAMPLING
    if min(height, width) <= 2 * size:
        left, values, right = np.linalg.svd(rows.astype(np.float64), full_matrices=False)
        return left[:, :count], values[:count], right[:count]
    span = np.linalg.qr(_times(rows, np.random.Generator(np.random.PCG64(_SEED)).standard_normal((width, size))))[0]
    for _ in range(ITERATIONS):
        span = np.linalg.qr(_times(rows, np.linalg.qr(_times_transposed(rows, span))[0]))[0]
    inner, values, right = np.linalg.svd(_times_transposed(rows, span).T, full_matrices=False)
    return span @ inner[:, :count], values[:count], right[:count]


def _times(rows: Array, other: Array) -> Array:
    """Return ``rows @ other``."""
    out = np.empty((len(rows), other.shape[1]))
    for start in range(0, len(rows), _BLOCK):
        out[start : start + _BLOCK] = rows[start : start + _BLOCK].astype(np.float64) @ other
    return out


def _times_transposed(rows: Array, other: Array) -> Array:
    """Return ``rows.T @ other``."""
    out = np.zeros((rows.shape[1], other.shape[1]))
    for start in range(0, len(rows), _BLOCK):
        out += rows[start : start + _BLOCK].astype(np.float64).T @ other[start : start + _BLOCK]
    return out
