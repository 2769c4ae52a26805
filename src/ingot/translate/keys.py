"""GGUF's keys and types of tokens, and what ``tokenizer_config.json`` says of special ones.

Types are llama.cpp's (``llama-vocab.cpp``), which are SentencePiece's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Typed = dict[str, tuple[str, Any]]

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)
MODEL, PRE, TOKENS, TYPES = (f"tokenizer.ggml.{key}" for key in ("model", "pre", "tokens", "token_type"))
SCORES, MERGES, ADD_BOS, ADD_EOS, ADD_SEP = (
    f"tokenizer.ggml.{key}" for key in ("scores", "merges", "add_bos_token", "add_eos_token", "add_sep_token")
)
ADD = {"bos": ADD_BOS, "eos": ADD_EOS, "sep": ADD_SEP}
NO_VOCABULARY = "none"
NO_VOCABULARIES = (NO_VOCABULARY, "no_vocab")
"""What ``tokenizer.ggml.model`` says of a file without a tokenizer."""
TEMPLATE = "tokenizer.chat_template"
ID = "tokenizer.ggml.{}_token_id"
BPE = "gpt2"
SPM = "llama"
MOST = 1 << 22  # tokens
IDS = {
    "bos": "bos",
    "eos": "eos",
    "pad": "padding",
    "unk": "unknown",
    "sep": "seperator",
    "mask": "mask",
    "eot": "eot",
    "eom": "eom",
}
"""Roles of special tokens, and llama.cpp's names for them, whose spelling this is."""

READ = frozenset(
    (
        *(MODEL, PRE, TOKENS, TYPES, SCORES, MERGES, TEMPLATE, TEMPLATE + "s", *ADD.values()),
        *(ID.format(IDS[role]) for role in ("bos", "eos", "pad", "unk", "sep", "mask")),
        *("tokenizer.ggml.token_type_count", "tokenizer.ggml.precompiled_charsmap"),
        *("tokenizer.ggml.add_space_prefix", "tokenizer.ggml.remove_extra_whitespaces"),
    )
)
"""Keys of a tokenizer that ``tokenizer.json`` and ``tokenizer_config.json`` are made of; templates with a name too."""


def text_of(token: Any) -> str | None:
    """Return the text of a token, which files have plainly or with what else is known of it."""
    found = token.get("content") if isinstance(token, Mapping) else token
    return found if isinstance(found, str) else None


def added_tokens(settings: Mapping[str, Any], added: Mapping[str, Any]) -> Iterator[tuple[int, str, bool]]:
    """Yield id, text and whether it is special of each token beside the vocabulary.

    Parameters
    ----------
    settings, added : mapping
        ``tokenizer_config.json``, whose ``added_tokens_decoder`` counts, and ``added_tokens.json``.
    """
    for text, number in added.items():
        if type(number) is int and 0 <= number < MOST:
            yield number, text, False
    for number, token in stated_tokens(settings).items():
        yield number, token["content"], token.get("special") is True


def stated_tokens(settings: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    """Return ``added_tokens_decoder`` of ``tokenizer_config.json`` by ids, less what is no token."""
    found = settings.get("added_tokens_decoder")
    tokens = found.items() if isinstance(found, Mapping) else ()
    return {
        int(number): token
        for number, token in tokens
        if number.isascii() and number.isdigit() and len(number) < 8 and isinstance(token, Mapping)
        and isinstance(token.get("content"), str) and int(number) < MOST
    }  # fmt: skip
