"""Quantize a model for a program: choose, estimate, calibrate, convert, and check that the program would load it."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import sqrt
from typing import TYPE_CHECKING

from ingot.artifacts.open import Source, open_source
from ingot.codecs.table import stored_exactly
from ingot.conversion.block_types import with_model_rules
from ingot.conversion.choose_preset import Chosen, choose
from ingot.conversion.options import ConvertOptions
from ingot.conversion.prepared import Prepared
from ingot.conversion.preset_fit import quantizes
from ingot.conversion.report import ConvertReport, TensorReport
from ingot.conversion.run import convert
from ingot.conversion.run import prepare as prepare_conversion
from ingot.core.options import takes
from ingot.errors import IngotError, MissingExtraError, UnsupportedError, UsageError
from ingot.model.calibration import Calibration
from ingot.model.layouts.affine import AffineLayout
from ingot.model.reading.lazy import as_tensor_map
from ingot.model.statistics import Statistics
from ingot.recipes.choice import Choice
from ingot.recipes.load import load_recipe
from ingot.recipes.recipe import Recipe, Rule
from ingot.runtime.calibration.calibration import BUILT_IN, CalibrateOptions, CalibratePlan
from ingot.runtime.quantize.checks import check_options
from ingot.runtime.quantize.estimate import Estimate, estimate_rounding
from ingot.runtime.quantize.options import AUTO, FULL, IMPORTANCE, MODES, NONE, QuantizeOptions, parse_time
from ingot.runtime.quantize.report import QuantizeReport, StoredType
from ingot.runtimes.accepts import Answer, accepts, accepts_specs, refusal, source_reasons
from ingot.runtimes.stored import stored_scheme
from ingot.runtimes.table import command_lines
from ingot.stores.location import Location

if TYPE_CHECKING:
    from ingot.runtime.calibration.calibrate import ModelCalibration

LONG = 600.0
"""Seconds of work from which on ``confirm`` decides."""
_SHOWN_RULES = 2


@takes(QuantizeOptions, "quantize")
def quantize(options: QuantizeOptions) -> QuantizeReport:
    """Quantize a model for a program, and check that the program would load the result.

    ``runtime`` alone decides container and preset. With ``calibration`` ``auto``, the best is taken that fits
    ``time``: statistics of inputs and gradients, else importance of columns, else none.

    Returns
    -------
    QuantizeReport

    Raises
    ------
    UsageError
        ``runtime.unknown``, ``quantize.option``, ``quantize.type``, ``quantize.bits``, ``quantize.preset``,
        ``quantize.time``, ``quantize.calibration``; ``quantize.requantize``: the model is quantized already.
    UnsupportedError
        ``quantize.nothing``: nothing would be quantized; ``runtime.refused``: the program would not load the result.
    IngotError
        The errors of ``ingot.convert`` and ``ingot.calibrate``.
    """
    started = time.perf_counter()
    check_options(options)
    chosen = choose_for(options)
    _require_source(options, chosen)
    mode = _mode(options, chosen)
    first = _recipe(options, chosen, calibrated=mode != NONE)
    with _prepare(options, chosen, first) as prepared:
        require_accepted(prepared, chosen, first)
        rounding = {_name: _rounding(prepared, options, chosen, _name) for _name in _candidates(mode)}
    mode, statistics, text = _calibration(options, chosen, mode, rounding)
    recipe = _recipe(options, chosen, calibrated=mode != NONE)
    if mode == IMPORTANCE:
        recipe = with_quantizer(recipe, IMPORTANCE)
    settings = _convert_options(options, chosen, recipe, statistics)
    report = convert(replace(settings, progress=options.progress, metadata=_metadata(recipe, text)))
    return _finish(report, chosen, recipe, text, time.perf_counter() - started)


@takes(QuantizeOptions, "quantize")
def prepare(options: QuantizeOptions) -> tuple[Prepared, Estimate]:
    """Return the planned conversion, and the estimate: what ``ingot quantize --dry-run`` prints. Writes nothing.

    The caller closes the plan. Raises the errors of ``quantize``.
    """
    check_options(options)
    chosen = choose_for(options)
    _require_source(options, chosen)
    mode = _mode(options, chosen)
    recipe = _recipe(options, chosen, calibrated=mode != NONE)
    prepared = _prepare(options, chosen, recipe)
    try:
        require_accepted(prepared, chosen, recipe)
        seconds, memory = _rounding(prepared, options, chosen, _candidates(mode)[0])
        estimate = Estimate(mode, 0.0, seconds, memory)
        if mode in (AUTO, FULL, IMPORTANCE):
            mode = IMPORTANCE if mode == IMPORTANCE else FULL
            estimate = _estimate(_model_calibration(options, mode).plan(), mode, (seconds, memory))
    except BaseException:
        prepared.checkpoint.close()
        raise
    return prepared, estimate


def choose_for(options: QuantizeOptions) -> Chosen:
    """Return the program, container and recipes that the options choose; see ``conversion.choose_preset.choose``."""
    return choose(
        Location.parse(options.out),
        runtime=options.runtime,
        bits=options.bits,
        type=options.type,
        preset=options.preset,
        format=options.format,
    )


def with_quantizer(recipe: Recipe, quantizer: str) -> Recipe:
    """Return a recipe whose rules with a quantizer, and whose mixture's rules, use this one."""

    def changed(rule: Rule) -> Rule:
        choice = rule.choice
        if not isinstance(choice, Choice) or choice.quantizer is None:
            return rule
        options = {key: value for key, value in choice.options.items() if key != "act_order"}
        return replace(rule, choice=replace(choice, options=options, quantizer=quantizer))

    mixture = recipe.mixture
    if mixture is not None and mixture.quantizer is not None:
        mixture = replace(mixture, quantizer=quantizer)
    return replace(recipe, rules=tuple(map(changed, recipe.rules)), mixture=mixture)


