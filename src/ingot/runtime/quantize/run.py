"""Quantize a model for a program: choose, estimate, calibrate, convert, and check that the program would load it."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping
from dataclasses import replace

from ingot.artifacts.adapter_files import refuse_adapter
from ingot.artifacts.destination import CPU
from ingot.artifacts.open import open_source
from ingot.codecs.table import stored_exactly
from ingot.conversion.block_types import with_model_rules
from ingot.conversion.choose_preset import Chosen, choose
from ingot.conversion.estimate import Estimate, estimate_rounding
from ingot.conversion.modelfile import require_free
from ingot.conversion.options import ConvertOptions
from ingot.conversion.prepared import Prepared
from ingot.conversion.preset_fit import quantizes
from ingot.conversion.run import convert
from ingot.conversion.run import prepare as prepare_conversion
from ingot.core.options import takes
from ingot.errors import IngotError, UnsupportedError, UsageError
from ingot.model.calibration import Calibration
from ingot.model.layouts.affine import AffineLayout
from ingot.model.reading.lazy import as_tensor_map
from ingot.model.statistics import Statistics
from ingot.quantization import rounding
from ingot.recipes.choice import Choice
from ingot.recipes.load import load_recipe
from ingot.recipes.recipe import Recipe, Rule
from ingot.runtime.quantize.checks import check_options, single_file_error
from ingot.runtime.quantize.option_names import with_commands
from ingot.runtime.quantize.options import AUTO, FULL, GPTQ, GRADES, IMPORTANCE, MODES, NONE, QuantizeOptions
from ingot.runtime.quantize.report import QuantizeReport
from ingot.runtime.quantize.result import finish
from ingot.runtime.quantize.statistics import estimate_statistics, get_statistics, modes
from ingot.runtimes.accepts import Answer, accepts_specs, refusal, source_reasons
from ingot.runtimes.stored import stored_scheme
from ingot.stores.location import Location

_QUANTIZERS = {GPTQ: rounding.GPTQ, IMPORTANCE: rounding.IMPORTANCE}
"""Quantizers that replace those of a recipe, by mode of calibration."""


@takes(QuantizeOptions, "quantize")
def quantize(options: QuantizeOptions) -> QuantizeReport:
    """Quantize a model for a program, and check that the program would load the result.

    ``runtime`` alone decides container and preset. With ``calibration="auto"``, the most exact mode that fits ``time``
    is used: statistics of inputs and gradients, else of inputs, else importance of columns, else none.

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

    Examples
    --------
    >>> report = ingot.quantize("model", "w4", runtime="vllm", calibration="none")
    >>> report.preset, report.commands
    ('w4a16', ['vllm serve w4'])
    """
    check_options(options)
    try:
        return _quantize(options)
    except IngotError as error:
        error.message = with_commands(error.message)
        raise


def _quantize(options: QuantizeOptions) -> QuantizeReport:
    started = time.perf_counter()
    chosen = choose_for(options)
    if chosen.profile is not None:
        require_free(chosen.profile, Location.parse(options.out), overwrite=options.overwrite)
    _require_source(options, chosen)
    mode = _mode(options, chosen)
    first = _recipe(options, chosen, FULL if mode != NONE else NONE)
    with _prepare(options, chosen, first) as prepared:
        require_accepted(prepared, chosen, first)
        rounding = {_name: _rounding(prepared, options, chosen, _name) for _name in modes(mode, chosen)}
    mode, statistics, text = get_statistics(options, chosen, mode, rounding)
    recipe = _recipe(options, chosen, mode)
    settings = _convert_options(options, chosen, recipe, statistics)
    report = convert(replace(settings, progress=options.progress, metadata=_metadata(recipe, text)))
    return finish(options, report, chosen, recipe, text, time.perf_counter() - started)


@takes(QuantizeOptions, "quantize")
def prepare(options: QuantizeOptions) -> tuple[Prepared, Estimate]:
    """Return the planned conversion and the estimate, as ``ingot quantize --dry-run`` prints them.

    Nothing is written. The caller closes the plan. Raises the errors of ``quantize``.
    """
    check_options(options)
    try:
        return _prepare_with_estimate(options)
    except IngotError as error:
        error.message = with_commands(error.message)
        raise


def _prepare_with_estimate(options: QuantizeOptions) -> tuple[Prepared, Estimate]:
    chosen = choose_for(options)
    _require_source(options, chosen)
    mode = _mode(options, chosen)
    recipe = _recipe(options, chosen, FULL if mode != NONE else NONE)
    prepared = _prepare(options, chosen, recipe)
    try:
        require_accepted(prepared, chosen, recipe)
        rounding = {_name: _rounding(prepared, options, chosen, _name) for _name in modes(mode, chosen)}
        estimate = estimate_statistics(options, chosen, mode, rounding)
    except BaseException:
        prepared.checkpoint.close()
        raise
    if estimate.mode == NONE and mode != NONE:
        prepared.checkpoint.close()
        prepared = _prepare(options, chosen, _recipe(options, chosen, NONE))
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
    """Return a recipe in which all rules with a quantizer use ``quantizer``, including the rules of its mixture."""

    def changed(rule: Rule) -> Rule:
        choice = rule.choice
        if not isinstance(choice, Choice) or choice.quantizer is None:
            return rule
        ordered = quantizer != rounding.IMPORTANCE  # only error feedback has an order of columns
        options = {key: value for key, value in choice.options.items() if ordered or key != "act_order"}
        return replace(rule, choice=replace(choice, options=options, quantizer=quantizer))

    mixture = recipe.mixture
    if mixture is not None and mixture.quantizer is not None:
        mixture = replace(mixture, quantizer=quantizer)
    return replace(recipe, rules=tuple(map(changed, recipe.rules)), mixture=mixture)


def with_group_size(recipe: Recipe, size: int) -> Recipe:
    """Return a recipe whose grouped integers have groups of ``size`` columns.

    Raises ``UsageError`` ``quantize.option`` if the recipe has no grouped integers.
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
    """Raise an error if a plan quantizes nothing, or if the program does not accept its tensors."""
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
    """Raise an error if a model is quantized already, or lacks files or keys that the runtime needs.

    The error for a quantized model names the command that only converts its format, if that command would succeed.
    """
    model = Location.parse(options.model)
    source = open_source(model)
    try:
        refuse_adapter(source)
        dialect = source.packer()
        if dialect is not None:
            raise dialect.refusal()
        if chosen.profile is not None:
            reasons = source_reasons(chosen.profile, chosen.container, source)
            if reasons and not source.is_folder and "config.json" in (model.siblings() or ()):
                raise single_file_error(model)
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
    """Return advice for a quantized model: the command that keeps its integers, if that command would succeed."""
    runtime = None if chosen.profile is None else chosen.profile.name
    settings = ConvertOptions(
        options.model, options.out, runtime=runtime, overwrite=options.overwrite, part=options.part
    )
    try:
        prepare_conversion(settings).checkpoint.close()
    except IngotError:
        return "start from the original model, or pass"
    words = ["ingot", "convert", Location.parse(options.model).display, Location.parse(options.out).display]
    words += ["--for", runtime] if runtime else []
    words += ["--overwrite"] if options.overwrite else []
    return f"`{shlex.join(words)}` keeps its numbers; or pass"


