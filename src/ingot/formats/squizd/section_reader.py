"""Reading a section of blocks and scale tables with its directory: the model's own, or a draft head's."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from operator import itemgetter

import numpy as np

from ingot.errors import FormatError
from ingot.formats.squizd.blocks import TCA_HEADER, Read, fits, npcl, parse
from ingot.formats.squizd.carry import Form
from ingot.formats.squizd.directory import MAX_DIRECTORY, Directory, Entry
from ingot.formats.squizd.directory import parse as parse_directory
from ingot.formats.squizd.header import Notes
from ingot.formats.squizd.layout import (
    ALIGNMENT,
    DIRECTORY_HEADER,
    DIRECTORY_MAGIC,
    SCALE_ENTRY,
    SUB_BLOCK_BIT,
    tensor_id,
)
from ingot.formats.squizd.scales import entries_at
from ingot.formats.squizd.tensors import Located, from_entry
from ingot.model.bytesource import ByteSource, Range
from ingot.model.layouts.dense import DenseLayout
from ingot.model.ranges import HeaderSource, read_bytes
from ingot.model.spec import PartSpec, TensorSpec

Span = tuple[int, int]
_DATA = {"data"}
TablePlaces = Sequence[tuple[int, int]]


def skip_zeros(source: ByteSource, offset: int, end: int) -> int:
    """Return where the first byte that is not 0 lies behind ``offset``, at most 63 bytes on."""
    data = read_bytes(source, offset, max(0, min(ALIGNMENT - 1, end - offset)))
    return offset + len(data) - len(data.lstrip(b"\0"))


def read_directory(source: ByteSource, offset: int, end: int, where: str) -> tuple[Directory | None, bytes, int]:
    """Return the directory at ``offset`` with its bytes and its end; None where there is none.

    Raises
    ------
    FormatError
        ``squizd.directory-out-of-bounds``, ``squizd.directory-too-large``, and the rules of ``directory.parse``.
    """
    head = read_bytes(source, offset, max(0, min(DIRECTORY_HEADER, end - offset)))
    if not head or not DIRECTORY_MAGIC.startswith(head[:4]):
        return None, b"", offset
    length = int.from_bytes(head[4:], "little")
    if length > MAX_DIRECTORY:
        raise FormatError(
            "squizd.directory-too-large", f"expected at most {MAX_DIRECTORY} bytes, found {length}", where=where
        )
    if length > end - offset - DIRECTORY_HEADER:
        raise FormatError(
            "squizd.directory-out-of-bounds",
            f"expected a directory that ends by byte {end}, found {length} bytes at {offset}",
            where=where,
        )
    data = read_bytes(source, offset + DIRECTORY_HEADER, length)
    return parse_directory(data, where), head + data, offset + DIRECTORY_HEADER + length


def locate(
    source: HeaderSource, directory: Directory, layers: Sequence[Span], tables: TablePlaces, notes: Notes, where: str
) -> dict[str, Located]:
    """Find every tensor of a directory; bytes of a layer that belong to none and are not padding become a note.

    Parameters
    ----------
    layers : sequence of (start, end)
        Byte spans of the layers' weight blocks.
    tables : sequence of (offset of the first entry, number of entries)

    Raises
    ------
    FormatError
        ``squizd.directory-layer``, ``squizd.block-outside-layer``, ``squizd.block-overlap``, ``squizd.mask``,
        ``squizd.directory-conflict``, ``squizd.scale-missing``, ``squizd.scale-count``, ``squizd.scale-entry``,
        ``squizd.scale-id``, ``squizd.scale-rounds``, and the rules of blocks.
    """
    by_name: dict[str, Located] = {}
    spans: list[tuple[int, int, str]] = []
    read = partial(read_bytes, source)
    source.expect(_heads(directory, layers))
    for name, entry in directory.tensors.items():
        location = f"{where}: tensor {name[:200]!r}"
        if entry.layer >= len(layers):
            raise FormatError(
                "squizd.directory-layer", f"expected a layer below {len(layers)}, found {entry.layer}", where=location
            )
        start, end = layers[entry.layer]
        if not start <= entry.offset < end:
            raise FormatError(
                "squizd.block-outside-layer",
                f"expected a block in layer {entry.layer}, bytes {start} to {end}, found {entry.offset}",
                where=location,
            )
        located = _plain(read, name, entry, end)
        if located is None:
            located = from_entry(name, entry, parse(read, entry.offset, end, location), location)
        by_name[name], block = located, located.form.block
        spans.append((entry.offset, entry.offset + (block.length or 0), name))
        if entry.mask is not None:
            if entry.mask[0] < start or entry.mask[1] > end - entry.mask[0]:
                raise FormatError(
                    "squizd.mask",
                    f"expected a mask in layer {entry.layer}, found it at {entry.mask[0]}",
                    where=location,
                )
            spans.append((entry.mask[0], entry.mask[0] + entry.mask[1], name))
    _check_apart(spans, where)
    note_gaps(source, [(start, end) for start, end, _ in spans], layers, notes)
    _check_scales(source, directory, tables, where)
    return by_name


def _heads(directory: Directory, layers: Sequence[Span]) -> Iterator[Range]:
    """Yield where the heads of blocks lie, with the padding before them, and the padding behind the layers' last."""
    for entry in directory.tensors.values():
        yield entry.offset - ALIGNMENT, ALIGNMENT + TCA_HEADER
    for start, end in layers:
        if end > start:
            yield end - ALIGNMENT, ALIGNMENT


