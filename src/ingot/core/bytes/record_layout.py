"""Layouts of records: how the encoding ``ingot.packed/1`` divides equal records of bytes into streams.

The stored form is defined in ``spec/packed.md``. A layout is stored with the encoded bytes, so that a reader does not
need to know the codec of the tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from struct import Struct
from typing import Any

import numpy as np

from ingot.core.runtime import native
from ingot.errors import FormatError

Array = np.ndarray[Any, np.dtype[Any]]

RULE = "part.packed"
MAX_RECORD = 4096
_MAX_STREAMS = 32
_MAX_FIELDS = 64

NO_KEY, HALF, BYTE, MAGNITUDE, CENTERED, RATIO = range(6)
"""The values by which the units of a stream are divided into contexts.

``HALF``: the magnitude of a 16-bit float, whose low and high byte are streams ``first`` and ``second``. ``BYTE``: a
byte of stream ``first``. ``MAGNITUDE``: the absolute value of a signed byte. ``CENTERED``: the distance of a byte from
32. ``RATIO``: a byte of ``second`` times 256, divided by one more than the byte of ``first``.
"""
_SECOND = (HALF, RATIO)

BYTES, SOURCE_BITS, TARGET_BITS = range(3)
"""The values of ``Field.side``: elements are bytes on both sides, bits in the source, or bits in the target."""

_HEAD = Struct("<HHBB")
_STREAM = Struct("<HHBBBB")
_FIELD = Struct("<HHHBBBBH")


@dataclass(frozen=True, slots=True)
class Stream:
    """Bytes that are coded together: ``length`` of each record, in units of ``unit`` bytes.

    ``pairs`` is set if both halves of a byte are independent numbers of four bits. ``key`` with the indices ``first``
    and ``second`` of earlier streams is the value that selects the context of a unit.
    """

    length: int
    unit: int
    pairs: bool = False
    key: int = NO_KEY
    first: int = 0
    second: int = 0


@dataclass(frozen=True, slots=True)
class Field:
    """A field, which moves ``bits`` bits of each of ``count`` elements from a record to its streams.

    The elements begin at byte ``source`` of the record, and at byte ``target`` of the streams. The bytes of all streams
    of a record are numbered in the order of the streams. The bits of an element begin at ``source_shift`` and
    ``target_shift``. ``side`` states whether the elements are bytes or bits.
    """

    source: int
    target: int
    count: int
    source_shift: int = 0
    target_shift: int = 0
    bits: int = 8
    side: int = BYTES


@dataclass(frozen=True)
class RecordLayout:
    """The division of records of ``record`` bytes into streams."""

    record: int
    streams: tuple[Stream, ...]
    fields: tuple[Field, ...]

    @cached_property
    def width(self) -> int:
        """The number of bytes of all streams for one record."""
        return sum(stream.length for stream in self.streams)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The offset of each stream among the bytes of all streams of a record."""
        lengths = np.array([0, *(stream.length for stream in self.streams)])
        return tuple(int(start) for start in np.cumsum(lengths)[:-1])

    def move(self, source: Array, target: Array, records: int, *, join: bool) -> None:
        """Move all fields of ``records`` records to their streams, or back if ``join`` is set.

        ``target`` must consist of zeros.
        """
        constant, per_record = self._columns
        columns = constant + per_record * records
        if join:
            columns = columns[:, [3, 4, 5, 0, 1, 2, 6, 7, 8]]
            columns[:, 8] = np.array([BYTES, TARGET_BITS, SOURCE_BITS])[columns[:, 8]]
        native.kernels.move_bits(source, target, records, np.ascontiguousarray(columns).reshape(-1))

    @cached_property
    def _columns(self) -> tuple[Array, Array]:
        """The arguments of ``native.kernels.move_bits``, [fields, 9], as two arrays.

        The first array contains constant terms. The second one is multiplied by the number of records.
        """
        constant, per_record = np.zeros((2, len(self.fields), 9), np.int64)
        for index, field in enumerate(self.fields):
            stream = max(k for k, start in enumerate(self.starts) if start <= field.target)
            start = self.starts[stream]
            constant[index] = (
                field.source,
                self.record,
                field.source_shift,
                field.target - start,
                self.streams[stream].length,
                field.target_shift,
                field.bits,
                field.count,
                field.side,
            )
            per_record[index, 3] = start
        return constant, per_record

    def to_bytes(self) -> bytes:
        """Return the stored form of the layout."""
        head = _HEAD.pack(self.record, self.width, len(self.streams), len(self.fields))
        streams = (_STREAM.pack(s.length, s.unit, s.pairs, s.key, s.first, s.second) for s in self.streams)
        fields = (
            _FIELD.pack(f.source, f.target, f.count, f.source_shift, f.target_shift, f.bits, f.side, 0)
            for f in self.fields
        )
        return b"".join((head, *streams, *fields))


