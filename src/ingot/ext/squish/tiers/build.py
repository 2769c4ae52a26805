"""Build a tier from the tensors of a Squish directory, or remove it; one process at a time."""

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
from ingot.ext.squish.tiers.gate import Gate, GateResult, Search
from ingot.ext.squish.tiers.options import BuildOptions
from ingot.ext.squish.tiers.preferred_dtype import config_of
from ingot.ext.squish.tiers.reusable import ReusableTensors, reusable_tensors
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
    """The tier after a build. ``nbytes`` is the size of its files; ``built`` is False if it was complete before.

    ``raised`` are the tensors that have more bits than the tier's name states; ``gate`` is the result of its gate. Two
    fields count tensors if source arrays have fewer than 8 bits. ``exact`` is the number of tensors that have exactly
    the source's values. ``requantized`` is the number of tensors that were quantized again.
    """

    tier: str
    path: str
    built: bool
    nbytes: Bytes
    seconds: Seconds
    raised: tuple[str, ...] = ()
    gate: GateResult | None = None
    exact: int = 0
    requantized: int = 0

    def report(self) -> Report:
        """Return the report of a build: the tier, its path and size, the seconds, and its quality."""
        outcome = "built in {seconds}" if self.built else "complete already"
        lines = quality(self.raised, self.gate)
        if self.requantized:
            lines.append(f"{self.requantized} tensors below 8 bits were quantized again: their values changed")
        elif self.exact:
            lines.append("the values equal those of the arrays")
        figures = [*figures_of(self), Figure("quality", lines, "texts", data=False)]
        return Report(
            figures, [Line(f"{{path}}: tier {{tier}}, {{nbytes}}, {outcome}"), Line("{item}", items="quality")]
        )


@takes(BuildOptions, "tier")
def build(options: BuildOptions) -> BuildReport:
    """Build a tier from the tensors of a Squish directory, tensor by tensor, and mark it complete.

    Weights are written to a temporary name in the same folder, flushed and renamed. The sentinel is written last; it
    records the state of the source. An interrupted run leaves no sentinel, and the next run continues. A second process
    waits for the first. A complete tier is built again only with ``force``, or if it has not passed the given gate.

    A packed tier stores source arrays below 8 bits unchanged. If its format cannot store such an array, the build is
    refused unless ``allow_requantize`` is set.

    Returns
    -------
    BuildReport

    Raises
    ------
    UsageError
        ``tier.no-directory``; ``tier.unknown``; ``tier.not-built``: ``tensors`` is the source, not a built tier;
        ``tier.no-source``; ``tier.no-gate``: a gate for an exact tier; ``tier.ungated``: 3 bits without a gate;
        ``tier.requantize``.
    CodecError
        ``tier.gate``: the model does not pass; the tier was removed.
    IntegrityError
        ``tier.source-changed``: the tensors were changed during the build.
    ResourceError
        ``tier.locked``; ``tier.link``: the tier's path is a link; errors of ``convert``, such as a full disk.
    """
    started = time.perf_counter()
    tier = tier_of(options.tier)
    gate = options.gate
    directory = _buildable(Location.parse(options.path), tier)
    if gate is not None and tier.bits is None:
        raise UsageError(f"tier {tier.name} is not quantized: there is nothing to gate", rule="tier.no-gate")
    with directory.locked():
        current = status_of(directory, tier)
        reusable = ReusableTensors()
        needed = options.force or not current.usable or (gate is not None and not _passed(current.gate, gate))
        if needed:
            _require_gate(tier, options)
            reusable = _build(directory, tier, options)
            current = status_of(directory, tier)
    seconds = time.perf_counter() - started
    counts = (len(reusable.names), len(reusable.again))
    return BuildReport(tier.name, current.path, needed, current.nbytes, seconds, current.raised, current.gate, *counts)


def _require_gate(tier: Tier, options: BuildOptions) -> None:
    if tier is THREE_BIT and options.gate is None and not options.ungated:
        raise UsageError(
            "expected a gate for a tier of 3 bits, which makes some models unusable: pass one "
            "(ingot.ext.squish.gate.PerplexityGate), or --ungated (ungated=True)",
            rule="tier.ungated",
        )


