"""The tokens that a tokenizer adds around every text, such as BOS, determined by encoding probe texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ingot.errors import FormatError, printable

# Texts of one and several tokens, in four scripts or types of characters: a tokenizer may drop some of them.
_PROBES = ("a", "the end", "7", "\u4e2d")


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """A token: its id, and its text in the vocabulary."""

    id: int
    text: str


@dataclass(frozen=True, slots=True)
class Surrounding:
    """The ids that a tokenizer adds before and after a text."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()


def text_tokens(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a text without the tokens that a tokenizer adds."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


def surrounding_tokens(tokenizer: Any) -> Surrounding:
    """Return the tokens that a tokenizer adds before and after every text.

    Raises
    ------
    FormatError
        ``model.tokenizer``: the added tokens differ between probe texts.
    """
    common: set[Surrounding] | None = None
    for probe in _PROBES:
        text_ids = text_tokens(tokenizer, probe)
        if text_ids:
            splits = _splits(list(tokenizer(probe, verbose=False).input_ids), text_ids)
            common = splits if common is None else common & splits
    if not common:
        raise FormatError(
            "model.tokenizer",
            "expected a tokenizer that adds the same tokens around every text, but its additions depend on the text: "
            "the beginning of a window is not defined",
        )
    # Two splits remain only if each probe text is the unknown token, and that token is also added around texts.
    return max(common, key=lambda split: len(split.before))


def _splits(encoded: list[int], text_ids: list[int]) -> set[Surrounding]:
    """Return all ways to split the encoded text into added tokens, the text's tokens, and added tokens."""
    return {
        Surrounding(tuple(encoded[:start]), tuple(encoded[start + len(text_ids) :]))
        for start in range(len(encoded) - len(text_ids) + 1)
        if encoded[start : start + len(text_ids)] == text_ids
    }


def prompt_tokens(tokenizer: Any, prompt: str) -> list[int]:
    """Return a prompt's tokens, preceded by the tokens that the tokenizer adds before a text."""
    before = list(surrounding_tokens(tokenizer).before)
    text_ids = text_tokens(tokenizer, prompt)
    return text_ids if before and text_ids[: len(before)] == before else before + text_ids


def named_tokens(tokenizer: Any, ids: Sequence[int]) -> tuple[SpecialToken, ...]:
    """Return the tokens with the given ids and their texts in the vocabulary."""
    texts = tokenizer.convert_ids_to_tokens([*ids]) if ids else []
    return tuple(SpecialToken(token_id, str(text)) for token_id, text in zip(ids, texts, strict=True))


def prefix_text(tokens: Sequence[SpecialToken]) -> str:
    """Return the added tokens as text for a report: ``<bos> (2)``."""
    return " ".join(f"{printable(token.text)[:40]} ({token.id})" for token in tokens) or "no added token"
