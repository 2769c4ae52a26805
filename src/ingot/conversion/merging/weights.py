"""Weights and densities of models for chosen layers, roles or names, from a TOML file (``--weights``)."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from ingot.conversion.merging.methods import WITH_DENSITY, WITHOUT_BASE
from ingot.core.parsing.strictjson import preload
from ingot.errors import UsageError
from ingot.model.checkpoint import Checkpoint
from ingot.naming.names import count_layers, layer_of, role_of
from ingot.recipes.recipe import Rule, Subject
from ingot.stores.location import AnyPath, Location

RULE = "merge.weights"
_MAX_FILE = 1 << 20
_LAYOUT = "[[rules]] tables with the keys model, match, exclude, roles, layers, weight and density"


@preload
class _RuleEntry(msgspec.Struct, forbid_unknown_fields=True):
    """One table ``[[rules]]`` of the file."""

    model: str | None = None
    match: str | list[str] = []
    exclude: str | list[str] = []
    roles: str | list[str] = []
    layers: str = ""
    weight: float | None = None
    density: float | None = None


@preload
class _File(msgspec.Struct, forbid_unknown_fields=True):
    rules: list[_RuleEntry]


@dataclass(frozen=True)
class WeightRule:
    """A rule of the file: a weight, a density, or both, for tensors that meet the conditions of ``rule``.

    ``model`` is the index of the model, the base first; None for all models.
    """

    rule: Rule
    model: int | None
    weight: float | None
    density: float | None


@dataclass(frozen=True)
class WeightRules:
    """The rules of a file.

    The weight of a model for a tensor comes from the first rule that has a weight and applies to both. The density
    comes from the first rule that has a density and applies to both. ``location`` is the file, for errors.
    """

    rules: tuple[WeightRule, ...] = ()
    location: str = ""
    _used: set[int] = field(default_factory=set, compare=False)

    def numbers(self, subject: Subject, model: int, weight: float, density: float) -> tuple[float, float]:
        """Return the weight and the density of a model for a tensor; without a rule, ``weight`` and ``density``."""
        numbers = {"weight": weight, "density": density}
        remaining = ["weight", "density"]
        for index, item in enumerate(self.rules):
            names = [name for name in remaining if getattr(item, name) is not None]
            if not names or item.model not in (None, model) or not item.rule.hits(subject):
                continue
            self._used.add(index)
            for name in names:
                numbers[name] = getattr(item, name)
                remaining.remove(name)
        return numbers["weight"], numbers["density"]

    def require_all_used(self) -> None:
        """Raise ``UsageError`` ``merge.weights`` if a rule has applied to no tensor; to be called after all
        ``numbers``.
        """
        unused = [item.rule.label for index, item in enumerate(self.rules) if index not in self._used]
        if unused:
            raise UsageError(
                f"{unused[0]} applies to no tensor: none meets its conditions, or earlier rules apply to all of them",
                rule=RULE,
                where=self.location,
            )


def subjects_of(checkpoint: Checkpoint) -> dict[str, Subject]:
    """Return the properties of each tensor by which rules select, keyed by name."""
    count = count_layers(checkpoint)
    return {
        name: Subject(
            name,
            role_of(name),
            layer_of(name),
            count,
            tensor.dtype,
            len(tensor.shape),
            tensor.size,
            tensor.shape[-1] if tensor.shape else 1,
        )
        for name, tensor in checkpoint.items()
    }


def load_weights(path: AnyPath | None, models: Sequence[str], method: str) -> WeightRules:
    """Return the rules of a TOML file; an empty set of rules for None.

    ``models`` are the names of the models on the command line, the base first.

    Raises ``UsageError`` ``merge.weights``: the file cannot be read, names a model that is not merged, or contains a
    value that the method does not use; and the errors of a recipe's conditions.
    """
    if path is None:
        return WeightRules()
    location = Location.parse(path)
    text = location.display
    data = location.head(_MAX_FILE + 1)
    if len(data) > _MAX_FILE:
        raise UsageError(f"expected at most {_MAX_FILE} bytes", rule=RULE, where=text)
    try:
        file = msgspec.convert(tomllib.loads(data.decode("utf-8")), _File)
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise UsageError(f"expected {_LAYOUT}; {str(error)[:200]}", rule=RULE, where=text) from None
    if not file.rules:
        raise UsageError(f"expected {_LAYOUT}, found no table", rule=RULE, where=text)
    numbered = enumerate(file.rules)
    return WeightRules(tuple(_weight_rule(index, entry, models, method, text) for index, entry in numbered), text)


def _weight_rule(index: int, entry: _RuleEntry, models: Sequence[str], method: str, text: str) -> WeightRule:
    label = f"rules[{index}]"
    location = f"{text}: {label}"
    if entry.weight is None and entry.density is None:
        raise UsageError("expected a weight or a density", rule=RULE, where=location)
    if entry.weight is not None and not math.isfinite(entry.weight):
        raise UsageError(f"expected a finite weight, found {entry.weight}", rule=RULE, where=location)
    if entry.density is not None:
        require_density(entry.density, method, location)
    model = None if entry.model is None else _model_index(entry.model, models, location)
    if model == 0 and method not in WITHOUT_BASE:
        raise UsageError(f"the base has no weight in {method}; name another model", rule=RULE, where=location)
    try:
        rule = Rule(None, label, _texts(entry.match), _texts(entry.exclude), _texts(entry.roles), entry.layers)
    except UsageError as error:
        raise error.add_location(location) from None
    return WeightRule(rule, model, entry.weight, entry.density)


def _model_index(name: str, models: Sequence[str], location: str) -> int:
    indices = [index for index, model in enumerate(models) if name in (model, model.rstrip("/").rpartition("/")[2])]
    if len(indices) != 1:
        problem = "which is not merged" if not indices else "which is the name of several models"
        raise UsageError(
            f"expected one of the models {', '.join(models)}; found {name[:200]!r}, {problem}",
            rule=RULE,
            where=location,
        )
    return indices[0]


def _texts(value: str | list[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def require_density(density: float, method: str, location: str = "") -> None:
    """Raise ``UsageError`` ``merge.option`` for a density outside of 0 to 1, or for a method without densities."""
    if method not in WITH_DENSITY:
        raise UsageError(f"{method} has no density; leave it out", rule="merge.option", where=location)
    if not 0 < density <= 1:
        raise UsageError(
            f"expected a density above 0 and of at most 1, found {density:g}", rule="merge.option", where=location
        )
