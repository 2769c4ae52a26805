"""Files that were compressed as a whole, as byte sources."""

from __future__ import annotations

from typing import Any

from ingot.core.bytes import encodings
from ingot.core.files.forward import Forward
from ingot.model.bytesource import ByteSource, Stamp, StampedSource


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


class ZstdFile(Forward, StampedSource):
    """A whole file that was compressed, as the bytes it was before; read in order without ever holding all of it.

    Parameters
    ----------
    file : ByteSource
    size : int
        Bytes before compression: more or fewer are refused with ``npydir.zstd`` when the end is reached.
    """

    def __init__(self, file: ByteSource, size: int) -> None:
        self._file = file
        self.stamp = file.stamp if isinstance(file, StampedSource) else Stamp(file.size)  # files in memory have none
        super().__init__(file.name, size)

    def start(self) -> encodings.ZstdReader:
        return encodings.ZstdReader(_Stored(self._file), self.size, "npydir.zstd", self.name)

    def changed(self) -> bool:
        return self._file.changed()

    def close(self) -> None:
        self._file.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return ZstdFile, (self._file, self.size)


def zstd_head(file: ByteSource, length: int) -> bytes:
    """Return the first ``length`` decompressed bytes; ``FormatError`` ``npydir.zstd`` if there are not so many."""
    reader = encodings.ZstdReader(_Stored(file), length, "npydir.zstd", file.name)
    out = memoryview(bytearray(length))
    reader.readinto(out)
    return bytes(out)
