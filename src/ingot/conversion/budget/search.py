"""Budget search: choose a type for each tensor within a limit (``spec/budgets.md``).

A limit of the size gives the model with the least estimated loss; a limit of the divergence gives the smallest model.
The result is an ordinary recipe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import isfinite
from pathlib import PurePosixPath

from ingot.artifacts.destination import destination
from ingot.conversion.budget.candidates import (
    KEEP,
    Group,
    Planned,
    RecipeBuilder,
    StorageOption,
    Survey,
    Target,
    Unit,
    group_report,
    groups_of,
    origins_of,
    points_of,
    survey_type,
    types_of,
    unit_of,
    units_of,
)
from ingot.conversion.budget.divergence import Kl, Step, Trial, search, smallest
from ingot.conversion.budget.report import BudgetReport, StepReport
from ingot.conversion.budget.sensitivity import Losses, Measure, losses, measure_of
from ingot.conversion.options import ConvertOptions
from ingot.conversion.round_by_layers import calibration_of
from ingot.core.numeric.knapsack import Allocation, allocate
from ingot.core.runtime.memory import parse_size
from ingot.core.runtime.parallel import ordered
from ingot.core.runtime.progress import Progress
from ingot.errors import UnsupportedError, UsageError
from ingot.model.calibration import Calibration
from ingot.model.checkpoint import Checkpoint
from ingot.model.statistics import Statistics
from ingot.recipes.choice import Choice
from ingot.recipes.recipe import Recipe
from ingot.recipes.types import default_types, recipes_of_type
from ingot.stores.location import Location

RULE = "convert.budget"
_KEEP = Recipe("keep", (), general=True)
_CORRECTIONS = 3

Prepare = Callable[[ConvertOptions], Planned]
Convert = Callable[[ConvertOptions], object]


def resolve_budget(
    options: ConvertOptions, prepare: Prepare, convert: Convert, *, publish: bool
) -> tuple[ConvertOptions, BudgetReport | None]:
    """Return the options with the searched recipe instead of a budget, and the report of the search.

    Parameters
    ----------
    options : ConvertOptions
    prepare, convert : callable
        Functions that plan and execute a conversion.
    publish : bool
        Whether the recipe is written next to the result by default; if false, it is only written to ``recipe_out``.

    Raises
    ------
    UsageError
        ``convert.budget``: no recipe of these types meets the budget (the message names the smallest), or options
        contradict each other; ``target.exists``: the recipe's file exists; the errors of ``recipes_of_type``.
    UnsupportedError
        ``convert.unsupported``: the format supports none of the types; ``generate.no-head``: a divergence needs a
        language model.
    """
    _check(options)
    if options.target_size is None and options.target_bpw is None and options.max_kl is None:
        return options, None
    return _Search(options, prepare, convert, _recipe_location(options, publish=publish)).run()


def _option_error(expected: str, actual: object) -> UsageError:
    return UsageError(f"expected {expected}, found {actual}", rule=RULE)


def _check(options: ConvertOptions) -> None:
    targets = [name for name in ("target_size", "target_bpw", "max_kl") if getattr(options, name) is not None]
    if not targets:
        for name in ("types", "recipe_out", "check_kl"):
            if getattr(options, name):
                raise _option_error(f"--target-size, --target-bpw or --max-kl with --{_flag(name)}", "none")
    for name in ("text", "sequences"):
        if getattr(options, name) is not None and options.max_kl is None and not options.check_kl:
            raise _option_error(f"--max-kl or --check-kl with --{_flag(name)}", "neither")
    if targets:
        _check_targets(options, targets)


def _check_targets(options: ConvertOptions, targets: Sequence[str]) -> None:
    if options.recipe is not None:
        raise _option_error("a recipe, or a budget, which searches a recipe", "both")
    if len(targets) > 1:
        flags = " and ".join(f"--{_flag(name)}" for name in targets)
        raise _option_error("one of --target-size, --target-bpw and --max-kl", flags)
    excluded = next((name for name in ("tp", "rotate") if getattr(options, name) is not None), None)
    if excluded is not None:
        raise _option_error(
            f"a budget without --{excluded}: search the recipe first, then convert by it", f"--{excluded}"
        )
    for name, quantity in (("target_bpw", "bits per weight"), ("max_kl", "a KL in nats a token")):
        value = getattr(options, name)
        if value is not None and not (isfinite(value) and value > 0):
            raise _option_error(f"{quantity} above 0", value)


def _flag(name: str) -> str:
    return name.replace("_", "-")


def _recipe_location(options: ConvertOptions, *, publish: bool) -> Location | None:
    """Return the file for the recipe, None if no recipe is written.

    Raises ``target.exists`` if the file exists, unless ``overwrite`` or ``resume`` is set.
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
                "the file for the budget's recipe exists; choose another with --recipe-out, or pass --overwrite to "
                "replace it",
                rule="target.exists",
                where=location.display,
            )
    return location


