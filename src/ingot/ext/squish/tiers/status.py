"""Determine the state of every tier of a Squish directory: complete, missing, incomplete, damaged or stale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ingot.artifacts.open import open as open_checkpoint
from ingot.errors import IngotError, UsageError
from ingot.ext.squish.npydir.names import FOLDER, MANIFEST, SIDECAR
from ingot.ext.squish.tiers import sentinel, snapshot
from ingot.ext.squish.tiers.gate import GateResult
from ingot.ext.squish.tiers.table import TENSORS, TIERS, Tier, tier_of
from ingot.model.store import Store
from ingot.reporting.report import Bytes, Column, Figure, Line, Report, Table, table_of
from ingot.stores.location import AnyPath, Location

SOURCE = (MANIFEST, FOLDER, SIDECAR)
"""Files and folders that tiers are built from, relative to the directory."""

COMPLETE = "complete"
MISSING = "missing"
INCOMPLETE = "incomplete"
DAMAGED = "damaged"
STALE = "stale"


@dataclass(frozen=True, slots=True)
class TierStatus:
    """The state of a tier.

    Parameters
    ----------
    tier : str
    number : int
        Number in the document's decision tree.
    state : str
        ``complete``; ``missing``; ``incomplete``: weights without a sentinel, the result of an interrupted run;
        ``damaged``: a sentinel without weights, or weights that differ from its record; ``stale``: the source tensors
        changed.
    why : str
        Reason for the state.
    path : str
        Location of the tier's weights.
    nbytes : int
        Size of the tier's files in bytes.
    raised : tuple of str
        Tensors of a complete packed tier of Ingot that have more bits than the tier's name states.
    gate : GateResult or None
        Result of the gate of a complete packed tier of Ingot.
    """

    tier: str
    number: int
    state: str
    why: str
    path: str
    nbytes: Bytes
    raised: tuple[str, ...] = ()
    gate: GateResult | None = None

    @property
    def usable(self) -> bool:
        """Whether the tier can be loaded."""
        return self.state == COMPLETE


def quality(raised: Sequence[str], gate: GateResult | None) -> list[str]:
    """Return lines that name the tensors with more bits and the result of the gate."""
    lines = []
    if raised:
        remaining = f" and {len(raised) - 3} more" if len(raised) > 3 else ""
        lines.append(f"{len(raised)} tensors with more bits: {', '.join(raised[:3])}{remaining}")
    if gate is not None:
        rise = f"{100 * gate.rise:+.2f} %"
        lines.append(f"perplexity {gate.perplexity:.4g} against {gate.reference:.4g} ({rise})")
    return lines


_TIERS = (
    Column("", head="tier"),
    Column("", head="number"),
    Column("", head="state"),
    Column("", head="why"),
    Column("", "bytes", "size"),
)


def status_report(path: AnyPath, tiers: Sequence[TierStatus], loads: Mapping[str, Any]) -> Report:
    """Return a report with the states of all tiers.

    ``loads`` maps each runtime to the ``Choice.report`` of the tier that it would load, or to None.
    """
    loads_texts = [
        f"{reader} loads {choice['tier']}: {choice['why']}" if choice else f"{reader} loads none"
        for reader, choice in loads.items()
    ]
    figures = [
        Figure("path", Location.parse(path).display),
        Figure("loads", loads, "data"),
        Figure("loads_texts", loads_texts, "texts", data=False),
    ]
    rows = [
        (item.tier, str(item.number), item.state, "; ".join([item.why, *quality(item.raised, item.gate)]), item.nbytes)
        for item in tiers
    ]
    tables = [table_of("tiers", tiers, TierStatus), Table("", _TIERS, rows, data=False)]
    return Report(figures, (), tables, [Line("{item}", items="loads_texts")])


def dropped_report(path: AnyPath, dropped: Sequence[TierStatus]) -> Report:
    """Return a report that lists the removed tiers."""
    figures = [Figure("path", Location.parse(path).display)]
    lines = []
    for index, item in enumerate(dropped):
        figures.append(Figure(f"size{index}", item.nbytes, "bytes", data=False))
        figures.append(Figure(f"path{index}", item.path, data=False))
        lines.append(Line(f"{{path{index}}}: tier {item.tier} removed, {{size{index}}}"))
    return Report(figures, lines or [Line("there was no built tier")], [table_of("dropped", dropped, TierStatus)])


def is_squish_directory(path: AnyPath) -> bool:
    """Return whether this folder contains Squish arrays or a tier."""
    return _squish_store(Location.parse(path)) is not None


def _squish_store(location: Location) -> Store | None:
    """Return a Squish directory as a store; None if the location is not a Squish directory."""
    try:
        store, name = location.find()
    except IngotError:
        return None
    return store if not name and holds_tiers(store) else None


def holds_tiers(store: Store) -> bool:
    """Return whether a folder contains squish's arrays or a tier."""
    top = store.list()
    if MANIFEST in top.files and FOLDER in top.folders:
        return True
    names = {*top.files, *top.folders}  # listings of web servers may omit hidden files
    candidates = (tier for tier in TIERS.values() if names & {tier.path, tier.sentinel})
    return any(mark_of(tier, store) is not None for tier in candidates)


