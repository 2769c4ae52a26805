"""Digests of chunks: they prove a range of a part as its digest proves the whole.

A part of more than ``LARGE`` stored bytes gets a digest for every ``CHUNK`` of them, the last one shorter, by the
algorithm of its own digest. A file states them as ``{"size": bytes of a chunk, "digests": one after the other}``.
Definition: ``spec/operations.md``, "Digests of chunks".
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from ingot.core.bytes import checksums
from ingot.core.parsing.strictjson import warm
from ingot.core.runtime import native
from ingot.errors import FormatError

CHUNK = 1 << 20
LARGE = 8 << 20
# a chunk is read into memory before any of its bytes are handed out
_LEAST = 1 << 12
_MOST = 1 << 24
_CRC = "crc32c"

Buffer = checksums.Buffer


@warm
class StatedChunks(msgspec.Struct, frozen=True, gc=False):
    """Digests of chunks as a file has them: bytes of a chunk, and the digests one after the other."""

    size: int
    digests: bytes


@dataclass(frozen=True, slots=True)
class ChunkDigests:
    """The digests of a part's chunks, known to fit its ``length``."""

    algorithm: str
    size: int
    digests: bytes
    length: int

    def span(self, index: int) -> tuple[int, int]:
        """Return where chunk ``index`` begins in the part, and its bytes."""
        start = index * self.size
        return start, min(self.size, self.length - start)

    def check(self, index: int, data: Buffer, rule: str, where: str) -> None:
        """Raise ``IntegrityError`` where ``data`` is not what chunk ``index`` was."""
        self._compare(index, checksums.raw(checksums.digest(self.algorithm, data)), rule, where)

    def check_all(self, digests: bytes, rule: str, where: str) -> None:
        """Raise ``IntegrityError`` for the first chunk whose digest is another one in ``digests``."""
        if digests != self.digests:
            width = checksums.WIDTHS[self.algorithm]
            for index in range(len(self.digests) // width):
                self._compare(index, digests[index * width : (index + 1) * width], rule, where)

    def _compare(self, index: int, found: bytes, rule: str, where: str) -> None:
        width = checksums.WIDTHS[self.algorithm]
        expected = self.digests[index * width : (index + 1) * width]
        if found != expected:
            start, length = self.span(index)
            checksums.check(
                checksums.text_of(self.algorithm, expected),
                checksums.text_of(self.algorithm, found),
                rule,
                where,
                what=f"bytes {start} to {start + length} (chunk {index})",
            )


def read_chunks(
    stated: StatedChunks | None, digest: str | None, length: int, rule: str, where: str
) -> ChunkDigests | None:
    """Return the chunks' digests that a file states of a part; None for none, or of an algorithm not known here.

    Parameters
    ----------
    stated
        As the file has it.
    digest : str or None
        The part's own digest, of a syntax that was checked.
    length : int
        The part's stored bytes.
    rule, where : str
        For the error.

    Raises
    ------
    FormatError
        Chunks of less than 4 KiB or more than 16 MiB, another number of digests than chunks, or no ``digest``.
    """
    if stated is None:
        return None
    if digest is None:
        raise FormatError(rule, "expected digests of chunks beside a digest of the part only, found none", where=where)
    if not _LEAST <= stated.size <= _MOST:
        raise FormatError(rule, f"expected chunks of {_LEAST} to {_MOST} bytes, found {stated.size}", where=where)
    algorithm = digest.partition(":")[0]
    width = checksums.WIDTHS.get(algorithm)
    if width is None:
        return None
    expected = width * -(-length // stated.size)
    if len(stated.digests) != expected:
        raise FormatError(
            rule,
            f"expected {expected} bytes of {algorithm} digests for chunks of {stated.size} in {length} bytes, found "
            f"{len(stated.digests)}",
            where=where,
        )
    return ChunkDigests(algorithm, stated.size, stated.digests, length)


def whole_as_chunk(digest: str, length: int) -> ChunkDigests | None:
    """Return a small part's digest as that of its only chunk; None where it is empty, large or of an unknown kind."""
    algorithm = checksums.kind(digest)
    if not 0 < length <= LARGE or algorithm is None:
        return None
    return ChunkDigests(algorithm, length, checksums.raw(digest), length)


def stand_in(algorithm: str | None, length: int) -> bytes | None:
    """Return zeros in place of the digests that a writer will state of a part; None where it will state none."""
    if algorithm is None or length <= LARGE:
        return None
    return bytes(checksums.WIDTHS[algorithm] * -(-length // CHUNK))


def as_stated(digests: bytes) -> StatedChunks:
    """Return what a writer states of chunks of ``CHUNK``."""
    return StatedChunks(CHUNK, digests)


class ChunkedHasher:
    """The digests of chunks and of the whole in one pass."""

    def __init__(self, algorithm: str, size: int = CHUNK) -> None:
        self._algorithm = algorithm
        self._size = size
        # The CRCs of chunks give that of the whole.
        self._whole = None if algorithm == _CRC else checksums.hasher(algorithm)
        self._chunk = checksums.hasher(algorithm)
        self._filled = 0
        self._total = 0
        self._done = bytearray()

    def update(self, data: Buffer, /) -> None:
        view = memoryview(data)
        while view.nbytes:
            piece = view[: self._size - self._filled]
            self._chunk.update(piece)
            if self._whole is not None:
                self._whole.update(piece)
            self._filled += piece.nbytes
            self._total += piece.nbytes
            if self._filled == self._size:
                self._done += checksums.raw(self._chunk.text())
                self._chunk = checksums.hasher(self._algorithm)
                self._filled = 0
            view = view[piece.nbytes :]

    def digests(self) -> bytes:
        """Return the digests of all chunks, one after the other."""
        return bytes(self._done) + (checksums.raw(self._chunk.text()) if self._filled else b"")

    def text(self) -> str:
        """Return the digest of the whole as written in files."""
        if self._whole is not None:
            return self._whole.text()
        value = 0
        digests = self.digests()
        for index in range(len(digests) // 4):
            size = min(self._size, self._total - index * self._size)
            value = native.crc32c_combine(value, int.from_bytes(digests[4 * index : 4 * index + 4], "big"), size)
        return checksums.text_of(_CRC, value.to_bytes(4, "big"))


class PartDigests:
    """The digests of a part while it is written: a CRC-32C for the writer's record, and what the file states.

    Parameters
    ----------
    length : int or None
        Bytes to come; None where only they tell.
    algorithm : str or None
        What the file is to state.
    """

    def __init__(self, length: int | None, algorithm: str | None) -> None:
        self._algorithm = algorithm
        self._total = 0
        large = algorithm is not None and (length is None or length > LARGE)
        self._chunked = ChunkedHasher(algorithm) if algorithm is not None and large else None
        self._running: dict[str, checksums.Hasher] = {
            kind: checksums.hasher(kind) for kind in (_CRC, algorithm) if kind is not None
        }
        if self._chunked is not None and algorithm is not None:
            self._running[algorithm] = self._chunked

    def update(self, data: memoryview) -> None:
        """Take the next bytes."""
        for running in self._running.values():
            running.update(data)
        self._total += data.nbytes

    @property
    def crc(self) -> str:
        """The CRC-32C so far."""
        return self._running[_CRC].text()

    @property
    def digest(self) -> str | None:
        """What the file states of the part."""
        return None if self._algorithm is None else self._running[self._algorithm].text()

    @property
    def chunks(self) -> bytes | None:
        """What the file states of its chunks; None of a part that is not large."""
        return None if self._chunked is None or self._total <= LARGE else self._chunked.digests()
