"""MIL values: a type, with numbers in the program or in a weight file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ingot.core.numeric.dtypes import element_count
from ingot.core.parsing.wire import BYTES, FIXED32, Field, Node, bytes_field, number_field
from ingot.errors import FormatError
from ingot.formats.coreml.types import BOOL, BY_CODE, STRING, MilType

# Fields of Value, ImmediateValue, TensorValue and BlobFileValue in MIL.proto.
_TYPE = 2
_IMMEDIATE = 3
_BLOB = 5
_TENSOR_TYPE = 1
_DATA_TYPE = 1
_RANK = 2
_DIMENSIONS = 3
_FLOATS = 1
_INTS = 2
_BOOLS = 3
_STRINGS = 4
_RAW = 7
_FILE_NAME = 1
_OFFSET = 2
_INTS_OF = {"int32", "int16", "uint16"}  # encoded as varints; the other integers are in ``bytes``


@dataclass(frozen=True, slots=True)
class BlobRef:
    """The location of a value's numbers: name of the weight file in the program, offset of the blob's metadata."""

    file: str
    offset: int
    node: Node
    field: Field | None


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """The value of a parameter or attribute: numbers or text, in the program (``immediate``) or in a weight file
    (``blob``).

    ``dims`` is None if a size is unknown, ``type`` is None if the elements are no numbers.
    """

    node: Node
    code: int
    dims: tuple[int, ...] | None
    immediate: Node | None
    blob: BlobRef | None

    @property
    def type(self) -> MilType | None:
        return BY_CODE.get(self.code)

    @property
    def location(self) -> str:
        return self.node.location

    def shaped(self) -> tuple[MilType, tuple[int, ...]]:
        """Return the element type and the shape of a value that is a tensor of numbers.

        Raises ``FormatError`` ``coreml.value`` if the value is not a tensor of numbers with a known shape.
        """
        if self.type is None or self.dims is None:
            raise _refuse(self.location, "numbers of a known shape", f"data type {self.code}")
        element_count(self.dims, "coreml.value", self.location)
        return self.type, self.dims

    def bytes(self) -> bytes:
        """Return the numbers of an immediate value in the encoding of a blob.

        Raises ``FormatError`` ``coreml.value``.
        """
        type, dims = self.shaped()
        count = element_count(dims, "coreml.value", self.location)
        data = b"" if self.immediate is None else _numbers(self.immediate, type)
        if self.immediate is None or len(data) != type.nbytes(count):
            raise _refuse(self.location, f"{type.nbytes(count)} bytes for {count} of {type.name}", str(len(data)))
        return data

    def text(self) -> str | None:
        """Return the string of an immediate value; None if it is not a single string."""
        if self.code != STRING or self.immediate is None:
            return None
        strings = self.immediate.select((_STRINGS,))[_STRINGS]
        if not strings:
            return None
        node = self.immediate.child(strings[0])
        fields = node.select((), (1,))[1]
        return node.text(fields[0]) if len(fields) == 1 else None


def parse_value(node: Node) -> Value:
    """Parse a Value message.

    Raises ``FormatError``: ``coreml.wire``, ``coreml.repeated-field``, ``coreml.value``.
    """
    fields = node.select((_TYPE, _IMMEDIATE, _BLOB))
    code, dims = parse_type(node.child(fields[_TYPE][0])) if fields[_TYPE] else (0, None)
    if fields[_IMMEDIATE] and fields[_BLOB]:
        raise _refuse(node.location, "numbers in the program or in a file", "both")
    blob = _blob_ref(node.child(fields[_BLOB][0])) if fields[_BLOB] else None
    immediate = None
    if fields[_IMMEDIATE]:
        outer = node.child(fields[_IMMEDIATE][0])
        tensor = outer.select((1,))[1]
        immediate = outer.child(tensor[0]) if tensor else None
    return Value(node, code, dims, immediate, blob)


def parse_type(node: Node) -> tuple[int, tuple[int, ...] | None]:
    """Return the element type's number in a ValueType (0 if it is no tensor), and the shape if it is known."""
    tensor = node.select((_TENSOR_TYPE,))[_TENSOR_TYPE]
    if not tensor:
        return 0, None
    inner = node.child(tensor[0])
    fields = inner.select((_DATA_TYPE, _RANK), (_DIMENSIONS,))
    code = inner.number(fields[_DATA_TYPE][0]) if fields[_DATA_TYPE] else 0
    rank = inner.number(fields[_RANK][0]) if fields[_RANK] else 0
    sizes = [_dimension(inner.child(field)) for field in fields[_DIMENSIONS]]
    if len(sizes) != rank:
        return code, None  # an unknown rank is written as -1
    known_sizes = [size for size in sizes if size is not None]
    return code, tuple(known_sizes) if len(known_sizes) == len(sizes) else None


