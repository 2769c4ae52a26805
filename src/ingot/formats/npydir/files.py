"""Files that were compressed as a whole, as byte sources."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from ingot.core import encodings
from ingot.errors import IntegrityError
from ingot.model.bytesource import ByteSource


class _Stored:
    """The stored bytes of a file in order, as a decompressor asks for them."""

    def __init__(self, file: ByteSource) -> None:
        self._file, self._position = file, 0

    def read(self, size: int = -1, /) -> bytes:
        left = self._file.size - self._position
        out = bytearray(left if size < 0 else min(size, left))
        self._file.readinto(self._position, memoryview(out))
        self._position += len(out)
        return bytes(out)


class ZstdFile:
    """A whole file that was compressed, as the bytes it was before; read in order without ever holding all of it.

    Parameters
    ----------
    file : ByteSource
    size : int
        Bytes before compression: more or fewer are refused with ``npydir.zstd`` when the end is reached.
    """

    mapped = False

    def __init__(self, file: ByteSource, size: int) -> None:
        self.name, self.size = file.name, size
        self.stamp = getattr(file, "stamp", None)  # absent of files in memory
        self._file, self._lock = file, threading.Lock()
        self._reader, self._position = self._start(), 0

    def view(self, offset: int, length: int) -> memoryview:
        """Return decompressed bytes in fresh memory."""
        out = np.empty(length, np.uint8).data
        self.readinto(offset, out)
        return out

    def readinto(self, offset: int, out: memoryview) -> None:
        """Fill ``out``; going back means beginning anew."""
        if offset < 0 or offset + out.nbytes > self.size:
            raise IntegrityError(
                "store.short-read",
                f"expected {out.nbytes} bytes at {offset}, found {self.size} in all",
                where=self.name,
            )
        with self._lock:
            if offset < self._position:
                self._reader, self._position = self._start(), 0
            self._skip(offset - self._position)
            if out.nbytes:
                self._reader.readinto(out.cast("B"))
            self._position += out.nbytes
            if self._position == self.size:
                self._reader.finish()

    def changed(self) -> bool:
        return self._file.changed()

    def close(self) -> None:
        self._file.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return ZstdFile, (self._file, self.size)

    def _skip(self, count: int) -> None:
        scratch = memoryview(bytearray(min(count, 1 << 20)))
        while count:
            piece = scratch[: min(count, len(scratch))]
            self._reader.readinto(piece)
            self._position += len(piece)
            count -= len(piece)

    def _start(self) -> encodings.ZstdReader:
        return encodings.ZstdReader(_Stored(self._file), self.size, "npydir.zstd", self.name)


def zstd_head(file: ByteSource, length: int) -> bytes:
    """Return the first ``length`` decompressed bytes; ``FormatError`` ``npydir.zstd`` if there are not so many."""
    reader = encodings.ZstdReader(_Stored(file), length, "npydir.zstd", file.name)
    out = memoryview(bytearray(length))
    reader.readinto(out)
    return bytes(out)
