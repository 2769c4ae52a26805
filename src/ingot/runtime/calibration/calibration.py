"""Options and report of a calibration. The command line is made from them: nothing heavy may be imported here."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING

from ingot.artifacts.destination import MAX_RAM, OVERWRITE, PROGRESS, RESUME
from ingot.core.options import about
from ingot.core.runtime.memory import format_size
from ingot.reporting.report import Bytes, Figure, Line, Report, figures_of
from ingot.reporting.shown import Shown
from ingot.runtime.evaluation.special_tokens import prefix_text
from ingot.stores.location import AnyPath

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ingot.core.runtime.progress import ProgressCallback
    from ingot.runtime.evaluation.special_tokens import SpecialToken

SAMPLES, LENGTH, SENTENCE = 96, 256, 64
BUILT_IN = "default"
_SHOWN = 4


@dataclass(frozen=True, slots=True)
class CalibratePlan:
    """About what a calibration will take: seconds, bytes of memory and of disk while it runs, bytes of the result, and
    how often the model's layers are read."""

    seconds: float
    memory: int
    disk: int
    size: int
    reads: int

    def told(self) -> str:
        """Return it in words."""
        hours, minutes = divmod(int(self.seconds / 60 + 0.5), 60)
        long = f"{hours} h {minutes} min" if hours else f"{minutes} min" if minutes else "less than a minute"
        memory, disk, size = (format_size(count) for count in (self.memory, self.disk, self.size))
        return (
            f"about {long}, {memory} of memory beside the program, {disk} of disk until it is done; a file of "
            f"{size}; layers are read {self.reads} times"
        )


@dataclass(frozen=True, slots=True)
class CalibrateOptions:
    """A calibration: of which model, on what, and what is taken."""

    model: AnyPath = field(
        metadata=about("Folder or file, with config.json beside the weights.", argument=True, metavar="MODEL")
    )
    out: AnyPath = field(metadata=about("The statistics file to write: X.safetensors.", "--out", "-o", metavar="FILE"))
    text: AnyPath | None = field(
        default=None,
        metadata=about(
            "Text in UTF-8 to read; default: one that Ingot ships. Without it a causal model reads samples of its own."
        ),
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
    largest: int | None = field(
        default=None,
        metadata=about(
            "Take second moments of at most so many columns or rows whole; of larger ones the diagonal alone.", least=1
        ),
    )
    max_ram: int | str | None = field(default=None, metadata=MAX_RAM)
    resume: bool = field(default=False, metadata=RESUME)
    overwrite: bool = field(default=False, metadata=OVERWRITE)
    progress: ProgressCallback | None = field(default=None, metadata=PROGRESS)
    plan: Callable[[CalibratePlan], None] | None = field(
        default=None, metadata=about("Called with what it will take, before it starts.", command=False)
    )


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
    window_prefix: Sequence[SpecialToken] = ()
    unseen: tuple[str, ...] = ()
    resumed: int = 0

    def report(self) -> Report:
        """Return it as figures."""
        words = "{matrices} matrices over {tokens} tokens of {source}: {out}, {size}, {seconds} s"
        lines = [Line(words)]
        if self.window_prefix:
            lines.append(Line("each window begins with {prefix}"))
        if self.unseen:
            few = ", ".join(self.unseen[:_SHOWN]) + (", ..." if len(self.unseen) > _SHOWN else "")
            lines.append(
                Line(f"{len(self.unseen)} matrices saw no token, all errors of theirs will weigh alike: {few}")
            )
        prefix = Figure("prefix", prefix_text(self.window_prefix), data=False)
        return Report(figures=[*figures_of(self), prefix], lines=lines)
