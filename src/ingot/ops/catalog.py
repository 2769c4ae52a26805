"""What there is: formats and codecs, and which carries which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from inspect import getdoc
from typing import Any

from ingot.codecs.delta import DELTAS
from ingot.codecs.table import CODECS
from ingot.errors import UnsupportedError
from ingot.formats.table import FORMATS
from ingot.model.spec import TensorSpec


@dataclass(frozen=True, slots=True)
class FormatInfo:
    """A format and the codecs that it carries."""

    name: str
    suffixes: Sequence[str]
    codecs: Sequence[str]
    summary: str


@dataclass(frozen=True, slots=True)
class CodecInfo:
    """A codec and the formats that carry it."""

    name: str
    lossless: bool
    formats: Sequence[str]
    summary: str


def carries(format: Any, codec: str) -> bool:
    """Whether a format takes tensors of a codec with its default options, asked with a small matrix."""
    for dtype in ("f32", "bf16"):
        try:
            encoder = (DELTAS[codec] if codec in DELTAS else CODECS[codec]).encoder((64, 64), dtype, {})
        except UnsupportedError:
            continue
        stored = str(encoder.params.get("dtype", dtype))
        spec = TensorSpec("w", (64, 64), stored, codec, encoder.parts, dict(encoder.params))
        return format.refuses(spec) is None
    return False


def formats() -> list[FormatInfo]:
    """Return every format that Ingot reads and writes."""
    found = [FORMATS[name] for name in FORMATS]
    return [
        FormatInfo(item.name, item.suffixes, [codec for codec in CODECS if carries(item, codec)], item.summary)
        for item in found
    ]


def codecs() -> list[CodecInfo]:
    """Return every codec."""
    return [
        CodecInfo(
            name,
            CODECS[name].lossless,
            [key for key in FORMATS if carries(FORMATS[key], name)],
            (getdoc(type(CODECS[name])) or "").partition("\n")[0].rstrip(".").replace("``", "`"),
        )
        for name in CODECS
    ]
