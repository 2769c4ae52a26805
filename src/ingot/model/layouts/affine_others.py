"""The other layouts that a tensor's affine integers can have: what a conversion tries for a container."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import gcd

from ingot.core.numeric.floats import FLOATS
from ingot.model.layouts.affine import (
    FLAT_LSB,
    NO_ZERO,
    OFFSETS,
    POINTS,
    ROWS_LSB,
    AffineLayout,
    Constant,
    Group,
    natural,
)
from ingot.model.layouts.base import Alternative, Described, matrix_shape
from ingot.model.layouts.packed_words import forms_of

_SMALLEST_EVEN = 16


def alternatives(layout: AffineLayout, tensor: Described) -> Iterator[Alternative]:
    """Yield the layouts that the same integers can have, that nearest to as stored first.

    Low bits first, signed codes as they are or shifted by half their range, one zero point for all codes kept as an
    attribute or spread out as a part, scales as f32 where that lets more zero points be shifted, zero points as
    offsets, also with f32 scales, and offsets as zero points; then a part of equal zero points as an attribute, and the
    words of other programs; last, the same for groups that are cut so that they divide a row. Which of them keeps every
    value, the codec's ``repack`` tells. Blocks, and codes packed as another matrix than the tensor's own, have no other
    layout.
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
        yield from alternatives(replace(stored, zero=POINTS), tensor)
        return
    if stored.scales in ("f16", "bf16"):  # an offset of more bits than these have
        yield replace(in_rows, signed=False, scales="f32", zero=OFFSETS)
    yield replace(in_rows, signed=False, zero=Constant(1 << (stored.bits - 1)))
    yield replace(in_rows, signed=True, zero=NO_ZERO)
    yield from forms_of(in_rows, tensor.shape)
    if stored.scales != "f32":  # who has one type of scales, which holds them
        wide = replace(in_rows, signed=False, scales="f32")
        yield replace(wide, zero=Constant(1 << (stored.bits - 1)))
        yield replace(wide, zero=POINTS)
        yield replace(wide, signed=True, zero=NO_ZERO)
    even = _even_group(stored, matrix_shape(tensor.shape)[1])
    if even is not None:
        yield from alternatives(replace(stored, grid=even), tensor)


def _even_group(layout: AffineLayout, cols: int) -> Group | None:
    """Return the largest groups that divide both a row and the layout's own groups, which do not divide a row.

    None for groups so small that their scales take more space than their codes.
    """
    group = layout.group_size
    if group is None or cols <= group or cols % group == 0:
        return None
    even = gcd(group, cols)
    return Group(even) if even >= _SMALLEST_EVEN else None
