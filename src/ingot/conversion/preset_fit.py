"""Determine which presets a container can hold and which programs run the result, by planning a small Llama model.

The tables of ``ingot recipes``, the choices of ``--for`` and the refusals of conversions all use these results.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib import resources
from itertools import chain
from typing import Any

import numpy as np

from ingot.artifacts.save import as_tensor
from ingot.conversion.encoding import EncodingInputs, plan_encoding
from ingot.conversion.packed_encoding import in_encoding
from ingot.conversion.plan import plan_rounded
from ingot.core.numeric.dtypes import cast
from ingot.errors import IngotError, UnsupportedError
from ingot.formats.base import RAW, Format
from ingot.formats.detect import FORMATS
from ingot.model.layouts.dense import DenseLayout
from ingot.model.spec import TensorSpec
from ingot.model.statistics import SQUARES, ArrayEntry, MatrixStatistics
from ingot.model.tensor import Array, Tensor
from ingot.quantization.choice import parse_quantizer
from ingot.quantization.rounding import IMPORTANCE
from ingot.quantization.tensor import round_tensor
from ingot.recipes.choice import Choice, Measured
from ingot.recipes.llama_cpp_mixtures import LLAMA_LAYERS, expand_for_llama
from ingot.recipes.load import ALL_PRESETS, load_recipe
from ingot.recipes.recipe import Recipe, Rule, resolve
from ingot.runtimes.accepts import accepts_specs
from ingot.runtimes.profile import RuntimeProfile
from ingot.runtimes.table import BUILT_IN, RUNTIMES

_SHAPE = (128, 256)
_DTYPE = "bf16"
_DTYPES = {"coreml": "f16", "onnx": "f32"}
"""The usual element type of models in a container, if it differs from ``_DTYPE``."""
_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"
_MATRICES = (
    *(f"self_attn.{name}_proj" for name in ("q", "k", "v", "o")),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)
_OTHERS = (_EMBEDDING, _HEAD)
_INPUTS = EncodingInputs(False, {}, {})


def quantizes(recipe: Recipe) -> bool:
    """Return whether a rule of the recipe stores values in fewer than 16 bits."""
    return any(_quantizing(choice) for rule in _expanded(recipe).rules for choice in choices_of(rule.choice))


def _expanded(recipe: Recipe) -> Recipe:
    """Return the recipe with the rules of its mixture for a Llama model."""
    return recipe if recipe.mixture is None else _expanded_mixture(_Key(recipe, repr(recipe)))


@cache
def _expanded_mixture(recipe: _Key) -> Recipe:
    return expand_for_llama(recipe.value)


def choices_of(choice: Choice | Measured | None) -> tuple[Choice, ...]:
    """Return the candidates of a rule's choice; empty if the rule keeps tensors unchanged."""
    if choice is None:
        return ()
    return choice.candidates if isinstance(choice, Measured) else (choice,)


def _quantizing(choice: Choice) -> bool:
    return choice.codec != DenseLayout.codec and choice.changes_values


def _packs(choice: Choice) -> bool:
    """Return whether a choice stores codes or compressed parts instead of plain values."""
    return choice.codec != DenseLayout.codec or choice.encoding != "raw"


def holds(format: Format, recipe: Recipe) -> bool:
    """Return whether a format can store the result of every rule of a recipe in packed form."""
    declaring = _declaring_inputs(format, recipe)
    if declaring is None:
        return False
    packing = filter(None, map(_packing, _expanded(recipe).rules))
    return all(any(_spec_in(declaring, *item, recipe.activations) for item in items) for items in packing)


def _declaring_inputs(format: Format, recipe: Recipe) -> Format | None:
    """Return the format that declares how the recipe quantizes activations; None if the format cannot declare it."""
    if recipe.activations is None:
        return format
    try:
        return format.for_activations(recipe.activations)
    except UnsupportedError:
        return None


def _packing(rule: Rule) -> list[tuple[Choice, str]]:
    """Return the choices of a rule that pack tensors, each with the name of a tensor to which the rule applies."""
    name = _name_for(rule)
    return [(choice, name) for choice in choices_of(rule.choice) if _packs(choice)]


