"""Decoding of ggml's blocks to f32, f16 or bf16 (``spec/gguf.md``)."""

from __future__ import annotations

from ingot.codecs.blocks.grids import grid_of
from ingot.core.numeric.dtypes import LARGEST, float_name, written
from ingot.core.runtime import native
from ingot.errors import CodecError
from ingot.model.layouts.ggml import GgmlBlocksLayout
from ingot.model.tensor import Array

ID = GgmlBlocksLayout.codec


class BlockDecoder:
    """A decoder of blocks of one type in memory."""

    def __init__(self, layout: GgmlBlocksLayout, location: str) -> None:
        self.block = layout.block
        self._type = layout.type
        self._location = location
        self._grid = grid_of(layout.type)

    def decode(self, blocks: Array, out: Array) -> None:
        """Decode full blocks into ``out`` (one dimension, f32, f16 or bf16), rounded once from f32.

        Raises ``CodecError`` ``ggml_blocks.overflow`` if a finite number is too large for ``out``; infinite scales and
        NaNs decode as usual.
        """
        dtype = float_name(out)
        if native.kernels.ggml_decode(self._type, blocks, self._grid, written(out), dtype):
            raise CodecError(
                f"{ID}.overflow",
                f"expected values up to {LARGEST[dtype]:g}, the largest {dtype}; decode to f32 or bf16",
                where=self._location,
            )
