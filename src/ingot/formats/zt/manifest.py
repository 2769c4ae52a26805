"""The manifest (zTensor 1.2 section 1): its typed schema, and its encoding in CBOR.

Unknown fields are ignored, as the version policy requires. An optional field with the value null counts as absent.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec

from ingot.core.bytes.chunk_digests import DeclaredChunks, declare_chunks
from ingot.core.parsing import cbor, manifest_digest
from ingot.core.parsing.strictjson import preload
from ingot.errors import FormatError, UnsupportedError
from ingot.formats.shared.manifests import Schema
from ingot.formats.zt import foreign_cbor
from ingot.model.bytesource import Buffer
from ingot.model.layouts.base import file_id
from ingot.model.spec import TensorSpec

MAGIC = b"ZTEN1000"
# Magic of older and newer containers with the same suffix: version 0.1, and container version 2.
MAGIC_V0 = b"ZTEN0001"
MAGIC_V2 = b"\x89ZT2\r\n\x1a\n"

VERSION = "1.2.0"
ALIGNMENT = 64
FOOTER = 16
MAX_MANIFEST = 1 << 30


def align(offset: int) -> int:
    """Return the first multiple of 64 at or after ``offset``."""
    return (offset + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def assign_offsets(tail: int, lengths: Sequence[int]) -> tuple[list[int], int]:
    """Return the offsets of blobs of these lengths, placed in sequence from ``tail`` on, and the new tail."""
    offsets = []
    for length in lengths:
        offset = align(tail)
        offsets.append(offset)
        tail = offset + length
    return offsets, tail


Unsigned = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_MAP = 5 << 5  # CBOR's major type, in a head's first byte
_VERSION = re.compile(r"([0-9]{1,9})(?:\.[0-9]{1,9}){0,2}(?:[-+][0-9A-Za-z.+-]{1,64})?")


@preload
class Component(msgspec.Struct, frozen=True, gc=False):
    """The manifest's entry for a part. ``length`` counts stored bytes; lengths and offsets fit 63 bits, like file
    offsets.

    ``ingot_chunks`` is an extension of Ingot: the digests of chunks of the stored bytes (``core.bytes.chunk_digests``).
    """

    dtype: str
    offset: Unsigned
    length: Unsigned
    type: str | None = None
    uncompressed_length: Unsigned | None = None
    encoding: str = "raw"
    digest: str | None = None
    ingot_chunks: DeclaredChunks | None = None

    @property
    def nbytes(self) -> int:
        """The number of bytes after decoding."""
        return self.length if self.encoding == "raw" else self.uncompressed_length or 0


@preload
class Object(msgspec.Struct, frozen=True, gc=False):
    """The manifest's entry for a tensor; ``format`` is the id of its codec."""

    shape: tuple[Unsigned, ...]
    format: str
    components: dict[str, Component]
    attributes: dict[str, Any] | None = None


@preload
class Manifest(msgspec.Struct, frozen=True, gc=False):
    """The root map of a decoded manifest.

    ``ingot_digest`` is an extension of Ingot: the digest of the manifest (``core.parsing.manifest_digest``).
    """

    version: str
    objects: dict[str, Object]
    attributes: dict[str, Any] | None = None
    ingot_digest: str | None = None


_SCHEMA = Schema(Object, "components", Component, "zt.field-missing", "zt.field-type", "zt.field-range")


def parse(data: bytes | bytearray | memoryview, file: str, *, max_items: int = cbor.MAX_ITEMS) -> Manifest:
    """Return a decoded and type-checked manifest.

    Raises
    ------
    FormatError
        ``cbor.*``, ``zt.version-syntax``, ``zt.field-missing``, ``zt.field-type``, ``zt.field-range``.
    UnsupportedError
        ``zt.version-major``.
    """
    return parse_foreign(data, file, max_items=max_items)[0]


def parse_foreign(
    data: bytes | bytearray | memoryview, file: str, *, max_items: int = cbor.MAX_ITEMS
) -> tuple[Manifest, list[tuple[str, str]]]:
    """Return the manifest like ``parse``, and notes on CBOR features that Ingot does not write (``foreign_cbor``)."""
    location = f"{file}: manifest"
    notes = list[tuple[str, str]]()
    try:
        root = cbor.loads(data, location=location, max_items=max_items)
    except FormatError as error:
        if error.rule not in foreign_cbor.RULES:
            raise
        rewritten, notes = foreign_cbor.rewrite(data, location)
        root = cbor.loads(rewritten, location=f"{location} in definite lengths", max_items=max_items)
    return _check(root, file), notes


def _check(root: Any, file: str) -> Manifest:
    _check_version(root, file)
    try:
        return msgspec.convert(root, Manifest)
    except msgspec.ValidationError as error:
        raise _SCHEMA.blame(root, error, file) from None


