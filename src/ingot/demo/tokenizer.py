"""Byte-level BPE tokenizer of the demo model.

The algorithm is byte-pair encoding as in Sennrich et al., "Neural Machine
Translation of Rare Words with Subword Units" (2016), on UTF-8 bytes after a
split into words, as in Radford et al., "Language Models are Unsupervised
Multitask Learners" (2019).  Because the 256 single bytes are always in the
vocabulary, every text can be encoded and decoding gives the text back.

The JSON form is our own, chosen to be short::

    {"format": "ingot-byte-bpe", "version": 1, "merges": [[first, second], ...]}

Token ids 0..255 are the single bytes; merge number ``i`` makes token
``256 + i`` out of the two earlier tokens ``first`` and ``second``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Self

from ingot.errors import UsageError

FORMAT = "ingot-byte-bpe"
VERSION = 1

# Letters, up to three digits, punctuation (each with an optional space before
# it), or white space; the last alternative but one leaves a single space for
# the word that follows.  Together they match every character of any text, so
# joining the pieces gives the text back.
_WORD = re.compile(r" ?[^\W\d_]+| ?\d{1,3}| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+")


def split_words(text: str) -> list[str]:
    """Split ``text`` into the pieces that merges never cross.

    Parameters
    ----------
    text : str
        Any text.

    Returns
    -------
    list of str
        Pieces whose concatenation is ``text``.
    """
    return _WORD.findall(text)


class Tokenizer:
    """Encoder and decoder for one list of merges.

    Parameters
    ----------
    merges : sequence of (int, int)
        Merge ``i`` joins two tokens with ids below ``256 + i``.

    Raises
    ------
    UsageError
        If a merge refers to a token that does not exist yet, or repeats.
    """

    def __init__(self, merges: Sequence[tuple[int, int]]) -> None:
        self._bytes = [bytes([value]) for value in range(256)]
        self._rank: dict[tuple[int, int], int] = {}
        for first, second in merges:
            size = len(self._bytes)
            if not (0 <= first < size and 0 <= second < size):
                raise UsageError(f"merge {size - 256} joins unknown tokens: ({first}, {second})")
            if (first, second) in self._rank:
                raise UsageError(f"merge {size - 256} repeats an earlier one: ({first}, {second})")
            self._rank[first, second] = size
            self._bytes.append(self._bytes[first] + self._bytes[second])
        # Words repeat a great deal in text, so each is merged once only.
        self._cache: dict[str, tuple[int, ...]] = {}

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Build a tokenizer from its JSON form (see the module docstring).

        Raises
        ------
        UsageError
            If ``text`` is not JSON of this format and version.
        """
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise UsageError(f"a tokenizer of format {FORMAT!r} is JSON, and this text is not: {error}") from error
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise UsageError(f"not a tokenizer of format {FORMAT!r}")
        if data.get("version") != VERSION:
            raise UsageError(f"tokenizer version {data.get('version')!r} is not {VERSION}")
        merges = data.get("merges")
        if not isinstance(merges, list):
            raise UsageError("a tokenizer needs a list of merges")
        return cls([_pair(item) for item in merges])

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read the JSON file at ``path``."""
        return cls.from_json(Path(path).read_text(encoding="utf-8"))

    def to_json(self) -> str:
        """Return the JSON form, with one merge a line."""
        merges = ",\n".join(f"  [{first}, {second}]" for first, second in self._rank)
        head = f'{{\n "format": "{FORMAT}",\n "version": {VERSION},\n "merges": [\n'
        return f"{head}{merges}\n ]\n}}\n"

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return len(self._bytes)

    def encode(self, text: str) -> list[int]:
        """Turn ``text`` into token ids.

        Parameters
        ----------
        text : str
            Text that UTF-8 can hold (no lone surrogates).

        Returns
        -------
        list of int
            Ids in ``range(vocab_size)``.

        Raises
        ------
        UnicodeEncodeError
            If ``text`` contains a lone surrogate.
        """
        cache = self._cache
        tokens: list[int] = []
        for word in split_words(text):
            pieces = cache.get(word)
            if pieces is None:
                pieces = cache[word] = self._merge_word(word)
            tokens.extend(pieces)
        return tokens

    def decode(self, tokens: Iterable[int]) -> str:
        """Turn token ids back into text.

        Bytes that are not UTF-8, which happen when a sequence is cut inside
        a character, become U+FFFD.
        """
        return self.decode_bytes(tokens).decode("utf-8", errors="replace")

    def decode_bytes(self, tokens: Iterable[int]) -> bytes:
        """Turn token ids back into the bytes that they stand for.

        Raises
        ------
        UsageError
            If an id is outside ``range(vocab_size)``.
        """
        parts: list[bytes] = []
        for token in tokens:
            if not 0 <= token < len(self._bytes):
                raise UsageError(f"token {token} is outside the vocabulary of {self.vocab_size}")
            parts.append(self._bytes[token])
        return b"".join(parts)

    def _merge_word(self, word: str) -> tuple[int, ...]:
        """Apply to one word the merges in the order in which they were learned."""
        ids = list(word.encode("utf-8"))
        while len(ids) > 1:
            candidates = [self._rank[p] for p in pairwise(ids) if p in self._rank]
            if not candidates:
                break
            ids = self._join(ids, min(candidates))
        return tuple(ids)

    def _join(self, ids: list[int], token: int) -> list[int]:
        """Replace, left to right, each pair that ``token`` stands for."""
        joined: list[int] = []
        index = 0
        while index < len(ids):
            if index + 1 < len(ids) and self._rank.get((ids[index], ids[index + 1])) == token:
                joined.append(token)
                index += 2
            else:
                joined.append(ids[index])
                index += 1
        return joined


def _pair(item: object) -> tuple[int, int]:
    """Check one entry of the JSON list of merges."""
    if isinstance(item, list) and len(item) == 2:
        first, second = item
        if type(first) is int and type(second) is int:
            return first, second
    raise UsageError(f"a merge must be two integers, not {item!r}")
