"""The wire format of protocol buffers: fields of a message, and edits that leave every other byte as it is.

Source: protobuf.dev, "Encoding". Only what a serializer writes is accepted: varints of at most ten bytes, no groups.
A message is read where it is needed; what is not known is never looked into, and so is kept.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ingot.errors import FormatError

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
MAX_DEPTH = 64
_MAX_FIELD = (1 << 29) - 1
_VARINT_BYTES = 10


class Field(NamedTuple):
    """One field: ``tag`` is where it begins, ``start`` to ``end`` its payload; ``value`` of a varint."""

    number: int
    kind: int
    tag: int
    start: int
    end: int
    value: int


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A message within the file: ``tag`` is where its field begins in ``parent``, ``start`` to ``end`` its payload."""

    data: bytes
    start: int
    end: int
    where: str
    parent: Node | None = None
    tag: int = 0
    depth: int = 0

    @classmethod
    def root(cls, data: bytes, where: str) -> Node:
        """The message that is the whole file."""
        return cls(data, 0, len(data), where)

    def child(self, field: Field) -> Node:
        """Return the message in ``field``.

        Raises ``FormatError`` ``coreml.wire``: no message; ``coreml.depth``: messages within messages without end.
        """
        if field.kind != BYTES:
            raise refuse(self.where, f"a message in field {field.number}", f"wire type {field.kind}")
        if self.depth >= MAX_DEPTH:
            raise FormatError(
                "coreml.depth", f"expected messages nested at most {MAX_DEPTH} deep, found more", where=self.where
            )
        return Node(self.data, field.start, field.end, self.where, self, field.tag, self.depth + 1)

    def fields(self) -> Iterator[Field]:
        """Yield the fields in order.

        Raises ``FormatError`` ``coreml.wire``.
        """
        data, position, end = self.data, self.start, self.end
        while position < end:
            tag = position
            key, position = self.varint(position)
            number, kind = key >> 3, key & 7
            if not 1 <= number <= _MAX_FIELD:
                raise refuse(self.where, "a field number from 1 to 2**29 - 1", str(number))
            start, value = position, 0
            if kind == VARINT:
                value, position = self.varint(position)
            elif kind == BYTES:
                length, start = self.varint(position)
                position = start + length
            elif kind in (FIXED64, FIXED32):
                position += 8 if kind == FIXED64 else 4
            else:
                raise refuse(self.where, "wire type 0, 1, 2 or 5", f"{kind} at byte {tag}")
            if position > end:
                raise refuse(self.where, f"a field that ends by byte {end}", f"one at {tag} that ends at {position}")
            yield Field(number, kind, tag, start, position, value)
        assert len(data) >= end

    def varint(self, position: int) -> tuple[int, int]:
        """Return a varint and the position behind it."""
        data, end = self.data, min(self.end, position + _VARINT_BYTES)
        value, shift = 0, 0
        while position < end:
            byte = data[position]
            position += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                if value >> 64:
                    raise refuse(self.where, "a number below 2**64", str(value))
                return value, position
            shift += 7
        raise refuse(self.where, "a number of at most ten bytes", f"none that ends at byte {position}")

    def known(self, single: Iterable[int], repeated: Iterable[int] = ()) -> Mapping[int, list[Field]]:
        """Return the fields with these numbers.

        Raises ``FormatError`` ``coreml.repeated-field`` where one of ``single`` is there twice: protobuf would merge
        the two or take the last, so that readers see different things.
        """
        fields: dict[int, list[Field]] = {number: [] for number in (*single, *repeated)}
        once = set(single)
        for field in self.fields():
            kept = fields.get(field.number)
            if kept is None:
                continue
            if kept and field.number in once:
                raise FormatError(
                    "coreml.repeated-field", f"expected field {field.number} once, found it again", where=self.where
                )
            kept.append(field)
        return fields

    def payload(self) -> bytes:
        """The bytes of the message."""
        return self.data[self.start : self.end]

    def text(self, field: Field) -> str:
        """Decode a field as UTF-8.

        Raises ``FormatError`` ``coreml.wire``, ``coreml.utf8``.
        """
        if field.kind != BYTES:
            raise refuse(self.where, f"text in field {field.number}", f"wire type {field.kind}")
        try:
            return self.data[field.start : field.end].decode()
        except UnicodeDecodeError as error:
            raise FormatError("coreml.utf8", f"expected UTF-8 text: {error.reason}", where=self.where) from error

    def number(self, field: Field) -> int:
        """Return a varint field's value, unsigned.

        Raises ``FormatError`` ``coreml.wire``.
        """
        if field.kind != VARINT:
            raise refuse(self.where, f"a number in field {field.number}", f"wire type {field.kind}")
        return field.value


def refuse(where: str, expected: str, found: str) -> FormatError:
    """Make the error of a message that no serializer writes."""
    return FormatError("coreml.wire", f"expected {expected}, found {found}", where=where)


class Edits:
    """Replacements of ranges of messages; lengths of the messages around them follow."""

    def __init__(self, root: Node) -> None:
        self._root = root
        self._ranges: dict[int, list[tuple[int, int, bytes]]] = defaultdict(list)
        self._inner: dict[int, dict[int, Node]] = defaultdict(dict)

    def replace(self, node: Node, start: int, end: int, new: bytes) -> None:
        """Put ``new`` in place of bytes ``start`` to ``end`` of the file, which are whole fields of ``node``."""
        self._ranges[id(node)].append((start, end, new))
        while node.parent is not None:
            self._inner[id(node.parent)][id(node)] = node
            node = node.parent

    def apply(self) -> bytes:
        """Return the file with every edit made."""
        return self._payload(self._root)

    def _payload(self, node: Node) -> bytes:
        edits = list(self._ranges.get(id(node), ()))
        edits += [(inner.tag, inner.end, self._whole(inner)) for inner in self._inner.get(id(node), {}).values()]
        pieces, position = [], node.start
        for start, end, new in sorted(edits, key=lambda edit: edit[:2]):
            assert position <= start <= end <= node.end, "edits overlap"
            pieces += [node.data[position:start], new]
            position = end
        return b"".join([*pieces, node.data[position : node.end]])

    def _whole(self, node: Node) -> bytes:
        """Return tag, length and payload; tag and length as they were where the length did not change."""
        payload = self._payload(node)
        if len(payload) == node.end - node.start:
            return node.data[node.tag : node.start] + payload
        tag = node.data[node.tag : node.start]
        key_length = next(index for index, byte in enumerate(tag) if byte < 0x80) + 1
        return tag[:key_length] + varint(len(payload)) + payload


def varint(value: int) -> bytes:
    """Encode a non-negative number below 2**64."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def number_field(number: int, value: int) -> bytes:
    """Encode a varint field; negative values as protobuf's int32 and int64 do, in ten bytes."""
    return varint(number << 3 | VARINT) + varint(value % (1 << 64))


def bytes_field(number: int, payload: bytes | str) -> bytes:
    """Encode a field of bytes, text or a message."""
    data = payload.encode() if isinstance(payload, str) else payload
    return varint(number << 3 | BYTES) + varint(len(data)) + data


def map_entry(number: int, key: str, value: bytes) -> bytes:
    """Encode one entry of a ``map<string, message>``."""
    return bytes_field(number, bytes_field(1, key) + bytes_field(2, value))