def with_group_size(recipe: Recipe, size: int) -> Recipe:
    """Return a recipe whose integers in groups have groups of ``size`` columns.

    Raises ``UsageError`` ``quantize.option``: the recipe has no such integers.
    """
    rules = []
    seen: set[tuple[str, ...]] = set()
    for rule in recipe.rules:
        choice = rule.choice
        if not isinstance(choice, Choice) or choice.codec != AffineLayout.codec or choice.options.get("group") == "row":
            rules.append(rule)
        elif (key := (*rule.match, *rule.roles)) not in seen:
            seen.add(key)
            label = f"integers in groups of {size}"
            changed = replace(choice, options={**choice.options, "group": size})
            rules.append(replace(rule, choice=changed, cols_multiple_of=size, label=label))
    if not seen:
        raise UsageError(
            f"--group-size is for presets of integers in groups; {recipe.name} has none", rule="quantize.option"
        )
    return replace(recipe, rules=tuple(rules))


def require_accepted(prepared: Prepared, chosen: Chosen, recipe: Recipe) -> None:
    """Refuse a plan that quantizes nothing, or whose tensors the program does not accept."""
    specs = [step.spec for step in prepared.plan.steps]
    stored = [stored_scheme(spec, chosen.container) for spec in specs]
    if quantizes(recipe) and all(item.storage == "dense" for item in stored):
        raise _nothing(recipe, prepared.source.location)
    if chosen.profile is None:
        return
    answer = accepts_specs(chosen.profile, chosen.container, specs, activations=recipe.activations is not None)
    if not answer.accepted:
        raise refusal(answer, prepared.target.display)


def _require_source(options: QuantizeOptions, chosen: Chosen) -> None:
    """Refuse a model that is quantized already, or that lacks files or keys that the runtime needs.

    The error for a quantized model names the command that converts its format instead, if that command succeeds.
    """
    model = Location.parse(options.model)
    source = open_source(model)
    try:
        dialect = source.packer()
        if dialect is not None:
            raise dialect.refusal()
        if chosen.profile is not None:
            reasons = source_reasons(chosen.profile, chosen.container, source)
            if reasons and not source.is_folder and "config.json" in (model.siblings() or ()):
                raise UsageError(
                    f"this is one file of a model; name the folder, {model.parent.display}, which has its config.json",
                    rule="quantize.model",
                    where=model.display,
                )
            if reasons:
                raise refusal(Answer(chosen.profile, chosen.container, reasons), source.location)
        if options.allow_requantize:
            return
        quantized = next((t for t in as_tensor_map(source.view()).uncached() if not stored_exactly(t)), None)
        stored = None if quantized is None else stored_scheme(quantized, source.format.name).scheme_text
    finally:
        source.close()
    if quantized is not None:
        raise UsageError(
            f"the model is quantized already ({quantized.name} is {stored}); {_move_advice(options, chosen)} "
            "--allow-requantize, which rounds the rounded values again",
            rule="quantize.requantize",
            where=source.location,
        )


def _move_advice(options: QuantizeOptions, chosen: Chosen) -> str:
    """Return advice for a quantized model: the command that keeps its numbers, if it succeeds."""
    runtime = None if chosen.profile is None else chosen.profile.name
    settings = ConvertOptions(options.model, options.out, runtime=runtime, overwrite=options.overwrite)
    try:
        prepare_conversion(settings).checkpoint.close()
    except IngotError:
        return "start from the original model, or pass"
    words = ["ingot", "convert", Location.parse(options.model).display, Location.parse(options.out).display]
    words += ["--for", runtime] if runtime else []
    words += ["--overwrite"] if options.overwrite else []
    return f"`{shlex.join(words)}` keeps its numbers; or pass"


