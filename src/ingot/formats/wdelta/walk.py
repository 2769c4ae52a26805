"""One walk over the heads of all records: where each array lies. No array is read (spec/wdelta.md, "Payload")."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping

from ingot.core.checked import MAX_RANK, element_count
from ingot.errors import FormatError
from ingot.formats.foreign import TRUNCATED_HINT
from ingot.formats.wdelta.entries import Entry
from ingot.formats.wdelta.header import Header
from ingot.formats.wdelta.layout import ITEM, LONGEST_DTYPE, LONGEST_FIELD, STRATEGIES, Head, Span, head_size
from ingot.formats.wdelta.stored_types import LONGEST, dtype_of, part_dtype
from ingot.model.bytesource import ByteSource
from ingot.model.ranges import HeaderSource, read_bytes

# A payload of so many gaps, or whose heads are so close, is read over in a few growing windows; guessing where its
# heads are would take longer.
_READ_OVER = 64


_NUMBERS = {code: struct.Struct(f"<{code}") for code in "IQ"}
# Bytes of a head without the tensor's name: three lengths, field, element type, rank, one size, the data's length.
_FIXED = 4 + 4 + LONGEST_FIELD + 4 + LONGEST_DTYPE + 4 + 8 + 8

Spans = Mapping[str, Mapping[str, Span]]
"""All arrays by tensor and field; tensors in the order of their first records."""


class _Head:
    """Takes the fields of one head from the bytes at hand; whatever does not fit is refused by rule."""

    def __init__(self, data: bytes, where: str) -> None:
        self._data, self._where = data, where
        self.position = 0

    def number(self, code: str) -> int:
        """Return the next little-endian number."""
        form = _NUMBERS[code]
        value: int = form.unpack(self._bytes(form.size))[0]
        return value

    def text(self, longest: int, rule: str, what: str) -> str:
        """Return the next string, whose length comes first."""
        length = self.number("I")
        if length > longest:
            raise FormatError(
                rule, f"expected {what} of at most {longest} bytes, found a length of {length}", where=self._where
            )
        try:
            return self._bytes(length).decode("utf-8")
        except UnicodeDecodeError as error:
            raise FormatError("wdelta.utf8", f"{what} is not UTF-8: {error.reason}", where=self._where) from error

    def _bytes(self, size: int) -> bytes:
        piece = self._data[self.position : self.position + size]
        if len(piece) != size:
            raise FormatError(
                "wdelta.record-out-of-bounds",
                "expected the head of a record, found the end of the payload; " + TRUNCATED_HINT,
                where=self._where,
            )
        self.position += size
        return piece


def walk(source: HeaderSource, start: int, end: int, header: Header, where: str) -> Spans:
    """Locate every array of the payload between ``start`` and ``end``.

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
    field_bytes = max([LONGEST_FIELD, *(len(text.encode()) for own in names.values() for text in own)])
    spans: dict[str, dict[str, Span]] = {}
    position = start
    if end - start > source.gap * max(_READ_OVER, 2 * len(entries)):  # a tensor has two arrays or more
        most = longest + field_bytes + LONGEST + _FIXED
        source.expect((head_at, min(most, end - head_at)) for head_at in _guessed_heads(start, end, entries))
    while position < end:
        head, size = _read_head(source, position, end, longest, field_bytes, f"{where} at byte {position}")
        position += size
        spot = f"{where}: {head.tensor[:200]}: {head.field}"
        entry = entries.get(head.tensor)
        name = None if entry is None else names[head.tensor].get(head.field)
        if entry is None or name is None:
            raise FormatError(
                "wdelta.record-foreign", "expected an array that the header refers to, found another", where=spot
            )
        known = spans.setdefault(head.tensor, {})
        if name in known:
            raise FormatError("wdelta.record-duplicate", "expected each array once, found it again", where=spot)
        if head.length > end - position:
            raise FormatError(
                "wdelta.record-out-of-bounds",
                f"expected at most {end - position} bytes, found {head.length}: the file was cut off",
                where=spot,
            )
        known[name] = _checked_span(head, name, entry, position, spot)
        position += head.length
    for name, entry in entries.items():
        _check_complete(spans.get(name, {}), entry, f"{where}: {name[:200]}")
    return spans


