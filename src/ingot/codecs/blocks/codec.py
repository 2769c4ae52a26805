"""``ggml_blocks``: weights in the blocks of ggml, as GGUF files store them, and their encoder (``spec/gguf.md``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ingot.codecs.base import (
    FLOAT_TARGETS,
    IMPORTANCE,
    Codec,
    Encoder,
    Repacked,
    Rows,
    column_weights,
    option_error,
    require_known,
    result,
    source_dtype,
)
from ingot.codecs.blocks.from_blocks import from_blocks
from ingot.codecs.blocks.grids import grid_of
from ingot.codecs.range_probe import RangeProbe
from ingot.core.numeric.dtypes import FLOATS, LARGEST, as_bits, float_name, written
from ingot.core.runtime import native
from ingot.core.runtime.parallel import for_ranges
from ingot.errors import CodecError, UnsupportedError
from ingot.model.layouts.base import Layout, matrix_shape
from ingot.model.layouts.ggml import BLOCKS, GgmlBlocksLayout
from ingot.model.reading.slices import RunLayout
from ingot.model.spec import PartSpec
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


OPTIONS = ("type", "search", IMPORTANCE)
REFERENCE = "reference"

# For each type that can be encoded: a block's scale is its largest magnitude divided by this number.
LEVELS: Mapping[str, float] = {
    "q4_0": 8,
    "q4_1": 15,
    "q5_0": 16,
    "q5_1": 31,
    "q8_0": 127,
    "q2_k": 3 * 15,
    "q3_k": 4 * 32,
    "q4_k": 15 * 63,
    "q5_k": 31 * 63,
    "q6_k": 32 * 128,
    "iq4_nl": 127,
    "iq4_xs": 127 * 32,
    "mxfp4": 1,
    "iq1_s": 1.125 * 15,
    "iq1_m": 1.125 * 15,
    "iq2_xxs": 43 * 31 / 8,
    "iq2_xs": 43 * 31 / 8,
    "iq2_s": 43 * 31 / 8,
    "iq3_xxs": 62 * 31 / 4,
    "iq3_s": 15 * 31,
    "tq1_0": 1,
    "tq2_0": 1,
    "q1_0": 1,
    "q2_0": 2,
}
# Types that the package gguf encodes without a search.
EXACT = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "mxfp4")

_NON_FINITE = 1


@dataclass(frozen=True, slots=True)
class BlocksEncoder(Encoder):
    """An encoder for chunks of rows; rows have complete blocks, so a chunk may begin at any row."""

    layout: GgmlBlocksLayout
    search: bool
    cols: int
    importance: Array | None
    params: Mapping[str, Any]
    parts: tuple[PartSpec, ...]
    reach: RangeProbe
    codec: str = ID
    fit_passes: int = 0
    step: int = 1
    single_chunk: bool = False
    lossless: bool = False

    def range_probe(self) -> RangeProbe:
        return self.reach

    def encode(self, rows: Array, start: int = 0) -> dict[str, Array]:
        """Return the blocks of these rows.

        Raises
        ------
        CodecError
            ``ggml_blocks.non-finite``: a value is NaN or infinite, or an f64 beyond the range of f32.
            ``ggml_blocks.scale-overflow``: f16 cannot represent a scale or minimum.
        """
        if rows.ndim != 2 or rows.shape[1] != self.cols:
            raise ValueError(f"expected rows of {self.cols} columns, found {rows.shape}")
        block = self.layout.block
        blocks = np.empty(rows.size // block.elements * block.nbytes, np.uint8)
        if rows.size:
            status, index = native.kernels.ggml_encode(
                self.layout.type,
                as_bits(rows),
                float_name(rows),
                self.importance,
                self.search,
                grid_of(self.layout.type),
                blocks,
            )
            if status:
                raise self._encode_error(status, index, rows, start)
        return {BLOCKS: blocks}

    def decode(self, parts: Mapping[str, Array], out: Array) -> None:
        if out.size:
            BlockDecoder(self.layout, "").decode(parts[BLOCKS].reshape(-1), out.reshape(-1))

    def _encode_error(self, status: int, index: int, rows: Array, start: int) -> CodecError:
        row, column = divmod(index, self.cols)
        location = f"row {start + row}, column {column}"
        if status == _NON_FINITE:
            return CodecError(
                f"{ID}.non-finite",
                f"expected finite weights, found {float(rows[row, column]):g} at {location}; keep this tensor dense",
            )
        return CodecError(
            f"{ID}.scale-overflow",
            f"f16 cannot represent the scale of the block at {location}; keep this tensor dense",
        )


def prepare(shape: tuple[int, ...], dtype: str, options: Mapping[str, Any]) -> BlocksEncoder:
    """Return the encoder for a tensor of ``shape`` and source ``dtype``; see ``BlocksCodec.encoder``."""
    source_dtype(ID, dtype, FLOATS)
    require_known(ID, options, OPTIONS)
    block_type = options.get("type", "q4_k")
    search = options.get("search", True)
    if not isinstance(block_type, str) or block_type not in LEVELS:
        raise option_error(ID, f"type {', '.join(LEVELS)}", block_type)
    if search is not True and search != REFERENCE:
        raise option_error(ID, f"search true or {REFERENCE!r}", search)
    layout = GgmlBlocksLayout(block_type)
    cols = matrix_shape(shape)[1]
    importance = column_weights(ID, options, cols)
    if search == REFERENCE and (block_type not in EXACT or importance is not None):
        conflict = block_type if importance is None else IMPORTANCE
        raise option_error(
            ID, f"search {REFERENCE!r} with one of the types {', '.join(EXACT)} and without importance", conflict
        )
    if cols % layout.block.elements:
        raise UnsupportedError(
            f"codec {ID} expects columns that {layout.block.elements} divides for {block_type}, found {cols}; take "
            "a type with smaller blocks, or keep this tensor dense",
            rule=f"{ID}.columns",
        )
    if importance is not None:
        importance = (importance / importance.max()).astype(np.float32)
    # MXFP4's scales have the exponents of f32. Other scales below f16's smallest number round to 0 for any source.
    reach = RangeProbe("scales", "f32" if block_type == "mxfp4" else "f16", (), LEVELS[block_type], "f64")
    return BlocksEncoder(layout, search is True, cols, importance, layout.attributes(), layout.part_specs(shape), reach)


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
