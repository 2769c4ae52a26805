"""What ggml's blocks stand for, in f32, f16 or bf16 (``spec/gguf.md``)."""

from __future__ import annotations

from ingot.codecs.blocks.grids import OF_TYPE, grid
from ingot.core.numeric.floats import LARGEST, float_name, written
from ingot.core.runtime import native
from ingot.errors import CodecError
from ingot.model.layouts.ggml import GgmlBlocksLayout
from ingot.model.tensor import Array

ID = GgmlBlocksLayout.codec


class BlockDecoder:
    """Decodes blocks of one type in memory."""

    def __init__(self, layout: GgmlBlocksLayout, where: str) -> None:
        self.block, self._type, self._where = layout.block, layout.type, where
        self._grid = grid(OF_TYPE[layout.type]).reshape(-1) if layout.type in OF_TYPE else None

    def decode(self, blocks: Array, out: Array) -> None:
        """Decode bytes of whole blocks into ``out`` (one dimension, f32, f16 or bf16), rounded once from f32.

        Finite numbers that ``out`` cannot hold are refused; a scale that is infinite or NaN decodes to that.
        """
        dtype = float_name(out)
        if native.kernels.ggml_decode(self._type, blocks, self._grid, written(out), dtype):
            raise CodecError(
                f"{ID}.overflow",
                f"expected values up to {LARGEST[dtype]:g}, which {dtype} can hold; decode to f32 or bf16",
                where=self._where,
            )
