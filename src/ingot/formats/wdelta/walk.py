"""Scan of the heads of all records, which locates each array without reading it (spec/wdelta.md, "Payload")."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping

from ingot.core.numeric.dtypes import MAX_RANK, element_count
from ingot.errors import FormatError
from ingot.formats.detect import TRUNCATED_HINT
from ingot.formats.wdelta.entries import Entry
from ingot.formats.wdelta.header import Header
from ingot.formats.wdelta.layout import ITEM, LONGEST_DTYPE, LONGEST_FIELD, STRATEGIES, Head, Span, head_size
from ingot.formats.wdelta.stored_types import LONGEST, dtype_of, part_dtype
from ingot.model.bytesource import ByteSource
from ingot.model.reading.ranges import HeaderSource, read_bytes

# A payload with at most this many gaps, or with heads that are close to each other, is read completely in a few growing
# windows; predicting the offsets of its heads would take longer.
_READ_OVER = 64


_NUMBERS = {code: struct.Struct(f"<{code}") for code in "IQ"}
# Bytes of a head without the tensor's name: three lengths, field, element type, rank, one size, the data's length.
_FIXED = 4 + 4 + LONGEST_FIELD + 4 + LONGEST_DTYPE + 4 + 8 + 8

Spans = Mapping[str, Mapping[str, Span]]
"""All arrays by tensor and field; tensors in the order of their first records."""


class _Head:
    """Reads the fields of one record's head in order; an invalid field is an error with the field's rule."""

    def __init__(self, data: bytes, location: str) -> None:
        self._data = data
        self._location = location
        self.position = 0

    def number(self, code: str) -> int:
        """Return the next little-endian number of the type ``code`` (of the module ``struct``)."""
        number_struct = _NUMBERS[code]
        value: int = number_struct.unpack(self._bytes(number_struct.size))[0]
        return value

    def text(self, longest: int, rule: str, description: str) -> str:
        """Return the next string, which is stored after its length."""
        length = self.number("I")
        if length > longest:
            raise FormatError(
                rule,
                f"expected {description} of at most {longest} bytes, found a length of {length}",
                where=self._location,
            )
        try:
            return self._bytes(length).decode("utf-8")
        except UnicodeDecodeError as error:
            raise FormatError(
                "wdelta.utf8", f"{description} is not UTF-8: {error.reason}", where=self._location
            ) from error

    def _bytes(self, size: int) -> bytes:
        chunk = self._data[self.position : self.position + size]
        if len(chunk) != size:
            raise FormatError(
                "wdelta.record-out-of-bounds",
                "expected the head of a record, found the end of the payload; " + TRUNCATED_HINT,
                where=self._location,
            )
        self.position += size
        return chunk


def walk(source: HeaderSource, start: int, end: int, header: Header, location: str) -> Spans:
    """Return the location of every array of the payload between ``start`` and ``end``.

    Raises
    ------
    FormatError
        ``wdelta.record-out-of-bounds``, ``wdelta.record-foreign``, ``wdelta.record-duplicate``,
        ``wdelta.record-missing``, ``wdelta.record-dtype``, ``wdelta.record-shape``, ``wdelta.record-length``,
        ``wdelta.utf8``.
    """
    entries = header.tensors
    longest = _longest_name(entries)
    names = {name: _records_of(entry) for name, entry in entries.items()}
    field_bytes = max(
        [LONGEST_FIELD, *(len(text.encode()) for names_of_tensor in names.values() for text in names_of_tensor)]
    )
    spans: dict[str, dict[str, Span]] = {}
    position = start
    if end - start > source.gap * max(_READ_OVER, 2 * len(entries)):  # a tensor has at least two arrays
        max_head = longest + field_bytes + LONGEST + _FIXED
        source.expect((head_at, min(max_head, end - head_at)) for head_at in _guessed_heads(start, end, entries))
    while position < end:
        head, size = _read_head(source, position, end, longest, field_bytes, f"{location} at byte {position}")
        position += size
        spot = f"{location}: {head.tensor[:200]}: {head.field}"
        entry = entries.get(head.tensor)
        name = None if entry is None else names[head.tensor].get(head.field)
        if entry is None or name is None:
            raise FormatError(
                "wdelta.record-foreign", "expected an array that the header refers to, found another array", where=spot
            )
        located = spans.setdefault(head.tensor, {})
        if name in located:
            raise FormatError("wdelta.record-duplicate", "expected each array once, found it again", where=spot)
        if head.length > end - position:
            raise FormatError(
                "wdelta.record-out-of-bounds",
                f"expected at most {end - position} bytes, found {head.length}: the file was cut off",
                where=spot,
            )
        located[name] = _check_span(head, name, entry, position, spot)
        position += head.length
    for name, entry in entries.items():
        _check_complete(spans.get(name, {}), entry, f"{location}: {name[:200]}")
    return spans


def _longest_name(names: Iterable[str]) -> int:
    return max((len(name.encode("utf-8", "surrogatepass")) for name in names), default=0)


def _records_of(entry: Entry) -> dict[str, str]:
    """Return the field for each possible name of a record.

    A field's record may have the name that ``entry`` declares, or the name of the field.
    """
    fields = STRATEGIES[entry.strategy].fields
    return {entry.record_of(field): field for field in fields} | {field: field for field in fields}


def _guessed_heads(start: int, end: int, entries: Mapping[str, Entry]) -> list[int]:
    """Return the predicted offsets of records' heads: arrays in the order of the header, without gaps.

    With predicted offsets, all heads can be read together. The result is empty if the predicted lengths do not add up
    to the length of the payload. Types and numbers of indices are not in the header. They are predicted as Ingot's
    writer and deltatensors write them: all have the first or the last permitted type, and numbers follow from the
    sparsity.
    """
    for choice in (0, -1):
        heads = []
        position = start
        for name, entry in entries.items():
            for field, count in entry.counts().items():
                spelling = STRATEGIES[entry.strategy].fields[field][choice]
                heads.append(position)
                position += head_size(name, field, spelling)
                position += (_usual_count(entry) if count is None else count) * ITEM[spelling][1]
        if position == end:
            return heads
    return []


def _usual_count(entry: Entry) -> int:
    """Return the number of differences that writers store for the entry's sparsity.

    This is at least one, unless the tensor is empty.
    """
    share = entry.sparsity or 0.0
    return min(entry.size, max(1, int(entry.size * (1.0 - share)))) if 0 <= share <= 1 else 0


def _read_head(
    source: ByteSource, position: int, end: int, longest: int, field_bytes: int, location: str
) -> tuple[Head, int]:
    max_head = longest + field_bytes + LONGEST + _FIXED
    reader = _Head(read_bytes(source, position, min(max_head, end - position)), location)
    tensor = reader.text(longest, "wdelta.record-foreign", "a tensor's name")
    name = reader.text(field_bytes, "wdelta.record-foreign", "a field's name")
    dtype = reader.text(LONGEST, "wdelta.record-dtype", "an element type")
    rank = reader.number("I")
    spot = f"{location}: {tensor[:200]}: {name}"
    if rank > MAX_RANK:
        raise FormatError("wdelta.record-shape", f"expected at most {MAX_RANK} dimensions, found {rank}", where=spot)
    if rank > 1:  # all known writers use rank 1
        sizes_start = position + reader.position
        sizes = _Head(read_bytes(source, sizes_start, min(8 * rank + 8, end - sizes_start)), location)
        count = element_count([sizes.number("Q") for _ in range(rank)], "wdelta.record-shape", spot)
        return Head(tensor, name, dtype, count, sizes.number("Q")), reader.position + sizes.position
    count = reader.number("Q") if rank else 1
    return Head(tensor, name, dtype, count, reader.number("Q")), reader.position


def _check_span(head: Head, field: str, entry: Entry, offset: int, location: str) -> Span:
    """Return the location of an array, the type of its part, and the type in the file if it differs."""
    usual = STRATEGIES[entry.strategy].fields[field]
    stored = dtype_of(head.dtype)
    dtype = None if stored is None else part_dtype(field, stored)
    if stored is None or dtype is None:
        raise FormatError(
            "wdelta.record-dtype", f"expected {' or '.join(usual)}, found {head.dtype[:80]!r}", where=location
        )
    if head.length != head.elements * stored.itemsize:
        raise FormatError(
            "wdelta.record-length",
            f"expected {head.elements * stored.itemsize} bytes for {head.elements} elements, found {head.length}",
            where=location,
        )
    _check_count(head, field, entry, location)
    if head.dtype in usual:
        return Span(ITEM[head.dtype][0], head.elements, offset, head.length)
    return Span(dtype, head.elements, offset, head.length, stored.str if head.dtype != "bfloat16" else head.dtype)


def _check_count(head: Head, field: str, entry: Entry, location: str) -> None:
    count = entry.counts()[field]
    if count is None:
        if head.elements > entry.size:
            raise FormatError(
                "wdelta.record-shape", f"expected at most {entry.size} elements, found {head.elements}", where=location
            )
    elif head.elements != count:
        raise FormatError("wdelta.record-shape", f"expected {count} elements, found {head.elements}", where=location)


def _check_complete(spans: Mapping[str, Span], entry: Entry, location: str) -> None:
    for name in STRATEGIES[entry.strategy].fields:
        if name not in spans:
            raise FormatError("wdelta.record-missing", f"expected an array {name!r}, but it is missing", where=location)
    if entry.strategy == "sparse" and spans["indices"].count != spans["values"].count:
        raise FormatError(
            "wdelta.record-shape",
            f"expected a value for each of {spans['indices'].count} indices, found {spans['values'].count}",
            where=location,
        )
