"""Conversions for a program (``--for``): the choice of the container, and checks that the program loads the result."""

from __future__ import annotations

from dataclasses import replace
from pathlib import PurePosixPath

from ingot.artifacts.destination import Destination, destination, format_of_suffix
from ingot.artifacts.open import open_source
from ingot.conversion.options import ConvertOptions, MatrixOptions
from ingot.conversion.plan import ConvertPlan
from ingot.conversion.preset_fit import container_for, holds, presets_held, presets_of
from ingot.errors import UnsupportedError, UsageError
from ingot.formats.base import Format
from ingot.formats.detect import FORMATS
from ingot.model.layouts.dense import DenseLayout
from ingot.model.reading.lazy import as_tensor_map
from ingot.recipes.load import load_recipe
from ingot.recipes.recipe import Recipe
from ingot.runtimes.accepts import accepts, accepts_specs, container_name, readable_containers, refusal, why_not_a_file
from ingot.runtimes.profile import RuntimeProfile
from ingot.stores.location import Location


def for_runtime(options: ConvertOptions, profile: RuntimeProfile) -> ConvertOptions:
    """Return the options with a container of the program that ``--for`` names.

    Raises ``UsageError`` ``convert.runtime``: the program reads no container that the options permit.
    """
    recipe = options.recipe if options.recipe is None or isinstance(options.recipe, Recipe) else None
    if options.recipe is not None and recipe is None:
        recipe = load_recipe(options.recipe)  # type: ignore[arg-type]
    fixed = _fixed_container(options)
    if fixed is not None:
        if fixed not in readable_containers(profile):
            names = ", ".join(readable_containers(profile))
            raise UsageError(f"{profile.label} does not read {fixed}; it reads {names}", rule="convert.runtime")
        text = Location.parse(options.dst).display
        reason = why_not_a_file(profile, fixed, text) if options.format is None else ""
        if reason:
            folder = PurePosixPath(text).with_suffix("")
            raise UsageError(f"{reason}: name the target {folder}", rule="convert.runtime", where=text)
        return options
    container = _container_of_source(profile, options) if recipe is None else container_for(profile, recipe)
    if container is None:
        names = ", ".join(presets_of(profile))
        subject = "this model" if recipe is None else f"the result of recipe {recipe.name}"
        raise UsageError(
            f"{profile.label} reads no container that can hold {subject}; its presets: {names}", rule="convert.runtime"
        )
    return replace(options, format=container)


def _fixed_container(options: ConvertOptions) -> str | None:
    if options.format is not None:
        return FORMATS.get_or_refuse(options.format).name
    suffix = format_of_suffix(Location.parse(options.dst).display.rstrip("/"))
    return None if suffix is None else destination(Location.parse(options.dst)).format.name


def _container_of_source(profile: RuntimeProfile, options: ConvertOptions) -> str | None:
    """Return the program's container that keeps the most bytes of the source unchanged.

    For a dense source, it is a container of dense tensors. With a budget, it is the container of the program's default
    preset.
    """
    from ingot.conversion.matrix import matrix

    names = readable_containers(profile)
    source = open_source(Location.parse(options.src))
    try:
        dense = all(tensor.codec == DenseLayout.codec for tensor in as_tensor_map(source.catalog.tensors).uncached())
        same = source.format.name
        accepted = same in names and accepts(profile, source).accepted
    finally:
        source.close()
    if accepted:
        return same
    if options.target_size is not None or options.target_bpw is not None or options.max_kl is not None:
        return next((item.container for item in profile.presets if item.bits == profile.default), names[0])
    if dense:
        return "safetensors" if "safetensors" in names else names[0]
    targets = matrix(MatrixOptions(options.src, names, keep_names=options.keep_names)).targets
    best = min(targets, key=lambda item: (item.decoded_nbytes + item.refused_nbytes, names.index(item.format)))
    return best.format


def require_held(format: Format, recipe: Recipe) -> None:
    """Raise an error if a container would store the matrices of a preset with a quantizer as 16-bit values.

    For a preset without a quantizer, the plan raises the error. Raises ``UnsupportedError`` ``convert.not-held``, whose
    message lists the presets that the container can store.
    """
    if holds(FORMATS.get(format.name, format), recipe):
        return
    names = ", ".join(presets_held(format)) or "none"
    raise UnsupportedError(
        f"{format.name} cannot hold the result of preset {recipe.name}; it would store the matrices as 16-bit values. "
        f"Presets that {format.name} holds: {names}. For the decoded values: convert to a .zt by this preset, and "
        f"that to {format.name}",
        rule="convert.not-held",
    )


def require_accepted(profile: RuntimeProfile, plan: ConvertPlan, recipe: Recipe | None, target: Destination) -> None:
    """Raise ``UnsupportedError`` ``runtime.refused`` if the program would not load the result of a plan."""
    activations = recipe is not None and recipe.activations is not None
    specs = [step.spec for step in plan.steps]
    answer = accepts_specs(profile, container_name(plan.format.name), specs, activations=activations)
    if not answer.accepted:
        raise refusal(answer, target.display)


def require_loadable(profile: RuntimeProfile, path: str) -> None:
    """Raise ``UnsupportedError`` ``runtime.refused`` if the program would not load a written result."""
    source = open_source(Location.parse(path))
    try:
        answer = accepts(profile, source)
    finally:
        source.close()
    if not answer.accepted:
        raise refusal(answer, f"{path} was written")
