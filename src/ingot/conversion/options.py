"""The options of a conversion. The command line imports this module for its help texts, so it imports little."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from ingot.artifacts.destination import (
    ADDRESS,
    CPU,
    DIGEST,
    DROP,
    IO,
    LIMITS,
    MAX_DECOMPRESSED,
    MAX_RAM,
    OVERWRITE,
    PART,
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

    from ingot.conversion.estimate import Estimate
    from ingot.conversion.merging.view import ModelMerge
    from ingot.core.runtime.progress import ProgressCallback
    from ingot.model.calibration import Calibration
    from ingot.model.statistics import Statistics
    from ingot.recipes.recipe import Recipe

_ROUNDING = "Rounding"
_TARGET = "The target"
_PRUNING = "Pruning"
_ATTACHMENTS = "Beside the weights"
_BUDGET = "Budget"


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """The options of ``ingot.convert`` and of ``ingot convert``."""

    src: AnyPath = field(metadata=source("A file or folder in any format, or org/name.", metavar="SRC"))
    dst: AnyPath = field(
        metadata=about(
            "File (its suffix is the format) or folder.",
            *OUTPUT,
            aliases=OUT,
            argument=True,
            metavar="DST",
        )
    )
    recipe: AnyPath | Recipe | None = field(
        default=None, metadata=about("Preset (see `ingot recipes`) or TOML file; default: keep as stored.")
    )
    format: str | None = field(
        default=None, metadata=about("Format; default: by suffix, zt for folders.", "--format", "-f")
    )
    max_ram: int | str | None = field(default=None, metadata=MAX_RAM)
    resume: bool = field(default=False, metadata=RESUME)
    progress: ProgressCallback | None = field(default=None, metadata=PROGRESS)
    _: KW_ONLY
    runtime: str | None = field(
        default=None,
        metadata=about(
            "Choose the container for a program, such as vllm.",
            "--for",
            metavar="RUNTIME",
        ),
    )
    allow_requantize: bool = field(
        default=False, metadata=about("Quantize tensors that are quantized already.", panel=_ROUNDING)
    )
    strict_recipe: bool = field(
        default=False, metadata=about("Fail if a rule of the recipe, or --importance, has no effect.", panel=_ROUNDING)
    )
    overwrite: bool = field(default=False, metadata=OVERWRITE)
    threads: int | None = field(default=None, metadata=THREADS)
    digest: Digest | None = field(default="crc32c", metadata=DIGEST)
    container: int | str | None = field(
        default=None,
        metadata=about(
            "Version of the target: 1 or 2 of .zt, gemm or gemv of AWQ, stream or planes of GPTQ; default the first.",
            panel=_TARGET,
        ),
    )
    max_shard: int | str | None = field(
        default=None,
        metadata=about(
            "Largest shard, such as 2GB; default in folders 5GB of safetensors, one file of GGUF.",
            "--max-shard-size",
            size=True,
            panel=_TARGET,
        ),
    )
    overlay: AnyPath | None = field(
        default=None,
        metadata=about(
            "Refer to tensors that this file, in the folder of DST, contains already instead of storing them again. "
            "For .zt of container 2.",
            panel=_TARGET,
        ),
    )
    tp: int | None = field(
        default=None,
        metadata=about(
            "Shard for tensor parallelism into this number of folders, DST/rank0, DST/rank1, ..., with the slices of "
            "vLLM and Megatron.",
            panel=_TARGET,
        ),
    )
    verify: bool = field(default=True, metadata=about("Check the source's digests.", panel=LIMITS))
    max_decompressed: int | str | None = field(default=None, metadata=MAX_DECOMPRESSED)
    measure: bool = field(default=True, metadata=about("Measure the error of lossy tensors.", panel=_ROUNDING))
    prune: float | None = field(
        default=None,
        metadata=about("Leave out this share (0 to 1) of each feed-forward network's channels.", panel=_PRUNING),
    )
    prune_block: int | None = field(
        default=None, metadata=about("Channels pruned or kept together; default 64.", panel=_PRUNING)
    )
    prune_compact: bool = field(
        default=False,
        metadata=about(
            "In .squizd, store only the remaining channels of pruned matrices: smaller, but readers of the format's "
            "specification cannot recover the shapes. Other formats always do.",
            panel=_PRUNING,
        ),
    )
    activations: AnyPath | None = field(
        default=None,
        metadata=about(
            "Checkpoint of activation norms, a vector per down projection, to choose channels by; without it the "
            "weights alone decide, which is less accurate.",
            panel=_PRUNING,
        ),
    )
    importance: AnyPath | None = field(
        default=None,
        metadata=about(
            "Checkpoint of activation norms, a vector per matrix, that weight the errors of its columns; for recipes "
            "with palettes or with a search of ggml's blocks.",
            panel=_ROUNDING,
        ),
    )
    announce: Callable[[Estimate], None] | None = field(
        default=None, metadata=about("Called with the estimate before a calibration begins.", command=False)
    )
    calibration: AnyPath | Statistics | Calibration | None = field(
        default=None,
        metadata=about(
            "Statistics of this model from `ingot calibrate`, or an importance matrix of llama.cpp, for recipes with a "
            "quantizer and for budgets; without it such recipes calibrate the model on text that it generates.",
            panel=_ROUNDING,
        ),
    )
    device: Any = field(
        default=CPU,
        metadata=about(
            "Calibrate and round on this device of torch: cpu, cuda, cuda:N, mps or xpu; for recipes with a quantizer "
            "and for budgets.",
            metavar="DEVICE",
            panel=_ROUNDING,
        ),
    )
    rotate: str | None = field(
        default=None,
        metadata=about(
            "Rotate the residual stream (r1), the value heads (r2) or both (r1,r2) before quantizing; short for a "
            "recipe's table [rotate].",
            metavar="STREAMS",
            panel=_ROUNDING,
        ),
    )
    target_size: int | str | None = field(
        default=None,
        metadata=about(
            "Instead of a recipe: search the recipe with the least estimated loss whose weight files have at most this "
            "size, such as 4.1GiB.",
            metavar="SIZE",
            panel=_BUDGET,
        ),
    )
    target_bpw: float | None = field(
        default=None,
        metadata=about("Like --target-size, but in bits per weight, such as 3.5.", metavar="BITS", panel=_BUDGET),
    )
    max_kl: float | None = field(
        default=None,
        metadata=about(
            "Instead of a recipe: search the smallest result whose measured KL(source || result) is at most this, such "
            "as 0.02 nats a token. Language models only.",
            "--max-kl",
            metavar="NATS",
            panel=_BUDGET,
        ),
    )
    check_kl: bool = field(
        default=False,
        metadata=about("With --target-size or --target-bpw: measure the result's KL.", panel=_BUDGET),
    )
    text: AnyPath | None = field(
        default=None,
        metadata=about(
            "Text in UTF-8 that the KL is measured on; default: text that the model generates, not the calibration's.",
            metavar="FILE",
            panel=_BUDGET,
        ),
    )
    sequences: int | None = field(
        default=None,
        metadata=about(
            "Windows, of 256 tokens, that the KL is measured on; default 96.", metavar="N", minimum=1, panel=_BUDGET
        ),
    )
    types: str | Sequence[str] = field(
        default=(),
        metadata=about(
            "Types that a budget chooses among, such as int3,int4,q6_k: int2 to int8, ggml's types, both also with "
            "-calibrated, presets, TOML files; default: those that the format carries.",
            "--types",
            metavar="NAMES",
            panel=_BUDGET,
        ),
    )
    recipe_out: AnyPath | None = field(
        default=None,
        metadata=about(
            "File for the budget's recipe as TOML; default: beside DST, none in a dry run.",
            metavar="FILE",
            panel=_BUDGET,
        ),
    )
    draft: AnyPath | None = field(
        default=None,
        metadata=about(
            "EAGLE-3 draft head to attach: a file or folder in any format. For formats that carry one: squizd.",
            panel=_ATTACHMENTS,
        ),
    )
    coreml: AnyPath | None = field(
        default=None,
        metadata=about(
            "Core ML package (folder X.mlpackage) to attach. For formats that carry one: squizd.", panel=_ATTACHMENTS
        ),
    )
    program: AnyPath | None = field(
        default=None,
        metadata=about(
            "Core ML package whose program takes the tensors; default: the source's own. For .mlpackage.",
            panel=_ATTACHMENTS,
        ),
    )
    graph: AnyPath | None = field(
        default=None,
        metadata=about(
            "ONNX model whose graph takes the tensors, each in place of its constant of that name; default: the "
            "source's own. For .onnx.",
            panel=_ATTACHMENTS,
        ),
    )
    keep_names: bool = field(
        default=False,
        metadata=about(
            "Into GGUF, MLX or out of GGUF, do not change names, order of rows and files: for model families that "
            "Ingot does not translate, and for tensors that are no model. llama.cpp does not open such a file.",
            panel=_TARGET,
        ),
    )
    no_tokenizer: bool = field(
        default=False,
        metadata=about(
            "Into GGUF or out of it, accept a result without a tokenizer if the source has none that fits; programs "
            "then need token ids as input.",
            panel=_TARGET,
        ),
    )
    part: Literal["text", "mmproj"] | None = field(default=None, metadata=PART)
    drop: Sequence[str] = field(default=(), metadata=DROP)
    rename: Sequence[str] = field(
        default=(),
        metadata=about(
            "Give tensors other names before anything else: 'OLD=NEW', where '*' repeats, as in "
            "'net.*.weight=model.*.weight'. Can be repeated.",
            "--rename",
            metavar="OLD=NEW",
            panel=_TARGET,
        ),
    )
    adapters: Sequence[Any] = field(
        default=(),
        metadata=about(
            "Adapters whose changes are added to the source: paths, pairs of path and weight, or PATH:WEIGHT.",
            command=False,
        ),
    )
    models: ModelMerge | None = field(
        default=None, metadata=about("Models that are merged with the source.", command=False)
    )
    trust_index: bool = field(
        default=False,
        metadata=about("Ignore weight files of the source's folder that its index does not list.", panel=LIMITS),
    )
    metadata: Mapping[str, Any] = field(
        default_factory=dict,
        metadata=about("Entry of the result's metadata: NAME=VALUE; can be repeated.", panel=_ATTACHMENTS),
    )
    engine: str = field(
        default="local",
        metadata=about_engine("the bytes are the same. --max-ram and --threads then apply to each worker."),
    )
    address: str | None = field(default=None, metadata=ADDRESS)
    io: str = field(default="pread", metadata=IO)


@dataclass(frozen=True, slots=True)
class ExecuteOptions:
    """The options of ``ingot.execute`` and of ``ingot run-plan``."""

    plan: AnyPath = field(metadata=source("Plan of `ingot convert --plan-out`."))
    out: AnyPath | None = field(
        default=None, metadata=about("Destination instead of the plan's, of the same format.", *OUTPUT, aliases=OUT)
    )
    _: KW_ONLY
    max_ram: int | str | None = field(default=None, metadata=MAX_RAM)
    threads: int | None = field(default=None, metadata=THREADS)
    overwrite: bool = field(default=False, metadata=OVERWRITE)
    resume: bool = field(default=False, metadata=RESUME)
    progress: ProgressCallback | None = field(default=None, metadata=PROGRESS)


@dataclass(frozen=True, slots=True)
class MatrixOptions:
    """The options of ``ingot matrix``: the source, the formats, and options of a conversion that affect the outcome."""

    src: AnyPath = field(metadata=source("Checkpoint: a file or folder in any format that Ingot reads."))
    to: Sequence[str] = field(
        default=(), metadata=about("A format to check; default: all. Can be repeated.", "--to", metavar="FORMAT")
    )
    _: KW_ONLY
    runtime: str | None = field(
        default=None,
        metadata=about("Check only the formats that this program reads.", "--for", metavar="RUNTIME"),
    )
    keep_names: bool = field(
        default=False, metadata=about("Into GGUF, MLX or out of GGUF, do not change names and order of rows.")
    )
    no_tokenizer: bool = field(
        default=False, metadata=about("Into GGUF or out of it, accept a result without a tokenizer.")
    )
    drop: Sequence[str] = field(default=(), metadata=DROP)
    verify: bool = field(default=True, metadata=about("Check the source's digests."))
    io: str = field(default="pread", metadata=IO)