def _mode(options: QuantizeOptions, chosen: Chosen) -> str:
    """Return the mode of calibration; ``FULL`` for a file of statistics."""
    text = str(options.calibration)
    mode = text if text in MODES else FULL
    if mode == NONE and not chosen.plain:
        raise UsageError(
            f"{chosen.calibrated} is rounded by statistics, and there is no preset of its bits without; expected "
            "--calibration auto, full or importance",
            rule="quantize.calibration",
        )
    if mode in (FULL, IMPORTANCE) and not chosen.calibrated:
        raise UsageError(
            f"{chosen.plain} has no calibrated form; expected --calibration auto or none", rule="quantize.calibration"
        )
    if mode == AUTO and not chosen.calibrated:
        return NONE
    return mode


def _prepare(options: QuantizeOptions, chosen: Chosen, recipe: Recipe) -> Prepared:
    """Plan the conversion; a folder in which nothing would be packed is refused as ``quantize.nothing``."""
    try:
        return prepare_conversion(_convert_options(options, chosen, recipe, None))
    except UnsupportedError as error:
        if error.rule != "convert.nothing-packed":
            raise
        raise _nothing(recipe, Location.parse(options.model).display) from error


def _nothing(recipe: Recipe, location: str) -> UnsupportedError:
    return UnsupportedError(
        f"nothing would be quantized: no matrix of this model fits preset {recipe.name}; it may be too small, or its "
        "columns are no multiple of the group. `ingot recipes NAME` prints the rules, and --dry-run the decision for "
        "each tensor",
        rule="quantize.nothing",
        where=location,
    )


def _candidates(mode: str) -> tuple[str, ...]:
    return (FULL, IMPORTANCE) if mode == AUTO else (mode,)


def _recipe(options: QuantizeOptions, chosen: Chosen, *, calibrated: bool) -> Recipe:
    recipe = load_recipe(chosen.calibrated if calibrated or not chosen.plain else chosen.plain)
    return recipe if options.group_size is None else with_group_size(recipe, options.group_size)


def _rounding(prepared: Prepared, options: QuantizeOptions, chosen: Chosen, mode: str) -> tuple[float, int]:
    recipe = _recipe(options, chosen, calibrated=mode != NONE)
    if mode == IMPORTANCE:
        recipe = with_quantizer(recipe, IMPORTANCE)
    source = prepared.source
    model = source.view()
    return estimate_rounding(model, with_model_rules(recipe, model, source.config()) or recipe)


def _convert_options(
    options: QuantizeOptions, chosen: Chosen, recipe: Recipe, statistics: Statistics | Calibration | None
) -> ConvertOptions:
    return ConvertOptions(
        options.model,
        options.out,
        recipe=recipe,
        format=chosen.container,
        max_ram=options.max_ram,
        resume=options.resume,
        overwrite=options.overwrite,
        allow_requantize=options.allow_requantize,
        calibration=statistics if recipe.has_quantizer else None,
    )


def _calibration(
    options: QuantizeOptions, chosen: Chosen, mode: str, rounding: Mapping[str, tuple[float, int]]
) -> tuple[str, Statistics | Calibration | None, str]:
    """Announce the estimated time and memory, and open the statistics or choose a calibration.

    Returns the calibration mode that was chosen, its statistics or the calibration that will collect them (None for
    mode ``none``), and a text for the report.
    """
    if mode == NONE:
        seconds, memory = rounding[NONE]
        _announce(options, Estimate(NONE, 0.0, seconds, memory))
        return NONE, None, "nearest values, without statistics"
    if str(options.calibration) not in MODES:
        seconds, memory = rounding[FULL]
        _announce(options, Estimate(FULL, 0.0, seconds, memory))
        location = Location.parse(options.calibration)
        with open_source(Location.parse(options.model)).view() as model:
            return FULL, Statistics.open(options.calibration, model), f"by the statistics of {location.display}"
    for candidate in _candidates(mode):
        calibration = _model_calibration(options, candidate)
        try:
            plan = calibration.plan()
        except MissingExtraError:
            if mode == AUTO and chosen.plain:
                return NONE, None, "nearest values, without statistics: the extra transformers is not installed"
            raise
        estimate = _estimate(plan, candidate, rounding[candidate])
        _announce(options, estimate)
        if mode == AUTO and not _fits(options, estimate):
            continue
        measured = "statistics of inputs and gradients" if candidate == FULL else "importance of columns"
        return candidate, calibration, f"by {measured}, from {plan.source}"
    if not chosen.plain:
        raise UsageError(
            f"no calibration fits the time, and {chosen.calibrated} has no form without; give more --time",
            rule="quantize.time",
        )
    return NONE, None, "nearest values, without statistics: no calibration fits the time"


