"""The options of a budget search: groups of tensors that share one type, and the effect of each type.

A type (``--types``) is a preset or recipe that stores each tensor in a certain way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import tomli_w

from ingot.artifacts.companions import has_model_metadata
from ingot.artifacts.open import Source
from ingot.conversion.budget.report import GroupReport, PointReport, TypeReport
from ingot.conversion.plan import ConvertPlan, decide, layers_of
from ingot.conversion.prepare_source import resolve_tied_head
from ingot.core.numeric.knapsack import Allocation, frontier
from ingot.engine.work import Step
from ingot.formats.base import Format
from ingot.model.checkpoint import Checkpoint
from ingot.naming.names import MERGED, role_of, without_expert
from ingot.recipes.choice import Choice
from ingot.recipes.load import parse_recipe
from ingot.recipes.recipe import Recipe, exactly
from ingot.translate.imatrix import names_of

KEEP = "as stored"


class Planned(Protocol):
    """A planned conversion that has not been executed; ``weights`` is the view of its source that quantizers read."""

    @property
    def source(self) -> Source: ...

    @property
    def checkpoint(self) -> Checkpoint: ...

    @property
    def weights(self) -> Checkpoint: ...

    @property
    def plan(self) -> ConvertPlan: ...

    def __enter__(self) -> Planned: ...

    def __exit__(self, *_: object) -> None: ...


@dataclass(frozen=True, slots=True)
class Survey:
    """The effect of a type on the result, from its plan.

    ``nbytes`` and ``choices`` are keyed by the names of the result's tensors; a choice of None means that the tensor is
    unchanged. ``overhead`` is the number of bytes outside of tensors (headers, padding) if all tensors are unchanged.
    If the type needs more overhead, ``nbytes`` of the changed tensors include it in equal shares.
    """

    label: str
    nbytes: Mapping[str, int]
    choices: Mapping[str, Choice | None]
    overhead: int


@dataclass(frozen=True, slots=True)
class StorageOption:
    """One option of a group: the label of the type, the choice for each tensor, and their total size in bytes."""

    label: str
    choices: tuple[Choice | None, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors of the result that must have the same type, and the types to choose among.

    ``sizes`` are the numbers of elements of the tensors.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    options: tuple[StorageOption, ...]


def unit_of(name: str) -> str:
    """Return the name of the unit in which a tensor is measured.

    All experts of a layer are one unit, whose name is a pattern; any other tensor is a unit.
    """
    return without_expert(name)


@dataclass(slots=True)
class Unit:
    """Tensors that are measured together: names, total number of elements, and choices, keyed by their text."""

    names: list[str] = field(default_factory=list)
    size: int = 0
    choices: dict[str, Choice] = field(default_factory=dict)


def units_of(groups: Sequence[Group]) -> dict[str, Unit]:
    """Return the units of measurement of the groups' tensors, keyed by name."""
    units: dict[str, Unit] = {}
    for group in groups:
        for index, (name, size) in enumerate(zip(group.names, group.sizes, strict=True)):
            choices = {
                repr(choice): choice for option in group.options if (choice := option.choices[index]) is not None
            }
            unit = units.setdefault(unit_of(name), Unit())
            unit.names.append(name)
            unit.size += size
            unit.choices |= choices
    return units


def origins_of(planned: Planned) -> dict[str, list[str]]:
    """Return, for each tensor of the result, the names in ``weights`` of the tensors from which it is computed.

    Tensors whose origins cannot be determined are missing from the result.
    """
    weights = planned.weights
    names = [step.tensor.name for step in planned.plan.steps]
    origins = {name: [name] for name in names if name in weights}
    missing = {name for name in names if name not in origins}
    if missing and has_model_metadata(planned.plan.format.name):
        for gguf_name, weight_name in names_of(weights).items():
            stacked = gguf_name.partition(":expert.")[0]
            if stacked in missing:
                origins.setdefault(stacked, []).append(weight_name)
    return origins


