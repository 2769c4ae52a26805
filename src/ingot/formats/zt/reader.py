"""Reader of ``.zt``: footer, manifest, and a catalog that builds tensors on access."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping

from ingot.core.numeric.dtypes import DTYPES
from ingot.core.parsing import manifest_digest
from ingot.core.runtime.memory import gc_paused
from ingot.errors import FormatError, UnsupportedError
from ingot.formats.base import Catalog
from ingot.formats.detect import TRUNCATED_HINT
from ingot.formats.shared.dense_columns import DenseTensors
from ingot.formats.shared.manifests import label, unknown_texts
from ingot.formats.zt.columns import Columns, decode
from ingot.formats.zt.manifest import (
    FOOTER,
    MAGIC,
    MAGIC_V0,
    MAGIC_V2,
    MAX_MANIFEST,
    VERSION,
    Component,
    Manifest,
    Object,
    parse,
    parse_foreign,
    with_attributes,
    with_footer,
)
from ingot.formats.zt.rules import check_blobs, check_object, check_objects, chunks_of, logical_dtype
from ingot.model.bytesource import ByteSource
from ingot.model.layouts.base import codec_of
from ingot.model.part import Part
from ingot.model.reading.lazy import LazyMap
from ingot.model.reading.ranges import HeaderSource, is_remote, read_bytes
from ingot.model.receipt import KEY
from ingot.model.tensor import Tensor

_TAIL = 1 << 16


def read_catalog(source: ByteSource, name: str = "", *, verify: bool = True) -> Catalog:
    """Return the catalog of a ``.zt`` file after complete checks of header, footer and manifest; reads no blob.

    Parameters
    ----------
    source : ByteSource
        The open file, which the catalog takes over unless an error is raised.
    name : str
        Name of the file in its store; by default the source's.
    verify : bool
        Whether parts check their digests when they are read completely.

    Raises
    ------
    FormatError
        A rule of ``spec/zt.md`` or ``spec/cbor.md``.
    UnsupportedError
        ``zt.container-v2``, ``zt.container-v0``, ``zt.version-major``.
    IntegrityError
        ``manifest.digest``.
    """
    head: ByteSource = source
    if is_remote(source):  # one request reads the end of the file, with the manifest of all but large files
        head = HeaderSource(source)
        head.expect([(0, len(MAGIC)), (source.size - _TAIL, _TAIL)])
    start, size = manifest_span(head)
    data = read_bytes(head, start, size)
    with gc_paused():
        manifest, columns, notes = _decode(data, source.name)
        if manifest.ingot_digest is not None and verify:
            manifest_digest.check_cbor(data, manifest.ingot_digest, source.name)
        objects, shared_parts = _check_objects(source.name, manifest, columns, start)
        notes += (
            [("zt.blob-shared", f"{shared_parts} parts share the bytes of other parts of the same length")]
            if shared_parts
            else []
        )
    attributes = dict(manifest.attributes or {})
    receipt = attributes.pop(KEY) if isinstance(attributes.get(KEY), str) else None
    return Catalog(
        tensors=tensors_of(source, objects, columns, verify=verify),
        metadata=attributes,
        headers={name or source.name: data},
        sources=(source,),
        notes=(*notes, *_notes(manifest, columns)),
        remarks=tuple(_remarks(manifest, columns)),
        manifest_digest=manifest.ingot_digest is not None,
        receipt=receipt,
    )


def _decode(data: bytes, file: str) -> tuple[Manifest, Columns | None, list[tuple[str, str]]]:
    """Return the manifest, its columns if it could be decoded into columns, and notes of its CBOR."""
    decoded = decode(data, file)
    return (*decoded, []) if decoded is not None else _parse_in_detail(data, file)


def _parse_in_detail(data: bytes, file: str) -> tuple[Manifest, None, list[tuple[str, str]]]:
    manifest, notes = parse_foreign(data, file)
    return manifest, None, notes


def _check_objects(
    file: str, manifest: Manifest, columns: Columns | None, end: int
) -> tuple[Mapping[str, Object], int]:
    """Check all tensors; return their objects by name, and the number of parts whose blob another part has too."""
    if columns is None:
        check_objects(file, manifest.objects)
        return manifest.objects, check_blobs(file, manifest.objects, end)
    objects = columns.objects()
    for name in columns.suspects():
        check_object(file, name, objects[name])
    return objects, check_blobs(file, objects, end, (columns.parts.offsets, columns.parts.lengths))


def with_receipt(source: ByteSource, text: str) -> tuple[int, bytes]:
    """Return the offset of the manifest, and the bytes from there on: the manifest with this receipt, and the footer.

    Raises the errors of ``read_catalog``; ``UnsupportedError`` ``zt.manifest-too-large``.
    """
    start, size = manifest_span(source)
    data = read_bytes(source, start, size)
    digest = parse(data, source.name).ingot_digest
    if digest is not None:
        manifest_digest.check_cbor(data, digest, source.name)
    return start, with_footer(with_attributes(data, {KEY: text}, digest))


def manifest_span(source: ByteSource) -> tuple[int, int]:
    """Return the offset and the length of the manifest, after checks of both magics and the declared size."""

    def refuse(rule: str, message: str) -> FormatError:
        return FormatError(rule, message, where=source.name)

    head = read_bytes(source, 0, min(len(MAGIC), source.size))
    if head == MAGIC_V2:
        raise UnsupportedError(
            "this is zTensor container version 2, which format zt2 reads; expected version 1 (magic ZTEN1000)",
            rule="zt.container-v2",
            where=source.name,
        )
    if head == MAGIC_V0:
        raise UnsupportedError(
            "this is zTensor 0.1 (magic ZTEN0001), expected ZTEN1000; rewrite it with ztensor 1.2",
            rule="zt.container-v0",
            where=source.name,
        )
    if head != MAGIC:
        raise refuse("zt.header-magic", f"expected the file to begin with {MAGIC!r}, found {head!r}")
    if source.size < len(MAGIC) + 1 + FOOTER:
        raise refuse(
            "zt.truncated", f"expected at least {len(MAGIC) + 1 + FOOTER} bytes, found {source.size}; {TRUNCATED_HINT}"
        )
    size, magic = struct.unpack("<Q8s", read_bytes(source, source.size - FOOTER, FOOTER))
    if magic != MAGIC:
        raise refuse("zt.footer-magic", f"expected the file to end with {MAGIC!r}, found {magic!r}; {TRUNCATED_HINT}")
    if size > MAX_MANIFEST:
        raise refuse("zt.manifest-too-large", f"expected a manifest of at most {MAX_MANIFEST} bytes, found {size}")
    if size > source.size - FOOTER - len(MAGIC):
        raise refuse("zt.manifest-out-of-bounds", f"expected a manifest inside the file, found a size of {size} bytes")
    return source.size - FOOTER - size, size


def tensors_of(
    source: ByteSource, objects: Mapping[str, Object], columns: Columns | None, *, verify: bool
) -> LazyMap[Tensor]:
    """Return the tensors of the manifest, in file order."""
    simple = None if columns is None else DenseTensors(columns.dense(), source, verify=verify)

    def build_tensor(name: str) -> Tensor:
        obj = objects[name]
        parts = {role: part(name, role, component) for role, component in obj.components.items()}
        types = {role: (part.dtype, part.type) for role, part in parts.items()}
        attributes = obj.attributes or {}
        codec = codec_of(obj.format)
        return Tensor(name, obj.shape, logical_dtype(codec, attributes, types), codec, parts, attributes)

    def part(name: str, role: str, component: Component) -> Part:
        location = label(source.name, name, role)
        chunks = component.ingot_chunks
        return Part(
            dtype=component.dtype,
            length=component.length,
            source=source,
            offset=component.offset,
            type=component.type if component.type != component.dtype else None,
            encoding=component.encoding,
            uncompressed_length=None if component.encoding == "raw" else component.uncompressed_length,
            digest=component.digest,
            chunks=None if chunks is None else chunks_of(component, location),
            where=location,
            verify=verify,
        )

    return LazyMap(objects, build_tensor) if simple is None else simple.lazy(objects, build_tensor)


_DEFINED = ("raw", "zstd")


def _notes(manifest: Manifest, columns: Columns | None) -> Iterator[tuple[str, str]]:
    """Yield a note (rule and message) on each encoding of parts that the zTensor document does not define."""
    if columns is not None:
        unknown = unknown_texts(columns.parts.encoding, _DEFINED)
    else:
        unknown = _unknown((part.encoding for part in _parts(manifest)), _DEFINED)
    for text, count in unknown:
        yield "zt.encoding-unknown", f"{count} parts have an encoding that zTensor 1.2 does not define: {text[:80]!r}"


def _remarks(manifest: Manifest, columns: Columns | None) -> Iterator[tuple[str, str]]:
    """Yield remarks (rule and message) on another minor version, and on unknown logical types."""
    if manifest.version.split(".")[:2] != VERSION.split(".")[:2]:
        yield "zt.version-minor", f"written to zTensor {manifest.version}, read as {VERSION}"
    if columns is not None:
        unknown = unknown_texts(columns.parts.type, {*DTYPES, ""})
    else:
        unknown = _unknown((part.type for part in _parts(manifest) if part.type), DTYPES)
    for text, count in unknown:
        yield "zt.type-unknown", f"{count} parts have an unknown logical type: {text[:80]!r}"


def _parts(manifest: Manifest) -> Iterator[Component]:
    return (part for obj in manifest.objects.values() for part in obj.components.values())


def _unknown(texts: Iterable[str], supported: Container[str]) -> Iterator[tuple[str, int]]:
    """Yield the texts that are not in ``supported``, and how often each occurs."""
    return ((text, count) for text, count in Counter(texts).items() if text not in supported)
