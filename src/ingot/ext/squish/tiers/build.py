"""Make a tier from the tensors, or remove it: one process at a time; it counts once its sentinel lies."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from ingot.artifacts.destination import destination, stage
from ingot.artifacts.open import open as open_checkpoint
from ingot.conversion.run import convert
from ingot.core.options import takes
from ingot.errors import CodecError, IntegrityError, ResourceError, UsageError
from ingot.ext.squish.tiers import sentinel, snapshot
from ingot.ext.squish.tiers.directory import Directory, resumed
from ingot.ext.squish.tiers.gate import Gate, Passed, Search
from ingot.ext.squish.tiers.kept import Kept, kept
from ingot.ext.squish.tiers.options import BuildOptions
from ingot.ext.squish.tiers.sentinel import Sentinel
from ingot.ext.squish.tiers.status import (
    TierStatus,
    is_squish_directory,
    mark_of,
    quality,
    source_files,
    status_of,
    tier_files,
)
from ingot.ext.squish.tiers.table import BUILT, THREE_BIT, TIERS, Tier, tier_of
from ingot.ext.squish.tiers.wanted import config_of
from ingot.formats.packed_folders.mlx import MlxFormat
from ingot.model.bytesource import Stamp
from ingot.model.store import Store
from ingot.recipes.load import load_recipe
from ingot.recipes.recipe import Recipe
from ingot.reporting.report import Bytes, Figure, Line, Report, Seconds, figures_of
from ingot.reporting.reportable import Reportable
from ingot.stores.location import AnyPath, Location
from ingot.translate.mlx_families import is_opened


@dataclass(frozen=True, slots=True)
class BuildReport(Reportable):
    """A tier that is there now: ``built`` is False where it was complete before. Bytes of its files, wall seconds.

    ``raised`` are the tensors that have more bits than its name says, ``gate`` is what its gate found. ``kept`` tensors
    have the values of arrays of few bits, ``requantized`` ones were quantized again from such.
    """

    tier: str
    path: str
    built: bool
    nbytes: Bytes
    seconds: Seconds
    raised: tuple[str, ...] = ()
    gate: Passed | None = None
    kept: int = 0
    requantized: int = 0

    def report(self) -> Report:
        """Return all figures."""
        what = "built in {seconds}" if self.built else "complete already"
        lines = quality(self.raised, self.gate)
        if self.requantized:
            lines.append(f"{self.requantized} tensors of few bits were quantized again: their values are others")
        elif self.kept:
            lines.append("the values are those of the arrays")
        figures = [*figures_of(self), Figure("quality", lines, "texts", data=False)]
        return Report(figures, [Line(f"{{path}}: tier {{tier}}, {{nbytes}}, {what}"), Line("{item}", items="quality")])


@takes(BuildOptions, "tier")
def build(options: BuildOptions) -> BuildReport:
    """Build a tier from the tensors of a Squish directory, tensor by tensor, and mark it complete.

    Weights are written beside their final place, flushed and renamed; the sentinel, with what the tier was made from,
    follows as the last step. A run that is killed leaves no sentinel, and the next one goes on where it stopped. A
    second process waits for the first. A complete tier is built anew with ``force``, or unless it passed the same gate.

    A packed tier of arrays that have few bits already takes them as they are; what it cannot take is refused without
    ``allow_requantize``.

    Returns
    -------
    BuildReport

    Raises
    ------
    UsageError
        ``tier.no-directory``, ``tier.unknown``, ``tier.not-built``: there is no such step; ``tier.no-source``;
        ``tier.no-gate``: a gate for a tier that is exact; ``tier.ungated``: 3 bits without a gate;
        ``tier.requantize``.
    CodecError
        ``tier.gate``: the model does not pass; the tier is gone.
    IntegrityError
        ``tier.source-changed``: the tensors were written to meanwhile.
    ResourceError
        ``tier.locked``; ``tier.link``: a link in the tier's place; those of ``convert``: disk full, read-only, ...
    """
    started = time.perf_counter()
    tier = tier_of(options.tier)
    gate = options.gate
    directory = _buildable(Location.parse(options.path), tier)
    if gate is not None and tier.bits is None:
        raise UsageError(f"tier {tier.name} is not quantized: there is nothing to gate", rule="tier.no-gate")
    with directory.locked():
        current, taken = status_of(directory, tier), Kept()
        needed = options.force or not current.usable or (gate is not None and not _passed(current.gate, gate))
        if needed:
            _require_gate(tier, options)
            taken = _build(directory, tier, options)
            current = status_of(directory, tier)
    seconds = time.perf_counter() - started
    counts = (len(taken.names), len(taken.again))
    return BuildReport(tier.name, current.path, needed, current.nbytes, seconds, current.raised, current.gate, *counts)


def _require_gate(tier: Tier, options: BuildOptions) -> None:
    if tier is THREE_BIT and options.gate is None and not options.ungated:
        raise UsageError(
            "expected a gate for a tier of 3 bits, which some models do not survive: pass one "
            "(ingot.ext.squish.gate.PerplexityGate), or --ungated (ungated=True)",
            rule="tier.ungated",
        )


def _passed(passed: Passed | None, gate: Gate) -> bool:
    return passed is not None and passed.text == gate.text and passed.rise <= gate.max_rise


def drop(path: AnyPath, tier: str | None = None) -> list[TierStatus]:
    """Remove a built tier, or all of them; return what each was before.

    The sentinel goes first, so that a drop that is killed leaves nothing that looks complete. Tiers are not removed
    where the tensors they were built from are gone.

    Raises
    ------
    UsageError
        ``tier.no-directory``, ``tier.unknown``, ``tier.not-built``, ``tier.last``.
    """
    tiers = [TIERS[name] for name in BUILT] if tier is None else [tier_of(tier)]
    directory = _buildable(Location.parse(path), *tiers, rule="tier.last")
    with directory.locked():
        before = [status_of(directory, dropped) for dropped in tiers]
        for dropped in tiers:
            _unmark(directory, dropped)
            directory.remove(dropped.path)
    return [dropped for dropped in before if dropped.state != "missing"]


def _unmark(directory: Directory, tier: Tier) -> None:
    """Remove a tier's sentinels, for good before anything else happens to its weights."""
    while (mark := mark_of(tier, directory)) is not None:
        directory.remove(mark)


