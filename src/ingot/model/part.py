"""Parts: contiguous blobs with types, an encoding and a digest, and access to their bytes.

``view`` avoids copies if possible. ``readinto`` copies a range without accessing mapped memory. ``source`` and
``offset`` are the address of the stored bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ingot.core.bytes import checksums, encodings
from ingot.core.bytes.chunk_digests import ChunkDigests, ChunkedHasher, single_chunk
from ingot.core.bytes.packed import PACKED
from ingot.core.bytes.record_layout import RULE as PACKED_RULE
from ingot.core.numeric.dtypes import STORAGE_DTYPES, from_file, little_endian, native_order
from ingot.core.runtime.parallel import check_cancelled
from ingot.errors import FormatError, IntegrityError
from ingot.model.bytesource import ByteSource, DerivedSource, MemorySource, PagedSource, PrivateSource
from ingot.model.reading.ranges import is_remote

CHUNK = 1 << 20


@dataclass(slots=True)
class _Checks:
    """Completed checks of a part, which are not repeated, and the part's bytes if they are cached."""

    verified: bool = False
    proven: set[int] = field(default_factory=set)
    data: memoryview | None = None


@dataclass(slots=True, eq=False)
class Part:
    """A stored blob of a tensor.

    Parameters
    ----------
    dtype : str
        Storage primitive: one of the 13 of zTensor 1.2, section 2.
    length : int
        Number of stored bytes, in their ``encoding``.
    source : ByteSource
        The source that contains the stored bytes.
    offset : int
        The offset of the stored bytes in ``source``.
    type : str or None
        Logical type; None if it equals ``dtype``. Ingot may not support it.
    encoding : str
        ``raw``, ``zstd``, ``zt.zstd-seekable/1`` or ``ingot.packed/1``.
    uncompressed_length : int or None
        Bytes after decoding; None for ``raw``.
    digest : str or None
        ``algorithm:hex`` of the stored bytes, or of the decoded bytes if ``digest_of_decoded`` is set.
    chunks : ChunkDigests or None
        Digests of chunks of the stored bytes, for the check of ranges.
    digest_of_decoded : bool
        Whether the digest covers the bytes after decoding.
    where : str
        The location for error messages: file, tensor and role.
    verify : bool
        Whether digests are checked.
    occupies : int or None
        The bytes that the part takes in its file, with padding; None if they are ``length``.
    by_chunks : bool
        Whether readers check each chunk before they return its bytes, instead of the full digest at the end. Reads of
        ranges need this.
    keeps : bool
        Whether ``stored`` caches the checked bytes. Then all callers receive the same memory.
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
        """The number of bytes after decoding the encoding."""
        return self.length if self.uncompressed_length is None else self.uncompressed_length

    @property
    def count(self) -> int:
        """Storage elements after decoding the encoding."""
        return self.nbytes * 8 // STORAGE_DTYPES[self.dtype].bits

    @property
    def integers(self) -> tuple[int, int] | None:
        """The inclusive range of the integer values, if the source states it; else None."""
        return self.source.integers if isinstance(self.source, DerivedSource) else None

    @property
    def stored_digest(self) -> str | None:
        """The digest of the stored bytes; None if there is none."""
        return None if self.digest_of_decoded and self.encoding != "raw" else self.digest

    @property
    def decoded_digest(self) -> str | None:
        """The digest of the decoded bytes; None if there is none."""
        return self.digest if self.digest_of_decoded and self.encoding != "raw" else None

    def prefetch(self) -> bool:
        """Ask the system to read the stored bytes into its cache; return False if the source does not support this."""
        return isinstance(self.source, PagedSource) and self.source.prefetch(self.offset, self.length)

    def evict(self) -> bool:
        """Ask the system to drop the stored bytes from its cache; return False if the source does not support this."""
        return isinstance(self.source, PagedSource) and self.source.evict(self.offset, self.length)

    def stored(self) -> memoryview:
        """Return the stored bytes, still encoded, after checking the digest. Raises ``IntegrityError``."""
        if self._checks is not None and self._checks.data is not None:
            return self._checks.data
        data = self.source.view(self.offset, self.length)
        try:
            self._check(data)
        except IntegrityError:
            if not is_remote(self.source):
                raise
            data = self.source.view(self.offset, self.length)  # retry: the bytes may have been damaged in transit
            self._check(data)
        if self.keeps:
            self._shared_checks().data = data
        return data

    def view(self) -> memoryview:
        """Return the decoded bytes: a view of the mapping for raw parts of a mapped source, else a new buffer."""
        if self.encoding == "raw":
            return self.stored()
        out = np.empty(self.nbytes, np.uint8).data
        reader = self.reader()
        reader.readinto(out)
        reader.finish()
        return out

    def readinto(self, start: int, out: memoryview) -> None:
        """Fill ``out`` with decoded bytes from ``start``.

        Reads of the full part are always checked. A range of a raw part is checked if the part has digests of chunks
        (``provable``); then the read covers full chunks. Otherwise it reads only the range, unchecked.
        """
        if start < 0 or start + out.nbytes > self.nbytes:
            raise FormatError(
                "part.range",
                f"expected a range in {self.nbytes} bytes, found {start}+{out.nbytes}",
                where=self.where,
            )
        if self.encoding in encodings.IN_FRAMES:
            reader = self.reader()
            reader.skip(start)
            reader.readinto(out)
        elif self.encoding != "raw":
            out[:] = self.view()[start : start + out.nbytes]
        elif out.nbytes == self.length:
            reader = self.reader()
            reader.readinto(out)
            reader.finish()
        else:
            reader = self.by_ranges().reader()
            reader.skip(start)
            reader.readinto(out)

    def read_small(self, out: memoryview) -> bool:
        """Fill ``out`` with all bytes of a small local raw part and check its digest, faster than a reader.

        Return False if the part does not qualify or its digest differs; ``reader`` then raises the precise error.
        """
        if self.encoding != "raw" or self.chunks is not None or self.length > CHUNK or is_remote(self.source):
            return False
        check_cancelled()
        self.source.readinto(self.offset, out)
        return self.digest is None or not self.verify or checksums.proves(self.digest, out)

    def reader(self, *, chunks: bool = False) -> PartReader:
        """Return a sequential reader of the decoded bytes that needs bounded memory and checks the digest at the end.

        If ``chunks`` is set, it also compares the digests of all chunks at the end.
        """
        return PartReader(self, chunks=chunks)

    def provable(self) -> ChunkDigests | None:
        """Return the digests that check ranges: of chunks, or of a small part as one chunk; None if there are none."""
        digest = self.stored_digest
        if not self.verify or digest is None:
            return None
        return self.chunks or single_chunk(digest, self.length)

    def by_ranges(self) -> Part:
        """Return a copy with ``by_chunks`` set, for reads of ranges. Both share the record of checked chunks."""
        part = replace(self, by_chunks=True)
        part._checks = self._shared_checks()
        return part

    def proven(self) -> set[int]:
        """Return the indices of chunks whose digests were compared and whose bytes cannot have changed since.

        Readers add the chunks that they check. The set is empty unless the source is mapped and its file was not
        written to.
        """
        if self._checks is None or not self.source.mapped or self.source.changed():
            return set()
        return self._checks.proven

    def private(self) -> Part:
        """Return a part with the same bytes in writable memory, which is not shared with this part.

        If the source is mapped, the memory is a copy-on-write mapping. Otherwise the bytes are read once and cached.
        """
        if isinstance(self.source, PrivateSource) or self.keeps:
            return self
        part = replace(self, source=PrivateSource(self.source)) if self.source.mapped else replace(self, keeps=True)
        part._checks = None if self._checks is None else replace(self._checks, data=None)
        return part

    def array(self) -> np.ndarray[Any, np.dtype[Any]]:
        """Return the decoded bytes as a 1-D array of the storage dtype in native byte order; a view if possible."""
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
        """Return the record of completed checks; created on demand because most parts need none."""
        if self._checks is None:
            self._checks = _Checks()
        return self._checks


class StoredReader:
    """A sequential reader of a part's stored bytes that computes the digest as it reads."""

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
        """Fill ``out`` with the next stored bytes; each chunk is hashed while it is in the CPU's cache."""
        part = self._part
        self._require(out.nbytes)
        remote = is_remote(part.source)
        if remote:  # the source splits the read into parallel requests itself
            part.source.readinto(part.offset + self._position, out)
        for start in range(0, out.nbytes, CHUNK):
            check_cancelled()
            chunk = out[start : start + CHUNK]
            if not remote:
                part.source.readinto(part.offset + self._position, chunk)
            if self._hasher:
                self._hasher.update(chunk)
            self._position += chunk.nbytes

    def skip(self, count: int) -> None:
        """Skip the next stored bytes; the digest, which covers all bytes, is then not checked."""
        self._require(count)
        self._position += count
        self._hasher = self._chunked = None

    def _require(self, count: int) -> None:
        remaining = self._part.length - self._position
        if count > remaining:
            raise IntegrityError(
                "part.short", f"expected {count} more bytes, found {remaining}", where=self._part.where
            )

    def read(self, size: int = -1, /) -> bytes:
        remaining = self._part.length - self._position
        out = bytearray(remaining if size < 0 else min(size, remaining))
        self.readinto(memoryview(out))
        return bytes(out)

    def finish(self) -> None:
        """Read the remaining bytes, then compare the digest. Raises ``IntegrityError``."""
        part = self._part
        while self._position < part.length:
            self.read(CHUNK)
        if self._chunked and part.chunks:
            part.chunks.check_all(self._chunked.digests(), "part.digest-mismatch", part.where)
        if self._hasher and self._digest:
            checksums.check(self._digest, self._hasher.text(), "part.digest-mismatch", part.where)