def _mode(options: QuantizeOptions, chosen: Chosen) -> str:
    """Return the mode of calibration, or ``FULL`` for a file of statistics."""
    text = str(options.calibration)
    mode = text if text in MODES else FULL
    if mode == NONE and not chosen.plain:
        raise UsageError(
            f"{chosen.calibrated} is rounded by statistics, and there is no preset of its bits without; expected "
            f"--calibration {AUTO}, {', '.join(GRADES[:-1])} or {GRADES[-1]}",
            rule="quantize.calibration",
        )
    if mode in GRADES and not chosen.calibrated:
        raise UsageError(
            f"{chosen.plain} has no calibrated form; expected --calibration auto or none", rule="quantize.calibration"
        )
    if mode == AUTO and not chosen.calibrated:
        return NONE
    return mode


def _prepare(options: QuantizeOptions, chosen: Chosen, recipe: Recipe) -> Prepared:
    """Plan the conversion; raise ``quantize.nothing`` if nothing would be packed into a folder."""
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


def _recipe(options: QuantizeOptions, chosen: Chosen, mode: str) -> Recipe:
    recipe = load_recipe(chosen.calibrated if mode != NONE or not chosen.plain else chosen.plain)
    if options.group_size is not None:
        recipe = with_group_size(recipe, options.group_size)
    return with_quantizer(recipe, _QUANTIZERS[mode]) if mode in _QUANTIZERS else recipe


def _rounding(prepared: Prepared, options: QuantizeOptions, chosen: Chosen, mode: str) -> tuple[float, int]:
    recipe = _recipe(options, chosen, mode)
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
        part=options.part,
        max_ram=options.max_ram,
        device=options.device if recipe.has_quantizer else CPU,
        resume=options.resume,
        overwrite=options.overwrite,
        allow_requantize=options.allow_requantize,
        calibration=statistics if recipe.has_quantizer else None,
    )


def _metadata(recipe: Recipe, text: str) -> Mapping[str, str]:
    return {"ingot.preset": recipe.name, "ingot.rounding": text}