def _dimension(node: Node) -> int | None:
    constant = node.select((1,))[1]
    if not constant:
        return None
    inner = node.child(constant[0])
    size = inner.select((1,))[1]
    return inner.number(size[0]) if size else 0


def _blob_ref(node: Node) -> BlobRef:
    fields = node.select((_FILE_NAME, _OFFSET))
    name = node.text(fields[_FILE_NAME][0]) if fields[_FILE_NAME] else ""
    field = fields[_OFFSET][0] if fields[_OFFSET] else None
    return BlobRef(name, node.number(field) if field else 0, node, field)


def _numbers(node: Node, type: MilType) -> bytes:
    """Return the elements of a TensorValue as bytes; ``type`` determines the field to read."""
    field_number = _FLOATS if type.name == "fp32" else _INTS if type.name in _INTS_OF else _RAW
    packed = node.select((field_number,))[field_number]
    if not packed:
        return b""
    inner = node.child(packed[0])
    fields = inner.select((), (1,))[1]
    if field_number == _RAW:
        return b"".join(inner.data[field.start : field.end] for field in fields if field.wire_type == BYTES)
    if field_number == _FLOATS:
        return b"".join(inner.data[field.start : field.end] for field in fields if field.wire_type in (BYTES, FIXED32))
    values: list[int] = []
    for field in fields:
        values += inner.varints(field)
    width = type.bits // 8
    mask = (1 << type.bits) - 1
    return b"".join((value & mask).to_bytes(width, "little") for value in values)


def encode_type(type: MilType, dims: Sequence[int | None]) -> bytes:
    """Return the encoded ValueType message of a tensor of ``type`` and ``dims``; a size of None is unknown."""
    sizes = b"".join(
        bytes_field(
            _DIMENSIONS,
            bytes_field(2, b"") if size is None else bytes_field(1, number_field(1, size) if size else b""),
        )
        for size in dims
    )
    rank = number_field(_RANK, len(dims)) if dims else b""
    return bytes_field(_TENSOR_TYPE, number_field(_DATA_TYPE, type.code) + rank + sizes)


def encode_immediate(type: MilType, dims: tuple[int, ...], data: bytes) -> bytes:
    """Return a Value message with its numbers, which are given in the encoding of a blob."""
    if type.name == "fp32":
        tensor = bytes_field(_FLOATS, bytes_field(1, data))
    elif type.name in _INTS_OF:
        dtype = np.dtype(f"<{'i' if type.signed else 'u'}{type.bits // 8}")
        values = np.frombuffer(data, dtype).tolist()
        tensor = bytes_field(_INTS, bytes_field(1, b"".join(number_field(0, value)[1:] for value in values)))
    else:
        tensor = bytes_field(_RAW, bytes_field(1, data))
    return bytes_field(_TYPE, encode_type(type, dims)) + bytes_field(_IMMEDIATE, bytes_field(1, tensor))


def encode_blob(type: MilType, dims: tuple[int, ...], file: str, offset: int) -> bytes:
    """Return a Value message whose numbers are the blob with metadata at ``offset``."""
    reference = bytes_field(_FILE_NAME, file) + number_field(_OFFSET, offset)
    return bytes_field(_TYPE, encode_type(type, dims)) + bytes_field(_BLOB, reference)


def encode_text(text: str) -> bytes:
    """Return a Value message of one string."""
    tensor = bytes_field(_STRINGS, bytes_field(1, text))
    value_type = bytes_field(_TENSOR_TYPE, number_field(_DATA_TYPE, STRING))
    return bytes_field(_TYPE, value_type) + bytes_field(_IMMEDIATE, bytes_field(1, tensor))


def encode_flag(value: bool) -> bytes:
    """Return a Value message of one bool."""
    return _bools([value], ())


def encode_flags(values: Sequence[bool]) -> bytes:
    """Return a Value message of a vector of bools."""
    return _bools(values, (len(values),))


def _bools(values: Sequence[bool], dims: tuple[int, ...]) -> bytes:
    tensor = bytes_field(_BOOLS, bytes_field(1, bytes(values)))
    return bytes_field(_TYPE, encode_type(BOOL, dims)) + bytes_field(_IMMEDIATE, bytes_field(1, tensor))


def encode_offset(offset: int) -> bytes:
    """Return the field of a BlobFileValue that contains its offset."""
    return number_field(_OFFSET, offset)


def _refuse(location: str, expected: str, actual: str) -> FormatError:
    return FormatError("coreml.value", f"expected {expected}, found {actual}", where=location)
