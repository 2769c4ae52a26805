"""Read the directory of a section and locate its tensors; a section belongs to the model or to a draft head."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np

from ingot.core.parsing.columns import Array
from ingot.errors import CodecError, FormatError
from ingot.ext.squizd.blocks import TCA_HEADER, parse
from ingot.ext.squizd.dense_blocks import LocatedTensors, find_dense_blocks, is_padding, overlaps
from ingot.ext.squizd.directory import MAX_DIRECTORY, Directory, Entries, Entry
from ingot.ext.squizd.directory import parse as parse_directory
from ingot.ext.squizd.entries import with_entries
from ingot.ext.squizd.header import Notes
from ingot.ext.squizd.layout import (
    ALIGNMENT,
    DIRECTORY_HEADER,
    DIRECTORY_MAGIC,
)
from ingot.ext.squizd.scales import TableRanges
from ingot.ext.squizd.tensors import Located, from_entry, run_of
from ingot.model.bytesource import ByteSource, Range
from ingot.model.layouts.base import codec_of, matrix_shape
from ingot.model.layouts.sparse import MaskLayout
from ingot.model.reading.ranges import HeaderSource, read_bytes, read_joined
from ingot.model.spec import TensorSpec

Span = tuple[int, int]


def skip_zeros(source: ByteSource, offset: int, end: int) -> int:
    """Return the offset after the zero bytes at ``offset``; at most 63 bytes are skipped."""
    data = read_bytes(source, offset, max(0, min(ALIGNMENT - 1, end - offset)))
    return offset + len(data) - len(data.lstrip(b"\0"))


def read_directory(
    source: ByteSource, offset: int, end: int, location: str, head: int = 0
) -> tuple[Directory | None, bytearray, int]:
    """Return the directory at ``offset``, bytes for its digest, and its end.

    The bytes are the first ``head`` bytes of the file, followed by the bytes of the directory.

    If there is no directory, the first value is None, and the last value is ``offset``.

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
            "squizd.directory-too-large", f"expected at most {MAX_DIRECTORY} bytes, found {length}", where=location
        )
    if length > end - offset - DIRECTORY_HEADER:
        raise FormatError(
            "squizd.directory-out-of-bounds",
            f"expected a directory that ends by byte {end}, found {length} bytes at {offset}",
            where=location,
        )
    # A single copy of all bytes, which is retained: a directory of many tensors takes megabytes.
    raw = read_joined(source, [(0, head), (offset, DIRECTORY_HEADER + length)])
    data = memoryview(raw)[head + DIRECTORY_HEADER :]
    return parse_directory(data, location), raw, offset + DIRECTORY_HEADER + length


def locate(
    source: HeaderSource, directory: Directory, layers: Array, tables: TableRanges, notes: Notes, location: str
) -> Mapping[str, Located]:
    """Return the location of every tensor of a directory.

    Adds a note if a layer has bytes that are neither blocks nor padding.

    Parameters
    ----------
    layers : rows of start and end
        Byte ranges of the layers' weight blocks.
    tables : sequence of (offset of the first entry, number of entries)

    Raises
    ------
    FormatError
        ``squizd.directory-layer``, ``squizd.block-outside-layer``, ``squizd.block-overlap``, ``squizd.mask``,
        ``squizd.directory-conflict``, ``squizd.scale-missing``, ``squizd.scale-count``, ``squizd.scale-entry``,
        ``squizd.scale-id``, ``squizd.scale-rounds``, and the rules of blocks.
    """
    entries = directory.tensors
    dense_blocks = find_dense_blocks(source, entries, layers) if isinstance(entries, Entries) else None
    by_name: dict[str, Located] = {}
    spans: list[tuple[int, int, str]] = []
    detailed = {name: entries[name] for name in (entries if dense_blocks is None else dense_blocks.other_names())}
    if detailed:
        source.expect(_heads(detailed, layers))
    for name, entry in detailed.items():
        by_name[name] = _locate_in_detail(source, name, entry, layers, location)
        spans.append((entry.offset, entry.offset + (by_name[name].storage.block.length or 0), name))
        if entry.mask is not None:
            spans.append((entry.mask[0], entry.mask[0] + entry.mask[1], name))
    inner = np.array([span[:2] for span in spans], np.int64).reshape(-1, 2)
    if dense_blocks is not None:
        inner = np.concatenate([inner, np.stack([dense_blocks.starts, dense_blocks.ends], 1)])
    if overlaps(*inner.T):
        _check_apart([*spans, *(dense_blocks.spans() if dense_blocks is not None else ())], location)
    note_gaps(source, inner, layers, notes)
    scaled = {name: entry for name, entry in detailed.items() if entry.first is not None}
    for name, entry in with_entries(source, scaled, tables, location).items():
        if entry is not scaled[name]:
            by_name[name] = replace(by_name[name], run=run_of(name, entry))
    return by_name if dense_blocks is None else LocatedTensors(dense_blocks, by_name)


