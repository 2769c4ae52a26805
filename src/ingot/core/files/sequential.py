"""Byte sources over streams that can only be read in order; to go back, the stream is read again from its start."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import Protocol

import numpy as np

from ingot.core.numeric.dtypes import require_inside

_CHUNK = 1 << 20


class Sequential(Protocol):
    """A reader of bytes in order; ``finish`` makes the checks that need the end of the stream."""

    def readinto(self, out: memoryview) -> None: ...

    def finish(self) -> None: ...


class SequentialSource(ABC):
    """A byte source of ``size`` bytes from a sequential reader, of which at most one chunk is in memory.

    A subclass sets the attributes that ``start`` uses before it calls ``__init__``.
    """

    mapped = False

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.size = size
        self._lock = threading.Lock()
        self._reader = self.start()
        self._position = 0

    @abstractmethod
    def start(self) -> Sequential:
        """Return a reader at the first byte."""

    def view(self, offset: int, length: int) -> memoryview:
        """Return the bytes in a new buffer."""
        out = np.empty(length, np.uint8).data
        self.readinto(offset, out)
        return out

    def readinto(self, offset: int, out: memoryview) -> None:
        """Fill ``out``; raise the reader's errors, and ``IntegrityError`` ``store.short-read`` past the end."""
        require_inside(offset, out.nbytes, self.size, self.name)
        with self._lock:
            if offset < self._position:
                self._reader = self.start()
                self._position = 0
            self._skip(offset - self._position)
            if out.nbytes:
                self._reader.readinto(out.cast("B"))
            self._position += out.nbytes
            if self._position == self.size:
                self._reader.finish()

    def _skip(self, count: int) -> None:
        scratch = memoryview(bytearray(min(count, _CHUNK)))
        while count:
            chunk = scratch[: min(count, len(scratch))]
            self._reader.readinto(chunk)
            self._position += len(chunk)
            count -= len(chunk)
