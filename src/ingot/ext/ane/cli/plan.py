"""``ingot plan``."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from ingot.cli.declare import declare, option
from ingot.cli.output import Json, line, print_json, table
from ingot.core.about import About
from ingot.errors import UsageError, printable
from ingot.ext.ane.options import PlanOptions, SuggestOptions
from ingot.naming.names import equal_layers
from ingot.reporting.report import number, shape_text, size_text

if TYPE_CHECKING:
    from ingot.ext.ane.plan import ChipPlan, WeightPlan

EPILOG = (
    "Examples:\n\n"
    "  ingot plan model.safetensors --chip m1\n\n"
    "  ingot plan ./Llama-3-8B --chip m1,m4,m5 --no-tensors\n\n"
    "  ingot plan model.zt --chip m5 --assume int8=streams --assume '*conv1*:stride=2'\n\n"
    "  ingot plan model.safetensors --chip m4 --suggest m4.toml --max-error 0.1\n\n"
    "  ingot convert model.safetensors model-m4.zt --recipe m4.toml"
)


_LEGEND = (
    "streams: read in its stored bytes. folds: decoded to fp16 before it runs. refused: not compiled. dense: fp16.",
    "!: sources contradict each other. B25, M6, ...: claims and measurements, listed in spec/ane.md.",
)


@declare("plan", EPILOG)
def command(
    options: PlanOptions,
    every: Annotated[bool, About("Show every weight, not one line for equal layers.", ("--all",))] = False,
    list_tensors: Annotated[bool, About("List the weights.", ("--tensors/--no-tensors",))] = True,
    suggest: Annotated[str | None, option(SuggestOptions, "recipe")] = None,
    max_error: Annotated[float | None, option(SuggestOptions, "max_error")] = None,
    overwrite: Annotated[bool, option(SuggestOptions, "overwrite")] = False,
    json: Json = False,
) -> None:
    """Print which weights stream, fold or are refused on an Apple Neural Engine, the deciding gates, and the cost.

    This reads headers, no weights. Nothing has been tested on Apple hardware: every line names its evidence, and `!`
    marks facts on which sources contradict each other.
    """
    if suggest is None and max_error is not None:
        raise UsageError("expected --suggest FILE with --max-error", rule="ane.suggest")
    if suggest is not None:
        suggest_options = SuggestOptions(
            options.path, options.chip, suggest, assume=options.assume, overwrite=overwrite
        )
        _suggest(suggest_options if max_error is None else replace(suggest_options, max_error=max_error), json)
        return
    from ingot.ext.ane.plan import plan

    result = plan(options)
    if json:
        chips = [_data(item) for item in result.chips]
        print_json({"path": result.path, "format": result.format, "notes": [*result.notes], "chips": chips})
        return
    for note in result.notes:
        line(f"note: {note}")
    for item in result.chips:
        _print_chip(item, every, list_tensors)
    for text in _LEGEND:
        line(text)


def _suggest(options: SuggestOptions, json: bool) -> None:
    from ingot.ext.ane.suggest import suggest

    answer = suggest(options)
    print_json(answer) if json else _print_suggestion(answer)


def _data(plan: ChipPlan) -> dict[str, Any]:
    return {
        **dataclasses.asdict(plan),
        "outcomes": plan.outcomes,
        "totals": plan.totals,
        "time": None if plan.time is None else {**dataclasses.asdict(plan.time), "alone": plan.time.alone},
    }


def _print_chip(plan: ChipPlan, every: bool, list_tensors: bool) -> None:
    counts = ", ".join(f"{count} {outcome}" for outcome, count in plan.outcomes.items()) or "no kernels"
    line(f"{plan.product} ({plan.chip}, target {plan.target}): {counts}")
    totals = plan.totals
    time = plan.time
    line(
        f"  kernels {size_text(totals['stored'])} stored, {size_text(totals['moved'])} moved per dispatch, "
        f"{size_text(totals['dense'])} as dense fp16"
    )
    if time is not None:
        floor = f"{number(time.floor, 3)} ms per dispatch + " if time.floor else ""
        line(f"  time    {floor}{number(time.share, 4)} ms for the weights ({time.evidence}: {time.source})")
    elif plan.kernels:
        line("  time    unknown: this chip's bandwidth is not published; --assume bandwidth=GB_PER_S")
    if plan.outcomes.get("refused"):
        line(f"  refused {plan.outcomes['refused']} weights are in no figure: the chip's compiler refuses them")
    tables = sum(weight.tables_fit is False for weight in plan.kernels)
    if tables:
        line(f"  tables  {tables} weights have codebooks that exceed the assumed budget")
    non_kernels = [weight for weight in plan.weights if weight.use != "kernel"]
    if non_kernels:
        counts_by_use = ", ".join(
            f"{sum(item.use == use for item in non_kernels)} {use}" for use in ("gather", "vector", "other")
        )
        line(f"  other   {len(non_kernels)} tensors that are no kernels: {counts_by_use}")
    reasons = Counter(weight.winograd for weight in plan.kernels if weight.winograd is not None)
    for reason, count in reasons.items():
        outcome = f"not: {reason}" if reason else f"may run as Winograd ({_tiles()}; B20; sources disagree before H17)"
        line(f"  winograd {count} convolutions {outcome}")
    _print_forms(plan)
    _print_contradictions(plan)
    if list_tensors and plan.kernels:
        columns = (
            "weight",
            "shape",
            "form",
            "becomes",
            "by gate",
            "evidence",
            "moved",
            "passes",
            "ms",
            "nearest better",
        )
        print()
        table(columns, _rows(plan, every), text_columns=6, optional=("evidence", "nearest better", "passes", "by gate"))


def _tiles() -> str:
    from ingot.ext.ane.chips.descriptor import winograd_cell

    return ", ".join(f"F({out} x {out}, 3 x 3)" for out, _ in winograd_cell("tiles").value)


def _print_contradictions(plan: ChipPlan) -> None:
    """Print the contradictions on which the plan of these weights depends; of all others print only the names."""
    concerned = {key for weight in plan.kernels if weight.decision for key in weight.decision.contradictions}
    for item in plan.contradictions:
        if item.key in concerned:
            keys = ", ".join(item.keys) or "nothing here depends on it"
            line(f"  ! {item.about}: {' / '.join(item.sides)}. Used: {item.used_claim}. --assume: {keys}")
    unused = [item.key for item in plan.contradictions if item.key not in concerned]
    if unused:
        line(f"  !       sources also disagree about forms not used here: {', '.join(unused)}; --json has the sides")


def _print_forms(plan: ChipPlan) -> None:
    for outcome in ("streams", "folds", "refused"):
        labels = [
            f"{label}{'!' if decision.contradictions else ''}"
            for label, decision in plan.forms.items()
            if decision.outcome == outcome
        ]
        if labels:
            line(f"  {outcome:<8}{', '.join(labels)}")


def _rows(plan: ChipPlan, every: bool) -> list[tuple[str, ...]]:
    def key(weight: WeightPlan) -> tuple[str, ...]:
        return (*_cells(weight), weight.name) if every else _cells(weight)

    return [
        (name if len(group) == 1 else f"{name} ({len(group)} x)", *_cells(group[0]))
        for name, group in equal_layers(plan.kernels, lambda weight: weight.name, key)
    ]


def _cells(weight: WeightPlan) -> tuple[str, ...]:
    decision = weight.decision
    room = weight.room
    assert decision is not None
    assert room is not None
    better = ""
    if weight.better is not None:
        better = f"{weight.better.label} {size_text(weight.better.moved)}{' exact' if weight.better.exact else ''}"
    mark = " !" if decision.contradictions else ""
    return (
        shape_text(weight.shape),
        f"{weight.form}{f', {weight.codec}' if weight.form == 'foreign' else ''}",
        f"{decision.outcome}{mark}",
        decision.gate,
        decision.evidence,
        size_text(weight.moved) if weight.moved else "-",
        f"{room.passes}" if weight.moved else "-",
        number(weight.time.share, 3) if weight.time else "-",
        better or "-",
    )


def _print_suggestion(suggestion: Any) -> None:
    print(
        f"{printable(suggestion.recipe)}: for {', '.join(suggestion.chips)}, "
        f"error at most {number(suggestion.max_error, 3)}"
    )
    for choice, count in suggestion.counts.items():
        print(f"  {count:>5} x {choice}")
    print(
        f"  moved {size_text(suggestion.moved_before)} -> {size_text(suggestion.moved)} per dispatch, worst error "
        f"{number(suggestion.worst, 3)} (RMS over RMS, on a sample of each weight)"
    )
    print(f"  next: ingot convert {printable(suggestion.path)} OUT --recipe {printable(suggestion.recipe)}")
