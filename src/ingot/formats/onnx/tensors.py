"""Constants of a graph: the fields of a TensorProto, the location of its numbers, and their encoding (onnx.proto3)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np

from ingot.core.numeric.dtypes import element_count
from ingot.core.parsing.wire import (
    BYTES,
    FIXED32,
    FIXED64,
    VARINT,
    Field,
    Node,
    Range,
    Segment,
    bytes_field,
    message_field,
    number_field,
)
from ingot.errors import FormatError
from ingot.formats.onnx.types import BY_CODE, DOUBLES, FLOATS, STRING, OnnxType
from ingot.formats.shared.numbers import ConvertedSource
from ingot.model.bytesource import ByteSource
from ingot.model.part import Part

DIMS = 1
DATA_TYPE = 2
SEGMENT = 3
NAME = 8
RAW = 9
EXTERNAL = 13
LOCATION = 14
_TYPED = (4, 5, 6, 7, 10, 11)
_FIXED = {FLOATS: (FIXED32, 4), DOUBLES: (FIXED64, 8)}  # wire type of a single number of these fields, and its bytes
_IN_FILE = 1
_DRIVE = re.compile(r"[A-Za-z]:")
_MAX_ENTRIES = 16


@dataclass(frozen=True, slots=True)
class External:
    """The location of numbers in another file: the file's name in the model, the offset, and the length if stated."""

    location: str
    offset: int
    length: int | None


@dataclass(frozen=True, slots=True, eq=False)
class Constant:
    """The numbers in a TensorProto, or in an attribute.

    ``message`` is the TensorProto or AttributeProto. ``raw`` is the byte range of the numbers in the model's file,
    ``external`` their location in another file. If both are None, the numbers are encoded one by one in the field
    ``field``.
    """

    name: str
    type: OnnxType
    dims: tuple[int, ...]
    message: Node
    raw: Range | None = None
    external: External | None = None
    field: int = 0

    @property
    def count(self) -> int:
        """The number of elements."""
        return prod(self.dims)

    @property
    def nbytes(self) -> int:
        """The number of bytes of the elements."""
        return self.type.nbytes(self.count)

    def part(self, model: ByteSource, files: Mapping[str, ByteSource], dtype: str = "", logical: str = "") -> Part:
        """Return the constant's numbers as a part; ``dtype`` and ``logical`` replace the constant's types."""
        location = f"{self.message.location}: {self.name}"
        storage = dtype or self.type.storage
        type = logical or (None if dtype or self.type.dtype == storage else self.type.dtype)
        if self.external is not None:
            source = files[self.external.location]
            return Part(storage, self.nbytes, source, self.external.offset, type=type, where=location)
        if self.raw is not None:
            return Part(storage, self.nbytes, model, self.raw.start, type=type, where=location)
        converted = ConvertedSource(lambda: typed_bytes(self), self.nbytes, location)
        return Part(storage, self.nbytes, converted, type=type, where=location)


def read_constant(message: Node, name: str | None = None) -> Constant | None:
    """Return the constant of a TensorProto; None if it contains text.

    Raises ``FormatError``: ``onnx.wire``, ``onnx.repeated-field``, ``onnx.utf8``, ``onnx.name``, ``onnx.type``,
    ``onnx.shape``, ``onnx.data``, ``onnx.data-size``, ``onnx.external-path``, ``onnx.external-entry``.
    """
    fields = message.select((DATA_TYPE, SEGMENT, NAME, RAW, LOCATION), (DIMS, EXTERNAL, *_TYPED))
    constant_name = name if name is not None else message.text(fields[NAME][0]) if fields[NAME] else ""
    location = f"{message.location}: {constant_name[:200]}"
    if not constant_name:
        raise FormatError("onnx.name", "expected a constant with a name, but it has none", where=message.location)
    code = message.number(fields[DATA_TYPE][0]) if fields[DATA_TYPE] else 0
    if code == STRING:
        return None
    if code not in BY_CODE:
        raise FormatError("onnx.type", f"expected an element type of ONNX, found type number {code}", where=location)
    dims = tuple(number for field in fields[DIMS] for number in message.varints(field))
    element_count(dims, "onnx.shape", location)
    type = BY_CODE[code]
    count = prod(dims)
    if fields[SEGMENT]:
        raise FormatError("onnx.data", "expected a complete constant, found a segment", where=location)
    constant = Constant(constant_name, type, dims, message)
    typed = [field for number in _TYPED for field in fields[number]]
    outside = bool(fields[LOCATION]) and message.number(fields[LOCATION][0]) == _IN_FILE
    if outside:
        if fields[RAW] or typed:
            raise FormatError("onnx.data", "expected numbers in the model or in a file, found both", where=location)
        return Constant(constant_name, type, dims, message, external=_external(message, fields[EXTERNAL], location))
    if fields[RAW]:
        field = fields[RAW][0]
        if field.wire_type != BYTES:
            raise message.refuse("bytes in raw_data", f"wire type {field.wire_type}")
        if typed:
            raise FormatError("onnx.data", "expected numbers in one field, found them in several", where=location)
        _require_size(field.end - field.start, type.nbytes(count), location)
        return Constant(constant_name, type, dims, message, raw=Range(field.start, field.end))
    return _typed(constant, fields[type.field], len(typed))


