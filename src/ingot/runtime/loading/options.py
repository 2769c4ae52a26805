"""Options of ``eval`` and ``generate``. The command line derives from this module, so it imports nothing heavy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from math import isfinite
from typing import TYPE_CHECKING, Any, Final, Literal

from ingot.artifacts.destination import CPU, DEVICE
from ingot.core.options import about, source
from ingot.errors import UsageError
from ingot.runtime.loading.kv_options import kv_cache
from ingot.stores.location import AnyPath

if TYPE_CHECKING:
    from ingot.core.runtime.progress import ProgressCallback
    from ingot.runtime.loading.load_report import LoadReport

EXACT: Final = "exact"
INT8: Final = "int8"
COMPUTES = (EXACT, INT8)
"""How packed linear layers multiply: by inputs in full precision, or rounded to 8 bits (``spec/affine.md``)."""
ARITHMETICS = ("llama.cpp", "mlx")
"""Programs whose rounding of inputs and results a decoded model can have (``spec/loading.md``)."""
MAX_DRAFTED = 7
"""Maximum number of tokens per proposal: kernels of packed weights compute eight rows in 16 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """Options of loading a model that do not depend on the path: cache, memory limit, streaming, checks."""

    cache: bool = field(default=True, metadata=about("Use and create faster stored variants.", "--cache/--no-cache"))
    max_ram: int | str | None = field(
        default=None, metadata=about("Memory limit for decoded weights, such as 2GiB; by default the free memory.")
    )
    stream: bool = field(
        default=False,
        metadata=about("Decode weights layer by layer during each pass, within the memory of two layers.", "--stream"),
    )
    verify: bool = field(
        default=True,
        metadata=about(
            "Check the digests of the parts that are used, which reads each part once.",
            command=False,
        ),
    )
    strict: bool = field(
        default=True,
        metadata=about("Refuse tensors for which the architecture has no parameter.", command=False),
    )
    coreml: bool = field(
        default=True,
        metadata=about(
            "Whether a Core ML package in the file may be loaded instead of the weights, if the machine can run it.",
            command=False,
        ),
    )
    compute: Literal["exact", "int8"] = field(
        default="exact",
        metadata=about(
            "How packed linear layers multiply: exact, or int8, which rounds inputs to 8 bits and keeps weights packed."
        ),
    )
    arithmetic: Literal["llama.cpp", "mlx"] | None = field(
        default=None,
        metadata=about(
            "Compute as this program does on a CPU, from decoded weights: llama.cpp (inputs in 8 bits) or mlx (in the "
            "type of the scales).",
            metavar="PROGRAM",
        ),
    )
    kv_cache: Any = field(
        default=None,
        metadata=about(
            "How keys and values are cached: int8, int4 or kivi2, with options as in int4,window=128,evict=1024; by "
            "default unpacked.",
            metavar="KIND",
        ),
    )
    model_dir: AnyPath | None = field(
        default=None,
        metadata=about("The folder of config.json and the tokenizer, if not the folder of the weights.", command=False),
    )
    report: Callable[[LoadReport], object] | None = field(
        default=None, metadata=about("Called once with a LoadReport.", command=False)
    )

    def __post_init__(self) -> None:
        if self.compute not in COMPUTES:
            raise UsageError(
                f"expected compute {' or '.join(COMPUTES)}, found {self.compute!r:.80}", rule="model.compute"
            )
        if self.arithmetic not in (None, *ARITHMETICS):
            raise UsageError(
                f"expected arithmetic {' or '.join(ARITHMETICS)}, found {self.arithmetic!r:.80}",
                rule="model.arithmetic",
            )
        if self.arithmetic is not None and (self.stream or self.compute != EXACT):
            raise UsageError(
                "expected arithmetic without stream and with compute exact, because it rounds inputs of decoded layers",
                rule="model.arithmetic",
            )
        object.__setattr__(self, "kv_cache", kv_cache(self.kv_cache))

    def load_options(self, path: AnyPath, **fields_of_path: Any) -> LoadOptions:
        """Return the options for loading ``path``; ``fields_of_path`` add fields or replace the present values."""
        return LoadOptions(path, **{item.name: getattr(self, item.name) for item in fields(Loading)} | fields_of_path)


