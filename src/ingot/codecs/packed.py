"""Matrices that stay as they are stored and are multiplied with, of any codec that can."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any, Protocol

from ingot.codecs.affine import matmul as affine
from ingot.codecs.palette import matmul as palette
from ingot.codecs.tiles import Product
from ingot.codecs.trellis import matmul as trellis
from ingot.errors import UnsupportedError
from ingot.model.layouts.affine import AffineLayout
from ingot.model.layouts.palette import PaletteLayout
from ingot.model.layouts.trellis import TrellisLayout
from ingot.model.tensor import Array, Tensor


class Packed(Protocol):
    """A matrix [rows, cols] over the parts of a stored tensor, which it does not copy.

    ``packed`` are bytes, ``scales`` (what codes are multiplied by or looked up in) and ``zeros`` floats; a matrix of
    the same class can be made of ``params``, ``shape`` and these.
    """

    params: Any
    shape: tuple[int, int]
    packed: Array
    scales: Array
    zeros: Array | None

    @property
    def rounds(self) -> bool:
        """Whether ``int8_bits`` takes this layout."""
        ...

    def way(self, dtype: str, rows: int) -> Product | None:
        """Return the product by the kernels for so many rows of x of a type; None where decoding is better."""
        ...

    def int8_bits(self, x: Array, out: Array, bias: Array | None, types: tuple[str, str], workers: int) -> None:
        """Multiply with x rounded to 8 bits."""
        ...

    def decode_into(self, start: int, out: Array, workers: int | None = None) -> None:
        """Decode as many rows from ``start`` as ``out`` [n, cols] has, in its type."""
        ...

    def parts(self) -> dict[str, Array]:
        """Return the parts of the stored tensor by their roles."""
        ...


CODECS: MappingProxyType[str, tuple[Callable[[Tensor], Packed], Callable[..., bool]]] = MappingProxyType(
    {
        AffineLayout.codec: (affine.PackedMatrix.of, affine.stays_packed),
        PaletteLayout.codec: (palette.PaletteMatrix.of, palette.stays_packed),
        TrellisLayout.codec: (trellis.TrellisMatrix.of, trellis.stays_packed),
    }
)


def matrix_of(tensor: Tensor) -> Packed:
    """Return the matrix of a 2-d tensor, its parts as they lie.

    Raises
    ------
    CodecError
        As the codec's ``check``.
    UnsupportedError
        ``matmul.layout``: the tensor cannot stay packed.
    """
    if tensor.codec not in CODECS:
        raise UnsupportedError(
            f"expected a matrix of {', '.join(CODECS)}, found {tensor.codec}; decode it",
            rule="matmul.layout",
            where=tensor.name,
        )
    return CODECS[tensor.codec][0](tensor)


def stays_packed(tensor: Tensor, *, direct: bool = False) -> bool:
    """Whether ``matrix_of`` takes a tensor, as far as its attributes tell, and where ``direct`` a product of one row is
    faster than that of the decoded matrix; raises nothing, reads no weights."""
    return tensor.codec in CODECS and CODECS[tensor.codec][1](tensor, direct=direct)
