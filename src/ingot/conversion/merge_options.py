"""The options of ``ingot.merge``. The command line imports this module for its help texts, so it imports little."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any

from ingot.artifacts.destination import (
    CPU,
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
)
from ingot.core.options import OUT, OUTPUT, about
from ingot.stores.location import AnyPath

if TYPE_CHECKING:
    from ingot.core.runtime.progress import ProgressCallback
    from ingot.model.statistics import Statistics
    from ingot.recipes.recipe import Recipe

_TARGET = "The target"
_MODELS = "Merging models"


@dataclass(frozen=True, slots=True)
class MergeOptions:
    """The options of ``ingot.merge`` and of ``ingot merge``."""

    base: AnyPath = field(metadata=about("The base: a file or folder in any format, or org/name.", argument=True))
    operands: AnyPath | Sequence[Any] = field(
        metadata=about(
            "Adapters, or models with --method; each with a weight after a colon if it is not 1.",
            argument=True,
            metavar="OPERAND",
        )
    )
    out: AnyPath = field(metadata=about("File (its suffix is the format) or folder.", *OUTPUT, aliases=OUT))
    _: KW_ONLY
    method: str | None = field(
        default=None,
        metadata=about(
            "Merge models: linear, slerp, task-arithmetic, ties, dare-linear (or dare), dare-ties.",
            metavar="METHOD",
            panel=_MODELS,
        ),
    )
    density: float | None = field(
        default=None,
        metadata=about("Share of the differences that TIES and DARE keep, 0 to 1; default 1.", panel=_MODELS),
    )
    scale: float | None = field(
        default=None,
        metadata=about("Factor of the merged difference (lambda of the papers); default 1.", panel=_MODELS),
    )
    seed: int | None = field(
        default=None, metadata=about("Random seed of DARE; default 0.", metavar="N", panel=_MODELS)
    )
    weights: AnyPath | None = field(
        default=None,
        metadata=about("TOML file of weights and densities by layer, role or name.", metavar="FILE", panel=_MODELS),
    )
    runtime: str | None = field(
        default=None, metadata=about("Choose the container for a program, such as vllm.", "--for", metavar="RUNTIME")
    )
    type: str | None = field(
        default=None, metadata=about("Type of the result as llama.cpp names it, such as Q4_K_M.", "--type")
    )
    recipe: AnyPath | Recipe | None = field(
        default=None, metadata=about("Preset (see `ingot recipes`) or TOML file; default: as the base is stored.")
    )
    format: str | None = field(
        default=None, metadata=about("Format; default: by suffix, the base's for folders.", "--format", "-f")
    )
    max_ram: int | str | None = field(default=None, metadata=MAX_RAM)
    resume: bool = field(default=False, metadata=RESUME)
    overwrite: bool = field(default=False, metadata=OVERWRITE)
    progress: ProgressCallback | None = field(default=None, metadata=PROGRESS)
    calibration: AnyPath | Statistics | None = field(
        default=None,
        metadata=about("Statistics from `ingot calibrate`, or an importance matrix, for recipes with a quantizer."),
    )
    device: Any = field(
        default=CPU,
        metadata=about(
            "Calibrate and round on this device of torch: cpu, cuda, cuda:N, mps or xpu; for recipes with a quantizer.",
            metavar="DEVICE",
            panel=LIMITS,
        ),
    )
    allow_requantize: bool = field(
        default=False, metadata=about("With --recipe or --type: quantize tensors that are quantized already.")
    )
    threads: int | None = field(default=None, metadata=THREADS)
    digest: Digest | None = field(default="crc32c", metadata=DIGEST)
    max_shard: int | str | None = field(
        default=None, metadata=about("Largest shard, such as 2GB.", "--max-shard-size", panel=_TARGET)
    )
    no_tokenizer: bool = field(
        default=False, metadata=about("Into GGUF or out of it, accept a result without a tokenizer.", panel=_TARGET)
    )
    keep_names: bool = field(
        default=False, metadata=about("Into GGUF, MLX or out of GGUF, do not change names.", panel=_TARGET)
    )
    drop: Sequence[str] = field(default=(), metadata=DROP)
    metadata: Mapping[str, Any] = field(
        default_factory=dict, metadata=about("Entry of the result's metadata: NAME=VALUE.", panel=_TARGET)
    )
    verify: bool = field(default=True, metadata=about("Check the base's digests.", panel=LIMITS))
    max_decompressed: int | str | None = field(default=None, metadata=MAX_DECOMPRESSED)
    io: str = field(default="pread", metadata=IO)