class ChunkReader(StoredReader):
    """A reader of ranges of a part's stored bytes. It checks each chunk before it returns bytes of it."""

    def __init__(self, part: Part, chunks: ChunkDigests) -> None:
        super().__init__(part)
        self._chunks = chunks
        self._proven = part.proven()
        self._chunk: tuple[int, memoryview] | None = None

    def readinto(self, out: memoryview) -> None:
        """Fill ``out`` with the next stored bytes."""
        self._require(out.nbytes)
        while out.nbytes:
            check_cancelled()
            index, within = divmod(self._position, self._chunks.size)
            _, length = self._chunks.span(index)
            target = out[: length - within]
            if self._chunk is not None and self._chunk[0] == index:  # saves a second request to a remote source
                target[:] = self._chunk[1][within : within + target.nbytes]
            elif index in self._proven:
                self._part.source.readinto(self._part.offset + self._position, target)
            elif target.nbytes == length:
                target = self._read_chunks(index, out)
            else:
                data = np.empty(length, np.uint8).data
                self._check(index, data)
                self._chunk = index, data
                target[:] = data[within : within + target.nbytes]
            self._position += target.nbytes
            out = out[target.nbytes :]

    def _read_chunks(self, index: int, out: memoryview) -> memoryview:
        """Fill the beginning of ``out`` with the chunk ``index``, and return the filled part of ``out``.

        For a remote source, read all following chunks that fit into ``out`` too.
        """
        start, length = self._chunks.span(index)
        if not is_remote(self._part.source):
            target = out[:length]
        else:
            size = self._chunks.size
            remaining = self._part.length - start
            target = out[: remaining if out.nbytes >= remaining else out.nbytes // size * size]
            self._part.source.readinto(self._part.offset + start, target)
        for offset in range(0, target.nbytes, self._chunks.size):
            chunk = target[offset : offset + self._chunks.size]
            self._check(index + offset // self._chunks.size, chunk, read=not is_remote(self._part.source))
        return target

    def _check(self, index: int, out: memoryview, *, read: bool = True) -> None:
        """Read a chunk if ``read`` is set, and compare its digest; a damaged chunk of a remote source is read again."""
        part = self._part
        offset = self._part.offset + self._chunks.span(index)[0]
        if read:
            part.source.readinto(offset, out)
        try:
            self._chunks.check(index, out, "part.digest-mismatch", part.where)
        except IntegrityError:
            if not is_remote(part.source):
                raise
            part.source.readinto(offset, out)
            self._chunks.check(index, out, "part.digest-mismatch", part.where)
        self._proven.add(index)

    def finish(self) -> None:
        """Do nothing: every chunk is already checked."""


class PartReader:
    """A sequential reader of a part's decoded bytes."""

    def __init__(self, part: Part, *, chunks: bool = False) -> None:
        self._part = part
        # Chunks of a remote source are checked one by one, so that a damaged chunk can be read again.
        provable = part.provable() if part.by_chunks or (is_remote(part.source) and not chunks) else None
        self._stored = StoredReader(part, chunks=chunks) if provable is None else ChunkReader(part, provable)
        self._decoder: encodings.ZstdReader | encodings.FramesReader | None = None
        if part.encoding == encodings.SEEKABLE:
            self._decoder = encodings.SeekableReader(
                self._stored_bytes, part.length, part.nbytes, "part.zstd", part.where
            )
        elif part.encoding == PACKED:
            self._decoder = encodings.PackedReader(
                self._stored_bytes, part.length, part.nbytes, PACKED_RULE, part.where
            )
        elif part.encoding != "raw":
            encodings.require(part.encoding, part.where)
            self._decoder = encodings.ZstdReader(self._stored, part.nbytes, "part.zstd", part.where)
        self._digest = part.decoded_digest if part.verify else None
        algorithm = checksums.algorithm_of(self._digest, "part.digest", part.where) if self._digest else None
        self._hasher = checksums.hasher(algorithm) if algorithm else None

    def readinto(self, out: memoryview) -> None:
        """Fill ``out`` with the next decoded bytes."""
        check_cancelled()
        (self._decoder or self._stored).readinto(out)
        if self._hasher:
            self._hasher.update(out)

    def skip(self, count: int) -> None:
        """Skip the next decoded bytes: without reading them in a raw part, by decoding them in a compressed one."""
        if self._decoder is None:
            self._stored.skip(count)
            return
        self._hasher = None
        if isinstance(self._decoder, encodings.FramesReader):
            self._decoder.skip(count)
            return
        scratch = np.empty(min(count, CHUNK), np.uint8).data
        for start in range(0, count, CHUNK):
            self._decoder.readinto(scratch[: min(CHUNK, count - start)])

    def finish(self) -> None:
        """Check that the reader is at the end and that the digest matches. Call it after the last byte."""
        if self._decoder:
            self._decoder.finish()
        if self._hasher and self._digest:
            checksums.check(
                self._digest, self._hasher.text(), "part.digest-mismatch", self._part.where, subject="the decoded bytes"
            )
        if not isinstance(self._decoder, encodings.FramesReader):  # the reader of frames has checked each frame
            self._stored.finish()

    def _stored_bytes(self, offset: int, length: int) -> memoryview:
        """Return ``length`` stored bytes at an offset in the part."""
        return self._part.source.view(self._part.offset + offset, length)


def memory_part(array: np.ndarray[Any, np.dtype[Any]], dtype: str, type: str | None = None) -> Part:
    """Return an array of any shape and strides as a raw part in memory; an array in C order is not copied.

    Bytes are swapped on big-endian hosts and for big-endian arrays: a part's bytes are always little-endian (zTensor
    1.2, section 4).
    """
    flat = np.ascontiguousarray(native_order(array)).reshape(-1)
    file_dtype = little_endian(dtype)
    if not file_dtype.isnative:
        flat = flat.view(file_dtype.newbyteorder("=")).astype(file_dtype)
    data = flat.view(np.uint8).data if flat.size else memoryview(b"")
    return Part(dtype=dtype, type=type, length=data.nbytes, source=MemorySource(data), where="<memory>")
