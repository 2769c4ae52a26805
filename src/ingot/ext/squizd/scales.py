"""Scale tables (SQUIZD document, section 8): entries of id, scale and zero point, and a part's view of one column."""

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
# Entries that are looked at together: few enough that they and what comes of them stay in the nearest caches.
_PIECE = 1 << 14
# A table holds 2**32 - 1 entries; nobody needs so many tables, and a file of empty ones would take long to walk.
_MOST_TABLES = 4096

Array = np.ndarray[Any, np.dtype[Any]]
TablePlaces = Sequence[tuple[int, int]]
"""Offset of the first entry and number of entries of each scale table."""


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive entries of one matrix: where the first lies in the file, how many there are, and their id."""

    offset: int
    count: int
    id: int


def table_header(count: int) -> bytes:
    """Return what stands before ``count`` entries."""
    return SCALES_MAGIC + struct.pack("<I", count)


def read_entries(source: ByteSource, offset: int, count: int) -> Array:
    """Return ``count`` entries at ``offset``: a view where the source is mapped."""
    return read_array(source, offset, count * SCALE_ENTRY).view(ENTRY)


def entries_at(source: HeaderSource, offsets: Sequence[int]) -> Array:
    """Return the entries at these offsets."""
    entries = np.empty(len(offsets), ENTRY)
    if source.mapped and offsets:
        low = min(offsets)
        data = np.frombuffer(source.view(low, max(offsets) + SCALE_ENTRY - low), np.uint8)
        at = np.array(offsets, np.int64) - low
        entries.view(np.uint8).reshape(-1, SCALE_ENTRY)[:] = data[at[:, None] + np.arange(SCALE_ENTRY)]
        return entries
    source.expect((offset, SCALE_ENTRY) for offset in offsets)
    for index in sorted(range(len(offsets)), key=offsets.__getitem__):
        source.readinto(offsets[index], entries[index : index + 1].view(np.uint8).data)
    return entries


def read_array(source: ByteSource, offset: int, size: int) -> Array:
    """Return ``size`` bytes at ``offset``: a view where the source is mapped."""
    if source.mapped:
        return np.frombuffer(source.view(offset, size), np.uint8)
    data = np.empty(size, np.uint8)
    source.readinto(offset, data.data)
    return data


class EntrySource:
    """One column of a run of entries as the bytes of a part: gathered, and narrowed to the type it was written from.

    Parameters
    ----------
    source : ByteSource
        The file; not closed here.
    run : Run
    role : {"scales", "zeros"}
    dtype : {"f32", "f16", "bf16"}
    absent_zeros : bool
        Check that zero points are 0, because the tensor states that it has none.
    where : str

    Raises
    ------
    FormatError
        On reading: ``squizd.scale-id`` (an entry of another matrix), ``squizd.scale-dtype`` (a number that ``dtype``
        cannot hold), ``squizd.zero-point`` (one where there should be none).
    """

    mapped = False

    def __init__(self, source: ByteSource, run: Run, role: str, dtype: str, *, absent_zeros: bool, where: str) -> None:
        self.name = source.name
        self._source, self._run, self._index, self._where = source, run, COLUMN[role], where
        self._dtype, self._item = dtype, numpy_dtype(dtype).itemsize
        self._absent_zeros = absent_zeros
        self.size = run.count * self._item

    def view(self, offset: int, length: int) -> memoryview:
        """Gather the bytes into fresh memory."""
        if not offset and length == self.size:
            return self._bytes(0, self._run.count).data
        out = np.empty(length, np.uint8)
        self.readinto(offset, out.data)
        return out.data

    def readinto(self, offset: int, out: memoryview) -> None:
        """Fill ``out`` with the column's bytes from ``offset`` on."""
        item = self._item
        target, done = np.frombuffer(out, np.uint8), 0
        while done < target.size:
            first, skip = divmod(offset + done, item)
            count = min(_PIECE, -(-(target.size - done + skip) // item))
            values = self._bytes(first, count)[skip:]
            size = min(values.size, target.size - done)
            target[done : done + size] = values[:size]
            done += size

    def changed(self) -> bool:
        return self._source.changed()

    def close(self) -> None:
        pass

    def _bytes(self, first: int, count: int) -> Array:
        """Return entries ``first`` and on as file-order bytes."""
        values = self._column(first, count)
        item = f"u{values.itemsize}"
        return values.view(item).astype(f"<{item}", copy=False).view(np.uint8)

    def _column(self, first: int, count: int) -> Array:
        offset, size = self._run.offset + first * SCALE_ENTRY, count * SCALE_ENTRY
        column = gather(read_array(self._source, offset, size), self._run.id, self._index, self._dtype)
        if not column.own:
            raise FormatError(
                "squizd.scale-id",
                f"expected scale entries of tensor id {self._run.id:#018x}, found another",
                where=self._where,
            )
        if self._absent_zeros and column.other_filled:
            raise FormatError("squizd.zero-point", "expected zero points of 0, found another", where=self._where)
        if not column.exact:
            raise FormatError(
                "squizd.scale-dtype",
                f"expected scales that {self._dtype} holds, found one that it does not",
                where=self._where,
            )
        return column.values


def tables(source: ByteSource, start: int, where: str) -> tuple[list[tuple[int, int]], int]:
    """Walk the scale tables from ``start``; return (offset of the first entry, count) of each and where they end.

    Raises ``FormatError`` ``squizd.scale-table``: a table that reaches past the end of the file, or too many of them.
    """
    located: list[tuple[int, int]] = []
    at = start
    while at < source.size:
        head = bytes(source.view(at, min(TABLE_HEADER, source.size - at)))
        if not SCALES_MAGIC.startswith(head[:4]):
            break
        count = int.from_bytes(head[4:], "little")
        end = at + TABLE_HEADER + count * SCALE_ENTRY  # past the end of a file that was cut off in the table's header
        if end > source.size or len(located) == _MOST_TABLES:
            raise FormatError(
                "squizd.scale-table",
                f"expected {count} scale entries at byte {at} of one of {_MOST_TABLES} tables, found a file that ends "
                f"at byte {source.size} and table {len(located) + 1}",
                where=where,
            )
        located.append((at + TABLE_HEADER, count))
        at = end
    return located, at


def runs(source: ByteSource, offset: int, count: int, most: int, where: str) -> list[Run]:
    """Return the runs of equal ids among ``count`` entries at ``offset``.

    Raises ``FormatError`` ``squizd.scale-count``: more than ``most`` of them.
    """
    located: list[Run] = []
    for start in range(0, count, _PIECE):
        ids = read_entries(source, offset + start * SCALE_ENTRY, min(_PIECE, count - start))["id"]
        edges = np.flatnonzero(ids[1:] != ids[:-1]) + 1
        bounds = [0, *edges.tolist(), ids.size]
        for begin, stop in pairwise(bounds):
            id = int(ids[begin])
            if located and located[-1].id == id:
                last = located.pop()
                located.append(Run(last.offset, last.count + stop - begin, id))
            else:
                located.append(Run(offset + (start + begin) * SCALE_ENTRY, stop - begin, id))
        if len(located) > most:
            raise FormatError(
                "squizd.scale-count", f"expected scales of {most} matrices, found those of more", where=where
            )
    return located
