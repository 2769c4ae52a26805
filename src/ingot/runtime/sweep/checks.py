"""Checks of a sweep's options and paths, which run before heavy imports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from ingot.artifacts.open import find
from ingot.errors import IngotError, UsageError, printable
from ingot.recipes.load import load_recipe
from ingot.recipes.recipe import Recipe
from ingot.runtime.quantize.checks import require_full_model, require_target, single_file_error
from ingot.runtime.sweep.options import SweepOptions
from ingot.runtimes.table import runtime_named
from ingot.stores.location import AnyPath, Location


def check_options(options: SweepOptions) -> tuple[Mapping[str, Recipe], Mapping[str, Location]]:
    """Return the recipes by the names of the presets, and the texts by their labels in the report.

    Opens no file of the model.

    Raises
    ------
    UsageError
        ``open.missing`` and the errors of ``find``; ``quantize.model``; ``runtime.unknown``; ``recipe.unknown``;
        ``sweep.presets``: no preset, or a preset twice; ``sweep.texts``: no text, or a text twice; ``sweep.page``;
        ``store.missing``; ``target.no-parent``, ``target.exists``.
    """
    model = Location.parse(options.model)
    _, name = find(model)
    require_full_model(model)
    if name and not name.lower().endswith(".gguf") and "config.json" in (model.siblings() or ()):
        raise single_file_error(model)
    if options.runtime is not None:
        runtime_named(options.runtime)
    names = list(chain.from_iterable(item.split(",") for item in _as_sequence(options.presets)))
    recipes = {name.strip(): load_recipe(name.strip()) for name in names}
    if not names or len(recipes) < len(names):
        raise UsageError("expected --presets with at least one preset, and each preset once", rule="sweep.presets")
    texts = _texts(_as_sequence(options.texts))
    if options.calibration is not None:
        Location.parse(options.calibration).find_file()
    _check_targets(options)
    return recipes, texts


def _as_sequence(values: Any) -> Sequence[Any]:
    return [values] if isinstance(values, str) or not isinstance(values, Sequence) else values


def _texts(values: Sequence[AnyPath]) -> Mapping[str, Location]:
    """Return the texts by label: a file's name without suffix, or its full location if two names are equal.

    A value with commas is a list of files, unless a file has this name.
    """
    locations = list(chain.from_iterable(map(_files, values)))
    stems = [location.name.rpartition(".")[0] or location.name for location in locations]
    unique = len(set(stems)) == len(stems)
    labels = [printable(stem if unique else str(item)) for stem, item in zip(stems, locations, strict=True)]
    if not labels or len(set(labels)) < len(labels):
        raise UsageError("expected --texts with at least one file, and each file once", rule="sweep.texts")
    return dict(zip(labels, locations, strict=True))


def _files(value: AnyPath) -> list[Location]:
    location = Location.parse(value)
    try:
        location.find_file()
    except IngotError:
        if not isinstance(value, str) or "," not in value:
            raise
        files = [Location.parse(item.strip()) for item in value.split(",")]
        for file in files:
            file.find_file()
        return files
    return [location]


def _check_targets(options: SweepOptions) -> None:
    targets = [Location.parse(path) for path in (options.out, options.page) if path is not None]
    for target in targets:
        require_target(target, overwrite=options.overwrite)
    if options.page is not None and (targets[0].url == targets[1].url or not targets[1].name.lower().endswith(".md")):
        raise UsageError(
            "expected --page NAME.md, another file than --out", rule="sweep.page", where=targets[1].display
        )
