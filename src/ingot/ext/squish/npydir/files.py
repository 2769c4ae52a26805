"""Read a compressed file as a byte source of its decompressed bytes."""

from __future__ import annotations

from typing import Any

from ingot.core.bytes import encodings
from ingot.core.files.forward import Forward
from ingot.model.bytesource import ByteSource, Stamp, StampedSource


class _CompressedReader:
    """Reader of the compressed bytes of a file, with the ``read`` method that a decompressor calls."""

    def __init__(self, file: ByteSource) -> None:
        self._file, self._position = file, 0

    def read(self, size: int = -1, /) -> bytes:
        remaining = self._file.size - self._position
        out = bytearray(remaining if size < 0 else min(size, remaining))
        self._file.readinto(self._position, memoryview(out))
        self._position += len(out)
        return bytes(out)


class ZstdFile(Forward, StampedSource):
    """Byte source of the decompressed bytes of a Zstandard file; it reads in order and never keeps all bytes in memory.

    Parameters
    ----------
    file : ByteSource
        The compressed file.
    size : int
        Number of bytes after decompression. Reading to the end raises ``FormatError`` ``npydir.zstd`` if there are more
        or fewer.
    """

    def __init__(self, file: ByteSource, size: int) -> None:
        self._file = file
        self.stamp = (
            file.stamp if isinstance(file, StampedSource) else Stamp(file.size)
        )  # a file in memory has no stamp
        super().__init__(file.name, size)

    def start(self) -> encodings.ZstdReader:
        return encodings.ZstdReader(_CompressedReader(self._file), self.size, "npydir.zstd", self.name)

    def changed(self) -> bool:
        return self._file.changed()

    def close(self) -> None:
        self._file.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return ZstdFile, (self._file, self.size)


def zstd_head(file: ByteSource, length: int) -> bytes:
    """Return the first ``length`` decompressed bytes.

    Raises ``FormatError`` ``npydir.zstd`` if the file has fewer.
    """
    reader = encodings.ZstdReader(_CompressedReader(file), length, "npydir.zstd", file.name)
    out = memoryview(bytearray(length))
    reader.readinto(out)
    return bytes(out)