def _locate_in_detail(source: HeaderSource, name: str, entry: Entry, layers: Array, location: str) -> Located:
    """Return the location of a tensor, after a detailed check of its block and of the range of its mask."""
    tensor_location = _tensor_location(location, name)
    if entry.layer >= len(layers):
        raise FormatError(
            "squizd.directory-layer",
            f"expected a layer below {len(layers)}, found {entry.layer}",
            where=tensor_location,
        )
    start, end = layers[entry.layer].tolist()
    if not start <= entry.offset < end:
        raise FormatError(
            "squizd.block-outside-layer",
            f"expected a block in layer {entry.layer}, bytes {start} to {end}, found {entry.offset}",
            where=tensor_location,
        )
    block = parse(
        partial(read_bytes, source), entry.offset, end, tensor_location, _bitmap_size(name, entry, tensor_location)
    )
    located = from_entry(name, entry, block, tensor_location)
    if entry.mask is not None and (entry.mask[0] < start or entry.mask[1] > end - entry.mask[0]):
        raise FormatError(
            "squizd.mask", f"expected a mask in layer {entry.layer}, found it at {entry.mask[0]}", where=tensor_location
        )
    return located


def _tensor_location(location: str, name: str) -> str:
    return f"{location}: tensor {name[:200]!r}"


def _heads(entries: Mapping[str, Entry], layers: Array) -> Iterator[Range]:
    """Yield the ranges to read ahead: each block's header with the padding before it, and the end of each layer."""
    for entry in entries.values():
        yield entry.offset - ALIGNMENT, ALIGNMENT + TCA_HEADER
    for start, end in layers.tolist():
        if end > start:
            yield end - ALIGNMENT, ALIGNMENT


def _bitmap_size(name: str, entry: Entry, location: str) -> tuple[int, int] | None:
    """Return the columns and the number of values of a bitmap, because its block states neither; None for other
    tensors.

    Raises ``FormatError`` ``squizd.directory-conflict`` if the directory does not state the number of values.
    """
    codec = codec_of(entry.codec)
    if codec != MaskLayout.codec:
        return None
    try:
        value_count = MaskLayout.from_tensor(TensorSpec(name, entry.shape, entry.dtype, codec, (), entry.params)).nnz
    except CodecError as error:
        raise FormatError("squizd.directory-conflict", f"the directory does not fit: {error}", where=location) from None
    if value_count is None:
        raise FormatError(
            "squizd.directory-conflict", "expected the number of kept values, but it is missing", where=location
        )
    return matrix_shape(entry.shape)[1], value_count


def _check_apart(spans: list[tuple[int, int, str]], location: str) -> None:
    spans.sort()
    for (_, end, name), (start, _, next_name) in pairwise(spans):
        if start < end:
            raise FormatError(
                "squizd.block-overlap",
                f"expected bytes that no other tensor has, found bytes that overlap {name[:200]!r}",
                where=f"{location}: tensor {next_name[:200]!r}",
            )


def note_gaps(
    source: HeaderSource, inner: Array, outer: Sequence[Span] | Array, notes: Notes, rule: str = "squizd.gap"
) -> None:
    """Add a note if the ``outer`` ranges have bytes that are neither padding nor in an ``inner`` range; never add it
    twice.

    Ranges are rows of begin and end. The inner ranges are disjoint and inside outer ranges; the outer ranges are
    disjoint.
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
    for name, located in non_dense(tensors).items():
        if located.mask is not None:
            layer = directory.tensors[name].layer
            starts[layer] = min(starts.get(layer, located.mask), located.mask)
    return starts


def non_dense(tensors: Mapping[str, Located]) -> Mapping[str, Located]:
    """Return the tensors of a section, except its dense tensors with standard blocks."""
    return tensors.detailed if isinstance(tensors, LocatedTensors) else tensors
