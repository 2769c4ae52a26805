"""Make a tier from the tensors, or remove it: one process at a time; it counts once its sentinel lies."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from filelock import FileLock, Timeout

from ingot.core.atomic import flush
from ingot.core.oserrors import write_error
from ingot.core.paths import local_path
from ingot.core.progress import ProgressCallback
from ingot.errors import CodecError, IntegrityError, ResourceError, UsageError
from ingot.model.report import Bytes, Figure, Line, Report, Seconds, figures_of
from ingot.ops.convert.convert import convert
from ingot.ops.open import open as open_checkpoint
from ingot.ops.squish import sentinel, snapshot
from ingot.ops.squish.gate import Gate, Passed, Search
from ingot.ops.squish.sentinel import Sentinel
from ingot.ops.squish.status import (
    TierStatus,
    is_squish_directory,
    mark_of,
    quality,
    source_files,
    status_of,
    tier_files,
)
from ingot.ops.squish.table import BUILT, TIERS, Tier, tier_of
from ingot.recipes.load import load_recipe
from ingot.recipes.recipe import Recipe

LOCK = ".ingot-tiers.lock"
_PATIENCE = 3600.0  # seconds to wait for another process that builds; a lock whose holder died is free at once


@dataclass(frozen=True, slots=True)
class BuildReport:
    """A tier that is there now: ``built`` is False where it was complete before. Bytes of its files, wall seconds.

    ``raised`` are the tensors that have more bits than its name says, ``gate`` is what its gate found.
    """

    tier: str
    path: str
    built: bool
    nbytes: Bytes
    seconds: Seconds
    raised: tuple[str, ...] = ()
    gate: Passed | None = None

    def report(self) -> Report:
        """Return all figures."""
        what = "built in {seconds}" if self.built else "complete already"
        figures = [*figures_of(self), Figure("quality", quality(self.raised, self.gate), "texts", data=False)]
        return Report(figures, [Line(f"{{path}}: tier {{tier}}, {{nbytes}}, {what}"), Line("{item}", each="quality")])


def build(
    path: str | PathLike[str],
    tier: str,
    *,
    max_ram: int | str | None = None,
    force: bool = False,
    gate: Gate | None = None,
    progress: ProgressCallback | None = None,
) -> BuildReport:
    """Build a tier from the tensors of a Squish directory, tensor by tensor, and mark it complete.

    Weights are written beside their final place, flushed and renamed; the sentinel, with what the tier was made from,
    follows as the last step. A run that is killed leaves no sentinel. A second process waits for the first.

    Parameters
    ----------
    path : path
        The directory.
    tier : str
        One of ``BUILT``.
    max_ram : int or str, optional
        Ceiling of anonymous memory, as for ``convert``.
    force : bool
        Build it anew though it is complete.
    gate : Gate, optional
        Of the packed tiers: mark it only if the model passes, with more bits for some tensors where it must be. A
        complete tier is built anew unless it passed the same gate.
    progress : callable, optional

    Raises
    ------
    UsageError
        ``tier.no-directory``, ``tier.unknown``, ``tier.not-built``: there is no such step; ``tier.no-source``;
        ``tier.no-gate``: a gate for a tier that is exact.
    CodecError
        ``tier.gate``: the model does not pass; the tier is gone.
    IntegrityError
        ``tier.source-changed``: the tensors were written to meanwhile.
    ResourceError
        ``tier.locked``; ``tier.link``: a link in the tier's place; those of ``convert``: disk full, read-only, ...
    """
    started, folder, wanted = time.perf_counter(), local_path(path), tier_of(tier)
    _require_buildable(folder, wanted)
    if gate is not None and wanted.bits is None:
        raise UsageError(f"tier {tier} is not quantized: there is nothing to gate", rule="tier.no-gate")
    with building(folder):
        current = status_of(folder, wanted)
        needed = force or not current.usable or (gate is not None and not _passed(current.gate, gate))
        if needed:
            _build(folder, wanted, max_ram, gate, progress)
            current = status_of(folder, wanted)
    seconds = time.perf_counter() - started
    return BuildReport(tier, current.path, needed, current.nbytes, seconds, current.raised, current.gate)


def _passed(passed: Passed | None, gate: Gate) -> bool:
    return passed is not None and passed.text == gate.text and passed.rise <= gate.max_rise


def drop(path: str | PathLike[str], tier: str | None = None) -> list[TierStatus]:
    """Remove a built tier, or all of them; return what each was before.

    The sentinel goes first, so that a drop that is killed leaves nothing that looks complete. Tiers are not removed
    where the tensors they were built from are gone.

    Raises
    ------
    UsageError
        ``tier.no-directory``, ``tier.unknown``, ``tier.not-built``, ``tier.last``.
    """
    folder = local_path(path)
    tiers = [TIERS[name] for name in BUILT] if tier is None else [tier_of(tier)]
    _require_buildable(folder, *tiers, rule="tier.last")
    with building(folder):
        before = [status_of(folder, dropped) for dropped in tiers]
        try:
            for dropped in tiers:
                unmark(folder, dropped)
                _remove(dropped.location(folder))
        except OSError as error:
            raise write_error(error, str(folder)) from error
    return [dropped for dropped in before if dropped.state != "missing"]


@contextmanager
def building(folder: Path) -> Iterator[None]:
    """Hold the directory's lock; wait for another process that holds it.

    Raises ``ResourceError`` ``tier.locked`` after an hour, ``store.read-only`` where nothing can be written.
    """
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=_PATIENCE)
    except Timeout as error:
        raise ResourceError(
            "another process has been building a tier for an hour; wait for it, or load with cache=False",
            rule="tier.locked",
            where=str(folder),
        ) from error
    except OSError as error:
        raise write_error(error, str(folder / LOCK)) from error
    try:
        yield
    finally:
        lock.release()


def unmark(folder: Path, tier: Tier) -> None:
    """Remove a tier's sentinels, for good before anything else happens to its weights."""
    while (mark := mark_of(tier, folder)) is not None:
        mark.unlink()
        flush(mark.parent)


