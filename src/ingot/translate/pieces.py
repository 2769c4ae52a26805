"""Tokenizers that are no BPE: WordPiece (llama.cpp's ``bert``) and SentencePiece's Unigram (``t5``), both ways."""

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
"""SentencePiece's mark of a space; what llama.cpp has before the beginning of a word, instead of ``##`` behind it."""
_MORE = "##"
_LONGEST = 100  # characters of a word that WordPiece looks at
CHARSMAP, PREFIX, SPACES = (
    f"tokenizer.ggml.{key}" for key in ("precompiled_charsmap", "add_space_prefix", "remove_extra_whitespaces")
)
_CUT = {"type": "WhitespaceSplit"}
BYTES_LOST = "bytes of characters without a token: for Unigram llama.cpp has one token for all of them"


def marked(text: str) -> str:
    """Return a token of WordPiece as llama.cpp has it."""
    if text.startswith("[") and text.endswith("]"):
        return text
    return text.removeprefix(_MORE) if text.startswith(_MORE) else SPACE + text


def unmarked(text: str) -> str:
    """Undo ``marked``."""
    if text.startswith(SPACE):
        return text.removeprefix(SPACE)
    return text if text.startswith("[") and text.endswith("]") else _MORE + text


def wordpiece_lost(tokenizer: Mapping[str, Any], texts: Sequence[str]) -> list[str]:
    """Return what of a WordPiece llama.cpp does otherwise: it lowers case and drops accents."""
    model = tokenizer["model"]
    lost = list[str]()
    normalizer = tokenizer.get("normalizer")
    pre = tokenizer.get("pre_tokenizer")
    normalizer = normalizer if isinstance(normalizer, Mapping) else {}
    if normalizer.get("type") != "BertNormalizer" or normalizer.get("lowercase") is not True:
        lost.append("a normalizer that keeps upper case, or is not BERT's")
    if not isinstance(pre, Mapping) or pre.get("type") != "BertPreTokenizer":
        lost.append("a pre-tokenizer that is not BERT's")
    if model.get("continuing_subword_prefix", _MORE) != _MORE or any(unmarked(marked(text)) != text for text in texts):
        lost.append("tokens that llama.cpp's mark of a word's beginning does not tell apart")
    return lost


def wordpiece(vocab: Mapping[str, int], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return what ``tokenizer.json`` has of a WordPiece, as BERT cuts words."""
    return {
        "normalizer": {
            "type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None,
            "lowercase": True,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": WORDPIECE, "prefix": _MORE, "cleanup": True},
        "model": {
            "type": WORDPIECE, "unk_token": settings.get("unk_token", "[UNK]"), "continuing_subword_prefix": _MORE,
            "max_input_chars_per_word": _LONGEST, "vocab": dict(vocab),
        },
    }  # fmt: skip


def unigram_to(tokenizer: Mapping[str, Any], types: Sequence[int]) -> tuple[Typed, list[str]]:
    """Return the metadata of a Unigram beside its tokens of these types, and what of it llama.cpp has no word for."""
    pieces = tokenizer["model"]["vocab"]
    lost = list[str]()
    scores = [float(score) for _, score in pieces[: len(types)]]
    scores += [PAD_SCORE if kind == UNUSED else 0.0 for kind in types[len(scores) :]]
    found: Typed = {"tokenizer.ggml.scores": ("array:f32", scores)}
    steps = steps_of(tokenizer.get("normalizer"), "normalizers")
    table = None
    spaces = False
    for step in steps:
        if step.get("type") == "Precompiled" and isinstance(step.get("precompiled_charsmap"), str) and table is None:
            table = step["precompiled_charsmap"]
        elif step.get("type") == "Replace" and step.get("pattern") == {"Regex": " {2,}"}:
            spaces = True
        else:
            lost.append(f"the normalizer {str(step.get('type'))[:40]}")
    steps = steps_of(tokenizer.get("pre_tokenizer"), "pretokenizers")
    last = steps[-1] if steps else {}
    if last.get("type") != "Metaspace" or last.get("replacement") != SPACE or steps[:-1] not in ([], [_CUT]):
        lost.append("a pre-tokenizer that is not SentencePiece's")
    if table:
        try:
            found[CHARSMAP] = ("array:u8", list(base64.b64decode(table, validate=True)))
        except (binascii.Error, ValueError):
            lost.append("a table of characters that is no base64")
    found[PREFIX] = ("bool", last.get("prepend_scheme", "always") != "never")
    found[SPACES] = ("bool", spaces or steps[:-1] == [_CUT])
    lost += [BYTES_LOST] if tokenizer["model"].get("byte_fallback") is True else []
    return found, lost


def are_scores(found: Any) -> bool:
    """Whether this is a list of finite numbers."""
    return isinstance(found, list) and all(isinstance(score, int | float) and isfinite(score) for score in found)


def unigram(metadata: Mapping[str, Any], texts: Sequence[str], unknown: int | None) -> dict[str, Any]:
    """Return what ``tokenizer.json`` has of a Unigram."""
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
    cut = metadata.get(SPACES) is True
    return {
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [_CUT, space]} if cut else space,
        "decoder": space,
        "model": {
            "type": UNIGRAM, "unk_id": unknown, "byte_fallback": any(text == "<0x00>" for text in texts),
            "vocab": [[text, float(score)] for text, score in zip(texts, scores, strict=True)],
        },
    }  # fmt: skip


def steps_of(found: Any, key: str) -> list[Mapping[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer, which is one or has several under ``key``."""
    steps = found.get(key, [found]) if isinstance(found, Mapping) else []
    return [step for step in steps if isinstance(step, Mapping)] if isinstance(steps, list) else []
