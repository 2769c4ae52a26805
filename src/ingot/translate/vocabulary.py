"""A tokenizer's tokens beside the rows of the embedding: llama.cpp wants as many of the one as of the other."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field

from ingot.errors import UnsupportedError
from ingot.translate.keys import MERGES, MOST, TOKENS, Typed

RULE = "architecture.tokens"
PAD_SCORE = -10000.0
"""The score that llama.cpp's converter gives to tokens that stand for nothing."""
_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer's tokens as GGUF metadata, a token for each row of the embedding.

    Parameters
    ----------
    typed : dict
        Metadata with tokens, types, scores or merges.
    lost : list of str
        What llama.cpp does otherwise.
    outside : dict
        The tokens without a row by their ids; they are not in ``typed``.
    """

    typed: Typed
    lost: list[str] = field(default_factory=list)
    outside: dict[int, str] = field(default_factory=dict)

    def checked(self, rows: int) -> tuple[Typed, list[str]]:
        """Return the metadata without merges of tokens that have no row, and a note on those tokens.

        Raises ``UnsupportedError`` ``architecture.tokens``: two tokens with one text, on which llama.cpp ends.
        """
        _require_different(self.typed[TOKENS][1])
        if not self.outside:
            return dict(self.typed), []
        typed = dict(self.typed)
        if MERGES in typed:
            gone = set(self.outside.values())
            merges = [merge for merge in typed[MERGES][1] if "".join(merge.split(" ", 1)) not in gone]
            typed[MERGES] = (typed[MERGES][0], merges)
        return typed, [_note(self.outside, rows)]


def lay_out(tokens: Mapping[int, str], rows: int) -> tuple[list[str], dict[int, str]]:
    """Return a text for each row, ``[PADn]`` for those without a token, and the tokens without a row.

    Parameters
    ----------
    tokens : mapping
        Texts by ids of 0 or more.
    rows : int
        Rows of the embedding; 0 if that is not known: then one more than the largest id.

    Raises
    ------
    UnsupportedError
        ``architecture.tokens``: more than 4,194,304 rows.
    """
    rows = rows or 1 + max(tokens, default=-1)
    if rows > MOST:
        raise UnsupportedError(f"expected an embedding of at most {MOST} rows, found {rows}", rule=RULE)
    taken = set(tokens.values())
    texts = [tokens[number] if number in tokens else _pad(number, taken) for number in range(rows)]
    return texts, {number: text for number, text in sorted(tokens.items()) if number >= rows}


def _pad(number: int, taken: Container[str]) -> str:
    text = f"[PAD{number}]"
    while text in taken:
        text = f"[{text}]"
    return text


def require_rows(special: Mapping[str, int], rows: int) -> None:
    """Raise ``UnsupportedError`` ``architecture.tokens`` if a special token in use has no row of the embedding."""
    if special:
        named = ", ".join(f"{role}_token {number}" for role, number in special.items())
        raise UnsupportedError(
            f"the embedding has {rows} rows, and none for special tokens that tokenizer_config.json names: {named}; "
            "resize the embedding (resize_token_embeddings), or name tokens there that the model has",
            rule=RULE,
        )


def _require_different(tokens: list[str]) -> None:
    seen: dict[str, int] = {}
    for number, text in enumerate(tokens):
        other = seen.setdefault(text, number)
        if other != number:
            raise UnsupportedError(
                f"tokens {other} and {number} are both {text[:80]!r} in GGUF, and llama.cpp ends on that; "
                "--no-tokenizer writes a file without a tokenizer",
                rule=RULE,
            )


def _note(outside: Mapping[int, str], rows: int) -> str:
    shown = ", ".join(f"{number} {text[:40]!r}" for number, text in [*outside.items()][:_SHOWN])
    more = f" and {len(outside) - _SHOWN} more" if len(outside) > _SHOWN else ""
    return (
        f"{len(outside)} tokens without a row of the embedding ({rows} rows) are left out, which the model cannot use: "
        f"{shown}{more}"
    )
