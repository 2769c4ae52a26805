"""Ranges of files that travel before they are asked for: while a runtime is imported, or other weights are decoded.

Whoever is going to read ranges says so (``Ahead.expect``). They are read in that order, a window of neighbours at a
time, as long as what nobody has taken stays below ``MOST`` bytes in the process. A hint, no more: what is not there yet
and not on its way, what went wrong, and what is read a second time is asked for as always.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter

import numpy as np

from ingot.core.runtime.memory import available_ram
from ingot.core.runtime.parallel import Halt, Stopped, Workers, adopt, go_on
from ingot.model.bytesource import Range
from ingot.model.reading.ranges import coalesce, slice_ranges
from ingot.stores.remote.transfer import Task, is_usable

MOST = 1 << 30
"""Bytes that are read ahead at most, and no more than an eighth of the memory that is free."""

WINDOW = 32 << 20
"""Bytes that are read at a time, by several requests; a larger range is a window of its own."""

LARGE = 4 << 20
"""Bytes of a range that is read into its own memory, by requests of its own; smaller neighbours are read together."""

_READERS = 4

Read = Callable[[Sequence[Task]], None]
"""Fills buffers from places of one file."""


def _memory(length: int) -> memoryview:
    return np.empty(length, np.uint8).data


class _Window:
    """Ranges that are read together: how long each is, and its bytes once they are there.

    ``nbytes`` is the sum of the lengths: there may be a hundred thousand.
    """

    def __init__(self, owner: Ahead) -> None:
        self.owner = owner
        self.lengths = dict[int, int]()
        self.nbytes = 0
        self.begun = False
        self.done = threading.Event()
        self.data: dict[int, memoryview] = {}

    def add(self, start: int, length: int) -> None:
        """Want a range."""
        self.lengths[start] = length
        self.nbytes += length

    def remove(self, start: int) -> int:
        """Let a range go; return its length, 0 where it went before."""
        length = self.lengths.pop(start, 0)
        self.nbytes -= length
        return length

    def clear(self) -> None:
        """Let all ranges go."""
        self.lengths = {}
        self.nbytes = 0

    def fill(self, read: Read, gap: int, halt: Halt) -> None:
        """Read what is wanted; what goes wrong is left to those who take it, and to their own reading."""
        adopt(halt)
        wanted = [*self.lengths.items()]
        try:
            small = [item for item in wanted if item[1] < LARGE]
            own = [(start, _memory(length)) for start, length in wanted if length >= LARGE]
            joined = [(start, _memory(length)) for start, length in coalesce(small, gap, WINDOW)]
            read(sorted((*own, *joined), key=itemgetter(0)))
            self.data = dict(own)
            # Of what was joined each piece is copied, so that none keeps its neighbours in memory.
            alone = len(joined) == len(small)
            for (start, _), piece in zip(small, slice_ranges(small, dict(joined)), strict=True):
                self.data[start] = piece if alone else np.frombuffer(piece, np.uint8).copy().data
        except (Exception, Stopped):
            self.data = {}


class _Given:
    """Which bytes of a range were given: pieces that do not touch each other, in order."""

    def __init__(self, length: int) -> None:
        self._length = length
        self.left = length
        self._pieces: list[Range] = []

    def claim(self, start: int, length: int) -> bool:
        """Promise bytes; False, and nothing promised, where some are not in the range or were promised before.

        ``left`` are those that nobody has in hand: whoever gets them takes them off.
        """
        if start + length > self._length:
            return False
        at = bisect_right(self._pieces, (start, self._length))
        before = self._pieces[at - 1] if at else (0, 0)
        after = self._pieces[at] if at < len(self._pieces) else (self._length, 0)
        if sum(before) > start or start + length > after[0]:
            return False
        first = start
        stop = start + length
        low = at
        high = at
        if at and sum(before) == start:
            first = before[0]
            low = at - 1
        if after[1] and after[0] == stop:
            stop = sum(after)
            high = at + 1
        self._pieces[low:high] = [(first, stop - first)]
        return True


class Ahead:
    """What is read ahead of one file. Thread-safe.

    Parameters
    ----------
    read : callable
    gap : int
        Bytes between two ranges that are read rather than left out.
    """

    def __init__(self, read: Read, gap: int) -> None:
        self.read = read
        self.gap = gap
        self.halt = Halt()
        self._lock = threading.Lock()
        self._starts: list[int] = []
        self._windows: dict[int, _Window] = {}
        self._given: dict[int, _Given] = {}

    def expect(self, ranges: Iterable[Range]) -> None:
        """Begin to read these ranges, in this order, after those that were expected before."""
        windows: list[_Window] = []
        with self._lock:
            for start, length in ranges:
                if start in self._windows or not length:
                    continue
                if not windows or windows[-1].nbytes + length > WINDOW:
                    windows.append(_Window(self))
                windows[-1].add(start, length)
                self._windows[start], self._given[start] = windows[-1], _Given(length)
            self._starts = []
        _LINE.add(windows)

    def take(self, offset: int, length: int) -> memoryview | None:
        """Return bytes that were read ahead, waiting for those that are on their way; None for all others.

        Each byte of a range is given once, in any order; all of them together without a copy.
        """
        if not (self._windows and length and is_usable()):
            return None
        claimed = self._claim(offset, length)
        if claimed is None:
            return None
        window, start, given = claimed
        data = None
        if _LINE.is_coming(window, start):
            while not window.done.wait(0.5):
                go_on()
            data = window.data.get(start)
        with self._lock:
            given.left -= length
            done = data is None or not given.left
            if done and self._given.get(start) is given:
                del self._windows[start], self._given[start]
        if done:
            _LINE.let_go(window, start)
        return None if data is None else data[offset - start :][:length]

    def _claim(self, offset: int, length: int) -> tuple[_Window, int, _Given] | None:
        """Find the range that these bytes are of, unless they were promised: its window, its beginning, and what of it
        was given."""
        with self._lock:
            self._starts = self._starts or sorted(self._windows)
            index = bisect_right(self._starts, offset) - 1
            start = self._starts[index] if index >= 0 else -1
            window = self._windows.get(start)
            if window is None:
                return None
            given = self._given[start]
            if start not in window.lengths or not given.claim(offset - start, length):
                return None
            return window, start, given

    def stop(self) -> None:
        """Forget all that was expected."""
        self.halt.set()
        if self._windows and is_usable():
            with self._lock:
                windows = {*self._windows.values()}
                self._windows = {}
                self._given = {}
                self._starts = []
            _LINE.drop(windows)


class _Line:
    """The windows of all files: those that wait their turn, and how many bytes wait to be taken."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[_Window] = deque()
        self._held = self._running = self._most = 0
        self._pool: Workers | None = None

    def add(self, windows: Iterable[_Window]) -> None:
        """Put windows at the end."""
        with self._lock:
            if not self._waiting:
                self._most = min(MOST, available_ram() // 8)
            self._waiting.extend(windows)
        self._go_on()

    def is_coming(self, window: _Window, start: int) -> bool:
        """Whether a range is read ahead; one whose turn has not come is left out from now on."""
        with self._lock:
            if window.begun:
                return True
            if window.remove(start) and not window.lengths:
                self._waiting.remove(window)
            return False

    def let_go(self, window: _Window, start: int) -> None:
        """Count a range as taken."""
        with self._lock:
            window.data.pop(start, None)
            length = window.remove(start)
            self._held -= length if window.begun else 0
        self._go_on()

    def drop(self, windows: Iterable[_Window]) -> None:
        """Take windows out, with all that nobody took."""
        with self._lock:
            for window in windows:
                self._held -= window.nbytes if window.begun else 0
                window.clear()
            self._waiting = deque(window for window in self._waiting if window.lengths)
        self._go_on()

    def _go_on(self) -> None:
        """Begin with the next windows, where there is room."""
        with self._lock:
            while self._waiting and self._running < _READERS:
                window = self._waiting[0]
                if self._held and self._held + window.nbytes > self._most:
                    return
                self._waiting.popleft()
                window.begun = True
                self._held += window.nbytes
                self._running += 1
                self._pool = self._pool or Workers(_READERS, "ingot-ahead")
                self._pool.submit(self._fill, window)

    def _fill(self, window: _Window) -> None:
        window.fill(window.owner.read, window.owner.gap, window.owner.halt)
        window.done.set()
        with self._lock:
            self._running -= 1
        self._go_on()


_LINE = _Line()
