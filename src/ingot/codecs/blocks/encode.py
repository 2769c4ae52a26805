"""Encoding into ggml's blocks: options, and encoding of chunks of rows (``spec/gguf.md``, "Encoding")."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ingot.codecs.base import IMPORTANCE, Encoder, column_weights, option_error, require_known, source_dtype
from ingot.codecs.blocks.grids import grid_of
from ingot.codecs.blocks.values import BlockDecoder
from ingot.codecs.range_probe import RangeProbe
from ingot.core.numeric.dtypes import FLOATS, as_bits, float_name
from ingot.core.runtime import native
from ingot.errors import CodecError, UnsupportedError
from ingot.model.layouts.base import matrix_shape
from ingot.model.layouts.ggml import BLOCKS, GgmlBlocksLayout
from ingot.model.spec import PartSpec
from ingot.model.tensor import Array

ID = GgmlBlocksLayout.codec
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
