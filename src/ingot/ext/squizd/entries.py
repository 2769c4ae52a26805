"""Assign scale entries to tensors by ``tensor_id`` (SQUIZD document, section 8)."""

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
from ingot.ext.squizd.scales import Run, TableRanges, entries_at, runs
from ingot.model.bytesource import ByteSource
from ingot.model.reading.ranges import HeaderSource

Names = dict[int, str]
_FIELDS = ("first", "second")


@dataclass(frozen=True, slots=True)
class _DeclaredRun:
    """The scale entries of a tensor in one round of the scale tables, as the directory states them.

    ``round`` is 0 for the first round, which has one entry for each quantized matrix. It is 1 for the second round,
    which has the entries of sub-blocks. ``run`` is the offset of the first entry and the number of entries. ``id`` is
    the id that every entry must have.
    """

    name: str
    round: int
    run: tuple[int, int]
    id: int


def with_entries(
    source: HeaderSource, scaled: Mapping[str, Entry], tables: TableRanges, location: str
) -> Mapping[str, Entry]:
    """Return ``scaled`` with checked and, if necessary, corrected ranges of scale entries.

    ``scaled`` contains the directory's entries of all tensors with scales, by name. If the scale entries at a stated
    offset have another id, entries of the same round with the tensor's id are used instead. Only the ids of a range's
    first and last entry are checked here; the other ids are checked when they are read.

    Raises
    ------
    FormatError
        ``squizd.scale-missing``, ``squizd.scale-count``, ``squizd.scale-entry``, ``squizd.scale-id``,
        ``squizd.scale-rounds``.
    """
    if scaled and not tables:
        raise FormatError(
            "squizd.scale-missing",
            f"expected scale tables for {len(scaled)} matrices, but they are missing",
            where=location,
        )
    firsts = sum(count for _, count in tables[:1])
    if firsts != len(scaled):
        raise FormatError(
            "squizd.scale-count",
            f"expected {len(scaled)} entries in the first scale table, one per quantized matrix, found {firsts}",
            where=location,
        )
    declared = list(_declared_runs(scaled))
    rounds = (tables[:1], tables[1:])
    for item in declared:
        _check_inside(item.run, rounds[item.round], f"{location}: tensor {item.name[:200]!r}")
    misplaced = _misplaced(source, declared)
    if misplaced:
        scaled = _relocate(source, scaled, [declared[index] for index in misplaced], rounds, location)
        declared = list(_declared_runs(scaled))
        _require_ids(source, declared, location)
    _check_neutral(source, [item.run[0] for item in declared if not item.round and scaled[item.name].second], location)
    ranges = sorted(item.run for item in declared)
    for (start, count), (following, _) in pairwise(ranges):
        if start + count * SCALE_ENTRY > following:
            raise FormatError(
                "squizd.scale-entry",
                "expected scale entries that no other tensor uses, found entries of two tensors",
                where=location,
            )
    return scaled


def _declared_runs(scaled: Mapping[str, Entry]) -> Iterator[_DeclaredRun]:
    for name, entry in scaled.items():
        id = tensor_id(entry.layer, name)
        for round, (run, round_id) in enumerate(((entry.first, id), (entry.second, id | SUB_BLOCK_BIT))):
            if run is not None and run[1]:
                yield _DeclaredRun(name, round, run, round_id)


def _check_inside(run: tuple[int, int], tables: TableRanges, location: str) -> None:
    """Check that a range of entries is in a table and aligned to its entries."""
    offset, count = run
    table = bisect_right(tables, offset, key=itemgetter(0)) - 1
    start, entries = tables[table] if table >= 0 else (0, 0)
    offset_in_table = offset - start
    if offset_in_table % SCALE_ENTRY or count > entries - offset_in_table // SCALE_ENTRY:
        raise FormatError(
            "squizd.scale-entry",
            f"expected {count} scale entries inside a table, found them at {offset}",
            where=location,
        )


