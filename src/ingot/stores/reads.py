"""Read calls, and a buffer that saves most of them to callers that read small ranges in order."""

from __future__ import annotations

from ingot.core.files import system
from ingot.core.files.oserrors import read_error
from ingot.errors import IntegrityError

# One read call moves at most 0x7ffff000 bytes on Linux and INT_MAX on macOS; below that, page-aligned.
MAX_CALL = 1 << 30

SMALL = 1 << 12
"""The largest range that ``Ahead`` serves, and the largest gap between two such ranges, in bytes."""
WINDOW = 1 << 15
"""Bytes that ``Ahead`` reads in one call."""


def read_all(descriptor: int, offset: int, out: memoryview, where: str) -> None:
    """Fill ``out`` from an open file; ``store.read-failed``, and ``store.short-read`` past the end."""
    rest = flat(out)
    while rest.nbytes:
        try:
            count = system.read_at(descriptor, rest[:MAX_CALL], offset)
        except OSError as error:
            raise read_error(error, where) from error
        if count == 0:
            raise IntegrityError(
                "store.short-read",
                f"expected {rest.nbytes} more bytes at {offset}, found the end of the file",
                where=where,
            )
        offset += count
        rest = rest[count:]


class Ahead:
    """Bytes of a file from ``begin`` on that were read before they were requested.

    Each byte is served once, in order; later requests read the file.
    """

    __slots__ = ("_begin", "_data", "_next")

    def __init__(self, begin: int, data: memoryview) -> None:
        self._begin = begin
        self._next = 0
        self._data = data

    def give(self, offset: int, out: memoryview) -> bool:
        """Fill ``out``; return False if the buffer lacks some of its bytes, or served some before."""
        start = offset - self._begin
        stop = start + out.nbytes
        if start < self._next or stop > self._data.nbytes:
            return False
        self._next = stop
        flat(out)[:] = self._data[start:stop]
        return True


def flat(data: memoryview) -> memoryview:
    """Return ``data`` as unsigned bytes in one dimension; it may be empty in any shape, which ``cast`` refuses."""
    return data.cast("B") if data.nbytes else memoryview(b"")
