"""The options of ``int4`` and of building tiers. The command line is made from them: nothing heavy may be imported."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Literal

from ingot.artifacts.destination import MAX_RAM, PROGRESS, THREADS
from ingot.core.options import about
from ingot.stores.location import AnyPath

if TYPE_CHECKING:
    from ingot.core.runtime.progress import ProgressCallback
    from ingot.ext.squish.tiers.gate import Gate


@dataclass(frozen=True, slots=True)
class Int4Options:
    """Four bits beside eight: of which directory, in which form, at which cost."""

    path: AnyPath = field(
        metadata=about("Squish directory (`ingot convert SRC DIR --format npydir`).", argument=True, metavar="PATH")
    )
    _: KW_ONLY
    form: Literal["q4a", "q4"] | None = field(
        default=None,
        metadata=about("q4a, the default: a scale and an offset per group; q4: a scale alone, zero point 7."),
    )
    group: int | None = field(
        default=None,
        metadata=about(
            "Columns that share a scale, a power of two from 4 to 1024, default 32; where they do not divide a "
            "tensor's columns, the largest smaller power of two that does.",
            metavar="N",
            minimum=4,
        ),
    )
    scales: Literal["f32", "f16"] | None = field(
        default=None, metadata=about("Type of scales and offsets: f32, the default, or f16, which takes half of it.")
    )
    quantizer: Literal["mse", "minmax"] = field(
        default="mse",
        metadata=about("Scales by least squared error (mse), or the extremes (minmax).", metavar="NAME"),
    )
    drop_int8: bool = field(
        default=False, metadata=about("Remove the eight-bit arrays once four bits are complete.", "--drop-int8")
    )
    max_ram: int | str | None = field(default=None, metadata=MAX_RAM)
    threads: int | None = field(default=None, metadata=THREADS)
    progress: ProgressCallback | None = field(default=None, metadata=PROGRESS)


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """A tier: of which directory, which one, and what it may cost."""

    path: AnyPath = field(
        metadata=about("Squish directory: manifest.json and tensors/.", argument=True, metavar="PATH")
    )
    tier: str = field(default="bf16", metadata=about("bf16, finalized, 4bit or 3bit.", "--tier"))
    _: KW_ONLY
    max_ram: int | str | None = field(default=None, metadata=MAX_RAM)
    force: bool = field(default=False, metadata=about("Build it anew though it is complete.", "--force"))
    allow_requantize: bool = field(
        default=False,
        metadata=about(
            "Of the packed tiers: quantize again what the tensors have at few bits and MLX cannot take as it is.",
            "--allow-requantize",
        ),
    )
    gate: Gate | None = field(
        default=None,
        metadata=about(
            "Of the packed tiers: mark it only if the model passes, with more bits for some tensors where it must be.",
            command=False,
        ),
    )
    ungated: bool = field(
        default=False, metadata=about("Build a 3bit tier without measuring what it costs.", "--ungated")
    )
    progress: ProgressCallback | None = field(default=None, metadata=PROGRESS)