def _longest_name(names: Iterable[str]) -> int:
    return max((len(name.encode("utf-8", "surrogatepass")) for name in names), default=0)


def _records_of(entry: Entry) -> dict[str, str]:
    """Return the fields of a tensor by the names that their records may have: the field's own, and its reference."""
    fields = STRATEGIES[entry.strategy].fields
    return {entry.record_of(field): field for field in fields} | {field: field for field in fields}


def _guessed_heads(start: int, end: int, entries: Mapping[str, Entry]) -> list[int]:
    """Return where the heads of records are expected: arrays in the order of the header, without gaps.

    A guess, so that they can be read together; none where the lengths do not come to those of the payload. What the
    header does not tell is taken as our own writer and deltatensors have it: positions in the first type that they may
    have or in the last, and as many of them as the sparsity leaves.
    """
    for choice in (0, -1):
        heads, position = [], start
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
    """Return how many differences a writer keeps of a sparsity: at least one, if there is one."""
    share = entry.sparsity or 0.0
    return min(entry.size, max(1, int(entry.size * (1.0 - share)))) if 0 <= share <= 1 else 0


def _read_head(
    source: ByteSource, position: int, end: int, longest: int, field_bytes: int, where: str
) -> tuple[Head, int]:
    most = longest + field_bytes + LONGEST + _FIXED
    taken = _Head(read_bytes(source, position, min(most, end - position)), where)
    tensor = taken.text(longest, "wdelta.record-foreign", "a tensor's name")
    name = taken.text(field_bytes, "wdelta.record-foreign", "a field's name")
    dtype = taken.text(LONGEST, "wdelta.record-dtype", "an element type")
    rank = taken.number("I")
    spot = f"{where}: {tensor[:200]}: {name}"
    if rank > MAX_RANK:
        raise FormatError("wdelta.record-shape", f"expected at most {MAX_RANK} dimensions, found {rank}", where=spot)
    if rank > 1:  # every writer has one
        rest = position + taken.position
        sizes = _Head(read_bytes(source, rest, min(8 * rank + 8, end - rest)), where)
        count = element_count([sizes.number("Q") for _ in range(rank)], "wdelta.record-shape", spot)
        return Head(tensor, name, dtype, count, sizes.number("Q")), taken.position + sizes.position
    count = taken.number("Q") if rank else 1
    return Head(tensor, name, dtype, count, taken.number("Q")), taken.position


def _checked_span(head: Head, field: str, entry: Entry, offset: int, where: str) -> Span:
    """Return where an array lies, which type its part has, and which type the file has where that is another."""
    usual, stored = STRATEGIES[entry.strategy].fields[field], dtype_of(head.dtype)
    dtype = None if stored is None else part_dtype(field, stored)
    if stored is None or dtype is None:
        raise FormatError(
            "wdelta.record-dtype", f"expected {' or '.join(usual)}, found {head.dtype[:80]!r}", where=where
        )
    if head.length != head.elements * stored.itemsize:
        raise FormatError(
            "wdelta.record-length",
            f"expected {head.elements * stored.itemsize} bytes for {head.elements} elements, found {head.length}",
            where=where,
        )
    _check_count(head, field, entry, where)
    if head.dtype in usual:
        return Span(ITEM[head.dtype][0], head.elements, offset, head.length)
    return Span(dtype, head.elements, offset, head.length, stored.str if head.dtype != "bfloat16" else head.dtype)


def _check_count(head: Head, field: str, entry: Entry, where: str) -> None:
    count = entry.counts()[field]
    if count is None:
        if head.elements > entry.size:
            raise FormatError(
                "wdelta.record-shape", f"expected at most {entry.size} elements, found {head.elements}", where=where
            )
    elif head.elements != count:
        raise FormatError("wdelta.record-shape", f"expected {count} elements, found {head.elements}", where=where)


def _check_complete(spans: Mapping[str, Span], entry: Entry, where: str) -> None:
    for name in STRATEGIES[entry.strategy].fields:
        if name not in spans:
            raise FormatError("wdelta.record-missing", f"expected an array {name!r}, found none", where=where)
    if entry.strategy == "sparse" and spans["indices"].count != spans["values"].count:
        raise FormatError(
            "wdelta.record-shape",
            f"expected a value for each of {spans['indices'].count} indices, found {spans['values'].count}",
            where=where,
        )
