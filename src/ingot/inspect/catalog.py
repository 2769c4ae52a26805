"""What there is: formats and codecs, and which carries which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import getdoc
from typing import Any

from ingot.codecs.delta.base import DELTAS
from ingot.codecs.table import CODECS, DELTA_ROWS
from ingot.errors import UnsupportedError
from ingot.formats.detect import FORMATS
from ingot.model.layouts.affine import POINTS, AffineLayout, Constant
from ingot.model.layouts.ggml import GgmlBlocksLayout
from ingot.model.layouts.packed_words import FORMS, WordsLayout
from ingot.model.layouts.scaled_codebook import MULTIPLY, ScaledCodebookLayout
from ingot.model.layouts.sparse import WORD, BlocksLayout, MaskLayout
from ingot.model.spec import TensorSpec
from ingot.recipes.load import PRESETS, load_recipe
from ingot.reporting.report import Report, Texts, table_of
from ingot.runtimes.fit import container_for, presets_of
from ingot.runtimes.table import runtime_named


@dataclass(frozen=True, slots=True)
class FormatInfo:
    """A format and the codecs that it carries."""

    name: str
    suffixes: Texts
    codecs: Texts
    summary: str


@dataclass(frozen=True, slots=True)
class CodecInfo:
    """A codec and the formats that carry it."""

    name: str
    lossless: bool
    formats: Texts
    summary: str


@dataclass(frozen=True, slots=True)
class RecipeInfo:
    """A preset recipe."""

    name: str
    description: str


@dataclass(frozen=True, slots=True)
class RuntimePreset:
    """A preset that a program runs: the ``--bits`` that choose it, if any, and the container that it goes into."""

    name: str
    bits: str
    container: str
    description: str


# A codec of many layouts is carried where one of these is: the default, offsets, a byte per weight (signed or around
# the point in the middle), aligned rows.
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

# A codec without an encoder is asked for with its layouts.
_ONLY_READ: Mapping[str, Sequence[GgmlBlocksLayout | WordsLayout]] = {
    GgmlBlocksLayout.codec: (GgmlBlocksLayout("q8_0"),),
    WordsLayout.codec: [
        WordsLayout(form, known.bits[-1], 32, POINTS if known.zeros else Constant(0), "f16")
        for form, known in FORMS.items()
    ],
}


def carries(format: Any, codec: str) -> bool:
    """Whether a format takes tensors of a codec, asked with a small matrix in a few layouts."""
    layouts = _LAYOUTS.get(codec, ({},))
    return any(_takes(format, codec, options, dtype) for options in layouts for dtype in ("f32", "f16", "bf16"))


def _takes(format: Any, codec: str, options: Mapping[str, Any], dtype: str) -> bool:
    if codec in _ONLY_READ:
        return any(_takes_layout(format, layout) for layout in _ONLY_READ[codec])
    try:
        encoder = (DELTAS[codec] if codec in DELTAS else CODECS[codec]).encoder((64, 64), dtype, options)
    except UnsupportedError:
        return False
    stored = str(encoder.params.get("dtype", dtype))
    spec = TensorSpec("x.weight", (64, 64), stored, codec, encoder.parts, dict(encoder.params))
    return format.why_unsupported(spec) is None


def _takes_layout(format: Any, layout: GgmlBlocksLayout | WordsLayout) -> bool:
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
    """Return every codec."""
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
    """Return every format as a row."""
    heads = {"name": "format", "suffixes": "suffixes", "codecs": "carries", "summary": "what it is"}
    return Report(tables=[table_of("", formats(), FormatInfo, heads)])


def codecs_report() -> Report:
    """Return every codec as a row."""
    heads = {"name": "codec", "lossless": "lossless", "formats": "carried by", "summary": "what it is"}
    return Report(tables=[table_of("", codecs(), CodecInfo, heads)])


def recipes_report(runtime: str | None = None) -> Report:
    """Return every preset as a row, or with ``runtime`` the presets that this program runs, its defaults first."""
    if runtime is not None:
        profile = runtime_named(runtime)
        chosen = {name: str(item.bits) for item in profile.presets for name in (item.plain, item.calibrated)}
        fits = [
            RuntimePreset(name, chosen.get(name, ""), container_for(profile, load_recipe(name)) or "", _summary(name))
            for name in presets_of(profile)
        ]
        heads = {"name": "recipe", "bits": "--bits", "container": "container", "description": "what it does"}
        return Report(tables=[table_of("", fits, RuntimePreset, heads)])
    rows = [RecipeInfo(preset, _summary(preset)) for preset in PRESETS]
    return Report(tables=[table_of("", rows, RecipeInfo, {"name": "recipe", "description": "what it does"})])


def _summary(preset: str) -> str:
    """Return the description of a preset on one line."""
    return " ".join(load_recipe(preset).description.split())
