"""References to adapters, and the options of the adapter commands. The command line takes its help texts from here."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ingot.artifacts.destination import CPU, DEVICE, OVERWRITE, PROGRESS
from ingot.core.options import OUT, OUTPUT, about, source
from ingot.errors import UsageError
from ingot.stores.location import AnyPath, Location

if TYPE_CHECKING:
    from ingot.core.runtime.progress import ProgressCallback
    from ingot.model.statistics import Statistics


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """An adapter's location, and the weight by which its change is multiplied."""

    path: str
    weight: float = 1.0

    @classmethod
    def parse(cls, value: object) -> AdapterRef:
        """Return the reference for ``PATH``, ``PATH:WEIGHT``, or a pair of path and weight; the default weight is 1.

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

    adapter: AnyPath = field(metadata=source("A PEFT or MLX folder, or a GGUF adapter."))
    out: AnyPath = field(metadata=about("File x.gguf for llama.cpp, else a folder.", *OUTPUT, aliases=OUT))
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
        metadata=about("Format of the result; default: gguf for OUT.gguf, else mlx from PEFT, peft from others."),
    )
    overwrite: bool = field(default=False, metadata=OVERWRITE)


@dataclass(frozen=True, slots=True)
class AdapterExtractOptions:
    """The options of ``ingot.extract_adapter`` and of ``ingot adapter extract``."""

    base: AnyPath = field(metadata=source("The base: a model folder or file."))
    tuned: AnyPath = field(metadata=source("The fine-tune of the base, with the same names."))
    out: AnyPath = field(metadata=about("Folder of the adapter (PEFT).", *OUTPUT, aliases=OUT))
    _: KW_ONLY
    rank: int | None = field(
        default=None, metadata=about("Rank of every matrix; 32 without --max-error and --size.", minimum=1)
    )
    max_error: float | None = field(
        default=None, metadata=about("Smallest ranks with at most this relative error per matrix, such as 0.1.")
    )
    size: int | str | None = field(
        default=None, metadata=about("Ranks with the least error in a file of at most this size, such as 50MB.")
    )
    calibration: AnyPath | Statistics | None = field(
        default=None,
        metadata=about("Statistics of `ingot calibrate`: minimize the error of outputs, not that of weights."),
    )
    residual: Literal["exact"] | None = field(
        default=None,
        metadata=about(
            "exact: also write OUT.residual.zt, the delta from the merged adapter to the fine-tune, bit for bit."
        ),
    )
    dtype: Literal["f32", "f16", "bf16"] = field(default="f32", metadata=about("Element type of the factors."))
    device: Any = field(default=CPU, metadata=DEVICE)
    progress: ProgressCallback | None = field(default=None, metadata=PROGRESS)
    overwrite: bool = field(default=False, metadata=OVERWRITE)
