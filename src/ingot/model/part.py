"""A part: one contiguous blob with its types, encoding and digest, and the ways to get at its bytes.

There are three ways: ``view`` (best effort, free of copies where the bytes allow),
``readinto`` (a copy of a range, never through mapped memory) and ``source``/``offset`` (the address only).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ingot.core.bytes import checksums, encodings
from ingot.core.bytes.chunk_digests import ChunkDigests, ChunkedHasher, single_chunk
from ingot.core.numeric.dtypes import STORAGE_DTYPES, from_file, little_endian, native_order
from ingot.core.runtime.parallel import go_on
from ingot.errors import FormatError, IntegrityError
from ingot.model.bytesource import ByteSource, DerivedSource, MemorySource, PrivateSource
from ingot.model.reading.ranges import is_distant

CHUNK = 1 << 20


@dataclass(slots=True)
class _Checks:
    """The checks of a part that need not be repeated, and its bytes if they are kept."""

    verified: bool = False
    proven: set[int] = field(default_factory=set)
    data: memoryview | None = None


@dataclass(slots=True, eq=False)
class Part:
    """One stored blob.

    Parameters
    ----------
    dtype : str
        Storage primitive, one of the 13 of zTensor 1.2 section 2.
    length : int
        Stored bytes (compressed, if ``encoding`` says so).
    source, offset :
        Where the stored bytes lie.
    type : str or None
        Logical type; None where it equals ``dtype``. May be one that Ingot does not know.
    encoding : str
        ``raw``, ``zstd`` or ``zt.zstd-seekable/1``.
    uncompressed_length : int or None
        Bytes after decoding; None for ``raw``.
    digest : str or None
        ``algorithm:hex`` of the stored bytes, or of the decoded ones.
    chunks : ChunkDigests or None
        Digests of chunks of the stored bytes, by which ranges are checked.
    digest_of_decoded : bool
        Whether the digest is of the bytes after decoding.
    where : str
        For messages: file, tensor and role.
    occupies : int or None
        Bytes that the part takes in its file, where these are not ``length``: a container may spread it out.
    by_chunks : bool
        Readers check each chunk that they touch before they hand out bytes of it, and nothing at their end: for those
        who read a range. By default they check the whole, at its end.
    keeps : bool
        Stored bytes, once read as a whole and checked, are kept with the part: the same memory for whoever asks again.
    """

    dtype: str
    length: int
    source: ByteSource
    offset: int = 0
    type: str | None = None
    encoding: str = "raw"
    uncompressed_length: int | None = None
    digest: str | None = None
    chunks: ChunkDigests | None = field(default=None, repr=False)
    digest_of_decoded: bool = False
    where: str = ""
    verify: bool = True
    occupies: int | None = None
    by_chunks: bool = field(default=False, repr=False)
    keeps: bool = field(default=False, repr=False)
    _checks: _Checks | None = field(default=None, repr=False, init=False)  # ``replace`` leaves it out

    @property
    def nbytes(self) -> int:
        """Bytes after decoding the encoding."""
        return self.length if self.uncompressed_length is None else self.uncompressed_length

    @property
    def count(self) -> int:
        """Storage elements after decoding the encoding."""
        return self.nbytes * 8 // STORAGE_DTYPES[self.dtype].bits

    @property
    def integers(self) -> tuple[int, int] | None:
        """The first and the last of the integers that the values can be, if the source states them; else None."""
        return self.source.integers if isinstance(self.source, DerivedSource) else None

    @property
    def stored_digest(self) -> str | None:
        """The digest that the stored bytes are checked by, None where there is none."""
        return None if self.digest_of_decoded and self.encoding != "raw" else self.digest

    @property
    def decoded_digest(self) -> str | None:
        """The digest that bytes are checked by after decoding, None where there is none."""
        return self.digest if self.digest_of_decoded and self.encoding != "raw" else None

    def stored(self) -> memoryview:
        """Return the stored bytes as they are, digest checked."""
        if self._checks is not None and self._checks.data is not None:
            return self._checks.data
        data = self.source.view(self.offset, self.length)
        try:
            self._check(data)
        except IntegrityError:
            if not is_distant(self.source):
                raise
            data = self.source.view(self.offset, self.length)  # what the way did to it, another journey does not
            self._check(data)
        if self.keeps:
            self._shared_checks().data = data
        return data

    def view(self) -> memoryview:
        """Return the decoded bytes: the mapping itself for raw parts of a mapped source, else a fresh buffer."""
        if self.encoding == "raw":
            return self.stored()
        out = np.empty(self.nbytes, np.uint8).data
        reader = self.reader()
        reader.readinto(out)
        reader.finish()
        return out

    def readinto(self, start: int, out: memoryview) -> None:
        """Fill ``out`` with decoded bytes from ``start``.

        A range of a raw part touches the chunks that it lies in where these can be checked (``provable``), else only
        its own bytes, and then it is not checked; whole reads are.
        """
        if start < 0 or start + out.nbytes > self.nbytes:
            raise FormatError(
                "part.range", f"expected a range in {self.nbytes} bytes, found {start}+{out.nbytes}", where=self.where
            )
        if self.encoding != "raw":
            out[:] = self.view()[start : start + out.nbytes]
        elif out.nbytes == self.length:
            reader = self.reader()
            reader.readinto(out)
            reader.finish()
        else:
            reader = self.by_ranges().reader()
            reader.skip(start)
            reader.readinto(out)

    def read_whole(self, out: memoryview) -> bool:
        """Fill ``out``, of as many bytes, with all of a small raw part of this machine, and prove its digest.

        False where the part is not such, or not as its digest says: then ``reader`` reads it, and tells. Of many small
        parts each costs as few calls as can be.
        """
        if self.encoding != "raw" or self.chunks is not None or self.length > CHUNK or is_distant(self.source):
            return False
        go_on()
        self.source.readinto(self.offset, out)
        return self.digest is None or not self.verify or checksums.proves(self.digest, out)

    def reader(self, *, chunks: bool = False) -> PartReader:
        """Return a sequential reader of the decoded bytes, in bounded memory, that checks the digest at its end.

        With ``chunks`` it compares the digests of all chunks there too.
        """
        return PartReader(self, chunks=chunks)

    def provable(self) -> ChunkDigests | None:
        """Return what ranges are checked by: the digests of chunks, a small part's own digest; None for nothing."""
        digest = self.stored_digest
        if not self.verify or digest is None:
            return None
        return self.chunks or single_chunk(digest, self.length)

    def by_ranges(self) -> Part:
        """Return this part with ``by_chunks`` set, for reads of ranges. A chunk that one of both has checked is not
        checked again."""
        part = replace(self, by_chunks=True)
        part._checks = self._shared_checks()
        return part

    def proven(self) -> set[int]:
        """Return the chunks that were checked and have not changed since; a reader adds those that it checks.

        Checked bytes are certain to be the same only in a mapping, and while the file is not written to.
        """
        if self._checks is None or not self.source.mapped or self.source.changed():
            return set()
        return self._checks.proven

    def private(self) -> Part:
        """Return this part over writable memory of its own: no read of this part sees what is written to it.

        Of a mapped file it is a copy-on-write mapping; other bytes are read once and kept.
        """
        if isinstance(self.source, PrivateSource) or self.keeps:
            return self
        part = replace(self, source=PrivateSource(self.source)) if self.source.mapped else replace(self, keeps=True)
        part._checks = None if self._checks is None else replace(self._checks, data=None)
        return part

    def array(self) -> np.ndarray[Any, np.dtype[Any]]:
        """Return the decoded bytes as a 1-D array of the storage dtype in native byte order (a view where possible)."""
        return from_file(np.frombuffer(self.view(), np.uint8), self.dtype)

    def _check(self, data: memoryview) -> None:
        digest = self.stored_digest
        if not self.verify or digest is None:
            return
        verified = self._checks is not None and self._checks.verified
        if verified and self.source.mapped and not self.source.changed():
            return
        algorithm = checksums.algorithm_of(digest, "part.digest", self.where)
        if algorithm is not None:
            checksums.check(digest, checksums.digest(algorithm, data), "part.digest-mismatch", self.where)
        self._shared_checks().verified = True

    def _shared_checks(self) -> _Checks:
        """Return the record of checks, which most parts never need."""
        if self._checks is None:
            self._checks = _Checks()
        return self._checks


