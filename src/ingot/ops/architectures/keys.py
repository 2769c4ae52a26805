"""GGUF's keys and types of tokens, and what ``tokenizer_config.json`` says of special ones.

Types are llama.cpp's (``llama-vocab.cpp``), which are SentencePiece's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Typed = dict[str, tuple[str, Any]]

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)
MODEL, PRE, TOKENS, TYPES = (f"tokenizer.ggml.{key}" for key in ("model", "pre", "tokens", "token_type"))
SCORES, MERGES, ADD_BOS, ADD_EOS = (
    f"tokenizer.ggml.{key}" for key in ("scores", "merges", "add_bos_token", "add_eos_token")
)
TEMPLATE, ID = "tokenizer.chat_template", "tokenizer.ggml.{}_token_id"
BPE, SPM = "gpt2", "llama"
MOST = 1 << 22  # tokens
IDS = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown", "sep": "seperator", "mask": "mask"}
"""Of ``tokenizer_config.json``, of llama.cpp, whose spelling this is."""


def text_of(token: Any) -> str | None:
    """Return the text of a token, which files have plainly or with what else is known of it."""
    found = token.get("content") if isinstance(token, Mapping) else token
    return found if isinstance(found, str) else None


def settings_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of the special tokens that ``tokenizer_config.json`` names."""
    texts = {key: text_of(settings.get(f"{key}_token")) for key in (*IDS, "cls")}
    return {key: text for key, text in texts.items() if text is not None}


def ids_of(tokens: Mapping[str, str], names: Mapping[str, str], texts: Sequence[str]) -> Typed:
    """Return the ids of special tokens under GGUF's keys, of those that are among ``texts``."""
    place = {text: number for number, text in reversed(list(enumerate(texts)))}
    return {
        ID.format(name): ("u32", place[tokens[key]])
        for key, name in names.items()
        if key in tokens and tokens[key] in place
    }


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
