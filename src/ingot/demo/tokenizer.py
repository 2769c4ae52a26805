"""Byte-level BPE tokenizer of the demo model.

The algorithm is byte-pair encoding as in Sennrich et al., "Neural Machine
Translation of Rare Words with Subword Units" (2016), on UTF-8 bytes after a
split into words, as in Radford et al., "Language Models are Unsupervised
Multitask Learners" (2019).  Because the 256 single bytes are always in the
vocabulary, every text can be encoded and decoding gives the text back.

The module reads and writes the ``tokenizer.json`` of Hugging Face's package tokenizers, without using that package.
Token ids 0..255 are the single bytes; merge number ``i`` makes token ``256 + i`` of two earlier tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

from ingot.errors import UsageError
from ingot.translate.pretokenizers import byte_characters

# Letters, up to three digits, punctuation (each with an optional space before
# it), or white space; the last alternative but one leaves a single space for
# the word that follows.  Together they match every character of any text, so
# joining the pieces gives the text back.
WORDS = r" ?[^\W\d_]+| ?\d{1,3}| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+"
_WORDS = re.compile(WORDS)


def split_words(text: str) -> list[str]:
    """Split ``text`` into words; merges join only tokens of one word.

    Parameters
    ----------
    text : str
        Any text.

    Returns
    -------
    list of str
        Words whose concatenation is ``text``.
    """
    return _WORDS.findall(text)


class Tokenizer:
    """Encoder and decoder for one list of merges.

    Parameters
    ----------
    merges : sequence of (int, int)
        Merge ``i`` joins two tokens with ids below ``256 + i``.

    Raises
    ------
    UsageError
        If a merge refers to a token that does not exist yet, or repeats an earlier merge.
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
        # Words often repeat in texts, so the merges of each word are cached.
        self._cache: dict[str, tuple[int, ...]] = {}

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read a ``tokenizer.json`` of byte-level BPE whose first 256 tokens are bytes and whose words are ``WORDS``.

        Raises
        ------
        UsageError
            ``text`` is not JSON, or another tokenizer.
        """
        try:
            parsed = json.loads(text)
            merges = parsed["model"]["merges"]
            vocab = parsed["model"]["vocab"]
            words = parsed["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]
        except (ValueError, TypeError, LookupError) as error:
            raise UsageError(f"expected the demo's tokenizer.json, found another text: {error!r}") from error
        ids = {character: value for value, character in enumerate(byte_characters())}
        pairs = []
        for merge in merges if isinstance(merges, list) else []:
            first, second = merge if isinstance(merge, list) and len(merge) == 2 else ("", "")
            if not all(isinstance(token, str) and token in ids for token in (first, second)) or first + second in ids:
                raise UsageError(f"a merge must be two earlier tokens that make a new one, not {merge!r}")
            pairs.append((ids[first], ids[second]))
            ids[first + second] = 255 + len(pairs)
        if words != WORDS or vocab != ids:
            raise UsageError("expected the demo's tokenizer.json, found other words or another vocabulary")
        return cls(pairs)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read the JSON file at ``path``."""
        return cls.from_json(Path(path).read_text(encoding="utf-8"))

    def to_json(self) -> str:
        """Return the ``tokenizer.json``.

        Raises ``UsageError`` if two merges produce the same token, because the file cannot represent this.
        """
        if len({*self._bytes}) != len(self._bytes):
            raise UsageError("two merges make the same token")
        characters = byte_characters()
        tokens = ["".join(characters[byte] for byte in token) for token in self._bytes]
        split = {"type": "Split", "pattern": {"Regex": WORDS}, "behavior": "Isolated", "invert": False}
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        tokenizer: dict[str, Any] = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [],
            "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
            "post_processor": None,
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": {token: index for index, token in enumerate(tokens)},
                "merges": [[tokens[first], tokens[second]] for first, second in self._rank],
            },
        }
        return json.dumps(tokenizer, ensure_ascii=False, indent=1) + "\n"

    @property
    def vocab_size(self) -> int:
        """The number of token ids."""
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
        """Apply the merges to one word, in the order in which they were learned."""
        ids = list(word.encode("utf-8"))
        while len(ids) > 1:
            candidates = [self._rank[p] for p in pairwise(ids) if p in self._rank]
            if not candidates:
                break
            ids = self._join(ids, min(candidates))
        return tuple(ids)

    def _join(self, ids: list[int], token: int) -> list[int]:
        """Replace, from left to right, each pair of ids that ``token`` is merged from."""
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
