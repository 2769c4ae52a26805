"""The format of deltas ``.wdelta``: which tensors they can store, and their reader and writer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from ingot.core.numeric.dtypes import dtype
from ingot.errors import FormatError, UnsupportedError
from ingot.formats.base import Catalog, WriteOptions
from ingot.formats.shared.single import SingleFile, header_of, headers_of
from ingot.formats.wdelta.carry import why_unsupported
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
from ingot.formats.wdelta.writer import WdeltaWriter, file_size
from ingot.model.artifact import Artifact
from ingot.model.bytesource import ByteSource, Target
from ingot.model.part import Part
from ingot.model.reading.lazy import LazyMap
from ingot.model.reading.ranges import HeaderSource, read_bytes, read_joined
from ingot.model.spec import TensorSpec
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


def _tensors(source: ByteSource, header: Header, spans: Spans, file: str) -> LazyMap[Tensor]:
    """Return the tensors in the order of their records."""

    def build(name: str) -> Tensor:
        entry = header.tensors[name]
        rounded = None if entry.dtype == "float32" else entry.dtype
        parts = _parts(source, spans[name], f"{file}: {name}", rounded)
        return Tensor(name, entry.shape, "f32", entry.codec, parts, entry.params())

    return LazyMap(spans, build)


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
    deviating = [name for name, entry in header.tensors.items() if entry.strategy != header.strategy]
    if not deviating:
        return []
    message = (
        f"the header states {header.strategy}, but {len(deviating)} tensors have another strategy; the first is "
        f"{deviating[0][:200]!r}"
    )
    return [("wdelta.mixed-strategies", message)]


# deltatensors' callback for transformers writes ``model.wdelta`` next to a full checkpoint, which then takes
# precedence.
_WEIGHTS = (".safetensors", ".zt", ".squizd", ".safetensors.index.json")


class WdeltaFormat(SingleFile):
    """The format of deltatensors, versions 1 and 2: sparse, 1-bit or 4-bit differences to a base."""

    name = "wdelta"
    suffixes: tuple[str, ...] = (".wdelta",)
    summary = "differences to a base: sparse, 1 bit, 4 bit (deltatensors)"

    def claims(self, name: str, head: bytes) -> bool:
        """Return whether the magic or the suffix fits; with another magic, ``read`` reports the error."""
        return head.startswith(MAGIC) or name.lower().endswith(self.suffixes)

    def entry(self, names: Sequence[str]) -> str | None:
        """Return the file to open, like any format of one file; None in a folder with full weights."""
        return None if any(name.lower().endswith(_WEIGHTS) for name in names) else super().entry(names)

    def why_unsupported(self, spec: TensorSpec) -> str | None:
        """Return why a tensor cannot be stored; only uncompressed differences of the three codecs can."""
        return why_unsupported(spec)

    def order(self, specs: Sequence[TensorSpec]) -> Sequence[int]:
        """Return the order of the tensors by name.

        deltatensors reads the parent of a chain in this order, and version 2 hashes the base in this order.
        """
        return sorted(range(len(specs)), key=lambda index: specs[index].name)

    def catalog(self, source: ByteSource, name: str, *, verify: bool) -> Catalog:
        """Return the catalog; its ``check_whole`` verifies the digest of the complete file."""
        return read_catalog(source, name)

    def size(self, artifact: Artifact, options: WriteOptions) -> int:
        return file_size(artifact.tensors, artifact.metadata)

    def writer(self, target: Target, name: str, artifact: Artifact, options: WriteOptions) -> WdeltaWriter:
        return WdeltaWriter(target, name, artifact.tensors, artifact.metadata)
