"""The profile ``zt.quant_group/1`` (codec ``affine``); the codec needs integers in one stream of bits, zero points
as floats."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

from ingot.core.numeric.dtypes import DTYPES
from ingot.errors import CodecError, FormatError
from ingot.formats.zt2.checks import extra_attributes, number, refuse, require_parts, require_size
from ingot.formats.zt2.made import (
    ConvertedPart,
    convert,
    is_exact,
    powers_of_two,
    repeat_value,
    reverse_codes,
    reverse_words,
    unpack,
)
from ingot.formats.zt2.manifest import Object, optional_value
from ingot.formats.zt2.types import ITEM_BYTES, StoredForm, WrittenForm, nbytes_of, types_from_file
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
_F32 = "f32_factors"
_NARROW = "f16_factors"
_EXPONENT = "e8m0_exponent"
_SMALL = ("f8_e4m3fn", "f8_e5m2")
_LSB = "lsb_first"
_MSB = "msb_first"
_PLAIN = "plain"
_PACKED = "same_as_data"


def _map(location: str, obj: Object, key: str) -> Mapping[str, Any]:
    value = (optional_value(obj.attributes) or {}).get(key)
    if not isinstance(value, dict):
        raise refuse(location, f"attribute {key}, a map, found {str(value)[:40]!r}")
    return value


def _require_choice(location: str, values: Mapping[str, Any], key: str, allowed: tuple[str, ...]) -> str:
    value = values.get(key)
    if value not in allowed:
        raise refuse(location, f"{key} {', '.join(allowed)}, found {str(value)[:40]!r}")
    return str(value)


def check_group(location: str, obj: Object) -> None:
    """Check that codes fill complete words, with a scale for each group along an axis, and the declared zero points."""
    bits = number(location, obj, "bits", 2)
    group = number(location, obj, "group_size", 0)
    axis, packing, zero = (
        number(location, obj, "axis", 0),
        _map(location, obj, "packing"),
        _map(location, obj, "zero_point"),
    )
    zero_form = _require_choice(location, zero, "form", ("none", "implied", "tensor"))
    require_parts(location, obj, {"data", "scales", *(("zeros",) if zero_form == "tensor" else ())})
    word = _require_choice(location, packing, "word", ("u8", "u16", "u32", "u64"))
    per_word = packing.get("per_word")
    _require_choice(location, packing, "order", (_LSB, _MSB))
    width = ITEM_BYTES[word]
    if bits not in _BITS or 8 * width % bits or type(per_word) is not int or per_word != 8 * width // bits:
        raise refuse(location, f"codes of 2, 4 or 8 bits that fill words of {word}, found {bits} and {per_word!s:.20}")
    if obj.parts["data"].dtype not in (word, f"i{word[1:]}"):
        raise refuse(location, f"data of {word}, found {obj.parts['data'].dtype}")
    if axis >= len(obj.shape) or (group and obj.shape[axis] % group):
        raise refuse(location, f"an axis in whole groups of {group}, found axis {axis} of {list(obj.shape)}")
    if zero_form == "implied" and type(zero.get("value")) is not int:
        raise refuse(location, f"zero_point with an integer value, found {str(zero.get('value'))[:40]!r}")
    codes = prod(obj.shape)
    if codes % per_word:
        raise FormatError("zt2.size", f"expected whole words of {per_word} codes, found {codes} codes", where=location)
    require_size(location, obj, "data", codes // per_word * width)
    _check_scales(location, obj, group, axis)
    if zero_form == "tensor" and _require_choice(location, zero, "packing", (_PLAIN, _PACKED)) == _PLAIN:
        _require_count(location, obj, "zeros", _counts(obj, group, axis))
    elif zero_form == "tensor":
        words = {-(-count // per_word) * width for count in _counts(obj, group, axis)}
        if obj.parts["zeros"].nbytes not in words:
            raise FormatError("zt2.size", f"expected {min(words)} bytes of zeros", where=location)


def _check_scales(location: str, obj: Object, group: int, axis: int) -> None:
    scale_form = _require_choice(
        location, optional_value(obj.attributes) or {}, "scale_form", (_F32, _NARROW, _EXPONENT)
    )
    part = obj.parts["scales"]
    scale_type = optional_value(part.type) or part.dtype
    if (scale_type != "f8_e8m0") if scale_form == _EXPONENT else scale_type[0] in "iu":
        raise refuse(
            location, f"scales of floats, of f8_e8m0 for {_EXPONENT}; found {scale_type[:40]} for {scale_form}"
        )
    _require_count(location, obj, "scales", _counts(obj, group, axis))


def _counts(obj: Object, group: int, axis: int) -> set[int]:
    """Return the numbers of scales that the document allows for a tensor; there may be two.

    Without groups, the document contradicts itself: its text requires one scale per index along the axis, but its
    formula requires one scale per element.
    """
    if group:
        return {prod(obj.shape) // group}
    return {obj.shape[axis], prod(obj.shape)}


def _require_count(location: str, obj: Object, role: str, counts: set[int]) -> None:
    part = obj.parts[role]
    sizes = {nbytes_of(part.dtype, optional_value(part.type), count) for count in counts}
    if None not in sizes and part.nbytes not in sizes:
        raise FormatError(
            "zt2.size",
            f"expected {min(size or 0 for size in sizes)} bytes of {role}, found {part.nbytes}",
            where=location,
        )


def read_group(obj: Object) -> StoredForm | None:
    """Return the tensor as a codec with its parts; None if the document is ambiguous.

    The document is ambiguous for codes without a zero point that share a signed word, and for f32 scales whose
    ``scale_form`` declares f16.
    """
    attributes = dict(optional_value(obj.attributes) or {})
    bits, group, axis, packing, scale_form, point = (attributes.pop(key) for key in _KEYS)
    if not group and not prod(obj.shape):
        return None
    signed = _signed(obj, packing["per_word"], point)
    converted = dict[str, ConvertedPart]()
    scales = _scales(obj, scale_form, converted)
    if signed is None or scales is None:
        return None
    order = _packing(obj.shape, bits, packing["order"], packing["word"])
    if order is None:
        order = _convert_codes(obj, bits, packing["word"], converted)
    grid = _grid(obj, group, axis)
    layout_without_zero = AffineLayout(bits, grid, order, signed, NO_ZERO, "f32", scales)
    zero = _zero(obj, layout_without_zero, converted)
    if zero is None:
        return None
    dtype = attributes.pop("dtype", "f32" if scale_form != _NARROW else scales)
    layout = replace(layout_without_zero, zero=zero, dtype=str(dtype))
    roles = {"data": CODES, "scales": SCALES, **({"zeros": ZEROS} if "zeros" in obj.parts else {})}
    return StoredForm(layout.codec, {**attributes, **layout.attributes()}, roles, {CODES: ("u8", None)}, converted)


def _signed(obj: Object, per_word: int, point: Mapping[str, Any]) -> bool | None:
    """Return whether the codes of ``obj`` are signed, ``per_word`` of them in a word; None if that is ambiguous.

    Codes that fill a signed word are signed. If several codes share a signed word, a zero point shows that they are
    unsigned; without one it is ambiguous.
    """
    if not obj.parts["data"].dtype.startswith("i"):
        return False
    if per_word == 1:
        return True
    return False if point["form"] == "tensor" or point.get("value", 0) > 0 else None


def _scales(obj: Object, scale_form: str, converted: dict[str, ConvertedPart]) -> str | None:
    """Return the type of scales that the codec gets: the stored type, or f32 for exponents and small floats.

    A conversion is added to ``converted``. Returns None if the codec supports no such scales.
    """
    part = obj.parts["scales"]
    dtype, type_ = types_from_file(part.dtype, optional_value(part.type))
    if type_ is None and dtype in SCALE_DTYPES:
        return None if scale_form == _NARROW and dtype == "f32" else dtype
    if scale_form == _EXPONENT:
        convert_bytes: Callable[[bytes], bytes] = powers_of_two
    elif scale_form == _F32 and type_ in _SMALL:
        convert_bytes = partial(convert, stored=type_, dtype="f32")
    else:
        return None
    converted[SCALES] = ConvertedPart("scales", "f32", 4 * (part.nbytes or 0), convert_bytes)
    return "f32"


def _grid(obj: Object, group: int, axis: int) -> Grid:
    shape, last = obj.shape, len(obj.shape) - 1
    if not group:
        if obj.parts["scales"].nbytes != _bytes_of_scales(obj, shape[axis]):
            return Group(1)  # a scale for each element
        if len(shape) == 2 and axis == 0:
            return ROW
        return Blocks(tuple(1 if dimension == axis else size for dimension, size in enumerate(shape)))
    if axis == last:
        return ROW if group == shape[axis] else Group(group)
    return Blocks(tuple(group if dimension == axis else 1 for dimension in range(len(shape))))


def _bytes_of_scales(obj: Object, count: int) -> int | None:
    part = obj.parts["scales"]
    return nbytes_of(part.dtype, optional_value(part.type), count)


def _packing(shape: Shape, bits: int, order: str, word: str) -> str | None:
    """Return the packing of codes in one stream of words; None if the codes must be reordered.

    If the first code is in the high bits, codes must be reordered in two cases: a word has several bytes, so that the
    bytes have the opposite order, or a row begins within a byte.
    """
    has_full_bytes = shape[-1] * bits % 8 == 0
    if order == _LSB:
        return ROWS_LSB if has_full_bytes else FLAT_LSB
    return ROWS_MSB if has_full_bytes and word == "u8" else None


def _convert_codes(obj: Object, bits: int, word: str, converted: dict[str, ConvertedPart]) -> str:
    """Add the conversion of codes to ``converted``; return the packing of the result.

    In the stored words, the first code is in the high bits.
    """
    width = ITEM_BYTES[word]
    nbytes = obj.parts["data"].nbytes or 0
    if obj.shape[-1] * bits % 8 == 0:
        converted[CODES] = ConvertedPart("data", "u8", nbytes, partial(reverse_words, width=width))
        return ROWS_MSB
    nbytes_of_codes = -(-prod(obj.shape) * bits // 8)
    converted[CODES] = ConvertedPart("data", "u8", nbytes_of_codes, partial(reverse_codes, width=width, bits=bits))
    return FLAT_LSB


def _zero(obj: Object, layout: AffineLayout, converted: dict[str, ConvertedPart]) -> Zero | None:
    """Return the zero points of the layout; None if they cannot be converted to floats.

    A conversion is added to ``converted``.
    """
    point = (optional_value(obj.attributes) or {})["zero_point"]
    if point["form"] == "none":
        return NO_ZERO
    low = int(layout.no_zero)
    value = point.get("value")
    if point["form"] == "implied" and low <= value < low + (1 << layout.bits):
        return Constant(value)
    count = layout.scale_count(tuple(obj.shape))
    part = obj.parts.get("zeros")
    convert_bytes: Callable[[bytes], bytes] | None
    if part is None:
        convert_bytes = (
            partial(repeat_value, value=value, count=count, dtype=layout.scales)
            if is_exact(value, layout.scales)
            else None
        )
    elif point["packing"] == _PLAIN and (part.dtype, optional_value(part.type)) == (layout.scales, None):
        return POINTS if part.nbytes == nbytes_of(part.dtype, None, count) else None
    else:
        convert_bytes = _zero_converter(obj, layout, count)
    if convert_bytes is None:
        return None
    stored = "scales" if part is None else "zeros"
    converted[ZEROS] = ConvertedPart(stored, layout.scales, count * DTYPES[layout.scales].bits // 8, convert_bytes)
    return POINTS


def _zero_converter(obj: Object, layout: AffineLayout, count: int) -> Callable[[bytes], bytes] | None:
    """Return the conversion of stored zero points to floats; None if their type is unknown or ambiguous."""
    attributes = optional_value(obj.attributes) or {}
    part = obj.parts["zeros"]
    packing = attributes["packing"]
    dtype, type_ = types_from_file(part.dtype, optional_value(part.type))
    if attributes["zero_point"]["packing"] == _PLAIN or packing["per_word"] == 1:
        is_exact_type = type_ in _SMALL if type_ else dtype != "bool"
        is_exact_type = is_exact_type and part.nbytes == nbytes_of(
            part.dtype, optional_value(part.type), count
        )  # otherwise it is ambiguous
        return partial(convert, stored=type_ or dtype, dtype=layout.scales) if is_exact_type else None
    word = packing["word"]
    high = packing["order"] == _MSB
    if type_ is not None or dtype not in (word, f"i{word[1:]}") or (part.nbytes or 0) * 8 < count * layout.bits:
        return None
    width = ITEM_BYTES[word]
    bits = layout.bits
    return partial(unpack, width=width, bits=bits, count=count, dtype=layout.scales, high_first=high)


def write_group(spec: TensorSpec) -> WrittenForm | None:
    """Return the tensor as a profile; None if the profile cannot express the layout.

    It cannot express offsets, codes of other than 2, 4 or 8 bits, a shorter last group, tiles, or signed codes that
    share a byte.
    """
    layout = _layout_of(spec)
    shape = spec.shape
    if layout is None or not shape or not prod(shape) or layout.matrix is not None or layout.bits not in (2, 4, 8):
        return None
    if isinstance(layout.zero, Offsets) or (layout.signed and layout.bits != 8):
        return None
    order = _MSB if layout.msb else _LSB
    if _packing(shape, layout.bits, order, "u8") != layout.packing or prod(shape) * layout.bits % 8:
        return None
    group_and_axis = _group_and_axis(layout.grid, shape)
    if group_and_axis is None:
        return None
    group, axis = group_and_axis
    profile_attributes = {
        "bits": layout.bits,
        "group_size": group,
        "axis": axis,
        "packing": {"word": "u8", "order": order, "per_word": 8 // layout.bits},
        "scale_form": _F32,
        "zero_point": _zero_attribute(layout.zero),
    }
    roles = {CODES: "data", SCALES: "scales", ZEROS: "zeros"}
    types: Mapping[str, tuple[str, str | None]] = {CODES: ("i8" if layout.signed else "u8", None)}
    return WrittenForm(QUANT_GROUP, {**extra_attributes(spec, layout.attributes()), **profile_attributes}, roles, types)


def _layout_of(spec: TensorSpec) -> AffineLayout | None:
    """Return the layout; None if it is invalid or the parts differ from it."""
    try:
        layout = AffineLayout.from_tensor(spec)
    except CodecError:
        return None
    expected = {part.role: (part.dtype, part.type, part.nbytes) for part in layout.part_specs(spec.shape)}
    return layout if expected == {part.role: (part.dtype, part.type, part.nbytes) for part in spec.parts} else None


def _group_and_axis(grid: Grid, shape: Shape) -> tuple[int, int] | None:
    """Return the number of elements that share a scale, and the axis of the group; None if the grid has no
    single axis.
    """
    if grid == ROW:
        return shape[-1], len(shape) - 1
    if isinstance(grid, Group):
        return None if shape[-1] % grid.columns else (grid.columns, len(shape) - 1)
    if isinstance(grid, Blocks):
        axes = [axis for axis, size in enumerate(grid.shape) if size > 1]
        return (grid.shape[axes[0]], axes[0]) if len(axes) == 1 else None
    return None


def _zero_attribute(zero: Zero) -> dict[str, Any]:
    if isinstance(zero, NoZero):
        return {"form": "none"}
    if isinstance(zero, Constant):
        return {"form": "implied", "value": zero.point}
    return {"form": "tensor", "packing": _PLAIN}
