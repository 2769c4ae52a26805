"""Conversion of Mistral's ``tekken.json`` to Hugging Face's ``tokenizer.json``.

The file lists tokens as bytes, in the order of merging. Special tokens have the smallest ids. The layout is that of the
package mistral-common, versions 1 to 13 of the file.
"""

from __future__ import annotations

import binascii
from base64 import b64decode
from collections.abc import Mapping, Sequence
from typing import Any

from ingot.errors import FormatError
from ingot.translate import pretokenizers
from ingot.translate.keys import MAX_TOKENS
from ingot.translate.pretokenizers import byte_characters

FILE = "tekken.json"
RULE = "architecture.companion"
_MAX_BYTES = 1024  # of a token
_FIRST_SPECIAL = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "<pad>", "[PREFIX]", "[MIDDLE]", "[SUFFIX]",
)  # fmt: skip
"""Special tokens of files that list none."""
_ROLES = {"unk": "<unk>", "bos": "<s>", "eos": "</s>", "pad": "<pad>"}


def expand(tekken: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tokenizer as a ``tokenizer.json``.

    Raises ``FormatError`` ``architecture.companion``: malformed settings or tokens.
    """
    config = tekken.get("config")
    config = config if isinstance(config, Mapping) else {}
    size, count, pattern = (config.get(key) for key in ("default_vocab_size", "default_num_special_tokens", "pattern"))
    if not isinstance(size, int) or not isinstance(count, int) or not 0 <= count < size <= MAX_TOKENS:
        raise _malformed("default_vocab_size and default_num_special_tokens in config", f"{size!r:.20}, {count!r:.20}")
    if not isinstance(pattern, str):
        raise _malformed("a regular expression as pattern in config", f"{pattern!r:.40}")
    special = _special_tokens(tekken.get("special_tokens"), count)
    tokens = _tokens(tekken.get("vocab"), size - count)
    characters = byte_characters()
    spelled = ["".join(characters[byte] for byte in token) for token in tokens]
    begin = [{"SpecialToken": {"id": "<s>", "type_id": 0}}] if "<s>" in special else []
    first, second = ({"Sequence": {"id": name, "type_id": index}} for index, name in enumerate("AB"))
    return {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None,
        "added_tokens": [
            {"id": token_id, "content": text, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": True}
            for token_id, text in enumerate(special)
        ],
        "pre_tokenizer": pretokenizers.pre_tokenizer(pretokenizers.Steps((pattern,))),
        "post_processor": {
            "type": "TemplateProcessing", "single": [*begin, first], "pair": [*begin, first, second],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [special.index("<s>")], "tokens": ["<s>"]}} if begin else {},
        },
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": True,
            "vocab": {
                **{text: token_id for token_id, text in enumerate(special)},
                **{text: count + rank for rank, text in enumerate(spelled)},
            },
            "merges": _merges(spelled),
        },
    }  # fmt: skip


def ids_by_convention(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    """Return the ids of special tokens by role."""
    vocab = tokenizer["model"]["vocab"]
    return {role: vocab[text] for role, text in _ROLES.items() if text in vocab}


def _special_tokens(listed: Any, count: int) -> list[str]:
    """Return the texts of all special tokens; an id without a text is called ``<SPECIAL_n>``."""
    if listed is None:
        listed = [{"rank": rank, "token_str": text} for rank, text in enumerate(_FIRST_SPECIAL[:count])]
    texts: dict[int, str] = {}
    for token in listed if isinstance(listed, list) else [None]:
        rank, text = (token.get("rank"), token.get("token_str")) if isinstance(token, Mapping) else (None, None)
        if type(rank) is not int or not 0 <= rank < count or not isinstance(text, str) or rank in texts:
            raise _malformed(f"special tokens with ranks below {count} and a text", f"{token!r:.60}")
        texts[rank] = text
    result = [texts.get(rank, f"<SPECIAL_{rank}>") for rank in range(count)]
    if len({*result}) != count:
        raise _malformed("special tokens that differ", "one of them twice")
    return result


def _tokens(listed: Any, count: int) -> list[bytes]:
    """Return the bytes of the first ``count`` tokens, by rank."""
    if not isinstance(listed, list) or len(listed) < count:
        raise _malformed(f"a list of at least {count} tokens as vocab", f"{type(listed).__name__}")
    tokens = []
    for rank, token in enumerate(listed[:count]):
        text = token.get("token_bytes") if isinstance(token, Mapping) and token.get("rank") == rank else None
        try:
            data = b64decode(text, validate=True) if isinstance(text, str) else b""
        except (binascii.Error, ValueError):
            data = b""
        if not 0 < len(data) <= _MAX_BYTES:
            raise _malformed(f"token {rank} with its rank and up to {_MAX_BYTES} bytes in base64", f"{token!r:.60}")
        tokens.append(data)
    first = {*tokens[:256]}
    if len({*tokens}) != count or first != {bytes([byte]) for byte in range(256)}:
        raise _malformed("tokens that differ, and begin with the 256 bytes", "other tokens")
    return tokens


def _merges(tokens: Sequence[str]) -> list[list[str]]:
    """Return the pair of tokens that forms each merged token, in the order of the merged tokens."""
    ranks = {token: rank for rank, token in enumerate(tokens)}
    merges = []
    for token in tokens:
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known_pairs = [pair for pair in pairs if pair[0] in ranks and pair[1] in ranks]
        merges += [list(pair) for pair in sorted(known_pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))]
    return merges


def _malformed(expected: str, actual: str) -> FormatError:
    return FormatError(RULE, f"expected {expected}, found {actual}", where=FILE)
