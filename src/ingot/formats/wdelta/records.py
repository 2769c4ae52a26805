"""The payload in columns: heads of records as writers make them, decoded in native code and checked together."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ingot.core.columns import Array, Groups, Index, Rows, chosen, numbers
from ingot.formats.wdelta.entries import EntryColumns
from ingot.formats.wdelta.layout import FIELDS, ITEM, LONGEST_DTYPE, LONGEST_FIELD, STRATEGIES, Span
from ingot.model.bulk import Places
from ingot.model.ranges import HeaderSource

# Bytes of a head beside the tensor's name: three lengths, field, element type, rank, one size, the data's length.
FIXED = 4 + 4 + LONGEST_FIELD + 4 + LONGEST_DTYPE + 4 + 8 + 8

_MANY = 1 << 55
_ITEMS = {name: size for name, (_, size) in ITEM.items()}
_NUMBER = {name: number for number, name in enumerate(FIELDS)}
_KIND = np.array([kind for kind, row in enumerate(STRATEGIES.values()) for _ in row.fields], np.int64)
_FIELDS_OF = np.bincount(_KIND)


@dataclass(frozen=True, slots=True)
class _Records:
    """Heads of records: ``home`` is the number of their tensor, ``row`` that of its entry, ``field`` a place in
    ``FIELDS``."""

    home: Array
    row: Array
    field: Array
    dtype: Array
    spellings: Sequence[str]
    counts: Array
    lengths: Array


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

    __slots__ = ("_groups", "_names")

    def __init__(self, groups: Groups, rows: Index) -> None:
        names = rows.names
        in_order = bool((numbers(groups.rows) == np.arange(len(names))).all())  # as writers have it
        super().__init__(rows if in_order else Index([names[row] for row in groups.rows]), self.spans)
        self._groups, self._names = groups, names

    def spans(self, number: int) -> dict[str, Span]:
        """Return the arrays of a tensor, by its number in the order of the file."""
        groups, found = self._groups, {}
        group, at = groups.groups[number], groups.starts[number]
        name = self._names[groups.rows[number]].encode()
        for kind in groups.members[groups.begins[group] : groups.begins[group + 1]].tolist():
            at += 4 + len(name) + groups.sizes[kind]
            dtype, length = groups.dtypes.text(kind) or "", groups.lengths[kind]
            found[groups.fields.text(kind) or ""] = Span(ITEM[dtype][0], groups.elements[kind], at, length)
            at += length
        return found

    def places(self, fields: Sequence[str]) -> dict[str, Places]:
        """Return by entry where arrays lie; anything for who has no such."""
        groups, names = self._groups, self._names
        row, group, first = numbers(groups.rows), numbers(groups.groups), numbers(groups.starts)
        heads = 4 + _lengths(names)[row]
        found = {name: Places(np.zeros(len(names), np.int64), np.zeros(len(names), np.int64)) for name in fields}
        order = np.argsort(group, kind="stable")
        ends = np.searchsorted(group[order], np.arange(len(groups.begins)))
        for number, begin in enumerate(groups.begins[:-1].tolist()):
            own = order[ends[number] : ends[number + 1]]
            at = first[own]
            for kind in groups.members[begin : groups.begins[number + 1]].tolist():
                at, name, length = at + heads[own] + groups.sizes[kind], groups.fields.text(kind), groups.lengths[kind]
                if name in found:
                    found[name].offsets[row[own]], found[name].lengths[row[own]] = at, length
                at = at + length
        return found


def read_columns(source: HeaderSource, start: int, end: int, entries: EntryColumns) -> Located | None:
    """Locate every array of the payload; None where a closer look is needed."""
    names = entries.rows.names
    groups, position = Groups(names, start), start
    while position < end:
        window = source.passing(position, min(groups.longest + FIXED, end - position))
        step = groups.take(window[: end - position])
        if not step:  # in doubt, or not a whole one where all that writers make would be
            return None
        position += step
    if position != end or not groups.finish() or len(groups.rows) != len(names):
        return None
    return Located(groups, entries.rows) if _sound(_different(groups, entries), entries) else None


def _different(groups: Groups, entries: EntryColumns) -> _Records:
    """Return the records of the first tensor of each kind of entry and each group: those of others are the same."""
    row, group = numbers(groups.rows), numbers(groups.groups)
    _, firsts = np.unique(numbers(entries.alike)[row] * (group.max(initial=0) + 1) + group, return_index=True)
    begins = groups.begins[group[firsts]]
    sizes = groups.begins[group[firsts] + 1] - begins
    home = np.repeat(np.arange(firsts.size), sizes)
    within = np.arange(home.size) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    kind = numbers(groups.members)[begins[home] + within]
    return _Records(
        home,
        row[firsts][home],
        chosen(groups.fields, _NUMBER)[kind],
        numbers(groups.dtypes.first)[kind],
        groups.dtypes.texts,
        numbers(groups.elements)[kind],
        numbers(groups.lengths)[kind],
    )


def _sound(records: _Records, entries: EntryColumns) -> bool:
    """Whether every entry has as many arrays as it needs, of a type and size that these may have."""
    home, row, field, kinds = records.home, records.row, records.field, entries.kinds[records.row]
    tensors = np.unique(home, return_index=True)[1]
    if (field < 0).any() or row.size != _FIELDS_OF[kinds[tensors]].sum() or (records.counts > _MANY).any():
        return False
    if np.unique(home * len(FIELDS) + field).size != row.size:  # one of them twice
        return False
    wrong = (_KIND[field] != kinds) | (records.lengths != records.counts * _of_dtype(records, _ITEMS, 0))
    if wrong.any():
        return False
    fields = ((name, np.flatnonzero(field == number)) for number, name in enumerate(FIELDS))
    return all(_fits(name, records, own, entries) for name, own in fields) and _paired(records)


def _of_dtype(records: _Records, table: Mapping[str, int], default: int = -1) -> Array:
    """Return for each record the number that ``table`` has for its element type."""
    return np.array([table.get(text, default) for text in records.spellings], np.int64)[records.dtype]


def _fits(name: str, records: _Records, own: Array, entries: EntryColumns) -> bool:
    """Whether the arrays of one field are of a type that it may have, and of the right sizes."""
    spellings = next(each.fields[name] for each in STRATEGIES.values() if name in each.fields)
    if not own.size:
        return True
    row, codes = records.row[own], _of_dtype(records, {text: at for at, text in enumerate(spellings)})[own]
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


def _paired(records: _Records) -> bool:
    """Whether sparse tensors have as many values as indices."""
    found = []
    for name in ("indices", "values"):
        own = records.field == _NUMBER[name]
        counts = np.zeros(int(records.home.max(initial=0)) + 1, np.int64)
        counts[records.home[own]] = records.counts[own]
        found.append(counts)
    return bool((found[0] == found[1]).all())
