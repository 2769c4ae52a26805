"""Reader of the fixed header and the layer index, with all checks that need no other section."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite

import numpy as np

from ingot.core.bytes.checksums import fnv1a64
from ingot.errors import FormatError
from ingot.ext.squizd.layout import (
    HEADER,
    INDEX_ENTRY,
    MAGIC,
    VERSION,
    DraftMeta,
    Header,
    LayerIndex,
    Sparsity,
    sparsity_crc,
)
from ingot.formats.detect import TRUNCATED_HINT
from ingot.model.bytesource import ByteSource
from ingot.model.reading.ranges import read_bytes
from ingot.model.stacks import DEFINED_BITS, Flags

Notes = list[tuple[str, str]]


def read_header(source: ByteSource) -> tuple[Header, Notes]:
    """Return the header, and notes on its deviations.

    Raises
    ------
    FormatError
        ``squizd.magic``, ``squizd.truncated``, ``squizd.version``, ``squizd.layer-count``, ``squizd.sparsity-crc``,
        ``squizd.sparsity-version``, ``squizd.sparsity-meta``, ``squizd.draft-hash``, ``squizd.draft-missing``.
    """
    location = source.name
    magic = read_bytes(source, 0, min(4, source.size))
    if magic != MAGIC:
        raise FormatError("squizd.magic", f"expected the file to begin with {MAGIC!r}, found {magic!r}", where=location)
    if source.size < HEADER:
        raise FormatError(
            "squizd.truncated",
            f"expected a header of {HEADER} bytes, found {source.size} bytes; {TRUNCATED_HINT}",
            where=location,
        )
    header = Header.unpack(read_bytes(source, 0, HEADER))
    if header.version != VERSION:
        raise FormatError("squizd.version", f"expected version {VERSION}, found {header.version}", where=location)
    if not header.layer_count:
        raise FormatError("squizd.layer-count", "expected at least one layer, found 0", where=location)
    if header.flags & Flags.SPARSE:
        _check_sparsity(header, location)
    if header.flags & Flags.EAGLE:
        _check_draft(header, location)
    return header, list(_oddities(header))


def _check_sparsity(header: Header, location: str) -> None:
    meta = header.sparsity
    crc = sparsity_crc(header.sparsity.pack())
    if header.sparsity_crc != crc:
        raise FormatError(
            "squizd.sparsity-crc",
            f"expected CRC-32 {crc:#010x} of header bytes 128 to 159, found {header.sparsity_crc:#010x}",
            where=location,
        )
    if meta.version != 1:
        raise FormatError(
            "squizd.sparsity-version", f"expected sparsity version 1, found {meta.version}", where=location
        )
    if not meta.block or not meta.layers or not (isfinite(meta.mean) and 0 <= meta.mean <= 1):
        raise FormatError(
            "squizd.sparsity-meta",
            "expected SPARSE with a block size, layers with masks and a mean sparsity from 0 to 1, found "
            f"block_size {meta.block}, n_sparse_layers {meta.layers}, mean_sparsity {meta.mean:g}",
            where=location,
        )


def _check_draft(header: Header, location: str) -> None:
    digest = fnv1a64(header.draft.pack())
    if header.draft_hash != digest:
        raise FormatError(
            "squizd.draft-hash",
            f"expected FNV-1a-64 {digest:#018x} of header bytes 160 to 191, found {header.draft_hash:#018x}",
            where=location,
        )
    if not header.draft.offset or not header.draft.length:
        raise FormatError(
            "squizd.draft-missing",
            f"expected EAGLE with a draft head, found {header.draft.length} bytes at {header.draft.offset}",
            where=location,
        )


def _oddities(header: Header) -> Iterator[tuple[str, str]]:
    """Yield a note for each value that the document permits but no writer should use; ``verify --strict``
    refuses them.
    """
    if header.flags & ~DEFINED_BITS:
        yield "squizd.reserved-flags", f"expected flag bits 7 to 31 to be 0, found {header.flags:#010x}"
    if any(header.reserved) or any(header.reserved2) or any(header.sparsity.reserved) or any(header.draft.reserved):
        yield "squizd.reserved", "expected reserved header bytes to be 0, found other values"
    if not header.flags & Flags.SPARSE:
        crc = sparsity_crc(header.sparsity.pack())
        if header.sparsity_crc not in (0, crc):
            message = f"expected sparsity_crc32 0 or {crc:#010x} without SPARSE, found {header.sparsity_crc:#010x}"
            yield "squizd.unused-sparsity-crc", message
        if header.sparsity != Sparsity():
            yield "squizd.unused-sparsity", "expected zero sparsity metadata without SPARSE, found other bytes"
    if not header.flags & Flags.EAGLE:
        if header.draft_hash:
            yield "squizd.unused-draft-hash", f"expected eagle_hash 0 without EAGLE, found {header.draft_hash:#018x}"
        if header.draft != DraftMeta():
            yield "squizd.unused-draft", "expected zero draft metadata without EAGLE, found other bytes"


def read_index(source: ByteSource, header: Header) -> tuple[LayerIndex, Notes]:
    """Return the layer index after a check that its blocks are inside the file, in order, and do not overlap.

    Raises
    ------
    FormatError
        ``squizd.truncated``, ``squizd.index-order``, ``squizd.layer-in-header``, ``squizd.layer-out-of-bounds``,
        ``squizd.layer-overlap``.
    """
    size = INDEX_ENTRY * header.layer_count
    if HEADER + size > source.size:
        raise FormatError(
            "squizd.truncated",
            f"expected a layer index of {header.layer_count} entries ({size} bytes) after the header, found a file of "
            f"{source.size} bytes; {TRUNCATED_HINT}",
            where=source.name,
        )
    index = LayerIndex(read_bytes(source, HEADER, size))
    if not _in_order(index, source.size):
        _check_index(index, source)
    notes = []
    if index.column("reserved").any():
        notes.append(("squizd.reserved", "expected reserved words of the layer index to be 0, found other values"))
    return index, notes


def _in_order(index: LayerIndex, size: int) -> bool:
    """Return whether a fast check of all layers succeeds: they are in the file, in order, and do not overlap.

    If it fails, a slower check reports the error.
    """
    offsets = index.column("offset")
    lengths = index.column("length")
    if (offsets > size).any() or (lengths > size).any() or (offsets + lengths > size).any():
        return False
    filled = lengths > 0
    ends = offsets + lengths
    tails = np.append(np.uint64(HEADER + INDEX_ENTRY * len(index)), ends[filled])
    ordered = (offsets[filled] >= tails[:-1]).all()
    return bool(ordered and (index.column("layer") == np.arange(len(index))).all())


def _check_index(index: LayerIndex, source: ByteSource) -> None:
    size = INDEX_ENTRY * len(index)
    tail = HEADER + size
    for number, entry in enumerate(index):
        location = f"{source.name}: layer index entry {number}"
        if entry.layer != number:
            raise FormatError("squizd.index-order", f"expected layer_idx {number}, found {entry.layer}", where=location)
        if entry.offset > source.size or entry.length > source.size - entry.offset:
            raise FormatError(
                "squizd.layer-out-of-bounds",
                f"expected a block in the file of {source.size} bytes, found {entry.length} bytes at {entry.offset}; "
                f"{TRUNCATED_HINT}",
                where=location,
            )
        if not entry.length:
            continue
        if entry.offset < HEADER + size:
            raise FormatError(
                "squizd.layer-in-header",
                f"expected a block after byte {HEADER + size}, found {entry.offset}",
                where=location,
            )
        if entry.offset < tail:
            raise FormatError(
                "squizd.layer-overlap",
                f"expected a block after that of the previous layer, which ends at {tail}, found {entry.offset}",
                where=location,
            )
        tail = entry.offset + entry.length
