"""The wire format of protocol buffers: fields of a message, and edits that leave every other byte as it is.

Source: protobuf.dev, "Encoding". Only what a serializer writes is accepted: varints of at most ten bytes, no groups.
A message is read where it is needed; what is not known is never looked into, and so is kept. The bytes may be a
mapping of the file, or ``Skimmed``: of a file with weights in it only what lies around them is read.
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
_HEAD = 2 * _VARINT_BYTES  # the bytes that a field's key and length or number take at most
_MOST_FIELDS = 1 << 22
_MOST_KEPT = 1 << 20
_LOCAL = 1 << 16  # a message of so many bytes is taken into memory before its fields are looked at


class Bytes(Protocol):
    """What messages lie in: bytes, a view of a file, or a file that is read where it is looked at."""

    def __len__(self) -> int: ...
    @overload
    def __getitem__(self, index: int, /) -> int: ...
    @overload
    def __getitem__(self, index: slice, /) -> bytes | bytearray | memoryview: ...


class Rules(NamedTuple):
    """The rules by which a format refuses messages: no message, one too deep, a field twice, text that is no UTF-8."""

    wire: str
    depth: str
    repeated: str
    utf8: str


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

    data: Bytes
    start: int
    end: int
    where: str
    rules: Rules
    parent: Node | None = None
    tag: int = 0
    depth: int = 0

    @classmethod
    def root(cls, data: Bytes, where: str, rules: Rules) -> Node:
        """The message that is the whole file."""
        return cls(data, 0, len(data), where, rules)

    def child(self, field: Field) -> Node:
        """Return the message in ``field``.

        Raises ``FormatError`` ``Rules.wire``: no message; ``Rules.depth``: messages within messages without end.
        """
        if field.kind != BYTES:
            raise self.refuse(f"a message in field {field.number}", f"wire type {field.kind}")
        if self.depth >= MAX_DEPTH:
            raise FormatError(
                self.rules.depth, f"expected messages nested at most {MAX_DEPTH} deep, found more", where=self.where
            )
        return Node(self.data, field.start, field.end, self.where, self.rules, self, field.tag, self.depth + 1)

    def fields(self) -> Iterator[Field]:
        """Yield the fields in order.

        Raises ``FormatError`` ``Rules.wire``.
        """
        position = self.start
        end = self.end
        local = bytes(self.data[position:end]) if end - position <= _LOCAL else None
        base = position
        left = _MOST_FIELDS
        while position < end:
            left -= 1
            if left < 0:
                raise self.refuse(f"a message of at most {_MOST_FIELDS} fields", "more")
            if local is None:
                head = bytes(self.data[position : min(position + _HEAD, end)])
                base = position
            else:
                head = local
            tag = position
            key = head[position - base]
            behind = position - base + 1
            if key > 0x7F:
                key, behind = self._varint(head, behind - 1, base)
            number = key >> 3
            kind = key & 7
            if not 1 <= number <= _MAX_FIELD:
                raise self.refuse("a field number from 1 to 2**29 - 1", str(number))
            start = base + behind
            value = 0
            if kind == VARINT:
                value, behind = self._varint(head, behind, base)
                position = base + behind
            elif kind == BYTES:
                length = head[behind] if behind < len(head) else 0x80
                behind = behind + 1
                if length > 0x7F:
                    length, behind = self._varint(head, behind - 1, base)
                start = base + behind
                position = start + length
            elif kind in (FIXED64, FIXED32):
                position = start + (8 if kind == FIXED64 else 4)
            else:
                raise self.refuse("wire type 0, 1, 2 or 5", f"{kind} at byte {tag}")
            if position > end:
                raise self.refuse(f"a field that ends by byte {end}", f"one at {tag} that ends at {position}")
            yield Field(number, kind, tag, start, position, value)

    def _varint(self, data: bytes, position: int, base: int) -> tuple[int, int]:
        """Return a varint of ``data``, which begins at byte ``base``, and the position behind it."""
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
        """Return the numbers of a field, one or several in its payload (``packed``), unsigned.

        Raises ``FormatError`` ``Rules.wire``.
        """
        if field.kind == VARINT:
            return [field.value]
        if field.kind != BYTES:
            raise self.refuse(f"numbers in field {field.number}", f"wire type {field.kind}")
        data = bytes(self.data[field.start : field.end])
        position = 0
        found = []
        while position < len(data):
            value, position = self._varint(data, position, field.start)
            found.append(value)
        return found

    def known(self, single: Iterable[int], repeated: Iterable[int] = ()) -> Mapping[int, list[Field]]:
        """Return the fields with these numbers.

        Raises ``FormatError`` ``Rules.repeated`` where one of ``single`` is there twice: protobuf would merge
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
                    self.rules.repeated, f"expected field {field.number} once, found it again", where=self.where
                )
            if len(kept) >= _MOST_KEPT:
                raise self.refuse(f"field {field.number} at most {_MOST_KEPT} times", "more")
            kept.append(field)
        return fields

    def payload(self) -> bytes:
        """The bytes of the message."""
        return bytes(self.data[self.start : self.end])

    def text(self, field: Field) -> str:
        """Decode a field as UTF-8.

        Raises ``FormatError`` ``Rules.wire``, ``Rules.utf8``.
        """
        if field.kind != BYTES:
            raise self.refuse(f"text in field {field.number}", f"wire type {field.kind}")
        try:
            return bytes(self.data[field.start : field.end]).decode()
        except UnicodeDecodeError as error:
            raise FormatError(self.rules.utf8, f"expected UTF-8 text: {error.reason}", where=self.where) from error

    def number(self, field: Field) -> int:
        """Return a varint field's value, unsigned.

        Raises ``FormatError`` ``Rules.wire``.
        """
        if field.kind != VARINT:
            raise self.refuse(f"a number in field {field.number}", f"wire type {field.kind}")
        return field.value

    def refuse(self, expected: str, found: str) -> FormatError:
        """Make the error of a message that no serializer writes."""
        return FormatError(self.rules.wire, f"expected {expected}, found {found}", where=self.where)


