"""Integer layers in folders of compressed-tensors: 32-bit words (pack-quantized, marlin-24), bytes (int-quantized)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod

import numpy as np

from ingot.errors import FormatError
from ingot.formats.packed_folders.base import WEIGHT, Entries, Layer, PackedLayout, require_entries
from ingot.model.layouts.affine import (
    CODES,
    NO_ZERO,
    PER_TENSOR,
    POINTS,
    ROW,
    ROWS_LSB,
    SCALES,
    ZEROS,
    AffineLayout,
    Blocks,
    Constant,
    Group,
)
from ingot.model.layouts.base import Shape
from ingot.model.layouts.dense import DATA
from ingot.model.layouts.packed_ints import (
    INTS,
    MARLIN_24,
    META,
    ORDER,
    PACKED,
    PACKED_LOOSE,
    PACKING_FORMS,
    PackedIntLayout,
    word_count,
)
from ingot.model.tensor import Array, Tensor

PACKED_WEIGHT = ".weight_packed"
SCALE = ".weight_scale"
ZERO_POINT = ".weight_zero_point"
SHAPE = ".weight_shape"
G_IDX = ".weight_g_idx"
MARLIN_SCALE = ".scale_packed"
MARLIN_META = ".meta"
SCALE_DTYPES = ("f16", "bf16", "f32")


def integer_layers(entries: Entries, widths: Sequence[int]) -> Iterator[Layer]:
    """Yield the integer layers among ``entries``; ``widths`` are the bits that ``config.json`` declares.

    Raises ``FormatError`` ``compressed-tensors.parts``, ``.dtype``, ``.shape``, ``.order``.
    """
    for key in entries:
        if key.endswith(PACKED_WEIGHT) and key.removesuffix(PACKED_WEIGHT) + MARLIN_SCALE in entries:
            yield _marlin(entries, key.removesuffix(PACKED_WEIGHT))
        elif key.endswith(PACKED_WEIGHT) and entries[key].dtype == "i32":
            yield _packed(entries, key.removesuffix(PACKED_WEIGHT), widths)
        elif key.endswith(WEIGHT) and entries[key].dtype == "i8" and key.removesuffix(WEIGHT) + SCALE in entries:
            yield _bytes(entries, key.removesuffix(WEIGHT))


def _refuse(rule: str, text: str, location: str) -> FormatError:
    return FormatError(f"compressed-tensors.{rule}", text, where=location)


def _scales(entries: Entries, stem: str) -> Tensor:
    scale = entries.get(stem + SCALE)
    if scale is None:
        raise _refuse("parts", f"expected the entry {stem + SCALE!r} of this packed weight, but it is missing", stem)
    if scale.dtype not in SCALE_DTYPES:
        raise _refuse("dtype", f"expected scales of {', '.join(SCALE_DTYPES)}, found {scale.dtype}", stem + SCALE)
    return scale


def _group(scale: Tensor, rows: int, cols: int) -> int | None:
    """Return the number of columns that share a scale, from the shape of the scales; None for a complete row."""
    groups = scale.shape[1] if len(scale.shape) == 2 else 0
    if len(scale.shape) != 2 or scale.shape[0] != rows or not groups or cols % groups:
        raise _refuse("shape", f"expected scales for {rows} rows of {cols}, found {list(scale.shape)}", scale.name)
    return None if groups == 1 else cols // groups


def _packed(entries: Entries, stem: str, widths: Sequence[int]) -> Layer:
    """Return a pack-quantized layer; an entry states its shape, and its bits follow from the width of a row."""
    codes = entries[stem + PACKED_WEIGHT]
    scale = _scales(entries, stem)
    stored_shape = entries.get(stem + SHAPE)
    if stored_shape is None or stored_shape.dtype not in ("i64", "i32") or stored_shape.shape != (2,):
        raise _refuse("parts", f"expected {stem + SHAPE!r}, two integers", stem)
    rows, cols = (int(size) for size in stored_shape.parts[DATA].array())
    if len(codes.shape) != 2 or codes.shape[0] != rows or not 0 < cols <= 32 * codes.shape[1]:
        raise _refuse("shape", f"expected words for a matrix of {rows} x {cols}, found {list(codes.shape)}", codes.name)
    bits, variant = _width(codes.shape[1], cols, widths, codes.name)
    group = _group(scale, rows, cols)
    layout = PackedIntLayout(variant, bits, group, Constant(1 << (bits - 1)), scale.dtype, scale.dtype)
    parts = {CODES: codes.name, SCALES: scale.name}
    zeros = entries.get(stem + ZERO_POINT)
    if zeros is not None:
        layout = replace(layout, zero=POINTS)
        if zeros.dtype != "i32" or zeros.shape != layout.zero_shape((rows, cols)):
            raise _refuse("shape", f"expected packed zero points, found {zeros.dtype} {list(zeros.shape)}", zeros.name)
        parts[ZEROS] = zeros.name
    extra = [stored_shape.name]
    order = _order(entries, stem, cols, group or cols)
    if order is not None and order is not _PLAIN:
        layout, parts[ORDER] = replace(layout, order=True), stem + G_IDX
    elif order is _PLAIN:
        extra.append(stem + G_IDX)
    return Layer(stem + WEIGHT, (rows, cols), _simplest(layout, (rows, cols)), parts, extra)


def _marlin(entries: Entries, stem: str) -> Layer:
    """Return a marlin-24 layer, whose shape follows from its entries: two of four neighbouring inputs have codes."""
    suffixes = (PACKED_WEIGHT, MARLIN_SCALE, MARLIN_META)
    codes, scale, meta = require_entries(entries, stem, suffixes, "compressed-tensors.parts").values()
    if (codes.dtype, scale.dtype, meta.dtype) != ("i32", "f16", "i16"):
        raise _refuse("dtype", f"expected i32, f16 and i16, found {codes.dtype}, {scale.dtype} and {meta.dtype}", stem)
    shapes = [codes.shape, scale.shape, meta.shape]
    if any(len(shape) != 2 or not prod(shape) for shape in shapes) or meta.shape[0] != codes.shape[0]:
        raise _refuse("shape", f"expected three matrices, found {shapes}", stem)
    rows = meta.shape[1] // 2
    cols = 32 * codes.shape[0]
    bits, remainder = divmod(2 * codes.shape[1], rows or 1)
    groups = scale.shape[0]
    if bits not in PACKING_FORMS[MARLIN_24].bits or remainder or rows % 64 or cols % groups or scale.shape[1] != rows:
        raise _refuse(
            "shape", f"expected packed integers, scales and positions for a multiple of 64 rows, found {shapes}", stem
        )
    group = None if groups == 1 else cols // groups
    layout = PackedIntLayout(MARLIN_24, bits, group, Constant(1 << (bits - 1)), scale.dtype, scale.dtype)
    return Layer(stem + WEIGHT, (rows, cols), layout, {CODES: codes.name, SCALES: scale.name, META: meta.name})


_PLAIN = np.empty(0, np.int32)


def _order(entries: Entries, stem: str, cols: int, group: int) -> Array | None:
    """Return the group index of each column, from the layer's entry ``g_idx``.

    Return ``_PLAIN`` if groups are runs of adjacent columns, or if the indices are unset (-1). Return None if there is
    no such entry.
    """
    entry = entries.get(stem + G_IDX)
    if entry is None:
        return None
    if entry.dtype != "i32" or entry.shape != (cols,):
        raise _refuse("order", f"expected i32 [{cols}], found {entry.dtype} {list(entry.shape)}", entry.name)
    order = entry.parts[DATA].array()
    if bool((order == -1).all()) or np.array_equal(order, np.arange(cols) // group):
        return _PLAIN
    if int(order.min()) < 0 or int(order.max()) >= -(-cols // group):
        raise _refuse(
            "order", f"expected groups below {-(-cols // group)}, found {order.min()} to {order.max()}", entry.name
        )
    return order


def _width(across: int, cols: int, widths: Sequence[int], location: str) -> tuple[int, str]:
    """Return the bits per code and the packing of a row of ``cols`` codes in ``across`` words.

    Exactly one of ``widths``, the declared bits, must give this number of words.
    """
    dense = [bits for bits in widths if word_count(cols, bits) == across]
    loose = [bits for bits in widths if bits in (3, 5, 6, 7) and -(-cols // (32 // bits)) == across]
    candidates = [(bits, PACKED) for bits in dense] + [
        (bits, PACKED_LOOSE) for bits in loose if bits not in dense or across > 1
    ]
    if len(candidates) != 1:
        raise _refuse(
            "shape",
            f"expected exactly one way to pack {cols} codes of {', '.join(map(str, widths)) or 'no'} bits in {across} "
            "words, "
            f"found {len(candidates)}",
            location,
        )
    return candidates[0]


def _simplest(layout: PackedIntLayout, shape: Shape) -> PackedLayout:
    """Return the affine layout with the same bytes if there is one, else ``layout``."""
    cols = shape[1]
    if layout.order or layout.packing != PACKED or not isinstance(layout.zero, Constant) or cols * layout.bits % 32:
        return layout
    return layout.rows


def _bytes(entries: Entries, stem: str) -> Layer:
    """Return an int-quantized layer: signed bytes with one scale, or one per row, group or block."""
    codes = entries[stem + WEIGHT]
    scale = _scales(entries, stem)
    zeros = entries.get(stem + ZERO_POINT)
    if len(codes.shape) != 2 or not prod(codes.shape):
        raise _refuse("shape", f"expected a matrix, found {list(codes.shape)}", codes.name)
    rows, cols = codes.shape
    parts = {CODES: codes.name, SCALES: scale.name}
    layout = AffineLayout(8, ROW, ROWS_LSB, True, NO_ZERO, scale.dtype, scale.dtype)
    if zeros is not None and (zeros.dtype != "i8" or zeros.shape != scale.shape):
        raise _refuse(
            "shape", f"expected zero points in i8 like the scales, found {zeros.dtype} {list(zeros.shape)}", stem
        )
    if prod(scale.shape) == 1 and (rows > 1 or len(scale.shape) < 2):
        point = int(zeros.parts[DATA].array()[0]) if zeros is not None else 0
        layout = replace(layout, grid=PER_TENSOR, zero=Constant(point) if point else NO_ZERO)
        return Layer(stem + WEIGHT, (rows, cols), layout, parts, () if zeros is None else (zeros.name,))
    if len(scale.shape) == 2 and scale.shape[0] != rows and zeros is None and _divides((rows, cols), scale.shape):
        layout = replace(layout, grid=Blocks((rows // scale.shape[0], cols // scale.shape[1])))
        return Layer(stem + WEIGHT, (rows, cols), layout, parts)
    group = _group(scale, rows, cols)
    if zeros is None:
        return Layer(stem + WEIGHT, (rows, cols), replace(layout, grid=ROW if group is None else Group(group)), parts)
    asymmetric = PackedIntLayout(INTS, 8, group, POINTS, scale.dtype, scale.dtype)
    return Layer(stem + WEIGHT, (rows, cols), asymmetric, {**parts, ZEROS: zeros.name})


def _divides(shape: Shape, blocks: Shape) -> bool:
    return all(count and size % count == 0 for size, count in zip(shape, blocks, strict=True))
