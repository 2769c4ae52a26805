"""The payload in columns: heads of records as writers make them, decoded in native code and checked together."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ingot.core.columns import Array, Column, Heads, Rows, chosen, numbers
from ingot.formats.wdelta.entries import EntryColumns
from ingot.formats.wdelta.layout import FIELDS, ITEM, LONGEST_DTYPE, LONGEST_FIELD, STRATEGIES, Span
from ingot.model.bulk import Places
from ingot.model.ranges import HeaderSource

# Bytes of a head beside the tensor's name: three lengths, field, element type, rank, one size, the data's length.
FIXED = 4 + 4 + LONGEST_FIELD + 4 + LONGEST_DTYPE + 4 + 8 + 8

# A tensor's name, a field's, an element type; sizes; the data's length, and the data.
_HEAD = "tttdQ>"
_MANY = 1 << 55
_ITEMS = {name: size for name, (_, size) in ITEM.items()}
_NUMBER = {name: number for number, name in enumerate(FIELDS)}
_KIND = np.array([kind for kind, row in enumerate(STRATEGIES.values()) for _ in row.fields], np.int64)
_FIELDS_OF = np.bincount(_KIND)


@dataclass(frozen=True, slots=True)
class _Records:
    """Heads of all records, and where their data lie: ``row`` is that of the entry, ``field`` a place in ``FIELDS``.

    ``names`` are those of the tensors, ``in_order`` tells whether they come as in the header.
    """

    names: list[str]
    in_order: bool
    row: Array
    field: Array
    dtype: Column
    counts: Array
    lengths: Array
    offsets: Array


def longest_of(names: Collection[str]) -> int:
    """Return the bytes of the longest name."""
    return int(_lengths(names).max(initial=0))


def _lengths(texts: Collection[str]) -> Array:
    """Return how many bytes each text takes."""
    if "".join(texts).isascii():
        return np.fromiter(map(len, texts), np.int64, len(texts))
    return np.array([len(text.encode("utf-8", "surrogatepass")) for text in texts], np.int64)


class Located(Rows[dict[str, Span]]):
    """Arrays by tensor and field, made when they are asked for."""

    __slots__ = ("_places", "_records")

    def __init__(self, records: _Records, places: NDArray[np.int32], entries: EntryColumns) -> None:
        in_order = records.in_order
        super().__init__(entries.rows if in_order else {name: entries.rows[name] for name in records.names}, self.spans)
        self._records, self._places = records, places

    def spans(self, row: int) -> dict[str, Span]:
        """Return the arrays of one entry."""
        records = self._records
        counts, lengths, offsets = (each.data for each in (records.counts, records.lengths, records.offsets))
        return {
            name: Span(ITEM[records.dtype.text(place) or ""][0], counts[place], offsets[place], lengths[place])
            for name, place in zip(FIELDS, self._places[row].tolist(), strict=True)
            if place >= 0
        }

    def places(self, fields: Sequence[str]) -> dict[str, Places]:
        """Return by entry where arrays lie; anything for who has no such."""
        found, records = {}, self._records
        for name in fields:
            at = self._places[:, _NUMBER[name]]
            found[name] = Places(records.offsets[at], records.lengths[at])
        return found


def read_columns(source: HeaderSource, start: int, end: int, entries: EntryColumns) -> Located | None:
    """Locate every array of the payload; None where a closer look is needed."""
    records = _records(source, start, end, entries)
    if records is None or not _sound(records, entries):
        return None
    places = np.full((len(entries.rows), len(FIELDS)), -1, np.int32)
    places[records.row, records.field] = np.arange(records.row.size, dtype=np.int32)
    if np.count_nonzero(places >= 0) != records.row.size:  # one of them twice
        return None
    return Located(records, places, entries)


def _records(source: HeaderSource, start: int, end: int, entries: EntryColumns) -> _Records | None:
    heads, position = Heads(_HEAD), start
    sizes_of = _lengths(entries.rows)
    longest = int(sizes_of.max(initial=0))
    while position < end:
        least = min(longest + FIXED, end - position)
        step = heads.take(source.passing(position, least)[: end - position], 0, end)
        if not step:  # in doubt, or not a whole one where all that writers make would be
            return None
        position += step
    if position != end:
        return None
    names, fields, dtype, sizes, lengths = heads.columns()
    in_order = names.texts == list(entries.rows)  # as writers have it
    if in_order:
        row = numbers(names.first)
    else:
        known = np.array([entries.rows.get(name, -1) for name in names.texts], np.int64)
        row, sizes_of = known[numbers(names.first)], _lengths(names.texts)
    nbytes = np.diff(numbers(sizes.second)) * 8 + 24 + sizes_of[numbers(names.first)] + _bytes(fields) + _bytes(dtype)
    length = numbers(lengths.first)
    offsets = start + np.cumsum(nbytes + length) - length
    field = chosen(fields, _NUMBER)
    return _Records(names.texts, in_order, row, field, dtype, numbers(sizes.third), length, offsets)


def _bytes(texts: Column) -> Array:
    """Return how many bytes each text takes."""
    return _lengths(texts.texts)[numbers(texts.first)]


def _sound(records: _Records, entries: EntryColumns) -> bool:
    """Whether every entry has as many arrays as it needs, of a type and size that these may have."""
    row, field, kinds = records.row, records.field, entries.kinds
    if (row < 0).any() or (field < 0).any() or row.size != _FIELDS_OF[kinds].sum() or (records.counts > _MANY).any():
        return False
    wrong = (_KIND[field] != kinds[row]) | (records.lengths != records.counts * chosen(records.dtype, _ITEMS, 0))
    if wrong.any():
        return False
    fields = ((name, np.flatnonzero(field == number)) for number, name in enumerate(FIELDS))
    return all(_fits(name, records, own, entries) for name, own in fields) and _paired(records, entries)


def _fits(name: str, records: _Records, own: Array, entries: EntryColumns) -> bool:
    """Whether the arrays of one field are of a type that it may have, and of the right sizes."""
    spellings = next(each.fields[name] for each in STRATEGIES.values() if name in each.fields)
    if not own.size:
        return True
    row, codes = records.row[own], chosen(records.dtype, {text: at for at, text in enumerate(spellings)}, rows=own)
    if (codes < 0).any() or (name == "outlier_idx" and ((codes > 0) & (entries.layouts[row] == 1)).any()):
        return False
    return _counted(name, records.counts[own], row, entries)


def _counted(name: str, counts: Array, row: Array, entries: EntryColumns) -> bool:
    """Whether arrays of one field have as many elements as ``Entry.counts`` says."""
    sizes, apart = entries.sizes[row], entries.outliers[row]
    if name in ("indices", "values"):
        return not (counts > sizes).any()
    if name == "packed":
        sizes = sizes - np.where(entries.layouts[row] == 1, apart, 0)
    wanted = {
        "scales": entries.scales[row],
        "packed_signs": -(-sizes // 8),
        "outlier_idx": apart,
        "outlier_vals": apart,
        "packed": -(-sizes // 2),
    }.get(name, 1)
    return not (counts != wanted).any()


def _paired(records: _Records, entries: EntryColumns) -> bool:
    """Whether sparse tensors have as many values as indices."""
    found = []
    for name in ("indices", "values"):
        own = records.field == _NUMBER[name]
        counts = np.zeros(len(entries.rows), np.int64)
        counts[records.row[own]] = records.counts[own]
        found.append(counts)
    return bool((found[0] == found[1]).all())
