"""What was asked of a conversion and has no effect: rules that hit nothing, norms of activations that nobody uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ingot.core.suggest import did_you_mean
from ingot.errors import UsageError
from ingot.formats.base import Format
from ingot.model.checkpoint import Checkpoint
from ingot.model.layouts.dense import DenseLayout
from ingot.model.layouts.ggml import GgmlBlocksLayout
from ingot.model.layouts.palette import PaletteLayout
from ingot.model.tensor import Array
from ingot.recipes.choice import Choice, Measured
from ingot.recipes.recipe import Decision, Recipe, Rule

# So many rules are named one by one.
_NAMED = 8


def without_effect(
    recipe: Recipe | None, decisions: Mapping[str, Decision], importance: Mapping[str, Array]
) -> list[str]:
    """Return a line for each thing that was asked for and does nothing.

    Parameters
    ----------
    recipe : Recipe or None
    decisions : what it says of each tensor, by name
    importance : what errors of columns weigh, by name of the matrix
    """
    notes = []
    if recipe is not None and decisions:
        notes += _idle_rules(recipe, decisions)
    if importance and not any(_weighs(decisions[name].choice) for name in importance if name in decisions):
        notes.append(
            "--importance has no effect: errors of columns are weighed where a recipe makes palettes or searches "
            "ggml's blocks, and it does that to none of these matrices"
        )
    return notes


def constants_that_stay(source: Checkpoint, format: Format, decisions: Mapping[str, Decision]) -> list[str]:
    """Return a line for each reason why a program keeps tensors that a recipe would change."""
    reasons: dict[str, list[str]] = {}
    for name, decision in decisions.items():
        choice, reason = decision.choice, format.why_constant(name)
        plain = isinstance(choice, Choice) and choice.codec == DenseLayout.codec and not choice.options
        dense = plain and source[name].codec == DenseLayout.codec  # it is stored so already
        if choice is not None and reason is not None and not dense:
            reasons.setdefault(reason, []).append(name)
    lines = []
    for reason, names in reasons.items():
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        count = "1 tensor stays as it is" if len(names) == 1 else f"{len(names)} tensors stay as they are"
        listed = ", ".join(name[:200] for name in names[:_NAMED])
        lines.append(f"{count}, whatever the recipe says ({reason}): {listed}{more}")
    return lines


def require_effect(warnings: Sequence[str]) -> None:
    """Refuse what has no effect; raises ``UsageError`` ``convert.idle``."""
    if warnings:
        raise UsageError("; ".join(warnings), rule="convert.idle")


def _idle_rules(recipe: Recipe, decisions: Mapping[str, Decision]) -> list[str]:
    hit = {decision.rule_index for decision in decisions.values()}
    if hit == {None} and recipe.rules:
        text = (
            f"recipe {recipe.name} changes nothing here: no rule hits any of {len(decisions)} tensors. Rules go by "
            "role, name and shape (`ingot recipes`); those of ane-m1, ane-m4, ane-m5 and ane-int8 take names that say "
            "nothing"
        )
        return [text]
    if recipe.general:
        return []
    idle = [(index, rule) for index, rule in enumerate(recipe.rules) if index not in hit]
    lines = [_line(index, rule, decisions) for index, rule in idle[:_NAMED]]
    return lines + ([f"{len(idle) - _NAMED} more rules hit no tensor"] if len(idle) > _NAMED else [])


def _line(index: int, rule: Rule, names: Mapping[str, Decision]) -> str:
    near = next((hint for text in rule.match if text not in names and (hint := did_you_mean(text, names))), "")
    return f"rules[{index}] ({rule.label}) hits no tensor: none fits, or rules before it take those that do{near}"


def _weighs(choice: Choice | Measured | None) -> bool:
    """Whether a choice, or one of its candidates, looks at what errors of columns weigh."""
    ways = choice.candidates if isinstance(choice, Measured) else (choice,)
    return any(option is not None and weighs(option) for option in ways)


def weighs(choice: Choice) -> bool:
    """Whether a way to store a tensor looks at what errors of its columns weigh."""
    if choice.codec == GgmlBlocksLayout.codec:
        return choice.options.get("search", True) is True
    return choice.codec == PaletteLayout.codec and choice.options.get("vector", 1) == 1
