"""References to adapters, and options of the commands on them. The command line imports this module for its help."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from math import isfinite
from pathlib import Path
from typing import Literal

from ingot.artifacts.destination import OVERWRITE
from ingot.core.options import about
from ingot.errors import UsageError
from ingot.stores.location import AnyPath, Location


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """An adapter's location, and the weight of its change in a sum."""

    path: str
    weight: float = 1.0

    @classmethod
    def parse(cls, value: object) -> AdapterRef:
        """Return the reference for ``PATH``, ``PATH:WEIGHT``, a path or a pair of path and weight.

        Raises ``UsageError`` ``adapter.weight``: the weight is not a finite number.
        """
        if isinstance(value, AdapterRef):
            return value
        if isinstance(value, tuple):
            path, weight = value
            return cls(_text(path), _weight(weight))
        text = _text(value)
        path, colon, number = text.rpartition(":")
        if not colon or not path or Path(text).exists():
            return cls(text)
        try:
            return cls(path, _weight(float(number)))
        except ValueError:
            return cls(text)


def _text(path: object) -> str:
    return path.text if isinstance(path, Location) else str(path)


def _weight(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise UsageError(f"expected a finite number as weight, found {value!r}", rule="adapter.weight")
    return float(value)


@dataclass(frozen=True, slots=True)
class AdapterConvertOptions:
    """The options of ``ingot.convert_adapter`` and of ``ingot adapter convert``."""

    adapter: AnyPath = field(metadata=about("A PEFT or MLX folder, or a GGUF adapter.", argument=True))
    out: AnyPath = field(metadata=about("File x.gguf for llama.cpp, else a folder.", "--out", "-o"))
    _: KW_ONLY
    base: AnyPath | None = field(
        default=None,
        metadata=about(
            "The base: a model folder or a GGUF file. Into and out of GGUF it determines names and the order of rows; "
            "with it the adapter's modules are checked."
        ),
    )
    to: Literal["peft", "gguf", "mlx"] | None = field(
        default=None,
        metadata=about("Form of the result; default: gguf by suffix, for folders mlx from PEFT and peft from others."),
    )
    overwrite: bool = field(default=False, metadata=OVERWRITE)
