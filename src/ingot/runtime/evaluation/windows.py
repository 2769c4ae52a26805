"""Windows of a text as a model was trained to read one: each begins with the tokens that the tokenizer puts before it.

As ``llama-perplexity`` does, these tokens take the place of the window's first ones, so that the length of a window and
the tokens that are scored are the same with and without them.
"""

from __future__ import annotations

import codecs
from dataclasses import dataclass
from typing import Any

from ingot.core.border import require
from ingot.errors import UsageError
from ingot.runtime.evaluation.special_tokens import (
    SpecialToken,
    Surrounding,
    named_tokens,
    surrounding_tokens,
    text_tokens,
)
from ingot.runtime.loading.model_source import companions_folder
from ingot.runtime.loading.options import Protocol
from ingot.runtime.loading.transformers_config import EXTRA
from ingot.runtime.loading.transformers_tokenizer import has_tokenizer, tokenizer_in
from ingot.stores.location import AnyPath, Location

# Bytes of text that are read for each token: no tokenizer of text that people write needs more.
_BYTES_PER_TOKEN = 64


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows of tokens, i64 [windows, length], and the tokens that each of them begins with."""

    tokens: Any
    prefix: tuple[SpecialToken, ...] = ()

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def length(self) -> int:
        """Tokens of a window."""
        return int(self.tokens.shape[1])

    @property
    def first_scored(self) -> int:
        """The position of the first token that is scored: those before it are always the same."""
        return max(len(self.prefix), 1)

    def to(self, device: Any) -> Windows:
        """Return the same windows on a device."""
        return Windows(self.tokens.to(device), self.prefix)


def read_windows(tokenizer: Any, text: AnyPath, protocol: Protocol) -> Windows:
    """Return the windows that ``protocol`` reads of a text file, fewer where it is short; errors as ``cut_windows``."""
    location = Location.parse(text)
    content = read_text(location, protocol.window * protocol.sequences)
    before = surrounding_tokens(tokenizer).before
    shape = protocol.window, protocol.sequences
    tokens = cut_windows(tokenizer, content, shape, location.display, Surrounding(before))
    return Windows(tokens, named_tokens(tokenizer, before))


def read_text(text: Location, tokens: int) -> str:
    """Return the beginning of a text file, long enough for so many tokens; ``eval.text``: not in UTF-8."""
    limit = tokens * _BYTES_PER_TOKEN
    data = text.head(limit)
    try:
        content = codecs.getincrementaldecoder("utf-8")().decode(data, final=len(data) < limit)
    except UnicodeDecodeError as error:
        raise UsageError(f"expected text in UTF-8: {error.reason}", rule="eval.text", where=text.display) from error
    if "\0" in content:
        raise UsageError("expected text, found a byte of zeros: binary data", rule="eval.text", where=text.display)
    return content


def cut_windows(
    tokenizer: Any,
    content: str,
    shape: tuple[int, int],
    location: str,
    surrounding: Surrounding,
    *,
    contiguous: bool = False,
) -> Any:
    """Return a text's tokens as windows, i64 [windows, length], each with the surrounding tokens.

    Parameters
    ----------
    tokenizer, content
    shape : tuple of int
        Tokens of a window, and the most windows.
    location : str
        The text, for messages.
    surrounding : Surrounding
        What windows begin and end with.
    contiguous : bool
        Put the surrounding tokens between the text's tokens, and not in the place of some.

    Raises
    ------
    UsageError
        ``eval.text``: fewer tokens than a window; ``eval.window``: a window without room for a token of the text.
    """
    torch = require("torch", EXTRA)
    length, most = shape
    room = require_room_for_text(length, surrounding)
    step = room if contiguous else length
    tokens = text_tokens(tokenizer, content)
    count = min(most, len(tokens) // step)
    if not count:
        raise UsageError(
            f"expected a text of at least {step} tokens, found {len(tokens)}; take a smaller window",
            rule="eval.text",
            where=location,
        )
    windows = torch.tensor(tokens[: count * step], dtype=torch.int64).reshape(count, step)
    if not contiguous:
        windows = windows[:, len(surrounding.before) : length - len(surrounding.after)]
    before, after = (
        torch.tensor(ids, dtype=torch.int64).expand(count, -1) for ids in (surrounding.before, surrounding.after)
    )
    return torch.cat([before, windows, after], 1).contiguous()


def require_room_for_text(length: int, surrounding: Surrounding) -> int:
    """Return the tokens of a window that are the text's own; ``eval.window``: none."""
    room = length - len(surrounding.before) - len(surrounding.after)
    if room < 1:
        raise UsageError(
            f"expected a window of more than {length - room} tokens, which the tokenizer puts around a text, found "
            f"{length}; take a longer window",
            rule="eval.window",
        )
    return room


def sample_prefix(path: AnyPath) -> tuple[SpecialToken, ...] | None:
    """Return the tokens that a model's own samples begin with; None if no tokenizer lies beside its weights.

    Raises
    ------
    FormatError
        ``model.tokenizer``: a tokenizer that cannot be read.
    """
    with companions_folder(Location.parse(path)) as folder:
        if not has_tokenizer(folder):
            return None
        tokenizer = tokenizer_in(folder)
    return named_tokens(tokenizer, surrounding_tokens(tokenizer).before)
