"""Reading a section of blocks and scale tables with its directory: the model's own, or a draft head's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np

from ingot.core.parsing.columns import Array
from ingot.errors import CodecError, FormatError
from ingot.ext.squizd.blocks import TCA_HEADER, parse
from ingot.ext.squizd.directory import MAX_DIRECTORY, Directory, Entries, Entry
from ingot.ext.squizd.directory import parse as parse_directory
from ingot.ext.squizd.entries import with_entries
from ingot.ext.squizd.header import Notes
from ingot.ext.squizd.layout import (
    ALIGNMENT,
    DIRECTORY_HEADER,
    DIRECTORY_MAGIC,
)
from ingot.ext.squizd.plain import Found, is_padding, overlaps, plain_of
from ingot.ext.squizd.scales import TablePlaces
from ingot.ext.squizd.tensors import Located, from_entry, run_of
from ingot.model.bytesource import ByteSource, Range
from ingot.model.layouts.base import matrix_shape
from ingot.model.layouts.ids import codec_of
from ingot.model.layouts.sparse import MaskLayout
from ingot.model.reading.ranges import HeaderSource, read_bytes, read_joined
from ingot.model.spec import TensorSpec

Span = tuple[int, int]


def skip_zeros(source: ByteSource, offset: int, end: int) -> int:
    """Return where the first byte that is not 0 lies behind ``offset``, at most 63 bytes on."""
    data = read_bytes(source, offset, max(0, min(ALIGNMENT - 1, end - offset)))
    return offset + len(data) - len(data.lstrip(b"\0"))


def read_directory(
    source: ByteSource, offset: int, end: int, where: str, head: int = 0
) -> tuple[Directory | None, bytearray, int]:
    """Return the directory at ``offset``, its bytes behind the file's first ``head`` ones, and its end.

    None and its place where there is none.

    Raises
    ------
    FormatError
        ``squizd.directory-out-of-bounds``, ``squizd.directory-too-large``, and the rules of ``directory.parse``.
    """
    begin = read_bytes(source, offset, max(0, min(DIRECTORY_HEADER, end - offset)))
    if not begin or not DIRECTORY_MAGIC.startswith(begin[:4]):
        return None, read_joined(source, [(0, head)]), offset
    length = int.from_bytes(begin[4:], "little")
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
    # One copy of it all, which is kept: a directory of many tensors takes megabytes.
    raw = read_joined(source, [(0, head), (offset, DIRECTORY_HEADER + length)])
    data = memoryview(raw)[head + DIRECTORY_HEADER :]
    return parse_directory(data, where), raw, offset + DIRECTORY_HEADER + length


def locate(
    source: HeaderSource, directory: Directory, layers: Array, tables: TablePlaces, notes: Notes, where: str
) -> Mapping[str, Located]:
    """Find every tensor of a directory; bytes of a layer that belong to none and are not padding become a note.

    Parameters
    ----------
    layers : rows of start and end
        Byte spans of the layers' weight blocks.
    tables : sequence of (offset of the first entry, number of entries)

    Raises
    ------
    FormatError
        ``squizd.directory-layer``, ``squizd.block-outside-layer``, ``squizd.block-overlap``, ``squizd.mask``,
        ``squizd.directory-conflict``, ``squizd.scale-missing``, ``squizd.scale-count``, ``squizd.scale-entry``,
        ``squizd.scale-id``, ``squizd.scale-rounds``, and the rules of blocks.
    """
    entries = directory.tensors
    plain = plain_of(source, entries, layers) if isinstance(entries, Entries) else None
    by_name: dict[str, Located] = {}
    spans: list[tuple[int, int, str]] = []
    others = {name: entries[name] for name in (entries if plain is None else plain.others())}
    if others:
        source.expect(_heads(others, layers))
    for name, entry in others.items():
        by_name[name] = _closely(source, name, entry, layers, where)
        spans.append((entry.offset, entry.offset + (by_name[name].form.block.length or 0), name))
        if entry.mask is not None:
            spans.append((entry.mask[0], entry.mask[0] + entry.mask[1], name))
    inner = np.array([span[:2] for span in spans], np.int64).reshape(-1, 2)
    if plain is not None:
        inner = np.concatenate([inner, np.stack([plain.starts, plain.ends], 1)])
    if overlaps(*inner.T):
        _check_apart([*spans, *(plain.spans() if plain is not None else ())], where)
    note_gaps(source, inner, layers, notes)
    scaled = {name: entry for name, entry in others.items() if entry.first is not None}
    for name, entry in with_entries(source, scaled, tables, where).items():
        if entry is not scaled[name]:
            by_name[name] = replace(by_name[name], run=run_of(name, entry))
    return by_name if plain is None else Found(plain, by_name)


def _closely(source: HeaderSource, name: str, entry: Entry, layers: Array, where: str) -> Located:
    """Look at one tensor's block, and at its mask's place."""
    location = _place(where, name)
    if entry.layer >= len(layers):
        raise FormatError(
            "squizd.directory-layer", f"expected a layer below {len(layers)}, found {entry.layer}", where=location
        )
    start, end = layers[entry.layer].tolist()
    if not start <= entry.offset < end:
        raise FormatError(
            "squizd.block-outside-layer",
            f"expected a block in layer {entry.layer}, bytes {start} to {end}, found {entry.offset}",
            where=location,
        )
    block = parse(partial(read_bytes, source), entry.offset, end, location, _stated(name, entry, location))
    located = from_entry(name, entry, block, location)
    if entry.mask is not None and (entry.mask[0] < start or entry.mask[1] > end - entry.mask[0]):
        raise FormatError(
            "squizd.mask", f"expected a mask in layer {entry.layer}, found it at {entry.mask[0]}", where=location
        )
    return located


def _place(where: str, name: str) -> str:
    return f"{where}: tensor {name[:200]!r}"


def _heads(entries: Mapping[str, Entry], layers: Array) -> Iterator[Range]:
    """Yield where the heads of blocks lie, with the padding before them, and the padding behind the layers' last."""
    for entry in entries.values():
        yield entry.offset - ALIGNMENT, ALIGNMENT + TCA_HEADER
    for start, end in layers.tolist():
        if end > start:
            yield end - ALIGNMENT, ALIGNMENT


