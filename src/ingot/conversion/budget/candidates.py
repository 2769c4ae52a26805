"""What a budget chooses among: tensors that have one type, and what each type makes of them in the target format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import tomli_w

from ingot.artifacts.companions import holds_a_model
from ingot.artifacts.open import Source
from ingot.conversion.budget.report import GroupReport, PointReport, TypeReport
from ingot.conversion.plan import ConvertPlan, decide, layers_of
from ingot.conversion.prepare_source import untangle
from ingot.core.files.allocation import Allocation, frontier
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
    """A conversion that is planned and not begun; ``weights`` is its source as quantizers see it."""

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
    """What a type would do: bytes and choices (None: kept) by the result's names, and bytes beside them.

    What lies beside tensors (headers, padding) and is more than with all of them kept is shared by those that are not.
    """

    label: str
    nbytes: Mapping[str, int]
    choices: Mapping[str, Choice | None]
    beside: int


@dataclass(frozen=True, slots=True)
class Way:
    """One way to store a group: its type, each tensor's choice, and their bytes together."""

    label: str
    choices: tuple[Choice | None, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors of the result that have one type, their sizes, and the ways to store them."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    ways: tuple[Way, ...]


def unit_of(name: str) -> str:
    """Return what is measured together: experts of a layer, as a pattern, else the tensor."""
    return without_expert(name)


@dataclass(slots=True)
class Unit:
    """Tensors that are measured together: their number of weights, and the choices there are, by their text."""

    names: list[str] = field(default_factory=list)
    size: int = 0
    choices: dict[str, Choice] = field(default_factory=dict)


def units_of(groups: Sequence[Group]) -> dict[str, Unit]:
    """Return what is to be measured."""
    found: dict[str, Unit] = {}
    for group in groups:
        for place, (name, size) in enumerate(zip(group.names, group.sizes, strict=True)):
            choices = {repr(choice): choice for way in group.ways if (choice := way.choices[place]) is not None}
            unit = found.setdefault(unit_of(name), Unit())
            unit.names.append(name)
            unit.size += size
            unit.choices |= choices
    return found


def origins_of(planned: Planned) -> dict[str, list[str]]:
    """Return the names in ``weights`` by the result's names that they have there; those that are not known are left
    out."""
    weights, names = planned.weights, [step.tensor.name for step in planned.plan.steps]
    found = {name: [name] for name in names if name in weights}
    missing = {name for name in names if name not in found}
    if missing and holds_a_model(planned.plan.format.name):
        for there, own in names_of(weights).items():
            stacked = there.partition(":expert.")[0]
            if stacked in missing:
                found.setdefault(stacked, []).append(own)
    return found


def survey(
    label: str, recipe: Recipe, planned: Planned, origins: Mapping[str, Sequence[str]], kept: ConvertPlan
) -> Survey:
    """Return what a type does by a plan of it; ``kept`` is the plan that leaves tensors as they are."""
    steps, stay = planned.plan.steps, {step.tensor.name: step for step in kept.steps}
    there, here = layers_of(planned.checkpoint), layers_of(planned.weights)

    def choice_of(step: Step) -> Choice | None:
        name = step.tensor.name
        stays = stay[step.tensor.name]
        same = (step.spec.codec, step.spec.dtype, step.out_bytes) == (
            stays.spec.codec,
            stays.spec.dtype,
            stays.out_bytes,
        )
        if same:
            return None
        for own in origins.get(name, ()):
            rounded = decide(planned.weights, own, recipe, here).choice
            if isinstance(rounded, Choice) and rounded.quantizer is not None:
                return rounded
        choice = decide(planned.checkpoint, name, recipe, there).choice
        return choice if isinstance(choice, Choice) else None

    nbytes = {step.tensor.name: step.out_bytes for step in steps}
    choices = {step.tensor.name: choice_of(step) for step in steps}
    beside = kept.size - sum(step.out_bytes for step in kept.steps)
    changed = [name for name, choice in choices.items() if choice is not None]
    more = planned.plan.size - sum(nbytes.values()) - beside
    for number, name in enumerate(changed):
        nbytes[name] += more * (number + 1) // len(changed) - more * number // len(changed)
    return Survey(label, nbytes, choices, planned.plan.size - sum(nbytes.values()))


def groups_of(planned: Planned, surveys: Sequence[Survey]) -> list[Group]:
    """Return the groups that any type changes; ``surveys`` begin with that of what is kept."""
    sizes = {step.tensor.name: step.tensor.size for step in planned.plan.steps}
    found: dict[str, list[str]] = {}
    together = dict(_together(planned, list(sizes)))
    for name in sizes:
        if any(each.choices[name] is not None for each in surveys):
            found.setdefault(together.get(name, name), []).append(name)
    return [
        Group(tuple(names), tuple(sizes[name] for name in names), tuple(_ways(names, surveys)))
        for names in found.values()
    ]


def _ways(names: Sequence[str], surveys: Sequence[Survey]) -> Iterator[Way]:
    seen: set[str] = set()
    for number, each in enumerate(surveys):
        choices = tuple(each.choices[name] for name in names)
        if repr(choices) not in seen and (number == 0 or any(choices)):
            seen.add(repr(choices))
            yield Way(each.label, choices, sum(each.nbytes[name] for name in names))


def _together(planned: Planned, names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield tensors that are not alone, with what they have in common."""
    fuses = _fuses(planned.plan.format)
    for name in names:
        found = MERGED.fullmatch(name) if fuses else None
        if found is not None:
            part = "qkv" if found["qkv"] else "up" if found["up"] else "down"
            yield name, f"{unit_of(found['before'])}{part}"
        elif unit_of(name) != name:
            yield name, unit_of(name)
    source = planned.source
    there = planned.checkpoint
    tied = frozenset(untangle(source.config(), there).without) if source.is_folder and len(names) else frozenset()
    for head in tied:
        yield head, head
        for name in names:
            if role_of(name) == "embedding" and there[name].shape == there[head].shape:
                yield name, head


def _fuses(format: Format) -> bool:
    """Whether programs that read the format multiply by several matrices as one."""
    return bool(format.traits.config_keys) and not format.traits.one_head


@dataclass(frozen=True, slots=True)
class Maker:
    """Makes recipes: what they are called, groups of tensors, and names of the source by those of the result."""

    name: str
    groups: Sequence[Group]
    origins: Mapping[str, Sequence[str]]

    def recipe(self, picks: Sequence[int]) -> tuple[Recipe, str]:
        """Return the recipe of one way for each group, with its text: a rule for each choice."""
        rules: dict[str, dict[str, Any]] = {}
        for group, pick in zip(self.groups, picks, strict=True):
            way = group.ways[pick]
            for name, choice in zip(group.names, way.choices, strict=True):
                rule = rules.setdefault(repr(choice), _rule(way.label, choice))
                names = (name, *self.origins.get(name, ()))
                rule["match"] += [text for text in dict.fromkeys(map(_pattern, names)) if text not in rule["match"]]
        about = "One rule for each type, with the tensors that have it; move names between rules to change it."
        text = tomli_w.dumps({"name": self.name, "description": about, "rules": list(rules.values())})
        return replace(parse_recipe(text, where="the budget's recipe"), general=False), text


def _pattern(name: str) -> str:
    """Return what a rule knows a tensor by; experts of a layer, which have one type, by one pattern."""
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
    """Bytes that all weight files may take, None where something else is the limit, and the number of weights."""

    size: int | None
    elements: int

    def bits(self, size: float) -> float:
        """Return bytes as bits per weight."""
        return 8 * size / self.elements


def types_of(
    surveys: Sequence[Survey],
    groups: Sequence[Group],
    costs: Sequence[Sequence[float]],
    allocation: Allocation,
    target: Target,
) -> list[TypeReport]:
    """Return what each type alone would give, and how many tensors have it."""
    chosen = [group.ways[way].label for group, way in zip(groups, allocation.picks, strict=True)]
    found = []
    for each in surveys:
        loss = 0.0
        for group, known in zip(groups, costs, strict=True):
            choices = tuple(each.choices[name] for name in group.names)
            loss += next((cost for way, cost in zip(group.ways, known, strict=True) if way.choices == choices), 0.0)
        size = sum(each.nbytes.values()) + each.beside
        count = sum(len(group.names) for group, label in zip(groups, chosen, strict=True) if label == each.label)
        found.append(TypeReport(each.label, size, target.bits(size), loss, count))
    return found


def points_of(
    groups: Sequence[Group], costs: Sequence[Sequence[float]], allocation: Allocation, size: int, target: Target
) -> list[PointReport]:
    """Return some of the sizes at which nothing better is known, and what was chosen among them."""
    sizes, lost = frontier(costs, [[way.nbytes for way in group.ways] for group in groups])
    beside = size - int(allocation.size)
    some = sorted({round(number * (len(sizes) - 1) / (_POINTS - 1)) for number in range(_POINTS)})
    points = [
        PointReport(int(sizes[n]) + beside, target.bits(sizes[n] + beside), max(float(lost[n]), 0.0)) for n in some
    ]
    here = PointReport(size, target.bits(size), allocation.cost, "<- chosen")
    return sorted([*(point for point in points if point.size != size), here], key=lambda point: point.size)


def group_of(group: Group, costs: Sequence[float], pick: int) -> GroupReport:
    """Return what a group has, and what it could have."""
    way = group.ways[pick]
    candidates = {each.label: (each.nbytes, cost) for each, cost in zip(group.ways, costs, strict=True)}
    return GroupReport(group.names, way.label, way.nbytes, costs[pick], candidates)
