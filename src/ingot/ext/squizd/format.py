"""The format SQUIZD (``.squizd``): which tensors it can store, the size of a file, and its reader and writer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ingot.core.bytes import checksums, chunk_digests
from ingot.core.parsing import cbor
from ingot.ext.squizd.appendix import draft_placement
from ingot.ext.squizd.carry import why_compact_unsupported, why_undescribed, why_unsupported
from ingot.ext.squizd.directory import (
    VERSION,
    Directory,
    EncodedEntries,
    Entry,
    build,
    encode_entry,
    size_of,
    with_mask,
)
from ingot.ext.squizd.layout import COREML_HEADER, DRAFT_HEADER, HEADER, INDEX_ENTRY, MAGIC, align, split_metadata
from ingot.ext.squizd.placement import (
    PlacedTensor,
    Placement,
    Tables,
    entry_of,
    lay_out,
    layers_of,
    order,
    place_tensors,
)
from ingot.ext.squizd.reader import read_catalog
from ingot.ext.squizd.writer import SquizdWriter
from ingot.formats.base import Catalog, FormatTraits, WriteOptions
from ingot.formats.shared.single import SingleFile
from ingot.model.artifact import Artifact, Attachments
from ingot.model.bytesource import ByteSource, Target
from ingot.model.spec import TensorSpec


def file_size(artifact: Artifact, options: WriteOptions) -> int:
    """Return the number of bytes of the file; unknown lengths count as their maximum."""
    layers, count = layers_of([spec.name for spec in artifact.tensors])
    placement = place_tensors(artifact.tensors, layers, count)
    digest = options.digest
    attached = artifact.attachments
    entries_bytes, end = entries_size(placement, HEADER + INDEX_ENTRY * count, digest)
    directory = Directory(
        VERSION,
        {},
        dict(split_metadata(artifact.metadata)[1]),
        draft_digest=None if attached.draft is None or digest is None else checksums.digest(digest, b""),
        coreml_digest=None if attached.coreml is None else checksums.digest("sha256", b""),
    )
    end = appendices_end(end, attached, digest)
    return end + entries_bytes + size_of(build(directory, EncodedEntries(len(artifact.tensors)), digest))


def appendices_end(tail: int, attached: Attachments, digest: str | None) -> int:
    """Return the end of the appendices of a file whose scale tables end at ``tail``."""
    if attached.draft is not None:
        placement = draft_placement(attached.draft)
        entries_bytes, end = entries_size(placement, align(tail) + DRAFT_HEADER, digest)
        tail = end + entries_bytes + size_of(build(Directory(VERSION, {}), EncodedEntries(len(placement.tensors))))
    return tail if attached.coreml is None else tail + COREML_HEADER + attached.coreml.length


def entries_size(placement: Placement, start: int, digest: str | None) -> tuple[int, int]:
    """Return the size in bytes of the directory's entries, and the offset at which the scale tables end."""
    offsets, cursor = lay_out(placement, start)
    total = 0
    mask_bytes: dict[int, int] = {}
    for placed, offset in zip(placement.tensors, offsets, strict=True):
        layer = placed.layer
        storage = placed.storage
        entry = _placeholder_entry(placed, offset, placement.tables, cursor.tail, digest)
        if storage.mask_bytes is not None:
            before = mask_bytes.get(layer, 0)
            entry = with_mask(entry, ((cursor.mask_starts[layer] or 0) + before, storage.mask_bytes))
            mask_bytes[layer] = before + storage.mask_bytes
        total += len(cbor.dumps(placed.spec.name)) + len(encode_entry(entry))
    return total, cursor.tail + placement.tables.size


def _placeholder_entry(
    placed: PlacedTensor, offset: int, tables: Tables, tables_start: int, digest: str | None
) -> Entry:
    """Return a directory entry with placeholders for digests, which has the same length as the final entry."""
    text = None if digest is None else checksums.digest(digest, b"")
    digests = {} if text is None else {part.role: text for part in placed.spec.parts}
    placeholders = ((part.role, chunk_digests.stand_in(digest, part.at_most)) for part in placed.spec.parts)
    chunks = {role: chunk_digests.declare_chunks(sizes) for role, sizes in placeholders if sizes is not None}
    return entry_of(placed, offset, tables, tables_start, digests, chunks)


class SquizdFormat(SingleFile):
    """The format SQUIZD, version 1.

    It stores dense, INT4, INT2, ASTC or TCA-TBE blocks, pruned or not, a draft head and a Core ML package.
    """

    name = "squizd"
    suffixes: tuple[str, ...] = (".squizd",)
    summary = "SQUIZD 1: one compressed encoding per file, draft head and Core ML package inside"
    traits = FormatTraits(
        digests=True,
        attachments=("draft", "coreml"),
        group_sizes=(),
        full_size=True,
    )

    def __init__(self, *, compact: bool = False) -> None:
        self.traits = replace(type(self).traits, full_size=not compact)

    def compacted(self) -> SquizdFormat:
        """Return the format that stores only the unpruned blocks of matrices.

        The files are smaller, but only readers of ``TDIR`` can read them.
        """
        return SquizdFormat(compact=True)

    def claims(self, name: str, head: bytes) -> bool:
        """Return whether the file has the magic or the suffix of the format.

        If only the suffix fits, ``read`` raises the error.
        """
        return head[:4] == MAGIC or name.lower().endswith(self.suffixes)

    def why_unsupported(self, spec: TensorSpec) -> str | None:
        return (
            why_unsupported(spec)
            or why_undescribed(spec)
            or (why_compact_unsupported(spec) if self.traits.full_size else None)
        )

    def order(self, specs: Sequence[TensorSpec]) -> Sequence[int]:
        """Return the order of tensors by layer, in which the file stores them."""
        return order(specs)

    def catalog(self, source: ByteSource, name: str, *, verify: bool) -> Catalog:
        return read_catalog(source, name, verify=verify)

    def size(self, artifact: Artifact, options: WriteOptions) -> int:
        return file_size(artifact, options)

    def writer(self, target: Target, name: str, artifact: Artifact, options: WriteOptions) -> SquizdWriter:
        return SquizdWriter(target, name, artifact, options)