def _passed(result: GateResult | None, gate: Gate) -> bool:
    return result is not None and result.text == gate.text and result.rise <= gate.max_rise


def drop(path: AnyPath, tier: str | None = None) -> list[TierStatus]:
    """Remove a built tier, or all built tiers; return their states before the removal.

    The sentinel is removed first, so that an interrupted removal leaves no tier that is marked as complete. If the
    source tensors do not exist, no tier is removed.

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
    """Remove all sentinels of a tier, before its weights are changed."""
    while (mark := mark_of(tier, directory)) is not None:
        directory.remove(mark)


def _build(directory: Directory, tier: Tier, options: BuildOptions) -> ReusableTensors:
    """Build the weights and write the sentinel; return the source tensors that were reused."""
    gate = options.gate
    source = Location.in_store(directory)
    target = Location.in_store(directory, tier.path)
    before = _stamps(directory)
    _require_own(directory, tier)
    assert tier.recipe is not None
    assert tier.sentinel is not None
    reusable = reusable_tensors(source, tier)
    if not options.allow_requantize:
        reusable.require_allowed(tier, directory.location)
    recipe = reusable.recipe(load_recipe(tier.recipe))
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
    source_snapshot = snapshot.take(directory, source_files(directory))
    if before != _stamps(directory):
        raise IntegrityError(
            "tier.source-changed",
            "the tensors were changed while a tier was built from them; try again when they are complete",
            where=directory.location,
        )
    files = snapshot.take(directory, tier_files(directory, tier))
    record = Sentinel(tier.name, source_snapshot, files, _raised(target, tier), passed)
    directory.write(tier.sentinel, sentinel.encode(record))
    return reusable


def _maker(source: Location, target: Location, tier: Tier, options: BuildOptions) -> Callable[[Recipe], object]:
    """Return a function that converts the tensors at ``source`` to the tier at ``target``, given a recipe.

    If mlx_lm cannot open a model, its packed tiers keep the tensor names, because only Ingot loads them.
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
                allow_requantize=True,  # require_allowed has checked the option; the source tensors stay
                overwrite=True,
                resume=resume,
                measure=False,
                keep_names=keep_names,
            ),
            lambda: stage(destination(target, tier.format), overwrite=True).discard(),
        )

    return make


def _require_own(directory: Directory, tier: Tier) -> None:
    """Raise ``tier.link`` if a path of the tier is a link: in a downloaded directory it could lead to any file."""
    for name in (tier.path, *tier.marks):
        if directory.is_link(name):
            raise ResourceError(
                "expected the tier's files in the directory, found a link; remove it to build the tier here",
                rule="tier.link",
                where=directory.location_of(name),
            )


def _raised(location: Location, tier: Tier) -> tuple[str, ...]:
    """Return the names of a packed tier's tensors whose codes have more bits than the tier's name states."""
    if tier.bits is None:
        return ()
    with open_checkpoint(location, verify=False) as checkpoint:
        return tuple(name for name, tensor in checkpoint.items() if tensor.params.get("bits", 0) > tier.bits)


def _stamps(store: Store) -> dict[str, Stamp]:
    return {name: store.stat(name) for name in source_files(store)}


def _buildable(location: Location, *tiers: Tier, rule: str = "tier.no-source") -> Directory:
    """Return the Squish directory at ``location``, after checking that it has source tensors.

    Raises ``UsageError`` ``tier.no-directory`` for another folder, ``rule`` if there are no source tensors, and
    ``tier.not-built`` if one of ``tiers`` is the source itself.
    """
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
                f"expected one of the tiers {', '.join(BUILT)}; {tier.name} are their source",
                rule="tier.not-built",
            )
    if not source_files(directory):
        raise UsageError(
            "the directory has no source tensors: no tier can be built, and the existing tiers are the last copy",
            rule=rule,
            where=directory.location,
        )
    return directory