def status(path: AnyPath) -> list[TierStatus]:
    """Return the state of every tier, in the order of the decision tree.

    This costs a few system calls per file. Files whose times changed since the build (copied, downloaded) are read, and
    their content is compared.

    Raises
    ------
    UsageError
        ``tier.no-directory``: the folder is not a Squish directory.
    """
    location = Location.parse(path)
    store = _squish_store(location)
    if store is None:
        raise UsageError(
            "expected a Squish directory: a folder with manifest.json and tensors/ "
            "(make one with `ingot convert SRC DIR --format npydir`)",
            rule="tier.no-directory",
            where=location.display,
        )
    return [status_of(store, tier) for tier in TIERS.values()]


def is_built(path: AnyPath, tier: str) -> bool:
    """Return whether a tier of this directory is complete; False if there is no such directory."""
    store = _squish_store(Location.parse(path))
    return store is not None and status_of(store, tier_of(tier)).usable


def status_of(store: Store, tier: Tier) -> TierStatus:
    """Return the state of one tier."""
    nbytes = sum(store.stat(name).size for name in tier_files(store, tier))
    state, why = _tensors(store) if tier is TENSORS else _built(store, tier)
    tier_status = TierStatus(tier.name, tier.number, state, why, Location.in_store(store, tier.path).display, nbytes)
    mark = mark_of(tier, store)
    written = sentinel.read(store, mark) if tier_status.usable and mark is not None else None
    if written is None:
        return tier_status
    return replace(tier_status, raised=written.raised, gate=written.gate)


def source_files(store: Store) -> list[str]:
    """Return the files of the source tensors; empty if the directory has only tiers."""
    return snapshot.files_under(store, SOURCE) if _has_tensors(store) else []


def _has_tensors(store: Store) -> bool:
    """Return whether the directory has the source tensors: a manifest and a folder ``tensors``."""
    return store.exists(MANIFEST) and FOLDER in store.list().folders


def tier_files(store: Store, tier: Tier) -> list[str]:
    """Return the files of a tier, without its sentinel."""
    return source_files(store) if tier is TENSORS else snapshot.files_under(store, (tier.path,))


def mark_of(tier: Tier, store: Store) -> str | None:
    """Return the path of the existing sentinel of a tier; None if there is none."""
    return next((mark for mark in tier.marks if store.exists(mark)), None)


def _tensors(store: Store) -> tuple[str, str]:
    if not _has_tensors(store):
        return MISSING, "the directory has only built tiers"
    return COMPLETE, "the source of the other tiers"


def _built(store: Store, tier: Tier) -> tuple[str, str]:
    mark = mark_of(tier, store)
    files = tier_files(store, tier)
    if mark is None:
        return (INCOMPLETE, "no sentinel: a run was interrupted") if files else (MISSING, "not built")
    if not files:
        return DAMAGED, f"{mark.rpartition('/')[2]} without {tier.path}"
    written = sentinel.read(store, mark)
    if written is None:
        return _state_by_times(store, tier, mark, files)
    return _state_by_record(store, tier, written)


def _state_by_record(store: Store, tier: Tier, written: sentinel.Sentinel) -> tuple[str, str]:
    """Return the state of a tier that Ingot built, and the reason, by comparing the files with the sentinel's
    record.
    """
    if written is sentinel.UNREADABLE:
        return DAMAGED, "the sentinel's record is damaged, or of a later version of Ingot"
    if written.tier != tier.name:
        return DAMAGED, f"the sentinel belongs to tier {written.tier}"
    damage = snapshot.difference(store, written.files)
    if damage is not None:
        return DAMAGED, damage
    source = source_files(store)
    changed = snapshot.difference(store, written.source, source) if source else None
    if changed is not None:
        return STALE, f"the tensors changed: {changed}"
    return COMPLETE, "unchanged" if source else "unchanged; its source tensors do not exist"


def _state_by_times(store: Store, tier: Tier, mark: str, files: list[str]) -> tuple[str, str]:
    """Return the state of a tier whose sentinel another program wrote, and the reason.

    The sentinel has no record, so times, names and shapes are compared.
    """
    mark_time = store.stat(mark).mtime_ns
    mark_name = mark.rpartition("/")[2]
    source = source_files(store)
    for name in source:
        if store.stat(name).mtime_ns > mark_time:
            return STALE, f"{name} is newer than {mark_name}"
    newer = next((name for name in files if store.stat(name).mtime_ns > mark_time), None)
    if newer is not None:
        return DAMAGED, f"{newer} is newer than {mark_name}"
    try:
        shapes = _shapes(Location.in_store(store, tier.path))
        source_shapes = _shapes(Location.in_store(store)) if source else shapes
    except IngotError as error:
        return DAMAGED, str(error)
    for name, shape in source_shapes.items():
        if shapes.get(name) != shape:
            return DAMAGED, f"expected {name} of shape {list(shape)}, found {_shape_text(shapes.get(name))}"
    return COMPLETE, "another program's sentinel: checked by times, names and shapes"


def _shape_text(shape: tuple[int, ...] | None) -> str:
    return "none" if shape is None else str(list(shape))


def _shapes(location: Location) -> Mapping[str, tuple[int, ...]]:
    with open_checkpoint(location, verify=False) as checkpoint:
        return {name: tensor.shape for name, tensor in checkpoint.items()}
