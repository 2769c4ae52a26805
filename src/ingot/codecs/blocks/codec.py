"""``ggml_blocks``: weights in the blocks that ggml computes with, as GGUF files hold them (``spec/gguf.md``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NoReturn

import numpy as np

from ingot.codecs.base import Rows, decode_by_rows
from ingot.codecs.blocks.grids import OF_TYPE, grid
from ingot.core import native
from ingot.core.floats import LARGEST, cast, cast_into, float_name
from ingot.errors import CodecError, UnsupportedError
from ingot.model.layouts.ggml import BLOCKS, GgmlBlocksLayout
from ingot.model.tensor import Array, Tensor

ID = GgmlBlocksLayout.codec
_SCRATCH = 1 << 16  # elements that stay in cache


class BlockReader(Rows):
    """Sequential decoding, some blocks at a time."""

    def __init__(self, tensor: Tensor) -> None:
        layout = _checked(tensor)
        self._type, self._block, self._where = layout.type, layout.block, tensor.name
        self._grid = grid(OF_TYPE[layout.type]).reshape(-1) if layout.type in OF_TYPE else None
        self._part = tensor.parts[BLOCKS].reader()

    def fill(self, out: Array) -> None:
        flat = out.reshape(-1)
        step = max(1, _SCRATCH // self._block.elements) * self._block.elements
        for start in range(0, flat.size, step):
            target = flat[start : start + step]
            blocks = np.empty(target.size // self._block.elements * self._block.nbytes, np.uint8)
            self._part.readinto(blocks.data)
            values = target if target.dtype == np.float32 else np.empty(target.size, np.float32)
            native.kernels.ggml_decode(self._type, blocks, self._grid, values)
            if values is not target:
                with np.errstate(over="ignore"):  # refused below
                    cast_into(values, target)
            self._require_range(values, target)

    def _require_range(self, values: Array, out: Array) -> None:
        """Refuse finite numbers whose value ``out`` cannot hold; a scale that is infinite or NaN decodes to that."""
        if bool(np.isfinite(cast(out, "f32")).all()):
            return
        dtype = float_name(out)
        past = np.isfinite(values) & ~np.isfinite(cast(out, "f32"))
        # e8m0 has no infinity: what is infinite there is past f32.
        if self._type == "mxfp4":
            past |= np.isinf(values)
        if bool(past.any()):
            raise CodecError(
                f"{ID}.overflow",
                f"expected values up to {LARGEST[dtype]:g}, which {dtype} can hold; decode to f32 or bf16",
                where=self._where,
            )

    def skip(self, count: int) -> None:
        """Pass over ``count`` values, whole rows of them."""
        self._part.skip(count // self._block.elements * self._block.nbytes)

    def finish(self) -> None:
        self._part.finish()


class BlocksCodec:
    """The block types of ggml: Q4_0 to Q8_0, Q2_K to Q6_K, IQ1 to IQ4, MXFP4 and others; read only."""

    id: ClassVar[str] = ID
    lossless: ClassVar[bool] = False
    elementwise: ClassVar[bool] = False
    streams: ClassVar[bool] = True

    def check(self, tensor: Tensor) -> None:
        """Rules ``ggml_blocks.params``, ``.columns``, ``.parts``, ``.dtype`` and ``.size``."""
        _checked(tensor)

    def decode(self, tensor: Tensor, dtype: str, out: Array | None = None) -> Array:
        """Return the values in f32, f16 or bf16, rounded once from f32.

        Raises ``CodecError`` ``ggml_blocks.overflow``.
        """
        return decode_by_rows(self, tensor, dtype, out)

    def reader(self, tensor: Tensor) -> BlockReader:
        return BlockReader(tensor)

    def encoder(self, shape: tuple[int, ...], dtype: str, options: Mapping[str, Any]) -> NoReturn:
        """Raise ``UnsupportedError`` ``ggml_blocks.read-only``: there is no encoder."""
        raise UnsupportedError(
            f"codec {ID} is only read: expected another codec to encode with, such as affine", rule=f"{ID}.read-only"
        )


def _checked(tensor: Tensor) -> GgmlBlocksLayout:
    layout = GgmlBlocksLayout.of(tensor)
    if tensor.dtype != layout.dtype:
        raise CodecError(
            f"{ID}.params", f"expected dtype {layout.dtype}, found the tensor's {tensor.dtype}", where=tensor.name
        )
    if set(tensor.parts) != {BLOCKS}:
        stored = ", ".join(sorted(tensor.parts)) or "none"
        raise CodecError(f"{ID}.parts", f"expected the part {BLOCKS}, found {stored}", where=tensor.name)
    part, (spec,) = tensor.parts[BLOCKS], layout.part_specs(tensor.shape)
    if part.dtype != "u8" or part.type not in (None, "u8"):
        raise CodecError(
            f"{ID}.dtype", f"expected u8, found {part.type or part.dtype}", where=f"{tensor.name}.{BLOCKS}"
        )
    if part.nbytes != spec.length:
        raise CodecError(
            f"{ID}.size",
            f"expected {spec.length} bytes for shape {list(tensor.shape)} in {layout.type}, found {part.nbytes}",
            where=f"{tensor.name}.{BLOCKS}",
        )
    return layout
