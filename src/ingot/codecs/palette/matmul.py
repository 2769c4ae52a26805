"""Products with packed palettes (``spec/palette.md``, "Multiplying")."""

from __future__ import annotations

import numpy as np

from ingot.codecs.palette.params import layout_of
from ingot.codecs.palette.rows import Lookup, entry_values, tables
from ingot.codecs.tiles import TileMatrix, bounds
from ingot.core.numeric.dtypes import as_bits, float_name
from ingot.core.runtime import native
from ingot.errors import IngotError, UnsupportedError
from ingot.model.layouts.palette import CODEBOOK, INDICES, PaletteLayout
from ingot.model.tensor import Array, Tensor

_FLOATS = ("f32", "f16", "bf16")


class PaletteMatrix(TileMatrix):
    """A matrix of indices, with codebooks in ``scales``; ``params`` is a ``PaletteLayout``."""

    params: PaletteLayout

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> PaletteMatrix:
        """Return the matrix of a 2-d tensor without copying its parts.

        Raises
        ------
        CodecError
            The checks of ``PaletteCodec.check``.
        UnsupportedError
            ``matmul.layout``: the tensor cannot stay packed.
        """
        params = layout_of(tensor)
        if not _fits(params, tensor.shape):
            raise UnsupportedError(
                "expected a matrix of single values, float codebooks per tensor or per rows, and rows of full bytes; "
                f"found shape {list(tensor.shape)}, vectors of {params.vector_size} and {params.groups} codebooks; "
                "decode it",
                rule="matmul.layout",
                where=tensor.name,
            )
        indices = np.frombuffer(tensor.parts[INDICES].view(), np.uint8)
        return cls(params, tensor.matrix_shape, indices, tensor.parts[CODEBOOK].array())

    def sizes(self) -> tuple[int, int]:
        return self.params.index_bytes(self.shape), self.params.codebooks * self.params.entries

    def magnitudes(self) -> tuple[float, float]:
        return bounds(self.scales)

    def kernel(self, dtype: str, within: bool) -> native.kernels.PaletteMatrix:
        return native.kernels.PaletteMatrix(
            self.packed,
            as_bits(self._tables(dtype)),
            rows=self.shape[0],
            cols=self.shape[1],
            bits=self.params.bits,
            dtype=dtype,
            within=within,
        )

    def decode_into(self, start: int, out: Array, workers: int | None = None) -> None:
        row = self.shape[1] * self.params.bits // 8
        look_up = Lookup(self.params, self.shape, self._tables(float_name(out)))
        look_up(self.packed[start * row : (start + len(out)) * row], start * self.shape[1], out.reshape(-1))

    def parts(self) -> dict[str, Array]:
        return {INDICES: self.packed, CODEBOOK: self.scales}

    def _tables(self, dtype: str) -> Array:
        return tables(entry_values(self.scales.reshape(self.params.codebook_shape()), None), dtype)


def stays_packed(tensor: Tensor, *, direct: bool = False) -> bool:
    """Return whether ``PaletteMatrix.from_tensor`` supports a tensor, according to its attributes.

    If ``direct`` is set, return False, because a product with one row is not faster than with the decoded matrix.
    """
    if direct or tensor.codec != PaletteLayout.codec:
        return False
    try:
        return _fits(layout_of(tensor), tensor.shape)
    except IngotError:
        return False


def _fits(params: PaletteLayout, shape: tuple[int, ...]) -> bool:
    """Return whether the kernels support a matrix of this layout and shape."""
    if len(shape) != 2 or 0 in shape or params.vector_size != 1 or params.scales is not None:
        return False
    by_rows = all(count == 1 for count in params.groups[1:])
    return by_rows and params.codebook in _FLOATS and shape[1] * params.bits % 8 == 0