class _Search:
    """A budget search for one conversion."""

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
        self._statistics: Statistics | None = None
        measures_kl = options.max_kl is not None or options.check_kl
        self._trial = Trial(options, convert) if measures_kl else None

    def run(self) -> tuple[ConvertOptions, BudgetReport]:
        """Measure the types, choose among them, check the size by a plan, and write the recipe; return options and
        report.
        """
        with self._planned(_KEEP) as unchanged:
            elements = max(sum(step.tensor.size for step in unchanged.plan.steps), 1)
            target = Target(_target_bytes(self._options, elements), elements)
            origins = origins_of(unchanged)
            surveys = self._surveys(unchanged, origins)
            groups = groups_of(unchanged, surveys)
            if not groups:
                raise UsageError(
                    "the types change no tensor of this model; see `ingot recipes` and choose others with --types",
                    rule=RULE,
                    where=unchanged.source.location,
                )
            losses_by_unit = self._measure(unchanged, groups, origins)
        measure = measure_of(losses_by_unit, {name: unit.size for name, unit in units_of(groups).items()})
        groups, costs = _with_costs(groups, losses_by_unit, measure)
        grouped = {name for group in groups for name in group.names}
        fixed = sum(count for name, count in surveys[0].nbytes.items() if name not in grouped)
        builder = RecipeBuilder(PurePosixPath(self._file.name).stem if self._file else "budget", groups, origins)
        if self._options.max_kl is None:
            allocation, size = self._solve_size(target, builder, costs, fixed + surveys[0].overhead)
            steps = [] if self._trial is None else [Step(allocation, self._kl(builder, allocation))]
        else:
            allocation, steps = self._solve_kl(self._options.max_kl, builder, costs)
            size = self._size(builder, allocation)
        recipe, text = builder.recipe(allocation.picks)
        if self._file is not None:
            self._file.write(text.encode(), overwrite=self._options.overwrite or self._options.resume)
        report = BudgetReport(
            target=target.size,
            max_kl=self._options.max_kl,
            size=size,
            bits_per_weight=target.bits(size),
            loss=allocation.cost,
            lower_bound=allocation.bound,
            absolute=measure.absolute,
            kl=next((step.kl.mean for step in steps if step.allocation is allocation), None),
            over="" if self._trial is None else self._trial.over,
            measured=measure.by,
            recipe=self._file.display if self._file else "",
            text=text,
            types=types_of(surveys, groups, costs, allocation, target),
            points=points_of(groups, costs, allocation, size, target),
            steps=[self._step_report(builder, target, step, allocation) for step in steps],
            groups=[
                group_report(group, group_costs, pick)
                for group, group_costs, pick in zip(groups, costs, allocation.picks, strict=True)
            ],
        )
        return replace(self._options_with(recipe), strict_recipe=self._options.strict_recipe), report

    def _options_with(self, recipe: Recipe) -> ConvertOptions:
        """Return the options of a conversion by ``recipe``, with the statistics that the recipe needs."""
        calibration = None
        if any(isinstance(rule.choice, Choice) and rule.choice.quantizer is not None for rule in recipe.rules):
            calibration = self._statistics or self._options.calibration
        return replace(self._plain, recipe=recipe, calibration=calibration, progress=self._options.progress)

    def _kl(self, builder: RecipeBuilder, allocation: Allocation) -> Kl:
        assert self._trial is not None
        return self._trial(self._options_with(builder.recipe(allocation.picks)[0]))

    def _solve_kl(
        self, limit: float, builder: RecipeBuilder, costs: Sequence[Sequence[float]]
    ) -> tuple[Allocation, list[Step]]:
        """Return the smallest allocation whose measured divergence is at most the limit, and all measurements."""
        sizes = [[option.nbytes for option in group.options] for group in builder.groups]
        best, steps = search(
            limit, lambda bound: smallest(costs, sizes, bound), lambda allocation: self._kl(builder, allocation)
        )
        if best is None:
            assert self._trial is not None
            raise UsageError(
                f"no recipe of these types has a KL of at most --max-kl {limit:g}; the least of {len(steps)} measured "
                f"recipes is {min(step.kl.mean for step in steps):.6g} nats a token over {self._trial.over}",
                rule=RULE,
                where=self._source.display,
            )
        return best.allocation, steps

    def _step_report(self, builder: RecipeBuilder, target: Target, step: Step, chosen: Allocation) -> StepReport:
        size = self._size(builder, step.allocation)
        low, high = step.kl.interval or (None, None)
        mark = "<- chosen" if step.allocation is chosen else ""
        return StepReport(size, target.bits(size), step.loss, step.kl.mean, low, high, mark)

    def _planned(self, recipe: Recipe) -> Planned:
        return self._prepare(replace(self._plain, recipe=recipe))

    def _surveys(self, unchanged: Planned, origins: Mapping[str, Sequence[str]]) -> list[Survey]:
        """Return the survey of each type; the first survey is for unchanged tensors.

        A default type that the format does not support is left out; a type of ``--types`` raises an error instead.
        """
        surveys = [survey_type(KEEP, _KEEP, unchanged, origins, unchanged.plan)]
        requested = _requested_types(self._options)
        refused = None
        calibrated = self._options.calibration is not None
        for name in requested or default_types(unchanged.plan.format.name, calibrated=calibrated):
            for label, recipe in recipes_of_type(name):
                try:
                    with self._planned(recipe) as planned:
                        surveys.append(survey_type(label, recipe, planned, origins, unchanged.plan))
                except UnsupportedError as error:
                    if requested:
                        raise
                    refused = refused or error
        if len(surveys) == 1 and refused is not None:
            raise refused
        return surveys

    def _measure(
        self, unchanged: Planned, groups: Sequence[Group], origins: Mapping[str, Sequence[str]]
    ) -> dict[str, Losses]:
        """Return the losses of each unit of measurement, in the order of the unit's choices."""
        units = units_of(groups)
        calibrated = any(choice.quantizer for unit in units.values() for choice in unit.choices.values())
        progress = Progress(sum(unit.size for unit in units.values()), self._options.progress)
        with self._opened_statistics(unchanged.weights, calibrated=calibrated) as statistics:

            def measure(unit: Unit) -> Losses:
                choices = list(unit.choices.values())
                weights = [unchanged.weights[origin] for name in unit.names for origin in origins.get(name, ())]
                if weights:
                    return losses(weights, unit.size, statistics, choices)
                return losses([unchanged.checkpoint[name] for name in unit.names], unit.size, None, choices)

            losses_by_unit: dict[str, Losses] = {}
            results = ordered(measure, list(units.values()), self._options.threads)
            for (name, unit), result in zip(units.items(), results, strict=True):
                losses_by_unit[name] = result
                progress.advance(unit.size, f"measuring {name}")
        return losses_by_unit

    @contextmanager
    def _opened_statistics(self, weights: Checkpoint, *, calibrated: bool) -> Iterator[Statistics | None]:
        """Return a context with the statistics of the options.

        If the options have none and ``calibrated`` is true, a new calibration collects them. Otherwise the value is
        None.
        """
        calibration = self._options.calibration
        if isinstance(calibration, Statistics):
            yield calibration
        elif isinstance(calibration, Calibration):
            self._statistics = calibration.collect()
            yield self._statistics
        elif calibration is not None:
            with Statistics.open(calibration, weights) as opened:
                yield opened
        elif calibrated:
            options = self._options
            calibration = calibration_of(
                self._source, max_ram=options.max_ram, progress=options.progress, device=options.device
            )
            self._statistics = calibration.collect()
            yield self._statistics
        else:
            yield None

    def _solve_size(
        self, target: Target, builder: RecipeBuilder, costs: Sequence[Sequence[float]], overhead: int
    ) -> tuple[Allocation, int]:
        """Return the allocation with the least loss whose files fit into the target, and their exact size in bytes.

        ``overhead`` is an estimate of the bytes outside of the groups. These bytes depend on the allocation, so the
        estimate is corrected by the plan of each allocation.
        """
        sizes = [[option.nbytes for option in group.options] for group in builder.groups]
        min_bytes = sum(map(min, sizes))
        max_bytes = target.size
        assert max_bytes is not None
        best: tuple[Allocation, int] | None = None
        for _ in range(_CORRECTIONS):
            allocation = allocate(costs, sizes, max(max_bytes - overhead, min_bytes))
            assert allocation is not None  # the smallest options fit
            size = self._size(builder, allocation)
            if size <= max_bytes and (best is None or allocation.cost <= best[0].cost):
                best = allocation, size
            exact_overhead = size - int(allocation.size)
            if exact_overhead == overhead or (best is not None and size > max_bytes):
                break
            overhead = exact_overhead
        if best is None:
            allocation = allocate(costs, sizes, min_bytes)
            assert allocation is not None
            size = self._size(builder, allocation)
            if size > max_bytes:
                raise UsageError(
                    f"expected a target of at least {size} bytes ({target.bits(size):.3f} bits per weight), the size "
                    f"with the smallest of these types; found {max_bytes} bytes ({target.bits(max_bytes):.3f})",
                    rule=RULE,
                    where=self._source.display,
                )
            best = allocation, size
        return best

    def _size(self, builder: RecipeBuilder, allocation: Allocation) -> int:
        with self._planned(builder.recipe(allocation.picks)[0]) as planned:
            return planned.plan.size


