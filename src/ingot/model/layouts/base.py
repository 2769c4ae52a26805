"""What every layout is, and typed access to the attributes that layouts are read from.

A layout says everything that a decoder needs beside the shape and the parts' bytes. A file stores it as a tensor's
attributes; ``of`` and ``attributes`` of a layout's class are the only places where the two meet.
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
# Before an id from a file that is none of ours but reads like one: it stays unknown, and is written back as it was.
_FOREIGN = "~"


def file_id(codec: str) -> str:
    """Return the id that a file has for a codec: itself for nearly all."""
    return codec[1:] if codec.startswith(_FOREIGN) else _FILE_IDS.get(codec, codec)


def codec_named(text: Any) -> Any:
    """Return the codec that a person names: by its name, or by the id that files have for it."""
    return _CODECS.get(text, text) if isinstance(text, str) else text


def codec_of(stored: str) -> str:
    """Return the codec that an id of a file names; ``file_id`` gives the same id back, whatever it is."""
    if stored in _FILE_IDS or stored.startswith(_FOREIGN):
        return _FOREIGN + stored
    return _CODECS.get(stored, stored)


Shape = tuple[int, ...]


class Described(Protocol):
    """What a layout is read from: a ``Tensor`` or a ``TensorSpec``. ``part_dtypes`` are storage types by role,
    ``part_nbytes`` decoded bytes, None where only the bytes tell."""

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
    """A frozen value that says everything a decoder needs beside the shape and the parts' bytes."""

    @property
    def codec(self) -> str:
        """Id of the codec that decodes it."""
        ...

    def attributes(self) -> dict[str, Any]:
        """Return what a file stores as the tensor's attributes: JSON-like, in the order in which it is written."""
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
    """Whether this is a layout of other programs' files, whose class says ``rows_first``: containers that are none of
    theirs take its numbers row by row where they can, though they could hold them as they lie."""
    return bool(getattr(layout, "rows_first", False))


@dataclass(frozen=True, slots=True)
class OtherLayout:
    """The layout of a codec that only that codec's own family looks into, or that Ingot does not know."""

    codec: str
    params: Mapping[str, Any]

    def attributes(self) -> dict[str, Any]:
        """Return the attributes as they were read."""
        return dict(self.params)


@dataclass(frozen=True, slots=True)
class AsLaid:
    """A tensor as it would be described in a layout of its numbers that it is not stored in."""

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
    """Typed access to attributes that somebody else wrote; what does not fit is a ``CodecError`` of one rule."""

    def __init__(self, attributes: Mapping[str, Any], rule: str, where: str) -> None:
        self._attributes = attributes
        self._rule = rule
        self._where = where

    def refuse(self, expected: str, found: object) -> CodecError:
        """Return the error for an attribute that does not fit."""
        return CodecError(self._rule, f"expected {expected}, found {str(found)[:80]!r}", where=self._where)

    def has(self, key: str) -> bool:
        return key in self._attributes

    def integers(self, key: str, low: int, high: int) -> tuple[int, ...]:
        """Return a list of whole numbers from ``low`` to ``high``, at most ``MAX_RANK`` of them."""
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
        """Return a finite number that is an f32."""
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

    def choice(self, key: str, known: tuple[str, ...]) -> str:
        value = self.text(key)
        if value not in known:
            raise self.refuse(f"attribute {key} {' or '.join(known)}", value)
        return value

    def mapping(self, key: str) -> Mapping[str, Any]:
        value = self._attributes.get(key)
        if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
            raise self.refuse(f"a map in {key}", value)
        return value


def element_count(shape: Shape) -> int:
    """Return the number of elements of a checked shape."""
    return prod(shape)


def matrix_shape(shape: Shape) -> tuple[int, int]:
    """Return a shape as rows x columns: the last dimension is the columns, all others together the rows."""
    return (prod(shape[:-1]), shape[-1]) if shape else (1, 1)
