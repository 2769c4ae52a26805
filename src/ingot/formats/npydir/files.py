"""The files of a directory as byte sources that are opened when they are read and not kept open.

A checkpoint of a thousand tensors is thousands of files, more than a process may usually hold open.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

import numpy as np

from ingot.core import encodings
from ingot.errors import IntegrityError
from ingot.model.bytesource import ByteSource, Store

# Files held open for the next read; whoever reads one after the other needs no more.
_KEPT = 16


class FilePool:
    """Opens files of a store and keeps the last few open. Thread-safe.

    A file that is let go is not closed here but by its last user: another thread may be reading it.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._kept: OrderedDict[str, ByteSource] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, name: str) -> ByteSource:
        """Return the open file; errors as ``Store.open``."""
        with self._lock:
            found = self._kept.get(name)
            if found is None:
                found = self._kept[name] = self._store.open(name)
                while len(self._kept) > _KEPT:
                    self._kept.popitem(last=False)
            else:
                self._kept.move_to_end(name)
            return found

    def fresh(self, name: str) -> ByteSource:
        """Return the file as it is now."""
        return self._store.open(name)

    def clear(self) -> None:
        """Let go of all files."""
        with self._lock:
            self._kept.clear()


class LazyFile:
    """One file of a pool as a ``ByteSource``; ``close`` lets go of the whole pool's files."""

    def __init__(self, pool: FilePool, name: str) -> None:
        self._pool = pool
        source = pool.get(name)
        self.name = name
        self.size, self.mapped = source.size, source.mapped
        self._stamp = stamp_of(source)

    def view(self, offset: int, length: int) -> memoryview:
        """Return bytes of the file; a mapping stays as long as the view does."""
        return self._source().view(offset, length)

    def readinto(self, offset: int, out: memoryview) -> None:
        self._source().readinto(offset, out)

    def changed(self) -> bool:
        """Whether there is another file under the name now, or this one was written to."""
        source = self._pool.fresh(self.name)
        try:
            return self._differs(source)
        finally:
            source.close()

    def close(self) -> None:
        self._pool.clear()

    def _source(self) -> ByteSource:
        source = self._pool.get(self.name)
        if self._differs(source):
            raise IntegrityError(
                "store.changed",
                "the file was written to after it was opened; open the directory again when it is complete",
                where=self.name,
            )
        return source

    def _differs(self, source: ByteSource) -> bool:
        return source.size != self.size or stamp_of(source) != self._stamp


def stamp_of(source: ByteSource) -> tuple[int, ...] | None:
    """Return the stamp of a source that has one (``Stamped``); a check by protocol is too slow for so many files."""
    found: tuple[int, ...] | None = getattr(source, "stamp", None)
    return found


class _Stored:
    """The stored bytes of a file in order, as a decompressor asks for them."""

    def __init__(self, file: LazyFile) -> None:
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
    file : LazyFile
    size : int
        Bytes before compression: more or fewer are refused with ``npydir.zstd`` when the end is reached.
    """

    mapped = False

    def __init__(self, file: LazyFile, size: int) -> None:
        self.name, self.size = file.name, size
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

    def _skip(self, count: int) -> None:
        scratch = memoryview(bytearray(min(count, 1 << 20)))
        while count:
            piece = scratch[: min(count, len(scratch))]
            self._reader.readinto(piece)
            self._position += len(piece)
            count -= len(piece)

    def _start(self) -> encodings.ZstdReader:
        return encodings.ZstdReader(_Stored(self._file), self.size, "npydir.zstd", self.name)


def zstd_head(file: LazyFile, length: int) -> bytes:
    """Return the first ``length`` decompressed bytes; ``FormatError`` ``npydir.zstd`` if there are not so many."""
    reader = encodings.ZstdReader(_Stored(file), length, "npydir.zstd", file.name)
    out = memoryview(bytearray(length))
    reader.readinto(out)
    return bytes(out)
