"""Windows of a text, each beginning with the tokens that the tokenizer adds to a text, as in training.

The added tokens replace the first tokens of a window, as in ``llama-perplexity``. The length of a window and the scored
tokens are therefore the same with and without added tokens.
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
from ingot.runtime.loading.options import Protocol
from ingot.runtime.loading.transformers_config import EXTRA
from ingot.stores.location import AnyPath, Location

# The number of bytes of text that are read per token; real texts have fewer.
_BYTES_PER_TOKEN = 64


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows of tokens, i64 [windows, length], and the added tokens with which each window begins."""

    tokens: Any
    prefix: tuple[SpecialToken, ...] = ()

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def length(self) -> int:
        """The number of tokens of a window."""
        return int(self.tokens.shape[1])

    @property
    def first_scored(self) -> int:
        """The position of the first token that is scored; the tokens before it are the same in all windows."""
        return max(len(self.prefix), 1)

    def to(self, device: Any) -> Windows:
        """Return these windows on a device."""
        return Windows(self.tokens.to(device), self.prefix)


def read_windows(tokenizer: Any, text: AnyPath, protocol: Protocol) -> Windows:
    """Return the windows of a text file that ``protocol`` requests; fewer windows if the text is short.

    Raises the errors of ``read_text`` and ``cut_windows``.
    """
    location = Location.parse(text)
    content = read_text(location, protocol.window * protocol.sequences)
    before = surrounding_tokens(tokenizer).before
    shape = protocol.window, protocol.sequences
    tokens = cut_windows(tokenizer, content, shape, location.display, Surrounding(before))
    return Windows(tokens, named_tokens(tokenizer, before))


def read_text(text: Location, tokens: int) -> str:
    """Return the beginning of a text file, enough for ``tokens`` tokens; raise ``eval.text`` if it is not UTF-8."""
    limit = tokens * _BYTES_PER_TOKEN
    data = text.head(limit)
    try:
        content = codecs.getincrementaldecoder("utf-8")().decode(data, final=len(data) < limit)
    except UnicodeDecodeError as error:
        raise UsageError(f"expected text in UTF-8: {error.reason}", rule="eval.text", where=text.display) from error
    if "\0" in content:
        raise UsageError("expected text, but the file has a zero byte", rule="eval.text", where=text.display)
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
    """Return the tokens of a text as windows, i64 [windows, length], each with the surrounding tokens.

    Parameters
    ----------
    tokenizer, content
    shape : tuple of int
        The number of tokens of a window, and the maximum number of windows.
    location : str
        The location of the text, for error messages.
    surrounding : Surrounding
        The tokens with which each window begins and ends.
    contiguous : bool
        Whether the surrounding tokens are inserted, so that the windows contain the full text; otherwise they replace
        tokens of the text.

    Raises
    ------
    UsageError
        ``eval.text``: the text is shorter than a window; ``eval.window``: a window cannot hold a token of the text.
    """
    torch = require("torch", EXTRA)
    length, max_windows = shape
    text_length = text_length_of_window(length, surrounding)
    step = text_length if contiguous else length
    tokens = text_tokens(tokenizer, content)
    count = min(max_windows, len(tokens) // step)
    if not count:
        raise UsageError(
            f"expected a text of at least {step} tokens, found {len(tokens)}; use a smaller window",
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


def text_length_of_window(length: int, surrounding: Surrounding) -> int:
    """Return the number of text tokens in a window; raise ``eval.window`` if it is below 1."""
    text_length = length - len(surrounding.before) - len(surrounding.after)
    if text_length < 1:
        raise UsageError(
            f"expected a window longer than the {length - text_length} tokens that the tokenizer adds, found {length}; "
            "use a longer window",
            rule="eval.window",
        )
    return text_length
