"""Matrix products whose results are the same on every machine: in f32, or in bf16 with sums in f32."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ingot.core.runtime import native
from ingot.model.tensor import Array
from ingot.quantization.threads import pool_threads

PANEL = 64
"""The number of columns of a panel of the kernels."""


def multiply(a: Array, b: Array) -> Array:
    """Return ``a @ b`` in f32; the order of sums is the same on every machine."""
    out = np.empty((len(a), b.shape[1]), np.float32)
    native.kernels.matrix_multiply(np.ascontiguousarray(a), np.ascontiguousarray(b), out, pool_threads())
    return out


@dataclass(frozen=True, slots=True)
class Pairs:
    """The right factor of products in bf16, packed for the native kernels.

    ``words`` contain pairs of rows. Values are stored divided by ``unit``, a power of two.
    """

    words: Array
    depth: int
    cols: int
    unit: float = 1.0

    @classmethod
    def pack(cls, matrix: Array, unit: float = 1.0) -> Pairs:
        """Return ``matrix``, f32 [depth, cols], as a packed factor."""
        depth, cols = matrix.shape
        pairs = cls(np.zeros(-(-cols // PANEL) * -(-depth // 2) * PANEL, np.uint32), depth, cols, unit)
        pairs.put(matrix, 0)
        return pairs

    def put(self, rows: Array, first: int) -> None:
        """Overwrite rows of the factor with ``rows``, f32, beginning at row ``first``."""
        native.kernels.pairs_pack(np.ascontiguousarray(rows), first, self.depth, self.unit, self.words)

    def multiply(self, a: Array, unit: float = 1.0) -> Array:
        """Return ``a @ matrix``; ``a`` is rounded to bf16 after division by ``unit``, a power of two near its
        maximum.
        """
        out = np.zeros((len(a), self.cols), np.float32)
        self.add(np.ascontiguousarray(a), (0, self.depth), (0, self.cols), out, unit)
        return out

    def add(
        self,
        a: Array,
        rows: tuple[int, int],
        columns: tuple[int, int],
        out: Array,
        unit: float = 1.0,
        *,
        first: int = 0,
    ) -> None:
        """Add the product of columns of ``a`` and ``rows`` of the factor to ``out``, within ``columns``.

        ``rows`` and ``columns`` are ranges (first, stop). The columns of ``a`` begin at ``first``. The first row is
        even. The first column is a multiple of ``PANEL``, or one of ``rows``.
        """
        span = (first, first + rows[1] - rows[0])
        native.kernels.pairs_multiply_add(
            a, span, self.words, self.depth, rows[0], columns, unit, unit * self.unit, out, pool_threads()
        )


def unit_of(weights: Array) -> float:
    """Return the smallest power of two above all magnitudes, limited to 2^-100 to 2^100."""
    exponent = int(np.frexp(np.abs(weights).max(initial=0))[1])
    return float(2.0 ** min(max(exponent, -100), 100))
