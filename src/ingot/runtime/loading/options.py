"""The options of ``eval`` and ``generate``. The command line is made from them: nothing heavy may be imported here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from math import isfinite
from typing import TYPE_CHECKING, Any, Final, Literal

from ingot.core.options import about
from ingot.errors import UsageError
from ingot.runtime.loading.kv_options import kv_cache
from ingot.stores.location import AnyPath

if TYPE_CHECKING:
    from ingot.core.runtime.progress import ProgressCallback
    from ingot.runtime.loading.load_report import LoadReport

EXACT: Final = "exact"
INT8: Final = "int8"
COMPUTES = (EXACT, INT8)
"""How packed linear layers multiply: with x as it is, or rounded to 8 bits (``spec/affine.md``)."""
MOST_DRAFTED = 7
"""The most tokens that are proposed at a time: kernels of packed weights take eight rows in 16 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """What loading a model is told whatever the model is wanted for."""

    cache: bool = field(default=True, metadata=about("Use and make faster stored forms.", "--cache/--no-cache"))
    max_ram: int | str | None = field(
        default=None, metadata=about("Memory that weights may be decoded into, such as 2GiB; by default what is free.")
    )
    stream: bool = field(
        default=False,
        metadata=about("Decode weights layer by layer as they are needed, in the memory of two.", "--stream"),
    )
    verify: bool = field(
        default=True,
        metadata=about(
            "Check the digests of the parts that are used, which reads all of them once, at the speed of memory.",
            command=False,
        ),
    )
    strict: bool = field(
        default=True, metadata=about("Refuse tensors that the architecture has no place for.", command=False)
    )
    coreml: bool = field(
        default=True,
        metadata=about(
            "Whether a Core ML package that the file carries may be loaded in place of the weights, where the machine "
            "runs it.",
            command=False,
        ),
    )
    compute: Literal["exact", "int8"] = field(
        default="exact",
        metadata=about(
            "How packed linear layers multiply: exact, or int8, which rounds inputs to 8 bits and keeps weights packed."
        ),
    )
    kv_cache: Any = field(
        default=None,
        metadata=about(
            "How keys and values are cached: int8, int4 or kivi2, with options as in int4,window=128,evict=1024; by "
            "default as they are.",
            metavar="KIND",
        ),
    )
    model_dir: AnyPath | None = field(
        default=None,
        metadata=about(
            "The folder of config.json and the tokenizer, where it is another than that of the weights.", command=False
        ),
    )
    report: Callable[[LoadReport], object] | None = field(
        default=None, metadata=about("Called once with a LoadReport.", command=False)
    )

    def __post_init__(self) -> None:
        if self.compute not in COMPUTES:
            raise UsageError(
                f"expected compute {' or '.join(COMPUTES)}, found {self.compute!r:.80}", rule="model.compute"
            )
        object.__setattr__(self, "kv_cache", kv_cache(self.kv_cache))

    def of(self, path: AnyPath, **more: Any) -> LoadOptions:
        """Return how the model at ``path`` is loaded; ``more`` are further fields, or replace these."""
        return LoadOptions(path, **{item.name: getattr(self, item.name) for item in fields(Loading)} | more)


@dataclass(frozen=True, slots=True)
class LoadOptions(Loading):
    """How a model is loaded: from where, and as what."""

    path: AnyPath = field(
        metadata=about(
            "Folder or file, with config.json and tokenizer beside the weights.", argument=True, metavar="MODEL"
        )
    )
    device: Any = field(default="cpu", metadata=about("Where the weights go.", command=False))
    dtype: Any = field(
        default=None,
        metadata=about(
            "Element type of the weights; by default, and with auto, config.json's, else that of the first "
            "floating-point tensor."
        ),
    )
    keep_packed: bool | None = field(
        default=None,
        metadata=about(
            "Compute from the packed weights, or decode them; a .squizd is run as its stack says, others decoded.",
            "--keep-packed/--decode",
        ),
    )


@dataclass(frozen=True, slots=True)
class Protocol:
    """How a text is read: the first ``sequences`` windows of ``window`` tokens, each without the text before it.

    Each window begins with the tokens that the tokenizer puts before a text (BOS), in the place of the text's own.
    """

    window: int = field(
        default=256,
        metadata=about(
            "Tokens of a window, with those that the tokenizer puts before a text; each is read without context.",
            metavar="N",
            least=2,
        ),
    )
    sequences: int = field(
        default=96, metadata=about("Windows to read, from the text's beginning.", metavar="N", least=1)
    )
    dtype: Any = field(default="f32", metadata=about("Element type to compute in."))
    keep_packed: bool = field(default=False, metadata=about("Compute from the packed weights."))
    device: Any = field(default="cpu", metadata=about("Where the weights go.", command=False))

    def __post_init__(self) -> None:
        if self.window < 2 or self.sequences < 1:
            raise UsageError(
                f"expected a window of at least 2 tokens and 1 sequence, found {self.window} and {self.sequences}",
                rule="eval.window",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """What is measured beside perplexity, and what it must keep to."""

    kl: bool = field(
        default=False,
        metadata=about("How KL(reference || model) spreads over the tokens: median, 99 %, largest; with --reference."),
    )
    top_k: int | None = field(
        default=None,
        metadata=about(
            "Share of the reference's N likeliest tokens that are among the model's N likeliest.", metavar="N", least=1
        ),
    )
    per_layer: bool = field(
        default=False,
        metadata=about(
            "Cosine and relative error of every layer's output against the reference's; which departs first."
        ),
    )
    departs: float = field(
        default=0.1,
        metadata=about("Relative error above which a layer's output departs from the reference's.", metavar="SHARE"),
    )
    resamples: int = field(
        default=1000,
        metadata=about(
            "Resamples of the windows that the intervals of 95 % are made from; 0: none.", least=0, metavar="N"
        ),
    )
    seed: int = field(default=0, metadata=about("Of the resamples.", least=0, metavar="N"))
    gate: str | None = field(
        default=None,
        metadata=about(
            "What the model must keep to, such as kl<0.02,ppl<1.01x (of the reference's); exit code 1 if it does not.",
            metavar="TERMS",
        ),
    )
    receipt: bool = field(
        default=False, metadata=about("Write what was measured beside or into the model's file; inspect shows it.")
    )
    progress: ProgressCallback | None = field(
        default=None, metadata=about("Called with a ProgressEvent, tokens in place of bytes.", command=False)
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
        """Whether any of these needs a reference."""
        return self.kl or self.per_layer or self.top_k is not None


@dataclass(frozen=True, slots=True)
class Draft:
    """Which draft head (by default that of the artifact itself), and how many tokens it proposes at a time, 1 to 7."""

    head: AnyPath | None = field(
        default=None, metadata=about("Do so with the head in this file or folder.", "--draft-head")
    )
    tokens: int = field(
        default=4, metadata=about("Tokens that a head proposes at a time, 1 to 7.", "--draft-tokens", metavar="N")
    )

    def __post_init__(self) -> None:
        if not 1 <= self.tokens <= MOST_DRAFTED:
            raise UsageError(
                f"expected 1 to {MOST_DRAFTED} tokens to draft at a time, found {self.tokens}", rule="draft.tokens"
            )
