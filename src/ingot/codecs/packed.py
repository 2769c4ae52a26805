"""Matrices that are multiplied without being decoded, for the codecs that support it."""

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
    """A matrix [rows, cols] with the parts of a stored tensor, which are not copied.

    ``packed`` are bytes; ``scales`` (factors or lookup tables) and ``zeros`` are floats. The class can create another
    matrix from ``params``, ``shape`` and arrays of these types.
    """

    params: Any
    shape: tuple[int, int]
    packed: Array
    scales: Array
    zeros: Array | None

    @property
    def rounds(self) -> bool:
        """Whether ``int8_bits`` supports this layout, with a kernel that rounds x to 8 bits."""
        ...

    def choose_product(self, dtype: str, rows: int) -> Product | None:
        """Return the kernel for ``rows`` rows of x in ``dtype``; None if decoding the matrix is faster."""
        ...

    def int8_bits(self, x: Array, out: Array, bias: Array | None, types: tuple[str, str], workers: int) -> None:
        """Write ``x @ w.T + bias`` to ``out``, with x rounded to 8 bits.

        f16 and bf16 arrays are u16; ``types`` are the dtype names of ``x`` and ``bias``.
        """
        ...

    def decode_into(self, start: int, out: Array, workers: int | None = None) -> None:
        """Decode ``len(out)`` rows from row ``start`` on into ``out`` [n, cols], in the type of ``out``."""
        ...

    def parts(self) -> dict[str, Array]:
        """Return the parts of the stored tensor by role."""
        ...


CODECS: MappingProxyType[str, tuple[Callable[[Tensor], Packed], Callable[..., bool]]] = MappingProxyType(
    {
        AffineLayout.codec: (affine.PackedMatrix.from_tensor, affine.stays_packed),
        PaletteLayout.codec: (palette.PaletteMatrix.from_tensor, palette.stays_packed),
        TrellisLayout.codec: (trellis.TrellisMatrix.from_tensor, trellis.stays_packed),
    }
)


def matrix_of(tensor: Tensor) -> Packed:
    """Return the matrix of a 2-d tensor without copying its parts.

    Raises
    ------
    CodecError
        The rules of the codec's ``check``.
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
    """Return whether ``matrix_of`` supports a tensor, according to its attributes.

    If ``direct`` is set, a product with one row must also be faster than with the decoded matrix. Reads no weights and
    raises no error.
    """
    return tensor.codec in CODECS and CODECS[tensor.codec][1](tensor, direct=direct)
