"""Small ranged reads, in one place: single ranges, many ranges joined into few requests, and headers read ahead.

A request to a disk costs microseconds, one to another machine milliseconds. What is read before the first weight is
many small pieces: they are asked for together, or served from a few larger reads.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ingot.model.bytesource import ByteSource, Range, Ranged

Array = NDArray[np.int64]

GAP = 1 << 16
"""Bytes between two ranges that are read rather than left out, where a source does not say otherwise."""

MAX_REQUEST = 8 << 20
"""Joined ranges do not grow past this; a single range may be longer."""

# The first window of a header source, and by how much the next one grows where reading goes on near the last one.
_WINDOW = 1 << 16
_GROWTH = 4
# A header source holds so many bytes at most, beside what one batch of expected ranges takes.
_HELD = 16 << 20
# What is passed over comes into so many bytes, which stay in a near cache: fresh memory takes longer than reading.
_PASSING = 1 << 18


def read_bytes(source: ByteSource, offset: int, size: int) -> bytes:
    """Return ``size`` bytes at ``offset`` by a read call; errors as ``ByteSource.readinto``."""
    out = bytearray(size)
    source.readinto(offset, memoryview(out))
    return bytes(out)


def read_joined(source: ByteSource, ranges: Sequence[Range]) -> bytearray:
    """Return the bytes of several ranges, one behind the other, in memory of their own; errors as ``read_bytes``."""
    out = bytearray(sum(length for _, length in ranges))
    at = 0
    for offset, length in ranges:
        source.readinto(offset, memoryview(out)[at : at + length])
        at += length
    return out


def coalesced(ranges: Iterable[Range], gap: int = GAP, most: int = MAX_REQUEST) -> list[Range]:
    """Return few ranges that hold all of these, in order.

    Two are joined where at most ``gap`` bytes lie between them and both together span at most ``most`` bytes. What is
    no range at all, with a number below 0, stays by itself, for the source to refuse.
    """
    joined: list[Range] = []
    for start, length in sorted(ranges):
        if joined:
            first, size = joined[-1]
            span = max(first + size, start + length) - first
            sound = min(first, size, length) >= 0
            if sound and start - (first + size) <= gap and (span <= most or span == size):
                joined[-1] = (first, span)
                continue
        joined.append((start, length))
    return joined


def read_ranges(source: ByteSource, ranges: Sequence[Range]) -> list[memoryview]:
    """Return the bytes of each range, in the order in which they were asked for; read with few requests.

    Raises ``IntegrityError`` as ``ByteSource.view`` for a range outside the source.
    """
    remote = distant(source)
    if remote is not None:
        return [*remote.ranges(ranges)]
    if source.mapped:
        return [source.view(offset, length) for offset, length in ranges]
    return pieces_of(ranges, {start: source.view(start, length) for start, length in coalesced(ranges)})


def pieces_of(ranges: Sequence[Range], joined: dict[int, memoryview]) -> list[memoryview]:
    """Cut ``ranges`` out of the ranges that ``coalesced`` made of them, which ``joined`` has by their beginnings."""
    starts = sorted(joined)
    views = []
    for offset, length in ranges:
        start = starts[bisect_right(starts, offset) - 1]
        views.append(joined[start][offset - start : offset - start + length])
    return views


class HeaderSource:
    """The bytes of another source for a format's reader, which reads many small pieces of it.

    A piece is served from a window that is read around its beginning. Windows grow while reading goes on close behind
    the last one. A reader that knows where it is going to read says so (``expect``): then these ranges are read
    together. What is read stays in memory, up to a limit; a piece larger than a window is read by itself and not kept.

    Whoever wants weights reads them from the source itself. One thread at a time.

    Parameters
    ----------
    source : ByteSource
        Not closed here.
    window : int
        Bytes of the first window; no more than a gap over which the source is read.
    """

    def __init__(self, source: ByteSource, window: int = _WINDOW) -> None:
        self._source = source
        self.name = source.name
        self.size = source.size
        self.mapped = source.mapped
        self._distant = distant(source)
        self.gap = GAP if self._distant is None else self._distant.gap
        self._first = self._window = min(window, self.gap)
        self._end = 0  # of the last window
        self._starts: list[int] = []
        self._pieces: list[memoryview] = []
        self._held = 0
        self._expected: list[Range] = []
        self._passing: memoryview | None = None

    def expect(self, ranges: Iterable[Range]) -> None:
        """Note what will be read: what lies in the file of these ranges is read together when one of them is asked for.

        Only a hint: a wrong range costs its reading, and what was not expected is read all the same.
        """
        inside = [_within(start, length, self.size) for start, length in ranges]
        if self._starts:
            inside = [range for range in inside if self._find(*range) is None]
        self._expected = coalesced((range for range in inside if range[1]), self.gap)

    def view(self, offset: int, length: int) -> memoryview:
        """Return bytes, from memory where they were read before; errors as those of the source."""
        if self.mapped:
            return self._source.view(offset, length)
        window = self._find(offset, length)
        return self._fetch(offset, length) if window is None else window

    def readinto(self, offset: int, out: memoryview) -> None:
        """Fill ``out``, from memory where the bytes were read before; errors as those of the source."""
        window = self._find(offset, out.nbytes)
        if window is None and out.nbytes > _PASSING and self._distant is None and not self._expected:
            self._source.readinto(offset, out)  # nobody asks for so much twice
            return
        if window is None:
            window = self._fetch(offset, out.nbytes)
        if out.nbytes:
            out.cast("B")[:] = window

    def has(self, offset: int, data: bytes) -> bool:
        """Whether these bytes lie there; errors as those of the source."""
        window = self._find(offset, len(data))
        return (self._fetch(offset, len(data)) if window is None else window) == data

    def window(self, offset: int, least: int) -> memoryview:
        """Return the bytes from ``offset`` on that are in memory, at least so many; errors as those of the source."""
        piece = self._find(offset, least)
        if piece is None:
            piece = self._fetch(offset, least)
        index = bisect_right(self._starts, offset) - 1
        if index >= 0 and offset - self._starts[index] + least <= len(self._pieces[index]):
            return self._pieces[index][offset - self._starts[index] :]
        return piece

    def passing(self, offset: int, least: int) -> memoryview:
        """As ``window``, of bytes that are passed over once, in order; valid until the next call."""
        size = min(_PASSING, self.size - offset)
        if not self._passes or self._expected or size < least or self._find(offset, least) is not None:
            return self.window(offset, least)
        return self._lent(offset, size)

    @property
    def _passes(self) -> bool:
        """Whether bytes that are not kept cost little to read again."""
        return self._distant is None and self._source.mapped

    def _lent(self, offset: int, size: int) -> memoryview:
        """Read at most ``_PASSING`` bytes into the memory for them."""
        if self._passing is None:
            self._passing = np.empty(_PASSING, np.uint8).data
        self._source.readinto(offset, self._passing[:size])
        return self._passing[:size]

    def pieces(self, starts: Array, lengths: Array) -> Iterator[tuple[slice, int, NDArray[np.uint8]]]:
        """Read ranges of less than a gap each, in the order of their starts, with few requests.

        Yields which of the ranges are next, and bytes that hold them, valid until the next ones are, with their place.
        Errors as those of the source.
        """
        spans = [*self._spans(starts, starts + lengths, _PASSING if self._passes else MAX_REQUEST)]
        self.expect(() if self._passes else ((first, last - first) for _, first, last in spans))
        for some, first, last in spans:
            size = last - first
            lent = self._passes and first >= 0 and size <= _PASSING and self._find(first, size) is None
            yield some, first, np.frombuffer(self._lent(first, size) if lent else self.window(first, size), np.uint8)

    def _spans(self, starts: Array, ends: Array, most: int) -> Iterator[tuple[slice, int, int]]:
        """Yield ranges that are read together, of so many bytes at most where they are several, from where to where."""
        at = 0
        apart = np.flatnonzero(starts[1:] - ends[:-1] > self.gap) + 1
        while at < starts.size:
            far = np.searchsorted(ends, starts[at] + most, "right")
            following = np.searchsorted(apart, at, "right")
            stop = min(int(far), int(apart[following]) if following < apart.size else starts.size)
            stop = max(stop, at + 1)
            yield slice(at, stop), int(starts[at]), int(ends[at:stop].max())
            at = stop

    def changed(self) -> bool:
        return self._source.changed()

    def close(self) -> None:
        """Nothing to do: the source belongs to somebody else."""

    def _find(self, offset: int, length: int) -> memoryview | None:
        index = bisect_right(self._starts, offset) - 1
        if index < 0 or length < 0 or offset + length > self._starts[index] + len(self._pieces[index]):
            return None
        start = offset - self._starts[index]
        return self._pieces[index][start : start + length]

    def _fetch(self, offset: int, length: int) -> memoryview:
        if offset < 0 or length < 0 or offset + length > self.size or length > MAX_REQUEST:
            return self._read(offset, length)
        index = bisect_right(self._expected, (offset, self.size)) - 1
        if index >= 0 and offset + length <= sum(self._expected[index]):
            batch = [*_batch(self._expected[index:])]
            pieces = self._read_all(batch)
            for (start, _), piece in zip(batch, pieces, strict=True):
                self._keep(start, piece)
            start = batch[0][0]
            piece = pieces[0]
        else:
            start = offset
            piece = self._read(offset, self._next_window(offset, length))
            self._keep(start, piece)
            self._end = start + len(piece)
        return piece[offset - start : offset - start + length]

    def _next_window(self, offset: int, length: int) -> int:
        near = self._starts and -self.gap <= offset - self._end <= self.gap
        self._window = min(self._window * _GROWTH, MAX_REQUEST) if near else self._first
        return min(max(length, self._window), self.size - offset)

    def _read(self, offset: int, length: int) -> memoryview:
        """Read without touching mapped memory, or let the source say why not."""
        if not self._source.mapped or offset < 0 or length < 0 or offset + length > self.size:
            return self._source.view(offset, length)
        out = np.empty(length, np.uint8).data
        self._source.readinto(offset, out)
        return out

    def _read_all(self, batch: Sequence[Range]) -> Sequence[memoryview]:
        if self._distant is not None:
            return self._distant.ranges(batch)
        return [self._read(*range) for range in batch]

    def _keep(self, start: int, piece: memoryview) -> None:
        if self._held + len(piece) > _HELD:
            self._starts = []
            self._pieces = []
            self._held = 0
        first = bisect_left(self._starts, start)
        last = first
        while last < len(self._starts) and self._starts[last] + len(self._pieces[last]) <= start + len(piece):
            self._held -= len(self._pieces[last])  # the new piece holds it
            last += 1
        self._starts[first:last], self._pieces[first:last] = [start], [piece]
        self._held += len(piece)


def is_distant(source: ByteSource) -> bool:
    """Whether each read of a source is a journey to another machine."""
    return isinstance(source, Ranged)


def distant(source: ByteSource) -> Ranged | None:
    """Return the source if it is on another machine; else None."""
    return source if isinstance(source, Ranged) else None


def _within(start: int, length: int, size: int) -> Range:
    """Return the part of a range that lies in a file of ``size`` bytes."""
    end = start + length
    if 0 <= start <= end <= size:
        return start, length
    first = min(max(start, 0), size)
    return first, max(0, min(end, size) - first)


def _batch(expected: Sequence[Range]) -> Iterator[Range]:
    """Yield ranges up to ``MAX_REQUEST`` bytes in all, at least one."""
    total = 0
    for range in expected:
        total += range[1]
        if total > MAX_REQUEST and total != range[1]:
            return
        yield range
