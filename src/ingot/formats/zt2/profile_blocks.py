"""The profiles ``gguf.TYPE/1`` (codec ``ggml_blocks``) and ``zt.mx/1`` (codec ``scaled_codebook``).

``zt.mx/1`` stores small numbers with a power of two for each block.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from math import prod

from ingot.formats.zt2.checks import number, others, refuse, require_parts, require_size
from ingot.formats.zt2.made import ConvertedPart, expand_blocks
from ingot.formats.zt2.manifest import Object, optional_value
from ingot.formats.zt2.meaning import StoredForm, WrittenForm
from ingot.formats.zt2.types import ITEM_BYTES, nbytes_of
from ingot.model.layouts.affine import Group
from ingot.model.layouts.ggml import BLOCKS, TYPES, GgmlBlocksLayout
from ingot.model.layouts.scaled_codebook import INDICES, LOW_FIRST, SCALES, VALUES, ScaledCodebookLayout, Tiles
from ingot.model.spec import TensorSpec

GGUF = re.compile(r"gguf\.([a-z0-9_]{1,32})/1").fullmatch
MX = "zt.mx/1"
_ELEMENTS, _BYTES = "elems_per_block", "block_bytes"
_E8M0 = "f8_e8m0fnu"
_MIN_BLOCK = 2
_VALUES: Mapping[tuple[str, str | None], str] = {
    ("u8", "f4_e2m1"): "f4_e2m1fn",
    ("u8", "f8_e4m3fn"): "f8_e4m3fn",
    ("u8", "f8_e5m2"): "f8_e5m2",
    ("i8", None): "i8",
}
"""Types of elements of ``zt.mx/1``, and the tables that their codes index."""
_FACTORS = {"i8": 2.0**-6}  # MXINT8 has six fractional bits (OCP MX 1.0, section 5.3.4)


def check_gguf(location: str, obj: Object) -> None:
    """Check that the object has one part of complete blocks, whose elements and bytes are declared by attributes."""
    part = obj.parts.get("data")
    if part is None or len(obj.parts) != 1 or part.dtype != "u8" or optional_value(part.type) is not None:
        raise refuse(location, f"one part 'data' of u8 in {obj.layout}")
    elements, nbytes, count = number(location, obj, _ELEMENTS, 1), number(location, obj, _BYTES, 1), prod(obj.shape)
    if count % elements:
        raise refuse(location, f"whole blocks of {elements} elements, found {count} elements")
    require_size(location, obj, "data", count // elements * nbytes)


def read_gguf(obj: Object) -> StoredForm | None:
    """Return the tensor as a codec with its parts; None for an unknown type, or an unknown size of its blocks."""
    match, attributes = GGUF(obj.layout), dict(optional_value(obj.attributes) or {})
    block = TYPES.get(match[1]) if match else None
    constants = (attributes.pop(_ELEMENTS), attributes.pop(_BYTES))
    if match is None or block is None or constants != block[:2] or (obj.shape or (1,))[-1] % block.elements:
        return None
    return StoredForm(
        GgmlBlocksLayout.codec, {**attributes, **GgmlBlocksLayout(match[1]).attributes()}, {"data": BLOCKS}
    )


def write_gguf(spec: TensorSpec) -> WrittenForm:
    """Return the tensor as a profile: that of its block type."""
    layout = GgmlBlocksLayout.of(spec)
    constants = {_ELEMENTS: layout.block.elements, _BYTES: layout.block.nbytes}
    return WrittenForm(f"gguf.{layout.type}/1", {**others(spec, layout.attributes()), **constants}, {BLOCKS: "data"})


def check_mx(location: str, obj: Object) -> None:
    """Check the elements, and an exponent for each block along an axis."""
    require_parts(location, obj, {"data", "scales"})
    data, scales, attributes = obj.parts["data"], obj.parts["scales"], optional_value(obj.attributes) or {}
    if (scales.dtype, optional_value(scales.type)) != ("u8", "f8_e8m0") or attributes.get(
        "scale_form"
    ) != "e8m0_exponent":
        raise refuse(location, "scales of f8_e8m0, and scale_form e8m0_exponent")
    block = number(location, obj, "block_size", _MIN_BLOCK)
    axis = number(location, obj, "axis", 0) if "axis" in attributes else len(obj.shape) - 1
    if not 0 <= axis < len(obj.shape) or obj.shape[axis] % block:
        raise refuse(location, f"an axis in whole blocks of {block}, found axis {axis} of {list(obj.shape)}")
    count = prod(obj.shape)
    require_size(location, obj, "data", nbytes_of(data.dtype, optional_value(data.type), count))
    require_size(location, obj, "scales", count // block * ITEM_BYTES["u8"])


def read_mx(obj: Object) -> StoredForm | None:
    """Return the tensor as a codec with its parts; None for unknown elements.

    Blocks along the last axis are groups, along the second to last axis they are tiles of one column. Along other axes
    the scales are expanded to one for each element.
    """
    attributes = dict(optional_value(obj.attributes) or {})
    values = _VALUES.get((obj.parts["data"].dtype, optional_value(obj.parts["data"].type)))
    last = len(obj.shape) - 1
    axis, block = attributes.pop("axis", last), attributes.pop("block_size")
    del attributes["scale_form"]
    if values is None:
        return None
    grid: Group | Tiles = Group(block) if axis == last else Tiles(block, 1) if axis == last - 1 else Group(1)
    converted = {}
    if axis < last - 1:
        expand = partial(expand_blocks, shape=tuple(obj.shape), axis=axis, block=block)
        converted[SCALES] = ConvertedPart(SCALES, "u8", prod(obj.shape), expand, _E8M0)
    layout = _layout(values, grid, str(attributes.pop("dtype", "f32")))
    types, roles = {INDICES: ("u8", None)}, {"data": INDICES, "scales": SCALES}
    return StoredForm(layout.codec, {**attributes, **layout.attributes()}, roles, types, converted)


def _layout(values: str, grid: Group | Tiles, dtype: str) -> ScaledCodebookLayout:
    return ScaledCodebookLayout(VALUES[values], grid, dtype, scales=_E8M0, values=values, factor=_FACTORS.get(values))


def write_mx(spec: TensorSpec) -> WrittenForm | None:
    """Return the tensor as a profile if its codes are small floats, or i8 with exponents; None for other scaled
    codebooks."""
    layout, last = ScaledCodebookLayout.of(spec), len(spec.shape) - 1
    stored = {values: element_types for element_types, values in _VALUES.items()}.get(layout.values or "")
    if stored is None or layout.order != LOW_FIRST or last < 0:
        return None
    match layout.grid:
        case Group(columns):
            block, axis = columns, last
        case Tiles(tall, 1) if last and not spec.shape[-2] % tall:
            block, axis = tall, last - 1
        case _:
            return None
    if block < _MIN_BLOCK or layout != _layout(str(layout.values), layout.grid, layout.dtype):
        return None
    profile_attributes = {"block_size": block, "axis": axis, "scale_form": "e8m0_exponent"}
    attributes = {**others(spec, layout.attributes()), **profile_attributes}
    return WrittenForm(MX, attributes, {INDICES: "data", SCALES: "scales"}, {INDICES: stored})
