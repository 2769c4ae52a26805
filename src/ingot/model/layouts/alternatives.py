"""Layouts of the same numbers, in their own family and in others: ggml's blocks are affine integers or codebooks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ingot.model.layouts.affine import (
    NO_ZERO,
    OFFSETS,
    ROWS_LSB,
    AffineLayout,
    Blocks,
    Constant,
    Group,
    Whole,
    Zero,
    natural,
)
from ingot.model.layouts.base import Alternative, AsLaid, Described, Layout, Storable, matrix_shape
from ingot.model.layouts.ggml import DTYPE, TYPES, GgmlBlocksLayout
from ingot.model.layouts.packed_words import WordsLayout
from ingot.model.layouts.scaled_codebook import SMALL_SCALES, TABLES, ScaledCodebookLayout

_FP8 = ("f8_e4m3fn", "f8_e5m2")
_GROUP = Group(32)
_IQ4 = ScaledCodebookLayout(4, _GROUP, DTYPE, scales="f16", values="iq4_nl")
_E2M1 = ScaledCodebookLayout(4, _GROUP, DTYPE, scales="f8_e8m0fnu", values="f4_e2m1fn")


def _integers(bits: int, columns: int, zero: Zero, scales: str, *, signed: bool = False) -> AffineLayout:
    return AffineLayout(bits, Group(columns), ROWS_LSB, signed, zero, DTYPE, scales)


AFFINE: Mapping[str, AffineLayout] = {
    "q4_0": _integers(4, 32, Constant(8), "f16"),
    "q4_1": _integers(4, 32, OFFSETS, "f16"),
    "q5_0": _integers(5, 32, Constant(16), "f16"),
    "q5_1": _integers(5, 32, OFFSETS, "f16"),
    "q8_0": _integers(8, 32, NO_ZERO, "f16", signed=True),
}
"""What ggml's blocks of integers are as affine layouts: the same integers, and numbers of f16 for 32 columns."""

CODEBOOKS: Mapping[str, ScaledCodebookLayout] = {
    "iq4_nl": _IQ4,
    "mxfp4": _E2M1,
    "nvfp4": replace(_E2M1, grid=Group(16), scales="f8_e4m3fn"),
}
"""What ggml's blocks of a table or of small floats are as scaled codebooks: the same codes and scales."""

OWN: Mapping[str, AffineLayout | ScaledCodebookLayout] = {
    **AFFINE,
    **CODEBOOKS,
    "q2_0": _integers(2, 64, Constant(1), "f16"),
    "tq2_0": _integers(2, 256, Constant(1), "f16"),
    "q2_k": _integers(2, 16, OFFSETS, "f32"),
    "q3_k": _integers(3, 16, Constant(4), "f32"),
    "q4_k": _integers(4, 32, OFFSETS, "f32"),
    "q5_k": _integers(5, 32, OFFSETS, "f32"),
    "q6_k": _integers(6, 16, Constant(32), "f32"),
    "iq4_xs": replace(_IQ4, scales="f32"),
}
"""What ggml's blocks are in other families, taken apart. Products of scales (K-quants, IQ4_XS) are numbers of f32."""


def alternatives(layout: Layout, tensor: Described) -> Iterator[Storable]:
    """Yield the other layouts that the numbers of ``tensor`` can have, that nearest to as stored first.

    Its own family comes before others. Which of them keeps every value, the codec's ``repack`` tells.
    """
    if isinstance(layout, Alternative):
        yield from layout.alternatives(tensor)
    if isinstance(layout, AffineLayout):
        yield from _blocks(natural(layout, tensor.shape), tensor)
    elif isinstance(layout, WordsLayout) and not layout.scattered:
        yield from _blocks(layout.rows, tensor)
    elif isinstance(layout, ScaledCodebookLayout):
        yield from _codebook_blocks(layout, tensor)
        if layout.values in _FP8 and layout.scales == DTYPE != layout.dtype:  # who has one type for values and scales
            yield replace(layout, dtype=DTYPE)
    elif isinstance(layout, GgmlBlocksLayout) and layout.type in OWN:
        own = OWN[layout.type]
        yield own
        yield from own.alternatives(AsLaid(tensor.name, tensor.shape, own))


def _blocks(layout: AffineLayout, tensor: Described) -> Iterator[GgmlBlocksLayout]:
    """Yield the types of blocks that have as many bits, the smallest first.

    A scale for more than 32 columns is repeated, where blocks do not cross from one to the next.
    """
    cols = matrix_shape(tensor.shape)[1]
    if layout.matrix is not None or isinstance(layout.grid, Blocks | Whole):
        return
    if cols % _GROUP.columns or layout.group_columns(cols) % _GROUP.columns:
        return
    for kind in sorted(AFFINE, key=lambda kind: TYPES[kind].nbytes):
        if AFFINE[kind].bits == layout.bits:
            yield GgmlBlocksLayout(kind)


def _codebook_blocks(layout: ScaledCodebookLayout, tensor: Described) -> Iterator[GgmlBlocksLayout]:
    """Yield the types of blocks whose values these may be; a scale for more columns than theirs is repeated."""
    if layout.transposed or len(tensor.shape) < 1:
        return
    cols = tensor.shape[-1]
    for kind, own in CODEBOOKS.items():
        same = layout.values == own.values or (layout.values is None and own.values in TABLES)
        if (own.scales in SMALL_SCALES or layout.scales in SMALL_SCALES) and layout.scales != own.scales:
            continue
        if same and layout.bits == own.bits and cols % TYPES[kind].elements == 0:
            yield GgmlBlocksLayout(kind)
