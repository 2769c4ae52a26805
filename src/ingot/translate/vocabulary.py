"""Matching of a tokenizer's tokens with the rows of the embedding; llama.cpp needs one token per row."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field

from ingot.errors import UnsupportedError
from ingot.translate.keys import MAX_TOKENS, MERGES, TOKENS, Typed

RULE = "architecture.tokens"
PAD_SCORE = -10000.0
"""The score of llama.cpp's converter for padding tokens."""
_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer's tokens as GGUF metadata, one token per row of the embedding.

    Parameters
    ----------
    typed : dict
        Metadata with tokens, types, scores or merges.
    dropped : list of str
        Descriptions of differences in llama.cpp.
    outside : dict
        Tokens without a row, by id; ``typed`` does not contain them.
    """

    typed: Typed
    dropped: list[str] = field(default_factory=list)
    outside: dict[int, str] = field(default_factory=dict)

    def to_metadata(self, rows: int) -> tuple[Typed, list[str]]:
        """Return the metadata, and a note on tokens without a row, whose merges are removed.

        Raises ``UnsupportedError`` ``architecture.tokens``: two tokens with one text, for which llama.cpp aborts.
        """
        _require_distinct(self.typed[TOKENS][1])
        if not self.outside:
            return dict(self.typed), []
        typed = dict(self.typed)
        if MERGES in typed:
            dropped_texts = set(self.outside.values())
            merges = [merge for merge in typed[MERGES][1] if "".join(merge.split(" ", 1)) not in dropped_texts]
            typed[MERGES] = (typed[MERGES][0], merges)
        return typed, [_note(self.outside, rows)]


def lay_out(tokens: Mapping[int, str], rows: int) -> tuple[list[str], dict[int, str]]:
    """Return a text for each row, ``[PADn]`` for rows without a token, and the tokens without a row.

    Parameters
    ----------
    tokens : mapping
        Texts by non-negative ids.
    rows : int
        Rows of the embedding. If it is 0, they are unknown, and the largest id is in the last row.

    Raises
    ------
    UnsupportedError
        ``architecture.tokens``: more than 4,194,304 rows.
    """
    rows = rows or 1 + max(tokens, default=-1)
    if rows > MAX_TOKENS:
        raise UnsupportedError(f"expected an embedding of at most {MAX_TOKENS} rows, found {rows}", rule=RULE)
    used_texts = set(tokens.values())
    texts = [tokens[token_id] if token_id in tokens else _pad(token_id, used_texts) for token_id in range(rows)]
    return texts, {token_id: text for token_id, text in sorted(tokens.items()) if token_id >= rows}


def _pad(token_id: int, used_texts: Container[str]) -> str:
    text = f"[PAD{token_id}]"
    while text in used_texts:
        text = f"[{text}]"
    return text


def require_rows(special: Mapping[str, int], rows: int) -> None:
    """Raise ``UnsupportedError`` ``architecture.tokens`` if the embedding has no row for a special token in use."""
    if special:
        named = ", ".join(f"{role}_token {token_id}" for role, token_id in special.items())
        raise UnsupportedError(
            f"the embedding has {rows} rows, and none for special tokens that tokenizer_config.json names: {named}; "
            "resize the embedding (resize_token_embeddings), or correct tokenizer_config.json",
            rule=RULE,
        )


def _require_distinct(tokens: list[str]) -> None:
    first_ids: dict[str, int] = {}
    for token_id, text in enumerate(tokens):
        first_id = first_ids.setdefault(text, token_id)
        if first_id != token_id:
            raise UnsupportedError(
                f"tokens {first_id} and {token_id} are both {text[:80]!r} in GGUF, and llama.cpp aborts on that; "
                "--no-tokenizer writes a file without a tokenizer",
                rule=RULE,
            )


def _note(outside: Mapping[int, str], rows: int) -> str:
    shown = ", ".join(f"{token_id} {text[:40]!r}" for token_id, text in [*outside.items()][:_SHOWN])
    unlisted = f" and {len(outside) - _SHOWN} more" if len(outside) > _SHOWN else ""
    return (
        f"{len(outside)} tokens without a row of the embedding ({rows} rows) are left out, because the model cannot "
        f"use them: {shown}{unlisted}"
    )