def read_numbers(message: Node, name: str, type: OnnxType, field: int, scalar: bool) -> Constant:
    """Return the constant for the numbers of an attribute, which are floats or 64-bit integers.

    Parameters
    ----------
    message : Node
        The AttributeProto.
    name : str
    type : OnnxType
    field : int
        The field that contains the numbers.
    scalar : bool
        Whether there is a single number without dimensions.

    Raises ``FormatError``: ``onnx.wire``, ``onnx.data-size``.
    """
    fields = message.select((), (field,))[field]
    constant = Constant(name, type, (), message, field=field)
    count = _count(message, fields, type, field)
    if scalar:
        _require_size(count, 1, f"{message.location}: {name[:200]}")
        return constant
    packed = type.field in _FIXED and len(fields) == 1 and fields[0].wire_type == BYTES
    raw = Range(fields[0].start, fields[0].end) if packed else None
    return Constant(name, type, (count,), message, raw=raw, field=field)


def _count(message: Node, fields: list[Field], type: OnnxType, field_number: int) -> int:
    """Return the number of elements that the fields of an attribute contain."""
    if type.field not in _FIXED:
        return sum(
            1 if field.wire_type == VARINT else int(np.count_nonzero(_payload(message, field) < 0x80))
            for field in fields
        )
    wire_type, width = _FIXED[type.field]
    if any(field.wire_type not in (wire_type, BYTES) or (field.end - field.start) % width for field in fields):
        raise message.refuse(f"numbers of {width} bytes in field {field_number}", "others")
    return sum(field.end - field.start for field in fields) // width


def _typed(constant: Constant, fields: list[Field], expected_fields: int) -> Constant:
    """Return the constant after a check that the field of its type contains the right number of elements."""
    type = constant.type
    message = constant.message
    location = f"{message.location}: {constant.name[:200]}"
    if expected_fields != len(fields):
        raise FormatError(
            "onnx.data", f"expected numbers in the field of {type.name}, found them in another field", where=location
        )
    if type.field in _FIXED:
        wire_type, width = _FIXED[type.field]
        if any(field.wire_type not in (wire_type, BYTES) or (field.end - field.start) % width for field in fields):
            raise message.refuse(f"numbers of {width} bytes in field {type.field}", "others")
        _require_size(sum(field.end - field.start for field in fields), constant.nbytes, location)
        if len(fields) == 1 and fields[0].wire_type == BYTES:
            field = fields[0]
            return Constant(constant.name, type, constant.dims, message, raw=Range(field.start, field.end))
        return constant
    # Elements of less than a byte are packed: several share a number, like bytes in ``raw_data``.
    expected = constant.nbytes if type.bits < 8 else constant.count
    numbers = 0
    for field in fields:
        numbers += 1 if field.wire_type == VARINT else int(np.count_nonzero(_payload(message, field) < 0x80))
    _require_size(numbers, expected, location)
    return constant


def _payload(message: Node, field: Field) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    if field.wire_type != BYTES:
        raise message.refuse(f"numbers in field {field.number}", f"wire type {field.wire_type}")
    return np.frombuffer(bytes(message.data[field.start : field.end]), np.uint8)


def _require_size(actual: int, expected: int, location: str) -> None:
    if actual != expected:
        raise FormatError(
            "onnx.data-size", f"expected {expected} bytes or numbers of data, found {actual}", where=location
        )


