"""Read recipes: presets by name, files by path. Unknown keys and wrong types are errors with file, rule and key."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from importlib import resources
from pathlib import PurePosixPath
from typing import Any

from ingot.core.registry import did_you_mean
from ingot.errors import IngotError, ResourceError, UsageError
from ingot.model.layouts.dense import DenseLayout
from ingot.recipes.choice import Choice, Measured
from ingot.recipes.llama_cpp_mixtures import PRESETS as MIXTURE_PRESETS
from ingot.recipes.llama_cpp_mixtures import parse_mixture, preset_toml
from ingot.recipes.recipe import Mixture, Recipe, Rotate, Rule
from ingot.stores.location import AnyPath, Location

PRESETS = (
    "keep",
    "lossless",
    "lossless-max",
    "decompress",
    "tca-tbe",
    "16bit",
    "bf16",
    "f16",
    "int8-fine",
    "int8",
    "coded4-calibrated",
    "trellis4-calibrated",
    "int4-calibrated",
    "table4-calibrated",
    "int4",
    "coded3-calibrated",
    "trellis3-calibrated",
    "int3-calibrated",
    "table3-calibrated",
    "int3",
    "trellis2-calibrated",
    "int2-calibrated",
    "table2-calibrated",
    "int2",
    "int2-hybrid",
    "astc",
    "palette8",
    "palette4-grouped",
    "palette4",
    "sparse50",
    "ane-int8",
    "ane-m1",
    "ane-m4",
    "ane-m5",
    "w8a16",
    "w8a8",
    "w4a16-calibrated",
    "w4a16",
    "fp8",
    "fp8-block",
    "nvfp4-w4a4-calibrated",
    "nvfp4-calibrated",
    "nvfp4",
    "mxfp4-calibrated",
    "mxfp4",
    "nf4",
    "mlx-8bit-calibrated",
    "mlx-8bit",
    "mlx-6bit-calibrated",
    "mlx-6bit",
    "mlx-mixed-4-6-calibrated",
    "mlx-mixed-4-6",
    "mlx-4bit-calibrated",
    "mlx-4bit",
    "mlx-mxfp4-calibrated",
    "mlx-mxfp4",
    "mlx-nvfp4-calibrated",
    "mlx-nvfp4",
    "mlx-3bit-calibrated",
    "mlx-3bit",
    "squish-int8",
    "squish-int4",
    "squish-int3",
    "q8_0",
    "q6_k-calibrated",
    "q6_k",
    "q5_k",
    "q4_k-calibrated",
    "q4_k",
    "q4_0-calibrated",
    "q4_0",
    "iq4_xs-calibrated",
    "iq4_xs",
    "q3_k-calibrated",
    "q2_k-calibrated",
)
"""Names of the presets that ship with Ingot: first general ones, from no loss to most loss, then those for one
format.
"""

ALL_PRESETS = (*PRESETS, *MIXTURE_PRESETS)
"""Names of the presets that ship with Ingot, and of llama.cpp's mixtures."""

_LOWER = {name.lower(): name for name in (*MIXTURE_PRESETS, *PRESETS)}

# presets by format and by bits of the matrices, for formats with their own packings
_FORMAT_PRESETS = {
    "npydir": {8: "squish-int8", 4: "squish-int4", 3: "squish-int3"},
    "mlx": {8: "mlx-8bit", 6: "mlx-6bit", 4: "mlx-4bit", 3: "mlx-3bit"},
}

_MAX_FILE_BYTES = 1 << 20
_MAX_OPTION_DEPTH = 4  # a codec within a codec, with a list among its options, has depth 2
_ROOT_KEYS = ("name", "description", "rotate", "activations", "runs_in", "mixture", "quantizer", "rules")
_CODEC_KEYS = ("codec", "options", "encoding", "quantizer")
_MEASURED_KEYS = ("pick", "min_snr_db", "candidates", "packed")
_CHOICE_KEYS = ("keep", *_CODEC_KEYS, *_MEASURED_KEYS)


def load_recipe(source: AnyPath) -> Recipe:
    """Return the recipe of a preset, or of a TOML file.

    Preset names take precedence; write ``./int4`` for a file with a preset's name.

    Raises
    ------
    UsageError
        No such preset or file (``recipe.unknown``), or a file that breaks a rule ``recipe.*`` of ``spec/recipes.md``.
    """
    location = Location.parse(source)
    name = preset_name(location.user_text)
    if name is not None:
        return _preset(name)
    text = location.display
    try:
        data = location.head(_MAX_FILE_BYTES + 1)
    except ResourceError as error:
        raise UsageError(f"cannot read this recipe: {error.message}", rule="recipe.unknown", where=text) from error
    except IngotError as error:
        if error.rule == "store.path":
            raise
        raise _unknown_recipe(location) from None
    if len(data) > _MAX_FILE_BYTES:
        raise UsageError(
            f"expected a recipe of at most {_MAX_FILE_BYTES} bytes, found more", rule="recipe.syntax", where=text
        )
    return parse_recipe(data, location=text, name=PurePosixPath(text).stem)


