"""Types that a budget chooses among: each is a recipe that says how a matrix is stored if it is given that type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ingot.core.registry import did_you_mean
from ingot.errors import UsageError
from ingot.model.layouts.affine import AffineLayout
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
_LEAST_SIZE = 4096
_GRID = "grid"  # integers, as servers of models take them: of layers alone
_TRELLIS_BITS = (2, 3, 4)
_INTEGER_BITS = (5, 6, 8)
_GRID_BITS = (2, 3, 4, 8)

# ggml's types that take 256 columns at a time, and what stands in where 256 does not divide them, as in llama.cpp.
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
    *(f"int{bits}{CALIBRATED}" for bits in (*_TRELLIS_BITS, *_INTEGER_BITS)),
    *(f"{_GRID}{bits}{CALIBRATED}" for bits in _GRID_BITS),
    *_LARGE_BLOCKS,
    *_BLOCKS,
    *(f"{kind}{CALIBRATED}" for kind in (*_LARGE_BLOCKS, *_BLOCKS)),
)
"""Types by name; presets of other names, and recipe files, are types too."""

_SERVED = tuple(f"{_GRID}{bits}{CALIBRATED}" for bits in _GRID_BITS)
_DEFAULTS: Mapping[str, tuple[Sequence[str], Sequence[str]]] = {
    "gguf": ((*_LARGE_BLOCKS, "q8_0"), tuple(f"{kind}{CALIBRATED}" for kind in (*_LARGE_BLOCKS, "q8_0"))),
    "mlx": (("mlx-3bit", "mlx-4bit"),) * 2,
    **dict.fromkeys(("awq", "compressed-tensors", "gptq"), (_SERVED, _SERVED)),
    "npydir": (("squish-int3", "squish-int4", "squish-int8"),) * 2,
}
_OTHERS = _INTEGERS, tuple(f"int{bits}{CALIBRATED}" for bits in (*_TRELLIS_BITS, *_INTEGER_BITS))


def default_types(format: str, *, calibrated: bool) -> Sequence[str]:
    """Return the types that a budget for a format has unless others are asked for."""
    return _DEFAULTS.get(format, _OTHERS)[calibrated]


def type_named(name: str) -> list[tuple[str, Recipe]]:
    """Return a type as a recipe; where rules list candidates, a recipe for each.

    Raises
    ------
    UsageError
        ``recipe.unknown``: no type, preset or file; and the rules of recipe files.
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
            f"expected types that tensors can have one by one, found the mixture {name!r}; name its types: "
            f"{', '.join(_LARGE_BLOCKS)}",
            rule="recipe.mixture",
        )
    if recipe.rotate is not None:
        raise UsageError(
            f"expected types that tensors can have one by one, found {name!r}, which turns a model as a whole",
            rule="recipe.rotate",
        )
    count = max((len(rule.choice.candidates) for rule in recipe.rules if isinstance(rule.choice, Measured)), default=1)
    if count == 1 and not any(isinstance(rule.choice, Measured) for rule in recipe.rules):
        return [(name, recipe)]
    return [
        (f"{name}, candidate {number + 1}", replace(recipe, rules=tuple(_fixed(rule, number) for rule in recipe.rules)))
        for number in range(count)
    ]


def _fixed(rule: Rule, number: int) -> Rule:
    """Return the rule with one of its candidates; the last one where there are fewer."""
    if not isinstance(rule.choice, Measured):
        return rule
    ways = rule.choice.candidates
    return replace(rule, choice=ways[min(number, len(ways) - 1)])


def _rules(name: str) -> list[Rule] | None:
    plain = name.removesuffix(CALIBRATED)
    if name not in NAMES:
        return None
    if plain in _LARGE_BLOCKS or plain in _BLOCKS:
        kinds = ((plain, 256), (_LARGE_BLOCKS[plain], 32)) if plain in _LARGE_BLOCKS else ((plain, 32),)
        searched = ((LAYERS, TWO_SIDED), (HEAD, IMPORTANCE)) if name != plain else ()
        known = [_rule(roles, _blocks(kind, way), multiple) for roles, way in searched for kind, multiple in kinds]
        return [*known, *(_rule(MATRICES, _blocks(kind), multiple) for kind, multiple in kinds)]
    if plain.startswith(_GRID):
        bits = int(plain.removeprefix(_GRID))
        return [_rule(LAYERS, _calibrated(AffineLayout.codec, bits, group, TWO_SIDED), group) for group in (64, 96, 32)]
    bits = int(plain.removeprefix("int"))
    integers = _rule(MATRICES, Choice(AffineLayout.codec, _integers(bits)), min_cols=32)
    if name == plain:
        return [integers]
    codec = TrellisLayout.codec if bits in _TRELLIS_BITS else AffineLayout.codec
    # Whole heads under both factors would take as long as all layers: their scales are searched alone.
    searched = ((LAYERS, TWO_SIDED), (HEAD, IMPORTANCE))
    known = [
        _rule(roles, _calibrated(codec, bits, group, quantizer), group)
        for roles, quantizer in searched
        for group in (64, 96, 32)
    ]
    return [*known, integers]


def _rule(roles: Sequence[str], choice: Choice, multiple: int = 1, min_cols: int = 0) -> Rule:
    return Rule(
        choice,
        roles=tuple(roles),
        min_ndim=2,
        min_size=_LEAST_SIZE,
        min_cols=min_cols,
        cols_multiple_of=multiple,
    )


def _blocks(kind: str, quantizer: str | None = None) -> Choice:
    return Choice(GgmlBlocksLayout.codec, {"type": kind}, quantizer=quantizer)


def _integers(bits: int) -> dict[str, Any]:
    if bits == 8:
        return {"bits": 8, "group": "row", "symmetric": True, "scales": "f32", "quantizer": "absmax"}
    return {"bits": bits, "group": 64, "symmetric": bits > 2, "scales": "auto", "quantizer": "mse"}


def _calibrated(codec: str, bits: int, group: int, quantizer: str) -> Choice:
    return Choice(codec, {"bits": bits, "group": group}, quantizer=quantizer)
