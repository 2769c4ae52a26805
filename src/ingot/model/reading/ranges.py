"""Small ranged reads: single ranges, ranges merged into few requests, and prefetched headers.

A request to a disk takes microseconds, a request to another machine milliseconds. Readers read headers in many small
ranges. These are requested together or served from a few larger reads.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ingot.model.bytesource import ByteSource, Range, RangedSource

Array = NDArray[np.int64]

GAP = 1 << 16
"""The largest gap between two ranges that are read as one, unless a source states another gap."""

MAX_REQUEST = 8 << 20
"""The largest size of merged ranges. A single range may be longer."""

# The first window of a header source, and the growth of the next window if reads continue close to the last one.
_WINDOW = 1 << 16
_GROWTH = 4
# The most bytes that a header source caches, in addition to one batch of expected ranges.
_MAX_CACHED = 16 << 20
# Bytes of a reused buffer, which stay in the CPU's cache: clearing new memory takes longer than reading.
_SCRATCH = 1 << 18


def read_bytes(source: ByteSource, offset: int, size: int) -> bytes:
    """Return ``size`` bytes at ``offset`` by a read call. Raises the errors of ``ByteSource.readinto``."""
    out = bytearray(size)
    source.readinto(offset, memoryview(out))
    return bytes(out)


def read_joined(source: ByteSource, ranges: Sequence[Range]) -> bytearray:
    """Return the concatenated bytes of several ranges. Raises the errors of ``ByteSource.readinto``."""
    out = bytearray(sum(length for _, length in ranges))
    filled = 0
    for offset, length in ranges:
        source.readinto(offset, memoryview(out)[filled : filled + length])
        filled += length
    return out


def coalesce(ranges: Iterable[Range], gap: int = GAP, max_bytes: int = MAX_REQUEST) -> list[Range]:
    """Return few ascending ranges that cover the given ranges.

    Two ranges are merged if the gap between them is at most ``gap`` bytes and both together span at most ``max_bytes``.
    Ranges with negative numbers are returned unchanged, so that the source refuses them.
    """
    joined: list[Range] = []
    for start, length in sorted(ranges):
        if joined:
            first, size = joined[-1]
            span = max(first + size, start + length) - first
            is_valid = min(first, size, length) >= 0
            if is_valid and start - (first + size) <= gap and (span <= max_bytes or span == size):
                joined[-1] = (first, span)
                continue
        joined.append((start, length))
    return joined


def read_ranges(source: ByteSource, ranges: Sequence[Range]) -> list[memoryview]:
    """Return the bytes of each range in the given order; reads them with few requests.

    Raises ``IntegrityError`` for a range outside the source, as ``ByteSource.view`` does.
    """
    remote = remote_source(source)
    if remote is not None:
        return [*remote.ranges(ranges)]
    if source.mapped:
        return [source.view(offset, length) for offset, length in ranges]
    return slice_ranges(ranges, {start: source.view(start, length) for start, length in coalesce(ranges)})


def slice_ranges(ranges: Sequence[Range], joined: dict[int, memoryview]) -> list[memoryview]:
    """Return the bytes of ``ranges``. ``joined`` maps the offset of each merged range to its bytes."""
    starts = sorted(joined)
    views = []
    for offset, length in ranges:
        start = starts[bisect_right(starts, offset) - 1]
        views.append(joined[start][offset - start : offset - start + length])
    return views


class HeaderSource:
    """A cache of a source, for format readers that read many small ranges of a header.

    Ranges are served from windows that are read in advance. Windows grow while reads continue close to the last
    window. ``expect`` announces ranges, which are then read together. Windows stay in memory up to a limit. A range
    that is larger than a window is read alone and not cached.

    Weights are read from the underlying source. The object is not thread-safe.

    Parameters
    ----------
    source : ByteSource
        The underlying source; ``close`` does not close it.
    window : int
        Bytes of the first window, limited to the gap of the source.
    """

    def __init__(self, source: ByteSource, window: int = _WINDOW) -> None:
        self._source = source
        self.name = source.name
        self.size = source.size
        self.mapped = source.mapped
        self._remote = remote_source(source)
        self.gap = GAP if self._remote is None else self._remote.gap
        self._first = self._window = min(window, self.gap)
        self._last_end = 0  # end of the last window
        self._starts: list[int] = []
        self._windows: list[memoryview] = []
        self._cached_bytes = 0
        self._expected: list[Range] = []
        self._scratch: memoryview | None = None

    def expect(self, ranges: Iterable[Range]) -> None:
        """Announce ranges, which are read together when the first of them is requested.

        This is a hint. A range beyond the end is shortened, and ranges that were not announced can be read too.
        """
        inside = [_clip(start, length, self.size) for start, length in ranges]
        if self._starts:
            inside = [range for range in inside if self._find(*range) is None]
        self._expected = coalesce((range for range in inside if range[1]), self.gap)

    def view(self, offset: int, length: int) -> memoryview:
        """Return ``length`` bytes at ``offset``, from the cache if possible. Raises the errors of the source."""
        if self.mapped:
            return self._source.view(offset, length)
        window = self._find(offset, length)
        return self._fetch(offset, length) if window is None else window

    def readinto(self, offset: int, out: memoryview) -> None:
        """Fill ``out`` from ``offset``, from the cache if possible. Raises the errors of the source."""
        window = self._find(offset, out.nbytes)
        if window is None and out.nbytes > _SCRATCH and self._remote is None and not self._expected:
            self._source.readinto(offset, out)  # readers do not read large ranges twice
            return
        if window is None:
            window = self._fetch(offset, out.nbytes)
        if out.nbytes:
            out.cast("B")[:] = window

    def has(self, offset: int, data: bytes) -> bool:
        """Return whether the source contains ``data`` at ``offset``. Raises the errors of the source."""
        window = self._find(offset, len(data))
        return (self._fetch(offset, len(data)) if window is None else window) == data

    def window(self, offset: int, min_bytes: int) -> memoryview:
        """Return the cached bytes from ``offset`` on, at least ``min_bytes``. Raises the errors of the source."""
        data = self._find(offset, min_bytes)
        if data is None:
            data = self._fetch(offset, min_bytes)
        index = bisect_right(self._starts, offset) - 1
        if index >= 0 and offset - self._starts[index] + min_bytes <= len(self._windows[index]):
            return self._windows[index][offset - self._starts[index] :]
        return data

    @property
    def _is_cheap(self) -> bool:
        """Whether reading bytes again is cheap, so that they need not be cached."""
        return self._remote is None and self._source.mapped

    def _read_transient(self, offset: int, size: int) -> memoryview:
        """Return at most ``_SCRATCH`` bytes in a reused buffer, valid until the next call."""
        if self._scratch is None:
            self._scratch = np.empty(_SCRATCH, np.uint8).data
        self._source.readinto(offset, self._scratch[:size])
        return self._scratch[:size]

    def batches(self, starts: Array, lengths: Array) -> Iterator[tuple[slice, int, NDArray[np.uint8]]]:
        """Read ranges, each smaller than the gap, in ascending order with few requests.

        Yields for each batch a slice of the range indices, the offset of the batch, and an array of its bytes. The
        array is valid until the next batch. Raises the errors of the source.
        """
        spans = [*self._spans(starts, starts + lengths, _SCRATCH if self._is_cheap else MAX_REQUEST)]
        self.expect(() if self._is_cheap else ((first, last - first) for _, first, last in spans))
        for selected, first, last in spans:
            size = last - first
            reusable = self._is_cheap and first >= 0 and size <= _SCRATCH and self._find(first, size) is None
            data = self._read_transient(first, size) if reusable else self.window(first, size)
            yield selected, first, np.frombuffer(data, np.uint8)

    def _spans(self, starts: Array, ends: Array, max_bytes: int) -> Iterator[tuple[slice, int, int]]:
        """Yield batches of at most ``max_bytes``: a slice of the range indices, and the batch's first and last byte.

        A batch with a single range may be larger.
        """
        index = 0
        apart = np.flatnonzero(starts[1:] - ends[:-1] > self.gap) + 1
        while index < starts.size:
            fitting = np.searchsorted(ends, starts[index] + max_bytes, "right")
            next_gap = np.searchsorted(apart, index, "right")
            stop = min(int(fitting), int(apart[next_gap]) if next_gap < apart.size else starts.size)
            stop = max(stop, index + 1)
            yield slice(index, stop), int(starts[index]), int(ends[index:stop].max())
            index = stop

    def changed(self) -> bool:
        return self._source.changed()

    def close(self) -> None:
        """Do nothing: the caller closes the source."""

    def _find(self, offset: int, length: int) -> memoryview | None:
        index = bisect_right(self._starts, offset) - 1
        if index < 0 or length < 0 or offset + length > self._starts[index] + len(self._windows[index]):
            return None
        start = offset - self._starts[index]
        return self._windows[index][start : start + length]

    def _fetch(self, offset: int, length: int) -> memoryview:
        if offset < 0 or length < 0 or offset + length > self.size or length > MAX_REQUEST:
            return self._read(offset, length)
        index = bisect_right(self._expected, (offset, self.size)) - 1
        if index >= 0 and offset + length <= sum(self._expected[index]):
            batch = [*_batch(self._expected[index:])]
            buffers = self._read_all(batch)
            for (start, _), data in zip(batch, buffers, strict=True):
                self._keep(start, data)
            start = batch[0][0]
            data = buffers[0]
        else:
            start = offset
            data = self._read(offset, self._next_window(offset, length))
            self._keep(start, data)
            self._last_end = start + len(data)
        return data[offset - start : offset - start + length]

    def _next_window(self, offset: int, length: int) -> int:
        near = self._starts and -self.gap <= offset - self._last_end <= self.gap
        self._window = min(self._window * _GROWTH, MAX_REQUEST) if near else self._first
        return min(max(length, self._window), self.size - offset)

    def _read(self, offset: int, length: int) -> memoryview:
        """Return bytes without accessing mapped memory; for invalid ranges the source raises its error."""
        if not self._source.mapped or offset < 0 or length < 0 or offset + length > self.size:
            return self._source.view(offset, length)
        out = np.empty(length, np.uint8).data
        self._source.readinto(offset, out)
        return out

    def _read_all(self, batch: Sequence[Range]) -> Sequence[memoryview]:
        if self._remote is not None:
            return self._remote.ranges(batch)
        return [self._read(*range) for range in batch]

    def _keep(self, start: int, data: memoryview) -> None:
        if self._cached_bytes + len(data) > _MAX_CACHED:
            self._starts = []
            self._windows = []
            self._cached_bytes = 0
        first = bisect_left(self._starts, start)
        last = first
        while last < len(self._starts) and self._starts[last] + len(self._windows[last]) <= start + len(data):
            self._cached_bytes -= len(self._windows[last])  # the new window contains it
            last += 1
        self._starts[first:last] = [start]
        self._windows[first:last] = [data]
        self._cached_bytes += len(data)


def is_remote(source: ByteSource) -> bool:
    """Return whether each read of a source is a request to another machine."""
    return isinstance(source, RangedSource)


def remote_source(source: ByteSource) -> RangedSource | None:
    """Return the source if it is on another machine; else None."""
    return source if isinstance(source, RangedSource) else None


def _clip(start: int, length: int, size: int) -> Range:
    """Return the part of a range within a file of ``size`` bytes."""
    end = start + length
    if 0 <= start <= end <= size:
        return start, length
    first = min(max(start, 0), size)
    return first, max(0, min(end, size) - first)


def _batch(expected: Sequence[Range]) -> Iterator[Range]:
    """Yield the first ranges with a total of at most ``MAX_REQUEST`` bytes, at least one range."""
    total = 0
    for range in expected:
        total += range[1]
        if total > MAX_REQUEST and total != range[1]:
            return
        yield range
