"""Layouts that store the same numbers in another way, such as ggml's blocks as affine integers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from math import gcd

from ingot.core.numeric.dtypes import DTYPES, FLOATS
from ingot.core.numeric.exact_cast import EXACT_WIDER_DTYPES
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
    PerTensor,
    Points,
    Row,
    Zero,
    canonical,
)
from ingot.model.layouts.base import Layout, LayoutSource, Shape, Storable, TensorInLayout, matrix_shape
from ingot.model.layouts.dense import DenseLayout
from ingot.model.layouts.ggml import DTYPE, TYPES, GgmlBlocksLayout
from ingot.model.layouts.packed_ints import PACKING_FORMS, PackedIntLayout
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
from ingot.model.layouts.table import inner_source

_SMALLEST_EVEN = 16
_MIN_TILE = 64  # elements of a block above which repeating its scale for its rows or columns costs little space
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
"""The affine layouts of ggml's integer blocks: the same integers, with f16 scales and offsets for 32 columns."""

CODEBOOKS: Mapping[str, ScaledCodebookLayout] = {
    "iq4_nl": _IQ4,
    "mxfp4": _E2M1,
    "nvfp4": replace(_E2M1, grid=Group(16), scales="f8_e4m3fn"),
}
"""The scaled codebooks of ggml's blocks of table indices or small floats: the same codes and scales."""