def _build(
    folder: Path, tier: Tier, max_ram: int | str | None, gate: Gate | None, progress: ProgressCallback | None
) -> None:
    before = _times(folder)
    mark, location = tier.mark(folder), tier.location(folder)
    assert mark is not None
    assert tier.recipe is not None

    def make(recipe: Recipe) -> None:
        convert(
            folder,
            location,
            recipe,
            tier.format,
            max_ram,
            progress=progress,
            allow_requantize=True,  # a tier never replaces what it is made from
            overwrite=True,
            measure=False,
        )

    _require_own(folder, tier)
    recipe = load_recipe(tier.recipe)
    search = None if gate is None else Search(folder, recipe, make, location, gate)
    try:
        unmark(folder, tier)
    except OSError as error:
        raise write_error(error, str(mark)) from error
    passed = None
    if search is None:
        make(recipe)
    else:
        try:
            passed = search.run()
        except CodecError:
            _remove(location)
            raise
    source = snapshot.take(folder, source_files(folder))
    if before != _times(folder):
        raise IntegrityError(
            "tier.source-changed",
            "the tensors were written to while a tier was built from them; try again when they are complete",
            where=str(folder),
        )
    files = snapshot.take(folder, tier_files(folder, tier))
    sentinel.write(mark, Sentinel(tier.name, source, files, _raised(location, tier), passed))


def _require_own(folder: Path, tier: Tier) -> None:
    """Refuse to write through links: a directory from elsewhere must not choose what is replaced."""
    for location in (tier.location(folder), *tier.marks(folder)):
        if location.is_symlink():
            raise ResourceError(
                "expected a tier in the directory itself, found a link; remove it to build the tier here",
                rule="tier.link",
                where=str(location),
            )


def _raised(location: Path, tier: Tier) -> tuple[str, ...]:
    """Return the tensors of a packed tier that have more bits than its name says."""
    if tier.bits is None:
        return ()
    with open_checkpoint(location, verify=False) as checkpoint:
        return tuple(name for name, tensor in checkpoint.items() if tensor.params.get("bits", 0) > tier.bits)


def _times(folder: Path) -> dict[str, tuple[int, int, int]]:
    times = {}
    for name in source_files(folder):
        state = (folder / name).stat()
        times[name] = (state.st_size, state.st_mtime_ns, state.st_ctime_ns)
    return times


def _require_buildable(folder: Path, *tiers: Tier, rule: str = "tier.no-source") -> None:
    if not is_squish_directory(folder):
        raise UsageError(
            "expected a Squish directory: a folder with manifest.json and tensors/",
            rule="tier.no-directory",
            where=str(folder),
        )
    for tier in tiers:
        if tier.sentinel is None:
            raise UsageError(
                f"expected a tier that is built: {', '.join(BUILT)}; {tier.name} is what they are made from",
                rule="tier.not-built",
            )
    if not source_files(folder):
        raise UsageError(
            "the tensors that tiers are made from are gone: nothing can be built, and what is here is the last copy",
            rule=rule,
            where=str(folder),
        )


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
