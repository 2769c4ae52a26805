"""Reading ahead of whoever reads many small ranges in order: a system call for all of them, not for each."""

from __future__ import annotations

from ingot.stores.memory import flat

SMALL = 1 << 12
"""Ranges of at most so many bytes, that many apart at most, are read ahead of."""
WINDOW = 1 << 15
"""Bytes that are read at once."""


class Ahead:
    """Bytes of a file from ``begin`` on, read before they were asked for. Each is given once at most, from the first to
    the last: who asks again asks the file."""

    __slots__ = ("_begin", "_data", "_next")

    def __init__(self, begin: int, data: memoryview) -> None:
        self._begin, self._next, self._data = begin, 0, data

    def give(self, offset: int, out: memoryview) -> bool:
        """Fill ``out``; False where not all of it is here, or some was given before."""
        start = offset - self._begin
        stop = start + out.nbytes
        if start < self._next or stop > self._data.nbytes:
            return False
        self._next = stop
        flat(out)[:] = self._data[start:stop]
        return True