def _plain(read: Read, name: str, entry: Entry, end: int) -> Located | None:
    """Return a dense tensor whose block is just what the directory says; None for all that deserves a closer look."""
    if entry.codec != DenseLayout.codec or entry.params or entry.first or entry.second or entry.mask or entry.scales:
        return None
    if not fits(entry.dtype, entry.shape) or not entry.digests.keys() <= _DATA or entry.chunks:
        return None
    block = npcl(entry.dtype, entry.shape)
    length = block.length or 0
    if length > end - entry.offset or read(entry.offset, block.lead) != block.header:
        return None
    piece = block.pieces[0]
    part = PartSpec(piece.role, piece.dtype, piece.length, piece.type)
    spec = TensorSpec(name, entry.shape, entry.dtype, DenseLayout.codec, (part,))
    return Located(spec, Form(block), entry.offset, digests=entry.digests)


def _check_apart(spans: list[tuple[int, int, str]], where: str) -> None:
    spans.sort()
    for (_, end, name), (start, _, other) in pairwise(spans):
        if start < end:
            raise FormatError(
                "squizd.block-overlap",
                f"expected bytes of its own, found some that are also those of {name[:200]!r}",
                where=f"{where}: tensor {other[:200]!r}",
            )


def note_gaps(source: HeaderSource, inner: Sequence[Span], outer: Sequence[Span], notes: Notes) -> None:
    """Add a note, once, if something lies in ``outer`` spans and in none of the ``inner`` ones that is not padding.

    The inner spans are apart and inside the outer ones, and so are the outer ones among themselves.
    """
    ends = sorted([end for _, end in inner] + [start for start, end in outer if end > start])
    starts = sorted([start for start, _ in inner] + [end for start, end in outer if end > start])
    gaps = [(end, start) for end, start in zip(ends, starts, strict=True) if start > end]
    source.expect((end, start - end) for end, start in gaps if start - end < ALIGNMENT)
    note = ("squizd.gap", "expected fewer than 64 zero bytes between blocks and sections, found other bytes")
    if note not in notes and any(
        start - end >= ALIGNMENT or any(read_bytes(source, end, start - end)) for end, start in gaps
    ):
        notes.append(note)


def _check_scales(source: HeaderSource, directory: Directory, tables: TablePlaces, where: str) -> None:
    """Every quantized matrix has its entries inside the tables, under its id, and no others are in the first round."""
    scaled = {name: entry for name, entry in directory.tensors.items() if entry.first is not None}
    if scaled and not tables:
        raise FormatError(
            "squizd.scale-missing", f"expected scale tables for {len(scaled)} matrices, found none", where=where
        )
    firsts = sum(count for _, count in tables[:1])
    if firsts != len(scaled):
        raise FormatError(
            "squizd.scale-count",
            f"expected {len(scaled)} entries in the first scale table, one per quantized matrix, found {firsts}",
            where=where,
        )
    rounds = (tables[:1], tables[1:])
    runs = [
        (run, id, rounds[round], name)
        for name, entry in scaled.items()
        for id in (tensor_id(entry.layer, name),)
        for round, (run, id) in enumerate(((entry.first, id), (entry.second, id | SUB_BLOCK_BIT)))
        if run is not None and run[1]
    ]
    for run, _, places, name in runs:
        _check_place(run, places, f"{where}: tensor {name[:200]!r}")
    _check_ids(source, [(run, id, name) for run, id, _, name in runs], where)
    neutral = [entry.first[0] for entry in scaled.values() if entry.first and entry.second]
    entries = entries_at(source, neutral)
    odd = np.flatnonzero((entries["scale"] != 1.0) | (entries["zero"] != 0.0))
    if odd.size:
        raise FormatError(
            "squizd.scale-rounds",
            "expected scale 1 and zero 0 in the first round beside sub-block scales, found "
            f"{entries['scale'][odd[0]]:g} and {entries['zero'][odd[0]]:g}",
            where=where,
        )
    taken = sorted(run for run, _, _, _ in runs)
    for (start, count), (following, _) in pairwise(taken):
        if start + count * SCALE_ENTRY > following:
            raise FormatError("squizd.scale-entry", "expected scale entries of its own for every tensor", where=where)


def _check_place(run: tuple[int, int], tables: TablePlaces, where: str) -> None:
    """Check that a run of entries lies in a table, on its grid."""
    offset, count = run
    table = bisect_right(tables, offset, key=itemgetter(0)) - 1
    start, entries = tables[table] if table >= 0 else (0, 0)
    behind = offset - start
    if behind % SCALE_ENTRY or count > entries - behind // SCALE_ENTRY:
        raise FormatError(
            "squizd.scale-entry", f"expected {count} scale entries inside a table, found them at {offset}", where=where
        )


def _check_ids(source: HeaderSource, runs: Sequence[tuple[tuple[int, int], int, str]], where: str) -> None:
    """Check the first and last id of every run; those between are checked when they are read."""
    ends = [start + last * SCALE_ENTRY for (start, count), _, _ in runs for last in (0, count - 1)]
    ids = np.repeat(np.array([id for _, id, _ in runs], np.uint64), 2)
    stored_ids = entries_at(source, ends)["id"]
    wrong = np.flatnonzero(stored_ids != ids)
    if wrong.size:
        index = int(wrong[0])
        raise FormatError(
            "squizd.scale-id",
            f"expected scale entries of tensor id {int(ids[index]):#018x}, found {int(stored_ids[index]):#018x}",
            where=f"{where}: tensor {runs[index // 2][2][:200]!r}",
        )


def masks_by_layer(tensors: Mapping[str, Located], directory: Directory) -> dict[int, int]:
    """Return the offset of the first mask of every layer that has one."""
    starts: dict[int, int] = {}
    for name, located in tensors.items():
        if located.mask is not None:
            layer = directory.tensors[name].layer
            starts[layer] = min(starts.get(layer, located.mask), located.mask)
    return starts