def _build(directory: Directory, tier: Tier, options: BuildOptions) -> Kept:
    """Make the weights and mark them; return what was kept of arrays of few bits."""
    gate = options.gate
    source = Location.in_store(directory)
    target = Location.in_store(directory, tier.path)
    before = _stamps(directory)
    _require_own(directory, tier)
    assert tier.recipe is not None
    assert tier.sentinel is not None
    taken = kept(source, tier)
    if not options.allow_requantize:
        taken.require_allowed(tier, directory.location)
    recipe = taken.recipe(load_recipe(tier.recipe))
    make = _maker(source, target, tier, options)
    search = None if gate is None else Search(source, recipe, make, target, gate)
    _unmark(directory, tier)
    passed = None
    if search is None:
        make(recipe)
    else:
        try:
            passed = search.run()
        except CodecError:
            directory.remove(tier.path)
            raise
    made_from = snapshot.take(directory, source_files(directory))
    if before != _stamps(directory):
        raise IntegrityError(
            "tier.source-changed",
            "the tensors were written to while a tier was built from them; try again when they are complete",
            where=directory.location,
        )
    files = snapshot.take(directory, tier_files(directory, tier))
    record = Sentinel(tier.name, made_from, files, _raised(target, tier), passed)
    directory.write(tier.sentinel, sentinel.encode(record))
    return taken


def _maker(source: Location, target: Location, tier: Tier, options: BuildOptions) -> Callable[[Recipe], object]:
    """Return what converts the tensors into the tier's place by a recipe.

    A tier is a copy beside its source, for Ingot's own loading too: models that mlx_lm does not open have tiers.
    """
    keep_names = tier.format == MlxFormat.name and not is_opened(config_of(source))

    def make(recipe: Recipe) -> object:
        return resumed(
            lambda resume: convert(
                source,
                target,
                recipe,
                tier.format,
                options.max_ram,
                progress=options.progress,
                allow_requantize=True,  # a tier never replaces what it is made from; what has few bits was asked for
                overwrite=True,
                resume=resume,
                measure=False,
                keep_names=keep_names,
            ),
            lambda: stage(destination(target, tier.format), overwrite=True).discard(),
        )

    return make


def _require_own(directory: Directory, tier: Tier) -> None:
    """Refuse to write through links: a directory from elsewhere must not choose what is replaced."""
    for name in (tier.path, *tier.marks):
        if directory.is_link(name):
            raise ResourceError(
                "expected a tier in the directory itself, found a link; remove it to build the tier here",
                rule="tier.link",
                where=directory.location_of(name),
            )


def _raised(location: Location, tier: Tier) -> tuple[str, ...]:
    """Return the tensors of a packed tier that have more bits than its name says."""
    if tier.bits is None:
        return ()
    with open_checkpoint(location, verify=False) as checkpoint:
        return tuple(name for name, tensor in checkpoint.items() if tensor.params.get("bits", 0) > tier.bits)


def _stamps(store: Store) -> dict[str, Stamp]:
    return {name: store.stat(name) for name in source_files(store)}


def _buildable(location: Location, *tiers: Tier, rule: str = "tier.no-source") -> Directory:
    """Return a directory that tiers can be built in; each of these must be one that is built."""
    if not is_squish_directory(location):
        raise UsageError(
            "expected a Squish directory: a folder with manifest.json and tensors/",
            rule="tier.no-directory",
            where=location.display,
        )
    directory = Directory(location)
    for tier in tiers:
        if tier.sentinel is None:
            raise UsageError(
                f"expected a tier that is built: {', '.join(BUILT)}; {tier.name} is what they are made from",
                rule="tier.not-built",
            )
    if not source_files(directory):
        raise UsageError(
            "the tensors that tiers are made from are gone: nothing can be built, and what is here is the last copy",
            rule=rule,
            where=directory.location,
        )
    return directory
