"""Reader of containers of version 2: footer, manifest, shards, and tensors that are built on access."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Mapping

from ingot.core.bytes import checksums
from ingot.core.bytes.encodings import ENCODED
from ingot.core.runtime.memory import gc_paused
from ingot.errors import FormatError, IntegrityError, UnsupportedError
from ingot.formats.base import Catalog
from ingot.formats.detect import TRUNCATED_HINT
from ingot.formats.shared.dense_columns import DenseTensors
from ingot.formats.shared.manifests import label, unknown_texts
from ingot.formats.zt.rules import logical_dtype
from ingot.formats.zt2.columns import Objects, decode
from ingot.formats.zt2.layout import ALIGNMENT, FOOTER, MAGIC, MAX_MANIFEST, MIN_SIZE, VERSION, Footer
from ingot.formats.zt2.manifest import Blob, Manifest, Object, optional_value
from ingot.formats.zt2.profiles import stored_form
from ingot.formats.zt2.rules import check_manifest
from ingot.formats.zt2.types import LOGICAL_TYPES, types_from_file
from ingot.model.bytesource import ByteSource
from ingot.model.part import Part
from ingot.model.reading.lazy import LazyMap
from ingot.model.reading.ranges import read_bytes
from ingot.model.tensor import Tensor

Sources = Mapping[str | None, ByteSource]
"""The open files by the shard names that parts refer to; None for the file of the manifest."""


def read_footer(source: ByteSource) -> Footer:
    """Return the checked footer of a file, after a check of its magics.

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

    if source.size < MIN_SIZE:
        raise refuse("zt2.truncated", f"expected at least {MIN_SIZE} bytes, found {source.size}; {TRUNCATED_HINT}")
    head = read_bytes(source, 0, len(MAGIC))
    if head != MAGIC:
        raise refuse("zt2.header-magic", f"expected the file to begin with {MAGIC!r}, found {head!r}")
    footer = Footer.unpack(read_bytes(source, source.size - FOOTER, FOOTER))
    if footer.magic != MAGIC:
        raise refuse(
            "zt2.footer-magic", f"expected the file to end with {MAGIC!r}, found {footer.magic!r}; {TRUNCATED_HINT}"
        )
    if footer.version != VERSION:
        raise UnsupportedError(
            f"expected container version {VERSION}, found {footer.version}; a newer Ingot may read it",
            rule="zt2.version",
            where=source.name,
        )
    if not footer.length and (footer.offset or footer.checksum):
        raise refuse(
            "zt2.manifest-bounds", f"expected zeros in a file without a manifest, found offset {footer.offset}"
        )
    if footer.length > MAX_MANIFEST:
        raise refuse("zt2.manifest-too-large", f"expected at most {MAX_MANIFEST} bytes, found {footer.length}")
    if footer.length and (footer.offset % ALIGNMENT or not footer.offset):
        raise refuse("zt2.blob-alignment", f"expected the manifest at a multiple of {ALIGNMENT}, found {footer.offset}")
    if footer.offset + footer.length > source.size - FOOTER:
        raise refuse("zt2.manifest-bounds", f"expected the manifest before the footer, found it at {footer.offset}")
    return footer


def read_manifest(source: ByteSource) -> tuple[bytes, Manifest]:
    """Return the bytes of a file's manifest, and the completely checked manifest; reads no blob.

    Raises
    ------
    FormatError
        A rule of ``spec/zt2.md`` or ``spec/cbor.md``.
    UnsupportedError
        ``zt2.version``; ``zt2.data-shard``: the file contains blobs of another file and no manifest.
    IntegrityError
        ``zt2.manifest-checksum``.
    """
    footer = read_footer(source)
    if not footer.length:
        raise UnsupportedError(
            "this is a data shard: it contains bytes of tensors that another file describes; open that file",
            rule="zt2.data-shard",
            where=source.name,
        )
    data = read_bytes(source, footer.offset, footer.length)
    checksum = checksums.xxh3(data)
    if checksum != footer.checksum:
        raise IntegrityError(
            "zt2.manifest-checksum",
            f"the manifest does not match its checksum: expected {footer.checksum:016x}, found {checksum:016x}; the "
            "file "
            "is damaged",
            where=source.name,
        )
    with gc_paused():
        manifest = decode(data, source.name)
        check_manifest(source.name, manifest, source.size, (footer.offset, footer.length))
    return data, manifest


