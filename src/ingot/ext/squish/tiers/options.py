"""Options of ``int4`` and of tier builds. The command line derives from this module, so it imports nothing heavy."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Literal

from ingot.artifacts.destination import MAX_RAM, PROGRESS, THREADS
from ingot.core.options import about, source
from ingot.stores.location import AnyPath

if TYPE_CHECKING:
    from ingot.core.runtime.progress import ProgressCallback
    from ingot.ext.squish.tiers.gate import Gate


@dataclass(frozen=True, slots=True)
class Int4Options:
    """Options of ``add_int4``: the directory, the four-bit form, the resources."""

    path: AnyPath = field(
        metadata=source("Squish directory (`ingot convert SRC DIR --format npydir`).", metavar="PATH")
    )
    _: KW_ONLY
    form: Literal["q4a", "q4"] | None = field(
        default=None,
        metadata=about("q4a, the default: a scale and an offset per group; q4: only a scale, zero point 7."),
    )
    group: int | None = field(
        default=None,
        metadata=about(
            "Columns that share a scale, a power of two from 4 to 1024, default 32; if it does not divide a tensor's "
            "columns, the largest smaller power of two that does.",
            metavar="N",
            minimum=4,
        ),
    )
    scales: Literal["f32", "f16"] | None = field(
        default=None, metadata=about("Type of scales and offsets: f32, the default, or f16, half the size.")
    )
    quantizer: Literal["mse", "minmax"] = field(
        default="mse",
        metadata=about("Scales from the least squared error (mse) or from the extremes (minmax).", metavar="NAME"),
    )
    drop_int8: bool = field(
        default=False, metadata=about("Remove the eight-bit arrays when all four-bit arrays exist.", "--drop-int8")
    )
    max_ram: int | str | None = field(default=None, metadata=MAX_RAM)
    threads: int | None = field(default=None, metadata=THREADS)
    progress: ProgressCallback | None = field(default=None, metadata=PROGRESS)


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """Options of a tier build: the directory, the tier, the gate, the resources."""

    path: AnyPath = field(metadata=source("Squish directory: manifest.json and tensors/.", metavar="PATH"))
    tier: str = field(default="bf16", metadata=about("bf16, finalized, 4bit or 3bit.", "--tier"))
    _: KW_ONLY
    max_ram: int | str | None = field(default=None, metadata=MAX_RAM)
    force: bool = field(default=False, metadata=about("Build the tier again even if it is complete.", "--force"))
    allow_requantize: bool = field(
        default=False,
        metadata=about(
            "For packed tiers: quantize tensors below 8 bits again if MLX cannot use their layout.",
            "--allow-requantize",
        ),
    )
    gate: Gate | None = field(
        default=None,
        metadata=about(
            "For packed tiers: mark the tier as complete only if the model passes; some tensors may get more bits.",
            command=False,
        ),
    )
    ungated: bool = field(
        default=False, metadata=about("Build a 3bit tier without measuring its quality.", "--ungated")
    )
    progress: ProgressCallback | None = field(default=None, metadata=PROGRESS)
