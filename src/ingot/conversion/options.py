"""The options of a conversion. The command line is made from them, so that nothing heavy may be imported here."""

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
from ingot.core.options import about
from ingot.stores.location import AnyPath

if TYPE_CHECKING:
    from ingot.core.runtime.progress import ProgressCallback
    from ingot.model.statistics import Statistics
    from ingot.recipes.recipe import Recipe

_ROUNDING = "Rounding"
_TARGET = "The target"
_PRUNING = "Pruning"
_ATTACHMENTS = "Beside the weights"
_BUDGET = "Budget"


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """A conversion: what, where to, and how."""

    src: AnyPath = field(metadata=about("A file or folder in any format, or org/name.", argument=True, metavar="SRC"))
    dst: AnyPath = field(
        metadata=about(
            "File (its suffix is the format) or folder.",
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
            panel=_TARGET,
        ),
    )
    overlay: AnyPath | None = field(
        default=None,
        metadata=about(
            "Name what this file, in the folder of DST, has already instead of storing it again. For .zt of container "
            "2.",
            panel=_TARGET,
        ),
    )
    tp: int | None = field(
        default=None,
        metadata=about(
            "Write so many folders, DST/rank0 and on, each with a rank's slices for tensor parallelism, as vLLM and "
            "Megatron cut.",
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
        default=None, metadata=about("Channels that stay or go together; default 64.", panel=_PRUNING)
    )
    prune_compact: bool = field(
        default=False,
        metadata=about(
            "In .squizd, store of pruned matrices only what is left: smaller, but a reader of the format's document "
            "cannot recover their shapes. Other formats always do.",
            panel=_PRUNING,
        ),
    )
    activations: AnyPath | None = field(
        default=None,
        metadata=about(
            "Checkpoint of activation norms, a vector per down projection, to choose channels by; without it they "
            "are chosen by weights alone, which says little.",
            panel=_PRUNING,
        ),
    )
    importance: AnyPath | None = field(
        default=None,
        metadata=about(
            "Checkpoint of activation norms, a vector per matrix, that say what errors of its columns weigh; for "
            "recipes that make palettes or search ggml's blocks.",
            panel=_ROUNDING,
        ),
    )
    calibration: AnyPath | Statistics | None = field(
        default=None,
        metadata=about(
            "Statistics that `ingot calibrate` took of this model, or an importance matrix of llama.cpp, for recipes "
            "with a quantizer and for budgets; without it such recipes calibrate the model on samples of its own.",
            panel=_ROUNDING,
        ),
    )
    rotate: str | None = field(
        default=None,
        metadata=about(
            "Turn the model within itself first, r1, r2 or r1,r2: short for a recipe's table [rotate].",
            metavar="STREAMS",
            panel=_ROUNDING,
        ),
    )
    target_size: int | str | None = field(
        default=None,
        metadata=about(
            "Instead of a recipe: make the one of least estimated loss whose weight files take at most this, such as "
            "4.1GiB.",
            metavar="SIZE",
            panel=_BUDGET,
        ),
    )
    target_bpw: float | None = field(
        default=None,
        metadata=about("The same in bits per weight of all files, such as 3.5.", metavar="BITS", panel=_BUDGET),
    )
    max_kl: float | None = field(
        default=None,
        metadata=about(
            "Instead of a recipe: make the smallest whose KL(source || result) is at most this, such as 0.02 nats a "
            "token. Measured, of a few recipes; language models only.",
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
            "Text in UTF-8 that the KL is measured on; default: samples of the model, others than for calibration.",
            metavar="FILE",
            panel=_BUDGET,
        ),
    )
    sequences: int | None = field(
        default=None,
        metadata=about(
            "Windows, of 256 tokens, that the KL is measured on; default 96.", metavar="N", least=1, panel=_BUDGET
        ),
    )
    types: str | Sequence[str] = field(
        default=(),
        metadata=about(
            "What a budget chooses among: int2 to int8, ggml's types, such with -calibrated, presets, TOML files: "
            "int3,int4,q6_k; default: what the format carries.",
            "--types",
            metavar="NAMES",
            panel=_BUDGET,
        ),
    )
    recipe_out: AnyPath | None = field(
        default=None,
        metadata=about(
            "Where the budget's recipe is written as TOML; default: beside DST, in a dry run nowhere.",
            metavar="FILE",
            panel=_BUDGET,
        ),
    )
    draft: AnyPath | None = field(
        default=None,
        metadata=about(
            "EAGLE-3 draft head to put in: a file or folder in any format. For formats that carry one: squizd.",
            panel=_ATTACHMENTS,
        ),
    )
    coreml: AnyPath | None = field(
        default=None,
        metadata=about(
            "Core ML package (folder X.mlpackage) to put in. For formats that carry one: squizd.", panel=_ATTACHMENTS
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
            "Into GGUF, MLX or out of GGUF, leave names, order of rows and files as they are, for a family of models "
            "that is not translated or for tensors that are no model. llama.cpp does not open such a file.",
            panel=_TARGET,
        ),
    )
    no_tokenizer: bool = field(
        default=False,
        metadata=about(
            "Into GGUF or out of it, accept a result without a tokenizer if there is none that it can hold; programs "
            "then take ids of tokens.",
            panel=_TARGET,
        ),
    )
    drop: Sequence[str] = field(default=(), metadata=DROP)
    trust_index: bool = field(
        default=False,
        metadata=about("Ignore weight files of the source's folder that its index does not list.", panel=LIMITS),
    )
    metadata: Mapping[str, Any] = field(
        default_factory=dict,
        metadata=about("Entry of the result's metadata: NAME=VALUE; any number.", panel=_ATTACHMENTS),
    )
    engine: str = field(
        default="local",
        metadata=about_engine("the bytes are the same. --max-ram and --threads are each worker's then."),
    )
    address: str | None = field(default=None, metadata=ADDRESS)
    io: str = field(default="pread", metadata=IO)


@dataclass(frozen=True, slots=True)
class ExecuteOptions:
    """The execution of a plan: which, where to, and what it may take."""

    plan: AnyPath = field(metadata=about("What `ingot convert --plan-out` wrote.", argument=True))
    out: AnyPath | None = field(
        default=None, metadata=about("Another destination than the plan's, of the same format.", "--out", "-o")
    )
    _: KW_ONLY
    max_ram: int | str | None = field(default=None, metadata=MAX_RAM)
    threads: int | None = field(default=None, metadata=THREADS)
    overwrite: bool = field(default=False, metadata=OVERWRITE)
    resume: bool = field(default=False, metadata=RESUME)
    progress: ProgressCallback | None = field(default=None, metadata=PROGRESS)


@dataclass(frozen=True, slots=True)
class MatrixOptions:
    """A look at what conversions would keep: of what, into which formats."""

    src: AnyPath = field(metadata=about("Checkpoint: a file or folder in any format that Ingot reads.", argument=True))
    to: Sequence[str] = field(
        default=(), metadata=about("A format to look at; default: all. Any number.", "--to", metavar="FORMAT")
    )
    _: KW_ONLY
    runtime: str | None = field(
        default=None,
        metadata=about("Look at the formats that this program reads.", "--for", metavar="RUNTIME"),
    )
    keep_names: bool = field(
        default=False, metadata=about("Into GGUF, MLX or out of GGUF, names and order of rows stay as they are.")
    )
    no_tokenizer: bool = field(
        default=False, metadata=about("Into GGUF or out of it, accept a result without a tokenizer.")
    )
    drop: Sequence[str] = field(default=(), metadata=DROP)
    verify: bool = field(default=True, metadata=about("Check the source's digests."))
    io: str = field(default="pread", metadata=IO)
