"""Matrices that are multiplied while packed: tiles of them are decoded to the type of x.

This module has the base class of these matrices ("Other codecs" under "Many rows" in ``spec/affine.md``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np

from ingot.core.numeric.dtypes import LARGEST, as_bits, float_name, numpy_dtype, written
from ingot.errors import CodecError
from ingot.model.tensor import Array

Product = Callable[[Array, Array, Array | None, tuple[str, str], int], None]
"""A product. Arguments: x [m, cols], out [m, rows], bias or None, types of x and bias, number of threads.

f16 and bf16 arrays are u16.
"""

_F32_ROWS = 32  # for more rows of x in f32, decoding is faster, because products are rounded before they are added
_REACH = 40  # weights from 2^-40 to 2^40 can use the fast kernels: kValuesReach in native/core/matmul.h


class TileMatrix(ABC):
    """A matrix ``w`` [rows, cols] with the parts of a tensor, which are not copied.

    Parameters
    ----------
    params : the layout
    shape : rows, cols
    packed : u8
    scales : f32, f16 or bf16
    zeros : None

    Raises
    ------
    CodecError
        ``<codec>.size``: an array whose size differs from ``sizes``.
    """

    rounds = False

    def __init__(
        self, params: Any, shape: tuple[int, int], packed: Array, scales: Array, zeros: Array | None = None
    ) -> None:
        self.params = params
        self.shape = shape
        self.zeros = zeros
        self.packed = packed.reshape(-1).view(np.uint8)
        self.scales = scales.reshape(-1)
        if self.sizes() != (self.packed.size, self.scales.size):
            actual = (self.packed.size, self.scales.size)
            raise CodecError(f"{params.codec}.size", f"expected parts of {self.sizes()} elements, found {actual}")
        self._kernels: dict[str, Any] = {}
        self._range: tuple[float, float] | None = None

    @abstractmethod
    def sizes(self) -> tuple[int, int]:
        """Return the expected bytes of ``packed``, and the expected elements of ``scales``."""

    @abstractmethod
    def magnitudes(self) -> tuple[float, float]:
        """Return bounds of the magnitudes of weights that are not 0.

        The upper bound is infinite if a weight is not finite.
        """

    @abstractmethod
    def kernel(self, dtype: str, within: bool) -> Any:
        """Return the native kernel's matrix for products with x in ``dtype``.

        ``within`` states that the magnitudes of all weights are in the range of the fast kernels.
        """

    @abstractmethod
    def decode_into(self, start: int, out: Array, workers: int | None = None) -> None:
        """Decode ``len(out)`` rows from row ``start`` on into ``out`` [n, cols], in the type of ``out``.

        Raises ``CodecError`` ``<codec>.overflow`` if a finite value exceeds the range of ``out``.
        """

    @abstractmethod
    def parts(self) -> dict[str, Array]:
        """Return the parts of the stored tensor by role."""

    def choose_product(self, dtype: str, rows: int) -> Product | None:
        """Return the kernel for ``rows`` rows of x in ``dtype``; None if decoding the matrix is better.

        Decoding is better for many rows in f32, and for weights that may exceed the type of x.
        """
        if self._range is None:
            self._range = self.magnitudes()
        over = np.isfinite(self._range[1]) and self._range[1] > LARGEST[dtype]
        return None if over or (dtype == "f32" and rows > _F32_ROWS) else self.gemm_bits

    def gemm(self, x: Array, out: Array, bias: Array | None = None, workers: int = 1) -> None:
        """Write ``x @ w.T + bias`` to ``out``, summed in f32 in the order of "Many rows" and rounded once.

        x : [m, cols] in f32, f16 or bf16; out : [m, rows] of the same type; bias : [rows]. The result does not depend
        on the number of rows or workers, or on the instruction set. Raises ``ValueError`` if sizes or types contradict
        each other.
        """
        name = float_name(x)
        types = (name, name if bias is None else float_name(bias))
        self.gemm_bits(as_bits(x), written(out), None if bias is None else as_bits(bias), types, workers)

    def gemm_bits(self, x: Array, out: Array, bias: Array | None, types: tuple[str, str], workers: int) -> None:
        """Run ``gemm`` on arrays with u16 for f16 and bf16; ``types`` are the dtypes of ``x`` and ``bias``."""
        matrix = self._kernels.get(types[0])
        if matrix is None:
            low, high = self._range = self._range or self.magnitudes()
            matrix = self._kernels[types[0]] = self.kernel(types[0], low >= 2.0**-_REACH and high <= 2.0**_REACH)
        matrix.gemm(x, bias, out, types[0], types[1], workers)

    def int8_bits(self, *_: Any) -> None:
        raise ValueError("products with x in 8 bits need a layout of codec affine; use gemm")

    def decode(self, start: int, stop: int, dtype: str, workers: int | None = None) -> Array:
        """Return rows ``start`` to ``stop`` in f32, f16 or bf16; raises the errors of ``decode_into``."""
        out = np.empty((stop - start, self.shape[1]), numpy_dtype(dtype))
        self.decode_into(start, out, workers)
        return out


def bounds(values: Array) -> tuple[float, float]:
    """Return the smallest magnitude that is not 0, and the largest; infinite if a value is not finite."""
    size = np.abs(values[values != 0].astype(np.float32))
    if not size.size:
        return 1.0, 1.0
    return float(size.min()), float(size.max()) if np.isfinite(size).all() else float("inf")
