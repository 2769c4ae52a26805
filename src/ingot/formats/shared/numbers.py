"""Helpers for formats: packed integers of less than a byte, and parts computed from stored bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ingot.core.numeric.dtypes import require_inside
from ingot.core.runtime.memory import require_ram
from ingot.model.bytesource import Buffer, DerivedSource, MemorySource

Codes = np.ndarray[tuple[int, int], np.dtype[np.int16]]


def pack_rows(codes: np.ndarray[Any, Any], bits: int) -> bytes:
    """Pack rows of integers of at most 8 bits; each row begins at a byte, low bits first.

    ``codes`` has the shape [rows, columns]. Bits above ``bits`` are dropped, so negative integers are packed in two's
    complement.
    """
    rows, columns = codes.shape
    stream = np.unpackbits(codes.astype(np.uint8)[:, :, None], axis=2, count=bits, bitorder="little")
    return np.packbits(stream.reshape(rows, columns * bits), axis=1, bitorder="little").tobytes()


def unpack_rows(data: bytes, rows: int, columns: int, bits: int, *, signed: bool) -> Codes:
    """Undo ``pack_rows``: return the integers as i16 [rows, columns]."""
    stored = np.frombuffer(data, np.uint8).reshape(rows, -(-columns * bits // 8))
    stream = np.unpackbits(stored, axis=1, count=columns * bits, bitorder="little").reshape(rows, columns, bits)
    codes: Codes = np.packbits(stream, axis=2, bitorder="little").reshape(rows, columns).astype(np.int16)
    return np.where(codes >> (bits - 1) & 1, codes - (1 << bits), codes).astype(np.int16) if signed else codes


class ConvertedSource(MemorySource, DerivedSource):
    """A source whose bytes ``read`` computes from stored bytes on first access, for example zero points as floats.

    ``digest`` is the digest of the stored bytes, which ``read`` verifies; None without a digest.
    """

    def __init__(self, read: Callable[[], bytes], size: int, name: str, digest: str | None = None) -> None:
        super().__init__(b"", name)
        self.size = size
        self.digest = digest
        self._read: Callable[[], bytes] | None = read

    def working_bytes(self) -> int:
        """Return the number of bytes of memory for the result and for the stored bytes from which it is computed."""
        return 2 * self.size

    def view(self, offset: int, length: int) -> memoryview:
        if self._read is not None:
            self._data = memoryview(self._read())
            self._read = None
        return super().view(offset, length)


class ComputedSource(DerivedSource):
    """A source whose bytes ``compute`` returns on the first read; they are cached until the last byte is read.

    Parameters
    ----------
    compute : callable
    size : int
        Number of bytes that ``compute`` returns.
    making : int
        Bytes of memory for the computation.
    name : str
        Name of the source in error messages.
    """

    mapped = False

    def __init__(self, compute: Callable[[], Buffer], size: int, making: int, name: str) -> None:
        self._compute = compute
        self._data: memoryview | None = None
        self.size = size
        self._making = making
        self.name = name

    def computing_bytes(self) -> int:
        return self._making

    def view(self, offset: int, length: int) -> memoryview:
        require_inside(offset, length, self.size, self.name)
        if not length:
            return memoryview(b"")
        data = self._data
        if data is None:
            require_ram(self._making, "values that the program computes", self.memory_hint(), location=self.name)
            data = self._data = memoryview(self._compute())
        if offset + length == self.size:
            self._data = None
        return data[offset : offset + length]

    def readinto(self, offset: int, out: memoryview) -> None:
        chunk = self.view(offset, out.nbytes)
        if chunk.nbytes:
            out.cast("B")[:] = chunk

    def changed(self) -> bool:
        return False

    def close(self) -> None:
        self._data = None