class StoredReader:
    """Sequential read calls over a part's stored bytes with the digest running along."""

    def __init__(self, part: Part, *, chunks: bool = False) -> None:
        self._part = part
        self._position = 0
        self._digest = part.stored_digest
        algorithm = (
            checksums.algorithm_of(self._digest, "part.digest", part.where) if self._digest and part.verify else None
        )
        self._chunked = ChunkedHasher(algorithm, part.chunks.size) if chunks and part.chunks and algorithm else None
        self._hasher = self._chunked or (checksums.hasher(algorithm) if algorithm else None)

    def readinto(self, out: memoryview) -> None:
        """Fill ``out`` with the next stored bytes; hashing follows each chunk while it is still in cache."""
        part = self._part
        self._require(out.nbytes)
        distant = is_distant(part.source)
        if distant:  # which has its own threads and pieces
            part.source.readinto(part.offset + self._position, out)
        for start in range(0, out.nbytes, CHUNK):
            go_on()
            piece = out[start : start + CHUNK]
            if not distant:
                part.source.readinto(part.offset + self._position, piece)
            if self._hasher:
                self._hasher.update(piece)
            self._position += piece.nbytes

    def skip(self, count: int) -> None:
        """Pass over the next stored bytes; the digest, which is of all of them, is then not checked."""
        self._require(count)
        self._position += count
        self._hasher = self._chunked = None

    def _require(self, count: int) -> None:
        left = self._part.length - self._position
        if count > left:
            raise IntegrityError("part.short", f"expected {count} more bytes, found {left}", where=self._part.where)

    def read(self, size: int = -1, /) -> bytes:
        left = self._part.length - self._position
        out = bytearray(left if size < 0 else min(size, left))
        self.readinto(memoryview(out))
        return bytes(out)

    def finish(self) -> None:
        """Read what is left, then compare the digest."""
        part = self._part
        while self._position < part.length:
            self.read(CHUNK)
        if self._chunked and part.chunks:
            part.chunks.check_all(self._chunked.digests(), "part.digest-mismatch", part.where)
        if self._hasher and self._digest:
            checksums.check(self._digest, self._hasher.text(), "part.digest-mismatch", part.where)


