"""Offsets in a ``.zt`` file (zTensor 1.2 section 4).

``MAGIC | blobs, each at a multiple of 64, zero padding between | CBOR manifest | its size, u64 LE | MAGIC``
"""

from __future__ import annotations

from collections.abc import Sequence

MAGIC = b"ZTEN1000"
# Magic of older and newer containers with the same suffix: version 0.1, and container version 2.
MAGIC_V0 = b"ZTEN0001"
MAGIC_V2 = b"\x89ZT2\r\n\x1a\n"

VERSION = "1.2.0"
ALIGNMENT = 64
FOOTER = 16
MAX_MANIFEST = 1 << 30


def align(offset: int) -> int:
    """Return the first multiple of 64 at or after ``offset``."""
    return (offset + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def assign_offsets(tail: int, lengths: Sequence[int]) -> tuple[list[int], int]:
    """Return the offsets of blobs of these lengths, placed in sequence from ``tail`` on, and the new tail."""
    offsets = []
    for length in lengths:
        offset = align(tail)
        offsets.append(offset)
        tail = offset + length
    return offsets, tail
