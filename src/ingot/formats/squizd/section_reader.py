"""Reading a section of blocks and scale tables with its directory: the model's own, or a draft head's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import pairwise

from ingot.errors import CodecError, FormatError
from ingot.formats.squizd.blocks import TCA_HEADER, fits, npcl, parse
from ingot.formats.squizd.carry import Form
from ingot.formats.squizd.directory import MAX_DIRECTORY, Directory, Entry
from ingot.formats.squizd.directory import parse as parse_directory
from ingot.formats.squizd.entries import with_entries
from ingot.formats.squizd.header import Notes
from ingot.formats.squizd.layout import (
    ALIGNMENT,
    DIRECTORY_HEADER,
    DIRECTORY_MAGIC,
)
from ingot.formats.squizd.scales import TablePlaces
from ingot.formats.squizd.tensors import Located, from_entry, run_of
from ingot.model.bytesource import ByteSource, Range
from ingot.model.layouts.base import matrix_shape
from ingot.model.layouts.dense import DenseLayout
from ingot.model.layouts.ids import codec_of
from ingot.model.layouts.sparse import MaskLayout
from ingot.model.ranges import HeaderSource, read_bytes
from ingot.model.spec import PartSpec, TensorSpec

Span = tuple[int, int]
_DATA = {"data"}


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
        if entry.layer >= len(layers):
            raise FormatError(
                "squizd.directory-layer",
                f"expected a layer below {len(layers)}, found {entry.layer}",
                where=_place(where, name),
            )
        start, end = layers[entry.layer]
        if not start <= entry.offset < end:
            raise FormatError(
                "squizd.block-outside-layer",
                f"expected a block in layer {entry.layer}, bytes {start} to {end}, found {entry.offset}",
                where=_place(where, name),
            )
        located = _plain(source, name, entry, end)
        if located is None:
            location = _place(where, name)
            block = parse(read, entry.offset, end, location, _stated(name, entry, location))
            located = from_entry(name, entry, block, location)
        by_name[name], block = located, located.form.block
        spans.append((entry.offset, entry.offset + (block.length or 0), name))
        if entry.mask is not None:
            if entry.mask[0] < start or entry.mask[1] > end - entry.mask[0]:
                raise FormatError(
                    "squizd.mask",
                    f"expected a mask in layer {entry.layer}, found it at {entry.mask[0]}",
                    where=_place(where, name),
                )
            spans.append((entry.mask[0], entry.mask[0] + entry.mask[1], name))
    _check_apart(spans, where)
    note_gaps(source, [(start, end) for start, end, _ in spans], layers, notes)
    entries = with_entries(source, directory, tables, where).tensors
    for name, entry in entries.items():
        if entry is not directory.tensors[name]:
            by_name[name] = replace(by_name[name], run=run_of(name, entry))
    return by_name


def _place(where: str, name: str) -> str:
    return f"{where}: tensor {name[:200]!r}"


def _heads(directory: Directory, layers: Sequence[Span]) -> Iterator[Range]:
    """Yield where the heads of blocks lie, with the padding before them, and the padding behind the layers' last."""
    for entry in directory.tensors.values():
        yield entry.offset - ALIGNMENT, ALIGNMENT + TCA_HEADER
    for start, end in layers:
        if end > start:
            yield end - ALIGNMENT, ALIGNMENT


def _plain(source: HeaderSource, name: str, entry: Entry, end: int) -> Located | None:
    """Return a dense tensor whose block is just what the directory says; None for all that deserves a closer look."""
    if entry.codec != DenseLayout.codec or entry.params or entry.first or entry.second or entry.mask or entry.scales:
        return None
    if not entry.digests.keys() <= _DATA or entry.chunks:
        return None
    form, parts, length = _dense(entry.dtype, entry.shape)
    if form is None or length > end - entry.offset or not source.has(entry.offset, form.block.header):
        return None
    return Located(
        TensorSpec(name, entry.shape, entry.dtype, DenseLayout.codec, parts), form, entry.offset, digests=entry.digests
    )


@lru_cache(maxsize=1024)
def _dense(dtype: str, shape: tuple[int, ...]) -> tuple[Form | None, tuple[PartSpec, ...], int]:
    """Return the block of a dense tensor, its part and its length, which many tensors of a model share; None for one
    that has no room in a block."""
    if not fits(dtype, shape):
        return None, (), 0
    block = npcl(dtype, shape)
    piece = block.pieces[0]
    return Form(block), (PartSpec(piece.role, piece.dtype, piece.length, piece.type),), block.length or 0


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
    source: HeaderSource, inner: Sequence[Span], outer: Sequence[Span], notes: Notes, rule: str = "squizd.gap"
) -> None:
    """Add a note, once, if something lies in ``outer`` spans and in none of the ``inner`` ones that is not padding.

    The inner spans are apart and inside the outer ones, and so are the outer ones among themselves.
    """
    ends = sorted([end for _, end in inner] + [start for start, end in outer if end > start])
    starts = sorted([start for start, _ in inner] + [end for start, end in outer if end > start])
    gaps = [(end, start) for end, start in zip(ends, starts, strict=True) if start > end]
    source.expect((end, start - end) for end, start in gaps if start - end < ALIGNMENT)
    note = (rule, "expected fewer than 64 zero bytes between blocks and sections, found other bytes")
    if note not in notes and any(
        start - end >= ALIGNMENT or any(read_bytes(source, end, start - end)) for end, start in gaps
    ):
        notes.append(note)


def masks_by_layer(tensors: Mapping[str, Located], directory: Directory) -> dict[int, int]:
    """Return the offset of the first mask of every layer that has one."""
    starts: dict[int, int] = {}
    for name, located in tensors.items():
        if located.mask is not None:
            layer = directory.tensors[name].layer
            starts[layer] = min(starts.get(layer, located.mask), located.mask)
    return starts
