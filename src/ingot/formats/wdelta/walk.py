"""One walk over the heads of all records: where each array lies. No array is read (spec/wdelta.md, "Payload")."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from ingot.core.checked import MAX_RANK, element_count
from ingot.errors import FormatError
from ingot.formats.foreign import CUT_OFF
from ingot.formats.wdelta.entries import Entry
from ingot.formats.wdelta.header import Header
from ingot.formats.wdelta.layout import ITEM, LONGEST_DTYPE, LONGEST_FIELD, STRATEGIES, Head, Span, head_size
from ingot.formats.wdelta.records import FIXED, longest_of, read_columns
from ingot.model.bytesource import ByteSource
from ingot.model.ranges import HeaderSource, read_bytes

# A payload of so many gaps, or whose heads are so close, is read over in a few growing windows; guessing where its
# heads are would take longer.
_READ_OVER = 64


Spans = Mapping[str, Mapping[str, Span]]
"""All arrays by tensor and field; tensors in the order of their first records."""


class _Head:
    """Takes the fields of one head from the bytes at hand; whatever does not fit is refused by rule."""

    def __init__(self, data: bytes, where: str) -> None:
        self._data, self._where = data, where
        self.position = 0

    def number(self, code: str) -> int:
        """Return the next little-endian number."""
        size = struct.calcsize(code)
        value: int = struct.unpack(f"<{code}", self._bytes(size))[0]
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
                "expected the head of a record, found the end of the payload; " + CUT_OFF,
                where=self._where,
            )
        self.position += size
        return piece


def walk(source: HeaderSource, start: int, end: int, header: Header, where: str) -> Spans:
    """Locate every array of the payload between ``start`` and ``end``.

    What writers make is decoded into columns; anything else is looked at head by head, which says what is wrong.

    Raises
    ------
    FormatError
        ``wdelta.record-out-of-bounds``, ``wdelta.record-foreign``, ``wdelta.record-duplicate``,
        ``wdelta.record-missing``, ``wdelta.record-dtype``, ``wdelta.record-shape``, ``wdelta.record-length``,
        ``wdelta.utf8``.
    """
    entries = header.tensors
    if end - start > source.gap * max(_READ_OVER, 2 * len(entries)):  # a tensor has two arrays or more
        longest = longest_of(entries)
        source.expect((start_of_head, longest + FIXED) for start_of_head in _guessed_heads(start, end, entries))
    found = None if header.columns is None else read_columns(source, start, end, header.columns)
    return found or _walk(source, start, end, entries, where)


def _walk(source: HeaderSource, start: int, end: int, entries: Mapping[str, Entry], where: str) -> Spans:
    longest = longest_of(entries)
    spans: dict[str, dict[str, Span]] = {}
    position = start
    if end - start > _READ_OVER * source.gap:
        longest = longest_of(entries)
        source.expect((start_of_head, longest + FIXED) for start_of_head in _guessed_heads(start, end, entries))
    while position < end:
        head, size = _read_head(source, position, end, longest, f"{where} at byte {position}")
        position += size
        spot = f"{where}: {head.tensor[:200]}: {head.field}"
        entry = entries.get(head.tensor)
        if entry is None or head.field not in STRATEGIES[entry.strategy].fields:
            raise FormatError(
                "wdelta.record-foreign", "expected an array that the header refers to, found another", where=spot
            )
        known = spans.setdefault(head.tensor, {})
        if head.field in known:
            raise FormatError("wdelta.record-duplicate", "expected each array once, found it again", where=spot)
        if head.length > end - position:
            raise FormatError(
                "wdelta.record-out-of-bounds",
                f"expected at most {end - position} bytes, found {head.length}: the file was cut off",
                where=spot,
            )
        _check_head(head, entry, spot)
        known[head.field] = Span(ITEM[head.dtype][0], head.elements, position, head.length)
        position += head.length
    for name, entry in entries.items():
        _check_complete(spans.get(name, {}), entry, f"{where}: {name[:200]}")
    return spans


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


def _read_head(source: ByteSource, position: int, end: int, longest: int, where: str) -> tuple[Head, int]:
    taken = _Head(read_bytes(source, position, min(longest + FIXED, end - position)), where)
    tensor = taken.text(longest, "wdelta.record-foreign", "a tensor's name")
    name = taken.text(LONGEST_FIELD, "wdelta.record-foreign", "a field's name")
    dtype = taken.text(LONGEST_DTYPE, "wdelta.record-dtype", "an element type")
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


def _check_head(head: Head, entry: Entry, where: str) -> None:
    wanted = STRATEGIES[entry.strategy].fields[head.field]
    if head.field == "outlier_idx" and entry.layout == 1:
        wanted = wanted[:1]
    if head.dtype not in wanted:
        raise FormatError(
            "wdelta.record-dtype", f"expected {' or '.join(wanted)}, found {head.dtype[:80]!r}", where=where
        )
    if head.length != head.elements * ITEM[head.dtype][1]:
        raise FormatError(
            "wdelta.record-length",
            f"expected {head.elements * ITEM[head.dtype][1]} bytes for {head.elements} elements, found {head.length}",
            where=where,
        )
    count = entry.counts()[head.field]
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
