"""The wire format of protocol buffers: reading the fields of messages, and edits that keep all other bytes.

Source: protobuf.dev, "Encoding". Only the output of serializers is accepted: varints of at most ten bytes, no groups.
Messages are parsed on demand; unknown fields are never parsed, and are kept. The bytes may be a mapping of the file, or
``WindowedBytes``, which reads only the bytes around the weights of a file.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, overload

from ingot.errors import FormatError

VARINT = 0
FIXED64 = 1
BYTES = 2
FIXED32 = 5
MAX_DEPTH = 64
_MAX_FIELD = (1 << 29) - 1
_VARINT_BYTES = 10
_HEAD = 2 * _VARINT_BYTES  # maximum bytes of a field's key and length or number
_MAX_FIELDS = 1 << 22
_MAX_REPEATS = 1 << 20
_LOCAL = 1 << 16  # smaller messages are copied into memory before their fields are parsed


class Bytes(Protocol):
    """The bytes of a file: bytes, a memoryview, or an object that reads parts of the file on access."""

    def __len__(self) -> int: ...
    @overload
    def __getitem__(self, index: int, /) -> int: ...
    @overload
    def __getitem__(self, index: slice, /) -> bytes | bytearray | memoryview: ...


class Rules(NamedTuple):
    """The rules of a format's errors.

    ``wire``: the bytes are not a message; ``depth``: messages are nested too deeply; ``repeated``: a field occurs
    twice; ``utf8``: a text is not UTF-8.
    """

    wire: str
    depth: str
    repeated: str
    utf8: str


class Field(NamedTuple):
    """One field of a message, with offsets in the file.

    The field begins at ``tag``; its payload is ``start`` to ``end``. ``value`` is the value of a varint.
    """

    number: int
    wire_type: int
    tag: int
    start: int
    end: int
    value: int


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A message in the file, with offsets in the file.

    Its field in ``parent`` begins at ``tag``; its payload is ``start`` to ``end``. ``location`` is for messages.
    """

    data: Bytes
    start: int
    end: int
    location: str
    rules: Rules
    parent: Node | None = None
    tag: int = 0
    depth: int = 0

    @classmethod
    def root(cls, data: Bytes, location: str, rules: Rules) -> Node:
        """Return the message that is the full file."""
        return cls(data, 0, len(data), location, rules)

    def child(self, field: Field) -> Node:
        """Return the message in ``field``.

        Raises ``FormatError`` ``Rules.wire`` if the field is not a message, ``Rules.depth`` if it is nested too deeply.
        """
        if field.wire_type != BYTES:
            raise self.refuse(f"a message in field {field.number}", f"wire type {field.wire_type}")
        if self.depth >= MAX_DEPTH:
            raise FormatError(
                self.rules.depth, f"expected messages nested at most {MAX_DEPTH} deep, found more", where=self.location
            )
        return Node(self.data, field.start, field.end, self.location, self.rules, self, field.tag, self.depth + 1)

    def fields(self) -> Iterator[Field]:
        """Yield the fields of the message in file order.

        Raises ``FormatError`` ``Rules.wire``.
        """
        position = self.start
        end = self.end
        local = bytes(self.data[position:end]) if end - position <= _LOCAL else None
        base = position
        remaining = _MAX_FIELDS
        while position < end:
            remaining -= 1
            if remaining < 0:
                raise self.refuse(f"a message of at most {_MAX_FIELDS} fields", "more")
            if local is None:
                head = bytes(self.data[position : min(position + _HEAD, end)])
                base = position
            else:
                head = local
            tag = position
            key = head[position - base]
            index = position - base + 1
            if key > 0x7F:
                key, index = self._varint(head, index - 1, base)
            number = key >> 3
            wire_type = key & 7
            if not 1 <= number <= _MAX_FIELD:
                raise self.refuse("a field number from 1 to 2**29 - 1", str(number))
            start = base + index
            value = 0
            if wire_type == VARINT:
                value, index = self._varint(head, index, base)
                position = base + index
            elif wire_type == BYTES:
                length = head[index] if index < len(head) else 0x80
                index = index + 1
                if length > 0x7F:
                    length, index = self._varint(head, index - 1, base)
                start = base + index
                position = start + length
            elif wire_type in (FIXED64, FIXED32):
                position = start + (8 if wire_type == FIXED64 else 4)
            else:
                raise self.refuse("wire type 0, 1, 2 or 5", f"{wire_type} at byte {tag}")
            if position > end:
                raise self.refuse(f"a field that ends by byte {end}", f"one at {tag} that ends at {position}")
            yield Field(number, wire_type, tag, start, position, value)

    def _varint(self, data: bytes, position: int, base: int) -> tuple[int, int]:
        """Return the varint at index ``position`` of ``data``, and the index after it.

        ``base`` is the offset of ``data`` in the file, for messages.
        """
        value = 0
        shift = 0
        end = min(len(data), position + _VARINT_BYTES)
        while position < end:
            byte = data[position]
            position += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                if value >> 64:
                    raise self.refuse("a number below 2**64", str(value))
                return value, position
            shift += 7
        raise self.refuse("a number of at most ten bytes", f"none that ends at byte {base + position}")

    def varints(self, field: Field) -> list[int]:
        """Return the unsigned numbers of a field: one varint, or several in its payload (``packed``).

        Raises ``FormatError`` ``Rules.wire``.
        """
        if field.wire_type == VARINT:
            return [field.value]
        if field.wire_type != BYTES:
            raise self.refuse(f"numbers in field {field.number}", f"wire type {field.wire_type}")
        data = bytes(self.data[field.start : field.end])
        position = 0
        values = []
        while position < len(data):
            value, position = self._varint(data, position, field.start)
            values.append(value)
        return values

    def select(self, single: Iterable[int], repeated: Iterable[int] = ()) -> Mapping[int, list[Field]]:
        """Return the message's fields with the numbers in ``single`` and ``repeated``, by number, in file order.

        Raises ``FormatError`` ``Rules.repeated`` if a number of ``single`` occurs twice, because some readers of
        protobuf merge the two fields and others use the last one.
        """
        fields: dict[int, list[Field]] = {number: [] for number in (*single, *repeated)}
        once = set(single)
        for field in self.fields():
            selected = fields.get(field.number)
            if selected is None:
                continue
            if selected and field.number in once:
                raise FormatError(
                    self.rules.repeated, f"expected field {field.number} once, found it again", where=self.location
                )
            if len(selected) >= _MAX_REPEATS:
                raise self.refuse(f"field {field.number} at most {_MAX_REPEATS} times", "more")
            selected.append(field)
        return fields

    def payload(self) -> bytes:
        """Return the bytes of the message."""
        return bytes(self.data[self.start : self.end])

    def text(self, field: Field) -> str:
        """Return the payload of a field, decoded as UTF-8.

        Raises ``FormatError`` ``Rules.wire``, ``Rules.utf8``.
        """
        if field.wire_type != BYTES:
            raise self.refuse(f"text in field {field.number}", f"wire type {field.wire_type}")
        try:
            return bytes(self.data[field.start : field.end]).decode()
        except UnicodeDecodeError as error:
            raise FormatError(self.rules.utf8, f"expected UTF-8 text: {error.reason}", where=self.location) from error

    def number(self, field: Field) -> int:
        """Return a varint field's value, unsigned.

        Raises ``FormatError`` ``Rules.wire``.
        """
        if field.wire_type != VARINT:
            raise self.refuse(f"a number in field {field.number}", f"wire type {field.wire_type}")
        return field.value

    def refuse(self, expected: str, actual: str) -> FormatError:
        """Return the error for a message that no serializer writes."""
        return FormatError(self.rules.wire, f"expected {expected}, found {actual}", where=self.location)


