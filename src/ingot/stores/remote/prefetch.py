"""Prefetching of ranges of remote files, for example while a runtime is imported or other tensors are decoded.

A caller announces the ranges that it will read (``Prefetcher.expect``). Threads read them in this order, one window of
neighbouring ranges at a time. The process holds at most ``MAX_AHEAD`` prefetched bytes. Ranges that were not
prefetched, whose prefetch failed, or that are read twice are requested as usual.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter

import numpy as np

from ingot.core.runtime.memory import available_ram
from ingot.core.runtime.parallel import Cancelled, CancelToken, Workers, check_cancelled, inherit_token
from ingot.model.bytesource import Range
from ingot.model.reading.ranges import coalesce, slice_ranges
from ingot.stores.remote.transfer import Task, is_usable

MAX_AHEAD = 1 << 30
"""The limit of prefetched bytes; an eighth of the free memory if that is less."""

WINDOW = 32 << 20
"""The size of a window in bytes. Several requests read a window concurrently. A larger range has its own window."""

LARGE = 4 << 20
"""The minimum size in bytes of a range that has its own buffer. Smaller neighbouring ranges share a buffer."""

_READERS = 4

Read = Callable[[Sequence[Task]], None]
"""A function that fills buffers from offsets of one file."""


def _memory(length: int) -> memoryview:
    return np.empty(length, np.uint8).data


class _Window:
    """Neighbouring ranges of a file that are read together: their lengths by offset, and their bytes after the read.

    ``nbytes`` is the sum of the lengths, stored because there may be a hundred thousand ranges.
    """

    def __init__(self, owner: Prefetcher) -> None:
        self.owner = owner
        self.lengths = dict[int, int]()
        self.nbytes = 0
        self.started = False
        self.finished = threading.Event()
        self.data: dict[int, memoryview] = {}

    def add(self, start: int, length: int) -> None:
        """Add the range of ``length`` bytes at offset ``start``."""
        self.lengths[start] = length
        self.nbytes += length

    def remove(self, start: int) -> int:
        """Remove the range at offset ``start``; return its length, or 0 if it is not in the window."""
        length = self.lengths.pop(start, 0)
        self.nbytes -= length
        return length

    def clear(self) -> None:
        """Remove all ranges of the window."""
        self.lengths = {}
        self.nbytes = 0

    def fill(self, read: Read, gap: int, halt: CancelToken) -> None:
        """Read the ranges of the window with ``read``.

        If an error occurs, the window has no bytes afterwards, and callers read their ranges themselves.
        """
        inherit_token(halt)
        ranges = [*self.lengths.items()]
        try:
            small = [item for item in ranges if item[1] < LARGE]
            large = [(start, _memory(length)) for start, length in ranges if length >= LARGE]
            joined = [(start, _memory(length)) for start, length in coalesce(small, gap, WINDOW)]
            read(sorted((*large, *joined), key=itemgetter(0)))
            self.data = dict(large)
            # A range that was read jointly is copied, so that it does not keep its neighbours in memory.
            is_separate = len(joined) == len(small)
            for (start, _), view in zip(small, slice_ranges(small, dict(joined)), strict=True):
                self.data[start] = view if is_separate else np.frombuffer(view, np.uint8).copy().data
        except (Exception, Cancelled):
            self.data = {}


class _Claims:
    """The bytes of a range that callers have claimed, so that each byte is returned once.

    They are stored as sorted intervals (start, length) with gaps between them.

    ``remaining`` is the number of bytes that no caller has received yet; the code that returns bytes decreases it.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self.remaining = length
        self._claimed: list[Range] = []

    def claim(self, start: int, length: int) -> bool:
        """Claim bytes for a caller; return False if some are outside the range or claimed already, and claim none."""
        if start + length > self._length:
            return False
        index = bisect_right(self._claimed, (start, self._length))
        before = self._claimed[index - 1] if index else (0, 0)
        after = self._claimed[index] if index < len(self._claimed) else (self._length, 0)
        if sum(before) > start or start + length > after[0]:
            return False
        first = start
        stop = start + length
        low = index
        high = index
        if index and sum(before) == start:
            first = before[0]
            low = index - 1
        if after[1] and after[0] == stop:
            stop = sum(after)
            high = index + 1
        self._claimed[low:high] = [(first, stop - first)]
        return True


