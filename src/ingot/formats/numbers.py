"""Integers of less than a byte, and parts that are made of what is stored: what formats of programs share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ingot.model.bytesource import MemorySource


def packed_bits(codes: np.ndarray[Any, Any], bits: int) -> bytes:
    """Pack integers into one stream, low bits first."""
    raw = np.ascontiguousarray(codes).astype(np.uint8).reshape(-1, 1)
    return np.packbits(np.unpackbits(raw, axis=1, count=bits, bitorder="little"), bitorder="little").tobytes()


def unpacked_bits(data: bytes, bits: int, count: int, signed: bool) -> np.ndarray[Any, np.dtype[np.int16]]:
    """Undo ``packed_bits``."""
    stream = np.unpackbits(np.frombuffer(data, np.uint8), count=count * bits, bitorder="little")
    codes = np.packbits(stream.reshape(count, bits), axis=1, bitorder="little").reshape(-1).astype(np.int16)
    return np.where(codes >> (bits - 1) & 1, codes - (1 << bits), codes).astype(np.int16) if signed else codes


def unpacked_rows(data: bytes, rows: int, each: int, bits: int, *, signed: bool) -> np.ndarray[Any, Any]:
    """Return integers whose rows, of ``each`` of them, are packed so and begin at a byte: i16 [rows, each]."""
    stored = np.frombuffer(data, np.uint8).reshape(rows, -1)
    stream = np.unpackbits(stored, axis=1, count=each * bits, bitorder="little").reshape(rows, each, bits)
    weighed = stream.astype(np.int16) << np.arange(bits, dtype=np.int16)
    codes: np.ndarray[Any, Any] = weighed.sum(axis=2, dtype=np.int16)
    return np.where(codes >> (bits - 1) & 1, codes - (1 << bits), codes).astype(np.int16) if signed else codes


def packed_rows(codes: np.ndarray[Any, Any], bits: int) -> bytes:
    """Undo ``unpacked_rows``."""
    rows, each = codes.shape
    stream = (codes.astype(np.int16)[:, :, None] >> np.arange(bits, dtype=np.int16)) & 1
    return np.packbits(stream.astype(np.uint8).reshape(rows, each * bits), axis=1, bitorder="little").tobytes()


class ConvertedSource(MemorySource):
    """Bytes that ``read`` makes of stored ones when they are first asked for, such as zero points as floats."""

    def __init__(self, read: Callable[[], bytes], size: int, name: str) -> None:
        super().__init__(b"", name)
        self.size = size
        self._read: Callable[[], bytes] | None = read

    def view(self, offset: int, length: int) -> memoryview:
        if self._read is not None:
            self._data = memoryview(self._read())
            self._read = None
        return super().view(offset, length)
