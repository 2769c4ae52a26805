"""Products of matrices whose sums have one order on every machine: in f32, and in bf16 with sums in f32."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ingot.core.runtime import native
from ingot.model.tensor import Array

PANEL = 64
"""The number of columns of a panel of the kernels."""


def multiply(a: Array, b: Array) -> Array:
    """Return ``a @ b`` in f32, with sums in one order on every machine."""
    out = np.empty((len(a), b.shape[1]), np.float32)
    native.kernels.matrix_multiply(np.ascontiguousarray(a), np.ascontiguousarray(b), out)
    return out


@dataclass(frozen=True, slots=True)
class Pairs:
    """A matrix over ``unit``, a power of two, in bf16, in the form of the kernels."""

    words: Array
    depth: int
    cols: int
    unit: float = 1.0

    @classmethod
    def pack(cls, matrix: Array, unit: float = 1.0) -> Pairs:
        """Return ``matrix``, f32 [depth, cols], in this form."""
        depth, cols = matrix.shape
        pairs = cls(np.zeros(-(-cols // PANEL) * -(-depth // 2) * PANEL, np.uint32), depth, cols, unit)
        pairs.put(matrix, 0)
        return pairs

    def put(self, rows: Array, first: int) -> None:
        """Replace the rows from ``first`` on."""
        native.kernels.pairs_pack(np.ascontiguousarray(rows), first, self.depth, self.unit, self.words)

    def multiply(self, a: Array, unit: float = 1.0) -> Array:
        """Return ``a @ matrix``, with ``a`` in bf16; ``unit`` is a power of two near its largest magnitude."""
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
        """Add the product of some rows of the matrix to ``columns`` of ``out``.

        ``rows`` begin at an even one, and are multiplied by the columns of ``a`` from ``first`` on. ``columns`` begin
        with the first of a panel, if it is not one of ``rows``.
        """
        span = (first, first + rows[1] - rows[0])
        native.kernels.pairs_multiply_add(
            a, span, self.words, self.depth, rows[0], columns, unit, unit * self.unit, out
        )


def unit_of(weights: Array) -> float:
    """Return the power of two next above the largest magnitude, between 2^-100 and 2^100."""
    exponent = int(np.frexp(np.abs(weights).max(initial=0))[1])
    return float(2.0 ** min(max(exponent, -100), 100))
