"""The tokens that a tokenizer puts around every text, such as BOS: found by encoding probes, not by a model's name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ingot.errors import FormatError, printable

# Texts of one and several tokens, of four kinds of characters: a tokenizer that drops one of them keeps another.
_PROBES = ("a", "the end", "7", "\u4e2d")


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """A token by its id, and its text in the vocabulary."""

    id: int
    text: str


@dataclass(frozen=True, slots=True)
class Surrounding:
    """The ids that a tokenizer puts before a text and after it."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()


def text_tokens(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a text alone."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


def surrounding_tokens(tokenizer: Any) -> Surrounding:
    """Return the tokens that a tokenizer puts before and after every text.

    Raises
    ------
    FormatError
        ``model.tokenizer``: no tokens stand around each probe alike.
    """
    common: set[Surrounding] | None = None
    for probe in _PROBES:
        own = text_tokens(tokenizer, probe)
        if own:
            splits = _splits(list(tokenizer(probe, verbose=False).input_ids), own)
            common = splits if common is None else common & splits
    if not common:
        raise FormatError(
            "model.tokenizer",
            "expected a tokenizer that puts the same tokens around every text; this one puts others around some texts: "
            "what a window of text begins with is not defined",
        )
    # Two splits are left only if each probe is the unknown token and that token stands around texts, too.
    return max(common, key=lambda split: len(split.before))


def _splits(encoded: list[int], own: list[int]) -> set[Surrounding]:
    """Return each way to read the encoded text as tokens before, the text's own tokens, and tokens after."""
    return {
        Surrounding(tuple(encoded[:start]), tuple(encoded[start + len(own) :]))
        for start in range(len(encoded) - len(own) + 1)
        if encoded[start : start + len(own)] == own
    }


def prompt_tokens(tokenizer: Any, prompt: str) -> list[int]:
    """Return a prompt's tokens after those that the tokenizer puts before a text, and none after it.

    A prompt whose own text begins with these tokens, as that of a chat template may, does not get them twice.
    """
    before, own = list(surrounding_tokens(tokenizer).before), text_tokens(tokenizer, prompt)
    return own if before and own[: len(before)] == before else before + own


def named_tokens(tokenizer: Any, ids: Sequence[int]) -> tuple[SpecialToken, ...]:
    """Return tokens with their texts."""
    texts = tokenizer.convert_ids_to_tokens([*ids]) if ids else []
    return tuple(SpecialToken(number, str(text)) for number, text in zip(ids, texts, strict=True))


def prefix_text(tokens: Sequence[SpecialToken]) -> str:
    """Return for people what windows begin with: ``<bos> (2)``."""
    return " ".join(f"{printable(token.text)[:40]} ({token.id})" for token in tokens) or "no added token"
