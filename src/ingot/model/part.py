"""A part: one contiguous blob with its types, encoding and digest, and the ways to get at its bytes.

There are three ways: ``view`` (best effort, free of copies where the bytes allow),
``readinto`` (a copy of a range, never through mapped memory) and ``source``/``offset`` (the address only).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ingot.core import checksums, encodings
from ingot.core.dtypes import STORAGE_DTYPES, from_file, little_endian, native_order
from ingot.core.parallel import go_on
from ingot.errors import FormatError, IntegrityError
from ingot.model.bytesource import ByteSource, MemorySource, PrivateSource

CHUNK = 1 << 20


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
        ``raw`` or ``zstd``.
    uncompressed_length : int or None
        Bytes after decoding; None for ``raw``.
    digest : str or None
        ``algorithm:hex`` of the stored bytes.
    where : str
        For messages: file, tensor and role.
    occupies : int or None
        Bytes that the part takes in its file, where these are not ``length``: a container may spread it out.
    """

    dtype: str
    length: int
    source: ByteSource
    offset: int = 0
    type: str | None = None
    encoding: str = "raw"
    uncompressed_length: int | None = None
    digest: str | None = None
    where: str = ""
    verify: bool = True
    occupies: int | None = None
    _verified: bool = field(default=False, repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes after decoding the encoding."""
        return self.length if self.uncompressed_length is None else self.uncompressed_length

    @property
    def count(self) -> int:
        """Storage elements after decoding the encoding."""
        return self.nbytes * 8 // STORAGE_DTYPES[self.dtype].bits

    def stored(self) -> memoryview:
        """Return the stored bytes as they are, digest checked."""
        data = self.source.view(self.offset, self.length)
        self._check(data)
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
        """Fill ``out`` with decoded bytes from ``start``; a range of a raw part touches only those bytes.

        A digest covers the whole part, so a range alone cannot be checked against it; whole reads are.
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
            self.source.readinto(self.offset + start, out)

    def reader(self) -> PartReader:
        """Return a sequential reader of the decoded bytes, in bounded memory, that checks the digest at its end."""
        return PartReader(self)

    def private(self) -> Part:
        """Return this part over writable memory of its own: no read of this part sees what is written to it.

        Of a mapped file it is a copy-on-write mapping.
        """
        if isinstance(self.source, PrivateSource):
            return self
        return replace(self, source=PrivateSource(self.source))

    def array(self) -> np.ndarray[Any, np.dtype[Any]]:
        """Return the decoded bytes as a 1-D array of the storage dtype in native byte order (a view where possible)."""
        return from_file(np.frombuffer(self.view(), np.uint8), self.dtype)

    def _check(self, data: memoryview) -> None:
        if not self.verify or self.digest is None:
            return
        # Bytes that were proven once are the same ones only in a mapping, and while nobody writes to the file.
        if self._verified and self.source.mapped and not self.source.changed():
            return
        algorithm = checksums.known(self.digest, "part.digest", self.where)
        if algorithm is not None:
            checksums.check(self.digest, checksums.digest(algorithm, data), "part.digest-mismatch", self.where)
        self._verified = True


class StoredReader:
    """Sequential read calls over a part's stored bytes with the digest running along."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self._position = 0
        algorithm = checksums.known(part.digest, "part.digest", part.where) if part.digest and part.verify else None
        self._hasher = checksums.hasher(algorithm) if algorithm else None

    def readinto(self, out: memoryview) -> None:
        """Fill ``out`` with the next stored bytes; hashing follows each chunk while it is still in cache."""
        part = self._part
        self._require(out.nbytes)
        for start in range(0, out.nbytes, CHUNK):
            go_on()
            piece = out[start : start + CHUNK]
            part.source.readinto(part.offset + self._position, piece)
            if self._hasher:
                self._hasher.update(piece)
            self._position += piece.nbytes

    def skip(self, count: int) -> None:
        """Pass over the next stored bytes; the digest, which is of all of them, is then not checked."""
        self._require(count)
        self._position += count
        self._hasher = None

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
        if self._hasher and part.digest:
            checksums.check(part.digest, self._hasher.text(), "part.digest-mismatch", part.where)


class PartReader:
    """Sequential reader of a part's decoded bytes."""

    def __init__(self, part: Part) -> None:
        self._stored = StoredReader(part)
        self._decoder: encodings.ZstdReader | None = None
        if part.encoding != "raw":
            encodings.require(part.encoding, part.where)
            self._decoder = encodings.ZstdReader(self._stored, part.nbytes, "part.zstd", part.where)

    def readinto(self, out: memoryview) -> None:
        """Fill ``out`` with the next decoded bytes."""
        go_on()
        (self._decoder or self._stored).readinto(out)

    def skip(self, count: int) -> None:
        """Pass over the next decoded bytes: unread in a raw part, decoded in a compressed one."""
        if self._decoder is None:
            self._stored.skip(count)
            return
        scratch = np.empty(min(count, CHUNK), np.uint8).data
        for start in range(0, count, CHUNK):
            self._decoder.readinto(scratch[: min(CHUNK, count - start)])

    def finish(self) -> None:
        """Check that the end was reached and that the digest fits. Call it after the last byte."""
        if self._decoder:
            self._decoder.finish()
        self._stored.finish()


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
