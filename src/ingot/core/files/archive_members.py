"""Members of a zip archive that is not unpacked, as byte sources, read in order; deflated ones on the way."""

from __future__ import annotations

import zlib

from ingot.core.files.archive import DEFLATED, Archive, Entry, local_size
from ingot.core.files.forward import Forward
from ingot.errors import FormatError, IntegrityError

_PIECE = 1 << 16


class Inflating:
    """Sequential reading of one member; its CRC-32 is compared at the end."""

    def __init__(self, archive: Archive, entry: Entry) -> None:
        self._archive = archive
        self._entry = entry
        self._stored = entry.offset + local_size(archive.read(entry.offset, 30))
        self._end = self._stored + entry.stored
        self._inflate = zlib.decompressobj(-15) if entry.method == DEFLATED else None
        self._crc = 0
        self._produced = 0

    def readinto(self, out: memoryview) -> None:
        """Fill ``out`` completely; ``FormatError`` ``archive.deflate``, ``IntegrityError`` ``archive.size``."""
        filled = 0
        while filled < out.nbytes:
            piece = self._next(out.nbytes - filled)
            if not piece:
                raise IntegrityError(
                    "archive.size",
                    f"expected {self._entry.size} bytes, found {self._produced}",
                    where=self._entry.name,
                )
            out[filled : filled + len(piece)] = piece
            filled += len(piece)

    def finish(self) -> None:
        """Check that nothing follows and that the bytes are those that the directory promises."""
        if self._produced != self._entry.size or self._next(1):
            raise IntegrityError(
                "archive.size", f"expected {self._entry.size} bytes, found others", where=self._entry.name
            )
        if self._crc != self._entry.crc:
            raise IntegrityError("archive.crc", "expected the bytes of the CRC, found others", where=self._entry.name)

    def _next(self, most: int) -> bytes:
        """Return at most so many bytes, none at the end."""
        piece = b""
        while not piece:
            waiting = b"" if self._inflate is None else self._inflate.unconsumed_tail
            count = min(_PIECE, self._end - self._stored, most if self._inflate is None else _PIECE)
            data = waiting or self._archive.read(self._stored, count)
            self._stored += 0 if waiting else len(data)
            if self._inflate is None:
                piece = data
            else:
                try:
                    piece = self._inflate.decompress(data, most)
                except zlib.error as error:
                    where = self._entry.name
                    raise FormatError("archive.deflate", f"expected a deflate stream: {error}", where=where) from None
            if not data:
                break
        self._crc = zlib.crc32(piece, self._crc)
        self._produced += len(piece)
        return piece


class Member(Forward):
    """A member as a byte source; read in order without ever holding all of it, going back means beginning anew.

    Parameters
    ----------
    archive : Archive
    entry : Entry
    name : str
        What messages call it.
    """

    def __init__(self, archive: Archive, entry: Entry, name: str) -> None:
        self._archive = archive
        self._entry = entry
        super().__init__(name, entry.size)

    def start(self) -> Inflating:
        return Inflating(self._archive, self._entry)

    def changed(self) -> bool:
        """Whether the archive was written to: whoever opened it asks the archive's own source."""
        return False

    def close(self) -> None:
        """Nothing: the archive is closed by whoever opened it."""
