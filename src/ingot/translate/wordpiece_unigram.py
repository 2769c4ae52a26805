"""Conversion of WordPiece (llama.cpp's ``bert``) and SentencePiece's Unigram (``t5``) tokenizers, in both
directions.
"""

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
"""SentencePiece's mark of a space. llama.cpp puts it before a word's first token, WordPiece ``##`` before all others.
"""
_MORE = "##"
_MAX_WORD = 100  # characters of a word that WordPiece splits
CHARSMAP, PREFIX, SPACES = (
    f"tokenizer.ggml.{key}" for key in ("precompiled_charsmap", "add_space_prefix", "remove_extra_whitespaces")
)
LOWERCASE, STRIP_ACCENTS = (f"tokenizer.ggml.normalizer.{key}" for key in ("lowercase", "strip_accents"))
_AROUND = {"type": "Replace", "pattern": {"Regex": r"\A +| +\z"}, "content": ""}
_BETWEEN = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
"""Steps that remove spaces around a text and repeated spaces, as llama.cpp does."""
_WHITESPACE_SPLIT = {"type": "WhitespaceSplit"}
BYTE_FALLBACK_DROPPED = "bytes of characters without a token: for Unigram llama.cpp has one token for all of them"

NO_PREFIX_DROPPED = "the beginning of a text without a space: llama.cpp adds one if it removes spaces"


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

    llama.cpp always splits words as BERT does, and marks the beginning of words.
    """
    model = tokenizer["model"]
    differences = list[str]()
    normalizer = tokenizer.get("normalizer")
    pre_tokenizer = tokenizer.get("pre_tokenizer")
    normalizer = normalizer if isinstance(normalizer, Mapping) else {}
    if normalizer.get("type") != "BertNormalizer":
        differences.append("a normalizer that is not BERT's")
    differences += [f"{key} False" for key in ("clean_text", "handle_chinese_chars") if normalizer.get(key) is False]
    if not isinstance(pre_tokenizer, Mapping) or pre_tokenizer.get("type") != "BertPreTokenizer":
        differences.append("a pre-tokenizer that is not BERT's")
    if model.get("continuing_subword_prefix", _MORE) != _MORE or any(
        from_gguf_token(to_gguf_token(text)) != text for text in texts
    ):
        differences.append("tokens that llama.cpp's mark of a word's beginning does not tell apart")
    return differences


def case_metadata(tokenizer: Mapping[str, Any]) -> Typed:
    """Return GGUF metadata of a WordPiece tokenizer that preserves upper case or accents, unlike llama.cpp's
    default.
    """
    normalizer = tokenizer.get("normalizer")
    normalizer = normalizer if isinstance(normalizer, Mapping) else {}
    lowers = normalizer.get("type") == "BertNormalizer" and normalizer.get("lowercase") is True
    strips = normalizer.get("strip_accents")
    metadata: Typed = {} if lowers else {LOWERCASE: ("bool", False)}
    return metadata | ({STRIP_ACCENTS: ("bool", strips)} if isinstance(strips, bool) and strips != lowers else {})


def wordpiece(metadata: Mapping[str, Any], vocab: Mapping[str, int], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the WordPiece fields of ``tokenizer.json``, with BERT's splitting of words."""
    lowers = metadata.get(LOWERCASE, True) is not False
    strips = metadata.get(STRIP_ACCENTS)
    strips = strips if isinstance(strips, bool) and strips != lowers else None  # None is the value of lowercase
    return {
        "normalizer": {
            "type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": strips,
            "lowercase": lowers,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": WORDPIECE, "prefix": _MORE, "cleanup": True},
        "model": {
            "type": WORDPIECE, "unk_token": settings.get("unk_token", "[UNK]"), "continuing_subword_prefix": _MORE,
            "max_input_chars_per_word": _MAX_WORD, "vocab": dict(vocab),
        },
    }  # fmt: skip


def unigram_metadata(tokenizer: Mapping[str, Any], types: Sequence[int]) -> tuple[Typed, list[str]]:
    """Return the metadata of a Unigram tokenizer without its tokens, and descriptions of settings that GGUF cannot
    store.

    ``types`` are the GGUF types of all tokens; the tokenizer's own vocabulary may be smaller.
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
        elif step.get("type") == "Replace" and step.get("pattern") == _BETWEEN["pattern"]:
            squeezes_spaces = True
        elif step != _AROUND and step.get("type") not in ("Strip", "Prepend"):
            dropped.append(f"the normalizer {str(step.get('type'))[:40]}")
    steps = steps_of(tokenizer.get("pre_tokenizer"), "pretokenizers")
    last = steps[-1] if steps else {}
    if (
        last.get("type") != "Metaspace"
        or last.get("replacement") != SPACE
        or steps[:-1] not in ([], [_WHITESPACE_SPLIT])
    ):
        dropped.append("a pre-tokenizer that is not SentencePiece's")
    splits_words = steps[:-1] == [_WHITESPACE_SPLIT]
    strips = {"Strip"} & {str(step.get("type")) for step in steps_of(tokenizer.get("normalizer"), "normalizers")}
    if strips and not (squeezes_spaces or splits_words):
        dropped.append("the normalizer Strip")
    if splits_words and not table:
        dropped.append("tabs and line ends as spaces")
    if table:
        try:
            metadata[CHARSMAP] = ("array:u8", list(base64.b64decode(table, validate=True)))
        except (binascii.Error, ValueError):
            dropped.append("a table of characters that is no base64")
    prepends = any(step.get("type") == "Prepend" for step in steps_of(tokenizer.get("normalizer"), "normalizers"))
    metadata[PREFIX] = ("bool", prepends or last.get("prepend_scheme", "always") != "never")
    metadata[SPACES] = ("bool", squeezes_spaces or splits_words)
    if metadata[SPACES][1] and not metadata[PREFIX][1]:
        dropped.append(NO_PREFIX_DROPPED)
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
    normalizers: list[dict[str, Any]] = []
    if isinstance(table, list) and table and all(type(byte) is int and -128 <= byte < 256 for byte in table):
        text = base64.b64encode(bytes(byte & 255 for byte in table)).decode()
        normalizers.append({"type": "Precompiled", "precompiled_charsmap": text})
    squeezes_spaces = metadata.get(SPACES) is True
    normalizers += [_AROUND, _BETWEEN] if squeezes_spaces else []
    # llama.cpp puts a space before a text also if it removes spaces
    prefix = squeezes_spaces or metadata.get(PREFIX, True) is not False
    normalizers += [{"type": "Prepend", "prepend": SPACE}] if prefix else []
    splits = not any(SPACE in text[1:] for text in texts)  # no token begins in one word and ends in another
    space = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "never", "split": splits}
    sequence = {"type": "Sequence", "normalizers": normalizers}
    return {
        "normalizer": sequence if len(normalizers) > 1 else normalizers[0] if normalizers else None,
        "pre_tokenizer": space,
        "decoder": {**space, "prepend_scheme": "always"} if prefix else space,
        "model": {
            "type": UNIGRAM, "unk_id": unknown, "byte_fallback": any(text == "<0x00>" for text in texts),
            "vocab": [[text, float(score)] for text, score in zip(texts, scores, strict=True)],
        },
    }  # fmt: skip


def steps_of(value: Any, key: str) -> list[Mapping[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer, which is a single step or a list of steps under ``key``."""
    steps = value.get(key, [value]) if isinstance(value, Mapping) else []
    return [step for step in steps if isinstance(step, Mapping)] if isinstance(steps, list) else []
