"""Write one ``.npy`` file: the header, then the values in order."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from ingot.core.bytes import checksums
from ingot.core.numeric.dtypes import DTYPES
from ingot.errors import UsageError
from ingot.ext.squish.npydir import npy
from ingot.model.bytesource import Buffer, Sink


class ArrayFile:
    """Writer of one ``.npy`` file.

    Parameters
    ----------
    sink : Sink
        Destination of the bytes. The writer owns it: ``close`` and ``abort`` close it.
    path : str
        Path of the file, for the record that ``close`` returns and for error messages.
    dtype : str
        Element type, one of the keys of ``npy.CODE_OF``.
    shape : sequence of int
        Shape of the array.
    """

    def __init__(self, sink: Sink, path: str, dtype: str, shape: Sequence[int]) -> None:
        self.path = path
        self._sink = sink
        head = npy.encode(dtype, shape)
        self._start = len(head)
        self._length = prod(shape) * DTYPES[dtype].bits // 8
        self._written = 0
        self._crc = checksums.hasher("crc32c")
        sink.write_at(0, head)

    def write(self, data: Buffer) -> None:
        """Append ``data``, bytes of the array's values.

        Raises ``UsageError`` ``writer.length`` for more bytes than the shape has.
        """
        view = memoryview(data)
        if not view.nbytes:
            return
        view = view.cast("B")
        if self._written + view.nbytes > self._length:
            raise UsageError(
                f"expected {self._length} bytes of values, found more", rule="writer.length", where=self.path
            )
        self._sink.write_at(self._start + self._written, view)
        self._crc.update(view)
        self._written += view.nbytes

    def close(self) -> list[Any]:
        """Finish the file; return its path, and the offset, length in bytes and CRC-32C of its values.

        Raises ``UsageError`` ``writer.length`` if values are missing.
        """
        if self._written != self._length:
            raise UsageError(
                f"expected {self._length} bytes, found {self._written}", rule="writer.length", where=self.path
            )
        self._sink.truncate(self._start + self._length)
        self._sink.close()
        return [self.path, self._start, self._length, self._crc.text()]

    def abort(self) -> None:
        """Close the file without completing it."""
        self._sink.close()
