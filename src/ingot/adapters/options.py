"""The options of ``eval`` and ``generate``. The command line is made from them: nothing heavy may be imported here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ingot.core.options import about
from ingot.errors import UsageError
from ingot.ops.options import AnyPath

MOST_DRAFTED = 7
"""The most tokens that are proposed at a time: kernels of packed weights take eight rows in 16 bits."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What ``load_model`` is told by every command that runs a model."""

    cache: bool = field(default=True, metadata=about("Use and make faster stored forms.", "--cache/--no-cache"))
    max_ram: int | str | None = field(
        default=None, metadata=about("Memory that weights may be decoded into, such as 2GiB; by default what is free.")
    )


@dataclass(frozen=True, slots=True)
class Protocol:
    """How a text is read: the first ``sequences`` windows of ``window`` tokens, no token added, each alone."""

    window: int = field(
        default=256, metadata=about("Tokens of a window; each read without context.", metavar="N", least=2)
    )
    sequences: int = field(
        default=96, metadata=about("Windows to read, from the text's beginning.", metavar="N", least=1)
    )
    dtype: Any = field(default="f32", metadata=about("Element type to compute in."))
    keep_packed: bool = field(default=False, metadata=about("Compute from the packed weights."))

    def __post_init__(self) -> None:
        if self.window < 2 or self.sequences < 1:
            raise UsageError(
                f"expected a window of at least 2 tokens and 1 sequence, found {self.window} and {self.sequences}",
                rule="eval.window",
            )


@dataclass(frozen=True, slots=True)
class Draft:
    """Which draft head (by default that of the artifact itself), and how many tokens it proposes at a time, 1 to 7."""

    path: AnyPath | None = field(
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
