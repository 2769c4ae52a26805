"""Find which presets a container can hold and which runtimes read the result, by their rules alone, without a model."""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm

from ingot.codecs.table import CODECS
from ingot.errors import IngotError, UnsupportedError
from ingot.formats.base import Format, layout_variants
from ingot.formats.detect import FORMATS
from ingot.model.layouts.dense import DenseLayout
from ingot.model.spec import TensorSpec
from ingot.quantization.choice import parse_quantizer
from ingot.recipes.choice import Choice, Measured
from ingot.recipes.llama_cpp_mixtures import expand_for_llama
from ingot.recipes.load import ALL_PRESETS, load_recipe
from ingot.recipes.recipe import Recipe, Rule, resolve
from ingot.runtimes.accepts import accepts_specs
from ingot.runtimes.profile import RuntimeProfile
from ingot.runtimes.stored import stored_scheme

_COLUMNS = 256
_ROWS = 256
_DTYPES = ("bf16", "f16", "f32")
_SIMPLE_BLOCKS = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0")
"""Types of blocks whose codes are integers in groups of 32 with one scale."""
_BLOCKS_WITH_OFFSETS = ("q4_1", "q5_1")
_EMBEDDINGS = ("model.embed_tokens.weight", "lm_head.weight")
_NAME = "model.layers.0.mlp.up_proj.weight"


def quantizes(recipe: Recipe) -> bool:
    """Return whether a rule of the recipe stores values in fewer bits than a 16-bit float has."""
    return any(_quantizing(choice) for rule in expand_for_llama(recipe).rules for choice in choices_of(rule))


def choices_of(rule: Rule) -> tuple[Choice, ...]:
    """Return the choices of a rule: none for a rule that keeps tensors, several for one with candidates."""
    if rule.choice is None:
        return ()
    return rule.choice.candidates if isinstance(rule.choice, Measured) else (rule.choice,)


def _quantizing(choice: Choice) -> bool:
    return choice.codec != DenseLayout.codec and choice.changes_values


def holds(format: Format, recipe: Recipe) -> bool:
    """Return whether a format stores, in packed form, the matrices of every rule of a recipe that quantizes."""
    rules = [rule for rule in expand_for_llama(recipe).rules if any(map(_quantizing, choices_of(rule)))]
    return all(any(specs_in(format, rule, choice) for choice in choices_of(rule)) for rule in rules)


def specs_in(format: Format, rule: Rule, choice: Choice) -> list[TensorSpec]:
    """Return the specs in which a format stores a matrix under a choice: in the layout of the codec, or in another
    layout of the same codes.

    The list is empty if the format would store the decoded matrix.
    """
    specs: list[TensorSpec] = []
    for spec in _specs(rule, choice):
        if format.why_unsupported(spec) is None:
            specs.append(spec)
        else:
            specs += [variant for _, variant in layout_variants(format, spec) if _same_grid(spec, variant)]
    return [spec for spec in specs if spec.codec != DenseLayout.codec or not _quantizing(choice)]


def _same_grid(encoded: TensorSpec, variant: TensorSpec) -> bool:
    """Return whether a layout can have the codes of another: equally many bits, and groups of equal size or of a
    divisor of it; and offsets and a second scale if the encoded layout has them."""
    if _has_offsets(encoded) and not _has_offsets(variant):
        return False
    if stored_scheme(encoded, "").second and not stored_scheme(variant, "").second:
        return False
    bits, group = _grid(encoded)
    variant_bits, variant_group = _grid(variant)
    if bits is None or bits != variant_bits:
        return False
    if group == variant_group:
        return True
    return isinstance(group, int) and isinstance(variant_group, int) and group % variant_group == 0


def _has_offsets(spec: TensorSpec) -> bool:
    """Return whether each group has an offset, which is a float."""
    return spec.params.get("zero_kind") == "offset" or spec.params.get("type") in _BLOCKS_WITH_OFFSETS


