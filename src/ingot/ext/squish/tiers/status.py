"""Which tiers of a directory can be trusted, and why the others cannot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ingot.artifacts.open import open as open_checkpoint
from ingot.errors import IngotError, UsageError
from ingot.ext.squish.npydir.names import FOLDER, MANIFEST, SIDECAR
from ingot.ext.squish.tiers import sentinel, snapshot
from ingot.ext.squish.tiers.gate import Passed
from ingot.ext.squish.tiers.table import TENSORS, TIERS, Tier, tier_of
from ingot.model.store import Store
from ingot.reporting.report import Bytes, Column, Figure, Line, Report, Table, table_of
from ingot.stores.location import AnyPath, Location

SOURCE = (MANIFEST, FOLDER, SIDECAR)
"""What the tiers are made from, relative to the directory."""

COMPLETE = "complete"
MISSING = "missing"
INCOMPLETE = "incomplete"
DAMAGED = "damaged"
STALE = "stale"


@dataclass(frozen=True, slots=True)
class TierStatus:
    """How one tier stands.

    Parameters
    ----------
    tier : str
    number : int
        In the document's decision tree.
    state : str
        ``complete``; ``missing``; ``incomplete``: weights without a sentinel, as a run that was killed leaves them;
        ``damaged``: a sentinel without its weights, or other weights than it says; ``stale``: the tensors changed.
    why : str
        In words, where it is not plain.
    path : str
        Where the tier's weights lie.
    nbytes : int
        Bytes of its files.
    raised : tuple of str
        Tensors that have more bits than the tier's name says, of a complete packed tier that Ingot made.
    gate : Passed or None
        What its gate found, likewise.
    """

    tier: str
    number: int
    state: str
    why: str
    path: str
    nbytes: Bytes
    raised: tuple[str, ...] = ()
    gate: Passed | None = None

    @property
    def usable(self) -> bool:
        """Whether it may be loaded."""
        return self.state == COMPLETE


def quality(raised: Sequence[str], gate: Passed | None) -> list[str]:
    """Return which tensors have more bits, and what the gate found, as lines."""
    lines = []
    if raised:
        rest = f" and {len(raised) - 3} more" if len(raised) > 3 else ""
        lines.append(f"{len(raised)} tensors with more bits: {', '.join(raised[:3])}{rest}")
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
    """Return how every tier stands; ``loads`` has for each reader what it would load (``Choice.report``), or None."""
    told = [
        f"{reader} loads {choice['tier']}: {choice['why']}" if choice else f"{reader} loads none"
        for reader, choice in loads.items()
    ]
    figures = [
        Figure("path", Location.parse(path).display),
        Figure("loads", loads, "data"),
        Figure("told", told, "texts", data=False),
    ]
    rows = [
        (item.tier, str(item.number), item.state, "; ".join([item.why, *quality(item.raised, item.gate)]), item.nbytes)
        for item in tiers
    ]
    tables = [table_of("tiers", tiers, TierStatus), Table("", _TIERS, rows, data=False)]
    return Report(figures, (), tables, [Line("{item}", items="told")])


def dropped_report(path: AnyPath, dropped: Sequence[TierStatus]) -> Report:
    """Return which tiers were removed."""
    figures = [Figure("path", Location.parse(path).display)]
    lines = []
    for index, item in enumerate(dropped):
        figures.append(Figure(f"size{index}", item.nbytes, "bytes", data=False))
        figures.append(Figure(f"path{index}", item.path, data=False))
        lines.append(Line(f"{{path{index}}}: tier {item.tier} removed, {{size{index}}}"))
    return Report(figures, lines or [Line("no built tier was there")], [table_of("dropped", dropped, TierStatus)])


def is_squish_directory(path: AnyPath) -> bool:
    """Return whether this folder contains Squish arrays or a tier."""
    return _squish_store(Location.parse(path)) is not None


def _squish_store(location: Location) -> Store | None:
    """Return a Squish directory as a store; None for anything else."""
    try:
        store, name = location.find()
    except IngotError:
        return None
    return store if not name and holds_tiers(store) else None


def holds_tiers(store: Store) -> bool:
    """Whether a folder holds squish's arrays or one of its tiers."""
    top = store.list()
    if MANIFEST in top.files and FOLDER in top.folders:
        return True
    there = {*top.files, *top.folders}  # a page of links may leave hidden names out
    likely = (tier for tier in TIERS.values() if there & {tier.path, tier.sentinel})
    return any(mark_of(tier, store) is not None for tier in likely)


