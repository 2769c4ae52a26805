"""Read scale tables (SQUIZD document, section 8), whose entries contain an id, a scale and a zero point."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from ingot.core.numeric.dtypes import numpy_dtype
from ingot.core.parsing.records import gather
from ingot.errors import FormatError
from ingot.ext.squizd.layout import SCALE_ENTRY, SCALES_MAGIC, TABLE_HEADER
from ingot.model.bytesource import ByteSource
from ingot.model.reading.ranges import HeaderSource

ENTRY = np.dtype([("id", "<u8"), ("scale", "<f4"), ("zero", "<f4")])
COLUMN = {"scales": 0, "zeros": 1}
# Number of entries that are processed in one chunk, so that intermediate results fit in the L1 or L2 cache.
_CHUNK = 1 << 14
# A table has up to 2**32 - 1 entries, so few tables suffice; the limit bounds the scan of a file of empty tables.
_MAX_TABLES = 4096

Array = np.ndarray[Any, np.dtype[Any]]
TableRanges = Sequence[tuple[int, int]]
"""Offset of the first entry and number of entries of each scale table."""


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive scale entries with one id: the offset of the first entry, their number, and the id."""

    offset: int
    count: int
    id: int


def table_header(count: int) -> bytes:
    """Return the header of a scale table with ``count`` entries."""
    return SCALES_MAGIC + struct.pack("<I", count)


def read_entries(source: ByteSource, offset: int, count: int) -> Array:
    """Return ``count`` entries at ``offset``; a view if the source is mapped."""
    return read_array(source, offset, count * SCALE_ENTRY).view(ENTRY)


def entries_at(source: HeaderSource, offsets: Sequence[int]) -> Array:
    """Return the scale entries at ``offsets``, read with few calls."""
    entries = np.empty(len(offsets), ENTRY)
    if source.mapped and offsets:
        low = min(offsets)
        data = np.frombuffer(source.view(low, max(offsets) + SCALE_ENTRY - low), np.uint8)
        relative_offsets = np.array(offsets, np.int64) - low
        entries.view(np.uint8).reshape(-1, SCALE_ENTRY)[:] = data[relative_offsets[:, None] + np.arange(SCALE_ENTRY)]
        return entries
    source.expect((offset, SCALE_ENTRY) for offset in offsets)
    for index in sorted(range(len(offsets)), key=offsets.__getitem__):
        source.readinto(offsets[index], entries[index : index + 1].view(np.uint8).data)
    return entries


def read_array(source: ByteSource, offset: int, size: int) -> Array:
    """Return ``size`` bytes at ``offset``; a view if the source is mapped."""
    if source.mapped:
        return np.frombuffer(source.view(offset, size), np.uint8)
    data = np.empty(size, np.uint8)
    source.readinto(offset, data.data)
    return data


