"""Lists of formats, codecs and presets, and the codecs whose tensors each format can store."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import getdoc
from math import prod
from typing import Any

from ingot.codecs.delta.base import DELTAS
from ingot.codecs.table import CODECS, DELTA_ROWS
from ingot.conversion.preset_fit import container_for, presets_of, programs_of
from ingot.errors import UnsupportedError
from ingot.formats.detect import FORMATS
from ingot.model.layouts.affine import POINTS, AffineLayout, Constant
from ingot.model.layouts.ggml import GgmlBlocksLayout
from ingot.model.layouts.packed_ints import PACKING_FORMS, PackedIntLayout
from ingot.model.layouts.scaled_codebook import MULTIPLY, ScaledCodebookLayout
from ingot.model.layouts.sparse import WORD, BlocksLayout, MaskLayout
from ingot.model.spec import TensorSpec
from ingot.quantization.choice import parse_quantizer
from ingot.recipes.choice import Choice, Measured
from ingot.recipes.llama_cpp_mixtures import LLAMA_LAYERS, expand_for_llama
from ingot.recipes.load import ALL_PRESETS, load_recipe
from ingot.recipes.recipe import Recipe, resolve
from ingot.reporting.report import Column, Line, Report, Table, Texts, table_of
from ingot.runtimes.table import runtime_named

ANY_PROGRAM = "any program"


@dataclass(frozen=True, slots=True)
class FormatInfo:
    """A format, and the codecs whose tensors its files can store."""

    name: str
    suffixes: Texts
    codecs: Texts
    summary: str


@dataclass(frozen=True, slots=True)
class CodecInfo:
    """A codec, and the formats whose files can store its tensors."""

    name: str
    lossless: bool
    formats: Texts
    summary: str


@dataclass(frozen=True, slots=True)
class RecipeInfo:
    """A preset: its bits per weight, the programs that run its results, and whether it needs statistics of a
    calibration.
    """

    name: str
    bits: str
    runs_in: Texts
    calibrated: bool


@dataclass(frozen=True, slots=True)
class RuntimePreset:
    """A preset whose results a program runs, its container, and the value of ``--bits`` that selects it.

    The value is empty if no value of ``--bits`` selects the preset.

    ``stored_bits`` are the bits per weight of its matrices, as in ``RecipeInfo``.
    """

    name: str
    bits: str
    stored_bits: str
    container: str
    description: str


# Encoder options of layouts to probe a format with. A format carries a codec if it accepts one of its layouts.
_LAYOUTS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    AffineLayout.codec: (
        {},
        {"bits": 4, "group": 32, "zero_kind": "offset", "scales": "f32"},
        {"bits": 8},
        {"bits": 8, "signed": False, "zero_point": 128},
    ),
    BlocksLayout.codec: ({}, {"whole": True}),
    DELTA_ROWS: ({"rows": 32, "inner": AffineLayout.codec},),
    MaskLayout.codec: ({}, {"row_alignment": WORD}),
    ScaledCodebookLayout.codec: (
        {},
        {"table": "f8_e4m3fn", "group": (128, 128)},
        {"table": "f4_e2m1fn", "group": 32, "scales": "f8_e8m0fnu"},
        {"table": "f4_e2m1fn", "group": 32, "scales": "f8_e8m0fnu", "transposed": True},
        {"table": "f4_e2m1fn", "group": 16, "scales": "f8_e4m3fn", "second": MULTIPLY},
        {"flat": True, "order": "high_first"},
    ),
}

# Layouts to probe a format with, for codecs whose encoders do not write all layouts.
_DECODED_LAYOUTS: Mapping[str, Sequence[GgmlBlocksLayout | PackedIntLayout]] = {
    GgmlBlocksLayout.codec: (GgmlBlocksLayout("q8_0"),),
    PackedIntLayout.codec: [
        PackedIntLayout(name, packing.bits[-1], 32, POINTS if packing.zeros else Constant(0), "f16")
        for name, packing in PACKING_FORMS.items()
    ],
}


def carries(format: Any, codec: str) -> bool:
    """Return whether a format can store a matrix of 64 x 64 in one of the layouts of ``codec``."""
    layouts = _LAYOUTS.get(codec, ({},))
    return any(_accepts(format, codec, options, dtype) for options in layouts for dtype in ("f32", "f16", "bf16"))


def _accepts(format: Any, codec: str, options: Mapping[str, Any], dtype: str) -> bool:
    if codec in _DECODED_LAYOUTS:
        return any(_accepts_layout(format, layout) for layout in _DECODED_LAYOUTS[codec])
    try:
        encoder = (DELTAS[codec] if codec in DELTAS else CODECS[codec]).encoder((64, 64), dtype, options)
    except UnsupportedError:
        return False
    stored = str(encoder.params.get("dtype", dtype))
    spec = TensorSpec("x.weight", (64, 64), stored, codec, encoder.parts, dict(encoder.params))
    return format.why_unsupported(spec) is None


def _accepts_layout(format: Any, layout: GgmlBlocksLayout | PackedIntLayout) -> bool:
    parts = layout.part_specs((64, 64))
    params = layout.attributes()
    return format.why_unsupported(TensorSpec("x.weight", (64, 64), layout.dtype, layout.codec, parts, params)) is None


def formats() -> list[FormatInfo]:
    """Return every format that Ingot reads and writes."""
    return [
        FormatInfo(
            name, item.suffixes, [codec for codec, _ in CODECS.available() if carries(item, codec)], item.summary
        )
        for name, item in FORMATS.available()
    ]


def codecs() -> list[CodecInfo]:
    """Return a description of every codec, plugins included."""
    return [
        CodecInfo(
            name,
            codec.lossless,
            [key for key, format in FORMATS.available() if carries(format, name)],
            (getdoc(type(codec)) or "").partition("\n")[0].rstrip(".").replace("``", "`"),
        )
        for name, codec in CODECS.available()
    ]


def formats_report() -> Report:
    """Return the report of ``ingot formats``, with a row for every format."""
    heads = {"name": "format", "suffixes": "suffixes", "codecs": "carries", "summary": "what it is"}
    return Report(tables=[table_of("", formats(), FormatInfo, heads)])


def codecs_report() -> Report:
    """Return the report of ``ingot codecs``, with a row for every codec."""
    heads = {"name": "codec", "lossless": "lossless", "formats": "carried by", "summary": "what it is"}
    return Report(tables=[table_of("", codecs(), CodecInfo, heads)])


_MATRIX = (4096, 4096)
_MATRICES = (
    *(f"self_attn.{name}_proj" for name in ("q", "k", "v", "o")),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)


def recipes() -> list[RecipeInfo]:
    """Return a description of every preset."""
    return [_recipe_info(load_recipe(name)) for name in ALL_PRESETS]


def recipes_report(runtime: str | None = None) -> Report:
    """Return the report of ``ingot recipes``, with a row for every preset.

    With ``runtime``, it has only presets whose results this program runs; the program's defaults come first.
    """
    if runtime is not None:
        return _presets_for(runtime)
    heads = {"name": "recipe", "bits": "bits", "runs_in": "runs in", "calibrated": "calibrated"}
    return Report(tables=[table_of("", recipes(), RecipeInfo, heads)])


def _presets_for(runtime: str) -> Report:
    profile = runtime_named(runtime)
    chosen = {name: str(item.bits) for item in profile.presets for name in (item.plain, item.calibrated)}
    fits = [
        RuntimePreset(
            name,
            chosen.get(name, ""),
            _recipe_info(load_recipe(name)).bits,
            container_for(profile, load_recipe(name)) or "",
            _description(name),
        )
        for name in presets_of(profile)
    ]
    heads = {
        "name": "recipe",
        "bits": "--bits",
        "stored_bits": "bits of a weight",
        "container": "container",
        "description": "what it does",
    }
    rows = [(item.name, item.bits, item.stored_bits, item.container, _first_clause(item.description)) for item in fits]
    text = Table("", [Column("", head=head) for head in heads.values()], rows, data=False)
    legend = Line("`ingot recipes NAME` prints a preset with its full description. The bits are those of matrices.")
    return Report(tables=[replace(table_of("", fits, RuntimePreset, heads), shown=False), text], closing=[legend])


def _description(preset: str) -> str:
    """Return the description of a preset on one line."""
    return " ".join(load_recipe(preset).description.split())


def _first_clause(text: str) -> str:
    """Return a text up to its first colon, semicolon or full stop that ends a clause."""
    return re.split(r"[:;.](?: |$)", text, maxsplit=1)[0]


def _recipe_info(recipe: Recipe) -> RecipeInfo:
    choices = {repr(choice): choice for choice in _choices(recipe)}
    sizes = [_bits(choice) for choice in choices.values()]
    bits = _range([size for size in sizes if size is not None]) if None not in sizes else ""
    return RecipeInfo(recipe.name, bits, _programs(recipe), any(choice.quantizer for choice in choices.values()))


def _programs(recipe: Recipe) -> Sequence[str]:
    """Return the programs that run a preset: those that it declares, and those whose profiles accept it."""
    if recipe.runs_in == (ANY_PROGRAM,):
        return recipe.runs_in
    return tuple(dict.fromkeys((*recipe.runs_in, *programs_of(recipe.name)))) or ("Ingot",)


def _range(sizes: Sequence[float]) -> str:
    if not sizes:
        return ""
    low = f"{min(sizes):.2f}"
    high = f"{max(sizes):.2f}"
    return low if low == high else f"{low} to {high}"


def _choices(recipe: Recipe) -> Iterator[Choice]:
    """Yield a recipe's choices for the matrices of a Llama model.

    The numbers of columns of these matrices are multiples of every group size and block size.
    """
    recipe = expand_for_llama(recipe)
    for name in [f"model.layers.{layer}.{matrix}.weight" for layer in range(LLAMA_LAYERS) for matrix in _MATRICES]:
        choice = resolve(recipe, name, _MATRIX, "bf16", LLAMA_LAYERS).choice
        yield from choice.candidates if isinstance(choice, Measured) else () if choice is None else (choice,)


def mean_bits(recipe: Recipe) -> float | None:
    """Return the mean bits per weight in the layers of a Llama model; None if the bits depend on the values."""
    expanded = expand_for_llama(recipe)
    names = [f"model.layers.{layer}.{matrix}.weight" for layer in range(LLAMA_LAYERS) for matrix in _MATRICES]
    sizes = []
    for name in names:
        choice = resolve(expanded, name, _MATRIX, "bf16", LLAMA_LAYERS).choice
        choice = choice.candidates[0] if isinstance(choice, Measured) else choice
        bits = 16.0 if choice is None else _bits(choice)
        if bits is None:
            return None
        sizes.append(bits)
    return sum(sizes) / len(sizes)


def _bits(choice: Choice) -> float | None:
    """Return the stored bits per weight; None if they depend on the values, or if the codec does not support bf16."""
    if choice.quantizer is not None:
        quantizer = parse_quantizer(choice.quantizer, choice.codec, choice.options)
        parts = quantizer.layout(_MATRIX, "bf16").part_specs(_MATRIX)
        if quantizer.grid.coded is not None:
            return quantizer.grid.coded + 8 * sum(part.length or 0 for part in parts[1:]) / prod(_MATRIX)
    else:
        try:
            parts = CODECS[choice.codec].encoder(_MATRIX, "bf16", choice.options).parts
        except UnsupportedError:
            return None
    lengths = [part.length for part in parts]
    if choice.encoding != "raw" or None in lengths:
        return None
    return 8 * sum(length or 0 for length in lengths) / prod(_MATRIX)
