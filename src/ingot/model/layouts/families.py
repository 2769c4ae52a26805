"""Layouts of the same numbers, in their own family and in others: ggml's blocks of integers are affine ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ingot.model.layouts.affine import (
    NO_ZERO,
    OFFSETS,
    ROWS_LSB,
    AffineLayout,
    Blocks,
    Constant,
    Group,
    Whole,
    natural,
)
from ingot.model.layouts.base import Alternative, Described, Layout, Storable, matrix_shape
from ingot.model.layouts.ggml import DTYPE, TYPES, GgmlBlocksLayout
from ingot.model.layouts.words import WordsLayout

_GROUP = Group(32)

AFFINE: Mapping[str, AffineLayout] = {
    "q4_0": AffineLayout(4, _GROUP, ROWS_LSB, False, Constant(8), DTYPE, "f16"),
    "q4_1": AffineLayout(4, _GROUP, ROWS_LSB, False, OFFSETS, DTYPE, "f16"),
    "q5_0": AffineLayout(5, _GROUP, ROWS_LSB, False, Constant(16), DTYPE, "f16"),
    "q5_1": AffineLayout(5, _GROUP, ROWS_LSB, False, OFFSETS, DTYPE, "f16"),
    "q8_0": AffineLayout(8, _GROUP, ROWS_LSB, True, NO_ZERO, DTYPE, "f16"),
}
"""What ggml's blocks of integers are as affine layouts: the same integers, and numbers of f16 for 32 columns."""


def alternatives(layout: Layout, tensor: Described) -> Iterator[Storable]:
    """Yield the other layouts that the numbers of ``tensor`` can have, that nearest to as stored first.

    Its own family comes before others. Which of them keeps every value, the codec's ``repack`` tells.
    """
    if isinstance(layout, Alternative):
        yield from layout.alternatives(tensor)
    if isinstance(layout, AffineLayout):
        yield from _blocks(natural(layout, tensor.shape), tensor)
    elif isinstance(layout, WordsLayout) and not layout.order:
        yield from _blocks(layout.rows, tensor)
    elif isinstance(layout, GgmlBlocksLayout) and layout.type in AFFINE:
        affine = AFFINE[layout.type]
        yield affine
        yield from affine.alternatives(tensor)


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
