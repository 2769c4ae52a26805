"""GGUF's keys and token types, and readers of special tokens in ``tokenizer_config.json``.

Token types are those of llama.cpp (``llama-vocab.cpp``) and SentencePiece.
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
"""Values of ``tokenizer.ggml.model`` in a file without a tokenizer."""
TEMPLATE = "tokenizer.chat_template"
ID = "tokenizer.ggml.{}_token_id"
BPE = "gpt2"
GEMMA4 = "gemma4"
SPM = "llama"
MAX_TOKENS = 1 << 22
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
"""Roles of special tokens, and llama.cpp's names for them (``seperator`` is its spelling)."""

READ = frozenset(
    (
        *(MODEL, PRE, TOKENS, TYPES, SCORES, MERGES, TEMPLATE, TEMPLATE + "s", *ADD.values()),
        *(ID.format(IDS[role]) for role in ("bos", "eos", "pad", "unk", "sep", "mask")),
        *("tokenizer.ggml.token_type_count", "tokenizer.ggml.precompiled_charsmap"),
        *("tokenizer.ggml.add_space_prefix", "tokenizer.ggml.remove_extra_whitespaces"),
        *("tokenizer.ggml.normalizer.lowercase", "tokenizer.ggml.normalizer.strip_accents"),
    )
)
"""Tokenizer keys that ``tokenizer.json`` and ``tokenizer_config.json`` are built from, named templates included."""


def text_of(token: Any) -> str | None:
    """Return the text of a token, which JSON contains as a string or as an object; None for any other value."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else None


def added_tokens(settings: Mapping[str, Any], added: Mapping[str, Any]) -> Iterator[tuple[int, str, bool]]:
    """Yield the id, the text and the flag "special" of each token outside of the vocabulary.

    Parameters
    ----------
    settings, added : mapping
        ``tokenizer_config.json``, whose ``added_tokens_decoder`` takes precedence, and ``added_tokens.json``.
    """
    for text, token_id in added.items():
        if type(token_id) is int and 0 <= token_id < MAX_TOKENS:
            yield token_id, text, False
    for token_id, token in added_tokens_decoder(settings).items():
        yield token_id, token["content"], token.get("special") is True


def added_tokens_decoder(settings: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    """Return ``added_tokens_decoder`` of ``tokenizer_config.json`` by id, without malformed entries."""
    entries = settings.get("added_tokens_decoder")
    tokens = entries.items() if isinstance(entries, Mapping) else ()
    return {
        int(token_id): token
        for token_id, token in tokens
        if token_id.isascii() and token_id.isdigit() and len(token_id) < 8 and isinstance(token, Mapping)
        and isinstance(token.get("content"), str) and int(token_id) < MAX_TOKENS
    }  # fmt: skip
