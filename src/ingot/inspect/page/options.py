"""The options of ``report``. The command line is made from them: import nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING

from ingot.artifacts.destination import MAX_DECOMPRESSED, OVERWRITE, PROGRESS
from ingot.core.options import about
from ingot.stores.location import AnyPath

if TYPE_CHECKING:
    from ingot.core.runtime.progress import ProgressCallback


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """A page: of what, beside what."""

    a: AnyPath = field(metadata=about("Checkpoint; with B the reference.", argument=True, metavar="A"))
    b: AnyPath | None = field(
        default=None,
        metadata=about("What was made of it: a conversion, or a fine-tune.", argument=True, metavar="B"),
    )
    _: KW_ONLY
    out: AnyPath | None = field(default=None, metadata=about("The page to write: NAME.html.", "--out", "-o"))
    evaluations: Sequence[AnyPath] = field(
        default=(), metadata=about("What `ingot eval --json` printed; any number.", "--eval", metavar="FILE")
    )
    conversion: AnyPath | None = field(
        default=None,
        metadata=about("What `ingot convert --json` printed: what was moved, repacked, encoded.", metavar="FILE"),
    )
    chip: str | None = field(
        default=None,
        metadata=about("Chips whose Neural Engine runs it, such as m1,m4: what each takes as it is.", metavar="CHIPS"),
    )
    histograms: int = field(
        default=24, metadata=about("Tensors whose values are drawn, of samples.", metavar="N", minimum=0)
    )
    overwrite: bool = field(default=False, metadata=OVERWRITE)
    max_decompressed: int | str | None = field(default=None, metadata=MAX_DECOMPRESSED)
    progress: ProgressCallback | None = field(default=None, metadata=PROGRESS)