def _name_for(rule: Rule) -> str:
    """Return the name of a rule's sample tensor: a matrix of a layer if the rule applies to matrices of layers."""
    linear = f"model.layers.0.{_MATRICES[-1]}.weight"
    if not rule.roles or any(role not in ("embedding", "head") for role in rule.roles):
        return linear
    return _HEAD if "head" in rule.roles else _EMBEDDING


def _spec_in(format: Format, choice: Choice, name: str, activations: str | None) -> TensorSpec | None:
    """Return the spec with which a format stores a matrix by a choice; None if it cannot, or only as plain values.

    ``activations`` is the scheme of quantized inputs that the format declares.
    """
    sample = name if name in _OTHERS else f"model.layers.0.{_MATRICES[-1]}.weight"
    spec = _planned(_Key(format, f"{format.name} {activations}"), _Key(choice, repr(choice)), sample)
    return None if spec is None else replace(spec, name=name)


class _Key:
    """A wrapper that compares values by their text, so that results can be cached by it."""

    def __init__(self, value: Any, text: str) -> None:
        self.value = value
        self._text = text

    def __eq__(self, value: object) -> bool:
        return isinstance(value, _Key) and self._text == value._text

    def __hash__(self) -> int:
        return hash(self._text)


@cache
def _planned(format: _Key, choice: _Key, name: str) -> TensorSpec | None:
    dtype = _dtype_in(format.value)
    try:
        if choice.value.quantizer is not None:
            direct = _layout_spec(choice.value, name, dtype)
            if format.value.why_unsupported(direct) is None:
                return direct
            step = plan_rounded(_rounded(choice, name, dtype), format.value, "sample", choice.value.encoding)
        else:
            step = plan_encoding(_sample(name, dtype), format.value, "sample", choice.value, _INPUTS)
    except IngotError:
        return None
    raw = step.spec.codec == DenseLayout.codec and all(part.encoding == "raw" for part in step.spec.parts)
    return None if raw and _packs(choice.value) else step.spec


def _dtype_in(format: Format) -> str:
    return _DTYPES.get(format.name, _DTYPE)


@cache
def _values(dtype: str) -> Array:
    return cast(np.random.default_rng(0).standard_normal(_SHAPE, np.float32) * np.float32(0.05), dtype)


def _sample(name: str, dtype: str) -> Tensor:
    return as_tensor(name, _values(dtype))


class _EqualStatistics:
    """Statistics that are the same for every matrix and give all inputs the same weight."""

    def for_matrix(self, name: str) -> MatrixStatistics | None:
        """Return the same statistics for every matrix."""
        return MatrixStatistics(name, {SQUARES: ArrayEntry(np.ones(_SHAPE[1], np.float32))}, 1)


def _layout_spec(choice: Choice, name: str, dtype: str) -> TensorSpec:
    """Return the spec of the sample matrix after a choice with a quantizer."""
    layout = parse_quantizer(choice.quantizer, choice.codec, choice.options).layout(_SHAPE, dtype)
    spec = TensorSpec(name, _SHAPE, layout.dtype, layout.codec, layout.part_specs(_SHAPE), layout.attributes())
    return spec if choice.encoding == RAW else in_encoding(spec, choice.encoding)


@cache
def _rounded(choice: _Key, name: str, dtype: str) -> Tensor:
    """Return the sample matrix in the layout of a choice with a quantizer, with values rounded to nearest."""
    options = {key: value for key, value in choice.value.options.items() if key not in ("act_order", "coded_bits")}
    layout = parse_quantizer(choice.value.quantizer, choice.value.codec, choice.value.options).layout(_SHAPE, dtype)
    nearest = parse_quantizer(IMPORTANCE, choice.value.codec, options)
    values = [(name, cast(_values(dtype), "f32"))]
    parts, _ = round_tensor(nearest, iter(values), _EqualStatistics())
    return Tensor.from_parts(layout, parts, _SHAPE, name)


def presets_held(format: Format) -> list[str]:
    """Return the quantizing presets that a format can hold, in the order of ``ALL_PRESETS``."""
    recipes = ((name, load_recipe(name)) for name in ALL_PRESETS)
    return [name for name, recipe in recipes if quantizes(recipe) and holds(format, recipe)]


