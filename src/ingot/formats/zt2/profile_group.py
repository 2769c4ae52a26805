"""``zt.quant_group/1``: the codec ``affine``, where integers lie in one stream of bits and points are floats."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

from ingot.core.numeric.dtypes import DTYPES
from ingot.errors import CodecError, FormatError
from ingot.formats.zt2.checks import number, others, refuse, require_parts, require_size
from ingot.formats.zt2.made import (
    Made,
    converted,
    holds,
    powers_of_two,
    same,
    turned_codes,
    turned_words,
    unpacked,
)
from ingot.formats.zt2.manifest import Object, stated
from ingot.formats.zt2.meaning import Meaning, Written
from ingot.formats.zt2.types import ITEM_BYTES, nbytes_of, types_here
from ingot.model.layouts.affine import (
    CODES,
    FLAT_LSB,
    NO_ZERO,
    POINTS,
    ROW,
    ROWS_LSB,
    ROWS_MSB,
    SCALE_DTYPES,
    SCALES,
    ZEROS,
    AffineLayout,
    Blocks,
    Constant,
    Grid,
    Group,
    NoZero,
    Offsets,
    Zero,
)
from ingot.model.layouts.base import Shape
from ingot.model.spec import TensorSpec

QUANT_GROUP = "zt.quant_group/1"
_BITS = (2, 3, 4, 5, 6, 8)
_KEYS = ("bits", "group_size", "axis", "packing", "scale_form", "zero_point")
_F32, _NARROW, _EXPONENT = "f32_factors", "f16_factors", "e8m0_exponent"
_SMALL = ("f8_e4m3fn", "f8_e5m2")
_LSB, _MSB, _PLAIN, _PACKED = "lsb_first", "msb_first", "plain", "same_as_data"


def _map(where: str, obj: Object, key: str) -> Mapping[str, Any]:
    value = (stated(obj.attributes) or {}).get(key)
    if not isinstance(value, dict):
        raise refuse(where, f"attribute {key}, a map, found {str(value)[:40]!r}")
    return value


def _one_of(where: str, values: Mapping[str, Any], key: str, known: tuple[str, ...]) -> str:
    value = values.get(key)
    if value not in known:
        raise refuse(where, f"{key} {', '.join(known)}, found {str(value)[:40]!r}")
    return str(value)


def check_group(where: str, obj: Object) -> None:
    """Codes in whole words, a scale for each group along an axis, and zero points where they are said to be."""
    bits, group = number(where, obj, "bits", 2), number(where, obj, "group_size", 0)
    axis, packing, zero = number(where, obj, "axis", 0), _map(where, obj, "packing"), _map(where, obj, "zero_point")
    form = _one_of(where, zero, "form", ("none", "implied", "tensor"))
    require_parts(where, obj, {"data", "scales", *(("zeros",) if form == "tensor" else ())})
    word, per_word = _one_of(where, packing, "word", ("u8", "u16", "u32", "u64")), packing.get("per_word")
    _one_of(where, packing, "order", (_LSB, _MSB))
    width = ITEM_BYTES[word]
    if bits not in _BITS or 8 * width % bits or type(per_word) is not int or per_word != 8 * width // bits:
        raise refuse(where, f"codes of 2, 4 or 8 bits that fill words of {word}, found {bits} and {per_word!s:.20}")
    if obj.parts["data"].dtype not in (word, f"i{word[1:]}"):
        raise refuse(where, f"data of {word}, found {obj.parts['data'].dtype}")
    if axis >= len(obj.shape) or (group and obj.shape[axis] % group):
        raise refuse(where, f"an axis in whole groups of {group}, found axis {axis} of {list(obj.shape)}")
    if form == "implied" and type(zero.get("value")) is not int:
        raise refuse(where, f"zero_point with an integer value, found {str(zero.get('value'))[:40]!r}")
    codes = prod(obj.shape)
    if codes % per_word:
        raise FormatError("zt2.size", f"expected whole words of {per_word} codes, found {codes} codes", where=where)
    require_size(where, obj, "data", codes // per_word * width)
    _check_scales(where, obj, group, axis)
    if form == "tensor" and _one_of(where, zero, "packing", (_PLAIN, _PACKED)) == _PLAIN:
        _require_count(where, obj, "zeros", _counts(obj, group, axis))
    elif form == "tensor":
        words = {-(-count // per_word) * width for count in _counts(obj, group, axis)}
        if obj.parts["zeros"].nbytes not in words:
            raise FormatError("zt2.size", f"expected {min(words)} bytes of zeros", where=where)


def _check_scales(where: str, obj: Object, group: int, axis: int) -> None:
    form = _one_of(where, stated(obj.attributes) or {}, "scale_form", (_F32, _NARROW, _EXPONENT))
    part = obj.parts["scales"]
    kind = stated(part.type) or part.dtype
    if (kind != "f8_e8m0") if form == _EXPONENT else kind[0] in "iu":
        raise refuse(where, f"scales of floats, of f8_e8m0 for {_EXPONENT}; found {kind[:40]} for {form}")
    _require_count(where, obj, "scales", _counts(obj, group, axis))


def _counts(obj: Object, group: int, axis: int) -> set[int]:
    """Return how many scales there are; without groups the document's words say one for each index along the axis, and
    its formula one for each element."""
    if group:
        return {prod(obj.shape) // group}
    return {obj.shape[axis], prod(obj.shape)}


def _require_count(where: str, obj: Object, role: str, counts: set[int]) -> None:
    part = obj.parts[role]
    sizes = {nbytes_of(part.dtype, stated(part.type), count) for count in counts}
    if None not in sizes and part.nbytes not in sizes:
        raise FormatError(
            "zt2.size", f"expected {min(size or 0 for size in sizes)} bytes of {role}, found {part.nbytes}", where=where
        )


def read_group(obj: Object) -> Meaning | None:
    """Return the codec's attributes and what is made for it; None for what the document leaves open: codes without a
    zero point that share a signed word, factors of f32 that are used as narrower ones."""
    attributes = dict(stated(obj.attributes) or {})
    bits, group, axis, packing, form, point = (attributes.pop(key) for key in _KEYS)
    if not group and not prod(obj.shape):
        return None
    signed, made = _signed(obj, packing["per_word"], point), dict[str, Made]()
    scales = _scales(obj, form, made)
    if signed is None or scales is None:
        return None
    order = _packing(obj.shape, bits, packing["order"], packing["word"])
    if order is None:
        order = _turned(obj, bits, packing["word"], made)
    grid = _grid(obj, group, axis)
    known = AffineLayout(bits, grid, order, signed, NO_ZERO, "f32", scales)
    zero = _zero(obj, known, made)
    if zero is None:
        return None
    dtype = attributes.pop("dtype", "f32" if form != _NARROW else scales)
    layout = replace(known, zero=zero, dtype=str(dtype))
    roles = {"data": CODES, "scales": SCALES, **({"zeros": ZEROS} if "zeros" in obj.parts else {})}
    return Meaning(layout.codec, {**attributes, **layout.attributes()}, roles, {CODES: ("u8", None)}, made)


def _signed(obj: Object, per_word: int, point: Mapping[str, Any]) -> bool | None:
    """Return whether codes are signed: those of a signed word of their own are. Where several share one, there is no
    sign but the word's, and a zero point tells that they count from 0; None where nothing does."""
    if not obj.parts["data"].dtype.startswith("i"):
        return False
    if per_word == 1:
        return True
    return False if point["form"] == "tensor" or point.get("value", 0) > 0 else None


