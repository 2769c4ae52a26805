"""The options of ``report``. The command line imports this module for its help, so it imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING

from ingot.artifacts.destination import MAX_DECOMPRESSED, OVERWRITE, PROGRESS
from ingot.core.options import OUT, OUTPUT, about, source
from ingot.stores.location import AnyPath

if TYPE_CHECKING:
    from ingot.core.runtime.progress import ProgressCallback


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """The options of ``ingot.report`` and ``ingot report``."""

    a: AnyPath = field(metadata=source("Checkpoint; with B the reference.", metavar="A"))
    b: AnyPath | None = field(
        default=None,
        metadata=source("Checkpoint made from A: a conversion, or a fine-tune.", metavar="B"),
    )
    _: KW_ONLY
    out: AnyPath | None = field(default=None, metadata=about("The page to write: NAME.html.", *OUTPUT, aliases=OUT))
    evaluations: Sequence[AnyPath] = field(
        default=(), metadata=about("Output of `ingot eval --json`; can be repeated.", "--eval", metavar="FILE")
    )
    conversion: AnyPath | None = field(
        default=None,
        metadata=about("Output of `ingot convert --json`, for the action of each tensor.", metavar="FILE"),
    )
    chip: str | None = field(
        default=None,
        metadata=about("Chips, such as m1,m4: shows which tensors their Neural Engines support.", metavar="CHIPS"),
    )
    histograms: int = field(
        default=24, metadata=about("Number of tensors with a histogram of sampled values.", metavar="N", minimum=0)
    )
    overwrite: bool = field(default=False, metadata=OVERWRITE)
    max_decompressed: int | str | None = field(default=None, metadata=MAX_DECOMPRESSED)
    progress: ProgressCallback | None = field(default=None, metadata=PROGRESS)