def _stated(name: str, entry: Entry, where: str) -> tuple[int, int] | None:
    """Return columns and kept values of a bitmap, which its block does not state; None of other tensors.

    Raises ``FormatError`` ``squizd.directory-conflict`` where the directory does not state them either.
    """
    codec = codec_of(entry.codec)
    if codec != MaskLayout.codec:
        return None
    try:
        kept = MaskLayout.of(TensorSpec(name, entry.shape, entry.dtype, codec, (), entry.params)).nnz
    except CodecError as error:
        raise FormatError("squizd.directory-conflict", f"the directory does not fit: {error}", where=where) from None
    if kept is None:
        raise FormatError("squizd.directory-conflict", "expected the number of kept values, found none", where=where)
    return matrix_shape(entry.shape)[1], kept


def _check_apart(spans: list[tuple[int, int, str]], where: str) -> None:
    spans.sort()
    for (_, end, name), (start, _, other) in pairwise(spans):
        if start < end:
            raise FormatError(
                "squizd.block-overlap",
                f"expected bytes of its own, found some that are also those of {name[:200]!r}",
                where=f"{where}: tensor {other[:200]!r}",
            )


def note_gaps(
    source: HeaderSource, inner: Array, outer: Sequence[Span] | Array, notes: Notes, rule: str = "squizd.gap"
) -> None:
    """Add a note, once, if something lies in ``outer`` spans and in none of the ``inner`` ones that is not padding.

    The inner spans, rows of beginning and end, are apart and inside the outer ones, and so are these among themselves.
    """
    spans = np.array(outer, np.int64).reshape(-1, 2)
    filled = spans[spans[:, 1] > spans[:, 0]]
    ends = np.sort(np.concatenate([inner[:, 1], filled[:, 0]]), kind="stable")  # nearly sorted
    lengths = np.sort(np.concatenate([inner[:, 0], filled[:, 1]]), kind="stable") - ends
    note = (rule, "expected fewer than 64 zero bytes between blocks and sections, found other bytes")
    gaps = lengths > 0
    if note not in notes and not is_padding(source, ends[gaps], lengths[gaps]):
        notes.append(note)


def masks_by_layer(tensors: Mapping[str, Located], directory: Directory) -> dict[int, int]:
    """Return the offset of the first mask of every layer that has one."""
    starts: dict[int, int] = {}
    for name, located in closely(tensors).items():
        if located.mask is not None:
            layer = directory.tensors[name].layer
            starts[layer] = min(starts.get(layer, located.mask), located.mask)
    return starts


def closely(tensors: Mapping[str, Located]) -> Mapping[str, Located]:
    """Return those of a section's tensors that are not just dense."""
    return tensors.closely if isinstance(tensors, Found) else tensors
