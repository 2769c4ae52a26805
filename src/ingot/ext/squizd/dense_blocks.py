"""Locate and check all dense tensors with standard blocks together, because most tensors of a file are of this type.

A block is standard under three conditions. It begins with the header that Ingot writes, and it is inside its layer. Its
entry has at most one digest, and no mask, scales or parameters. Other tensors are parsed one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingot.core.numeric.dtypes import DTYPES
from ingot.core.parsing.columns import Array, map_texts, numbers, same, zeros
from ingot.ext.squizd.blocks import DTYPE_CODES, MAX_U32, NPCL, npcl
from ingot.ext.squizd.carry import StorageForm
from ingot.ext.squizd.directory import Entries, EntryColumns
from ingot.ext.squizd.layout import ALIGNMENT
from ingot.ext.squizd.tensors import Located
from ingot.formats.shared.dense_columns import DenseColumns, Flags, storage_types
from ingot.model.layouts.dense import DATA, DenseLayout
from ingot.model.reading.ranges import HeaderSource
from ingot.model.spec import PartSpec, TensorSpec

Span = tuple[int, int]

_FIXED = 12  # bytes of a block's header before its sizes
_WHOLE_BYTES = {name: row.bits // 8 for name, row in DTYPES.items() if row.bits % 8 == 0 and name in DTYPE_CODES}
_MAX_ELEMENTS = 1 << 55


@dataclass(frozen=True, slots=True)
class DenseBlocks:
    """The tensors of a directory that are dense and have standard blocks.

    ``rows`` are the indices of their entries in ``entries``; ``starts`` and ``ends`` are offsets of their blocks in the
    file.
    """

    entries: Entries
    rows: Array
    starts: Array
    ends: Array

    def other_names(self) -> list[str]:
        """Return the names of the directory's tensors that have no standard dense block."""
        is_other = np.ones(len(self.entries), bool)
        is_other[self.rows] = False
        names = [*self.entries]
        return [names[row] for row in np.flatnonzero(is_other)]

    def spans(self) -> Iterator[tuple[int, int, str]]:
        """Yield the begin and end of each block, and the name of its tensor."""
        names = [*self.entries]
        for row, start, end in zip(self.rows.tolist(), self.starts.tolist(), self.ends.tolist(), strict=True):
            yield start, end, names[row]


