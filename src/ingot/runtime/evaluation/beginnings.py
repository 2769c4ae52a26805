"""Determine the tokens with which samples of a model begin.

These are the tokens that the tokenizer adds before every text, or the tokens that a chat template puts before the first
message of a user.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ingot.runtime.evaluation.chat_turn import text_before_user
from ingot.runtime.evaluation.special_tokens import (
    SpecialToken,
    Surrounding,
    named_tokens,
    prompt_tokens,
    surrounding_tokens,
)
from ingot.runtime.evaluation.windows import text_length_of_window
from ingot.runtime.loading.model_source import companions_folder
from ingot.runtime.loading.transformers_tokenizer import has_tokenizer, tokenizer_in
from ingot.stores.location import AnyPath, Location

CHAT_SHARE = 4
"""If the model has a chat template, one window in four begins with a user's turn."""


@dataclass(frozen=True, slots=True)
class Beginnings:
    """The first tokens of samples.

    ``text`` has the tokens that the tokenizer adds before every text. ``chat`` has the tokens that a chat template puts
    before the first message of a user. If ``chat`` is not empty, a quarter of the windows begins with it; all other
    windows begin with ``text``.
    """

    text: tuple[SpecialToken, ...] = ()
    chat: tuple[SpecialToken, ...] = ()

    def chat_windows(self, windows: int) -> int:
        """Return the number of windows that begin with a user's turn."""
        return windows // CHAT_SHARE if self.chat else 0

    def by_count(self, windows: int) -> list[tuple[int, list[int]]]:
        """Split ``windows`` by their first tokens; return pairs of a number of windows and the ids of their first
        tokens.
        """
        chats = self.chat_windows(windows)
        split = ((windows - chats, self.text), (chats, self.chat))
        return [(count, [token.id for token in tokens]) for count, tokens in split if count]

    def within(self, length: int) -> Beginnings:
        """Return the first tokens for windows of ``length`` tokens.

        ``chat`` becomes empty if it would take half of a window or more.

        Raises
        ------
        UsageError
            ``eval.window``: the tokens before every text leave no room.
        """
        text_length_of_window(length, Surrounding(tuple(token.id for token in self.text)))
        return self if 2 * len(self.chat) < length else Beginnings(self.text)


def beginnings_of(path: AnyPath) -> Beginnings | None:
    """Return the first tokens of the model's samples; None if the model's folder has no tokenizer.

    Raises
    ------
    FormatError
        ``model.tokenizer``: a tokenizer that cannot be read.
    """
    with companions_folder(Location.parse(path)) as folder:
        if not has_tokenizer(folder):
            return None
        tokenizer = tokenizer_in(folder)
    before = surrounding_tokens(tokenizer).before
    return Beginnings(named_tokens(tokenizer, before), named_tokens(tokenizer, _user_turn(tokenizer)))


def _user_turn(tokenizer: Any) -> Sequence[int]:
    """Return the chat template's tokens before the text of a user's first message; empty if there are none."""
    if not getattr(tokenizer, "chat_template", None):
        return ()
    try:
        template = tokenizer.get_chat_template()
    except ValueError:  # several templates, and none of them is the default
        return ()
    texts = {name: str(text) for name, text in tokenizer.special_tokens_map.items() if isinstance(text, str)}
    before = text_before_user(template, texts)
    return prompt_tokens(tokenizer, before) if before else ()
