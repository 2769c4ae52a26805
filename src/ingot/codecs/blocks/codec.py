"""``ggml_blocks``: weights in the blocks that ggml computes with, as GGUF files hold them (``spec/gguf.md``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NoReturn

import numpy as np

from ingot.codecs.base import FLOAT_TARGETS, Repacked, Rows, result
from ingot.codecs.blocks.grids import OF_TYPE, grid
from ingot.codecs.blocks.repack import from_blocks
from ingot.core import native
from ingot.core.floats import LARGEST, cast, cast_into, float_name
from ingot.core.parallel import for_ranges
from ingot.errors import CodecError, UnsupportedError
from ingot.model.layouts.base import Layout
from ingot.model.layouts.ggml import BLOCKS, GgmlBlocksLayout
from ingot.model.slices import RunLayout
from ingot.model.tensor import Array, Tensor

ID = GgmlBlocksLayout.codec
_SCRATCH = 1 << 16  # elements that stay in cache
_STEP = 1 << 20  # elements that a thread takes at a time


class _Decoder:
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


class BlockReader(Rows):
    """Sequential decoding, some blocks at a time."""

    def __init__(self, tensor: Tensor) -> None:
        self._decoder = _Decoder(_checked(tensor), tensor.name)
        self._part = tensor.parts[BLOCKS].reader()

    def fill(self, out: Array) -> None:
        flat, block = out.reshape(-1), self._decoder.block
        step = _SCRATCH // block.elements * block.elements
        for start in range(0, flat.size, step):
            target = flat[start : start + step]
            blocks = np.empty(target.size // block.elements * block.nbytes, np.uint8)
            self._part.readinto(blocks.data)
            self._decoder.decode(blocks, target)

    def skip(self, count: int) -> None:
        """Pass over ``count`` values, whole rows of them."""
        self._part.skip(count // self._decoder.block.elements * self._decoder.block.nbytes)

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
        """Return the values in f32, f16 or bf16, rounded once from f32; blocks are decoded in threads.

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
        flat, decoder, block = out.reshape(-1), _Decoder(layout, tensor.name), layout.block
        stored = np.frombuffer(tensor.parts[BLOCKS].view(), np.uint8)

        def run(start: int, stop: int) -> None:
            for first in range(start, stop, _SCRATCH // block.elements):
                last = min(first + _SCRATCH // block.elements, stop)
                blocks = stored[first * block.nbytes : last * block.nbytes]
                decoder.decode(blocks, flat[first * block.elements : last * block.elements])

        for_ranges(flat.size // block.elements, _STEP // block.elements, run)
        return out

    def reader(self, tensor: Tensor) -> BlockReader:
        return BlockReader(tensor)

    def runs(self, tensor: Tensor, shape: tuple[int, ...]) -> RunLayout | None:
        """Blocks, where a row of the new shape has whole ones."""
        block = _checked(tensor).block
        if not shape or shape[-1] % block.elements:
            return None
        return RunLayout(block.elements, {BLOCKS: block.nbytes})

    def repack(self, tensor: Tensor, layout: Layout) -> Repacked:
        """Return the integers of types Q4_0 to Q8_0 in an affine layout (``spec/gguf.md``, "Repacking")."""
        return from_blocks(tensor, _checked(tensor), layout)

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
