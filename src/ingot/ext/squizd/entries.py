"""Whose scale entries are whose: by ``tensor_id``, wherever in their round they lie (document, section 8)."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter

import msgspec
import numpy as np

from ingot.errors import FormatError
from ingot.ext.squizd.directory import Entry
from ingot.ext.squizd.layout import SCALE_ENTRY, SUB_BLOCK_BIT, tensor_id
from ingot.ext.squizd.scales import Run, TablePlaces, entries_at, runs
from ingot.model.bytesource import ByteSource
from ingot.model.reading.ranges import HeaderSource

Names = dict[int, str]
_FIELDS = ("first", "second")


@dataclass(frozen=True, slots=True)
class _Stated:
    """Entries as the directory states them: of which tensor and round, where, and under which id."""

    name: str
    round: int
    run: tuple[int, int]
    id: int


def with_entries(
    source: HeaderSource, scaled: Mapping[str, Entry], tables: TablePlaces, where: str
) -> Mapping[str, Entry]:
    """Check that every quantized matrix has entries under its id; return them with the places that these lie at.

    ``scaled`` are all tensors of a directory that state such.

    Entries that are not where the directory says, but elsewhere in their round under the tensor's id, are taken from
    there. Ids between the first and last of a run are checked when they are read.

    Raises
    ------
    FormatError
        ``squizd.scale-missing``, ``squizd.scale-count``, ``squizd.scale-entry``, ``squizd.scale-id``,
        ``squizd.scale-rounds``.
    """
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
    stated = list(_stated(scaled))
    rounds = (tables[:1], tables[1:])
    for item in stated:
        _check_inside(item.run, rounds[item.round], f"{where}: tensor {item.name[:200]!r}")
    wrong = _wrong(source, stated)
    if wrong:
        scaled = _moved(source, scaled, [stated[index] for index in wrong], rounds, where)
        stated = list(_stated(scaled))
        _require_ids(source, stated, where)
    _check_neutral(source, [item.run[0] for item in stated if not item.round and scaled[item.name].second], where)
    taken = sorted(item.run for item in stated)
    for (start, count), (following, _) in pairwise(taken):
        if start + count * SCALE_ENTRY > following:
            raise FormatError("squizd.scale-entry", "expected scale entries of its own for every tensor", where=where)
    return scaled


def _stated(scaled: Mapping[str, Entry]) -> Iterator[_Stated]:
    for name, entry in scaled.items():
        id = tensor_id(entry.layer, name)
        for round, (run, own) in enumerate(((entry.first, id), (entry.second, id | SUB_BLOCK_BIT))):
            if run is not None and run[1]:
                yield _Stated(name, round, run, own)


def _check_inside(run: tuple[int, int], tables: TablePlaces, where: str) -> None:
    """Check that a run of entries lies in a table, on its grid."""
    offset, count = run
    table = bisect_right(tables, offset, key=itemgetter(0)) - 1
    start, entries = tables[table] if table >= 0 else (0, 0)
    behind = offset - start
    if behind % SCALE_ENTRY or count > entries - behind // SCALE_ENTRY:
        raise FormatError(
            "squizd.scale-entry", f"expected {count} scale entries inside a table, found them at {offset}", where=where
        )


def _wrong(source: HeaderSource, stated: Sequence[_Stated]) -> list[int]:
    """Return which runs begin or end with another id than their own."""
    ends = [item.run[0] + last * SCALE_ENTRY for item in stated for last in (0, item.run[1] - 1)]
    ids = np.repeat(np.array([item.id for item in stated], np.uint64), 2)
    wrong = np.flatnonzero(entries_at(source, ends)["id"] != ids)
    return sorted({int(index) // 2 for index in wrong})


def _require_ids(source: HeaderSource, stated: Sequence[_Stated], where: str) -> None:
    for index in _wrong(source, stated)[:1]:
        item = stated[index]
        raise FormatError(
            "squizd.scale-id",
            f"expected scale entries of tensor id {item.id:#018x}, found none or others under it",
            where=f"{where}: tensor {item.name[:200]!r}",
        )


def _moved(
    source: ByteSource,
    scaled: Mapping[str, Entry],
    astray: Sequence[_Stated],
    rounds: Sequence[TablePlaces],
    where: str,
) -> Mapping[str, Entry]:
    """Return the tensors with entries that lie elsewhere in their round, together and once under their id."""
    most = 2 * len(scaled) + 2
    tensors = dict(scaled)
    for round in {item.round for item in astray}:
        by_id: dict[int, Run | None] = {}
        for run in (run for offset, count in rounds[round] for run in runs(source, offset, count, most, where)):
            by_id[run.id] = None if run.id in by_id else run
        for item in astray:
            own = by_id.get(item.id) if item.round == round else None
            if own is not None and own.count == item.run[1]:
                changed = {_FIELDS[round]: (own.offset, own.count)}
                tensors[item.name] = msgspec.structs.replace(tensors[item.name], **changed)
    return tensors


def _check_neutral(source: HeaderSource, firsts: Sequence[int], where: str) -> None:
    entries = entries_at(source, firsts)
    odd = np.flatnonzero((entries["scale"] != 1.0) | (entries["zero"] != 0.0))
    if odd.size:
        raise FormatError(
            "squizd.scale-rounds",
            "expected scale 1 and zero 0 in the first round beside sub-block scales, found "
            f"{entries['scale'][odd[0]]:g} and {entries['zero'][odd[0]]:g}",
            where=where,
        )


def rounds_of(source: ByteSource, tables: TablePlaces, matrices: int, where: str) -> tuple[list[Run], dict[int, Run]]:
    """Split the entries of a file without names into the first round, one by one, and runs of the second round.

    Other writers may use all 64 bits of a hash as an id, so bit 63 alone does not mark an entry of the second round.
    The first round is the entries without bit 63 if there is one for each matrix. Otherwise it is the first
    ``matrices`` entries, and all others must have bit 63. Both rules never give different rounds for the same entries.

    Returns
    -------
    firsts, seconds
        Entries of the first round in table order, and runs of the second round by their id without bit 63.

    Raises
    ------
    FormatError
        ``squizd.scale-missing``, ``squizd.scale-count``, ``squizd.scale-id``.
    """
    if matrices and not tables:
        raise FormatError(
            "squizd.scale-missing", f"expected a scale table for {matrices} matrices, found none", where=where
        )
    all_runs = [run for offset, count in tables for run in runs(source, offset, count, 2 * matrices + 2, where)]
    unmarked = [run for run in all_runs if not run.id & SUB_BLOCK_BIT]
    if sum(run.count for run in unmarked) == matrices:
        firsts, others = _split(unmarked, matrices)[0], [run for run in all_runs if run.id & SUB_BLOCK_BIT]
    else:
        firsts, others = _split(all_runs, matrices)
        if len(firsts) != matrices or not _belong(others, firsts):
            raise FormatError(
                "squizd.scale-count",
                f"expected {matrices} entries in the first round of scales, one per quantized matrix, found "
                f"{sum(run.count for run in unmarked)} without bit 63 of {sum(run.count for run in all_runs)} in all",
                where=where,
            )
    if not _belong(others, firsts):
        raise FormatError(
            "squizd.scale-id",
            "expected the sub-block scales of a matrix together, under the id of one entry of the first round; found "
            "others",
            where=where,
        )
    return firsts, {base_id(run): run for run in others}


def base_id(run: Run) -> int:
    """Return the id of entries without bit 63."""
    return run.id & ~SUB_BLOCK_BIT


def _split(all_runs: Sequence[Run], count: int) -> tuple[list[Run], list[Run]]:
    """Return the first ``count`` entries as runs of one entry, and the runs after them."""
    firsts: list[Run] = []
    others: list[Run] = []
    for run in all_runs:
        taken = min(run.count, count - len(firsts))
        firsts += [Run(run.offset + SCALE_ENTRY * index, 1, run.id) for index in range(taken)]
        if taken < run.count:
            others.append(Run(run.offset + SCALE_ENTRY * taken, run.count - taken, run.id))
    return firsts, others


def _belong(others: Sequence[Run], firsts: Sequence[Run]) -> bool:
    """Whether each run of the second round has an id of its own that exactly one entry of the first round has."""
    ids, owners = {base_id(run) for run in others}, Counter(map(base_id, firsts))
    marked = all(run.id & SUB_BLOCK_BIT for run in others)
    return marked and len(ids) == len(others) and all(owners[id] == 1 for id in ids)


def assigned(
    firsts: Sequence[Run], layers: Sequence[int], names_of: Callable[[int], Names], where: str
) -> list[tuple[Run, str | None]]:
    """Give every matrix of a file without names its first-round entry, and the usual name that the entry's id tells.

    An id tells the layer, with or without bit 63. Entries of known ids go to their layer's matrices, in order; entries
    of other ids, and all entries where an id occurs twice, go by position.

    Parameters
    ----------
    firsts : sequence of Run
        Entries in the order of the table, as many as there are matrices.
    layers : sequence of int
        The layer of each matrix, ascending.
    names_of : callable
        Usual names by id in a layer.

    Raises
    ------
    FormatError
        ``squizd.scale-id``: more entries of a layer than it has matrices, or fewer where entries are not in order.
    """
    ids = {base_id(run) for run in firsts}
    known: dict[int, tuple[int, str]] = {}
    for layer in dict.fromkeys(layers):
        known |= {id: (layer, name) for id, name in names_of(layer).items() if id in ids}
    homes = [known[base_id(run)][0] if base_id(run) in known else None for run in firsts]
    in_order = all(home in (None, layer) for home, layer in zip(homes, layers, strict=True))
    if in_order or len(ids) != len(firsts):
        return [
            (run, known[base_id(run)][1] if base_id(run) in known and home == layer else None)
            for run, home, layer in zip(firsts, homes, layers, strict=True)
        ]
    queues: dict[int | None, deque[Run]] = {}
    for run, home in zip(firsts, homes, strict=True):
        queues.setdefault(home, deque()).append(run)
    matrices = Counter(layers)
    for home, queue in queues.items():
        if home is not None and len(queue) != matrices[home]:
            raise FormatError(
                "squizd.scale-id",
                f"expected {matrices[home]} entries under ids of layer {home}, one per quantized matrix, found "
                f"{len(queue)} and entries that are not in the order of the matrices",
                where=where,
            )
    taken = (queues[layer if layer in queues else None].popleft() for layer in layers)
    return [(run, known[base_id(run)][1] if base_id(run) in known else None) for run in taken]