def _grid(spec: TensorSpec) -> tuple[int | None, int | str | None]:
    """Return the bits of a code and the unit that shares a scale (columns, ``row``, ...); None for codes that only
    their own layout can store."""
    stored = stored_scheme(spec, "")
    if stored.storage == "blocks":
        return (int(stored.type[1]), 32) if stored.type in _SIMPLE_BLOCKS else (None, None)
    return stored.bits, stored.group


def _specs(rule: Rule, choice: Choice) -> Iterator[TensorSpec]:
    """Yield the spec of a matrix that meets the rule's conditions after encoding it by a choice, for each element type
    that the codec accepts."""
    columns = lcm(_COLUMNS, rule.cols_multiple_of)
    shape = (_ROWS, columns)
    for dtype in _DTYPES:
        if choice.quantizer is not None:
            layout = parse_quantizer(choice.quantizer, choice.codec, choice.options).layout(shape, dtype)
            parts = layout.part_specs(shape)
            yield TensorSpec(_NAME, shape, layout.dtype, layout.codec, parts, layout.attributes())
            continue
        try:
            encoder = CODECS[choice.codec].encoder(shape, dtype, choice.options)
        except IngotError:
            continue
        stored = str(encoder.params.get("dtype", dtype))
        yield TensorSpec(_NAME, shape, stored, choice.codec, encoder.parts, dict(encoder.params))


def presets_held(format: Format) -> list[str]:
    """Return the quantizing presets that a format can hold, in the order of ``ALL_PRESETS``."""
    recipes = ((name, load_recipe(name)) for name in ALL_PRESETS)
    return [name for name, recipe in recipes if quantizes(recipe) and holds(format, recipe)]


def container_for(profile: RuntimeProfile, recipe: Recipe) -> str | None:
    """Return the first container of a program that holds a recipe and of which the program accepts the result.

    A recipe that quantizes nothing goes into the first container of dense tensors.
    """
    return next((name for name in _containers(profile, recipe) if _accepted(profile, name, recipe)), None)


def _containers(profile: RuntimeProfile, recipe: Recipe) -> Iterator[str]:
    named = [item.container for item in profile.presets if recipe.name in (item.plain, item.calibrated)]
    plain = [] if quantizes(recipe) else [name for name in profile.containers if name == "safetensors"]
    yield from dict.fromkeys((*named, *plain, *profile.containers))


def _accepted(profile: RuntimeProfile, container: str, recipe: Recipe) -> bool:
    format = FORMATS[container]
    if recipe.activations is not None:
        try:
            format = format.for_activations(recipe.activations)
        except UnsupportedError:
            return False
    if not holds(format, recipe) or (profile.constraints.dense_embeddings and _packs_embeddings(recipe)):
        return False
    rules = expand_for_llama(recipe).rules
    encoded = [(rule, choice) for rule in rules for choice in choices_of(rule) if _quantizing(choice)]
    return all(
        any(
            accepts_specs(profile, container, [spec], activations=recipe.activations is not None).accepted
            for spec in specs_in(format, rule, choice)
        )
        for rule, choice in encoded
    )


def _packs_embeddings(recipe: Recipe) -> bool:
    """Return whether a recipe quantizes the embedding or the head of a model."""
    expanded = expand_for_llama(recipe)
    for name in _EMBEDDINGS:
        choice = resolve(expanded, name, (_ROWS * _ROWS, _COLUMNS), _DTYPES[0], 1).choice
        candidates = choice.candidates if isinstance(choice, Measured) else (choice,)
        if any(candidate is not None and _quantizing(candidate) for candidate in candidates):
            return True
    return False


def presets_of(profile: RuntimeProfile) -> list[str]:
    """Return the presets that a program runs: those that the profile names, then others that a container holds."""
    named = [name for item in profile.presets for name in (item.plain, item.calibrated) if name]
    unnamed = [name for name in ALL_PRESETS if name not in named]
    return [*named, *(name for name in unnamed if _runs(profile, load_recipe(name)))]


def _runs(profile: RuntimeProfile, recipe: Recipe) -> bool:
    return quantizes(recipe) and container_for(profile, recipe) is not None
