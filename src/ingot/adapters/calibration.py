"""Options and report of a calibration. The command line is made from them: nothing heavy may be imported here."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING

from ingot.core.options import about
from ingot.model.report import Bytes, Line, Report, Shown, figures_of
from ingot.ops.options import MAX_RAM, OVERWRITE, PROGRESS, AnyPath

if TYPE_CHECKING:
    from ingot.core.progress import ProgressCallback

SAMPLES, LENGTH = 96, 256


@dataclass(frozen=True, slots=True)
class CalibrateOptions:
    """A calibration: of which model, on what, and what is taken."""

    model: AnyPath = field(
        metadata=about("Folder or file, with config.json beside the weights.", argument=True, metavar="MODEL")
    )
    out: AnyPath = field(metadata=about("The statistics file to write: X.safetensors.", "--out", "-o", metavar="FILE"))
    text: AnyPath | None = field(
        default=None, metadata=about("Text in UTF-8 to read; without it the model reads samples of its own.")
    )
    _: KW_ONLY
    samples: int = field(default=SAMPLES, metadata=about("Windows to read.", least=1))
    length: int | None = field(
        default=None, metadata=about("Tokens of a window; default 256, or what the model has positions for.", least=2)
    )
    seed: int = field(
        default=0, metadata=about("Of the samples, and of the labels that gradients are taken at.", least=0)
    )
    fisher: bool = field(
        default=True,
        metadata=about(
            "Take gradients too: what errors of each output weigh; about three times the time.", "--fisher/--no-fisher"
        ),
    )
    imatrix: AnyPath | None = field(
        default=None, metadata=about("Also write the mean squares as an importance matrix of llama.cpp (GGUF).")
    )
    max_ram: int | str | None = field(default=None, metadata=MAX_RAM)
    overwrite: bool = field(default=False, metadata=OVERWRITE)
    progress: ProgressCallback | None = field(default=None, metadata=PROGRESS)


@dataclass(frozen=True, slots=True)
class CalibrateReport(Shown):
    """What a calibration took."""

    out: str
    matrices: int
    tokens: int
    source: str
    fisher: bool
    passes: int
    size: Bytes
    seconds: float

    def report(self) -> Report:
        """Return it as figures."""
        words = "{matrices} matrices over {tokens} tokens of {source}: {out}, {size}, {seconds} s"
        return Report(figures=figures_of(self), lines=[Line(words)])
