"""Budgets: a recipe that gives each tensor the type by which a model of some size loses least, or by which one that
loses no more than so much is smallest (``spec/budgets.md``).

What comes out is a recipe like any other, which then goes the way of all recipes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import isfinite
from pathlib import PurePosixPath
from typing import Any

from ingot.artifacts.destination import destination
from ingot.conversion.budget.candidates import (
    KEEP,
    Group,
    Maker,
    Planned,
    Survey,
    Target,
    Unit,
    Way,
    group_of,
    groups_of,
    origins_of,
    points_of,
    survey,
    types_of,
    unit_of,
    units_of,
)
from ingot.conversion.budget.divergence import Kl, Step, Trial, search, smallest
from ingot.conversion.budget.report import BudgetReport, StepReport
from ingot.conversion.budget.sensitivity import Losses, Measure, losses, measure_of
from ingot.conversion.options import ConvertOptions
from ingot.core.numeric.knapsack import Allocation, allocate
from ingot.core.registry import Registry
from ingot.core.runtime.memory import parse_size
from ingot.core.runtime.parallel import ordered
from ingot.core.runtime.progress import Progress
from ingot.errors import UnsupportedError, UsageError
from ingot.model.checkpoint import Checkpoint
from ingot.model.statistics import Statistics
from ingot.recipes.choice import Choice
from ingot.recipes.recipe import Recipe
from ingot.recipes.types import default_types, type_named
from ingot.stores.location import Location

RULE = "convert.budget"
_KEEP = Recipe("keep", (), general=True)
_CORRECTIONS = 3
# Who runs models lies above this room.
_CALIBRATE: Registry[Any] = Registry("calibration", (("model", "ingot.runtime.calibration.calibrate:statistics_of"),))

Prepare = Callable[[ConvertOptions], Planned]
Convert = Callable[[ConvertOptions], object]


def budgeted(
    options: ConvertOptions, prepare: Prepare, convert: Convert, *, publish: bool
) -> tuple[ConvertOptions, BudgetReport | None]:
    """Return the options of the conversion that keeps within the budget: with a recipe in the budget's place.

    Parameters
    ----------
    options : ConvertOptions
    prepare, convert : callable
        Plans a conversion; does it.
    publish : bool
        Write the recipe beside the result; else only where ``recipe_out`` says so.

    Raises
    ------
    UsageError
        ``convert.budget``: no recipe of these types keeps within it (the message names the least there is), or options
        that contradict each other; ``target.exists``: a file where the recipe is to be; what types raise.
    UnsupportedError
        ``convert.unsupported``: the format carries none of the types; ``generate.no-head``: a divergence of what is no
        language model.
    """
    _check(options)
    if options.target_size is None and options.target_bpw is None and options.max_kl is None:
        return options, None
    return _Budget(options, prepare, convert, _recipe_location(options, publish=publish)).solved()


def _wrong(expected: str, found: object) -> UsageError:
    return UsageError(f"expected {expected}, found {found}", rule=RULE)


def _check(options: ConvertOptions) -> None:
    targets = [name for name in ("target_size", "target_bpw", "max_kl") if getattr(options, name) is not None]
    if not targets:
        for name in ("types", "recipe_out", "check_kl"):
            if getattr(options, name):
                raise _wrong(f"--target-size, --target-bpw or --max-kl beside --{_flag(name)}", "none")
    for name in ("text", "sequences"):
        if getattr(options, name) is not None and options.max_kl is None and not options.check_kl:
            raise _wrong(f"--max-kl or --check-kl beside --{_flag(name)}", "neither")
    if targets:
        _check_targets(options, targets)


def _check_targets(options: ConvertOptions, targets: Sequence[str]) -> None:
    if options.recipe is not None:
        raise _wrong("a budget, which makes a recipe, or a recipe", "both")
    if len(targets) > 1:
        raise _wrong("one of --target-size, --target-bpw and --max-kl", " and ".join(f"--{_flag(x)}" for x in targets))
    beside = next((name for name in ("tp", "rotate") if getattr(options, name) is not None), None)
    if beside is not None:
        raise _wrong(f"a budget without --{beside}: make the recipe first, then convert by it", f"--{beside}")
    for name, what in (("target_bpw", "bits per weight"), ("max_kl", "a KL in nats a token")):
        value = getattr(options, name)
        if value is not None and not (isfinite(value) and value > 0):
            raise _wrong(f"{what} above 0", value)


def _flag(name: str) -> str:
    return name.replace("_", "-")


def _recipe_location(options: ConvertOptions, *, publish: bool) -> Location | None:
    """Return the file for the recipe, None if no recipe is written.

    Raises ``target.exists`` for an existing file, unless it may be replaced.
    """
    if options.recipe_out is not None:
        location = Location.parse(options.recipe_out)
    elif publish:
        target = destination(Location.parse(options.dst), options.format, options.container)
        name = target.location.name
        stem = name if target.directory else name.removesuffix(PurePosixPath(target.name).suffix)
        location = target.location.parent.child(f"{stem}.toml")
    else:
        return None
    if not (options.overwrite or options.resume):
        try:
            location.find()
        except UsageError as error:
            if error.rule != "store.missing":
                raise
        else:
            raise UsageError(
                "expected no file where the budget's recipe is to be; --recipe-out names another, --overwrite "
                "replaces it",
                rule="target.exists",
                where=location.display,
            )
    return location


class _Budget:
    """A budget while it is worked out."""

    def __init__(self, options: ConvertOptions, prepare: Prepare, convert: Convert, file: Location | None) -> None:
        self._options = options
        self._prepare = prepare
        self._file = file
        self._source = Location.parse(options.src)
        self._plain = replace(
            options,
            target_size=None,
            target_bpw=None,
            max_kl=None,
            check_kl=False,
            text=None,
            sequences=None,
            types=(),
            recipe_out=None,
            calibration=None,
            strict_recipe=False,
            progress=None,
        )
        self._taken: Statistics | None = None
        wanted = options.max_kl is not None or options.check_kl
        self._trial = Trial(options, convert) if wanted else None

    def solved(self) -> tuple[ConvertOptions, BudgetReport]:
        """Measure, choose, check by a plan, and write the recipe."""
        with self._planned(_KEEP) as kept:
            elements = max(sum(step.tensor.size for step in kept.plan.steps), 1)
            target = Target(_bytes(self._options, elements), elements)
            origins = origins_of(kept)
            surveys = self._surveys(kept, origins)
            groups = groups_of(kept, surveys)
            if not groups:
                raise UsageError(
                    "expected types that change a tensor, found none; see `ingot recipes`",
                    rule=RULE,
                    where=kept.source.location,
                )
            found = self._measured(kept, groups, origins)
        measure = measure_of(found, {name: unit.size for name, unit in units_of(groups).items()})
        groups, costs = _costed(groups, found, measure)
        grouped = {name for group in groups for name in group.names}
        fixed = sum(count for name, count in surveys[0].nbytes.items() if name not in grouped)
        made = Maker(PurePosixPath(self._file.name).stem if self._file else "budget", groups, origins)
        if self._options.max_kl is None:
            allocation, size = self._within(target, made, costs, fixed + surveys[0].beside)
            steps = [] if self._trial is None else [Step(allocation, self._kl(made, allocation))]
        else:
            allocation, steps = self._below(self._options.max_kl, made, costs)
            size = self._size(made, allocation)
        recipe, text = made.recipe(allocation.picks)
        if self._file is not None:
            again = self._options.overwrite or self._options.resume
            self._file.write(text.encode(), overwrite=again)
        report = BudgetReport(
            target=target.size,
            max_kl=self._options.max_kl,
            size=size,
            bits_per_weight=target.bits(size),
            loss=allocation.cost,
            least=allocation.bound,
            absolute=measure.absolute,
            kl=next((step.kl.mean for step in steps if step.allocation is allocation), None),
            over="" if self._trial is None else self._trial.over,
            measured=measure.by,
            recipe=self._file.display if self._file else "",
            text=text,
            types=types_of(surveys, groups, costs, allocation, target),
            points=points_of(groups, costs, allocation, size, target),
            steps=[self._step(made, target, step, allocation) for step in steps],
            groups=[
                group_of(group, each, way) for group, each, way in zip(groups, costs, allocation.picks, strict=True)
            ],
        )
        return replace(self._with(recipe), strict_recipe=self._options.strict_recipe), report

    def _with(self, recipe: Recipe) -> ConvertOptions:
        """Return the options of the conversion by a recipe, with the statistics that it needs."""
        calibration = None
        if any(isinstance(rule.choice, Choice) and rule.choice.quantizer is not None for rule in recipe.rules):
            calibration = self._taken if self._options.calibration is None else self._options.calibration
        return replace(self._plain, recipe=recipe, calibration=calibration, progress=self._options.progress)

    def _kl(self, made: Maker, allocation: Allocation) -> Kl:
        assert self._trial is not None
        return self._trial(self._with(made.recipe(allocation.picks)[0]))

    def _below(self, limit: float, made: Maker, costs: Sequence[Sequence[float]]) -> tuple[Allocation, list[Step]]:
        """Return the smallest allocation found whose measured divergence is at most the limit, and what was tried."""
        sizes = [[way.nbytes for way in group.ways] for group in made.groups]
        held, steps = search(
            limit, lambda bound: smallest(costs, sizes, bound), lambda allocation: self._kl(made, allocation)
        )
        if held is None:
            assert self._trial is not None
            raise UsageError(
                f"expected a KL that some recipe of these types keeps to; the least of {len(steps)} that were "
                f"measured is {min(step.kl.mean for step in steps):.6g} nats a token over {self._trial.over}, found "
                f"--max-kl {limit:g}",
                rule=RULE,
                where=self._source.display,
            )
        return held.allocation, steps

    def _step(self, made: Maker, target: Target, step: Step, chosen: Allocation) -> StepReport:
        size = self._size(made, step.allocation)
        low, high = step.kl.interval or (None, None)
        mark = "<- chosen" if step.allocation is chosen else ""
        return StepReport(size, target.bits(size), step.loss, step.kl.mean, low, high, mark)

    def _planned(self, recipe: Recipe) -> Planned:
        return self._prepare(replace(self._plain, recipe=recipe))

    def _surveys(self, kept: Planned, origins: Mapping[str, Sequence[str]]) -> list[Survey]:
        """Return what types do, what is kept first; of those that nobody asked for the ones that the format carries."""
        found = [survey(KEEP, _KEEP, kept, origins, kept.plan)]
        asked = _asked(self._options)
        refused = None
        calibrated = self._options.calibration is not None
        for name in asked or default_types(kept.plan.format.name, calibrated=calibrated):
            for label, recipe in type_named(name):
                try:
                    with self._planned(recipe) as planned:
                        found.append(survey(label, recipe, planned, origins, kept.plan))
                except UnsupportedError as error:
                    if asked:
                        raise
                    refused = refused or error
        if len(found) == 1 and refused is not None:
            raise refused
        return found

    def _measured(
        self, kept: Planned, groups: Sequence[Group], origins: Mapping[str, Sequence[str]]
    ) -> dict[str, Losses]:
        """Return the losses of what is measured together, ways in the order of its choices."""
        units = units_of(groups)
        calibrated = any(choice.quantizer for unit in units.values() for choice in unit.choices.values())
        progress = Progress(sum(unit.size for unit in units.values()), self._options.progress)
        with self._known(kept.weights, calibrated=calibrated) as statistics:

            def measured(unit: Unit) -> Losses:
                own = [kept.weights[each] for name in unit.names for each in origins.get(name, ())]
                known = statistics if own else None
                tensors = own or [kept.checkpoint[name] for name in unit.names]
                return losses(tensors, unit.size, known, list(unit.choices.values()))

            found: dict[str, Losses] = {}
            results = ordered(measured, list(units.values()), self._options.threads)
            for (name, unit), each in zip(units.items(), results, strict=True):
                found[name] = each
                progress.advance(unit.size, f"measuring {name}")
        return found

    @contextmanager
    def _known(self, weights: Checkpoint, *, calibrated: bool) -> Iterator[Statistics | None]:
        """Open the statistics that were given; take them of the model where types want some and none were."""
        given = self._options.calibration
        if isinstance(given, Statistics):
            yield given
        elif given is not None:
            with Statistics.open(given, weights) as opened:
                yield opened
        elif calibrated:
            self._taken = _CALIBRATE["model"](
                self._source, max_ram=self._options.max_ram, progress=self._options.progress
            )
            yield self._taken
        else:
            yield None

    def _within(
        self, target: Target, made: Maker, costs: Sequence[Sequence[float]], more: int
    ) -> tuple[Allocation, int]:
        """Return the best allocation whose files are within the target by the plan of its recipe, and their bytes.

        ``more`` are bytes of other tensors and beside all of them, which depend on what is chosen: corrected by plans.
        """
        sizes = [[way.nbytes for way in group.ways] for group in made.groups]
        least = sum(map(min, sizes))
        most = target.size
        assert most is not None
        best: tuple[Allocation, int] | None = None
        for _ in range(_CORRECTIONS):
            found = allocate(costs, sizes, max(most - more, least))
            assert found is not None  # the smallest fits
            size = self._size(made, found)
            if size <= most and (best is None or found.cost <= best[0].cost):
                best = found, size
            real = size - int(found.size)
            if real == more or (best is not None and size > most):
                break
            more = real
        if best is None:
            found = allocate(costs, sizes, least)
            assert found is not None
            size = self._size(made, found)
            if size > most:
                raise UsageError(
                    f"expected a target of at least {size} bytes ({target.bits(size):.3f} bits per weight), which the "
                    f"smallest of these types take; found {most} bytes ({target.bits(most):.3f})",
                    rule=RULE,
                    where=self._source.display,
                )
            best = found, size
        return best

    def _size(self, made: Maker, allocation: Allocation) -> int:
        with self._planned(made.recipe(allocation.picks)[0]) as planned:
            return planned.plan.size


def _bytes(options: ConvertOptions, elements: int) -> int | None:
    if options.target_size is not None:
        return parse_size(options.target_size)
    return None if options.target_bpw is None else int(options.target_bpw * elements / 8)


def _asked(options: ConvertOptions) -> list[str]:
    texts = [options.types] if isinstance(options.types, str) else options.types
    return [name.strip() for text in texts for name in text.split(",") if name.strip()]


def _costed(
    groups: Sequence[Group], found: Mapping[str, Losses], measure: Measure
) -> tuple[list[Group], list[list[float]]]:
    """Return the groups with the ways that codecs do not refuse, and what each costs."""
    lost = {
        (name, text): loss
        for name, unit in units_of(groups).items()
        for text, loss in zip(unit.choices, found[name].ways, strict=True)
    }
    left = []
    costs = []
    for group in groups:
        each: list[tuple[Way, float]] = []
        for way in group.ways:
            pairs = {
                (unit_of(name), repr(choice)) for name, choice in zip(group.names, way.choices, strict=True) if choice
            }
            own = [lost[pair] for pair in sorted(pairs)]
            known = [loss for loss in own if loss is not None]
            if len(known) == len(own):
                each.append((way, sum(map(measure.cost, known))))
        left.append(replace(group, ways=tuple(way for way, _ in each)))
        costs.append([cost for _, cost in each])
    return left, costs
