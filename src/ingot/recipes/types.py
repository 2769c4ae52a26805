"""Types among which a budget search chooses; each is a recipe that stores a matrix in the type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ingot.core.registry import did_you_mean
from ingot.errors import UsageError
from ingot.model.layouts.affine import AffineLayout
from ingot.model.layouts.dense import DenseLayout
from ingot.model.layouts.ggml import GgmlBlocksLayout
from ingot.model.layouts.trellis import TrellisLayout
from ingot.quantization.rounding import IMPORTANCE, TWO_SIDED
from ingot.recipes.choice import Choice, Measured
from ingot.recipes.load import ALL_PRESETS, load_recipe
from ingot.recipes.recipe import Recipe, Rule

LAYERS = ("attention", "mlp", "ssm")
HEAD = ("head",)
EMBEDDING = ("embedding",)
MATRICES = (*LAYERS, *HEAD, *EMBEDDING)
CALIBRATED = "-calibrated"
_MIN_SIZE = 4096  # elements; smaller matrices stay as stored
_GRID = "grid"  # integer codes in groups, which inference servers accept, for layers only
_TRELLIS_BITS = (2, 3, 4)
_INTEGER_BITS = (2, 3, 4, 5, 6, 8)
_LARGE_INTEGER_BITS = (5, 6, 8)  # larger than the bits of trellises
_GRID_BITS = (2, 3, 4, 8)
_TRELLIS = TrellisLayout.codec  # types are named after their codec

# ggml types with blocks of 256 columns, and the type that replaces each if 256 does not divide the columns, as in
# llama.cpp
_LARGE_BLOCKS = {
    "q2_k": "iq4_nl",
    "q3_k": "iq4_nl",
    "iq4_xs": "iq4_nl",
    "q4_k": "q5_0",
    "q5_k": "q5_1",
    "q6_k": "q8_0",
}
_BLOCKS = ("q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1", "q8_0")
_INTEGERS = ("int2", "int3", "int4", "int5", "int6", "int8")

NAMES = (
    *_INTEGERS,
    *(f"{_TRELLIS}{bits}{CALIBRATED}" for bits in _TRELLIS_BITS),
    *(f"int{bits}{CALIBRATED}" for bits in _INTEGER_BITS),
    *(f"{_GRID}{bits}{CALIBRATED}" for bits in _GRID_BITS),
    *_LARGE_BLOCKS,
    *_BLOCKS,
    *(f"{type_}{CALIBRATED}" for type_ in (*_LARGE_BLOCKS, *_BLOCKS)),
)
"""Names of the built-in types. All presets and recipe files can be used as types too."""

_SERVED = tuple(f"{_GRID}{bits}{CALIBRATED}" for bits in _GRID_BITS)
_DEFAULTS: Mapping[str, tuple[Sequence[str], Sequence[str]]] = {
    "gguf": ((*_LARGE_BLOCKS, "q8_0"), tuple(f"{type_}{CALIBRATED}" for type_ in (*_LARGE_BLOCKS, "q8_0"))),
    "mlx": (("mlx-3bit", "mlx-4bit"),) * 2,
    **dict.fromkeys(("awq", "compressed-tensors", "gptq"), (_SERVED, _SERVED)),
    "npydir": (("squish-int3", "squish-int4", "squish-int8"),) * 2,
}
_GENERAL_DEFAULTS = (
    _INTEGERS,
    (
        *(f"{_TRELLIS}{bits}{CALIBRATED}" for bits in _TRELLIS_BITS),
        *(f"int{bits}{CALIBRATED}" for bits in _LARGE_INTEGER_BITS),
    ),
)


def default_types(format: str, *, calibrated: bool) -> Sequence[str]:
    """Return the names of the types that a budget search for a format uses by default."""
    return _DEFAULTS.get(format, _GENERAL_DEFAULTS)[calibrated]


def recipes_of_type(name: str) -> list[tuple[str, Recipe]]:
    """Return a list with a label and a recipe for a type; one for each candidate if its rules list candidates.

    Raises
    ------
    UsageError
        ``recipe.unknown``: no such type, preset or file; ``recipe.mixture``, ``recipe.rotate``, ``recipe.encoding``:
        the recipe is for the full model; and the rules of recipe files.
    """
    rules = _rules(name)
    if rules is not None:
        return [(name, Recipe(name, tuple(replace(rule, label=name) for rule in rules), general=True))]
    try:
        recipe = load_recipe(name)
    except UsageError as error:
        if error.rule != "recipe.unknown" or error.where:
            raise
        raise UsageError(
            f"expected a type ({', '.join(NAMES)}), a preset or a TOML file, found {name!r}"
            f"{did_you_mean(name, (*NAMES, *ALL_PRESETS))}",
            rule="recipe.unknown",
        ) from None
    if recipe.mixture is not None:
        raise UsageError(
            f"expected types that apply to single tensors, found the mixture {name!r}; name its types: "
            f"{', '.join(_LARGE_BLOCKS)}",
            rule="recipe.mixture",
        )
    if recipe.rotate is not None:
        raise UsageError(
            f"expected types that apply to single tensors, found {name!r}, which rotates the full model",
            rule="recipe.rotate",
        )
    if any("coded_bits" in rule.choice.options for rule in recipe.rules if isinstance(rule.choice, Choice)):
        raise UsageError(
            f"expected types that apply to single tensors, found {name!r}, whose matrices share a step: it chooses the "
            "bits of each matrix itself; convert with it alone",
            rule="recipe.encoding",
        )
    recipe = replace(recipe, rules=tuple(rule for rule in recipe.rules if not _is_cast(rule)))
    count = max((len(rule.choice.candidates) for rule in recipe.rules if isinstance(rule.choice, Measured)), default=1)
    if count == 1 and not any(isinstance(rule.choice, Measured) for rule in recipe.rules):
        return [(name, recipe)]
    return [
        (f"{name}, candidate {index + 1}", replace(recipe, rules=tuple(_fix(rule, index) for rule in recipe.rules)))
        for index in range(count)
    ]


def _is_cast(rule: Rule) -> bool:
    """Return whether a rule's candidates are all ``dense``, so that it only chooses a dtype.

    Presets of MLX have such rules for tensors that are not matrices.
    """
    choice = rule.choice
    return isinstance(choice, Measured) and all(item.codec == DenseLayout.codec for item in choice.candidates)


def _fix(rule: Rule, index: int) -> Rule:
    """Return a rule that chooses only its candidate at ``index``, or its last candidate if it has fewer."""
    if not isinstance(rule.choice, Measured):
        return rule
    candidates = rule.choice.candidates
    return replace(rule, choice=candidates[min(index, len(candidates) - 1)])


def _rules(name: str) -> list[Rule] | None:
    """Return the rules of a built-in type; None for other names."""
    plain = name.removesuffix(CALIBRATED)
    if name not in NAMES:
        return None
    if plain in _LARGE_BLOCKS or plain in _BLOCKS:
        types = ((plain, 256), (_LARGE_BLOCKS[plain], 32)) if plain in _LARGE_BLOCKS else ((plain, 32),)
        quantizers = ((LAYERS, TWO_SIDED), (HEAD, IMPORTANCE)) if name != plain else ()
        calibrated = [
            _rule(roles, _blocks(type_, quantizer), multiple)
            for roles, quantizer in quantizers
            for type_, multiple in types
        ]
        return [*calibrated, *(_rule(MATRICES, _blocks(type_), multiple) for type_, multiple in types)]
    if plain.startswith(_GRID):
        bits = int(plain.removeprefix(_GRID))
        return [_rule(LAYERS, _calibrated(AffineLayout.codec, bits, group, TWO_SIDED), group) for group in (64, 96, 32)]
    is_trellis = plain.startswith(_TRELLIS)
    bits = int(plain.removeprefix(_TRELLIS).removeprefix("int"))
    integers = _rule(MATRICES, Choice(AffineLayout.codec, _integers(bits)), min_cols=32)
    if name == plain:
        return [integers]
    codec = TrellisLayout.codec if is_trellis else AffineLayout.codec
    # two-sided rounding of a head would take as long as that of all layers, so heads use the faster quantizer
    calibrated = [
        _rule(roles, _calibrated(codec, bits, group, quantizer), group)
        for roles, quantizer in ((LAYERS, TWO_SIDED), (HEAD, IMPORTANCE))
        for group in ((64, 96, 32) if is_trellis or bits in _LARGE_INTEGER_BITS else (64, 32))
    ]
    return [*calibrated, integers]


def _rule(roles: Sequence[str], choice: Choice, multiple: int = 1, min_cols: int = 0) -> Rule:
    return Rule(
        choice,
        roles=tuple(roles),
        min_ndim=2,
        min_size=_MIN_SIZE,
        min_cols=min_cols,
        cols_multiple_of=multiple,
    )


def _blocks(type_: str, quantizer: str | None = None) -> Choice:
    return Choice(GgmlBlocksLayout.codec, {"type": type_}, quantizer=quantizer)


def _integers(bits: int) -> dict[str, Any]:
    if bits == 8:
        return {"bits": 8, "group": "row", "symmetric": True, "scales": "f32", "quantizer": "absmax"}
    return {"bits": bits, "group": 64, "symmetric": bits > 2, "scales": "auto", "quantizer": "mse"}


def _calibrated(codec: str, bits: int, group: int, quantizer: str) -> Choice:
    return Choice(codec, {"bits": bits, "group": group}, quantizer=quantizer)