def catalog_of(manifest: Manifest, headers: Mapping[str, bytes], sources: Sources, *, verify: bool) -> Catalog:
    """Return the catalog of a checked manifest; ``verify`` makes parts compare their digests when read completely."""
    return Catalog(
        tensors=tensors_of(manifest.objects, sources, verify=verify),
        metadata=optional_value(manifest.attributes) or {},
        headers=headers,
        sources=tuple(dict.fromkeys(sources.values())),
        notes=tuple(_notes(manifest)),
        remarks=tuple(_remarks(manifest)),
        manifest_digest=True,
    )


def tensors_of(objects: Mapping[str, Object], sources: Sources, *, verify: bool) -> LazyMap[Tensor]:
    """Return the tensors of the manifest, in file order."""
    simple = None
    if isinstance(objects, Objects):
        simple = DenseTensors(objects.columns.dense(), sources[None], verify=verify, digest_of_decoded=True)

    def build_tensor(name: str) -> Tensor:
        obj = objects[name]
        tensor_form = stored_form(obj)
        parts = {}
        for stored, blob in obj.parts.items():
            role = tensor_form.roles.get(stored, stored)
            parts[role] = part(name, stored, blob, tensor_form.types.get(role))
        stored_parts = {stored: parts[tensor_form.roles.get(stored, stored)] for stored in obj.parts}
        parts |= {
            role: conversion.part(stored_parts[conversion.stored]) for role, conversion in tensor_form.converted.items()
        }
        types = {role: (part.dtype, part.type) for role, part in parts.items()}
        return Tensor(
            name,
            obj.shape,
            logical_dtype(tensor_form.codec, tensor_form.attributes, types),
            tensor_form.codec,
            parts,
            tensor_form.attributes,
        )

    def part(name: str, role: str, blob: Blob, types: tuple[str, str | None] | None) -> Part:
        source = sources[optional_value(blob.shard)]
        dtype, type_ = types or types_from_file(blob.dtype, optional_value(blob.type))
        return Part(
            dtype=dtype,
            length=blob.blob[1],
            source=source,
            offset=blob.blob[0],
            type=type_,
            encoding=optional_value(blob.encoding) or "raw",
            uncompressed_length=optional_value(blob.decoded_length),
            digest=optional_value(blob.digest),
            digest_of_decoded=True,
            where=label(source.name, name, role),
            verify=verify,
        )

    return LazyMap(objects, build_tensor) if simple is None else simple.lazy(objects, build_tensor)


def _notes(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Yield notes on parts that cannot be decoded."""
    for text, count in _unknown(manifest, "encoding", ENCODED):
        yield "zt2.encoding-unknown", f"{count} parts have an unknown encoding: {text[:80]!r}"


def _remarks(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Yield a remark for each unknown logical type in the manifest, with the number of parts that have it."""
    for text, count in _unknown(manifest, "type", LOGICAL_TYPES):
        yield "zt2.type-unknown", f"{count} parts have an unknown logical type: {text[:80]!r}"


def _unknown(manifest: Manifest, field: str, supported: Container[str]) -> Iterator[tuple[str, int]]:
    """Yield the values of a field of parts that are not in ``supported``, each with the number of parts."""
    objects = manifest.objects
    if isinstance(objects, Objects):
        yield from unknown_texts(getattr(objects.columns.parts, field), supported)
        return
    parts = (part for obj in objects.values() for part in obj.parts.values())
    for text, count in Counter(optional_value(getattr(part, field)) for part in parts).items():
        if text is not None and text not in supported:
            yield text, count