def preset_name(text: str) -> str | None:
    """Return the name of the preset that ``text`` names in upper or lower case, else None."""
    return text if text in ALL_PRESETS else _LOWER.get(text.lower())


def _unknown_recipe(location: Location) -> UsageError:
    """Return the error for a name that is neither a preset nor a file; it suggests similar names."""
    text = location.display
    if text.lower().endswith(".toml") or any(slash in text for slash in "/\\"):
        folder = PurePosixPath(text).parent
        siblings = [str(folder / name) for name in location.siblings() or () if name.endswith(".toml")]
        return UsageError(
            f"expected a recipe, found no such file{did_you_mean(text, siblings)}; `ingot recipes` lists the presets",
            rule="recipe.unknown",
            where=text,
        )
    return UsageError(
        f"expected a preset or a TOML file, found neither; {_nearest_presets(text)}",
        rule="recipe.unknown",
        where=text,
    )


def _nearest_presets(text: str) -> str:
    """Return advice for an unknown preset: the nearest names, and the command that lists all."""
    near = get_close_matches(text.lower(), _LOWER, 3, 0.5)
    listed = " or ".join(repr(_LOWER[name]) for name in near)
    hint = f"did you mean {listed}? " if near else ""
    return f"{hint}`ingot recipes` lists the presets"


def preset_hint(format: str, choice: Choice) -> str:
    """Return a suggestion of presets for a format; empty if there are none."""
    presets = _FORMAT_PRESETS.get(format, {})
    bits = choice.options.get("bits")
    if choice.codec == DenseLayout.codec or not presets:
        return ""
    if bits in presets:
        return f"; use the preset {presets[bits]}, which is for {format}"
    return f"; presets for {format}: {', '.join(presets.values())}"


def preset_text(name: str) -> str:
    """Return a preset's TOML; raise ``UsageError`` ``recipe.unknown`` if there is no such preset."""
    preset = preset_name(name)
    if preset is None:
        raise UsageError(
            f"expected a preset, found {name!r:.80}; {_nearest_presets(name)}",
            rule="recipe.unknown",
        )
    if preset in MIXTURE_PRESETS:
        return preset_toml(preset)
    return resources.files("ingot.recipes").joinpath("presets", f"{preset}.toml").read_text("utf-8")


@cache
def _preset(name: str) -> Recipe:
    return replace(parse_recipe(preset_text(name), location=f"preset {name}", name=name), general=True)


def parse_recipe(data: bytes | str, *, location: str, name: str = "recipe") -> Recipe:
    """Parse the text of a recipe.

    Parameters
    ----------
    data : bytes or str
        TOML 1.0; bytes are UTF-8.
    location : str
        The file or preset, for error messages.
    name : str
        The recipe's name if the text contains none.
    """
    try:
        text = data.decode() if isinstance(data, bytes) else data
        root = tomllib.loads(text)
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"not valid TOML: {error}", rule="recipe.syntax", where=location) from error
    _refuse_unknown(root, _ROOT_KEYS, location)
    rules = root.get("rules", [])
    if not isinstance(rules, list) or not all(isinstance(rule, dict) for rule in rules):
        raise UsageError("expected rules as [[rules]] tables", rule="recipe.type", where=f"{location}: rules")
    return Recipe(
        name=_text(root.get("name", name), f"{location}: name"),
        description=_text(root.get("description", ""), f"{location}: description").strip(),
        rules=tuple(_rule(rule, index, f"{location}: rules[{index}]") for index, rule in enumerate(rules)),
        rotate=_rotate(root["rotate"], f"{location}: rotate") if "rotate" in root else None,
        activations=_text(root["activations"], f"{location}: activations") if "activations" in root else None,
        runs_in=_texts(root["runs_in"], f"{location}: runs_in") if "runs_in" in root else (),
        mixture=_mixture(root, location),
    )


def _mixture(root: Mapping[str, Any], location: str) -> Mixture | None:
    if "mixture" not in root:
        if "quantizer" in root:
            raise UsageError(
                "a quantizer of the recipe needs a mixture; to use a quantizer without one, add it to a rule",
                rule="recipe.mixture",
                where=f"{location}: quantizer",
            )
        return None
    try:
        return parse_mixture(root["mixture"], root.get("quantizer"))
    except UsageError as error:
        raise error.add_location(f"{location}: mixture") from None


def _rotate(table: Any, location: str) -> Rotate:
    if not isinstance(table, dict):
        raise _mistyped("a table", table, location)
    _refuse_unknown(table, ("r1", "r2", "seed"), location)
    for key in ("r1", "r2"):
        if not isinstance(table.get(key, False), bool):
            raise _mistyped("true or false", table[key], f"{location}.{key}")
    seed = _count(table.get("seed", 0), f"{location}.seed")
    try:
        return Rotate(table.get("r1", False), table.get("r2", False), seed)
    except UsageError as error:
        raise error.add_location(location) from None