class Prefetcher:
    """A thread-safe reader that prefetches ranges of one file.

    Parameters
    ----------
    read : callable
        A function that fills buffers from offsets of the file.
    gap : int
        The largest gap between two ranges that are read by one request, in bytes.
    """

    def __init__(self, read: Read, gap: int) -> None:
        self.read = read
        self.gap = gap
        self.halt = CancelToken()
        self._lock = threading.Lock()
        self._starts: list[int] = []
        self._windows: dict[int, _Window] = {}
        self._claims: dict[int, _Claims] = {}

    def expect(self, ranges: Iterable[Range]) -> None:
        """Start to prefetch ``ranges`` in this order, after the ranges of earlier calls."""
        windows: list[_Window] = []
        with self._lock:
            for start, length in ranges:
                if start in self._windows or not length:
                    continue
                if not windows or windows[-1].nbytes + length > WINDOW:
                    windows.append(_Window(self))
                windows[-1].add(start, length)
                self._windows[start] = windows[-1]
                self._claims[start] = _Claims(length)
            self._starts = []
        _QUEUE.add(windows)

    def take(self, offset: int, length: int) -> memoryview | None:
        """Return prefetched bytes, waiting if their window is being read; None if they are not prefetched.

        Each byte is returned once, in any order. A full range is returned without a copy.
        """
        if not (self._windows and length and is_usable()):
            return None
        claimed = self._claim(offset, length)
        if claimed is None:
            return None
        window, start, claims = claimed
        data = None
        if _QUEUE.is_coming(window, start):
            while not window.finished.wait(0.5):
                check_cancelled()
            data = window.data.get(start)
        with self._lock:
            claims.remaining -= length
            is_complete = data is None or not claims.remaining
            if is_complete and self._claims.get(start) is claims:
                del self._windows[start], self._claims[start]
        if is_complete:
            _QUEUE.release(window, start)
        return None if data is None else data[offset - start :][:length]

    def _claim(self, offset: int, length: int) -> tuple[_Window, int, _Claims] | None:
        """Claim bytes of a prefetched range; return the range's window, offset and claims.

        Returns None if no prefetched range contains all the bytes, or if some of them were claimed before.
        """
        with self._lock:
            self._starts = self._starts or sorted(self._windows)
            index = bisect_right(self._starts, offset) - 1
            start = self._starts[index] if index >= 0 else -1
            window = self._windows.get(start)
            if window is None:
                return None
            claims = self._claims[start]
            if start not in window.lengths or not claims.claim(offset - start, length):
                return None
            return window, start, claims

    def stop(self) -> None:
        """Stop reading, and drop all ranges."""
        self.halt.set()
        if self._windows and is_usable():
            with self._lock:
                windows = {*self._windows.values()}
                self._windows = {}
                self._claims = {}
                self._starts = []
            _QUEUE.drop(windows)


class _Queue:
    """The waiting windows of all files, and the number of prefetched bytes in memory."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[_Window] = deque()
        self._held_bytes = 0
        self._running = 0
        self._max_bytes = 0
        self._pool: Workers | None = None

    def add(self, windows: Iterable[_Window]) -> None:
        """Append windows to the waiting windows, and start to read if the limits permit it."""
        with self._lock:
            if not self._waiting:
                self._max_bytes = min(MAX_AHEAD, available_ram() // 8)
            self._waiting.extend(windows)
        self._start_windows()

    def is_coming(self, window: _Window, start: int) -> bool:
        """Return whether the window with the range at ``start`` was read or is being read.

        If the window is still waiting, remove the range from it.
        """
        with self._lock:
            if window.started:
                return True
            if window.remove(start) and not window.lengths:
                self._waiting.remove(window)
            return False

    def release(self, window: _Window, start: int) -> None:
        """Remove the range at ``start`` after its bytes were returned, and start to read the next windows."""
        with self._lock:
            window.data.pop(start, None)
            length = window.remove(start)
            self._held_bytes -= length if window.started else 0
        self._start_windows()

    def drop(self, windows: Iterable[_Window]) -> None:
        """Remove windows and their bytes."""
        with self._lock:
            for window in windows:
                self._held_bytes -= window.nbytes if window.started else 0
                window.clear()
            self._waiting = deque(window for window in self._waiting if window.lengths)
        self._start_windows()

    def _start_windows(self) -> None:
        """Start to read the next windows, within the limits of bytes and threads."""
        with self._lock:
            while self._waiting and self._running < _READERS:
                window = self._waiting[0]
                if self._held_bytes and self._held_bytes + window.nbytes > self._max_bytes:
                    return
                self._waiting.popleft()
                window.started = True
                self._held_bytes += window.nbytes
                self._running += 1
                self._pool = self._pool or Workers(_READERS, "ingot-ahead")
                self._pool.submit(self._fill, window)

    def _fill(self, window: _Window) -> None:
        window.fill(window.owner.read, window.owner.gap, window.owner.halt)
        window.finished.set()
        with self._lock:
            self._running -= 1
        self._start_windows()


_QUEUE = _Queue()
