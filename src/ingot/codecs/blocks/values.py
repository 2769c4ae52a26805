"""What ggml's blocks stand for, in f32, f16 or bf16 (``spec/gguf.md``)."""

from __future__ import annotations

import numpy as np

from ingot.codecs.blocks.grids import OF_TYPE, grid
from ingot.core import native
from ingot.core.floats import LARGEST, cast, cast_into, float_name
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
        """Decode bytes of whole blocks into ``out`` (one dimension, f32, f16 or bf16), rounded once from f32."""
        values = out if out.dtype == np.float32 else np.empty(out.size, np.float32)
        native.kernels.ggml_decode(self._type, blocks, self._grid, values)
        if values is not out:
            with np.errstate(over="ignore"):  # refused below
                cast_into(values, out)
        self._require_range(values, out)

    def _require_range(self, values: Array, out: Array) -> None:
        """Refuse finite numbers whose value ``out`` cannot hold; a scale that is infinite or NaN decodes to that."""
        dtype = float_name(out)
        powers = self._type == "mxfp4"  # of all others an f16, a small scale and a small integer make less than 2^32
        if (dtype != "f16" and not powers) or float(np.abs(values).max(initial=0)) <= LARGEST[dtype]:
            return
        past = ~np.isfinite(cast(out, "f32"))
        if not powers:
            past &= np.isfinite(values)
        if bool(past.any()):
            raise CodecError(
                f"{ID}.overflow",
                f"expected values up to {LARGEST[dtype]:g}, which {dtype} can hold; decode to f32 or bf16",
                where=self._where,
            )