def survey_type(
    label: str, recipe: Recipe, planned: Planned, origins: Mapping[str, Sequence[str]], unchanged: ConvertPlan
) -> Survey:
    """Return the effect of a type, given its plan and the plan ``unchanged`` in which all tensors keep their types."""
    steps = planned.plan.steps
    unchanged_steps = {step.tensor.name: step for step in unchanged.steps}
    result_layers = layers_of(planned.checkpoint)
    source_layers = layers_of(planned.weights)

    def storage(step: Step) -> tuple[str, str, int]:
        return step.spec.codec, step.spec.dtype, step.out_bytes

    def choice_of(step: Step) -> Choice | None:
        name = step.tensor.name
        if storage(step) == storage(unchanged_steps[name]):
            return None
        for origin in origins.get(name, ()):
            rounded = decide(planned.weights, origin, recipe, source_layers).choice
            if isinstance(rounded, Choice) and rounded.quantizer is not None:
                return rounded
        choice = decide(planned.checkpoint, name, recipe, result_layers).choice
        return choice if isinstance(choice, Choice) else None

    nbytes = {step.tensor.name: step.out_bytes for step in steps}
    choices = {step.tensor.name: choice_of(step) for step in steps}
    overhead = unchanged.size - sum(step.out_bytes for step in unchanged.steps)
    changed = [name for name, choice in choices.items() if choice is not None]
    extra = planned.plan.size - sum(nbytes.values()) - overhead
    for index, name in enumerate(changed):
        nbytes[name] += extra * (index + 1) // len(changed) - extra * index // len(changed)
    return Survey(label, nbytes, choices, planned.plan.size - sum(nbytes.values()))


def groups_of(planned: Planned, surveys: Sequence[Survey]) -> list[Group]:
    """Return the groups that at least one type changes.

    The first of ``surveys`` must be the survey of unchanged tensors.
    """
    sizes = {step.tensor.name: step.tensor.size for step in planned.plan.steps}
    names_by_group: dict[str, list[str]] = {}
    shared = dict(_shared_groups(planned, list(sizes)))
    for name in sizes:
        if any(survey.choices[name] is not None for survey in surveys):
            names_by_group.setdefault(shared.get(name, name), []).append(name)
    return [
        Group(tuple(names), tuple(sizes[name] for name in names), tuple(_storage_options(names, surveys)))
        for names in names_by_group.values()
    ]


def _storage_options(names: Sequence[str], surveys: Sequence[Survey]) -> Iterator[StorageOption]:
    """Yield the different options of a group; the first option keeps all tensors unchanged."""
    seen: set[str] = set()
    for index, survey in enumerate(surveys):
        choices = tuple(survey.choices[name] for name in names)
        if repr(choices) not in seen and (index == 0 or any(choices)):
            seen.add(repr(choices))
            yield StorageOption(survey.label, choices, sum(survey.nbytes[name] for name in names))