UNPACKED: Mapping[str, AffineLayout | ScaledCodebookLayout] = {
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
"""The layouts of unpacked ggml blocks in other families. Products of scales (K-quants, IQ4_XS) are stored as f32."""


def alternatives(layout: Layout, tensor: LayoutSource) -> Iterator[Storable]:
    """Yield alternative layouts for the numbers of ``tensor``, the most similar layout first.

    Layouts of the same family come first. The codec's ``repack`` determines which of them preserves every value.
    """
    yield from family_alternatives(layout, tensor)
    match layout:
        case AffineLayout():
            yield from _blocks(canonical(layout, tensor.shape), tensor)
        case PackedIntLayout() if not layout.scattered:
            yield from _blocks(layout.rows, tensor)
        case ScaledCodebookLayout():
            yield from _codebook_blocks(layout, tensor)
            if layout.values in _FP8 and layout.scales == DTYPE != layout.dtype:  # one type for values and scales
                yield replace(layout, dtype=DTYPE)
        case GgmlBlocksLayout() if layout.type in UNPACKED:
            unpacked = UNPACKED[layout.type]
            yield unpacked
            yield from family_alternatives(unpacked, TensorInLayout(tensor.name, tensor.shape, unpacked))


def family_alternatives(layout: Layout, tensor: LayoutSource) -> Iterator[Storable]:
    """Yield alternative layouts of the same family, the most similar layout first."""
    match layout:
        case DenseLayout():  # wider types that represent all values exactly, smallest first
            yield from (DenseLayout(tensor.dtype, holder) for holder in EXACT_WIDER_DTYPES.get(tensor.dtype, ()))
        case AffineLayout():
            yield from _affine(layout, tensor)
        case PackedIntLayout():
            yield from _rows_of_packed_ints(layout, tensor)
        case ScaledCodebookLayout():
            yield from _scaled_codebooks(layout, tensor)
        case CsrLayout():
            yield from _compressed_rows(layout)
        case CooLayout():
            if layout.count is not None and layout.dtype in DTYPES and tensor.shape and layout.indices != "u64":
                yield replace(layout, indices="u64")
        case BlocksLayout():
            yield from _pruned(layout, tensor)


def _affine(layout: AffineLayout, tensor: LayoutSource) -> Iterator[Storable]:
    """Yield alternative layouts of affine integers, with the first code in the low bits, in this order:

    - codes signed or unsigned, shifted by half their range; a constant zero point as an attribute or as a part; f32
      scales if more zero points can be shifted then;
    - zero points as offsets, also with f32 scales, and offsets as zero points;
    - a part of equal zero points as an attribute;
    - the packed words of other tools;
    - the same layouts with smaller groups that divide a row.

    Layouts with blocks or with a matrix shape that differs from the tensor's have no alternatives.
    """
    stored = canonical(layout, tensor.shape)
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
    if stored.offset:  # offsets may be expressible as zero points
        yield from _affine(replace(stored, zero=POINTS), tensor)
        return
    if stored.scales in ("f16", "bf16"):  # offsets may need more bits than these types have
        yield replace(in_rows, signed=False, scales="f32", zero=OFFSETS)
    yield replace(in_rows, signed=False, zero=Constant(1 << (stored.bits - 1)))
    yield replace(in_rows, signed=True, zero=NO_ZERO)
    yield from _packed_ints(in_rows, tensor.shape)
    if stored.scales != "f32":  # for containers that store all scales as f32
        wide = replace(in_rows, signed=False, scales="f32")
        yield replace(wide, zero=Constant(1 << (stored.bits - 1)))
        yield replace(wide, zero=POINTS)
        yield replace(wide, signed=True, zero=NO_ZERO)
    even = _even_group(stored, matrix_shape(tensor.shape)[1])
    if even is not None:
        yield from _affine(replace(stored, grid=even), tensor)


def _even_group(layout: AffineLayout, cols: int) -> Group | None:
    """Return a smaller group that divides a row: the greatest common divisor of the group and the columns.

    Returns None if the layout's groups divide the row already, or if the scales of the smaller groups would need more
    space than the codes.
    """
    group = layout.group_size
    if group is None or cols <= group or cols % group == 0:
        return None
    even = gcd(group, cols)
    return Group(even) if even >= _SMALLEST_EVEN else None


def _packed_ints(layout: AffineLayout, shape: Shape) -> Iterator[PackedIntLayout]:
    """Yield the packings of GPTQ, AWQ and other tools that can store the layout's integers, the most similar first."""
    if len(shape) != 2 or layout.offset or not isinstance(layout.grid, Group | Row):
        return
    for name, packing_form in sorted(
        PACKING_FORMS.items(), key=lambda item: item[1].signed != layout.signed
    ):  # as stored first
        if layout.bits in packing_form.bits and packing_form.written:
            base = PackedIntLayout(name, layout.bits, layout.group_size, POINTS, layout.dtype, layout.scales)
            yield replace(base, zero=Constant(base.point))
            if packing_form.zeros:
                yield base


def _rows_of_packed_ints(layout: PackedIntLayout, tensor: LayoutSource) -> Iterator[Storable]:
    """Yield layouts that store the integers of ``layout`` row by row, those with a constant zero point first.

    Groups that are not runs of columns have no row-by-row layout.
    """
    if layout.scattered:
        return
    rows = layout.rows
    if isinstance(rows.zero, Points):
        yield replace(rows, zero=Constant(layout.point))
    yield rows
    yield from _affine(rows, TensorInLayout(tensor.name, tensor.shape, replace(rows, dtype=tensor.dtype)))


def _scaled_codebooks(layout: ScaledCodebookLayout, tensor: LayoutSource) -> Iterator[ScaledCodebookLayout]:
    """Yield layouts that store a scaled codebook with the same indices in another way.

    The layouts differ in the order of two indices in a byte, in the grid and the type of the scales, and in named
    tables. They also differ in the second scale: it may divide instead of multiply, or be 1.
    """
    seconds = dict.fromkeys((layout.second, None, MULTIPLY, DIVIDE))
    scales = dict.fromkeys((layout.scales, "f32"))
    names = (None, *(name for name in TABLES if layout.values is None and layout.bits == 4))
    orders = (layout.order, *(order for order in ORDERS if order != layout.order and layout.bits == 4))
    grids = _grids(layout, layout.stored_shape(tensor.shape))
    for second, scale_dtype, name, order, grid in product(seconds, scales, names, orders, grids):
        if scale_dtype != layout.scales and second:  # no format combines second scales with f32 scales
            continue
        nested = layout.nested if scale_dtype == layout.scales else None
        candidate = replace(layout, second=second, scales=scale_dtype, nested=nested, order=order, grid=grid)
        candidate = candidate if name is None else replace(candidate, values=name, codebook="f32")
        if candidate != layout:
            yield candidate


def _grids(layout: ScaledCodebookLayout, shape: Shape) -> Iterator[Grid]:
    """Yield grids for the scales of ``layout``: grids with the same scales, then grids that repeat each scale.

    ``shape`` is the stored shape.
    """
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
        case Tiles(tall, wide) if len(shape) == 2 and cols and tall * wide >= _MIN_TILE:
            yield ROW if wide >= cols else Group(wide) if cols % wide == 0 else Tiles(1, wide)
            yield Tiles(tall, 1)
        case Row() if cols:
            yield Group(cols)
        case PerTensor() if cols:
            yield ROW


def _compressed_rows(layout: CsrLayout) -> Iterator[CsrLayout]:
    """Yield other layouts of compressed sparse rows: with ascending columns, with u64 indices, or with both."""
    if layout.nnz is None or layout.dtype not in DTYPES:
        return
    for indices in dict.fromkeys((layout.indices, "u64")):
        for ascending in dict.fromkeys((layout.ascending, True)):
            if (indices, ascending) != (layout.indices, layout.ascending):
                yield replace(layout, indices=indices, ascending=ascending)


def _pruned(layout: BlocksLayout, tensor: LayoutSource) -> Iterator[BlocksLayout]:
    """Yield layouts of a pruned matrix with other layouts of the stored matrix; none if that matrix is dense."""
    if not isinstance(layout.inner, DenseLayout):
        stored = inner_source(tensor, layout.inner_shape(tensor.shape), layout.inner.codec, tensor.params)
        for inner in family_alternatives(layout.inner, stored):
            yield replace(layout, inner=inner)


def _blocks(layout: AffineLayout, tensor: LayoutSource) -> Iterator[GgmlBlocksLayout]:
    """Yield ggml's block types with the same number of bits per code, the smallest first.

    A scale for more than 32 columns is repeated for each block; a block must not cross a border of groups.
    """
    cols = matrix_shape(tensor.shape)[1]
    if layout.matrix is not None or isinstance(layout.grid, Blocks | PerTensor):
        return
    if cols % _GROUP.columns or layout.group_columns(cols) % _GROUP.columns:
        return
    for block_type in sorted(AFFINE, key=lambda block_type: TYPES[block_type].nbytes):
        if AFFINE[block_type].bits == layout.bits:
            yield GgmlBlocksLayout(block_type)


def _codebook_blocks(layout: ScaledCodebookLayout, tensor: LayoutSource) -> Iterator[GgmlBlocksLayout]:
    """Yield ggml's block types with the same values; scales for more columns than a block are repeated."""
    if layout.transposed or len(tensor.shape) < 1:
        return
    cols = tensor.shape[-1]
    for block_type, codebook in CODEBOOKS.items():
        same_values = layout.values == codebook.values or (layout.values is None and codebook.values in TABLES)
        if (codebook.scales in SMALL_SCALES or layout.scales in SMALL_SCALES) and layout.scales != codebook.scales:
            continue
        if same_values and layout.bits == codebook.bits and cols % TYPES[block_type].elements == 0:
            yield GgmlBlocksLayout(block_type)