def _misplaced(source: HeaderSource, declared: Sequence[_DeclaredRun]) -> list[int]:
    """Return the indices of the ``declared`` ranges whose first or last entry does not have the id of their tensor."""
    ends = [item.run[0] + last * SCALE_ENTRY for item in declared for last in (0, item.run[1] - 1)]
    ids = np.repeat(np.array([item.id for item in declared], np.uint64), 2)
    different = np.flatnonzero(entries_at(source, ends)["id"] != ids)
    return sorted({int(index) // 2 for index in different})


def _require_ids(source: HeaderSource, declared: Sequence[_DeclaredRun], location: str) -> None:
    for index in _misplaced(source, declared)[:1]:
        item = declared[index]
        raise FormatError(
            "squizd.scale-id",
            f"expected scale entries of tensor id {item.id:#018x}, but they are missing or differ",
            where=f"{location}: tensor {item.name[:200]!r}",
        )


def _relocate(
    source: ByteSource,
    scaled: Mapping[str, Entry],
    misplaced: Sequence[_DeclaredRun],
    rounds: Sequence[TableRanges],
    location: str,
) -> Mapping[str, Entry]:
    """Return ``scaled`` with the ranges in ``misplaced`` replaced by the actual ranges of entries with the tensor's id.

    A range is replaced only if exactly one run of entries of its round has the id, and the run has the stated length.
    """
    max_runs = 2 * len(scaled) + 2
    tensors = dict(scaled)
    for round in {item.round for item in misplaced}:
        by_id: dict[int, Run | None] = {}
        for run in (run for offset, count in rounds[round] for run in runs(source, offset, count, max_runs, location)):
            by_id[run.id] = None if run.id in by_id else run
        for item in misplaced:
            run_of_id = by_id.get(item.id) if item.round == round else None
            if run_of_id is not None and run_of_id.count == item.run[1]:
                changed = {_FIELDS[round]: (run_of_id.offset, run_of_id.count)}
                tensors[item.name] = msgspec.structs.replace(tensors[item.name], **changed)
    return tensors


def _check_neutral(source: HeaderSource, firsts: Sequence[int], location: str) -> None:
    entries = entries_at(source, firsts)
    differing = np.flatnonzero((entries["scale"] != 1.0) | (entries["zero"] != 0.0))
    if differing.size:
        raise FormatError(
            "squizd.scale-rounds",
            "expected scale 1 and zero 0 in the first round of matrices with sub-block scales, found "
            f"{entries['scale'][differing[0]]:g} and {entries['zero'][differing[0]]:g}",
            where=location,
        )


def rounds_of(
    source: ByteSource, tables: TableRanges, matrices: int, location: str
) -> tuple[list[Run], dict[int, Run]]:
    """Split the scale entries of a file without a directory into the entries of the first and of the second round.

    The first round has one entry for each of the ``matrices`` quantized matrices. Other writers may use all 64 bits of
    a hash as an id, so bit 63 alone does not identify an entry of the second round. If the number of entries without
    bit 63 is ``matrices``, these entries are the first round. Otherwise the first ``matrices`` entries are the first
    round, and all other entries must have bit 63.

    Returns
    -------
    firsts, seconds
        The entries of the first round in table order, and the ranges of the second round, keyed by id with bit 63
        cleared.

    Raises
    ------
    FormatError
        ``squizd.scale-missing``, ``squizd.scale-count``, ``squizd.scale-id``.
    """
    if matrices and not tables:
        raise FormatError(
            "squizd.scale-missing", f"expected a scale table for {matrices} matrices, but it is missing", where=location
        )
    all_runs = [run for offset, count in tables for run in runs(source, offset, count, 2 * matrices + 2, location)]
    unmarked = [run for run in all_runs if not run.id & SUB_BLOCK_BIT]
    if sum(run.count for run in unmarked) == matrices:
        firsts = _split(unmarked, matrices)[0]
        second_round = [run for run in all_runs if run.id & SUB_BLOCK_BIT]
    else:
        firsts, second_round = _split(all_runs, matrices)
        if len(firsts) != matrices or not _belong(second_round, firsts):
            raise FormatError(
                "squizd.scale-count",
                f"expected {matrices} entries in the first round of scales, one per quantized matrix, found "
                f"{sum(run.count for run in unmarked)} without bit 63 of {sum(run.count for run in all_runs)} in all",
                where=location,
            )
    if not _belong(second_round, firsts):
        raise FormatError(
            "squizd.scale-id",
            "expected contiguous sub-block scales of a matrix under the id of one entry of the first round, found "
            "other ids",
            where=location,
        )
    return firsts, {base_id(run): run for run in second_round}


def base_id(run: Run) -> int:
    """Return the id of the run's entries, with bit 63 cleared."""
    return run.id & ~SUB_BLOCK_BIT


def _split(all_runs: Sequence[Run], count: int) -> tuple[list[Run], list[Run]]:
    """Split ``all_runs`` after ``count`` entries.

    Returns the first ``count`` entries, each as a run of one entry, and the runs of all following entries.
    """
    firsts: list[Run] = []
    following: list[Run] = []
    for run in all_runs:
        singles = min(run.count, count - len(firsts))
        firsts += [Run(run.offset + SCALE_ENTRY * index, 1, run.id) for index in range(singles)]
        if singles < run.count:
            following.append(Run(run.offset + SCALE_ENTRY * singles, run.count - singles, run.id))
    return firsts, following


def _belong(second_round: Sequence[Run], firsts: Sequence[Run]) -> bool:
    """Return whether the second round fits the first.

    Each of its ranges must have a unique id with bit 63 set. Apart from this bit, exactly one entry of the first round
    must have the same id.
    """
    ids = {base_id(run) for run in second_round}
    owners = Counter(map(base_id, firsts))
    marked = all(run.id & SUB_BLOCK_BIT for run in second_round)
    return marked and len(ids) == len(second_round) and all(owners[id] == 1 for id in ids)


def assign_entries(
    firsts: Sequence[Run], layers: Sequence[int], names_of: Callable[[int], Names], location: str
) -> list[tuple[Run, str | None]]:
    """Return for every matrix of a file without a directory its first-round entry, and its name if the id implies one.

    If an id is that of a common tensor name, it identifies the name and the layer; bit 63 is ignored. An entry with
    this id is assigned to the next matrix of the layer. Entries with other ids are assigned by position. If an id
    occurs twice, all entries are assigned by position.

    Parameters
    ----------
    firsts : sequence of Run
        Entries in the order of the table, one for each matrix.
    layers : sequence of int
        The layer of each matrix, ascending.
    names_of : callable
        Returns common names by id for a layer.

    Raises
    ------
    FormatError
        ``squizd.scale-id``: the entries are not in the order of the matrices, and their ids name a layer more or less
        often than it has matrices.
    """
    ids = {base_id(run) for run in firsts}
    layer_and_name: dict[int, tuple[int, str]] = {}
    for layer in dict.fromkeys(layers):
        layer_and_name |= {id: (layer, name) for id, name in names_of(layer).items() if id in ids}
    layers_of_entries = [layer_and_name[base_id(run)][0] if base_id(run) in layer_and_name else None for run in firsts]
    in_order = all(
        layer_of_entry in (None, layer) for layer_of_entry, layer in zip(layers_of_entries, layers, strict=True)
    )
    if in_order or len(ids) != len(firsts):
        return [
            (
                run,
                layer_and_name[base_id(run)][1] if base_id(run) in layer_and_name and layer_of_entry == layer else None,
            )
            for run, layer_of_entry, layer in zip(firsts, layers_of_entries, layers, strict=True)
        ]
    queues: dict[int | None, deque[Run]] = {}
    for run, layer_of_entry in zip(firsts, layers_of_entries, strict=True):
        queues.setdefault(layer_of_entry, deque()).append(run)
    matrices = Counter(layers)
    for layer_of_entry, queue in queues.items():
        if layer_of_entry is not None and len(queue) != matrices[layer_of_entry]:
            raise FormatError(
                "squizd.scale-id",
                f"expected {matrices[layer_of_entry]} entries under ids of layer {layer_of_entry}, one per quantized "
                "matrix, found "
                f"{len(queue)} and entries that are not in the order of the matrices",
                where=location,
            )
    ordered = (queues[layer if layer in queues else None].popleft() for layer in layers)
    return [(run, layer_and_name[base_id(run)][1] if base_id(run) in layer_and_name else None) for run in ordered]
