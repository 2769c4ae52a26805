"""Convert the tokenizer of Ingot's demo model (``ingot.demo.tokenizer``) to Hugging Face's ``tokenizer.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ingot.errors import FormatError

FORMAT = "ingot-byte-bpe"
WORD = r" ?[^\W\d_]+| ?\d{1,3}| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+"
RULE = "architecture.companion"


def expand(tokenizer: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the demo model's tokenizer as a ``tokenizer.json``; any other tokenizer unchanged.

    Raises ``FormatError`` ``architecture.companion``: merges that are no pairs of earlier tokens.
    """
    if tokenizer.get("format") != FORMAT:
        return tokenizer
    tokens = byte_characters()
    merges = []
    listed = tokenizer.get("merges")
    for pair in listed if isinstance(listed, list) else []:
        ids = pair if isinstance(pair, list) else []
        if len(ids) != 2 or not all(type(index) is int and 0 <= index < len(tokens) for index in ids):
            raise FormatError(RULE, f"expected pairs of earlier tokens as merges, found {pair!r:.40}", where=FORMAT)
        first, second = (tokens[index] for index in ids)
        merges.append([first, second])
        tokens.append(first + second)
    split = {"type": "Split", "pattern": {"Regex": WORD}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
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
            "merges": merges,
        },
    }


def byte_characters() -> list[str]:
    """Return byte-level BPE's character for each byte: itself if printable Latin-1, else a character from U+0100 on.

    Radford et al., "Language Models are Unsupervised Multitask Learners", 2019; their encoder.py.
    """
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    replacements = iter(range(0x100, 0x200))
    return [chr(byte) if byte in plain else chr(next(replacements)) for byte in range(256)]
