"""``gguf.TYPE/1`` and ``zt.mx/1``: the codec ``ggml_blocks``, and of ``scaled_codebook`` small numbers with a power of
two for each block."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from math import prod

from ingot.formats.zt2.checks import number, others, refuse, require_parts, require_size
from ingot.formats.zt2.made import Made, each
from ingot.formats.zt2.manifest import Object, stated
from ingot.formats.zt2.meaning import Meaning, Written
from ingot.formats.zt2.types import ITEM_BYTES, nbytes_of
from ingot.model.layouts.affine import Group
from ingot.model.layouts.ggml import BLOCKS, TYPES, GgmlBlocksLayout
from ingot.model.layouts.scaled_codebook import INDICES, LOW_FIRST, SCALES, VALUES, ScaledCodebookLayout, Tiles
from ingot.model.spec import TensorSpec

GGUF = re.compile(r"gguf\.([a-z0-9_]{1,32})/1").fullmatch
MX = "zt.mx/1"
_ELEMENTS, _BYTES = "elems_per_block", "block_bytes"
_E8M0 = "f8_e8m0fnu"
_LEAST_BLOCK = 2
_VALUES: Mapping[tuple[str, str | None], str] = {
    ("u8", "f4_e2m1"): "f4_e2m1fn",
    ("u8", "f8_e4m3fn"): "f8_e4m3fn",
    ("u8", "f8_e5m2"): "f8_e5m2",
    ("i8", None): "i8",
}
"""Types of elements of ``zt.mx/1``, and what indices stand for here."""
_FACTORS = {"i8": 2.0**-6}  # MXINT8 has six bits behind the point (OCP MX 1.0, section 5.3.4)


def check_gguf(where: str, obj: Object) -> None:
    """One part of whole blocks; the attributes say of how many elements and bytes."""
    part = obj.parts.get("data")
    if part is None or len(obj.parts) != 1 or part.dtype != "u8" or stated(part.type) is not None:
        raise refuse(where, f"one part 'data' of u8 in {obj.layout}")
    elements, nbytes, count = number(where, obj, _ELEMENTS, 1), number(where, obj, _BYTES, 1), prod(obj.shape)
    if count % elements:
        raise refuse(where, f"whole blocks of {elements} elements, found {count} elements")
    require_size(where, obj, "data", count // elements * nbytes)


def read_gguf(obj: Object) -> Meaning | None:
    """Return the codec's attributes; None for a type, or a size of its blocks, that is not known here."""
    found, attributes = GGUF(obj.layout), dict(stated(obj.attributes) or {})
    block = TYPES.get(found[1]) if found else None
    constants = (attributes.pop(_ELEMENTS), attributes.pop(_BYTES))
    if found is None or block is None or constants != block[:2] or (obj.shape or (1,))[-1] % block.elements:
        return None
    return Meaning(GgmlBlocksLayout.codec, {**attributes, **GgmlBlocksLayout(found[1]).attributes()}, {"data": BLOCKS})


def write_gguf(spec: TensorSpec) -> Written:
    """Return the profile of the type of block."""
    layout = GgmlBlocksLayout.of(spec)
    own = {_ELEMENTS: layout.block.elements, _BYTES: layout.block.nbytes}
    return Written(f"gguf.{layout.type}/1", {**others(spec, layout.attributes()), **own}, {BLOCKS: "data"})


def check_mx(where: str, obj: Object) -> None:
    """Elements, and an exponent for each block along an axis."""
    require_parts(where, obj, {"data", "scales"})
    data, scales, attributes = obj.parts["data"], obj.parts["scales"], stated(obj.attributes) or {}
    if (scales.dtype, stated(scales.type)) != ("u8", "f8_e8m0") or attributes.get("scale_form") != "e8m0_exponent":
        raise refuse(where, "scales of f8_e8m0, and scale_form e8m0_exponent")
    block = number(where, obj, "block_size", _LEAST_BLOCK)
    axis = number(where, obj, "axis", 0) if "axis" in attributes else len(obj.shape) - 1
    if not 0 <= axis < len(obj.shape) or obj.shape[axis] % block:
        raise refuse(where, f"an axis in whole blocks of {block}, found axis {axis} of {list(obj.shape)}")
    count = prod(obj.shape)
    require_size(where, obj, "data", nbytes_of(data.dtype, stated(data.type), count))
    require_size(where, obj, "scales", count // block * ITEM_BYTES["u8"])


def read_mx(obj: Object) -> Meaning | None:
    """Return the codec's attributes; None for elements that are not known.

    Blocks along the last axis are groups, along the one before it blocks of one column. Along others each element gets
    the scale of its block.
    """
    attributes = dict(stated(obj.attributes) or {})
    values = _VALUES.get((obj.parts["data"].dtype, stated(obj.parts["data"].type)))
    last = len(obj.shape) - 1
    axis, block = attributes.pop("axis", last), attributes.pop("block_size")
    del attributes["scale_form"]
    if values is None:
        return None
    grid: Group | Tiles = Group(block) if axis == last else Tiles(block, 1) if axis == last - 1 else Group(1)
    made = {}
    if axis < last - 1:
        expand = partial(each, shape=tuple(obj.shape), axis=axis, block=block)
        made[SCALES] = Made(SCALES, "u8", prod(obj.shape), expand, _E8M0)
    layout = _layout(values, grid, str(attributes.pop("dtype", "f32")))
    types, roles = {INDICES: ("u8", None)}, {"data": INDICES, "scales": SCALES}
    return Meaning(layout.codec, {**attributes, **layout.attributes()}, roles, types, made)


def _layout(values: str, grid: Group | Tiles, dtype: str) -> ScaledCodebookLayout:
    return ScaledCodebookLayout(VALUES[values], grid, dtype, scales=_E8M0, values=values, factor=_FACTORS.get(values))


def write_mx(spec: TensorSpec) -> Written | None:
    """Return what says of small floats or i8 with exponents; None for other scaled codebooks."""
    layout, last = ScaledCodebookLayout.of(spec), len(spec.shape) - 1
    stored = {values: kind for kind, values in _VALUES.items()}.get(layout.values or "")
    if stored is None or layout.order != LOW_FIRST or last < 0:
        return None
    match layout.grid:
        case Group(columns):
            block, axis = columns, last
        case Tiles(tall, 1) if last and not spec.shape[-2] % tall:
            block, axis = tall, last - 1
        case _:
            return None
    if block < _LEAST_BLOCK or layout != _layout(str(layout.values), layout.grid, layout.dtype):
        return None
    own = {"block_size": block, "axis": axis, "scale_form": "e8m0_exponent"}
    attributes = {**others(spec, layout.attributes()), **own}
    return Written(MX, attributes, {INDICES: "data", SCALES: "scales"}, {INDICES: stored})