def _fits(options: QuantizeOptions, estimate: Estimate) -> bool:
    """Return whether the estimate fits the stated time; without one, whether it is short or the user confirms it."""
    if options.time is not None:
        return estimate.seconds <= parse_time(options.time)
    return estimate.seconds <= LONG or options.confirm is None or options.confirm(estimate)


def _model_calibration(options: QuantizeOptions, mode: str) -> ModelCalibration:
    """Return the calibration of the model for a mode, which has not run yet."""
    from ingot.runtime.calibration.calibrate import ModelCalibration

    settings = CalibrateOptions(options.model, "", max_ram=options.max_ram, progress=options.progress)
    if mode == IMPORTANCE:
        settings = replace(settings, text=BUILT_IN, fisher=False, largest=1)
    return ModelCalibration(settings)


def _estimate(plan: CalibratePlan, mode: str, rounding: tuple[float, int]) -> Estimate:
    """Return the estimate for a calibration and the rounding."""
    return Estimate(mode, plan.seconds, rounding[0], max(plan.memory, rounding[1]))


def _announce(options: QuantizeOptions, estimate: Estimate) -> None:
    if options.announce is not None:
        options.announce(estimate)


def _metadata(recipe: Recipe, text: str) -> Mapping[str, str]:
    return {"ingot.preset": recipe.name, "ingot.rounding": text}


def _finish(report: ConvertReport, chosen: Chosen, recipe: Recipe, text: str, seconds: float) -> QuantizeReport:
    source = open_source(Location.parse(report.destination))
    try:
        answer = None if chosen.profile is None else accepts(chosen.profile, source)
        types = _types(source, chosen.container, report.tensors)
    finally:
        source.close()
    if answer is not None and not answer.accepted:
        raise refusal(answer, f"{report.destination} was written")
    commands = report.commands
    if chosen.profile is not None:
        folder = report.destination.rstrip("/")
        file = f"{folder}/{report.files[0]}" if report.companions or len(report.files) > 1 else report.destination
        commands = command_lines(chosen.profile, chosen.container, report.destination, file)
    return QuantizeReport(
        source=report.source,
        destination=report.destination,
        runtime="" if chosen.profile is None else chosen.profile.label,
        container=chosen.container,
        preset=recipe.name,
        calibration=text,
        size=report.size,
        source_size=report.source_size,
        bits_per_weight=report.bits_per_weight,
        error=_error(report),
        seconds=seconds,
        types=types,
        commands=commands,
        notes=report.notes,
        warnings=report.warnings,
        untested=[] if answer is None else [scheme.name for scheme in answer.untested],
        conversion=report,
    )


def _types(source: Source, container: str, tensors: Sequence[TensorReport]) -> list[StoredType]:
    """Return how the tensors of a result are stored, the largest share first."""
    rules = {tensor.name: tensor.rule for tensor in tensors}
    groups: dict[str, list[tuple[int, str]]] = {}
    for tensor in as_tensor_map(source.catalog.tensors).uncached():
        text = stored_scheme(tensor, container).scheme_text
        groups.setdefault(text, []).append((tensor.nbytes, rules.get(tensor.name, "")))
    total = max(sum(nbytes for items in groups.values() for nbytes, _ in items), 1)
    rows = []
    for text, items in groups.items():
        nbytes = sum(size for size, _ in items)
        names = list(dict.fromkeys(rule for _, rule in items if rule))
        more = [f"{len(names) - _SHOWN_RULES} more rules"] if len(names) > _SHOWN_RULES else []
        rows.append(StoredType(text, len(items), nbytes, nbytes / total, [*names[:_SHOWN_RULES], *more]))
    return sorted(rows, key=lambda row: -row.nbytes)


def _error(report: ConvertReport) -> float | None:
    """Return the RMS error over the RMS value of all tensors that changed; None if it was not measured."""
    noise = sum(outcome.squared_error for outcome in report.rounded)
    signal = sum(outcome.squared_norm for outcome in report.rounded)
    for tensor in report.tensors:
        if tensor.error is not None and tensor.error["rms"]:
            power = tensor.error["rms"] ** 2 * tensor.elements
            noise += power
            signal += power * 10 ** (tensor.error["snr_db"] / 10)
    if not signal:
        return 0.0 if report.exact else None
    return sqrt(noise / signal)