def _rule(table: Mapping[str, Any], index: int, location: str) -> Rule:
    _refuse_unknown(table, (*_CONDITIONS, *_CHOICE_KEYS), location)
    conditions = {key: read(table[key], f"{location}.{key}") for key, read in _CONDITIONS.items() if key in table}
    conditions.setdefault("label", f"rule {index}")
    try:
        return Rule(choice=_choice(table, location), **conditions)
    except UsageError as error:
        raise error if error.where else error.add_location(location) from None


def _choice(table: Mapping[str, Any], location: str) -> Choice | Measured | None:
    if "keep" in table:
        if table["keep"] is not True or any(key in table for key in _CHOICE_KEYS[1:]):
            raise UsageError("expected keep = true alone, or a codec", rule="recipe.choice", where=f"{location}.keep")
        return None
    if any(key in table for key in _MEASURED_KEYS):
        if any(key in table for key in _CODEC_KEYS):
            raise UsageError("expected a codec or candidates, found both", rule="recipe.choice", where=location)
        return _measured(table, location)
    if "codec" not in table:
        raise UsageError(
            "this rule has no choice: add a codec, candidates, or keep = true", rule="recipe.choice", where=location
        )
    return _codec_choice(table, location)


def _codec_choice(table: Mapping[str, Any], location: str) -> Choice:
    return Choice(
        codec=_text(table["codec"], f"{location}.codec"),
        options=_options(table.get("options", {}), f"{location}.options"),
        encoding=_text(table.get("encoding", "raw"), f"{location}.encoding"),
        quantizer=_text(table["quantizer"], f"{location}.quantizer") if "quantizer" in table else None,
    )


def _measured(table: Mapping[str, Any], location: str) -> Measured:
    items = table.get("candidates", [])
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise _mistyped("a list of tables", items, f"{location}.candidates")
    snr = _number(table["min_snr_db"], f"{location}.min_snr_db") if "min_snr_db" in table else None
    candidates = [_candidate(item, f"{location}.candidates[{index}]") for index, item in enumerate(items)]
    packed = table.get("packed", False)
    if not isinstance(packed, bool):
        raise _mistyped("true or false", packed, f"{location}.packed")
    return Measured(_text(table.get("pick", ""), f"{location}.pick"), tuple(candidates), snr, packed)


def _candidate(table: Mapping[str, Any], location: str) -> Choice:
    _refuse_unknown(table, _CODEC_KEYS, location)
    if "codec" not in table:
        raise UsageError("this candidate has no codec: add one", rule="recipe.choice", where=location)
    try:
        return _codec_choice(table, location)
    except UsageError as error:
        raise error if error.where else error.add_location(location) from None


def _refuse_unknown(table: Mapping[str, Any], allowed: tuple[str, ...], location: str) -> None:
    for key in table:
        if key not in allowed:
            hint = did_you_mean(key, allowed) or f"; known: {', '.join(allowed)}"
            raise UsageError(f"unknown key {key!r}{hint}", rule="recipe.unknown-key", where=location)


def _text(value: Any, location: str) -> str:
    if not isinstance(value, str):
        raise _mistyped("a string", value, location)
    return value


def _texts(value: Any, location: str) -> tuple[str, ...]:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not items or not all(isinstance(item, str) for item in items):
        raise _mistyped("a string or a list of strings", value, location)
    return tuple(items)


def _count(value: Any, location: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise _mistyped("an integer of at least 0", value, location)
    return value


def _number(value: Any, location: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise _mistyped("a number", value, location)
    return float(value)


def _options(value: Any, location: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _mistyped("a table", value, location)
    for key, item in value.items():
        _require_plain(item, f"{location}.{key}", _MAX_OPTION_DEPTH)
    return value


def _require_plain(value: Any, location: str, depth: int) -> None:
    """Raise ``recipe.type`` for dates and times, and for tables and lists nested deeper than ``depth``."""
    if isinstance(value, str | int | float | bool):
        return
    if depth and isinstance(value, dict):
        for key, item in value.items():
            _require_plain(item, f"{location}.{key}", depth - 1)
    elif depth and isinstance(value, list):
        for index, item in enumerate(value):
            _require_plain(item, f"{location}[{index}]", depth - 1)
    else:
        expected = "a string, number, boolean, list or table" if depth else "a string, number or boolean"
        raise _mistyped(expected, value, location)


def _mistyped(expected: str, actual: Any, location: str) -> UsageError:
    return UsageError(f"expected {expected}, found {str(actual)[:80]!r}", rule="recipe.type", where=location)


_CONDITIONS: dict[str, Callable[[Any, str], Any]] = {
    "label": _text,
    "match": _texts,
    "exclude": _texts,
    "roles": _texts,
    "layers": _text,
    "dtypes": _texts,
    "min_ndim": _count,
    "max_ndim": _count,
    "min_size": _count,
    "max_size": _count,
    "min_cols": _count,
    "cols_multiple_of": _count,
}
