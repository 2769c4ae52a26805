"""The exact bytes of a file before it is written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ingot.core import checksums, chunk_digests
from ingot.formats.base import WriteOptions
from ingot.formats.squizd.appendix import draft_placement
from ingot.formats.squizd.directory import VERSION, Directory, Written, build, size_of, with_mask
from ingot.formats.squizd.layout import COREML_HEADER, DRAFT_HEADER, HEADER, INDEX_ENTRY, align, split_metadata
from ingot.formats.squizd.place import Placement, lay_out, layers_of, place
from ingot.formats.squizd.section import entry_of
from ingot.model.artifact import Artifact
from ingot.model.attachments import Attachments


def file_size(artifact: Artifact, options: WriteOptions) -> int:
    """Return the bytes of the file; unknown lengths count as the most that they can be."""
    layers, count = layers_of([spec.name for spec in artifact.tensors])
    placement = place(artifact.tensors, layers, count)
    start, digest = HEADER + INDEX_ENTRY * count, options.digest
    directory, entries, end = stand_in(
        placement, start, digest, split_metadata(artifact.metadata)[1], artifact.attachments
    )
    return appendices_end(end, artifact.attachments, digest) + size_of(build(directory, entries, digest))


def appendices_end(tail: int, attached: Attachments, digest: str | None) -> int:
    """Return where the appendices of a file end whose scale tables end at ``tail``."""
    if attached.draft is not None:
        start = align(tail)
        directory, entries, end = stand_in(draft_placement(attached.draft), start + DRAFT_HEADER, digest)
        tail = end + size_of(build(directory, entries))
    return tail if attached.coreml is None else tail + COREML_HEADER + attached.coreml.length


def stand_in(
    placement: Placement,
    start: int,
    digest: str | None,
    metadata: Mapping[str, Any] | None = None,
    attachments: Attachments | None = None,
) -> tuple[Directory, Written, int]:
    """Return a directory and entries as long as those that will be written, and where the scale tables end.

    Digests are those of nothing: their texts are as long as any.
    """
    offsets, cursor = lay_out(placement, start)
    text = None if digest is None else checksums.digest(digest, b"")
    entries = Written()
    behind: dict[int, int] = {}
    for placed, offset in zip(placement.tensors, offsets, strict=True):
        digests = {} if text is None else {part.role: text for part in placed.spec.parts}
        blank = ((part.role, chunk_digests.stand_in(digest, part.at_most)) for part in placed.spec.parts)
        chunks = {role: chunk_digests.as_stated(sizes) for role, sizes in blank if sizes is not None}
        entry = entry_of(placed, offset, placement.tables, cursor.tail, digests, chunks)
        if placed.form.mask_bytes is not None:
            begun = behind.get(placed.layer, 0)
            entry = with_mask(entry, ((cursor.mask_starts[placed.layer] or 0) + begun, placed.form.mask_bytes))
            behind[placed.layer] = begun + placed.form.mask_bytes
        entries.add(placed.spec.name, entry)
    directory = Directory(
        VERSION,
        {},
        dict(metadata or {}),
        draft_digest=text if attachments is not None and attachments.draft is not None else None,
        coreml_digest=None if attachments is None or attachments.coreml is None else checksums.digest("sha256", b""),
    )
    return directory, entries, cursor.tail + placement.tables.size
