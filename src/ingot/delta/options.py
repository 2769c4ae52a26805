"""The options of ``diff`` and ``patch``, from which the command line is built; imports must stay light."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any

from ingot.artifacts.destination import (
    ADDRESS,
    DIGEST,
    DROP,
    IO,
    LIMITS,
    MAX_DECOMPRESSED,
    MAX_RAM,
    OVERWRITE,
    PROGRESS,
    RESUME,
    THREADS,
    Digest,
    about_engine,
)
from ingot.core.options import OUT, OUTPUT, about, source
from ingot.stores.location import AnyPath

if TYPE_CHECKING:
    from collections.abc import Callable

    from ingot.core.runtime.progress import ProgressCallback
    from ingot.delta.strategy import RoundingEstimate, Storage
    from ingot.model.statistics import Statistics

    StateDict = Mapping[str, Any]


ENGINE = about_engine("the bytes are the same. --max-ram and --threads are each worker's then.")


@dataclass(frozen=True, slots=True)
class DiffOptions:
    """The options of ``diff``: inputs, output, and how differences are stored."""

    base: AnyPath | StateDict = field(metadata=source("The weights that the fine-tune started from: file or folder."))
    finetuned: AnyPath | StateDict = field(metadata=source("The fine-tune, in any container and layout."))
    out: AnyPath = field(
        metadata=about("The delta: a name ending in .zt, .wdelta or .safetensors.", *OUTPUT, aliases=OUT)
    )
    strategy: str | None = field(
        default=None,
        metadata=about(
            "How differences are stored: exact, or smaller and not exact (int8, int4, ..., auto). Default: exact; in "
            ".wdelta, which has no exact one, int4; in .safetensors sparse-patch."
        ),
    )
    _: KW_ONLY
    options: Mapping[str, Any] = field(
        default_factory=dict, metadata=about("Codec option for the strategy's matrices: NAME=VALUE.", "--option")
    )
    engine: str = field(default="local", metadata=ENGINE)
    address: str | None = field(default=None, metadata=ADDRESS)
    storages: Mapping[str, Storage] = field(
        default_factory=dict,
        metadata=about("Storage of single tensors by name, which overrides the strategy's.", command=False),
    )
    target_size: float | str | None = field(
        default=None,
        metadata=about(
            "For --strategy auto: the delta's size, such as 200MiB, or share of the fine-tune, such as 0.1."
        ),
    )
    drop: Sequence[str] = field(default=(), metadata=DROP)
    allow_larger: bool = field(
        default=False, metadata=about("Write a delta even if it is larger than the fine-tune itself.", panel=LIMITS)
    )
    max_error: float | None = field(
        default=None, metadata=about("For --strategy auto: largest error of a difference, as a share of its norm.")
    )
    calibration: AnyPath | Statistics | None = field(
        default=None,
        metadata=about(
            "Statistics of the fine-tune (or of the base) from `ingot calibrate`: strategies int1 to int4, "
            "low-rank and auto, in .zt, then minimize the error of each matrix's output."
        ),
    )
    max_ram: int | str | None = field(default=None, metadata=MAX_RAM)
    progress: ProgressCallback | None = field(default=None, metadata=PROGRESS)
    digest: Digest | None = field(default="crc32c", metadata=DIGEST)
    threads: int | None = field(default=None, metadata=THREADS)
    io: str = field(default="pread", metadata=IO)
    verify: bool = field(default=True, metadata=about("Check the sources' digests.", panel=LIMITS))
    max_decompressed: int | str | None = field(default=None, metadata=MAX_DECOMPRESSED)
    measure: bool = field(default=True, metadata=about("Measure the error of inexact differences.", panel=LIMITS))
    overwrite: bool = field(default=False, metadata=OVERWRITE)
    resume: bool = field(default=False, metadata=RESUME)
    plan: Callable[[RoundingEstimate], None] | None = field(
        default=None,
        metadata=about("Called with the estimated time of rounding by `calibration`, before it starts.", command=False),
    )


@dataclass(frozen=True, slots=True)
class PatchOptions:
    """The options of ``patch``: the base, the deltas, the output, and which identities are checked."""

    base: AnyPath = field(metadata=source("The weights that the first delta was made from: file or folder."))
    deltas: AnyPath | Sequence[AnyPath] = field(
        metadata=source("One delta, or several in the order in which they were made.")
    )
    out: AnyPath = field(
        metadata=about("File name with a format's suffix, or a folder (as the base's).", *OUTPUT, aliases=OUT)
    )
    _: KW_ONLY
    verify_base: bool = field(default=True, metadata=about("Check by hash that the base is the right one."))
    verify: bool | None = field(
        default=None,
        metadata=about(
            "Check the result against the identity that the last delta states; default: if it states one and the "
            "base is checked."
        ),
    )
    drop: Sequence[str] = field(default=(), metadata=DROP)
    dtype: Any = field(default=None, metadata=about("Element type of the result's floats; default: the fine-tune's."))
    format: str | None = field(
        default=None, metadata=about("Target format; default: by the suffix, or the base's.", "--format", "-f")
    )
    engine: str = field(default="local", metadata=ENGINE)
    address: str | None = field(default=None, metadata=ADDRESS)
    max_ram: int | str | None = field(default=None, metadata=MAX_RAM)
    progress: ProgressCallback | None = field(default=None, metadata=PROGRESS)
    digest: Digest | None = field(default="crc32c", metadata=DIGEST)
    threads: int | None = field(default=None, metadata=THREADS)
    io: str = field(default="pread", metadata=IO)
    overwrite: bool = field(default=False, metadata=OVERWRITE)
    resume: bool = field(default=False, metadata=RESUME)
    max_decompressed: int | str | None = field(default=None, metadata=MAX_DECOMPRESSED)
    check_digests: bool = field(
        default=True, metadata=about("Check the digests of base and deltas while reading.", command=False)
    )
