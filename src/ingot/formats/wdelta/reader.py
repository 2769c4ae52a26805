"""Reader of ``.wdelta``: header and heads of records are checked completely; arrays are located but not read."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from ingot.core.numeric.dtypes import dtype
from ingot.errors import FormatError, UnsupportedError
from ingot.formats.base import Catalog
from ingot.formats.shared.headers import header_of, headers_of
from ingot.formats.wdelta.digest import check_digest
from ingot.formats.wdelta.header import Header, parse
from ingot.formats.wdelta.layout import (
    DIGEST,
    FIELDS,
    MAGIC,
    MAX_HEADER,
    PREFIX,
    SPELLING,
    STRATEGIES,
    VERSIONS,
    Span,
    unpack_prefix,
)
from ingot.formats.wdelta.stored_types import ConvertedSource, dtype_of
from ingot.formats.wdelta.walk import Spans, walk
from ingot.model.bytesource import ByteSource
from ingot.model.part import Part
from ingot.model.reading.lazy import Lazy
from ingot.model.reading.ranges import HeaderSource, read_bytes, read_joined
from ingot.model.tensor import Tensor

_SPARSE = STRATEGIES["sparse"]


def read_catalog(source: ByteSource, name: str) -> Catalog:
    """Return the catalog of a file after all checks except its digest, which ``Catalog.check_whole`` verifies.

    Tensors have the order of their records, in which a writer of version 1 hashed the base.

    Raises ``FormatError`` and ``UnsupportedError`` with the rules of spec/wdelta.md.
    """
    near = HeaderSource(source)
    version, raw = _read_header(near, name)
    header = parse(raw, version, name)
    spans = walk(near, PREFIX + len(raw), source.size - DIGEST, header, name)
    return Catalog(
        _tensors(source, header, spans, name),
        metadata=header.metadata(),
        headers=headers_of({name: header_of(raw, source, PREFIX)}),
        sources=(source,),
        notes=_notes(header),
        check_whole=partial(check_digest, source),
    )


def _read_header(source: HeaderSource, name: str) -> tuple[int, bytearray]:
    head = read_bytes(source, 0, min(PREFIX, source.size))
    if head[: len(MAGIC)] != MAGIC[: len(head)]:
        raise FormatError("wdelta.magic", f"expected {MAGIC!r}, found {head[:7]!r}", where=name)
    if source.size < PREFIX + DIGEST:
        raise FormatError(
            "wdelta.truncated", f"expected at least {PREFIX + DIGEST} bytes, found {source.size}", where=name
        )
    _, version, length = unpack_prefix(head)
    if version not in VERSIONS:
        raise UnsupportedError(f"expected version 1 or 2, found {version}", rule="wdelta.version", where=name)
    if length > source.size - PREFIX - DIGEST:
        raise FormatError(
            "wdelta.header-length",
            f"expected a header of at most {source.size - PREFIX - DIGEST} bytes, found {length}: cut off, or damaged",
            where=name,
        )
    if length > MAX_HEADER:
        raise FormatError(
            "wdelta.header-too-large", f"expected a header of at most {MAX_HEADER} bytes, found {length}", where=name
        )
    return version, read_joined(source, [(PREFIX, length)])


def _tensors(source: ByteSource, header: Header, spans: Spans, file: str) -> Lazy[Tensor]:
    """Return the tensors in the order of their records."""

    def build(name: str) -> Tensor:
        entry = header.tensors[name]
        rounded = None if entry.dtype == "float32" else entry.dtype
        parts = _parts(source, spans[name], f"{file}: {name}", rounded)
        return Tensor(name, entry.shape, "f32", entry.codec, parts, entry.params())

    return Lazy(spans, build)


def _parts(source: ByteSource, spans: Mapping[str, Span], location: str, rounded: str | None) -> dict[str, Part]:
    """Return a tensor's parts, in the order in which they are written.

    ``rounded`` is the type of the differences if it is not float32: values and scales are rounded to it.
    """
    return {
        field: _part(source, span, f"{location}: {field}", rounded if field in ("values", "scales") else None)
        for field in FIELDS
        if (span := spans.get(field)) is not None
    }


def _part(source: ByteSource, span: Span, location: str, rounded: str | None) -> Part:
    if span.stored is None and rounded is None:
        return Part(span.dtype, span.length, source, span.offset, where=location)
    stored = dtype_of(span.stored or SPELLING[span.dtype])
    assert stored is not None
    target = "f32" if rounded is not None else span.dtype
    through = None if rounded is None else dtype(rounded).name
    converted = ConvertedSource(source, span.offset, span.count, stored, target, through)
    return Part(target, converted.size, converted, where=location, occupies=span.length)


def _notes(header: Header) -> list[tuple[str, str]]:
    other = [name for name, entry in header.tensors.items() if entry.strategy != header.strategy]
    if not other:
        return []
    message = (
        f"the header states {header.strategy}, but {len(other)} tensors have another strategy; the first is "
        f"{other[0][:200]!r}"
    )
    return [("wdelta.mixed-strategies", message)]
