"""``ggml_blocks``: weights in the blocks of ggml, as GGUF files store them (``spec/gguf.md``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from ingot.codecs.base import FLOAT_TARGETS, Codec, Repacked, Rows, result
from ingot.codecs.blocks.encode import BlocksEncoder, prepare
from ingot.codecs.blocks.from_blocks import from_blocks
from ingot.codecs.blocks.values import BlockDecoder
from ingot.core.runtime.parallel import for_ranges
from ingot.errors import CodecError, UnsupportedError
from ingot.model.layouts.base import Layout
from ingot.model.layouts.ggml import BLOCKS, GgmlBlocksLayout
from ingot.model.reading.slices import RunLayout
from ingot.model.tensor import Array, Tensor

ID = GgmlBlocksLayout.codec
_SCRATCH = 1 << 16  # elements that stay in cache
_STEP = 1 << 20  # elements per thread and call


class BlockReader(Rows):
    """A sequential reader that decodes a few blocks at a time."""

    def __init__(self, tensor: Tensor) -> None:
        self._decoder = BlockDecoder(_checked(tensor), tensor.name)
        self._part = tensor.parts[BLOCKS].reader()

    def fill(self, out: Array) -> None:
        flat = out.reshape(-1)
        block = self._decoder.block
        step = _SCRATCH // block.elements * block.elements
        for start in range(0, flat.size, step):
            target = flat[start : start + step]
            blocks = np.empty(target.size // block.elements * block.nbytes, np.uint8)
            self._part.readinto(blocks.data)
            self._decoder.decode(blocks, target)

    def skip(self, count: int) -> None:
        """Skip ``count`` values, which must be full rows."""
        self._part.skip(count // self._decoder.block.elements * self._decoder.block.nbytes)

    def finish(self) -> None:
        self._part.finish()


class BlocksCodec(Codec):
    """The block types of ggml.

    NVFP4 can only be decoded: encoders return parts of one tensor, and its second scale is another tensor.
    """

    id: ClassVar[str] = ID
    lossless: ClassVar[bool] = False
    elementwise: ClassVar[bool] = False
    streams: ClassVar[bool] = True

    def check(self, tensor: Tensor) -> None:
        """Check parameters, parts and shape of ``tensor``; rules ``ggml_blocks.params``, ``.columns``, ``.parts``,
        ``.dtype`` and ``.size``.
        """
        _checked(tensor)

    def decode(self, tensor: Tensor, dtype: str, out: Array | None = None) -> Array:
        """Return the values in f32, f16 or bf16, rounded once from f32; several threads decode blocks.

        Raises ``CodecError`` ``ggml_blocks.overflow``; ``UnsupportedError`` ``ggml_blocks.dtype``: another type.
        """
        layout = _checked(tensor)
        if dtype not in FLOAT_TARGETS:
            raise UnsupportedError(
                f"expected a target dtype {', '.join(FLOAT_TARGETS)}, found {dtype}",
                rule=f"{ID}.dtype",
                where=tensor.name,
            )
        out = result(tensor, dtype, out)
        flat, decoder, block = out.reshape(-1), BlockDecoder(layout, tensor.name), layout.block
        stored = np.frombuffer(tensor.parts[BLOCKS].view(), np.uint8)

        def run(start: int, stop: int) -> None:
            blocks = stored[start * block.nbytes : stop * block.nbytes]
            decoder.decode(blocks, flat[start * block.elements : stop * block.elements])

        for_ranges(flat.size // block.elements, _STEP // block.elements, run)
        return out

    def reader(self, tensor: Tensor) -> BlockReader:
        return BlockReader(tensor)

    def runs(self, tensor: Tensor, shape: tuple[int, ...]) -> RunLayout | None:
        """Return the positions of blocks; None if a row of ``shape`` is not a whole number of blocks."""
        block = _checked(tensor).block
        if not shape or shape[-1] % block.elements:
            return None
        return RunLayout(block.elements, {BLOCKS: block.nbytes})

    def repack(self, tensor: Tensor, layout: Layout) -> Repacked:
        """Return the repacking of codes and scales into a layout of another family (``spec/gguf.md``, "Repacking")."""
        return from_blocks(tensor, _checked(tensor), layout)

    def encoder(self, shape: tuple[int, ...], dtype: str, options: Mapping[str, Any]) -> BlocksEncoder:
        """Return the encoder. Options, all with defaults:

        ``type`` one of ``encode.LEVELS`` (q4_k); ``search`` true, or ``"reference"`` for the bytes of the package gguf;
        ``importance`` weights of columns.

        Raises
        ------
        UsageError
            ``ggml_blocks.option``.
        UnsupportedError
            ``ggml_blocks.dtype``: the values are not floats; ``ggml_blocks.columns``: the row length is not a multiple
            of the block size.
        """
        return prepare(shape, dtype, options)


def _checked(tensor: Tensor) -> GgmlBlocksLayout:
    layout = GgmlBlocksLayout.from_tensor(tensor)
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
