"""Where the blobs of a file that is being written lie, so that equal ones are found."""

from __future__ import annotations


class Blobs:
    """Where blobs lie, by length and CRC-32C: there are many, most of them the only one of theirs."""

    def __init__(self) -> None:
        self._first: dict[int, int] = {}
        self._more: dict[int, list[int]] = {}

    def at(self, length: int, crc: str) -> list[int]:
        """Return the offsets of blobs, in the order in which they came."""
        key = _key(length, crc)
        first = self._first.get(key)
        return [] if first is None else [first, *self._more.get(key, ())]

    def add(self, length: int, crc: str, offset: int) -> bool:
        """Note a blob; return whether it was not known."""
        key = _key(length, crc)
        first = self._first.get(key)
        if first is None:
            self._first[key] = offset
            return True
        if first == offset or offset in self._more.get(key, ()):
            return False
        self._more.setdefault(key, []).append(offset)
        return True


def _key(length: int, crc: str) -> int:
    return length << 32 | int(crc.rpartition(":")[2], 16)