class Range(NamedTuple):
    """Bytes of the file as they are."""

    start: int
    end: int


class Hole(NamedTuple):
    """Bytes that somebody else writes, known by a name."""

    name: str
    nbytes: int


Piece = bytes | Range | Hole


def length(pieces: Iterable[Piece]) -> int:
    """Return the bytes of pieces."""
    return sum(_length(piece) for piece in pieces)


def _length(piece: Piece) -> int:
    if isinstance(piece, Range):
        return piece.end - piece.start
    return piece.nbytes if isinstance(piece, Hole) else len(piece)


def message_field(number: int, pieces: Sequence[Piece]) -> list[Piece]:
    """Encode a field of bytes or a message that is made of pieces."""
    return [varint(number << 3 | BYTES) + varint(length(pieces)), *pieces]


class Edits:
    """Replacements of ranges of messages; lengths of the messages around them follow."""

    def __init__(self, root: Node) -> None:
        self._root = root
        self._ranges: dict[int, list[tuple[int, int, Sequence[Piece]]]] = defaultdict(list)
        self._inner: dict[int, dict[int, Node]] = defaultdict(dict)

    def replace(self, node: Node, start: int, end: int, new: bytes | Sequence[Piece]) -> None:
        """Put ``new`` in place of bytes ``start`` to ``end`` of the file, which are whole fields of ``node``."""
        self._ranges[id(node)].append((start, end, [new] if isinstance(new, bytes) else new))
        while node.parent is not None:
            self._inner[id(node.parent)][id(node)] = node
            node = node.parent

    def pieces(self) -> list[Piece]:
        """Return the file with every edit made."""
        return self._payload(self._root)

    def apply(self) -> bytes:
        """Return the bytes of the file with every edit made, which leaves no holes."""
        data = self._root.data
        made = []
        for piece in self.pieces():
            assert not isinstance(piece, Hole), "nobody is there to fill a hole"
            made.append(bytes(data[piece.start : piece.end]) if isinstance(piece, Range) else piece)
        return b"".join(made)

    def _payload(self, node: Node) -> list[Piece]:
        edits = list(self._ranges.get(id(node), ()))
        edits += [(inner.tag, inner.end, self._whole(inner)) for inner in self._inner.get(id(node), {}).values()]
        pieces: list[Piece] = []
        position = node.start
        for start, end, new in sorted(edits, key=lambda edit: edit[:2]):
            assert position <= start <= end <= node.end, "edits overlap"
            if position < start:
                pieces.append(Range(position, start))
            pieces += new
            position = end
        return [*pieces, Range(position, node.end)] if position < node.end else pieces

    def _whole(self, node: Node) -> list[Piece]:
        """Return tag, length and payload; tag and length as they were where the length did not change."""
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
    """Encode a varint field; negative values as protobuf's int32 and int64 do, in ten bytes."""
    return varint(number << 3 | VARINT) + varint(value % (1 << 64))


def bytes_field(number: int, payload: bytes | str) -> bytes:
    """Encode a field of bytes, text or a message."""
    data = payload.encode() if isinstance(payload, str) else payload
    return varint(number << 3 | BYTES) + varint(len(data)) + data


def map_entry(number: int, key: str, value: bytes) -> bytes:
    """Encode one entry of a ``map<string, message>``."""
    return bytes_field(number, bytes_field(1, key) + bytes_field(2, value))
