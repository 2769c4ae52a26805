"""Read the same range of bytes from several rows of a part, and create parts whose bytes are computed on access."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from ingot.model.bytesource import DerivedSource
from ingot.model.part import Part
from ingot.model.tensor import Array

_CACHED = 1 << 23  # bytes of rows that are computed and cached at a time
_FIRST = 1 << 20  # the same for the first chunk
_READ = 1 << 20  # bytes that are read at a time to extract a range from each row
_FAR = 16  # if a row is longer than the range by this factor, only the range is read
_STEP = 32  # chunks begin at multiples of this number of rows: 32 codes fill complete words for any number of bits


class Windows:
    """A part as a matrix of bytes [rows, width], from which ``read`` returns a submatrix.

    A mapped part is not copied, and its digest is checked once. If a part is raw but not mapped, only the requested
    rows are read; of much longer rows than requested, only the requested bytes. A compressed part is decompressed and
    cached.
    """

    def __init__(self, part: Part, rows: int, width: int) -> None:
        self._part = part
        self.rows = rows
        self.width = width
        self._bytes: Array | None = None

    def all_bytes(self) -> Array | None:
        """Return all bytes as a 1-d array if the part is mapped or compressed; else None."""
        part = self._part
        if self._bytes is None and (part.encoding != "raw" or part.source.mapped):
            self._bytes = np.frombuffer(part.view(), np.uint8)
        return self._bytes

    def read(self, rows: slice, start: int, stop: int) -> Array:
        """Return bytes ``start`` to ``stop`` of each row of ``rows``, [rows, bytes]."""
        data = self.all_bytes()
        count = rows.stop - rows.start
        if not count or stop == start:
            return np.empty((count, stop - start), np.uint8)
        if data is not None:
            return data.reshape(self.rows, self.width)[rows, start:stop]
        out = np.empty((count, stop - start), np.uint8)
        if stop - start == self.width:
            self._part.readinto(rows.start * self.width, out.reshape(-1).data)
        elif self.width > _FAR * (stop - start):
            for index in range(count):
                self._part.readinto((rows.start + index) * self.width + start, out[index].data)
        else:  # reading the bytes between ranges is faster than a call per range
            lines = max(1, _READ // self.width)
            buffer = np.empty((min(lines, count), self.width), np.uint8)
            for first in range(0, count, lines):
                batch = buffer[: count - first]
                self._part.readinto((rows.start + first) * self.width, batch.reshape(-1).data)
                out[first : first + len(batch)] = batch[:, start:stop]
        return out


class Watched(Protocol):
    """The methods of a byte source that ``ComputedRows`` uses."""

    @property
    def name(self) -> str:
        """The source's location, for error messages."""
        ...

    def changed(self) -> bool:
        """Return whether the source changed since it was opened; see ``ByteSource.changed``."""
        ...


class ComputedRows(DerivedSource):
    """Rows of bytes that ``make(first, last)`` computes on access.

    At most ``max_bytes`` computed bytes are cached. ``make`` needs ``extra_bytes`` of memory. The first chunk is small,
    because some readers need only the beginning. If ``again`` is true, each call of ``make`` reads the entire source.
    """

    mapped = False
    again = False

    def __init__(
        self,
        source: Watched,
        rows: int,
        width: int,
        make: Callable[[int, int], Array],
        max_bytes: int = _CACHED,
        extra_bytes: int = 0,
    ) -> None:
        self._source = source
        self._rows = rows
        self._width = width
        self._make = make
        self.name = source.name
        self.size = rows * width
        self._max_rows = max(1, max_bytes // max(1, width) // _STEP) * _STEP
        self._step = self._first_rows = min(self._max_rows, max(1, _FIRST // max(1, width) // _STEP) * _STEP)
        self._first = 0
        self._cache = np.empty(0, np.uint8)
        self._extra_bytes = extra_bytes

    def working_bytes(self) -> int:
        """Return twice the bytes of a chunk, because each computed byte needs one source byte in memory."""
        return 2 * min(self.size, self._max_rows * self._width) + self._extra_bytes

    def view(self, offset: int, length: int) -> memoryview:
        out = np.empty(length, np.uint8).data
        self.readinto(offset, out)
        return out

    @property
    def by_chunks(self) -> bool:
        """Whether the time for a chunk is proportional to its rows; this holds if the source is in memory."""
        return bool(getattr(self._source, "mapped", False))

    def whole_rows(self, offset: int, length: int) -> Array | None:
        """Return ``length`` bytes that one call of ``make`` computes; the caller must not write to them.

        Return None if the range does not consist of complete rows, or if its first row is cached. Unless ``again`` is
        set, also return None if the range has more rows than the cache.
        """
        (row, before), (count, after) = divmod(offset, max(self._width, 1)), divmod(length, max(self._width, 1))
        if before or after or not count or row < self._first + self._cache.size // max(self._width, 1):
            return None
        if count > self._max_rows and not self.again:
            return None
        return self._make(row, row + count).reshape(-1).view(np.uint8)

    def readinto(self, offset: int, out: memoryview) -> None:
        if not out.nbytes:
            return
        target = np.frombuffer(out, np.uint8)
        filled = 0
        while filled < target.size:
            position = offset + filled - self._first * self._width
            if not 0 <= position < self._cache.size:
                row = (offset + filled) // self._width // _STEP * _STEP
                goes_on = self._cache.size and position == self._cache.size
                self._step = min(4 * self._step, self._max_rows) if goes_on else self._first_rows
                last = min(row + self._step, self._rows)
                self._first, self._cache = row, self._make(row, last).reshape(-1).view(np.uint8)
                continue
            chunk = self._cache[position : position + target.size - filled]
            target[filled : filled + chunk.size] = chunk
            filled += chunk.size
        if offset + target.size == self.size:  # a sequential reader has all bytes now
            self._first, self._cache = 0, np.empty(0, np.uint8)

    def changed(self) -> bool:
        return self._source.changed()

    def close(self) -> None:
        """Do nothing: another object owns the source."""


def computed_part(
    part: Part, dtype: str, rows: int, width: int, make: Callable[[int, int], Array], *, again: bool = False
) -> Part:
    """Return a part of ``rows`` rows of ``width`` bytes, which ``make`` computes from ``part`` on access."""
    source = ComputedRows(part.source, rows, width, make)
    source.again = again
    return Part(dtype, source.size, source, where=part.where)
