"""Byte sources over what can only be read in order: going back means beginning anew."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import Protocol

import numpy as np

from ingot.core.numeric.dtypes import require_inside

_PIECE = 1 << 20


class Sequential(Protocol):
    """Bytes in order; ``finish`` checks what can be checked at the end."""

    def readinto(self, out: memoryview) -> None: ...

    def finish(self) -> None: ...


class Forward(ABC):
    """A byte source of ``size`` bytes that are made by a sequential reader; never more than a piece of them is held.

    A subclass sets what its ``start`` needs before it calls ``__init__``.
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
        """Return the bytes in fresh memory."""
        out = np.empty(length, np.uint8).data
        self.readinto(offset, out)
        return out

    def readinto(self, offset: int, out: memoryview) -> None:
        """Fill ``out``; errors as the reader's, ``IntegrityError`` ``store.short-read`` past the end."""
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
        scratch = memoryview(bytearray(min(count, _PIECE)))
        while count:
            piece = scratch[: min(count, len(scratch))]
            self._reader.readinto(piece)
            self._position += len(piece)
            count -= len(piece)