def _scales(obj: Object, form: str, made: dict[str, Made]) -> str | None:
    """Return the type of scales here: as stored, or f32 that are made of exponents and small floats."""
    part = obj.parts["scales"]
    dtype, kind = types_here(part.dtype, stated(part.type))
    if kind is None and dtype in SCALE_DTYPES:
        return None if form == _NARROW and dtype == "f32" else dtype
    if form == _EXPONENT:
        make: Callable[[bytes], bytes] = powers_of_two
    elif form == _F32 and kind in _SMALL:
        make = partial(converted, stored=kind, dtype="f32")
    else:
        return None
    made[SCALES] = Made("scales", "f32", 4 * (part.nbytes or 0), make)
    return "f32"


def _grid(obj: Object, group: int, axis: int) -> Grid:
    shape, last = obj.shape, len(obj.shape) - 1
    if not group:
        if obj.parts["scales"].nbytes != _bytes_of_scales(obj, shape[axis]):
            return Group(1)  # one for each element
        if len(shape) == 2 and axis == 0:
            return ROW
        return Blocks(tuple(1 if dimension == axis else size for dimension, size in enumerate(shape)))
    if axis == last:
        return ROW if group == shape[axis] else Group(group)
    return Blocks(tuple(group if dimension == axis else 1 for dimension in range(len(shape))))


def _bytes_of_scales(obj: Object, count: int) -> int | None:
    part = obj.parts["scales"]
    return nbytes_of(part.dtype, stated(part.type), count)


def _packing(shape: Shape, bits: int, order: str, word: str) -> str | None:
    """Return what one stream of words is here; None where bytes of a word are in another order than codes, and where a
    row begins within a byte whose first code lies in the high bits."""
    whole = shape[-1] * bits % 8 == 0
    if order == _LSB:
        return ROWS_LSB if whole else FLAT_LSB
    return ROWS_MSB if whole and word == "u8" else None


