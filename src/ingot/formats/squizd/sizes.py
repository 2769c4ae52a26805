"""The exact bytes of a file before it is written."""

from __future__ import annotations

from ingot.core import cbor, checksums, chunk_digests
from ingot.formats.base import WriteOptions
from ingot.formats.squizd.appendix import draft_placement
from ingot.formats.squizd.directory import VERSION, Directory, Entry, Written, build, encoded, size_of, with_mask
from ingot.formats.squizd.layout import COREML_HEADER, DRAFT_HEADER, HEADER, INDEX_ENTRY, align, split_metadata
from ingot.formats.squizd.place import Placed, Placement, Tables, lay_out, layers_of, place
from ingot.formats.squizd.templates import entry_of
from ingot.model.artifact import Artifact
from ingot.model.attachments import Attachments
from ingot.model.spec import names_of

_SHORTEST = 24  # lesser numbers lie in one byte of CBOR


def file_size(artifact: Artifact, options: WriteOptions) -> int:
    """Return the bytes of the file; unknown lengths count as the most that they can be."""
    layers, count = layers_of(names_of(artifact.tensors))
    placement = place(artifact.tensors, layers, count)
    digest, attached = options.digest, artifact.attachments
    said, end = entries_size(placement, HEADER + INDEX_ENTRY * count, digest)
    directory = Directory(
        VERSION,
        {},
        dict(split_metadata(artifact.metadata)[1]),
        draft_digest=None if attached.draft is None or digest is None else checksums.digest(digest, b""),
        coreml_digest=None if attached.coreml is None else checksums.digest("sha256", b""),
    )
    end = appendices_end(end, attached, digest)
    return end + said + size_of(build(directory, Written(len(artifact.tensors)), digest))


def appendices_end(tail: int, attached: Attachments, digest: str | None) -> int:
    """Return where the appendices of a file end whose scale tables end at ``tail``."""
    if attached.draft is not None:
        placement = draft_placement(attached.draft)
        said, end = entries_size(placement, align(tail) + DRAFT_HEADER, digest)
        tail = end + said + size_of(build(Directory(VERSION, {}), Written(len(placement.tensors))))
    return tail if attached.coreml is None else tail + COREML_HEADER + attached.coreml.length


def entries_size(placement: Placement, start: int, digest: str | None) -> tuple[int, int]:
    """Return the bytes that a directory says of tensors, and where the scale tables end."""
    offsets, cursor = lay_out(placement, start)
    tensors, said = placement.tensors, 0
    behind: dict[int, int] = {}
    known: dict[tuple[int, int, int], int] = {}
    for at, (name, form) in enumerate(zip(names_of(tensors.specs), tensors.forms(), strict=True)):
        said += len(cbor.dumps(name))
        offset, layer = offsets[at], tensors.layers[at]
        key = id(form), _digits(layer), _digits(offset)
        if key in known:
            said += known[key]
            continue
        placed = tensors[at]
        entry = _stand_in(placed, offset, placement.tables, cursor.tail, digest)
        if form.mask_bytes is not None:
            begun = behind.get(layer, 0)
            entry = with_mask(entry, ((cursor.mask_starts[layer] or 0) + begun, form.mask_bytes))
            behind[layer] = begun + form.mask_bytes
        size = len(encoded(entry))
        if not form.first and form.mask_bytes is None:  # no other offsets than that of the block
            known[key] = size
        said += size
    return said, cursor.tail + placement.tables.size


def _digits(number: int) -> int:
    """Return what numbers share that take equally many bytes."""
    return 0 if number < _SHORTEST else number.bit_length()


def _stand_in(placed: Placed, offset: int, tables: Tables, tables_start: int, digest: str | None) -> Entry:
    """Return an entry as long as the one that will be written. Digests are those of nothing, which are as long."""
    text = None if digest is None else checksums.digest(digest, b"")
    digests = {} if text is None else {part.role: text for part in placed.spec.parts}
    blank = ((part.role, chunk_digests.stand_in(digest, part.at_most)) for part in placed.spec.parts)
    chunks = {role: chunk_digests.as_stated(sizes) for role, sizes in blank if sizes is not None}
    return entry_of(placed, offset, tables, tables_start, digests, chunks)