def typed_bytes(constant: Constant) -> bytes:
    """Convert the numbers in the field of their type to the encoding of ``raw_data``.

    Raises ``FormatError`` ``onnx.wire``, ``onnx.data``: a number that exceeds the type.
    """
    type = constant.type
    message = constant.message
    field_number = constant.field or type.field
    fields = message.select((), (field_number,))[field_number]
    if type.field in _FIXED:
        return b"".join(bytes(message.data[field.start : field.end]) for field in fields)
    values = [
        np.array([field.value], np.uint64) if field.wire_type == VARINT else _numbers(message, field)
        for field in fields
    ]
    width = max(type.bits, 8) // 8
    joined = np.concatenate(values) if values else np.empty(0, np.uint64)
    if width < 8:  # the bits are stored, with or without sign extension
        numbers = joined.view(np.int64)
        low = -(1 << (8 * width - 1))
        if bool(((numbers < low) | (numbers >= -2 * low)).any()):
            raise FormatError(
                "onnx.data",
                f"expected numbers of {type.name}, found numbers with more bits",
                where=f"{message.location}: {constant.name[:200]}",
            )
    return joined.astype("<u8").view(np.uint8).reshape(-1, 8)[:, :width].tobytes()


def _numbers(message: Node, field: Field) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """Return the packed varints in ``field``, modulo 2**64."""
    data = _payload(message, field)
    ends = np.flatnonzero(data < 0x80)
    starts = np.concatenate([np.zeros(1, np.int64), ends[:-1] + 1])[: ends.size]
    lengths = ends - starts + 1
    if data.size and (not ends.size or ends[-1] != data.size - 1 or int(lengths.max()) > 10):
        raise message.refuse("numbers of at most ten bytes", "others")
    values = np.zeros(ends.size, np.uint64)
    for index in range(int(lengths.max()) if ends.size else 0):
        longer = lengths > index
        values[longer] |= (data[starts[longer] + index] & 0x7F).astype(np.uint64) << np.uint64(7 * index)
    return values


def _external(message: Node, fields: list[Field], constant_location: str) -> External:
    entries: dict[str, str] = {}
    if len(fields) > _MAX_ENTRIES:
        raise FormatError(
            "onnx.external-entry",
            f"expected at most {_MAX_ENTRIES} entries, found {len(fields)}",
            where=constant_location,
        )
    for field in fields:
        entry = message.child(field)
        pair = entry.select((1, 2))
        key, value = (entry.text(pair[number][0]) if pair[number] else "" for number in (1, 2))
        if key in entries:
            raise FormatError(
                "onnx.external-entry", f"expected {key[:40]!r} once, found it again", where=constant_location
            )
        entries[key] = value
    file = check_location(entries.get("location", ""), constant_location)
    offset, length = (_number(entries.get(key), key, constant_location) for key in ("offset", "length"))
    return External(file, offset or 0, length)


def _number(text: str | None, key: str, location: str) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) < 1 << 63):
        raise FormatError(
            "onnx.external-entry", f"expected a number below 2**63 for {key}, found {text[:40]!r}", where=location
        )
    return int(text)


def check_location(location: str, constant_location: str) -> str:
    """Return the name of a file in the model's folder or below it.

    Raises ``FormatError`` ``onnx.external-path``: the location is absolute, outside of the folder, or no file name.
    """
    components = location.split("/")
    if components[0] == "." and len(components) > 1:  # PyTorch and others write this prefix
        components = components[1:]
    is_invalid = any(component in ("", ".", "..") or "\\" in component or "\0" in component for component in components)
    if is_invalid or _DRIVE.match(location):
        raise FormatError(
            "onnx.external-path",
            f"expected the name of a file in the model's folder, found {location[:200]!r}",
            where=constant_location,
        )
    return "/".join(components)


def encode_constant(name: str, type: OnnxType, dims: tuple[int, ...], data: Segment) -> list[Segment]:
    """Return a TensorProto with its numbers in ``raw_data``."""
    head = dims_field(dims) + number_field(DATA_TYPE, type.code) + bytes_field(NAME, name)
    return [head, *message_field(RAW, [data])]


def encode_external_constant(name: str, type: OnnxType, dims: tuple[int, ...], external: External) -> bytes:
    """Return a TensorProto with its numbers in another file."""
    head = dims_field(dims) + number_field(DATA_TYPE, type.code) + bytes_field(NAME, name)
    return head + external_fields(external)


def external_fields(external: External) -> bytes:
    """Return the fields of a TensorProto that state the location of its numbers."""
    entries = {"location": external.location, "offset": str(external.offset), "length": str(external.length or 0)}
    pairs = (bytes_field(EXTERNAL, bytes_field(1, key) + bytes_field(2, value)) for key, value in entries.items())
    return b"".join(pairs) + number_field(LOCATION, _IN_FILE)


def dims_field(dims: tuple[int, ...]) -> bytes:
    """Return the dimensions of a TensorProto, one field each, as ONNX's library writes them."""
    return b"".join(number_field(DIMS, size) for size in dims)