def _target_bytes(options: ConvertOptions, elements: int) -> int | None:
    if options.target_size is not None:
        return parse_size(options.target_size)
    return None if options.target_bpw is None else int(options.target_bpw * elements / 8)


def _requested_types(options: ConvertOptions) -> list[str]:
    texts = [options.types] if isinstance(options.types, str) else options.types
    return [name.strip() for text in texts for name in text.split(",") if name.strip()]


def _with_costs(
    groups: Sequence[Group], losses_by_unit: Mapping[str, Losses], measure: Measure
) -> tuple[list[Group], list[list[float]]]:
    """Return the groups without options that a codec refuses, and the cost of each remaining option."""
    loss_of = {
        (name, text): loss
        for name, unit in units_of(groups).items()
        for text, loss in zip(unit.choices, losses_by_unit[name].by_choice, strict=True)
    }
    remaining = []
    costs = []
    for group in groups:
        priced: list[tuple[StorageOption, float]] = []
        for option in group.options:
            pairs = {
                (unit_of(name), repr(choice))
                for name, choice in zip(group.names, option.choices, strict=True)
                if choice
            }
            unit_losses = [loss_of[pair] for pair in sorted(pairs)]
            measured = [loss for loss in unit_losses if loss is not None]
            if len(measured) == len(unit_losses):
                priced.append((option, sum(map(measure.cost, measured))))
        remaining.append(replace(group, options=tuple(option for option, _ in priced)))
        costs.append([cost for _, cost in priced])
    return remaining, costs
