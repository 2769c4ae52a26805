"""Writing one ``.npy`` file: header first, values in order behind it."""

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
    """One array being written.

    Parameters
    ----------
    sink : Sink
        Taken over: closed by ``close`` and ``abort``.
    path : str
        For records and messages.
    dtype, shape :
        Element type, one of ``npy.CODE_OF``, and sizes.
    """

    def __init__(self, sink: Sink, path: str, dtype: str, shape: Sequence[int]) -> None:
        self.path, self._sink = path, sink
        head = npy.encode(dtype, shape)
        self._start, self._length = len(head), prod(shape) * DTYPES[dtype].bits // 8
        self._written, self._crc = 0, checksums.hasher("crc32c")
        sink.write_at(0, head)

    def write(self, data: Buffer) -> None:
        """Append values; more than the shape has are refused."""
        view = memoryview(data)
        if not view.nbytes:
            return
        view = view.cast("B")
        if self._written + view.nbytes > self._length:
            raise UsageError(f"expected {self._length} bytes, found more", rule="writer.length", where=self.path)
        self._sink.write_at(self._start + self._written, view)
        self._crc.update(view)
        self._written += view.nbytes

    def close(self) -> list[Any]:
        """Finish the file; return where its values lie: path, offset, length, CRC-32C."""
        if self._written != self._length:
            raise UsageError(
                f"expected {self._length} bytes, found {self._written}", rule="writer.length", where=self.path
            )
        self._sink.truncate(self._start + self._length)
        self._sink.close()
        return [self.path, self._start, self._length, self._crc.text()]

    def abort(self) -> None:
        """Close the file as it is."""
        self._sink.close()
