"""The recipe that a budget came to, and its text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tomli_w

from ingot.ops.convert.budget_groups import KEEP, Group, unit_of
from ingot.recipes.choice import Choice
from ingot.recipes.load import parse_recipe
from ingot.recipes.patterns import exactly
from ingot.recipes.recipe import Recipe


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