def _check_version(root: Any, file: str) -> None:
    """Raise an error if the major version is not supported.

    This precedes the check of the schema, because another major version may have any schema.
    """
    version = root.get("version", VERSION) if isinstance(root, dict) else VERSION
    if not isinstance(version, str):
        return
    match = _VERSION.fullmatch(version)
    if match is None:
        raise FormatError(
            "zt.version-syntax", f"expected a version such as {VERSION!r}, found {version[:80]!r}", where=file
        )
    if int(match[1]) != 1:
        raise UnsupportedError(
            f"expected zTensor version 1, found {version[:80]}; a newer Ingot may read it",
            rule="zt.version-major",
            where=file,
        )


class Blob(NamedTuple):
    """The offset of a part, its number of stored bytes, its digest, and the digests of its chunks."""

    offset: int
    length: int
    digest: str | None = None
    chunks: bytes | None = None


def describe(spec: TensorSpec, attributes: Mapping[str, Any], blobs: Iterable[Blob]) -> dict[str, Any]:
    """Return the manifest's entry for a tensor whose parts are stored at ``blobs``."""
    components = {}
    for part, (offset, length, digest, chunks) in zip(spec.parts, blobs, strict=True):
        component: dict[str, Any] = {"dtype": part.dtype}
        if part.type is not None and part.type != part.dtype:
            component["type"] = part.type
        component["offset"] = offset
        component["length"] = length
        if part.encoding != "raw":
            component["uncompressed_length"] = part.uncompressed_length
            component["encoding"] = part.encoding
        if digest is not None:
            component["digest"] = digest
        if chunks is not None:
            component["ingot_chunks"] = msgspec.structs.asdict(declare_chunks(chunks))
        components[part.role] = component
    entry: dict[str, Any] = {"shape": list(spec.shape), "format": file_id(spec.codec)}
    if attributes:
        entry["attributes"] = attributes
    entry["components"] = components
    return entry


class Entries:
    """The encoded entries of a manifest, appended one after the other; objects would take ten times the memory."""

    def __init__(self) -> None:
        self.count = 0
        self.data = bytearray()

    def add(self, name: str, entry: Mapping[str, Any]) -> None:
        """Append the entry of a tensor; each name may occur once. Raises the errors of ``cbor.dumps``."""
        self.data += _pairs({name: entry})
        self.count += 1


def entry_size(entry: Mapping[str, Any]) -> int:
    """Return the number of bytes that encode a tensor's entry, without the tensor's name."""
    return len(_pairs({"": entry})) - 1


def _pairs(entries: Mapping[str, Any]) -> bytes:
    """Return the encoded pairs of a small map.

    The nesting depth is checked as if the pairs were in the root map.
    """
    return cbor.dumps([entries])[2:]


def frame(count: int, metadata: Mapping[str, Any], digest: str | None) -> tuple[bytes, bytes]:
    """Return the bytes of an encoded manifest before its ``count`` entries, and the bytes after them.

    If a digest is requested, the bytes contain a placeholder for it.
    """
    root: dict[str, Any] = {"version": VERSION}
    if metadata:
        root["attributes"] = metadata
    ending = b"" if digest is None else cbor.dumps({manifest_digest.KEY: manifest_digest.stand_in(digest)})[1:]
    head = bytearray(cbor.dumps({**root, "objects": count}))
    head[0] += digest is not None
    head[-len(cbor.dumps(count))] |= _MAP  # the head of a map differs from its count only in the major type
    return bytes(head), ending


def build(entries: Entries, metadata: Mapping[str, Any], digest: str | None) -> list[Buffer]:
    """Return the CBOR of a manifest with these entries; ``digest`` is the algorithm of the digest of the manifest.

    The CBOR comes in segments, one of which is the buffer of the entries. The same entries in the same order give the
    same bytes.
    """
    before, after = frame(entries.count, metadata, digest)
    if digest is None:
        return [before, entries.data]
    return [before, entries.data, manifest_digest.fill_cbor(after, digest, before=(before, entries.data))]


def with_attributes(data: bytes, added: Mapping[str, Any], digest: str | None) -> bytes:
    """Return a manifest with additional attributes; if it had a digest of algorithm ``digest``, with a new digest."""
    root = cbor.loads(data)
    version = root.pop("version")
    attributes = root.pop("attributes", None) or {}
    root.pop(manifest_digest.KEY, None)
    root = {"version": version, "attributes": {**attributes, **added}, **root}
    if digest is None:
        return cbor.dumps(root)
    algorithm = digest.partition(":")[0]
    root[manifest_digest.KEY] = manifest_digest.stand_in(algorithm)
    return manifest_digest.fill_cbor(cbor.dumps(root), algorithm)


def with_footer(manifest: bytes) -> bytes:
    """Return a manifest followed by the footer; raises the errors of ``footer``."""
    return manifest + footer(len(manifest))


def footer(size: int) -> bytes:
    """Return the footer of a manifest of ``size`` bytes; raises ``UnsupportedError`` ``zt.manifest-too-large``."""
    if size > MAX_MANIFEST:
        raise UnsupportedError(
            f"expected a manifest of at most {MAX_MANIFEST} bytes, found {size}", rule="zt.manifest-too-large"
        )
    return struct.pack("<Q", size) + MAGIC
