"""Layouts of the same numbers, in their own family and in others: ggml's blocks are affine integers or codebooks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from math import gcd

from ingot.core.numeric.dtypes import DTYPES, FLOATS
from ingot.core.numeric.retype import EXACT_WIDER_DTYPES
from ingot.model.layouts.affine import (
    FLAT_LSB,
    NO_ZERO,
    OFFSETS,
    POINTS,
    ROW,
    ROWS_LSB,
    AffineLayout,
    Blocks,
    Constant,
    Group,
    Points,
    Row,
    Whole,
    Zero,
    natural,
)
from ingot.model.layouts.base import AsLaid, Described, Layout, Shape, Storable, matrix_shape
from ingot.model.layouts.dense import DenseLayout
from ingot.model.layouts.ggml import DTYPE, TYPES, GgmlBlocksLayout
from ingot.model.layouts.packed_words import FORMS, WordsLayout
from ingot.model.layouts.scaled_codebook import (
    DIVIDE,
    MULTIPLY,
    ORDERS,
    SMALL_SCALES,
    TABLES,
    Grid,
    Run,
    ScaledCodebookLayout,
    Tiles,
)
from ingot.model.layouts.sparse import BlocksLayout, CooLayout, CsrLayout
from ingot.model.layouts.table import within

_SMALLEST_EVEN = 16
_WORTH = 64  # elements of a block whose one scale is worth repeating for its rows or columns
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
    """Yield the other layouts that the numbers of ``tensor`` can have, the nearest to the stored layout first.

    Layouts of its own family come before others. The codec's ``repack`` says which of them keeps every value.
    """
    yield from family_alternatives(layout, tensor)
    match layout:
        case AffineLayout():
            yield from _blocks(natural(layout, tensor.shape), tensor)
        case WordsLayout() if not layout.scattered:
            yield from _blocks(layout.rows, tensor)
        case ScaledCodebookLayout():
            yield from _codebook_blocks(layout, tensor)
            if layout.values in _FP8 and layout.scales == DTYPE != layout.dtype:  # one type for values and scales
                yield replace(layout, dtype=DTYPE)
        case GgmlBlocksLayout() if layout.type in OWN:
            unpacked = OWN[layout.type]
            yield unpacked
            yield from family_alternatives(unpacked, AsLaid(tensor.name, tensor.shape, unpacked))


def family_alternatives(layout: Layout, tensor: Described) -> Iterator[Storable]:
    """Yield the other layouts of the same family, the nearest to the stored layout first."""
    match layout:
        case DenseLayout():  # wider types that hold such values, smallest first
            yield from (DenseLayout(tensor.dtype, holder) for holder in EXACT_WIDER_DTYPES.get(tensor.dtype, ()))
        case AffineLayout():
            yield from _affine(layout, tensor)
        case WordsLayout():
            yield from _rows_of_words(layout, tensor)
        case ScaledCodebookLayout():
            yield from _scaled_codebooks(layout, tensor)
        case CsrLayout():
            yield from _compressed_rows(layout)
        case CooLayout():
            if layout.count is not None and layout.dtype in DTYPES and tensor.shape and layout.indices != "u64":
                yield replace(layout, indices="u64")
        case BlocksLayout():
            yield from _pruned(layout, tensor)


def _affine(layout: AffineLayout, tensor: Described) -> Iterator[Storable]:
    """Yield the layouts that the same integers can have.

    Low bits first, signed codes as they are or shifted by half their range, one zero point for all codes kept as an
    attribute or spread out as a part, scales as f32 if that lets more zero points be shifted, zero points as offsets,
    also with f32 scales, and offsets as zero points; then a part of equal zero points as an attribute, and the words of
    other programs; last, the same for groups that are cut so that they divide a row. Blocks, and codes packed as
    another matrix than the tensor's own, have no other layout.
    """
    stored = natural(layout, tensor.shape)
    if tensor.dtype not in FLOATS or stored.matrix is not None or stored.block is not None:
        return
    in_rows = replace(stored, packing=ROWS_LSB, dtype=tensor.dtype)
    flat = replace(in_rows, packing=FLAT_LSB)
    packings = (in_rows,) if flat.in_rows(matrix_shape(tensor.shape)[1]) else (in_rows, flat)
    if isinstance(stored.zero, Constant):
        yield from packings
    offsets: dict[str, AffineLayout] = {}
    for signed in (stored.signed,) if stored.offset else (stored.signed, not stored.signed):
        flips = signed != stored.signed
        zero = POINTS if flips or isinstance(stored.zero, Constant) else stored.zero
        for scales in dict.fromkeys((stored.scales, "f32") if flips and stored.zeros else (stored.scales,)):
            for packing in packings:
                target = replace(packing, signed=signed, scales=scales, zero=zero)
                yield target
                if packing is in_rows and not signed and zero == POINTS and scales in ("f16", "bf16"):
                    offsets.setdefault(scales, replace(target, zero=OFFSETS))
    yield from offsets.values()
    if stored.offset:  # which may stand for zero points
        yield from _affine(replace(stored, zero=POINTS), tensor)
        return
    if stored.scales in ("f16", "bf16"):  # an offset of more bits than these have
        yield replace(in_rows, signed=False, scales="f32", zero=OFFSETS)
    yield replace(in_rows, signed=False, zero=Constant(1 << (stored.bits - 1)))
    yield replace(in_rows, signed=True, zero=NO_ZERO)
    yield from _words(in_rows, tensor.shape)
    if stored.scales != "f32":  # for containers with one type of scales, which holds these
        wide = replace(in_rows, signed=False, scales="f32")
        yield replace(wide, zero=Constant(1 << (stored.bits - 1)))
        yield replace(wide, zero=POINTS)
        yield replace(wide, signed=True, zero=NO_ZERO)
    even = _even_group(stored, matrix_shape(tensor.shape)[1])
    if even is not None:
        yield from _affine(replace(stored, grid=even), tensor)


def _even_group(layout: AffineLayout, cols: int) -> Group | None:
    """Return the largest groups that divide both a row and the layout's own groups, which do not divide a row.

    None for groups so small that their scales take more space than their codes.
    """
    group = layout.group_size
    if group is None or cols <= group or cols % group == 0:
        return None
    even = gcd(group, cols)
    return Group(even) if even >= _SMALLEST_EVEN else None


def _words(layout: AffineLayout, shape: Shape) -> Iterator[WordsLayout]:
    """Yield the ways in which other programs pack the integers of a layout into words."""
    if len(shape) != 2 or layout.offset or not isinstance(layout.grid, Group | Row):
        return
    for name, form in sorted(FORMS.items(), key=lambda item: item[1].signed != layout.signed):  # as stored first
        if layout.bits in form.bits and form.written:
            base = WordsLayout(name, layout.bits, layout.group_size, POINTS, layout.dtype, layout.scales)
            yield replace(base, zero=Constant(base.point))
            if form.zeros:
                yield base


def _rows_of_words(layout: WordsLayout, tensor: Described) -> Iterator[Storable]:
    """Yield the layouts of the same integers row by row, first those with one zero point for all codes.

    Groups that are not runs of columns have none.
    """
    if layout.scattered:
        return
    rows = layout.rows
    if isinstance(rows.zero, Points):
        yield replace(rows, zero=Constant(layout.point))
    yield rows
    yield from _affine(rows, AsLaid(tensor.name, tensor.shape, replace(rows, dtype=tensor.dtype)))


def _scaled_codebooks(layout: ScaledCodebookLayout, tensor: Described) -> Iterator[ScaledCodebookLayout]:
    """Yield the layouts that the same indices can have.

    The other order of the two indices of a byte; the same scales on a grid of another name, or repeated; a second scale
    by which they are divided instead of multiplied, or of 1; scales in f32; a table by its name.
    """
    seconds = dict.fromkeys((layout.second, None, MULTIPLY, DIVIDE))
    scales = dict.fromkeys((layout.scales, "f32"))
    names = (None, *(name for name in TABLES if layout.values is None and layout.bits == 4))
    orders = (layout.order, *(order for order in ORDERS if order != layout.order and layout.bits == 4))
    grids = _grids(layout, layout.stored_shape(tensor.shape))
    for second, scale_dtype, name, order, grid in product(seconds, scales, names, orders, grids):
        if scale_dtype != layout.scales and second:  # no format has second scales of scales in f32
            continue
        nested = layout.nested if scale_dtype == layout.scales else None
        candidate = replace(layout, second=second, scales=scale_dtype, nested=nested, order=order, grid=grid)
        candidate = candidate if name is None else replace(candidate, values=name, codebook="f32")
        if candidate != layout:
            yield candidate


def _grids(layout: ScaledCodebookLayout, shape: Shape) -> Iterator[Grid]:
    """Yield the grids on which the scales are the same, or the same repeated; ``shape`` is the stored one."""
    cols = matrix_shape(shape)[1]
    yield layout.grid
    match layout.grid:
        case Group(columns) if columns == cols:
            yield ROW
            yield Run(columns)
        case Group(columns):
            yield Run(columns)
            yield Tiles(1, columns)
            yield from (Group(size) for size in (16, 32) if size < columns and columns % size == 0)
        case Run(elements) if cols and cols % elements == 0:
            yield Group(elements)
        case Tiles(1, columns) if cols and cols % columns == 0:
            yield Group(columns)
        case Tiles(tall, wide) if len(shape) == 2 and cols and tall * wide >= _WORTH:
            yield ROW if wide >= cols else Group(wide) if cols % wide == 0 else Tiles(1, wide)
            yield Tiles(tall, 1)
        case Row() if cols:
            yield Group(cols)
        case Whole() if cols:
            yield ROW


def _compressed_rows(layout: CsrLayout) -> Iterator[CsrLayout]:
    """Yield the layouts with ascending columns, and with indices of u64."""
    if layout.nnz is None or layout.dtype not in DTYPES:
        return
    for indices in dict.fromkeys((layout.indices, "u64")):
        for ascending in dict.fromkeys((layout.ascending, True)):
            if (indices, ascending) != (layout.indices, layout.ascending):
                yield replace(layout, indices=indices, ascending=ascending)


def _pruned(layout: BlocksLayout, tensor: Described) -> Iterator[BlocksLayout]:
    """Yield the other layouts of the stored matrix, except wider types of dense values."""
    if not isinstance(layout.inner, DenseLayout):
        stored = within(tensor, layout.inner_shape(tensor.shape), layout.inner.codec, tensor.params)
        for inner in family_alternatives(layout.inner, stored):
            yield replace(layout, inner=inner)


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
