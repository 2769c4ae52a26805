"""Options and report of a calibration. The command line derives from this module, so it imports nothing heavy."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any

from ingot.artifacts.destination import CPU, DEVICE, MAX_RAM, OVERWRITE, PROGRESS, RESUME
from ingot.core.options import OUT, OUTPUT, about, source
from ingot.core.runtime.memory import format_size
from ingot.reporting.report import Bytes, Figure, Line, Report, duration_text, figures_of
from ingot.reporting.reportable import Reportable
from ingot.runtime.evaluation.special_tokens import prefix_text
from ingot.stores.location import AnyPath

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ingot.core.runtime.progress import ProgressCallback
    from ingot.runtime.evaluation.special_tokens import SpecialToken

SAMPLES = 96
LENGTH = 256
SENTENCE = 64
BUILT_IN = "default"
_SHOWN = 4


@dataclass(frozen=True, slots=True)
class CalibratePlan:
    """Estimates for a calibration.

    Attributes
    ----------
    seconds : float
    memory, disk : int
        Largest number of bytes of memory and disk in use at a time.
    size : int
        Largest number of bytes of statistics that exist at a time. If they are used layer by layer, these are the
        statistics of one layer, otherwise of all layers.
    reads : int
        How many times the model's layers are read.
    source : str
        The name of the text that the model reads, or a phrase for samples of the model.
    """

    seconds: float
    memory: int
    disk: int
    size: int
    reads: int
    source: str = ""

    def describe(self) -> str:
        """Return the estimates as text for a report."""
        reads = "once" if self.reads == 1 else f"{self.reads} times"
        memory, disk, size = (format_size(count) for count in (self.memory, self.disk, self.size))
        return (
            f"about {duration_text(self.seconds)}, {memory} of memory besides the program, {disk} of disk until it is "
            f"done; a file of {size}; layers are read {reads}"
        )


@dataclass(frozen=True, slots=True)
class CalibrateOptions:
    """Options of a calibration: model, text or samples, and the statistics to collect."""

    model: AnyPath = field(metadata=source("Folder or file, with config.json in its folder.", metavar="MODEL"))
    out: AnyPath = field(
        metadata=about("The statistics file to write: X.safetensors.", *OUTPUT, metavar="FILE", aliases=OUT)
    )
    text: AnyPath | None = field(
        default=None,
        metadata=about(
            "UTF-8 text to read; `default` is a text in the package. If unset, a causal model reads its samples."
        ),
    )
    _: KW_ONLY
    samples: int = field(default=SAMPLES, metadata=about("Windows to read.", minimum=1))
    length: int | None = field(
        default=None, metadata=about("Tokens of a window; default 256, or the model's maximum.", minimum=2)
    )
    seed: int = field(default=0, metadata=about("Seed of the samples, and of the labels for gradients.", minimum=0))
    fisher: bool = field(
        default=True,
        metadata=about(
            "Also collect gradients, which weight the errors of outputs; takes about three times as long.",
            "--fisher/--no-fisher",
        ),
    )
    imatrix: AnyPath | None = field(
        default=None, metadata=about("Also write the mean squares as an importance matrix of llama.cpp (GGUF).")
    )
    largest: int | None = field(
        default=None,
        metadata=about(
            "Maximum number of columns or rows for full second moments; larger ones keep only the diagonal.", minimum=1
        ),
    )
    device: Any = field(default=CPU, metadata=DEVICE)
    max_ram: int | str | None = field(default=None, metadata=MAX_RAM)
    resume: bool = field(default=False, metadata=RESUME)
    overwrite: bool = field(default=False, metadata=OVERWRITE)
    progress: ProgressCallback | None = field(default=None, metadata=PROGRESS)
    reserve: int = field(
        default=0, metadata=about("Bytes of memory that the caller needs during the calibration.", command=False)
    )
    text_if_large: bool = field(
        default=False,
        metadata=about("Read the text in the package if the model does not fit in memory.", command=False),
    )
    plan: Callable[[CalibratePlan], None] | None = field(
        default=None, metadata=about("Called with the estimates before the run.", command=False)
    )


@dataclass(frozen=True, slots=True)
class CalibrateReport(Reportable):
    """The report of a calibration, with its time and size."""

    out: str
    matrices: int
    tokens: int
    source: str
    fisher: bool
    passes: int
    size: Bytes
    seconds: float
    window_prefix: Sequence[SpecialToken] = ()
    chat_windows: int = 0
    unseen: tuple[str, ...] = ()
    resumed: int = 0

    def report(self) -> Report:
        """Return the figures and notes as a ``Report``."""
        text = "{matrices} matrices over {tokens} tokens of {source}: {out}, {size}, {seconds} s"
        lines = [Line(text)]
        if self.window_prefix:
            lines.append(Line("each window begins with {prefix}"))
        if self.chat_windows:
            lines.append(Line("{chat_windows} windows begin with a user's turn of the chat template"))
        if self.unseen:
            names = ", ".join(self.unseen[:_SHOWN]) + (", ..." if len(self.unseen) > _SHOWN else "")
            lines.append(
                Line(f"{len(self.unseen)} matrices saw no token, so all their errors will weigh the same: {names}")
            )
        prefix = Figure("prefix", prefix_text(self.window_prefix), data=False)
        return Report(figures=[*figures_of(self), prefix], lines=lines)