class ChunkReader(StoredReader):
    """Reads ranges of a part's stored bytes: a chunk is checked before any of its bytes is handed out."""

    def __init__(self, part: Part, chunks: ChunkDigests) -> None:
        super().__init__(part)
        self._chunks = chunks
        self._proven = part.proven()
        self._held: tuple[int, memoryview] | None = None

    def readinto(self, out: memoryview) -> None:
        """Fill ``out`` with the next stored bytes."""
        self._require(out.nbytes)
        while out.nbytes:
            go_on()
            index, within = divmod(self._position, self._chunks.size)
            _, length = self._chunks.span(index)
            piece = out[: length - within]
            if self._held is not None and self._held[0] == index:  # asked for again, it would travel again
                piece[:] = self._held[1][within : within + piece.nbytes]
            elif index in self._proven:
                self._part.source.readinto(self._part.offset + self._position, piece)
            elif piece.nbytes == length:
                piece = self._check_all(index, out)
            else:
                data = np.empty(length, np.uint8).data
                self._check(index, data)
                self._held = index, data
                piece[:] = data[within : within + piece.nbytes]
            self._position += piece.nbytes
            out = out[piece.nbytes :]

    def _check_all(self, index: int, out: memoryview) -> memoryview:
        """Fill the beginning of ``out`` with whole chunks, from another machine as many as there are room for."""
        start, length = self._chunks.span(index)
        if not is_distant(self._part.source):
            piece = out[:length]
        else:
            size = self._chunks.size
            left = self._part.length - start
            piece = out[: left if out.nbytes >= left else out.nbytes // size * size]
            self._part.source.readinto(self._part.offset + start, piece)
        for at in range(0, piece.nbytes, self._chunks.size):
            chunk = piece[at : at + self._chunks.size]
            self._check(index + at // self._chunks.size, chunk, read=not is_distant(self._part.source))
        return piece

    def _check(self, index: int, out: memoryview, *, read: bool = True) -> None:
        """Compare a chunk's digest, after reading it; what another machine sent wrong is asked for once more."""
        part = self._part
        offset = self._part.offset + self._chunks.span(index)[0]
        if read:
            part.source.readinto(offset, out)
        try:
            self._chunks.check(index, out, "part.digest-mismatch", part.where)
        except IntegrityError:
            if not is_distant(part.source):
                raise
            part.source.readinto(offset, out)
            self._chunks.check(index, out, "part.digest-mismatch", part.where)
        self._proven.add(index)

    def finish(self) -> None:
        """Nothing is left to check."""


class PartReader:
    """Sequential reader of a part's decoded bytes."""

    def __init__(self, part: Part, *, chunks: bool = False) -> None:
        self._part = part
        # From another machine each chunk is proven as it comes: a bad one can be asked for again.
        provable = part.provable() if part.by_chunks or (is_distant(part.source) and not chunks) else None
        self._stored = StoredReader(part, chunks=chunks) if provable is None else ChunkReader(part, provable)
        self._decoder: encodings.ZstdReader | encodings.SeekableReader | None = None
        if part.encoding == encodings.SEEKABLE:
            self._decoder = encodings.SeekableReader(self._at, part.length, part.nbytes, "part.zstd", part.where)
        elif part.encoding != "raw":
            encodings.require(part.encoding, part.where)
            self._decoder = encodings.ZstdReader(self._stored, part.nbytes, "part.zstd", part.where)
        self._digest = part.decoded_digest if part.verify else None
        algorithm = checksums.algorithm_of(self._digest, "part.digest", part.where) if self._digest else None
        self._hasher = checksums.hasher(algorithm) if algorithm else None

    def readinto(self, out: memoryview) -> None:
        """Fill ``out`` with the next decoded bytes."""
        go_on()
        (self._decoder or self._stored).readinto(out)
        if self._hasher:
            self._hasher.update(out)

    def skip(self, count: int) -> None:
        """Pass over the next decoded bytes: unread in a raw part, decoded in a compressed one."""
        if self._decoder is None:
            self._stored.skip(count)
            return
        self._hasher = None
        if isinstance(self._decoder, encodings.SeekableReader):
            self._decoder.skip(count)
            return
        scratch = np.empty(min(count, CHUNK), np.uint8).data
        for start in range(0, count, CHUNK):
            self._decoder.readinto(scratch[: min(CHUNK, count - start)])

    def finish(self) -> None:
        """Check that the end was reached and that the digest fits. Call it after the last byte."""
        if self._decoder:
            self._decoder.finish()
        if self._hasher and self._digest:
            checksums.check(
                self._digest, self._hasher.text(), "part.digest-mismatch", self._part.where, subject="the decoded bytes"
            )
        if not isinstance(self._decoder, encodings.SeekableReader):  # that one reads what it needs, checked by frames
            self._stored.finish()

    def _at(self, offset: int, length: int) -> memoryview:
        """Return stored bytes by their position in the part."""
        return self._part.source.view(self._part.offset + offset, length)


def memory_part(array: np.ndarray[Any, np.dtype[Any]], dtype: str, type: str | None = None) -> Part:
    """Wrap an array of any shape and strides as a raw part in memory, without a copy where it lies in C order.

    Big-endian arrays and hosts swap here: a part's bytes are little-endian wherever they are (zTensor 1.2 section 4).
    """
    flat = np.ascontiguousarray(native_order(array)).reshape(-1)
    wanted = little_endian(dtype)
    if not wanted.isnative:
        flat = flat.view(wanted.newbyteorder("=")).astype(wanted)
    data = flat.view(np.uint8).data if flat.size else memoryview(b"")
    return Part(dtype=dtype, type=type, length=data.nbytes, source=MemorySource(data), where="<memory>")
