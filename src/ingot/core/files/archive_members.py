"""Byte sources over members of a zip archive, which are decompressed while they are read."""

from __future__ import annotations

import zlib

from ingot.core.files.archive import DEFLATED, Archive, Entry, local_size
from ingot.core.files.sequential import SequentialSource
from ingot.errors import FormatError, IntegrityError

_CHUNK = 1 << 16


class MemberReader:
    """Reads one member in order, and compares its CRC-32 at the end."""

    def __init__(self, archive: Archive, entry: Entry) -> None:
        self._archive = archive
        self._entry = entry
        self._stored = entry.offset + local_size(archive.read(entry.offset, 30))
        self._end = self._stored + entry.stored
        self._inflate = zlib.decompressobj(-15) if entry.method == DEFLATED else None
        self._crc = 0
        self._produced = 0

    def readinto(self, out: memoryview) -> None:
        """Fill ``out``; raise ``FormatError`` ``archive.deflate``, ``IntegrityError`` ``archive.size``."""
        filled = 0
        while filled < out.nbytes:
            chunk = self._next(out.nbytes - filled)
            if not chunk:
                raise IntegrityError(
                    "archive.size",
                    f"expected {self._entry.size} bytes, found {self._produced}",
                    where=self._entry.name,
                )
            out[filled : filled + len(chunk)] = chunk
            filled += len(chunk)

    def finish(self) -> None:
        """Raise an error if bytes follow the member's content, or if its size or CRC-32 differ from the directory's."""
        if self._produced != self._entry.size or self._next(1):
            raise IntegrityError(
                "archive.size", f"expected {self._entry.size} bytes, found a different number", where=self._entry.name
            )
        if self._crc != self._entry.crc:
            raise IntegrityError("archive.crc", "the bytes do not match their CRC", where=self._entry.name)

    def _next(self, max_bytes: int) -> bytes:
        """Return the next bytes, at most ``max_bytes``; empty at the end."""
        chunk = b""
        while not chunk:
            waiting = b"" if self._inflate is None else self._inflate.unconsumed_tail
            count = min(_CHUNK, self._end - self._stored, max_bytes if self._inflate is None else _CHUNK)
            data = waiting or self._archive.read(self._stored, count)
            self._stored += 0 if waiting else len(data)
            if self._inflate is None:
                chunk = data
            else:
                try:
                    chunk = self._inflate.decompress(data, max_bytes)
                except zlib.error as error:
                    location = self._entry.name
                    raise FormatError("archive.deflate", f"not a deflate stream: {error}", where=location) from None
            if not data:
                break
        self._crc = zlib.crc32(chunk, self._crc)
        self._produced += len(chunk)
        return chunk


class Member(SequentialSource):
    """A member as a byte source.

    Parameters
    ----------
    archive : Archive
    entry : Entry
    name : str
        The member in messages.
    """

    def __init__(self, archive: Archive, entry: Entry, name: str) -> None:
        self._archive = archive
        self._entry = entry
        super().__init__(name, entry.size)

    def start(self) -> MemberReader:
        return MemberReader(self._archive, self._entry)

    def changed(self) -> bool:
        """Return False: the code that opened the archive checks the archive's source."""
        return False

    def close(self) -> None:
        """Do nothing: the code that opened the archive closes it."""
