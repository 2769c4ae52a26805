"""Bit streams, first element in the low bits: two 4-bit indices per byte, low nibble first (B7); E4M3 as numbers."""

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


def e4m3_numbers(data: Array) -> Array:
    """Return the float32 of E4M3 bytes: bias 7, at most 448, all ones NaN, no infinity (B36)."""
    code = np.arange(256)
    exponent = code >> 3 & 15
    mantissa = code & 7
    size = np.where(exponent == 0, mantissa / 512, (8 + mantissa) / 8 * 2.0 ** (exponent - 7))
    table = np.where(code & 0x80, -size, size).astype(np.float32)
    table[[0x7F, 0xFF]] = np.nan
    found: Array = table[data]
    return found
