"""Offsets of the blobs of a file that is being written, to find equal blobs."""

from __future__ import annotations


class Blobs:
    """Offsets of blobs by length and CRC-32C; memory is small because most keys have only one blob."""

    def __init__(self) -> None:
        self._first: dict[int, int] = {}
        self._others: dict[int, list[int]] = {}

    def offsets(self, length: int, crc: str) -> list[int]:
        """Return the offsets of the blobs with this length and CRC-32C, in the order in which they were added."""
        key = _key(length, crc)
        first = self._first.get(key)
        return [] if first is None else [first, *self._others.get(key, ())]

    def add(self, length: int, crc: str, offset: int) -> bool:
        """Add a blob; return whether it is new."""
        key = _key(length, crc)
        first = self._first.get(key)
        if first is None:
            self._first[key] = offset
            return True
        if first == offset or offset in self._others.get(key, ()):
            return False
        self._others.setdefault(key, []).append(offset)
        return True


def _key(length: int, crc: str) -> int:
    return length << 32 | int(crc.rpartition(":")[2], 16)