def container_for(profile: RuntimeProfile, recipe: Recipe) -> str | None:
    """Return the program's first container that can store a recipe's result as the program accepts it.

    A recipe that quantizes nothing gets the first container of dense tensors.
    """
    return next((name for name in _containers(profile, recipe) if _accepted(profile, name, recipe)), None)


def _containers(profile: RuntimeProfile, recipe: Recipe) -> Iterator[str]:
    named = [item.container for item in profile.presets if recipe.name in (item.plain, item.calibrated)]
    plain = [] if quantizes(recipe) else [name for name in profile.containers if name == "safetensors"]
    yield from dict.fromkeys((*named, *plain, *profile.containers))


def _accepted(profile: RuntimeProfile, container: str, recipe: Recipe) -> bool:
    format = FORMATS[container]
    if format.traits.packed_codecs and not quantizes(recipe):
        return False
    if not holds(format, recipe):
        return False
    specs = llama_specs(format, recipe)
    activations = recipe.activations is not None
    return specs is not None and accepts_specs(profile, container, specs, activations=activations).accepted


def llama_specs(format: Format, recipe: Recipe) -> list[TensorSpec] | None:
    """Return the specs with which a format stores a Llama model's matrices by a recipe.

    Returns None if the format cannot store a matrix in packed form.

    The numbers of columns and rows of the model are multiples of all group and block sizes.
    """
    declaring = _declaring_inputs(format, recipe)
    if declaring is None:
        return None
    specs = []
    for name, choices in _decisions(_Key(recipe, repr(recipe)), _dtype_in(format)):
        options = [spec for choice in choices if (spec := _spec_in(declaring, choice, name, recipe.activations))]
        if choices and not options:
            return None
        specs.append(options[0] if options else _sample(name, _dtype_in(format)).spec())
    return specs


@cache
def _decisions(recipe: _Key, dtype: str) -> list[tuple[str, tuple[Choice, ...]]]:
    """Return the names of a Llama model's matrices, each with the candidates that a recipe has for it."""
    expanded = _expanded(recipe.value)

    def decide(name: str) -> tuple[str, tuple[Choice, ...]]:
        return name, choices_of(resolve(expanded, name, _SHAPE, dtype, LLAMA_LAYERS).choice)

    layers: dict[str, list[tuple[str, tuple[Choice, ...]]]] = {}  # one of the layers with equal choices
    for layer in range(LLAMA_LAYERS):
        decisions = [decide(f"model.layers.{layer}.{name}.weight") for name in _MATRICES]
        layers.setdefault(repr([choices for _, choices in decisions]), decisions)
    return [*chain.from_iterable(layers.values()), *map(decide, _OTHERS)]


def presets_of(profile: RuntimeProfile) -> Sequence[str]:
    """Return the presets whose results a program runs, in order: first those that its profile names, then all others.

    For profiles that ship with Ingot, the result is read from ``runs_in.toml``; a test compares it with
    ``plan_presets_of``.
    """
    if RUNTIMES.get(profile.name) != profile or profile.name not in BUILT_IN:
        return plan_presets_of(profile)
    return [name for name in _in_order(profile) if profile.title in programs_of(name)]


def plan_presets_of(profile: RuntimeProfile) -> Sequence[str]:
    """Return the result of ``presets_of``, computed by planning each preset for each container of the program."""
    return [name for name in _in_order(profile) if container_for(profile, load_recipe(name)) is not None]


def _in_order(profile: RuntimeProfile) -> Sequence[str]:
    """Return the names of all presets; a program's defaults come first."""
    named = [name for item in profile.presets for name in (item.plain, item.calibrated) if name]
    return list(dict.fromkeys((*named, *ALL_PRESETS)))


def programs_of(preset: str) -> Sequence[str]:
    """Return the titles of the programs with a built-in profile that can run a preset."""
    return _programs_table().get(preset, ())


@cache
def _programs_table() -> Mapping[str, Sequence[str]]:
    return tomllib.loads(resources.files("ingot.recipes").joinpath("runs_in.toml").read_text("utf-8"))
