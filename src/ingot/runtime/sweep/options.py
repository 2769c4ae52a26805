"""The options of ``ingot sweep``. The command line derives from this module, so it imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING

from ingot.artifacts.destination import MAX_RAM, PROGRESS, RESUME
from ingot.core.options import about
from ingot.runtime.loading.options import Protocol
from ingot.stores.location import AnyPath

if TYPE_CHECKING:
    from collections.abc import Callable

    from ingot.core.runtime.progress import ProgressCallback


@dataclass(frozen=True, slots=True)
class SweepOptions:
    """The options of ``ingot.sweep`` and ``ingot sweep``."""

    model: AnyPath = field(
        metadata=about("Folder with config.json and tokenizer, or org/name.", argument=True, metavar="MODEL")
    )
    presets: str | Sequence[str] = field(
        metadata=about(
            "Presets (see `ingot recipes`) or TOML files, separated by commas; can be repeated.",
            "--presets",
            metavar="NAMES",
        )
    )
    texts: AnyPath | Sequence[AnyPath] = field(
        metadata=about(
            "Texts in UTF-8 to measure on, separated by commas; can be repeated.", "--texts", metavar="FILES"
        )
    )
    out: AnyPath = field(metadata=about("The report to write, as JSON.", "--out", "-o", metavar="FILE"))
    _: KW_ONLY
    page: AnyPath | None = field(
        default=None, metadata=about("Also write the report as a Markdown page.", metavar="FILE")
    )
    runtime: str | None = field(
        default=None,
        metadata=about(
            "Store each result in the container that this program reads; default: zt, which holds almost every preset.",
            "--for",
            metavar="RUNTIME",
        ),
    )
    calibration: AnyPath | None = field(
        default=None,
        metadata=about(
            "Statistics of `ingot calibrate` for calibrated presets; default: taken once, from samples of the model.",
            metavar="FILE",
        ),
    )
    allow_requantize: bool = field(default=False, metadata=about("Quantize tensors that are quantized already."))
    max_ram: int | str | None = field(default=None, metadata=MAX_RAM)
    resume: bool = field(default=False, metadata=RESUME)
    overwrite: bool = field(default=False, metadata=about("Replace the files of the report."))
    protocol: Protocol = field(
        default_factory=Protocol, metadata=about("Windows of each text, element type and device.", command=False)
    )
    progress: ProgressCallback | None = field(default=None, metadata=PROGRESS)
    announce: Callable[[str], None] | None = field(
        default=None, metadata=about("Called with a line of text when a result is measured.", command=False)
    )