def _turned(obj: Object, bits: int, word: str, made: dict[str, Made]) -> str:
    """Return the packing of codes that are made of words whose first code lies in the high bits."""
    width, nbytes = ITEM_BYTES[word], obj.parts["data"].nbytes or 0
    if obj.shape[-1] * bits % 8 == 0:
        made[CODES] = Made("data", "u8", nbytes, partial(turned_words, width=width))
        return ROWS_MSB
    own = -(-prod(obj.shape) * bits // 8)
    made[CODES] = Made("data", "u8", own, partial(turned_codes, width=width, bits=bits))
    return FLAT_LSB


def _zero(obj: Object, layout: AffineLayout, made: dict[str, Made]) -> Zero | None:
    """Return the kind of zero points; None for those of which no floats can be made."""
    point = (stated(obj.attributes) or {})["zero_point"]
    if point["form"] == "none":
        return NO_ZERO
    low, value = int(layout.no_zero), point.get("value")
    if point["form"] == "implied" and low <= value < low + (1 << layout.bits):
        return Constant(value)
    count, part = layout.scale_count(tuple(obj.shape)), obj.parts.get("zeros")
    make: Callable[[bytes], bytes] | None
    if part is None:
        make = partial(same, value=value, count=count, dtype=layout.scales) if holds(value, layout.scales) else None
    elif point["packing"] == _PLAIN and (part.dtype, stated(part.type)) == (layout.scales, None):
        return POINTS if part.nbytes == nbytes_of(part.dtype, None, count) else None
    else:
        make = _zeros_read(obj, layout, count)
    if make is None:
        return None
    stored = "scales" if part is None else "zeros"
    made[ZEROS] = Made(stored, layout.scales, count * DTYPES[layout.scales].bits // 8, make)
    return POINTS


def _zeros_read(obj: Object, layout: AffineLayout, count: int) -> Callable[[bytes], bytes] | None:
    """Return what makes floats of stored zero points; None where these are of a type that says no numbers here."""
    attributes, part = stated(obj.attributes) or {}, obj.parts["zeros"]
    packing = attributes["packing"]
    dtype, kind = types_here(part.dtype, stated(part.type))
    if attributes["zero_point"]["packing"] == _PLAIN or packing["per_word"] == 1:
        known = kind in _SMALL if kind else dtype != "bool"
        known = known and part.nbytes == nbytes_of(part.dtype, stated(part.type), count)  # else it means two things
        return partial(converted, stored=kind or dtype, dtype=layout.scales) if known else None
    word, high = packing["word"], packing["order"] == _MSB
    if kind is not None or dtype not in (word, f"i{word[1:]}") or (part.nbytes or 0) * 8 < count * layout.bits:
        return None
    width, bits = ITEM_BYTES[word], layout.bits
    return partial(unpacked, width=width, bits=bits, count=count, dtype=layout.scales, high_first=high)


def write_group(spec: TensorSpec) -> Written | None:
    """Return what says of the integers; None for what the profile has no words for: offsets, other numbers of bits, the
    last group of a row that is shorter, tiles, signed codes that share a byte."""
    layout, shape = _layout_of(spec), spec.shape
    if layout is None or not shape or not prod(shape) or layout.matrix is not None or layout.bits not in (2, 4, 8):
        return None
    if isinstance(layout.zero, Offsets) or (layout.signed and layout.bits != 8):
        return None
    order = _MSB if layout.msb else _LSB
    if _packing(shape, layout.bits, order, "u8") != layout.packing or prod(shape) * layout.bits % 8:
        return None
    found = _along(layout.grid, shape)
    if found is None:
        return None
    group, axis = found
    own = {
        "bits": layout.bits,
        "group_size": group,
        "axis": axis,
        "packing": {"word": "u8", "order": order, "per_word": 8 // layout.bits},
        "scale_form": _F32,
        "zero_point": _point(layout.zero),
    }
    roles = {CODES: "data", SCALES: "scales", ZEROS: "zeros"}
    types: Mapping[str, tuple[str, str | None]] = {CODES: ("i8" if layout.signed else "u8", None)}
    return Written(QUANT_GROUP, {**others(spec, layout.attributes()), **own}, roles, types)


def _layout_of(spec: TensorSpec) -> AffineLayout | None:
    """Return the layout; None where it is not right, or parts are not what it says."""
    try:
        layout = AffineLayout.of(spec)
    except CodecError:
        return None
    expected = {part.role: (part.dtype, part.type, part.nbytes) for part in layout.part_specs(spec.shape)}
    return layout if expected == {part.role: (part.dtype, part.type, part.nbytes) for part in spec.parts} else None


def _along(grid: Grid, shape: Shape) -> tuple[int, int] | None:
    """Return the elements of a group, and the axis along which it lies."""
    if grid == ROW:
        return shape[-1], len(shape) - 1
    if isinstance(grid, Group):
        return None if shape[-1] % grid.columns else (grid.columns, len(shape) - 1)
    if isinstance(grid, Blocks):
        along = [axis for axis, size in enumerate(grid.shape) if size > 1]
        return (grid.shape[along[0]], along[0]) if len(along) == 1 else None
    return None


def _point(zero: Zero) -> dict[str, Any]:
    if isinstance(zero, NoZero):
        return {"form": "none"}
    if isinstance(zero, Constant):
        return {"form": "implied", "value": zero.point}
    return {"form": "tensor", "packing": _PLAIN}
