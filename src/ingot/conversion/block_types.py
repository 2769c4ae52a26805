"""Rules that a recipe gets for a specific model, and notes on the block types in a GGUF file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ingot.engine.work import Step
from ingot.formats.base import Format
from ingot.formats.gguf.header import type_of
from ingot.model.checkpoint import Checkpoint
from ingot.model.layouts.ggml import TYPES, GgmlBlocksLayout
from ingot.naming.names import equal_layers, role_of
from ingot.recipes.choice import Choice
from ingot.recipes.llama_cpp_mixtures import expand, facts_of
from ingot.recipes.recipe import Recipe, Rule
from ingot.reporting.report import count_text

_GGUF = "gguf"
_HEAD = "head"
_EMBEDDING = "embedding"
_WITH_HEAD = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


def with_model_rules(recipe: Recipe | None, checkpoint: Checkpoint, config: Mapping[str, Any]) -> Recipe | None:
    """Return the recipe with rules that depend on the model.

    These are the rules for the types of a mixture such as ``Q4_K_M``. If the model has a tied head, rules that round
    heads with statistics also apply to the embedding.
    """
    if recipe is None:
        return recipe
    if recipe.mixture is None:
        tied = _with_tied_head(recipe)
        return tied if tied is not recipe and _has_tied_head(checkpoint, config) else recipe
    shapes = {checkpoint.aliases.get(name, name): checkpoint[name].shape for name in checkpoint}
    return expand(recipe, facts_of(shapes, config, checkpoint.metadata))


def _has_tied_head(checkpoint: Checkpoint, config: Mapping[str, Any]) -> bool:
    architectures = config.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    generates = not names or any(str(name).endswith(_WITH_HEAD) for name in names)
    return generates and all(role_of(name) != _HEAD for name in checkpoint)


def _with_tied_head(recipe: Recipe) -> Recipe:
    """Return the recipe in which rules with a quantizer for heads also apply to embeddings."""
    rules = [
        replace(rule, roles=(*rule.roles, _EMBEDDING))
        if _HEAD in rule.roles and isinstance(rule.choice, Choice) and rule.choice.quantizer is not None
        else rule
        for rule in recipe.rules
    ]
    return recipe if rules == list(recipe.rules) else replace(recipe, rules=tuple(rules))


def type_notes(steps: Sequence[Step], format: Format, recipe: Recipe | None) -> list[str]:
    """Return notes on the types that a recipe chose for a GGUF file, and on each type that was replaced by another."""
    if format.name != _GGUF or recipe is None:
        return []
    fallbacks = _fallback_notes(steps, recipe)
    if not fallbacks and all(step.spec.codec != GgmlBlocksLayout.codec for step in steps):
        return []
    sizes: Counter[str] = Counter()
    for step in steps:
        sizes[type_of(step.spec).upper()] += step.spec.nbytes or 0
    total = max(sum(sizes.values()), 1)
    shares = ", ".join(f"{name} {size / total:.1%}" for name, size in sizes.most_common())
    return [f"types of the tensors, by bytes: {shares}", *fallbacks]


def _fallback_notes(steps: Sequence[Step], recipe: Recipe) -> list[str]:
    """Return notes on tensors that got a fallback type.

    There is one note for each combination of requested type, stored type and number of columns.
    """
    fallbacks = {**_rule_fallbacks(recipe), **recipe.fallbacks}
    groups: dict[tuple[str, str, int], list[str]] = {}
    for step in steps:
        labels = (label for label in fallbacks if step.rule == label or step.rule.startswith(f"{label} ("))
        label = next(labels, None)
        if label is not None:
            groups.setdefault((*fallbacks[label], step.spec.shape[-1]), []).append(step.spec.name)
    notes = []
    for (requested, stored, columns), names in groups.items():
        patterns = ", ".join(pattern for pattern, _ in equal_layers(names, str, lambda _: None))
        reason = f"{TYPES[requested].elements} does not divide {columns} columns"
        notes.append(
            f"{stored.upper()} instead of {requested.upper()}, because {reason}: "
            f"{count_text(len(names), 'tensor')}, {patterns}"
        )
    return notes


def _rule_fallbacks(recipe: Recipe) -> dict[str, tuple[str, str]]:
    """Return the requested and the stored type of each fallback rule, keyed by the rule's label.

    A fallback rule applies to matrices whose columns the block of an earlier rule does not divide.
    """
    requested: dict[Rule, str] = {}
    fallbacks = {}
    for rule in recipe.rules:
        if not isinstance(rule.choice, Choice) or rule.choice.codec != GgmlBlocksLayout.codec:
            continue
        stored = str(rule.choice.options["type"])
        conditions = replace(rule, choice=None, label="", cols_multiple_of=1)
        first = requested.setdefault(conditions, stored)
        if TYPES[stored].elements < TYPES[first].elements:
            fallbacks[rule.label] = first, stored
    return fallbacks
