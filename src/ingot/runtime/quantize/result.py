"""Build the report of a finished quantization: how tensors are stored, the error, and why the result is large."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import sqrt

from ingot.artifacts.open import Source, open_source
from ingot.conversion.choose_preset import Chosen
from ingot.conversion.modelfile import write_modelfile
from ingot.conversion.report import ConvertReport, TensorReport
from ingot.errors import IngotError, install_hint
from ingot.inspect.catalog import mean_bits
from ingot.model.reading.lazy import as_tensor_map
from ingot.naming.names import equal_layers
from ingot.recipes.recipe import Recipe
from ingot.reporting.report import count_text
from ingot.runtime.loading.options import Loading, Measures, Protocol
from ingot.runtime.quantize.option_names import without_foreign_options
from ingot.runtime.quantize.options import QuantizeOptions
from ingot.runtime.quantize.report import QuantizeReport, StoredType
from ingot.runtime.quantize.statistics import NO_EXTRA
from ingot.runtimes.accepts import accepts, refusal
from ingot.runtimes.profile import PROJECTOR
from ingot.runtimes.stored import stored_scheme
from ingot.runtimes.table import command_lines
from ingot.stores.location import Location

_SHOWN_RULES = 2
_SHOWN_NAMES = 3
_LARGER = 1.4
"""The report explains the size if the bits per weight exceed those of the preset by this factor."""
_LARGE_SHARE = 0.02
_TYPES = "types of the tensors"
_REPLACED = " instead of "
_UNCALIBRATED = (
    f"not calibrated: calibration keeps more quality at the same size, and needs `{install_hint('transformers')}`"
)
_WINDOWS = 16  # of the text that ``kl`` measures


def finish(
    options: QuantizeOptions, report: ConvertReport, chosen: Chosen, recipe: Recipe, text: str, seconds: float
) -> QuantizeReport:
    """Return the report of a written result; raise ``runtime.refused`` if the program would not load it."""
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
        write_modelfile(chosen.profile, report.destination, Location.parse(options.model))
        folder = report.destination.rstrip("/")
        file = f"{folder}/{report.files[0]}" if source.is_folder else report.destination
        key = PROJECTOR if options.part == PROJECTOR else chosen.container
        commands = command_lines(chosen.profile, key, report.destination, file)
    larger = _larger(report, recipe, types)
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
        kl=_kl(options, report),
        seconds=seconds,
        types=types,
        commands=commands,
        notes=[*_notes(report, larger), *([_UNCALIBRATED] if text.endswith(NO_EXTRA) else [])],
        larger=larger,
        warnings=report.warnings,
        untested=[] if answer is None else [scheme.name for scheme in answer.untested],
        conversion=report,
    )


def _types(source: Source, container: str, tensors: Sequence[TensorReport]) -> list[StoredType]:
    """Group the tensors of a result by how they are stored; the largest share comes first."""
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
        more = [count_text(len(names) - _SHOWN_RULES, "more rule")] if len(names) > _SHOWN_RULES else []
        rows.append(StoredType(text, [*names[:_SHOWN_RULES], *more], len(items), nbytes, nbytes / total))
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


def _notes(report: ConvertReport, larger: Sequence[str]) -> list[str]:
    """Return the notes of a conversion that the rest of the report does not contain."""
    notes = [note for note in report.notes if not note.startswith(_TYPES) and not (larger and _REPLACED in note)]
    return [without_foreign_options(note) for note in notes]


def _larger(report: ConvertReport, recipe: Recipe, types: Sequence[StoredType]) -> list[str]:
    """Return reasons why a result has more bits per weight than its preset; empty if the difference is small."""
    expected = mean_bits(recipe)
    replaced = [note for note in report.notes if _REPLACED in note]
    if expected is None or (report.bits_per_weight <= _LARGER * expected and not replaced):
        return []
    lines = [f"{report.bits_per_weight:.3f} bits per weight; the matrices of preset {recipe.name} have {expected:.2f}"]
    for item in types:
        reasons = [_without_names(note) for note in replaced if note.startswith(f"{item.stored}{_REPLACED}")]
        if not reasons and item.stored.startswith("dense") and item.share > _LARGE_SHARE:
            reasons = [f"no rule of the preset applies to {_largest_names(report, item)}"]
        if reasons:
            lines.append(f"{100 * item.share:.1f} % of the bytes are {item.stored}: {'; '.join(reasons)}")
    return lines if len(lines) > 1 else []


def _without_names(note: str) -> str:
    """Return a note on a replaced type with the number of tensors instead of their names."""
    reason, _, tensors = note.partition(": ")
    return f"{reason} ({tensors.partition(',')[0]})"


def _largest_names(report: ConvertReport, item: StoredType) -> str:
    """Return the names of the largest tensors to which no rule applies, as text."""
    tensors = [tensor for tensor in report.tensors if tensor.rule.startswith("no rule")]
    tensors.sort(key=lambda tensor: -tensor.nbytes)
    large = [tensor.name for tensor in tensors if tensor.nbytes * 20 >= item.nbytes]
    patterns = [pattern for pattern, _ in equal_layers(large, str, lambda _: None)]
    more = [count_text(len(patterns) - _SHOWN_NAMES, "more name")] if len(patterns) > _SHOWN_NAMES else []
    return ", ".join([*patterns[:_SHOWN_NAMES], *more])


def _kl(options: QuantizeOptions, report: ConvertReport) -> float | None:
    """Return the KL divergence of the result from the source in nats per token of the text; None if not requested."""
    if options.kl is None:
        return None
    from ingot.runtime.evaluation.evaluate import evaluate

    try:
        result = evaluate(
            report.destination,
            options.kl,
            options.model,
            replace(Protocol(), sequences=_WINDOWS, device=options.device),
            Loading(cache=False, max_ram=options.max_ram),
            replace(Measures(), resamples=0),
        )
    except IngotError as error:
        error.add_location(f"{report.destination} is complete, but its KL was not measured")
        raise
    return result.kl
