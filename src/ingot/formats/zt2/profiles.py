"""Layout profiles (section 5 of the zt2 specification), and the codecs, roles and attributes that correspond to them.

If a profile is unknown, or if no codec can express it, the profile's id is used as the codec. The tensor's parts can
then be listed and copied, but not decoded. If a profile of the public registry can express a tensor's layout, Ingot
writes this profile, which other programs can read. Otherwise Ingot writes its own profile ``ingot.CODEC/1`` with the
attributes on the codec's specification page.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import prod
from typing import Any, NamedTuple

from ingot.errors import FormatError, UnsupportedError
from ingot.formats.zt2.checks import extra_attributes, number, refuse, require_parts, require_size
from ingot.formats.zt2.made import ConvertedPart, expand_blocks
from ingot.formats.zt2.manifest import Object, optional_value
from ingot.formats.zt2.profile_group import QUANT_GROUP, check_group, read_group, write_group
from ingot.formats.zt2.types import ITEM_BYTES, StoredForm, WrittenForm, nbytes_of
from ingot.model.layouts.affine import AffineLayout, Group
from ingot.model.layouts.dense import DenseLayout
from ingot.model.layouts.ggml import BLOCKS, TYPES, GgmlBlocksLayout
from ingot.model.layouts.scaled_codebook import INDICES, LOW_FIRST, SCALES, VALUES, ScaledCodebookLayout, Tiles
from ingot.model.layouts.sparse import CooLayout, CsrLayout
from ingot.model.spec import TensorSpec


def check_csr(location: str, obj: Object) -> None:
    """Check the three parts of a CSR matrix: one row pointer more than rows, and one column index per value."""
    if len(obj.shape) != 2:
        raise refuse(location, f"two dimensions, found shape {list(obj.shape)}")
    require_parts(location, obj, {"values", "indices", "indptr"})
    width = _index_width(location, obj, "indices")
    if obj.parts["indptr"].dtype != obj.parts["indices"].dtype or optional_value(obj.parts["indptr"].type) is not None:
        raise refuse(location, "indptr of the type of indices, and of no logical type")
    require_size(location, obj, "indptr", (obj.shape[0] + 1) * width)
    _require_values(location, obj, *divmod(obj.parts["indices"].nbytes, width))


def check_coo(location: str, obj: Object) -> None:
    """Check that there are coordinates for every dimension of the shape, and one coordinate tuple per value."""
    rank = len(obj.shape)
    if rank < 1:
        raise refuse(location, "at least one dimension, found a scalar")
    require_parts(location, obj, {"values", "coords"})
    width = _index_width(location, obj, "coords")
    _require_values(location, obj, *divmod(obj.parts["coords"].nbytes, width * rank))


def read_csr(obj: Object) -> dict[str, Any]:
    """Return the attributes of the CSR codec.

    ``ascending`` is true, because the profile requires ascending column indices in every row.
    """
    return {**(optional_value(obj.attributes) or {}), "ascending": True}


def read_coo(obj: Object) -> dict[str, Any]:
    """Return the attributes of the COO codec: those of the object, because the profile defines none."""
    return dict(optional_value(obj.attributes) or {})


def write_csr(spec: TensorSpec) -> dict[str, Any]:
    """Return the attributes with which the compressed sparse rows ``spec`` are written.

    Raises ``UnsupportedError`` ``zt2.csr-order`` if the tensor does not declare that columns ascend in every row.
    """
    if not CsrLayout.from_tensor(spec).ascending:
        raise UnsupportedError(
            "expected columns that ascend in every row, which zt.sparse_csr/1 requires; the tensor does not declare it",
            rule="zt2.csr-order",
        )
    return {key: value for key, value in spec.params.items() if key != "ascending"}


def _index_width(location: str, obj: Object, role: str) -> int:
    part = obj.parts[role]
    if part.dtype not in ("u32", "u64") or optional_value(part.type) is not None:
        raise refuse(location, f"{role} of u32 or u64, found {optional_value(part.type) or part.dtype}")
    return ITEM_BYTES[part.dtype]


def _require_values(location: str, obj: Object, count: int, remainder: int) -> None:
    """Check that the number of values equals the number of positions, if the size of a value is known."""
    if remainder:
        raise FormatError("zt2.size", f"expected complete positions, found {remainder} extra bytes", where=location)
    values = obj.parts["values"]
    require_size(location, obj, "values", nbytes_of(values.dtype, optional_value(values.type), count))


GGUF = re.compile(r"gguf\.([a-z0-9_]{1,32})/1").fullmatch
MX = "zt.mx/1"
_ELEMENTS = "elems_per_block"
_BYTES = "block_bytes"
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
    elements = number(location, obj, _ELEMENTS, 1)
    nbytes = number(location, obj, _BYTES, 1)
    count = prod(obj.shape)
    if count % elements:
        raise refuse(location, f"whole blocks of {elements} elements, found {count} elements")
    require_size(location, obj, "data", count // elements * nbytes)


def read_gguf(obj: Object) -> StoredForm | None:
    """Return the tensor as a codec with its parts; None for an unknown type, or an unknown size of its blocks."""
    match = GGUF(obj.layout)
    attributes = dict(optional_value(obj.attributes) or {})
    block = TYPES.get(match[1]) if match else None
    constants = (attributes.pop(_ELEMENTS), attributes.pop(_BYTES))
    if match is None or block is None or constants != block[:2] or (obj.shape or (1,))[-1] % block.elements:
        return None
    return StoredForm(
        GgmlBlocksLayout.codec, {**attributes, **GgmlBlocksLayout(match[1]).attributes()}, {"data": BLOCKS}
    )


def write_gguf(spec: TensorSpec) -> WrittenForm:
    """Return the tensor as the profile of its block type."""
    layout = GgmlBlocksLayout.from_tensor(spec)
    constants = {_ELEMENTS: layout.block.elements, _BYTES: layout.block.nbytes}
    return WrittenForm(
        f"gguf.{layout.type}/1", {**extra_attributes(spec, layout.attributes()), **constants}, {BLOCKS: "data"}
    )


def check_mx(location: str, obj: Object) -> None:
    """Check the parts of a tensor of small floats that share an exponent in blocks along an axis."""
    require_parts(location, obj, {"data", "scales"})
    data = obj.parts["data"]
    scales = obj.parts["scales"]
    attributes = optional_value(obj.attributes) or {}
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
    axis = attributes.pop("axis", last)
    block = attributes.pop("block_size")
    del attributes["scale_form"]
    if values is None:
        return None
    grid: Group | Tiles = Group(block) if axis == last else Tiles(block, 1) if axis == last - 1 else Group(1)
    converted = {}
    if axis < last - 1:
        expand = partial(expand_blocks, shape=tuple(obj.shape), axis=axis, block=block)
        converted[SCALES] = ConvertedPart(SCALES, "u8", prod(obj.shape), expand, _E8M0)
    layout = _layout(values, grid, str(attributes.pop("dtype", "f32")))
    types = {INDICES: ("u8", None)}
    roles = {"data": INDICES, "scales": SCALES}
    return StoredForm(layout.codec, {**attributes, **layout.attributes()}, roles, types, converted)


def _layout(values: str, grid: Group | Tiles, dtype: str) -> ScaledCodebookLayout:
    return ScaledCodebookLayout(VALUES[values], grid, dtype, scales=_E8M0, values=values, factor=_FACTORS.get(values))


def write_mx(spec: TensorSpec) -> WrittenForm | None:
    """Return the tensor as a profile if its codes are small floats, or i8 with exponents; None for other scaled
    codebooks."""
    layout = ScaledCodebookLayout.from_tensor(spec)
    last = len(spec.shape) - 1
    stored = {values: element_types for element_types, values in _VALUES.items()}.get(layout.values or "")
    if stored is None or layout.order != LOW_FIRST or last < 0:
        return None
    match layout.grid:
        case Group(columns):
            block = columns
            axis = last
        case Tiles(tall, 1) if last and not spec.shape[-2] % tall:
            block = tall
            axis = last - 1
        case _:
            return None
    if block < _MIN_BLOCK or layout != _layout(str(layout.values), layout.grid, layout.dtype):
        return None
    profile_attributes = {"block_size": block, "axis": axis, "scale_form": "e8m0_exponent"}
    attributes = {**extra_attributes(spec, layout.attributes()), **profile_attributes}
    return WrittenForm(MX, attributes, {INDICES: "data", SCALES: "scales"}, {INDICES: stored})


_INGOT_PROFILE = re.compile(r"ingot\.(.+)/1", re.DOTALL).fullmatch
# Prefix of an id without namespace and version, which could equal the id of a codec.
_NAMELESS = "zt2:"
_NAMESPACED = re.compile(r"[^./]+\..+/[0-9]+", re.DOTALL).fullmatch


class Profile(NamedTuple):
    """A layout profile of the registry: the rules of its metadata, and its conversions from and to a codec.

    ``read`` returns None if no codec can express the object. ``write`` returns None if the profile cannot express the
    tensor; ``codec`` is the only codec that it accepts.
    """

    check: Callable[[str, Object], None]
    read: Callable[[Object], StoredForm | None]
    codec: str
    write: Callable[[TensorSpec], WrittenForm | None]


PROFILES: Mapping[str, Profile] = {
    "zt.sparse_csr/1": Profile(
        check_csr,
        lambda obj: StoredForm(CsrLayout.codec, read_csr(obj)),
        CsrLayout.codec,
        lambda spec: WrittenForm("zt.sparse_csr/1", write_csr(spec)),
    ),
    "zt.sparse_coo/1": Profile(
        check_coo,
        lambda obj: StoredForm(CooLayout.codec, read_coo(obj)),
        CooLayout.codec,
        lambda spec: WrittenForm("zt.sparse_coo/1", dict(spec.params)),
    ),
    MX: Profile(check_mx, read_mx, ScaledCodebookLayout.codec, write_mx),
    QUANT_GROUP: Profile(check_group, read_group, AffineLayout.codec, write_group),
}


_GGUF = Profile(check_gguf, read_gguf, GgmlBlocksLayout.codec, write_gguf)


def _profile(layout: str) -> Profile | None:
    return _GGUF if GGUF(layout) else PROFILES.get(layout)


def written_forms(spec: TensorSpec) -> Iterator[WrittenForm]:
    """Yield the forms in which a tensor can be written, the best first; a reader must read the same tensor from
    them."""
    if spec.codec == DenseLayout.codec:
        yield WrittenForm(DenseLayout.codec, dict(spec.params))
        return
    for profile in (*PROFILES.values(), _GGUF):
        written = profile.write(spec) if profile.codec == spec.codec else None
        if written is not None:
            yield written
    if spec.codec in (CsrLayout.codec, CooLayout.codec):
        return  # tensors that these profiles cannot express would need another codec
    foreign = _NAMESPACED(spec.codec) is not None or spec.codec.startswith(_NAMELESS)
    layout = spec.codec.removeprefix(_NAMELESS) if foreign else f"ingot.{spec.codec}/1"
    yield WrittenForm(layout, dict(spec.params))


def check_profile(location: str, obj: Object) -> None:
    """Check the metadata rules of a known profile; raises ``FormatError`` ``zt2.layout``, ``zt2.size``."""
    profile = _profile(obj.layout)
    if profile is not None:
        profile.check(location, obj)


def stored_form(obj: Object) -> StoredForm:
    """Return the codec, attributes and parts with which Ingot reads the valid ``obj``."""
    attributes = obj.attributes if isinstance(obj.attributes, dict) else {}
    if obj.layout == DenseLayout.codec:
        return StoredForm(DenseLayout.codec, attributes)
    ingot_codec = _INGOT_PROFILE(obj.layout)
    if ingot_codec is not None:
        return StoredForm(ingot_codec[1], attributes)
    profile = _profile(obj.layout)
    stored = None if profile is None else profile.read(obj)
    if stored is not None:
        return stored
    return StoredForm(obj.layout if _NAMESPACED(obj.layout) else f"{_NAMELESS}{obj.layout}", attributes)
