"""Seals: digests of a file's chunks in a small file beside it, for containers that have none of their own.

``X.ingot.json`` beside the file ``X``; definition: ``spec/remote.md``, "Seals".
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from dataclasses import dataclass

from ingot.core.bytes import checksums
from ingot.core.bytes.chunk_digests import CHUNK, ChunkDigests, ChunkedHasher
from ingot.core.parsing.strictjson import strict_json
from ingot.core.runtime.parallel import go_on
from ingot.errors import FormatError, IntegrityError
from ingot.model.bytesource import ByteSource
from ingot.model.reading.ranges import read_bytes

SUFFIX = ".ingot.json"
MAX_SEAL = 1 << 28
HEAD = 1 << 16
"""Bytes at the beginning of a file that have a digest of their own: a reader from afar has them before its seal."""

_FORMAT = "ingot-seal-1"
_ALGORITHM = "sha256"
_LEAST = 1 << 12
_MOST = 8 << 20
_RULE = "seal.digest-mismatch"


@dataclass(frozen=True, slots=True)
class Seal:
    """What a file was when it was sealed: its bytes, the digests of its chunks, of its head, and of all of it."""

    size: int
    digest: str
    head: str
    chunks: ChunkDigests
    content_id: str = ""

    def require_size(self, size: int, where: str) -> None:
        """Refuse a file of another size; ``IntegrityError`` ``seal.size``."""
        if size != self.size:
            raise IntegrityError(
                "seal.size",
                f"expected the file of {self.size} bytes that was sealed, found {size}; seal it again if it is right",
                where=where,
            )

    def check_head(self, head: bytes | memoryview, where: str) -> None:
        """Compare a file's first bytes; ``IntegrityError`` ``seal.digest-mismatch``."""
        found = checksums.digest(_ALGORITHM, head[:HEAD])
        checksums.check(self.head, found, _RULE, where, subject="the first bytes")

    def check(self, index: int, data: memoryview, where: str) -> None:
        """Compare a chunk; ``IntegrityError`` ``seal.digest-mismatch``."""
        self.chunks.check(index, data, _RULE, where)

    def bad(self, source: ByteSource) -> list[int]:
        """Return the chunks that are not in a file as they were; those behind its end are not."""
        found = []
        for index in range(-(-self.size // self.chunks.size)):
            go_on()
            start, length = self.chunks.span(index)
            data = read_bytes(source, start, length) if start + length <= source.size else b""
            try:
                self.check(index, memoryview(data), "")
            except IntegrityError:
                found.append(index)
        return found

    def encoded(self) -> bytes:
        """Return the seal as it lies beside its file."""
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
    """Return the seal of a file; reads all of it once."""
    hasher = ChunkedHasher(_ALGORITHM)
    for start in range(0, source.size, CHUNK):
        go_on()
        hasher.update(read_bytes(source, start, min(CHUNK, source.size - start)))
    head = checksums.digest(_ALGORITHM, read_bytes(source, 0, min(HEAD, source.size)))
    chunks = ChunkDigests(_ALGORITHM, CHUNK, hasher.digests(), source.size)
    return Seal(source.size, hasher.text(), head, chunks, content_id)


def parse_seal(raw: bytes, where: str) -> Seal:
    """Return what a seal says; ``FormatError`` ``seal.json``, ``seal.fields``."""
    stated = strict_json(raw, "seal.json", "seal.json", where)
    size = stated.get("size")
    chunk = stated.get("chunk_size")
    try:
        digests = b64decode(str(stated.get("chunks")), validate=True)
    except ValueError:
        digests = b"?"
    sound = (
        stated.get("format") == _FORMAT
        and isinstance(size, int)
        and 0 <= size < 1 << 62
        and isinstance(chunk, int)
        and _LEAST <= chunk <= _MOST
        and chunk & (chunk - 1) == 0
        and len(digests) == 32 * -(-size // chunk)
        and all(
            checksums.algorithm_of(str(stated.get(key)), "seal.fields", where) == _ALGORITHM
            for key in ("digest", "head")
        )
    )
    if not sound:
        raise FormatError(
            "seal.fields",
            f"expected format {_FORMAT!r} with size, digest, head, chunk_size (a power of two) and chunks that fit",
            where=where,
        )
    assert isinstance(size, int)
    assert isinstance(chunk, int)
    chunks = ChunkDigests(_ALGORITHM, chunk, digests, size)
    return Seal(size, str(stated["digest"]), str(stated["head"]), chunks, str(stated.get("content_id", "")))
