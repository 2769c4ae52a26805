"""Seals: digests of a file's chunks in a small second file, for containers that store no digests.

The seal of the file ``X`` is ``X.ingot.json`` in the same folder. Definition: ``spec/remote.md``, "Seals".
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from dataclasses import dataclass

from ingot.core.bytes import checksums
from ingot.core.bytes.chunk_digests import CHUNK, ChunkDigests, ChunkedHasher
from ingot.core.parsing.strictjson import strict_json
from ingot.core.runtime.parallel import check_cancelled
from ingot.errors import FormatError, IntegrityError
from ingot.model.bytesource import ByteSource
from ingot.model.reading.ranges import read_bytes

SUFFIX = ".ingot.json"
MAX_SEAL = 1 << 28
HEAD = 1 << 16
"""The number of first bytes with a separate digest, because remote readers read them before the seal."""

_FORMAT = "ingot-seal-1"
_ALGORITHM = "sha256"
_MIN_CHUNK = 1 << 12
_MAX_CHUNK = 8 << 20
_RULE = "seal.digest-mismatch"


@dataclass(frozen=True, slots=True)
class Seal:
    """The size of a file when it was sealed, and the digests of the file, of its first bytes and of its chunks."""

    size: int
    digest: str
    head: str
    chunks: ChunkDigests
    content_id: str = ""

    def require_size(self, size: int, location: str) -> None:
        """Raise ``IntegrityError`` ``seal.size`` if the file has another size."""
        if size != self.size:
            raise IntegrityError(
                "seal.size",
                f"expected the file of {self.size} bytes that was sealed, found {size}; seal it again if it is right",
                where=location,
            )

    def check_head(self, head: bytes | memoryview, location: str) -> None:
        """Raise ``IntegrityError`` ``seal.digest-mismatch`` if the file's first bytes differ."""
        digest = checksums.digest(_ALGORITHM, head[:HEAD])
        checksums.check(self.head, digest, _RULE, location, subject="the first bytes")

    def check(self, index: int, data: memoryview, location: str) -> None:
        """Raise ``IntegrityError`` ``seal.digest-mismatch`` if a chunk differs."""
        self.chunks.check(index, data, _RULE, location)

    def damaged_chunks(self, source: ByteSource) -> list[int]:
        """Return the indices of chunks of a file that differ from the seal, or are missing."""
        damaged = []
        for index in range(-(-self.size // self.chunks.size)):
            check_cancelled()
            start, length = self.chunks.span(index)
            data = read_bytes(source, start, length) if start + length <= source.size else b""
            try:
                self.check(index, memoryview(data), "")
            except IntegrityError:
                damaged.append(index)
        return damaged

    def encoded(self) -> bytes:
        """Return the bytes of the seal's file: JSON."""
        fields = {
            "format": _FORMAT,
            "size": self.size,
            "digest": self.digest,
            "head": self.head,
            "chunk_size": self.chunks.size,
            "chunks": b64encode(self.chunks.digests).decode(),
        }
        if self.content_id:
            fields["content_id"] = self.content_id
        return (json.dumps(fields, indent=1) + "\n").encode()


def seal_of(source: ByteSource, content_id: str = "") -> Seal:
    """Return the seal of a file, reading it once."""
    hasher = ChunkedHasher(_ALGORITHM)
    for start in range(0, source.size, CHUNK):
        check_cancelled()
        hasher.update(read_bytes(source, start, min(CHUNK, source.size - start)))
    head = checksums.digest(_ALGORITHM, read_bytes(source, 0, min(HEAD, source.size)))
    chunks = ChunkDigests(_ALGORITHM, CHUNK, hasher.digests(), source.size)
    return Seal(source.size, hasher.text(), head, chunks, content_id)


def parse_seal(raw: bytes, location: str) -> Seal:
    """Parse a seal. Raises ``FormatError`` ``seal.json`` or ``seal.fields``."""
    fields = strict_json(raw, "seal.json", "seal.json", location)
    size = fields.get("size")
    chunk = fields.get("chunk_size")
    try:
        digests = b64decode(str(fields.get("chunks")), validate=True)
    except ValueError:
        digests = b"?"
    is_valid = (
        fields.get("format") == _FORMAT
        and isinstance(size, int)
        and 0 <= size < 1 << 62
        and isinstance(chunk, int)
        and _MIN_CHUNK <= chunk <= _MAX_CHUNK
        and chunk & (chunk - 1) == 0
        and len(digests) == 32 * -(-size // chunk)
        and all(
            checksums.algorithm_of(str(fields.get(key)), "seal.fields", location) == _ALGORITHM
            for key in ("digest", "head")
        )
    )
    if not is_valid:
        raise FormatError(
            "seal.fields",
            f"expected format {_FORMAT!r} with size, digest, head, chunk_size (a power of two) and chunks that fit",
            where=location,
        )
    assert isinstance(size, int)
    assert isinstance(chunk, int)
    chunks = ChunkDigests(_ALGORITHM, chunk, digests, size)
    return Seal(size, str(fields["digest"]), str(fields["head"]), chunks, str(fields.get("content_id", "")))
