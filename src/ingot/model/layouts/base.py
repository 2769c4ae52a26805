"""The protocol of layouts, and typed access to the attributes from which layouts are read.

A layout contains everything that a decoder needs besides the shape and the bytes of the parts. Files store it as the
attributes of a tensor. Only the methods ``from_tensor`` and ``attributes`` convert between the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol, runtime_checkable

from ingot.core.numeric.dtypes import LARGEST, MAX_RANK
from ingot.errors import CodecError
from ingot.model.spec import PartSpec

_FILE_IDS = {"affine": "quantized_group"}  # zTensor 1.2 section 3
_CODECS = {stored: codec for codec, stored in _FILE_IDS.items()}
# The prefix of unsupported ids that look like Ingot's ids: they stay unsupported and are written back unchanged.
_FOREIGN = "~"


def file_id(codec: str) -> str:
    """Return the id of a codec in files. For most codecs, it is the codec's name."""
    return codec[1:] if codec.startswith(_FOREIGN) else _FILE_IDS.get(codec, codec)


def resolve_codec(text: Any) -> Any:
    """Return the name of a codec that the user gave by its name or by its id in files."""
    return _CODECS.get(text, text) if isinstance(text, str) else text


def codec_of(stored: str) -> str:
    """Return the name of the codec for an id in a file.

    ``file_id`` converts the name back to the same id, even if Ingot does not support the codec.
    """
    if stored in _FILE_IDS or stored.startswith(_FOREIGN):
        return _FOREIGN + stored
    return _CODECS.get(stored, stored)


Shape = tuple[int, ...]


class LayoutSource(Protocol):
    """The attributes of a ``Tensor`` or ``TensorSpec`` from which a layout is read.

    ``part_dtypes`` are storage types by role. ``part_nbytes`` are decoded bytes by role; None if the size depends on
    the values.
    """

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> Shape: ...
    @property
    def dtype(self) -> str: ...
    @property
    def codec(self) -> str: ...
    @property
    def params(self) -> Mapping[str, Any]: ...
    @property
    def part_dtypes(self) -> Mapping[str, str]: ...
    @property
    def part_nbytes(self) -> Mapping[str, int | None]: ...


class Layout(Protocol):
    """A frozen value with everything that a decoder needs besides the shape and the bytes of the parts."""

    @property
    def codec(self) -> str:
        """The id of the codec that decodes the layout."""
        ...

    def attributes(self) -> dict[str, Any]:
        """Return the JSON-like attributes of the tensor in files, in the order in which they are written."""
        ...


@runtime_checkable
class Storable(Layout, Protocol):
    """A layout that lists its parts."""

    @property
    def dtype(self) -> str:
        """Logical element type."""
        ...

    def part_specs(self, shape: Shape) -> tuple[PartSpec, ...]:
        """Return the raw parts of a tensor of ``shape``, in order."""
        ...


def is_rows_first(layout: Layout) -> bool:
    """Return whether a container that supports ``layout`` should store its numbers row by row instead, if possible.

    Classes state it as ``rows_first``, which is set for packings of other programs.
    """
    return bool(getattr(layout, "rows_first", False))


@dataclass(frozen=True, slots=True)
class OtherLayout:
    """The layout of a codec that Ingot does not support, or whose attributes only the codec itself interprets."""

    codec: str
    params: Mapping[str, Any]

    def attributes(self) -> dict[str, Any]:
        """Return the attributes unchanged."""
        return dict(self.params)


@dataclass(frozen=True, slots=True)
class TensorInLayout:
    """A ``LayoutSource`` of a tensor in a layout that differs from the stored one."""

    name: str
    shape: Shape
    layout: Storable

    @property
    def dtype(self) -> str:
        return self.layout.dtype

    @property
    def codec(self) -> str:
        return self.layout.codec

    @property
    def params(self) -> Mapping[str, Any]:
        return self.layout.attributes()

    @property
    def part_dtypes(self) -> Mapping[str, str]:
        return {part.role: part.dtype for part in self.layout.part_specs(self.shape)}

    @property
    def part_nbytes(self) -> Mapping[str, int | None]:
        return {part.role: part.nbytes for part in self.layout.part_specs(self.shape)}


class Attributes:
    """Typed access to attributes of untrusted files. Invalid attributes raise ``CodecError`` with one rule."""

    def __init__(self, attributes: Mapping[str, Any], rule: str, location: str) -> None:
        self._attributes = attributes
        self._rule = rule
        self._location = location

    def refuse(self, expected: str, value: object) -> CodecError:
        """Return the error for an invalid attribute."""
        return CodecError(self._rule, f"expected {expected}, found {str(value)[:80]!r}", where=self._location)

    def has(self, key: str) -> bool:
        return key in self._attributes

    def integers(self, key: str, low: int, high: int) -> tuple[int, ...]:
        """Return a list of at most ``MAX_RANK`` integers from ``low`` to ``high``."""
        value = self._attributes.get(key)
        if not isinstance(value, list | tuple) or len(value) > MAX_RANK:
            raise self.refuse(f"a list of whole numbers in attribute {key}", value)
        for item in value:
            if not isinstance(item, int) or isinstance(item, bool) or not low <= item <= high:
                raise self.refuse(f"numbers from {low} to {high} in attribute {key}", item)
        return tuple(value)

    def integer(self, key: str, low: int, high: int) -> int:
        value = self._attributes.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.refuse(f"attribute {key} from {low} to {high}", value)
        return value

    def number(self, key: str) -> float:
        """Return a finite number in the range of f32."""
        value = self._attributes.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= LARGEST["f32"]:
            raise self.refuse(f"a finite number in attribute {key}", value)
        return float(value)

    def boolean(self, key: str) -> bool:
        value = self._attributes.get(key)
        if not isinstance(value, bool):
            raise self.refuse(f"attribute {key} true or false", value)
        return value

    def text(self, key: str) -> str:
        value = self._attributes.get(key)
        if not isinstance(value, str):
            raise self.refuse(f"text in attribute {key}", value)
        return value

    def choice(self, key: str, choices: tuple[str, ...]) -> str:
        value = self.text(key)
        if value not in choices:
            raise self.refuse(f"attribute {key} {' or '.join(choices)}", value)
        return value

    def mapping(self, key: str) -> Mapping[str, Any]:
        value = self._attributes.get(key)
        if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
            raise self.refuse(f"a map in {key}", value)
        return value


def element_count(shape: Shape) -> int:
    """Return the number of elements of a valid shape."""
    return prod(shape)


def matrix_shape(shape: Shape) -> tuple[int, int]:
    """Return a shape as (rows, columns): the last dimension is the columns, the others are flattened into rows."""
    return (prod(shape[:-1]), shape[-1]) if shape else (1, 1)
