"""Convert WordPiece (llama.cpp's ``bert``) and SentencePiece's Unigram (``t5``) tokenizers, both ways."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from ingot.translate.keys import UNUSED, Typed
from ingot.translate.vocabulary import PAD_SCORE

WPM = "bert"
UGM = "t5"
WORDPIECE = "WordPiece"
UNIGRAM = "Unigram"
SPACE = "\u2581"
"""SentencePiece's mark of a space. llama.cpp puts it before a word's first token, WordPiece ``##`` before the rest."""
_MORE = "##"
_MAX_WORD = 100  # characters of a word that WordPiece splits
CHARSMAP, PREFIX, SPACES = (
    f"tokenizer.ggml.{key}" for key in ("precompiled_charsmap", "add_space_prefix", "remove_extra_whitespaces")
)
_WHITESPACE_SPLIT = {"type": "WhitespaceSplit"}
BYTE_FALLBACK_DROPPED = "bytes of characters without a token: for Unigram llama.cpp has one token for all of them"


def to_gguf_token(text: str) -> str:
    """Return llama.cpp's spelling of a WordPiece token."""
    if text.startswith("[") and text.endswith("]"):
        return text
    return text.removeprefix(_MORE) if text.startswith(_MORE) else SPACE + text


def from_gguf_token(text: str) -> str:
    """Undo ``to_gguf_token``."""
    if text.startswith(SPACE):
        return text.removeprefix(SPACE)
    return text if text.startswith("[") and text.endswith("]") else _MORE + text


def wordpiece_differences(tokenizer: Mapping[str, Any], texts: Sequence[str]) -> list[str]:
    """Return notes on properties of a WordPiece tokenizer that llama.cpp ignores.

    llama.cpp always lowers case, drops accents, splits words as BERT does, and marks the beginning of words.
    """
    model = tokenizer["model"]
    differences = list[str]()
    normalizer = tokenizer.get("normalizer")
    pre_tokenizer = tokenizer.get("pre_tokenizer")
    normalizer = normalizer if isinstance(normalizer, Mapping) else {}
    if normalizer.get("type") != "BertNormalizer" or normalizer.get("lowercase") is not True:
        differences.append("a normalizer that keeps upper case, or is not BERT's")
    if not isinstance(pre_tokenizer, Mapping) or pre_tokenizer.get("type") != "BertPreTokenizer":
        differences.append("a pre-tokenizer that is not BERT's")
    if model.get("continuing_subword_prefix", _MORE) != _MORE or any(
        from_gguf_token(to_gguf_token(text)) != text for text in texts
    ):
        differences.append("tokens that llama.cpp's mark of a word's beginning does not tell apart")
    return differences


def wordpiece(vocab: Mapping[str, int], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the WordPiece fields of ``tokenizer.json``, with BERT's splitting of words."""
    return {
        "normalizer": {
            "type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None,
            "lowercase": True,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": WORDPIECE, "prefix": _MORE, "cleanup": True},
        "model": {
            "type": WORDPIECE, "unk_token": settings.get("unk_token", "[UNK]"), "continuing_subword_prefix": _MORE,
            "max_input_chars_per_word": _MAX_WORD, "vocab": dict(vocab),
        },
    }  # fmt: skip


def unigram_metadata(tokenizer: Mapping[str, Any], types: Sequence[int]) -> tuple[Typed, list[str]]:
    """Return the metadata of a Unigram tokenizer without its tokens, and descriptions of what GGUF cannot hold.

    ``types`` are the GGUF types of the tokens, of which the tokenizer's vocabulary may have fewer.
    """
    vocab = tokenizer["model"]["vocab"]
    dropped = list[str]()
    scores = [float(score) for _, score in vocab[: len(types)]]
    scores += [PAD_SCORE if token_type == UNUSED else 0.0 for token_type in types[len(scores) :]]
    metadata: Typed = {"tokenizer.ggml.scores": ("array:f32", scores)}
    steps = steps_of(tokenizer.get("normalizer"), "normalizers")
    table = None
    squeezes_spaces = False
    for step in steps:
        if step.get("type") == "Precompiled" and isinstance(step.get("precompiled_charsmap"), str) and table is None:
            table = step["precompiled_charsmap"]
        elif step.get("type") == "Replace" and step.get("pattern") == {"Regex": " {2,}"}:
            squeezes_spaces = True
        else:
            dropped.append(f"the normalizer {str(step.get('type'))[:40]}")
    steps = steps_of(tokenizer.get("pre_tokenizer"), "pretokenizers")
    last = steps[-1] if steps else {}
    if (
        last.get("type") != "Metaspace"
        or last.get("replacement") != SPACE
        or steps[:-1] not in ([], [_WHITESPACE_SPLIT])
    ):
        dropped.append("a pre-tokenizer that is not SentencePiece's")
    if table:
        try:
            metadata[CHARSMAP] = ("array:u8", list(base64.b64decode(table, validate=True)))
        except (binascii.Error, ValueError):
            dropped.append("a table of characters that is no base64")
    metadata[PREFIX] = ("bool", last.get("prepend_scheme", "always") != "never")
    metadata[SPACES] = ("bool", squeezes_spaces or steps[:-1] == [_WHITESPACE_SPLIT])
    dropped += [BYTE_FALLBACK_DROPPED] if tokenizer["model"].get("byte_fallback") is True else []
    return metadata, dropped


def are_scores(value: Any) -> bool:
    """Return whether a value is a list of finite numbers."""
    return isinstance(value, list) and all(isinstance(score, int | float) and isfinite(score) for score in value)


def unigram(metadata: Mapping[str, Any], texts: Sequence[str], unknown: int | None) -> dict[str, Any]:
    """Return the Unigram fields of ``tokenizer.json``."""
    scores: Any = metadata.get("tokenizer.ggml.scores")
    if not are_scores(scores) or len(scores) != len(texts):
        scores = [0.0] * len(texts)
    table = metadata.get(CHARSMAP)
    normalizer = None
    if isinstance(table, list) and table and all(type(byte) is int and -128 <= byte < 256 for byte in table):
        text = base64.b64encode(bytes(byte & 255 for byte in table)).decode()
        normalizer = {"type": "Precompiled", "precompiled_charsmap": text}
    scheme = "always" if metadata.get(PREFIX, True) is not False else "never"
    space = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": scheme, "split": True}
    squeezes_spaces = metadata.get(SPACES) is True
    squeezing = {"type": "Sequence", "pretokenizers": [_WHITESPACE_SPLIT, space]}
    return {
        "normalizer": normalizer,
        "pre_tokenizer": squeezing if squeezes_spaces else space,
        "decoder": space,
        "model": {
            "type": UNIGRAM, "unk_id": unknown, "byte_fallback": any(text == "<0x00>" for text in texts),
            "vocab": [[text, float(score)] for text, score in zip(texts, scores, strict=True)],
        },
    }  # fmt: skip


def steps_of(value: Any, key: str) -> list[Mapping[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer, which is a single step or a list of steps under ``key``."""
    steps = value.get(key, [value]) if isinstance(value, Mapping) else []
    return [step for step in steps if isinstance(step, Mapping)] if isinstance(steps, list) else []
