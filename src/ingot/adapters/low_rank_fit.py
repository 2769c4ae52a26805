"""Compute the best low-rank approximation of the difference between a fine-tune and its base.

Singular vectors are computed in f32. With a limit on the error, the rank of each matrix is the smallest that meets it.
With a limit on the size, the ranks minimize the total error. The algorithm is randomized subspace iteration (Halko,
Martinsson, Tropp, SIAM Review 53, 2011, algorithms 4.4 and 5.1) with a fixed seed. ``codecs.wrap.low_rank_fit``
implements it in f64 for stored deltas, which is three times slower.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ingot.adapters.low_rank_device import span_on_device
from ingot.codecs.wrap.low_rank_fit import OVERSAMPLING, orthonormal
from ingot.core.numeric.dtypes import cast
from ingot.errors import CodecError, UnsupportedError
from ingot.model.tensor import Array
from ingot.quantization.encode import Whitening

ITERATIONS = 2
_SEED = 0x10A4
_EXACT = 192  # smaller matrices are decomposed exactly
_FIRST_RANK = 32  # the first rank that ``with_error`` tries
_NOISE = 1e-6  # relative to the largest; smaller singular values are rounding errors
_BLOCK = 1 << 20  # elements of the residual that are computed at a time


@dataclass(frozen=True, slots=True)
class Factors:
    """Factors of a change, ``b @ a``, rounded to their element type.

    ``error`` is the norm of change minus product, divided by the norm of the change.
    """

    a: Array
    b: Array
    error: float

    @property
    def rank(self) -> int:
        return len(self.a)


class Change:
    """The difference between a matrix of a fine-tune and that of its base, weighted for the norm of errors.

    Parameters
    ----------
    name : str
        For error messages.
    values : f32 [rows, cols]
        Fine-tune minus base; finite.
    whitening : Whitening, optional
        The weights of errors; None for the Frobenius norm.
    device : torch.device, optional
        The device that computes the vectors of large matrices; None for the CPU.
    """

    def __init__(self, name: str, values: Array, whitening: Whitening | None, device: Any = None) -> None:
        self.name = name
        self._device = device
        self._whitening = whitening
        self._weighted = values if whitening is None else whitening.apply(values).astype(np.float32)
        self.squared_norm = _squared_norm(self._weighted)
        rows, cols = values.shape
        self.limit = min(rows, cols)
        self.useful_limit = max(1, (rows * cols - 1) // (rows + cols))
        """The largest rank whose factors have fewer elements than the matrix, at least 1."""

    @property
    def is_weighted(self) -> bool:
        return self._whitening is not None

    def singular_values(self, count: int) -> Array:
        """Return the ``count`` largest singular values in f64."""
        return _leading_vectors(self._weighted, min(count, self.limit), self._device)[1]

    def with_rank(self, rank: int, dtype: str) -> Factors:
        """Return factors of rank ``rank``, or of the largest possible rank if that is smaller."""
        return self._factors(*_leading_vectors(self._weighted, min(rank, self.limit), self._device), dtype)

    def with_error(self, max_error: float, dtype: str) -> Factors:
        """Return factors of the smallest rank whose relative error is at most ``max_error``.

        Raises ``UnsupportedError`` ``adapter.error`` if only factors with more elements than the matrix are accurate
        enough.
        """
        count = min(_FIRST_RANK, self.useful_limit)
        while True:
            vectors = _leading_vectors(self._weighted, count, self._device)
            remaining = self.squared_norm - np.cumsum(np.square(vectors[1]))
            rank = int(np.count_nonzero(remaining > self.squared_norm * max_error**2)) + 1
            while rank <= len(vectors[1]):
                factors = self._factors(vectors[0][:, :rank], vectors[1][:rank], vectors[2][:rank], dtype)
                if factors.error <= max_error:
                    return factors
                rank += 1 + rank // 16
            if count == self.useful_limit:
                raise UnsupportedError(
                    f"the change is not of low rank: {count} of {self.limit} ranks, the most that take less space than "
                    f"the matrix, leave more than {max_error:g} of it; allow a larger --max-error, or store the "
                    "fine-tune as a delta (ingot diff)",
                    rule="adapter.error",
                    where=self.name,
                )
            count = min(2 * count, self.useful_limit)

    def _factors(self, columns: Array, values: Array, rows: Array, dtype: str) -> Factors:
        roots = np.sqrt(values)
        b = columns * roots
        a = rows * roots[:, None]
        if self._whitening is not None:
            b, a = self._whitening.restore(b, a)
            norms = np.linalg.norm(b, axis=0), np.linalg.norm(a, axis=1)
            even = np.sqrt(norms[1] / norms[0])
            b = b * even
            a = a / even[:, None]
        with np.errstate(over="ignore"):  # checked below
            stored = [cast(cast(np.ascontiguousarray(item, np.float32), dtype), "f32") for item in (a, b)]
        if not all(np.isfinite(item).all() for item in stored):
            raise CodecError(
                "adapter.values", f"the factors have values beyond the range of {dtype}; use f32", where=self.name
            )
        return Factors(stored[0], stored[1], self._error(*stored))

    def _error(self, a: Array, b: Array) -> float:
        """Return the relative error of the factors: the norm of (change - b @ a), divided by the norm of the change."""
        if self._whitening is None:
            step = max(1, _BLOCK // max(1, a.shape[1]))
            starts = range(0, len(b), step)
            remaining = sum(_squared_norm(self._weighted[i : i + step] - b[i : i + step] @ a) for i in starts)
        else:
            remaining = _squared_norm(self._weighted - self._whitening.apply(b @ a))
        return float(np.sqrt(remaining / self.squared_norm))


def ranks_for_size(values: Mapping[str, Array], costs: Mapping[str, int], size: int) -> dict[str, int]:
    """Return the rank of each matrix that minimizes the total error under a limit of ``size`` bytes.

    Parameters
    ----------
    values : mapping of name to array
        Singular values of each matrix, descending. Their number is the largest possible rank.
    costs : mapping of name to int
        The bytes of a matrix's factors per unit of rank.
    size : int
        The maximum size of all factors together, in bytes.
    """
    ranks = dict.fromkeys(values, 0)
    heap = [(-(float(item[0]) ** 2) / costs[name], name) for name, item in values.items() if len(item)]
    heapq.heapify(heap)
    while heap:
        _, name = heapq.heappop(heap)
        if costs[name] > size:
            continue
        size -= costs[name]
        ranks[name] += 1
        if ranks[name] < len(values[name]):
            heapq.heappush(heap, (-(float(values[name][ranks[name]]) ** 2) / costs[name], name))
    return ranks


def _squared_norm(values: Array) -> float:
    """Return the sum of squares; each row is summed in f32, the sums of the rows in f64."""
    return float(np.einsum("ij,ij->i", values, values).sum(dtype=np.float64))


def _leading_vectors(rows: Array, count: int, device: Any) -> tuple[Array, Array, Array]:
    """Return the largest singular values [r] with left vectors [rows, r] and right vectors [r, cols].

    ``r`` is at most ``count``. Singular values that are zero up to rounding are omitted.
    """
    size = count + OVERSAMPLING
    if min(rows.shape) <= max(2 * size, _EXACT):
        columns, values, right_rows = np.linalg.svd(rows.astype(np.float64), full_matrices=False)
    else:
        start = np.random.Generator(np.random.PCG64(_SEED)).standard_normal((rows.shape[1], size), np.float32)
        compute = _span_and_projection if device is None else partial(span_on_device, device=device)
        span, projected = compute(rows, start, ITERATIONS)
        squares, inner = np.linalg.eigh(projected.astype(np.float64) @ projected.T)
        values = np.sqrt(np.maximum(squares[::-1], 0))
        columns = span @ inner[:, ::-1].astype(np.float32)
        right_rows = (inner[:, ::-1].T.astype(np.float32) @ projected) / np.maximum(values, np.finfo(np.float32).tiny)[
            :, None
        ].astype(np.float32)
    rank = min(count, int(np.count_nonzero(values > values[0] * _NOISE)))
    return columns[:, :rank], values[:rank], right_rows[:rank]


def _span_and_projection(rows: Array, start: Array, iterations: int) -> tuple[Array, Array]:
    """Return an orthonormal basis of the dominant column space, [rows, r], and the projection on it, [r, cols]."""
    span = _span(rows @ start)
    for _ in range(iterations):
        span = _span(rows @ _span(rows.T @ span))
    return span, span.T @ rows


def _span(columns: Array) -> Array:
    """Return an orthonormal basis of the column space in f32."""
    return orthonormal(columns.astype(np.float64)).astype(np.float32)
