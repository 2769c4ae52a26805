"""Dense tensors whose blocks are just what the directory says, most of a file: found and checked together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingot.core.numeric.dtypes import DTYPES
from ingot.core.parsing.columns import Array, chosen, numbers
from ingot.core.parsing.spans import same, zeros
from ingot.ext.squizd.blocks import DTYPE_CODES, MOST, NPCL, npcl
from ingot.ext.squizd.carry import Form
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
_MANY = 1 << 55


@dataclass(frozen=True, slots=True)
class Plain:
    """Entries of a directory that are such tensors: their numbers in it, and where their blocks begin and end."""

    entries: Entries
    places: Array
    starts: Array
    ends: Array

    def others(self) -> list[str]:
        """Return the names of the entries that are none."""
        left = np.ones(len(self.entries), bool)
        left[self.places] = False
        names = [*self.entries]
        return [names[place] for place in np.flatnonzero(left)]

    def spans(self) -> Iterator[tuple[int, int, str]]:
        """Yield where each block begins and ends, and its tensor's name."""
        names = [*self.entries]
        for place, start, end in zip(self.places.tolist(), self.starts.tolist(), self.ends.tolist(), strict=True):
            yield start, end, names[place]


class Found(Mapping[str, Located]):
    """Tensors as found, in the order of a directory: plain ones are made when they are asked for."""

    def __init__(self, plain: Plain, closely: dict[str, Located]) -> None:
        self._entries, self._plain = plain.entries, plain
        self.closely = closely

    def __getitem__(self, name: str) -> Located:
        found = self.closely.get(name)
        if found is not None:
            return found
        entry = self._entries[name]
        form, parts = _dense(entry.dtype, entry.shape)
        spec = TensorSpec(name, entry.shape, entry.dtype, DenseLayout.codec, parts)
        return Located(spec, form, entry.offset, digests=entry.digests)

    def dense(self) -> DenseColumns:
        """Return the plain ones of storage types, as most are."""
        columns, plain = self._entries.columns, self._plain
        simple = np.zeros(len(self._entries), np.bool_)
        simple[plain.places] = True
        types = storage_types(columns.dtype)
        simple &= np.array([*(row is not None for row in types), False])[numbers(columns.dtype.first)]
        first, texts = numbers(columns.digests.first), columns.digests.inner[0]
        counts = np.diff(first)
        simple &= counts <= 1
        begins, sizes = np.full(counts.size, -1, np.int64), np.zeros(counts.size, np.int64)
        own = np.flatnonzero(counts == 1)
        begins[own], sizes[own] = numbers(texts.first)[first[own]], numbers(texts.second)[first[own]]
        offsets, lengths = np.zeros(counts.size, np.int64), np.zeros(counts.size, np.int64)
        heads = _FIXED + 4 * np.diff(numbers(columns.shape.second))[plain.places]
        offsets[plain.places] = plain.starts + heads
        lengths[plain.places] = plain.ends - plain.starts - heads
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
def _dense(dtype: str, shape: tuple[int, ...]) -> tuple[Form, tuple[PartSpec, ...]]:
    """Return the block of a dense tensor and its part, which many tensors of a model share."""
    block = npcl(dtype, shape)
    piece = block.pieces[0]
    return Form(block), (PartSpec(piece.role, piece.dtype, piece.length, piece.type),)


def plain_of(source: HeaderSource, entries: Entries, layers: Array) -> Plain:
    """Find the dense tensors whose blocks lie in their layers as the directory says; others deserve a closer look."""
    columns = entries.columns
    offsets, ranks = numbers(columns.offset.first), np.diff(numbers(columns.shape.second))
    lengths = numbers(columns.shape.third) * chosen(columns.dtype, _WHOLE_BYTES, 0) + _FIXED + 4 * ranks
    layer = numbers(columns.layer.first)
    bounds = np.append(layers, [(0, 0)], 0)  # the last for a layer that is not there
    first, end = bounds[np.minimum(layer, len(layers))].T
    good = _simple(columns) & (first <= offsets) & (offsets < end) & (lengths <= end - offsets)
    places = np.flatnonzero(good)
    for rank in np.unique(ranks[places]).tolist():
        own = places[ranks[places] == rank]
        good[own] = _headed(source, columns, own, rank)
    places = np.flatnonzero(good)
    return Plain(entries, places, offsets[places], (offsets + lengths)[places])


def _simple(columns: EntryColumns) -> Flags:
    """Return which entries are of dense tensors, with nothing that deserves a closer look."""
    good: Flags = chosen(columns.codec, {DenseLayout.codec: 1}) == 1
    good &= chosen(columns.dtype, _WHOLE_BYTES, 0) > 0
    for absent in (columns.scales.first, columns.first.third, columns.second.third, columns.mask.third):
        good &= numbers(absent) < 0
    for empty in (columns.params, columns.chunks):
        good &= numbers(empty.second) <= 1  # a map without keys is one byte
    counts, starts, sizes = (numbers(each) for each in (columns.shape.third, columns.shape.second, columns.shape.first))
    good &= (counts >= 0) & (counts <= _MANY)
    large = np.flatnonzero(sizes > MOST)
    good[np.searchsorted(starts, large, "right") - 1] = False
    own = columns.digests  # which are well spelled, as ``sound`` has seen
    odd = _foreign(own.texts)[numbers(own.second)] if own.texts else np.zeros(0, bool)
    good[np.searchsorted(numbers(own.first), np.flatnonzero(odd), "right") - 1] = False
    return good


def _foreign(texts: Sequence[str]) -> Flags:
    """Return which keys of digests are of no dense tensor's part."""
    return np.array([text != DATA for text in texts], bool)


def _headed(source: HeaderSource, columns: EntryColumns, own: Array, rank: int) -> Flags:
    """Return which of these blocks, whose tensors have so many dimensions, begin as the directory has them."""
    codes = chosen(columns.dtype, DTYPE_CODES)[own]
    sizes = numbers(columns.shape.first)[numbers(columns.shape.second)[own, None] + np.arange(rank)]
    heads = np.empty((own.size, 3 + rank), "<u4")
    heads[:, 0], heads[:, 1], heads[:, 2] = int.from_bytes(NPCL, "little"), codes, rank
    heads[:, 3:] = sizes
    offsets = numbers(columns.offset.first)[own]
    order = np.argsort(offsets, kind="stable")
    good, size = np.zeros(own.size, bool), _FIXED + 4 * rank
    for some, base, memory in source.pieces(offsets[order], np.full(own.size, size)):
        chosen_ones = order[some]
        good[chosen_ones] = same(memory, offsets[chosen_ones] - base, heads[chosen_ones])
    return good


def is_padding(source: HeaderSource, starts: Array, lengths: Array) -> bool:
    """Whether these spans, in order and apart, are shorter than 64 bytes and hold nothing but zeros."""
    if (lengths >= ALIGNMENT).any():
        return False
    for some, base, memory in source.pieces(starts, lengths):
        if not zeros(memory, starts[some] - base, lengths[some]):
            return False
    return True


def overlaps(starts: NDArray[Any], ends: NDArray[Any]) -> bool:
    """Whether any two of these spans share a byte."""
    if (starts <= ends).all() and (ends[:-1] <= starts[1:]).all():  # as writers have them
        return False
    order = np.lexsort((ends, starts))
    return bool((starts[order][1:] < ends[order][:-1]).any())