class LocatedTensors(Mapping[str, Located]):
    """Located tensors, in the order of a directory; dense tensors with standard blocks are built on access."""

    def __init__(self, dense_blocks: DenseBlocks, detailed: dict[str, Located]) -> None:
        self._entries = dense_blocks.entries
        self._plain = dense_blocks
        self.detailed = detailed

    def __getitem__(self, name: str) -> Located:
        located = self.detailed.get(name)
        if located is not None:
            return located
        entry = self._entries[name]
        storage, parts = _dense(entry.dtype, entry.shape)
        spec = TensorSpec(name, entry.shape, entry.dtype, DenseLayout.codec, parts)
        return Located(spec, storage, entry.offset, digests=entry.digests)

    def dense(self) -> DenseColumns:
        """Return the dense tensors that ``find_dense_blocks`` found, as columns.

        Tensors whose element type is no storage type, or that have several digests, are not included.
        """
        columns = self._entries.columns
        plain = self._plain
        simple = np.zeros(len(self._entries), np.bool_)
        simple[plain.rows] = True
        types = storage_types(columns.dtype)
        simple &= np.array([*(row is not None for row in types), False])[numbers(columns.dtype.first)]
        first = numbers(columns.digests.first)
        texts = columns.digests.inner[0]
        counts = np.diff(first)
        simple &= counts <= 1
        begins = np.full(counts.size, -1, np.int64)
        sizes = np.zeros(counts.size, np.int64)
        has_digest = np.flatnonzero(counts == 1)
        begins[has_digest] = numbers(texts.first)[first[has_digest]]
        sizes[has_digest] = numbers(texts.second)[first[has_digest]]
        offsets = np.zeros(counts.size, np.int64)
        lengths = np.zeros(counts.size, np.int64)
        heads = _FIXED + 4 * np.diff(numbers(columns.shape.second))[plain.rows]
        offsets[plain.rows] = plain.starts + heads
        lengths[plain.rows] = plain.ends - plain.starts - heads
        return DenseColumns(
            columns.data,
            self._entries.rows,
            simple.tobytes(),
            columns.shape,
            None,
            columns.dtype,
            types,
            offsets.data,
            lengths.data,
            begins.data,
            sizes.data,
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries


@lru_cache(maxsize=1024)
def _dense(dtype: str, shape: tuple[int, ...]) -> tuple[StorageForm, tuple[PartSpec, ...]]:
    """Return the storage and the part specs of a dense tensor; cached, because many tensors of a model share them."""
    block = npcl(dtype, shape)
    part = block.parts[0]
    return StorageForm(block), (PartSpec(part.role, part.dtype, part.length, part.type),)


def find_dense_blocks(source: HeaderSource, entries: Entries, layers: Array) -> DenseBlocks:
    """Return the dense tensors whose blocks are in their layers and have the header that the directory implies."""
    columns = entries.columns
    offsets = numbers(columns.offset.first)
    ranks = np.diff(numbers(columns.shape.second))
    lengths = numbers(columns.shape.third) * map_texts(columns.dtype, _WHOLE_BYTES, 0) + _FIXED + 4 * ranks
    layer = numbers(columns.layer.first)
    bounds = np.append(layers, [(0, 0)], 0)  # the last row serves layers that do not exist
    first, end = bounds[np.minimum(layer, len(layers))].T
    is_typical = _simple(columns) & (first <= offsets) & (offsets < end) & (lengths <= end - offsets)
    rows = np.flatnonzero(is_typical)
    for rank in np.unique(ranks[rows]).tolist():
        selected = rows[ranks[rows] == rank]
        is_typical[selected] = _has_header(source, columns, selected, rank)
    rows = np.flatnonzero(is_typical)
    return DenseBlocks(entries, rows, offsets[rows], (offsets + lengths)[rows])


def _simple(columns: EntryColumns) -> Flags:
    """Return for each entry whether it is a dense tensor without properties that need a detailed check."""
    is_simple: Flags = map_texts(columns.codec, {DenseLayout.codec: 1}) == 1
    is_simple &= map_texts(columns.dtype, _WHOLE_BYTES, 0) > 0
    for absent in (columns.scales.first, columns.first.third, columns.second.third, columns.mask.third):
        is_simple &= numbers(absent) < 0
    for empty in (columns.params, columns.chunks):
        is_simple &= numbers(empty.second) <= 1  # a map without keys is one byte
    counts, starts, sizes = (
        numbers(column) for column in (columns.shape.third, columns.shape.second, columns.shape.first)
    )
    is_simple &= (counts >= 0) & (counts <= _MAX_ELEMENTS)
    large = np.flatnonzero(sizes > MAX_U32)
    is_simple[np.searchsorted(starts, large, "right") - 1] = False
    digests = columns.digests  # whose syntax ``sound`` has checked
    is_foreign = _foreign(digests.texts)[numbers(digests.second)] if digests.texts else np.zeros(0, bool)
    is_simple[np.searchsorted(numbers(digests.first), np.flatnonzero(is_foreign), "right") - 1] = False
    return is_simple


def _foreign(texts: Sequence[str]) -> Flags:
    """Return for each key of a tensor's digests whether it differs from ``data``, the only part of a dense tensor."""
    return np.array([text != DATA for text in texts], bool)


def _has_header(source: HeaderSource, columns: EntryColumns, rows: Array, rank: int) -> Flags:
    """Return for each tensor in ``rows`` whether its block begins with the header that its entry implies.

    All these tensors have ``rank`` dimensions.
    """
    codes = map_texts(columns.dtype, DTYPE_CODES)[rows]
    sizes = numbers(columns.shape.first)[numbers(columns.shape.second)[rows, None] + np.arange(rank)]
    heads = np.empty((rows.size, 3 + rank), "<u4")
    heads[:, 0] = int.from_bytes(NPCL, "little")
    heads[:, 1] = codes
    heads[:, 2] = rank
    heads[:, 3:] = sizes
    offsets = numbers(columns.offset.first)[rows]
    order = np.argsort(offsets, kind="stable")
    matches = np.zeros(rows.size, bool)
    size = _FIXED + 4 * rank
    for indices, base, memory in source.batches(offsets[order], np.full(rows.size, size)):
        chosen_ones = order[indices]
        matches[chosen_ones] = same(memory, offsets[chosen_ones] - base, heads[chosen_ones])
    return matches


def is_padding(source: HeaderSource, starts: Array, lengths: Array) -> bool:
    """Return whether these ranges, which are sorted and disjoint, are shorter than 64 bytes and contain only zeros."""
    if (lengths >= ALIGNMENT).any():
        return False
    for indices, base, memory in source.batches(starts, lengths):
        if not zeros(memory, starts[indices] - base, lengths[indices]):
            return False
    return True


def overlaps(starts: NDArray[Any], ends: NDArray[Any]) -> bool:
    """Return whether any two of these ranges share a byte."""
    if (starts <= ends).all() and (ends[:-1] <= starts[1:]).all():  # the usual order
        return False
    order = np.lexsort((ends, starts))
    return bool((starts[order][1:] < ends[order][:-1]).any())
