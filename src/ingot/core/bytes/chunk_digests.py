"""Digests of a part's chunks, with which a reader can check a range of the part without reading the rest.

A part of more than ``LARGE`` stored bytes gets a digest for each ``CHUNK`` bytes; the last chunk may be shorter. The
algorithm is the algorithm of the part's digest. A file declares the digests as a map: ``size`` is the number of bytes
of a chunk, and ``digests`` contains the digests of all chunks, concatenated. Definition: ``spec/operations.md``,
"Digests of chunks".
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from ingot.core.bytes import checksums
from ingot.core.parsing.strictjson import preload
from ingot.core.runtime import native
from ingot.errors import FormatError

CHUNK = 1 << 20
LARGE = 8 << 20
# Readers hold a full chunk in memory to check it.
_MIN_CHUNK = 1 << 12
_MAX_CHUNK = 1 << 24
_CRC = "crc32c"

Buffer = checksums.Buffer


@preload
class DeclaredChunks(msgspec.Struct, frozen=True, gc=False):
    """Digests of chunks as a file declares them: the number of bytes of a chunk, and the concatenated digests."""

    size: int
    digests: bytes


@dataclass(frozen=True, slots=True)
class ChunkDigests:
    """The digests of the chunks of a part with ``length`` stored bytes.

    Each chunk has ``size`` bytes; the last one may be shorter. ``digests`` contains one digest for each chunk,
    concatenated.
    """

    algorithm: str
    size: int
    digests: bytes
    length: int

    def span(self, index: int) -> tuple[int, int]:
        """Return the offset of chunk ``index`` in the part, and its size in bytes."""
        start = index * self.size
        return start, min(self.size, self.length - start)

    def check(self, index: int, data: Buffer, rule: str, location: str) -> None:
        """Raise ``IntegrityError`` if ``data`` does not match the digest of chunk ``index``."""
        self._compare(index, checksums.raw(checksums.digest(self.algorithm, data)), rule, location)

    def check_all(self, digests: bytes, rule: str, location: str) -> None:
        """Raise ``IntegrityError`` for the first chunk that does not match.

        ``digests`` are the digests of all chunks, computed from the present bytes and concatenated.
        """
        if digests != self.digests:
            width = checksums.WIDTHS[self.algorithm]
            for index in range(len(self.digests) // width):
                self._compare(index, digests[index * width : (index + 1) * width], rule, location)

    def _compare(self, index: int, actual: bytes, rule: str, location: str) -> None:
        width = checksums.WIDTHS[self.algorithm]
        expected = self.digests[index * width : (index + 1) * width]
        if actual != expected:
            start, length = self.span(index)
            checksums.check(
                checksums.text_of(self.algorithm, expected),
                checksums.text_of(self.algorithm, actual),
                rule,
                location,
                subject=f"bytes {start} to {start + length} (chunk {index})",
            )


def read_chunks(
    declared: DeclaredChunks | None, digest: str | None, length: int, rule: str, location: str
) -> ChunkDigests | None:
    """Return the digests of a part's chunks.

    Returns None if the file declares no chunk digests, or if Ingot does not support their algorithm.

    Parameters
    ----------
    declared : DeclaredChunks or None
        The digests in the file.
    digest : str or None
        The part's digest, whose syntax was checked.
    length : int
        The part's stored bytes.
    rule, location : str
        The rule and location of the error.

    Raises
    ------
    FormatError
        Chunks of less than 4 KiB or more than 16 MiB, a wrong number of digests, or no ``digest``.
    """
    if declared is None:
        return None
    if digest is None:
        raise FormatError(rule, "digests of chunks need a digest of the part too", where=location)
    if not _MIN_CHUNK <= declared.size <= _MAX_CHUNK:
        raise FormatError(
            rule, f"expected chunks of {_MIN_CHUNK} to {_MAX_CHUNK} bytes, found {declared.size}", where=location
        )
    algorithm = digest.partition(":")[0]
    width = checksums.WIDTHS.get(algorithm)
    if width is None:
        return None
    expected = width * -(-length // declared.size)
    if len(declared.digests) != expected:
        raise FormatError(
            rule,
            f"expected {expected} bytes of {algorithm} digests for chunks of {declared.size} in {length} bytes, found "
            f"{len(declared.digests)}",
            where=location,
        )
    return ChunkDigests(algorithm, declared.size, declared.digests, length)


def single_chunk(digest: str, length: int) -> ChunkDigests | None:
    """Return a small part's digest as the digest of its only chunk.

    Returns None if the part is empty or large, or if the algorithm is not supported.
    """
    algorithm = checksums.supported_algorithm(digest)
    if not 0 < length <= LARGE or algorithm is None:
        return None
    return ChunkDigests(algorithm, length, checksums.raw(digest), length)


def stand_in(algorithm: str | None, length: int) -> bytes | None:
    """Return zeros in place of the digests of a part's chunks, to reserve their space in a file that is being written.

    Returns None if the file will declare no digests of chunks: if ``algorithm`` is None, or if the part has at most
    ``LARGE`` bytes.
    """
    if algorithm is None or length <= LARGE:
        return None
    return bytes(checksums.WIDTHS[algorithm] * -(-length // CHUNK))


def declare_chunks(digests: bytes) -> DeclaredChunks:
    """Return the entry of a file for ``digests``, the concatenated digests of chunks of ``CHUNK`` bytes."""
    return DeclaredChunks(CHUNK, digests)


class ChunkedHasher:
    """Computes the digests of chunks and of all bytes in one pass."""

    def __init__(self, algorithm: str, size: int = CHUNK) -> None:
        self._algorithm = algorithm
        self._size = size
        # The total CRC is computed from the CRCs of the chunks.
        self._total_hasher = None if algorithm == _CRC else checksums.hasher(algorithm)
        self._chunk = checksums.hasher(algorithm)
        self._filled = 0
        self._total = 0
        self._chunk_digests = bytearray()

    def update(self, data: Buffer, /) -> None:
        view = memoryview(data)
        while view.nbytes:
            part = view[: self._size - self._filled]
            self._chunk.update(part)
            if self._total_hasher is not None:
                self._total_hasher.update(part)
            self._filled += part.nbytes
            self._total += part.nbytes
            if self._filled == self._size:
                self._chunk_digests += checksums.raw(self._chunk.text())
                self._chunk = checksums.hasher(self._algorithm)
                self._filled = 0
            view = view[part.nbytes :]

    def digests(self) -> bytes:
        """Return the concatenated digests of all chunks."""
        return bytes(self._chunk_digests) + (checksums.raw(self._chunk.text()) if self._filled else b"")

    def text(self) -> str:
        """Return the digest of all bytes as text ``algorithm:hex``."""
        if self._total_hasher is not None:
            return self._total_hasher.text()
        value = 0
        digests = self.digests()
        for index in range(len(digests) // 4):
            size = min(self._size, self._total - index * self._size)
            value = native.crc32c_combine(value, int.from_bytes(digests[4 * index : 4 * index + 4], "big"), size)
        return checksums.text_of(_CRC, value.to_bytes(4, "big"))


class PartDigests:
    """Computes the digests of a part while it is written: a CRC-32C for the journal, and the file's digests.

    Parameters
    ----------
    length : int or None
        The part's bytes; None if they are not known in advance.
    algorithm : str or None
        The algorithm of the digests in the file; None for no digests.
    """

    def __init__(self, length: int | None, algorithm: str | None) -> None:
        self._algorithm = algorithm
        self._total = 0
        large = algorithm is not None and (length is None or length > LARGE)
        self._chunked = ChunkedHasher(algorithm) if algorithm is not None and large else None
        self._running: dict[str, checksums.Hasher] = {
            name: checksums.hasher(name) for name in (_CRC, algorithm) if name is not None
        }
        if self._chunked is not None and algorithm is not None:
            self._running[algorithm] = self._chunked

    def update(self, data: memoryview) -> None:
        """Add the next bytes."""
        for running in self._running.values():
            running.update(data)
        self._total += data.nbytes

    @property
    def crc(self) -> str:
        """The CRC-32C of the bytes so far."""
        return self._running[_CRC].text()

    @property
    def digest(self) -> str | None:
        """The digest that the file declares for the part; None without an algorithm."""
        return None if self._algorithm is None else self._running[self._algorithm].text()

    @property
    def chunks(self) -> bytes | None:
        """The digests that the file declares for the part's chunks; None for a part that is not large."""
        return None if self._chunked is None or self._total <= LARGE else self._chunked.digests()