def _shared_groups(planned: Planned, names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the name and group of each tensor that must share its type: in merged matrices, experts and tied heads."""
    fuses = _fuses(planned.plan.format)
    for name in names:
        match = MERGED.fullmatch(name) if fuses else None
        if match is not None:
            part = "qkv" if match["qkv"] else "up" if match["up"] else "down"
            yield name, f"{unit_of(match['before'])}{part}"
        elif unit_of(name) != name:
            yield name, unit_of(name)
    source = planned.source
    if not (source.is_folder and len(names)):
        return
    checkpoint = planned.checkpoint
    for head in frozenset(resolve_tied_head(source.config(), checkpoint).without):
        yield head, head
        for name in names:
            if role_of(name) == "embedding" and checkpoint[name].shape == checkpoint[head].shape:
                yield name, head


def _fuses(format: Format) -> bool:
    """Return whether runtimes that read the format merge several matrices into one."""
    return bool(format.traits.config_keys) and not format.traits.one_head


@dataclass(frozen=True, slots=True)
class RecipeBuilder:
    """A builder of recipes from the picks of a search.

    A pick is the index of an option of each group. ``origins`` is the result of ``origins_of``.
    """

    name: str
    groups: Sequence[Group]
    origins: Mapping[str, Sequence[str]]

    def recipe(self, picks: Sequence[int]) -> tuple[Recipe, str]:
        """Return the recipe for ``picks``, with a rule for each choice, and the recipe as TOML text."""
        rules: dict[str, dict[str, Any]] = {}
        for group, pick in zip(self.groups, picks, strict=True):
            option = group.options[pick]
            for name, choice in zip(group.names, option.choices, strict=True):
                rule = rules.setdefault(repr(choice), _rule(option.label, choice))
                names = (name, *self.origins.get(name, ()))
                rule["match"] += [text for text in dict.fromkeys(map(_pattern, names)) if text not in rule["match"]]
        about = "One rule for each type, with the tensors that have it; move names between rules to change it."
        text = tomli_w.dumps({"name": self.name, "description": about, "rules": list(rules.values())})
        return replace(parse_recipe(text, location="the budget's recipe"), general=False), text


def _pattern(name: str) -> str:
    """Return the pattern of a tensor's rule; the experts of a layer share a type, and therefore a pattern."""
    return exactly(name) if unit_of(name) == name or exactly(name) != name else unit_of(name)


def _rule(label: str, choice: Choice | None) -> dict[str, Any]:
    if choice is None:
        return {"label": KEEP, "match": [], "keep": True}
    rule: dict[str, Any] = {"label": label, "match": [], "codec": choice.codec, "options": dict(choice.options)}
    if choice.encoding != "raw":
        rule["encoding"] = choice.encoding
    if choice.quantizer is not None:
        rule["quantizer"] = choice.quantizer
    return rule


_POINTS = 12


@dataclass(frozen=True, slots=True)
class Target:
    """The limit of a search.

    ``size`` is the maximum size of all weight files in bytes; None if the divergence is limited instead. ``elements``
    is the number of elements of all tensors.
    """

    size: int | None
    elements: int

    def bits(self, size: float) -> float:
        """Return a size in bytes as bits per weight."""
        return 8 * size / self.elements


def types_of(
    surveys: Sequence[Survey],
    groups: Sequence[Group],
    costs: Sequence[Sequence[float]],
    allocation: Allocation,
    target: Target,
) -> list[TypeReport]:
    """Return a report on each type: size and loss if all tensors had it, and the number of tensors that got it."""
    chosen = [group.options[pick].label for group, pick in zip(groups, allocation.picks, strict=True)]
    reports = []
    for survey in surveys:
        loss = 0.0
        for group, group_costs in zip(groups, costs, strict=True):
            choices = tuple(survey.choices[name] for name in group.names)
            pairs = zip(group.options, group_costs, strict=True)
            loss += next((cost for option, cost in pairs if option.choices == choices), 0.0)
        size = sum(survey.nbytes.values()) + survey.overhead
        count = sum(len(group.names) for group, label in zip(groups, chosen, strict=True) if label == survey.label)
        reports.append(TypeReport(survey.label, size, target.bits(size), loss, count))
    return reports


def points_of(
    groups: Sequence[Group], costs: Sequence[Sequence[float]], allocation: Allocation, size: int, target: Target
) -> list[PointReport]:
    """Return evenly spaced points of the frontier of size and loss, and the point of the chosen recipe."""
    sizes, losses = frontier(costs, [[option.nbytes for option in group.options] for group in groups])
    overhead = size - int(allocation.size)
    indices = sorted({round(index * (len(sizes) - 1) / (_POINTS - 1)) for index in range(_POINTS)})
    points = [
        PointReport(int(sizes[i]) + overhead, target.bits(sizes[i] + overhead), max(float(losses[i]), 0.0))
        for i in indices
    ]
    chosen = PointReport(size, target.bits(size), allocation.cost, "<- chosen")
    return sorted([*(point for point in points if point.size != size), chosen], key=lambda point: point.size)


def group_report(group: Group, costs: Sequence[float], pick: int) -> GroupReport:
    """Return the report of a group: its chosen type, and the bytes and loss of every type."""
    picked = group.options[pick]
    candidates = {option.label: (option.nbytes, cost) for option, cost in zip(group.options, costs, strict=True)}
    return GroupReport(group.names, picked.label, picked.nbytes, costs[pick], candidates)
