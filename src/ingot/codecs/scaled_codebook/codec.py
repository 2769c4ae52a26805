"""``scaled_codebook``: entries of a small table, times a scale per group (``spec/scaled_codebook.md``)."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from typing import Any, ClassVar

from ingot.codecs.base import FLOAT_TARGETS, Codec, Repacked, cannot, decode_by_rows, result, source_dtype
from ingot.codecs.blocks.codebooks import to_blocks
from ingot.codecs.palette.rows import require_padding
from ingot.codecs.scaled_codebook.decode import ArrayWindow, ScaledReader, TransposedReader, Window, decoder_of
from ingot.codecs.scaled_codebook.encode import ScaledEncoder
from ingot.codecs.scaled_codebook.options import amax_of, layout_of
from ingot.codecs.scaled_codebook.repack import repack
from ingot.codecs.scaled_codebook.tables import TABLES
from ingot.core.numeric.dtypes import DTYPES
from ingot.core.runtime.parallel import for_ranges
from ingot.errors import CodecError
from ingot.model.layouts.affine import Group, Row
from ingot.model.layouts.base import Layout
from ingot.model.layouts.ggml import GgmlBlocksLayout
from ingot.model.layouts.scaled_codebook import (
    CODEBOOK,
    DTYPES_OF_VALUES,
    INDICES,
    LOW_FIRST,
    RULE,
    SCALE_SCALES,
    SCALES,
    SMALL_SCALES,
    Run,
    ScaledCodebookLayout,
    Tiles,
)
from ingot.model.reading.slices import RunLayout
from ingot.model.tensor import Array, Tensor

__all__ = ["TABLES", "ScaledCodebookCodec"]

ID = ScaledCodebookLayout.codec
_STEP = 1 << 20  # elements per thread and call


class ScaledCodebookCodec(Codec):
    """A table of up to 256 values, or small floats, times scales: NF4, MXFP4, NVFP4, FP8 in blocks and others."""

    id: ClassVar[str] = ID
    lossless: ClassVar[bool] = False
    elementwise: ClassVar[bool] = False
    streams: ClassVar[bool] = True

    def check(self, tensor: Tensor) -> None:
        """Check parameters, parts and shape of ``tensor``; rules ``scaled_codebook.params``, ``.group``, ``.parts``,
        ``.dtype`` and ``.size``.
        """
        _checked(tensor)

    def decode(self, tensor: Tensor, dtype: str, out: Array | None = None) -> Array:
        """Return the values in f32, f16 or bf16, rounded once from f32; several threads decode rows."""
        layout = _checked(tensor)
        rows, cols = tensor.matrix_shape
        if layout.transposed or dtype not in FLOAT_TARGETS or not rows * cols:
            return decode_by_rows(self, tensor, dtype, out)
        out = result(tensor, dtype, out)
        matrix, packed = out.reshape(rows, cols), tensor.parts[INDICES].array()
        windows: dict[str, Window] = {
            role: ArrayWindow(tensor.parts[role].array()) for role in (SCALES, SCALE_SCALES) if role in tensor.parts
        }
        decoder = decoder_of(tensor, layout, windows)
        used = tensor.size * layout.bits % 8
        if used and layout.order == LOW_FIRST:
            require_padding(int(packed[-1]), used, "scaled_codebook.padding", tensor.name)

        def run(start: int, stop: int) -> None:
            run_indices = packed[start * cols * layout.bits // 8 : -(-stop * cols * layout.bits // 8)]
            try:
                decoder.decode(run_indices, start, matrix[start:stop], layout.order)
            except CodecError as error:
                raise error.add_location(tensor.name) from None

        unit = 8 // gcd(8, cols * layout.bits)  # rows begin at bytes
        for_ranges(rows, max(1, _STEP // cols // unit) * unit, run)
        return out

    def reader(self, tensor: Tensor) -> ScaledReader | TransposedReader:
        layout = _checked(tensor)
        return TransposedReader(tensor, layout) if layout.transposed else ScaledReader(tensor, layout)

    def runs(self, tensor: Tensor, shape: tuple[int, ...]) -> RunLayout | None:
        """Return the positions of rows: the bytes of indices and scales for a row, or for the rows of a block.

        Return None if rows do not fill complete bytes, or if the rows of a block do not divide the rows of a matrix.
        """
        layout = _checked(tensor)
        cols = tensor.matrix_shape[1]
        if layout.transposed or layout.nested or not isinstance(layout.grid, Group | Row | Tiles):
            return None
        if not cols or cols * layout.bits % 8 or not shape or shape[-1] != cols:
            return None
        rows = layout.grid.rows if isinstance(layout.grid, Tiles) else 1
        if rows > 1 and (len(shape) < 2 or shape[-2] % rows or tensor.shape[-2] % rows):
            return None
        scales = layout.groups(cols) * DTYPES[layout.scales].bits // 8
        indices = rows * cols * layout.bits // 8
        return RunLayout(rows * cols, {**dict.fromkeys(tensor.parts, 0), INDICES: indices, SCALES: scales})

    def columns(self, tensor: Tensor, count: int) -> Mapping[str, int] | None:
        """Return the bytes of indices and scales for ``count`` columns of a row.

        Return None if the columns would begin within a byte, a group or a block; see ``Decoder.columns``.
        """
        layout = _checked(tensor)
        cols = tensor.matrix_shape[1]
        if layout.transposed or layout.nested or isinstance(layout.grid, Run) or cols * layout.bits % 8:
            return None
        shared = layout.grid.columns if isinstance(layout.grid, Group | Tiles) else 0
        if not count or cols % count or count * layout.bits % 8 or (shared and count % shared):
            return None
        scales = count // shared * DTYPES[layout.scales].bits // 8 if shared else 0
        return {**dict.fromkeys(tensor.parts, 0), INDICES: count * layout.bits // 8, SCALES: scales}

    def repack(self, tensor: Tensor, layout: Layout) -> Repacked:
        """Return the repacking of indices and scales into another layout of the family, or into ggml's blocks.

        See ``spec/scaled_codebook.md``, "Repacking". If exactness depends on tables and scales, they are read and their
        digests checked.
        """
        stored = _checked(tensor)
        if isinstance(layout, GgmlBlocksLayout):
            return to_blocks(tensor, stored, layout)
        if not isinstance(layout, ScaledCodebookLayout):
            return cannot(layout, f"indices of a codebook cannot be stored in {layout.codec}")
        return repack(tensor, stored, layout)

    def encoder(self, shape: tuple[int, ...], dtype: str, options: Mapping[str, Any]) -> ScaledEncoder:
        """Return the encoder. Options, all with defaults:

        ``table`` nf4, fp4 or iq4_nl, or a type of small numbers: f4_e2m1fn, f6_e2m3fn, f6_e3m2fn, f8_e4m3fn, f8_e5m2,
        i8 (nf4); ``group``, the columns that share a scale (a divisor of the row length), ``"row"``, ``"tensor"`` or
        [rows, columns] of blocks (64); ``flat``: groups of elements across rows (false); ``scales`` f32, f16, bf16,
        f8_e8m0fnu, f8_e4m3fn or f8_e5m2 (f32); ``second`` multiply or divide: a second scale for the tensor (none);
        ``amax``, the largest magnitude of all matrices that share the second scale (default: the tensor's); ``order``
        low_first or high_first (low_first); ``transposed``: the last two dimensions are stored in reverse order
        (false).
        """
        source = source_dtype(ID, dtype, DTYPES_OF_VALUES)
        name, layout = layout_of(shape, source, options)
        return ScaledEncoder(shape, layout, name, amax_of(options))


def _checked(tensor: Tensor) -> ScaledCodebookLayout:
    layout = ScaledCodebookLayout.from_tensor(tensor)
    if layout.dtype != tensor.dtype:
        raise CodecError(
            RULE, f"expected dtype {tensor.dtype}, the tensor's, found {layout.dtype!r:.80}", where=tensor.name
        )
    for role, dtype in ((CODEBOOK, layout.codebook), (SCALES, layout.scales)):
        allowed = (*DTYPES_OF_VALUES, *SMALL_SCALES, "u8") if role == SCALES else DTYPES_OF_VALUES
        if role in tensor.parts and (dtype not in allowed or (dtype == "u8" and not layout.nested)):
            raise _dtype_error(tensor, role, " or ".join(DTYPES_OF_VALUES))
    specs = layout.part_specs(tensor.shape)
    if set(tensor.parts) != {spec.role for spec in specs}:
        stored = ", ".join(sorted(tensor.parts)) or "none"
        expected = ", ".join(spec.role for spec in specs)
        raise CodecError(f"{ID}.parts", f"expected the parts {expected}, found {stored}", where=tensor.name)
    for spec in specs:
        part = tensor.parts[spec.role]
        if part.dtype != spec.dtype or part.type not in (None, spec.type or spec.dtype):
            raise _dtype_error(tensor, spec.role, spec.type or spec.dtype)
        if part.nbytes != spec.length:
            raise CodecError(
                f"{ID}.size",
                f"expected {spec.length} bytes for shape {list(tensor.shape)}, found {part.nbytes}",
                where=f"{tensor.name}.{spec.role}",
            )
    return layout


def _dtype_error(tensor: Tensor, role: str, expected: str) -> CodecError:
    part = tensor.parts[role]
    return CodecError(
        f"{ID}.dtype", f"expected {expected}, found {part.type or part.dtype}", where=f"{tensor.name}.{role}"
    )
