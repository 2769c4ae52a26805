"""Reading containers of version 2: footer, manifest, shards, and tensors that are made when they are asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Mapping

from ingot.core.bytes import checksums
from ingot.core.bytes.encodings import ENCODED
from ingot.core.runtime.gcpause import gc_paused
from ingot.errors import FormatError, IntegrityError, UnsupportedError
from ingot.formats.base import Catalog
from ingot.formats.shared.dense_columns import DenseTensors
from ingot.formats.shared.foreign import CUT_OFF
from ingot.formats.shared.manifests import kinds, label
from ingot.formats.zt.rules import logical_dtype
from ingot.formats.zt2.columns import Objects, decode
from ingot.formats.zt2.layout import ALIGNMENT, FOOTER, LEAST, MAGIC, MAX_MANIFEST, VERSION, Footer
from ingot.formats.zt2.manifest import Blob, Manifest, Object, stated
from ingot.formats.zt2.profiles import meaning
from ingot.formats.zt2.rules import check_manifest
from ingot.formats.zt2.types import KNOWN, types_here
from ingot.model.bytesource import ByteSource
from ingot.model.part import Part
from ingot.model.reading.lazy import Lazy
from ingot.model.reading.ranges import read_bytes
from ingot.model.tensor import Tensor

Sources = Mapping[str | None, ByteSource]
"""The open files by the names that parts give them; None for the file of the manifest."""


def read_footer(source: ByteSource) -> Footer:
    """Read and check what frames a file, and where its manifest lies.

    Raises
    ------
    FormatError
        ``zt2.truncated``, ``zt2.header-magic``, ``zt2.footer-magic``, ``zt2.manifest-bounds``,
        ``zt2.manifest-too-large``, ``zt2.blob-alignment``.
    UnsupportedError
        ``zt2.version``.
    """

    def refuse(rule: str, message: str) -> FormatError:
        return FormatError(rule, message, where=source.name)

    if source.size < LEAST:
        raise refuse("zt2.truncated", f"expected at least {LEAST} bytes, found {source.size}; {CUT_OFF}")
    head = read_bytes(source, 0, len(MAGIC))
    if head != MAGIC:
        raise refuse("zt2.header-magic", f"expected the file to begin with {MAGIC!r}, found {head!r}")
    footer = Footer.unpack(read_bytes(source, source.size - FOOTER, FOOTER))
    if footer.magic != MAGIC:
        raise refuse("zt2.footer-magic", f"expected the file to end with {MAGIC!r}, found {footer.magic!r}; {CUT_OFF}")
    if footer.version != VERSION:
        raise UnsupportedError(
            f"expected container version {VERSION}, found {footer.version}; a newer Ingot may read it",
            rule="zt2.version",
            where=source.name,
        )
    if not footer.length and (footer.offset or footer.checksum):
        raise refuse("zt2.manifest-bounds", f"expected zeros where there is no manifest, found offset {footer.offset}")
    if footer.length > MAX_MANIFEST:
        raise refuse("zt2.manifest-too-large", f"expected at most {MAX_MANIFEST} bytes, found {footer.length}")
    if footer.length and (footer.offset % ALIGNMENT or not footer.offset):
        raise refuse("zt2.blob-alignment", f"expected the manifest at a multiple of {ALIGNMENT}, found {footer.offset}")
    if footer.offset + footer.length > source.size - FOOTER:
        raise refuse("zt2.manifest-bounds", f"expected the manifest before the footer, found it at {footer.offset}")
    return footer


def read_manifest(source: ByteSource) -> tuple[bytes, Manifest]:
    """Read a file's manifest and check all that it says; touch no blob.

    Raises
    ------
    FormatError
        A rule of ``spec/zt2.md`` or ``spec/cbor.md``.
    UnsupportedError
        ``zt2.version``; ``zt2.data-shard``: the file holds blobs of another one, and no manifest.
    IntegrityError
        ``zt2.manifest-checksum``.
    """
    footer = read_footer(source)
    if not footer.length:
        raise UnsupportedError(
            "this is a data shard: it holds bytes of tensors that another file describes; open that file",
            rule="zt2.data-shard",
            where=source.name,
        )
    data = read_bytes(source, footer.offset, footer.length)
    found = checksums.xxh3(data)
    if found != footer.checksum:
        raise IntegrityError(
            "zt2.manifest-checksum",
            f"the manifest does not match its checksum: expected {footer.checksum:016x}, found {found:016x}; the file "
            "is damaged",
            where=source.name,
        )
    with gc_paused():
        manifest = decode(data, source.name)
        check_manifest(source.name, manifest, source.size, (footer.offset, footer.length))
    return data, manifest


def catalog_of(manifest: Manifest, headers: Mapping[str, bytes], sources: Sources, *, verify: bool) -> Catalog:
    """Return the catalog of a checked manifest; ``verify``: whether parts compare their digests when read whole."""
    return Catalog(
        tensors=tensors_of(manifest.objects, sources, verify=verify),
        metadata=stated(manifest.attributes) or {},
        headers=headers,
        sources=tuple(dict.fromkeys(sources.values())),
        notes=tuple(_notes(manifest)),
        remarks=tuple(_remarks(manifest)),
        manifest_digest=True,
    )


def tensors_of(objects: Mapping[str, Object], sources: Sources, *, verify: bool) -> Lazy[Tensor]:
    """Return the manifest's tensors, in file order."""
    simple = None
    if isinstance(objects, Objects):
        simple = DenseTensors(objects.columns.dense(), sources[None], verify=verify, digest_of_decoded=True)

    def closely(name: str) -> Tensor:
        obj = objects[name]
        found = meaning(obj)
        parts = {}
        for stored, blob in obj.parts.items():
            role = found.roles.get(stored, stored)
            parts[role] = part(name, stored, blob, found.types.get(role))
        stored_parts = {stored: parts[found.roles.get(stored, stored)] for stored in obj.parts}
        parts |= {role: made.part(stored_parts[made.stored]) for role, made in found.made.items()}
        types = {role: (part.dtype, part.type) for role, part in parts.items()}
        return Tensor(
            name, obj.shape, logical_dtype(found.codec, found.attributes, types), found.codec, parts, found.attributes
        )

    def part(name: str, role: str, blob: Blob, types: tuple[str, str | None] | None) -> Part:
        source = sources[stated(blob.shard)]
        dtype, kind = types or types_here(blob.dtype, stated(blob.type))
        return Part(
            dtype=dtype,
            length=blob.blob[1],
            source=source,
            offset=blob.blob[0],
            type=kind,
            encoding=stated(blob.encoding) or "raw",
            uncompressed_length=stated(blob.decoded_length),
            digest=stated(blob.digest),
            digest_of_decoded=True,
            where=label(source.name, name, role),
            verify=verify,
        )

    return Lazy(objects, closely) if simple is None else simple.lazy(objects, closely)


def _notes(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """What is read although nobody here can decode it."""
    for kind, count in _unknown(manifest, "encoding", ENCODED):
        yield "zt2.encoding-unknown", f"{count} parts have an encoding that is not known here: {kind[:80]!r}"


def _remarks(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """What the document allows and is worth telling."""
    for kind, count in _unknown(manifest, "type", KNOWN):
        yield "zt2.type-unknown", f"{count} parts have a logical type that is not known here: {kind[:80]!r}"


def _unknown(manifest: Manifest, field: str, known: Container[str]) -> Iterator[tuple[str, int]]:
    """Yield what parts say in a field that is not known, and how often."""
    objects = manifest.objects
    if isinstance(objects, Objects):
        yield from kinds(getattr(objects.columns.parts, field), known)
        return
    parts = (part for obj in objects.values() for part in obj.parts.values())
    for kind, count in Counter(stated(getattr(part, field)) for part in parts).items():
        if kind is not None and kind not in known:
            yield kind, count