MAX_LAYOUT = _HEAD.size + _MAX_STREAMS * _STREAM.size + _MAX_FIELDS * _FIELD.size


def read_layout(data: bytes, location: str) -> RecordLayout:
    """Return a layout from its stored form.

    Raises ``FormatError`` ``part.packed`` unless every bit of a record has exactly one position in the streams.
    """
    if len(data) < _HEAD.size:
        raise _error("a layout of records, which is cut off", location)
    record, width, stream_count, field_count = _HEAD.unpack_from(data)
    fields_start = _HEAD.size + stream_count * _STREAM.size
    sizes_fit = 1 <= stream_count <= _MAX_STREAMS and 1 <= field_count <= _MAX_FIELDS and 1 <= record <= MAX_RECORD
    if not sizes_fit or len(data) != fields_start + field_count * _FIELD.size:
        raise _error(
            f"a layout of records of {record} bytes with {stream_count} streams, {field_count} fields", location
        )
    streams = []
    for index in range(stream_count):
        length, unit, pairs, key, first, second = _STREAM.unpack_from(data, _HEAD.size + index * _STREAM.size)
        streams.append(Stream(length, unit, bool(pairs), key, first, second))
        if pairs > 1 or not _is_stream(streams, index):
            raise _error(f"stream {index} of a layout", location)
    fields = []
    for index in range(field_count):
        *numbers, reserved = _FIELD.unpack_from(data, fields_start + index * _FIELD.size)
        fields.append(Field(*numbers))
        if reserved or not _is_field(fields[-1], record, width):
            raise _error(f"field {index} of a layout", location)
    layout = RecordLayout(record, tuple(streams), tuple(fields))
    if layout.width != width or not _is_permutation(layout):
        raise _error("fields of a layout, which are not one position for every bit", location)
    return layout


def _error(problem: str, location: str) -> FormatError:
    return FormatError(RULE, f"invalid bytes of encoding ingot.packed/1: {problem}", where=location)


def _is_stream(streams: list[Stream], index: int) -> bool:
    """Return whether the stream ``index`` is valid: its sizes, and its key, which may only refer to earlier streams."""
    stream = streams[index]
    if not (stream.length >= 1 and stream.unit >= 1 and stream.length % stream.unit == 0 and stream.key <= RATIO):
        return False
    if stream.key == NO_KEY:
        return stream.first == stream.second == 0
    sources = (stream.first, stream.second) if stream.key in _SECOND else (stream.first,)
    if max(sources) >= index or (stream.key not in _SECOND and stream.second):
        return False
    lengths = {streams[source].length for source in sources}
    return len(lengths) == 1 and stream.length // stream.unit % lengths.pop() == 0


def _is_field(field: Field, record: int, width: int) -> bool:
    packed = -(-field.count // 8)
    source_bytes = packed if field.side == SOURCE_BITS else field.count
    target_bytes = packed if field.side == TARGET_BITS else field.count
    return (
        field.count >= 1
        and 1 <= field.bits <= 8
        and field.source_shift + field.bits <= 8
        and field.target_shift + field.bits <= 8
        and field.side <= TARGET_BITS
        and (field.side == BYTES or field.bits == 1)
        and (field.side != SOURCE_BITS or field.source_shift == 0)
        and (field.side != TARGET_BITS or field.target_shift == 0)
        and field.source + source_bytes <= record
        and field.target + target_bytes <= width
    )


def _is_permutation(layout: RecordLayout) -> bool:
    """Return whether fields stay within their streams, take every bit of a record once, and no target bit twice."""
    read_bits = np.zeros(layout.record * 8, np.int64)
    written_bits = np.zeros(layout.width * 8, np.int64)
    ends = [start + stream.length for start, stream in zip(layout.starts, layout.streams, strict=True)]
    for field in layout.fields:
        target_bytes = -(-field.count // 8) if field.side == TARGET_BITS else field.count
        if field.target + target_bytes > next(end for end in ends if end > field.target):
            return False
        elements = np.arange(field.count)[:, None]
        bits = np.arange(field.bits)
        source = elements if field.side == SOURCE_BITS else 8 * elements + field.source_shift + bits
        target = elements if field.side == TARGET_BITS else 8 * elements + field.target_shift + bits
        np.add.at(read_bits, 8 * field.source + source.reshape(-1), 1)
        np.add.at(written_bits, 8 * field.target + target.reshape(-1), 1)
    return bool((read_bits == 1).all() and (written_bits <= 1).all())