class Range(NamedTuple):
    """A range of the file that is copied unchanged."""

    start: int
    end: int


class Hole(NamedTuple):
    """Space for the bytes of a tensor, which the caller writes later."""

    name: str
    nbytes: int


Segment = bytes | Range | Hole


def length(segments: Iterable[Segment]) -> int:
    """Return the number of bytes of all ``segments``, ranges and holes included."""
    return sum(_length(segment) for segment in segments)


def _length(segment: Segment) -> int:
    if isinstance(segment, Range):
        return segment.end - segment.start
    return segment.nbytes if isinstance(segment, Hole) else len(segment)


def message_field(number: int, segments: Sequence[Segment]) -> list[Segment]:
    """Encode a field whose payload consists of segments: bytes or a message."""
    return [varint(number << 3 | BYTES) + varint(length(segments)), *segments]


class Edits:
    """Replacements of ranges in messages, which also update the lengths of all enclosing messages."""

    def __init__(self, root: Node) -> None:
        self._root = root
        self._ranges: dict[int, list[tuple[int, int, Sequence[Segment]]]] = defaultdict(list)
        self._inner: dict[int, dict[int, Node]] = defaultdict(dict)

    def replace(self, node: Node, start: int, end: int, new: bytes | Sequence[Segment]) -> None:
        """Replace the bytes ``start`` to ``end`` of the file, which are complete fields of ``node``."""
        self._ranges[id(node)].append((start, end, [new] if isinstance(new, bytes) else new))
        while node.parent is not None:
            self._inner[id(node.parent)][id(node)] = node
            node = node.parent

    def segments(self) -> list[Segment]:
        """Return the segments of the file after all edits."""
        return self._payload(self._root)

    def apply(self) -> bytes:
        """Return the bytes of the file after all edits, which must not contain holes."""
        data = self._root.data
        parts = []
        for segment in self.segments():
            assert not isinstance(segment, Hole), "a hole has no bytes"
            parts.append(bytes(data[segment.start : segment.end]) if isinstance(segment, Range) else segment)
        return b"".join(parts)

    def _payload(self, node: Node) -> list[Segment]:
        edits = list(self._ranges.get(id(node), ()))
        edits += [(inner.tag, inner.end, self._field(inner)) for inner in self._inner.get(id(node), {}).values()]
        segments: list[Segment] = []
        position = node.start
        for start, end, new in sorted(edits, key=lambda edit: edit[:2]):
            assert position <= start <= end <= node.end, "edits overlap"
            if position < start:
                segments.append(Range(position, start))
            segments += new
            position = end
        return [*segments, Range(position, node.end)] if position < node.end else segments

    def _field(self, node: Node) -> list[Segment]:
        """Return tag, length and payload of a message; if the length is unchanged, tag and length are copied."""
        payload = self._payload(node)
        if length(payload) == node.end - node.start:
            return [Range(node.tag, node.start), *payload]
        tag = bytes(node.data[node.tag : node.start])
        key_length = next(index for index, byte in enumerate(tag) if byte < 0x80) + 1
        return [tag[:key_length] + varint(length(payload)), *payload]


def varint(value: int) -> bytes:
    """Encode a non-negative number below 2**64."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def number_field(number: int, value: int) -> bytes:
    """Encode a varint field; negative values take ten bytes, as protobuf's int32 and int64 do."""
    return varint(number << 3 | VARINT) + varint(value % (1 << 64))


def bytes_field(number: int, payload: bytes | str) -> bytes:
    """Encode a field of bytes, text or a message."""
    data = payload.encode() if isinstance(payload, str) else payload
    return varint(number << 3 | BYTES) + varint(len(data)) + data


def map_entry(number: int, key: str, value: bytes) -> bytes:
    """Encode one entry of a ``map<string, message>``."""
    return bytes_field(number, bytes_field(1, key) + bytes_field(2, value))
