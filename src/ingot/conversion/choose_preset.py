"""The choice of program, container and preset from the options of ``ingot quantize``, without opening the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from ingot.artifacts.destination import format_of_suffix
from ingot.conversion.preset_fit import container_for, holds, presets_held, presets_of
from ingot.core.registry import did_you_mean
from ingot.errors import UsageError
from ingot.formats.detect import FORMATS
from ingot.recipes.llama_types import preset_of_type
from ingot.recipes.load import ALL_PRESETS, load_recipe, preset_name
from ingot.runtimes.accepts import why_not_a_file
from ingot.runtimes.profile import RuntimeProfile
from ingot.runtimes.table import runtime_named
from ingot.stores.location import Location

CALIBRATED = "-calibrated"
_PROGRAM_OF: Mapping[str, str] = {"gguf": "llama.cpp", "onnx": "onnxruntime", "coreml": "coreml", "mlx": "mlx"}
"""The default program of each container."""
_BITS = {16: "bf16", 8: "int8", 4: "int4", 3: "int3", 2: "int2"}
"""Presets by bits per weight for containers without a default program, such as ``.zt``."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """A chosen program and container, and the recipes to choose between.

    ``plain`` and ``calibrated`` are names of recipes, empty if there is none. ``profile`` is None if no program was
    named and the container has no default program.
    """

    profile: RuntimeProfile | None
    container: str
    plain: str
    calibrated: str


def choose(
    out: Location,
    *,
    runtime: str | None = None,
    bits: int | None = None,
    type: str | None = None,
    preset: str | None = None,
    format: str | None = None,
) -> Chosen:
    """Choose the runtime, container and recipes of ``ingot quantize`` from its options.

    ``runtime`` alone is sufficient; at most one of ``bits``, ``type`` and ``preset`` may refine it. Without
    ``runtime``, ``type`` implies llama.cpp, and otherwise the suffix of ``out`` decides.

    Raises
    ------
    UsageError
        ``runtime.unknown``; ``quantize.type``; ``quantize.bits``, ``quantize.preset``: the program has no such preset;
        ``quantize.option``: the options do not determine a program or container, or contradict each other;
        ``recipe.unknown``; ``format.unknown``.
    """
    refinements = [
        name for name, value in (("--bits", bits), ("--type", type), ("--preset", preset)) if value is not None
    ]
    if len(refinements) > 1:
        raise UsageError(f"expected one of {' and '.join(refinements)}, found both", rule="quantize.option")
    suffix = format_of_suffix(out.display.rstrip("/"))
    container = format or (suffix.name if suffix is not None else None)
    if container is not None:
        FORMATS.get_or_refuse(container)
    profile = _profile(runtime, type, container)
    if runtime is not None and profile is not None and format is None and suffix is not None:
        reason = why_not_a_file(profile, suffix.name, out.display)
        if reason:
            raise UsageError(f"{reason}: write -o {PurePosixPath(out.display).with_suffix('')}", rule="quantize.option")
    if profile is None and container is None:
        raise UsageError(
            "expected --for with a program (llama.cpp, vllm, mlx, transformers, ...), --type, or an output name with a "
            "suffix such as .gguf; the options do not determine the program that runs the result",
            rule="quantize.option",
        )
    if type is not None:
        plain, calibrated = preset_of_type(type)
        return _in_container(profile, container, plain, calibrated, f"type {type}")
    if preset is not None:
        plain, calibrated = _pair(preset)
        return _in_container(profile, container, plain, calibrated, f"preset {preset}")
    if profile is None:
        assert container is not None
        return _without_program(container, bits)
    return _default(profile, container, bits)


def _profile(runtime: str | None, type: str | None, container: str | None) -> RuntimeProfile | None:
    if runtime is not None:
        return runtime_named(runtime)
    name = "llama.cpp" if type is not None and container in (None, "gguf") else _PROGRAM_OF.get(container or "")
    return None if name is None else runtime_named(name)


def _pair(preset: str) -> tuple[str, str]:
    """Return the plain and the calibrated recipe of a preset or of a recipe file; empty if a recipe is missing."""
    name = preset_name(preset) or preset
    if name.endswith(CALIBRATED):
        return "", name
    load_recipe(name)  # refuses a name that is neither a preset nor a file, and suggests the nearest preset
    return name, f"{name}{CALIBRATED}" if f"{name}{CALIBRATED}" in ALL_PRESETS else ""


def _default(profile: RuntimeProfile, container: str | None, bits: int | None) -> Chosen:
    requested = profile.default if bits is None else bits
    widths = {item.bits: item for item in profile.presets}
    if requested not in widths:
        nearest = min(widths, key=lambda width: abs(width - requested), default=None)
        more = f" (did you mean {nearest}?)" if nearest is not None else ""
        available = ", ".join(map(str, sorted(widths))) or "none"
        raise UsageError(
            f"{profile.title} has no preset of {requested} bits{more}; there are: {available}",
            rule="quantize.bits",
        )
    item = widths[requested]
    if container is not None and container != item.container:
        return _in_container(profile, container, item.plain, item.calibrated, f"{requested} bits")
    return Chosen(profile, item.container, item.plain, item.calibrated)


def _in_container(
    profile: RuntimeProfile | None, container: str | None, plain: str, calibrated: str, subject: str
) -> Chosen:
    """Return the choice of recipes for a container.

    Without a container, the first container of the program that can store the recipe is used.
    """
    recipe = load_recipe(plain or calibrated)
    if profile is not None and container is not None and container not in profile.containers:
        raise UsageError(
            f"{profile.label} does not read {container}; it reads {', '.join(profile.containers)}",
            rule="quantize.option",
        )
    if container is None:
        assert profile is not None
        container = container_for(profile, recipe)
        if container is None:
            names = presets_of(profile)
            hint = did_you_mean(recipe.name, names)
            raise UsageError(
                f"{profile.title} has no container for {subject}{hint}; its presets: {', '.join(names)}",
                rule="quantize.preset",
            )
    elif not holds(FORMATS[container], recipe):
        names = presets_held(FORMATS[container])
        raise UsageError(
            f"{container} cannot hold {subject}: it would be stored as plain values; presets that it holds: "
            f"{', '.join(names) or 'none'}",
            rule="quantize.preset",
        )
    if plain and calibrated and not holds(FORMATS[container], load_recipe(calibrated)):
        calibrated = ""
    return Chosen(profile, container, plain, calibrated)


def _without_program(container: str, bits: int | None) -> Chosen:
    requested = 4 if bits is None else bits
    name = _BITS.get(requested)
    if name is None:
        raise UsageError(
            f"no preset of {requested} bits for {container}; there are: {', '.join(map(str, sorted(_BITS)))}",
            rule="quantize.bits",
        )
    plain, calibrated = _pair(name)
    return _in_container(None, container, plain, calibrated, f"{requested} bits")