def status(path: AnyPath) -> list[TierStatus]:
    """Return the state of every tier, in the order of the decision tree.

    Costs a few system calls a file; files that were touched since the tier was built (copied, downloaded) are read and
    compared by content.

    Raises
    ------
    UsageError
        ``tier.no-directory``: the folder is no Squish directory.
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
    """Return the files that tiers are made from; empty if only tiers are left."""
    return snapshot.files_under(store, SOURCE) if _has_tensors(store) else []


def _has_tensors(store: Store) -> bool:
    """Whether the tensors are there: a manifest alone names safe keys."""
    return store.exists(MANIFEST) and FOLDER in store.list().folders


def tier_files(store: Store, tier: Tier) -> list[str]:
    """Return the files that a tier consists of, its sentinel not among them."""
    return source_files(store) if tier is TENSORS else snapshot.files_under(store, (tier.path,))


def mark_of(tier: Tier, store: Store) -> str | None:
    """Return the sentinel that marks a tier; None if there is none."""
    return next((mark for mark in tier.marks if store.exists(mark)), None)


def _tensors(store: Store) -> tuple[str, str]:
    if not _has_tensors(store):
        return MISSING, "only built tiers are here"
    return COMPLETE, "what the other tiers are built from"


def _built(store: Store, tier: Tier) -> tuple[str, str]:
    mark = mark_of(tier, store)
    files = tier_files(store, tier)
    if mark is None:
        return (INCOMPLETE, "no sentinel: a run was interrupted") if files else (MISSING, "not built")
    if not files:
        return DAMAGED, f"{mark.rpartition('/')[2]} without {tier.path}"
    written = sentinel.read(store, mark)
    if written is None:
        return _foreign(store, tier, mark, files)
    return _own(store, tier, written)


def _own(store: Store, tier: Tier, written: sentinel.Sentinel) -> tuple[str, str]:
    """Judge a tier by what Ingot wrote down when it was built."""
    if written is sentinel.UNREADABLE:
        return DAMAGED, "the sentinel's record is garbled, or of a later version of Ingot"
    if written.tier != tier.name:
        return DAMAGED, f"the sentinel is of tier {written.tier}"
    wrong = snapshot.difference(store, written.files)
    if wrong is not None:
        return DAMAGED, wrong
    source = source_files(store)
    changed = snapshot.difference(store, written.source, source) if source else None
    if changed is not None:
        return STALE, f"the tensors changed: {changed}"
    return COMPLETE, "as built" if source else "as built; the tensors it was built from are gone"


def _foreign(store: Store, tier: Tier, mark: str, files: list[str]) -> tuple[str, str]:
    """Judge a tier whose maker left an empty sentinel: by times, names and shapes, which is all there is."""
    made, last = store.stat(mark).mtime_ns, mark.rpartition("/")[2]
    source = source_files(store)
    for name in source:
        if store.stat(name).mtime_ns > made:
            return STALE, f"{name} is newer than {last}"
    late = next((name for name in files if store.stat(name).mtime_ns > made), None)
    if late is not None:
        return DAMAGED, f"{late} is newer than {last}"
    try:
        shapes = _shapes(Location.in_store(store, tier.path))
        wanted = _shapes(Location.in_store(store)) if source else shapes
    except IngotError as error:
        return DAMAGED, str(error)
    for name, shape in wanted.items():
        if shapes.get(name) != shape:
            return DAMAGED, f"expected {name} of shape {list(shape)}, found {_found(shapes.get(name))}"
    return COMPLETE, "another program's sentinel: checked by times, names and shapes"


def _found(shape: tuple[int, ...] | None) -> str:
    return "none" if shape is None else str(list(shape))


def _shapes(location: Location) -> Mapping[str, tuple[int, ...]]:
    with open_checkpoint(location, verify=False) as checkpoint:
        return {name: tensor.shape for name, tensor in checkpoint.items()}