@dataclass(frozen=True, slots=True)
class LoadOptions(Loading):
    """Options of loading a model from a path: device, dtype and packing."""

    path: AnyPath = field(
        metadata=source("Folder or file, with config.json and tokenizer in its folder.", metavar="MODEL")
    )
    device: Any = field(default=CPU, metadata=DEVICE)
    dtype: Any = field(
        default=None,
        metadata=about(
            "Element type of the weights; by default, and with auto, the type in config.json, else that of the first "
            "floating-point tensor."
        ),
    )
    keep_packed: bool | None = field(
        default=None,
        metadata=about(
            "Compute from the packed weights, or decode them; by default a .squizd follows its stack, others decode.",
            "--keep-packed/--decode",
        ),
    )
    adapters: Sequence[Any] = field(
        default=(),
        metadata=about(
            "Adapters that run beside the layers: paths, pairs of path and weight, or PATH:WEIGHT.", command=False
        ),
    )


@dataclass(frozen=True, slots=True)
class Protocol:
    """The part of a text that ``eval`` reads: the first ``sequences`` windows of ``window`` tokens, without earlier
    context.

    Each window begins with the tokens that the tokenizer puts before a text (BOS), which replace its first tokens.
    """

    window: int = field(
        default=256,
        metadata=about(
            "Tokens of a window, including tokens that the tokenizer adds (BOS); windows are read without context.",
            metavar="N",
            minimum=2,
        ),
    )
    sequences: int = field(
        default=96, metadata=about("Number of windows, from the beginning of the text.", metavar="N", minimum=1)
    )
    dtype: Any = field(default="f32", metadata=about("Element type to compute in."))
    keep_packed: bool = field(default=False, metadata=about("Compute from the packed weights."))
    device: Any = field(default=CPU, metadata=DEVICE)

    def __post_init__(self) -> None:
        if self.window < 2 or self.sequences < 1:
            raise UsageError(
                f"expected a window of at least 2 tokens and 1 sequence, found {self.window} and {self.sequences}",
                rule="eval.window",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """Options of ``eval``: measurements in addition to perplexity, and limits that the figures must meet."""

    kl: bool = field(
        default=False,
        metadata=about("Distribution of KL(reference || model) over tokens: median, 99 %, maximum; with --reference."),
    )
    top_k: int | None = field(
        default=None,
        metadata=about(
            "Share of the reference's N likeliest tokens that are among the model's N likeliest.",
            metavar="N",
            minimum=1,
        ),
    )
    per_layer: bool = field(
        default=False,
        metadata=about(
            "Cosine and relative error of every layer's output against the reference; names the first that departs."
        ),
    )
    departs: float = field(
        default=0.1,
        metadata=about("Relative error above which a layer's output departs from the reference's.", metavar="SHARE"),
    )
    resamples: int = field(
        default=1000,
        metadata=about("Resamples of the windows for the 95 % intervals; 0: no intervals.", minimum=0, metavar="N"),
    )
    seed: int = field(default=0, metadata=about("Seed of the resamples.", minimum=0, metavar="N"))
    gate: str | None = field(
        default=None,
        metadata=about(
            "Limits for the model, such as kl<0.02,ppl<1.01x (x: times the reference's); exit code 1 if exceeded.",
            metavar="TERMS",
        ),
    )
    receipt: bool = field(
        default=False, metadata=about("Write the measurements into or next to the model's file; inspect shows them.")
    )
    progress: ProgressCallback | None = field(
        default=None, metadata=about("Called with a ProgressEvent that counts tokens instead of bytes.", command=False)
    )

    def __post_init__(self) -> None:
        if not (isfinite(self.departs) and self.departs > 0):
            raise UsageError(f"expected a relative error above 0, found {self.departs!r}", rule="eval.departs")
        if self.resamples < 0 or not 0 <= self.seed < 1 << 32 or (self.top_k is not None and self.top_k < 1):
            raise UsageError(
                f"expected resamples of at least 0, a seed from 0 to {(1 << 32) - 1} and a top-k of at least 1, found "
                f"{self.resamples}, {self.seed} and {self.top_k}",
                rule="eval.option",
            )

    @property
    def compares(self) -> bool:
        """Whether a measurement needs a reference."""
        return self.kl or self.per_layer or self.top_k is not None


@dataclass(frozen=True, slots=True)
class Draft:
    """Options of a draft head: its location, by default in the artifact, and the number of tokens per proposal, 1
    to 7.
    """

    head: AnyPath | None = field(
        default=None, metadata=about("Draft with the head in this file or folder.", "--draft-head")
    )
    tokens: int = field(
        default=4, metadata=about("Tokens that a head proposes per step, 1 to 7.", "--draft-tokens", metavar="N")
    )

    def __post_init__(self) -> None:
        if not 1 <= self.tokens <= MAX_DRAFTED:
            raise UsageError(
                f"expected 1 to {MAX_DRAFTED} tokens to draft at a time, found {self.tokens}", rule="draft.tokens"
            )