class EntrySource:
    """Byte source of a part: the scales or zero points of a run of entries, converted from f32 to ``dtype``.

    Parameters
    ----------
    source : ByteSource
        The file, which the caller closes.
    run : Run
    role : {"scales", "zeros"}
    dtype : {"f32", "f16", "bf16"}
    absent_zeros : bool
        Whether to check that zero points are 0, because the tensor has none.
    location : str
        Location in error messages.

    Raises
    ------
    FormatError
        On reading: ``squizd.scale-id`` (an entry of another matrix), ``squizd.scale-dtype`` (a value that is not exact
        in ``dtype``), ``squizd.zero-point`` (a zero point other than 0 in a tensor without zero points).
    """

    mapped = False

    def __init__(
        self, source: ByteSource, run: Run, role: str, dtype: str, *, absent_zeros: bool, location: str
    ) -> None:
        self.name = source.name
        self._source = source
        self._run = run
        self._index = COLUMN[role]
        self._location = location
        self._dtype = dtype
        self._item = numpy_dtype(dtype).itemsize
        self._absent_zeros = absent_zeros
        self.size = run.count * self._item

    def view(self, offset: int, length: int) -> memoryview:
        """Return the bytes in newly allocated memory."""
        if not offset and length == self.size:
            return self._bytes(0, self._run.count).data
        out = np.empty(length, np.uint8)
        self.readinto(offset, out.data)
        return out.data

    def readinto(self, offset: int, out: memoryview) -> None:
        """Fill ``out`` with the column's bytes from ``offset`` on."""
        item = self._item
        target = np.frombuffer(out, np.uint8)
        filled = 0
        while filled < target.size:
            first, skip = divmod(offset + filled, item)
            count = min(_CHUNK, -(-(target.size - filled + skip) // item))
            values = self._bytes(first, count)[skip:]
            size = min(values.size, target.size - filled)
            target[filled : filled + size] = values[:size]
            filled += size

    def changed(self) -> bool:
        return self._source.changed()

    def close(self) -> None:
        pass

    def _bytes(self, first: int, count: int) -> Array:
        """Return ``count`` values from entry ``first`` on as bytes in file order."""
        values = self._column(first, count)
        item = f"u{values.itemsize}"
        return values.view(item).astype(f"<{item}", copy=False).view(np.uint8)

    def _column(self, first: int, count: int) -> Array:
        offset = self._run.offset + first * SCALE_ENTRY
        size = count * SCALE_ENTRY
        column = gather(read_array(self._source, offset, size), self._run.id, self._index, self._dtype)
        if not column.keys_match:
            raise FormatError(
                "squizd.scale-id",
                f"expected scale entries of tensor id {self._run.id:#018x}, found another id",
                where=self._location,
            )
        if self._absent_zeros and column.other_filled:
            raise FormatError(
                "squizd.zero-point", "expected zero points of 0, found another value", where=self._location
            )
        if not column.exact:
            raise FormatError(
                "squizd.scale-dtype",
                f"expected scales that are exact in {self._dtype}, found another value",
                where=self._location,
            )
        return column.values


def tables(source: ByteSource, start: int, location: str) -> tuple[list[tuple[int, int]], int]:
    """Return the scale tables that begin at ``start``, and the offset of their end.

    Each table is given by the offset of its first entry and by the number of its entries.

    Raises ``FormatError`` ``squizd.scale-table``: a table exceeds the file, or there are too many tables.
    """
    located: list[tuple[int, int]] = []
    offset = start
    while offset < source.size:
        head = bytes(source.view(offset, min(TABLE_HEADER, source.size - offset)))
        if not SCALES_MAGIC.startswith(head[:4]):
            break
        count = int.from_bytes(head[4:], "little")
        end = offset + TABLE_HEADER + count * SCALE_ENTRY  # exceeds a file that was truncated in the table's header
        if end > source.size or len(located) == _MAX_TABLES:
            raise FormatError(
                "squizd.scale-table",
                f"expected {count} scale entries at byte {offset} of one of {_MAX_TABLES} tables, found a file that "
                "ends "
                f"at byte {source.size} and table {len(located) + 1}",
                where=location,
            )
        located.append((offset + TABLE_HEADER, count))
        offset = end
    return located, offset


def runs(source: ByteSource, offset: int, count: int, max_runs: int, location: str) -> list[Run]:
    """Return the runs of equal ids among ``count`` entries at ``offset``.

    Raises ``FormatError`` ``squizd.scale-count``: there are more than ``max_runs`` runs.
    """
    located: list[Run] = []
    for start in range(0, count, _CHUNK):
        ids = read_entries(source, offset + start * SCALE_ENTRY, min(_CHUNK, count - start))["id"]
        edges = np.flatnonzero(ids[1:] != ids[:-1]) + 1
        bounds = [0, *edges.tolist(), ids.size]
        for begin, stop in pairwise(bounds):
            id = int(ids[begin])
            if located and located[-1].id == id:
                last = located.pop()
                located.append(Run(last.offset, last.count + stop - begin, id))
            else:
                located.append(Run(offset + (start + begin) * SCALE_ENTRY, stop - begin, id))
        if len(located) > max_runs:
            raise FormatError(
                "squizd.scale-count", f"expected scales of at most {max_runs} matrices, found more", where=location
            )
    return located
