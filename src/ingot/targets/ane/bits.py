"""Bit streams, first element in the low bits: two 4-bit indices per byte, low nibble first (B7)."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


def pack_lsb(codes: Array, bits: int) -> Array:
    """Return unsigned codes of ``bits`` (1 to 8) as one LSB-first stream of bytes, padded with zeros."""
    flat = np.ascontiguousarray(codes, np.uint8).reshape(-1, 1)
    return np.packbits(np.unpackbits(flat, axis=1, bitorder="little")[:, :bits].reshape(-1), bitorder="little")


def unpack_lsb(data: Array, bits: int, count: int) -> Array:
    """Return ``count`` codes of a stream that holds at least as many; u8."""
    flat = np.unpackbits(np.ascontiguousarray(data), count=count * bits, bitorder="little")
    padded = np.zeros((count, 8), np.uint8)
    padded[:, :bits] = flat.reshape(count, bits)
    return np.packbits(padded, axis=1, bitorder="little").reshape(-1)
