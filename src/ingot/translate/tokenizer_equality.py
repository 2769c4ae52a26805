"""Comparison of an original ``tokenizer.json`` with the one that Ingot rebuilds from GGUF metadata.

Both files are compared section by section. Differences without effect are ignored: defaults that a file may omit,
sequences of one step, and steps that change nothing. No package is needed, so equal folders give equal GGUF files on
every installation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ingot.errors import UnsupportedError
from ingot.translate import keys, pretokenizers, tokenizer
from ingot.translate.pretokenizers import byte_characters
from ingot.translate.wordpiece_unigram import UNIGRAM, WORDPIECE

_BYTE_LEVEL = "ByteLevel"
_MEMBERS = ("normalizers", "pretokenizers", "processors", "decoders")
_SECTIONS = ("added_tokens", "normalizer", "pre_tokenizer", "post_processor", "decoder", "model")
_AFFIXES: Mapping[str, Any] = {"continuing_subword_prefix": None, "end_of_word_suffix": None}
_UNKNOWNS: Mapping[str, Any] = {"unk_token": None, "fuse_unk": False}
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "BPE": {"dropout": None, "byte_fallback": False, "ignore_merges": False, **_AFFIXES, **_UNKNOWNS},
    WORDPIECE: {"unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100},
    UNIGRAM: {"unk_id": None, "byte_fallback": False},
}
"""Keys of a model that a file may leave out, by type."""
_FLAGS = ("single_word", "lstrip", "rstrip", "special")
_MAX_DEPTH = 8


def why_not_rebuilt(original: Mapping[str, Any], settings: Mapping[str, Any], typed: keys.Typed) -> str:
    """Return why a tokenizer that is rebuilt from GGUF metadata would differ; empty if it would not.

    Parameters
    ----------
    original : mapping
        ``tokenizer.json``.
    settings : mapping
        ``tokenizer_config.json``, which the GGUF file contains unchanged.
    typed : dict
        GGUF metadata of the original, with their types.
    """
    if not settings:
        return "there is no tokenizer_config.json"
    unstated = [key for key, value in original.items() if key not in (*_SECTIONS, "version") and value is not None]
    if unstated:
        return f"GGUF has no key for its {', '.join(unstated)[:80]}"
    metadata = {key: value for key, (_, value) in typed.items()}
    if keys.SCORES in metadata:
        metadata[keys.SCORES] = np.asarray(metadata[keys.SCORES], np.float32).tolist()
    try:
        files, _ = tokenizer.to_files(metadata, settings)
    except UnsupportedError as error:
        return error.message.partition(";")[0]
    if "tokenizer.json" not in files:
        return "the GGUF file has no tokenizer"
    rebuilt = files["tokenizer.json"]
    different = [name for name, canonical in _CANONICAL.items() if canonical(original) != canonical(rebuilt)]
    return f"GGUF's keys give another {' and '.join(different)}" if different else ""


def _steps(section: Any, depth: int = _MAX_DEPTH) -> list[Any]:
    """Return the steps of a section in order, with nested sequences flattened."""
    if not isinstance(section, Mapping) or section.get("type") != "Sequence" or depth == 0:
        return [] if section is None else [section]
    members = next((section[key] for key in _MEMBERS if key in section), None)
    return (
        [step for member in members for step in _steps(member, depth - 1)] if isinstance(members, list) else [section]
    )


def _type(step: Any) -> Any:
    return step.get("type") if isinstance(step, Mapping) else None


def _normalizer(file: Mapping[str, Any]) -> list[Any]:
    return _steps(file.get("normalizer"))


def _pre_tokenizer(file: Mapping[str, Any]) -> list[Any]:
    """Return the steps of the pre-tokenizer in comparable form.

    A split at a fixed text is omitted if the last normalizer replaces that text, because the split then never applies.
    """
    steps = _steps(file.get("pre_tokenizer"))
    last = (_normalizer(file) or [None])[-1]
    if _type(last) == "Replace":
        text = _text_pattern(last)
        if text and text not in str(last.get("content")):
            steps = [step for step in steps if not (_type(step) == "Split" and _text_pattern(step) == text)]
    return pretokenizers.normalized_steps({"pretokenizers": steps})


def _text_pattern(step: Mapping[str, Any]) -> str | None:
    pattern = step.get("pattern")
    text = pattern.get("String") if isinstance(pattern, Mapping) else None
    return text if isinstance(text, str) else None


def _post_processor(file: Mapping[str, Any]) -> list[Any]:
    """Return the steps of the post-processor that add a token or change an offset."""
    first, second = ({"Sequence": {"id": name, "type_id": index}} for index, name in enumerate("AB"))
    inert = ("TemplateProcessing", [first], [first, second])
    return [
        step
        for step in _steps(file.get("post_processor"))
        if not (_type(step) == _BYTE_LEVEL and step.get("trim_offsets") is False)
        and not (_type(step) == inert[0] and (inert[0], step.get("single"), step.get("pair")) == inert)
    ]


def _decoder(file: Mapping[str, Any]) -> list[Any]:
    """Return the steps of the decoder, without settings of ``ByteLevel``, which have no effect."""
    return [_BYTE_LEVEL if _type(step) == _BYTE_LEVEL else step for step in _steps(file.get("decoder"))]


def _added_tokens(file: Mapping[str, Any]) -> Any:
    """Return the id, text and flags of the added tokens, by id.

    Without a normalizer, the flag ``normalized`` only divides the tokens into two groups.
    """
    tokens = file.get("added_tokens") or []
    if not isinstance(tokens, list) or not all(
        isinstance(token, Mapping) and type(token.get("id")) is int for token in tokens
    ):
        return None
    normalized = [token.get("normalized") is True for token in tokens]
    if not _normalizer(file) and len(set(normalized)) == 1:
        normalized = [False] * len(tokens)
    flags = [tuple(token.get(flag) is True for flag in _FLAGS) for token in tokens]
    entries = zip(tokens, flags, normalized, strict=True)
    return sorted((token["id"], str(token.get("content")), *group, flag) for token, group, flag in entries)


def _model(file: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model with its defaults, and the added tokens that it cannot produce itself.

    If the vocabulary contains all bytes, settings for unknown characters have no effect and are omitted.
    """
    declared = file.get("model")
    declared = declared if isinstance(declared, Mapping) else {}
    model = {**_DEFAULTS.get(str(declared.get("type")), {}), **declared}
    model |= {key: model[key] or None for key in _AFFIXES if key in model and declared.get("type") == "BPE"}
    if isinstance(model.get("merges"), list):
        model["merges"] = tokenizer.pairs_of(model["merges"])
    vocab = model.get("vocab")
    if declared.get("type") == "BPE" and isinstance(vocab, Mapping):
        model["vocab"] = {**_unreachable(file, ignore_merges=model["ignore_merges"] is not False), **vocab}
    splits_bytes = (_BYTE_LEVEL, False) in _pre_tokenizer(file)
    if splits_bytes and isinstance(vocab, Mapping) and all(character in vocab for character in byte_characters()):
        model |= _UNKNOWNS
    return model


def _unreachable(file: Mapping[str, Any], *, ignore_merges: bool) -> dict[str, int]:
    """Return the ids of added tokens that a BPE would never produce from the vocabulary.

    A text of several characters needs merges. With ``ignore_merges``, a word that is a token needs none; but a word in
    ASCII that equals an added token was split off before.
    """
    return {
        text: token_id
        for token_id, text, single_word, *_ in _added_tokens(file) or ()
        if len(text) > 1 and (not ignore_merges or (text.isascii() and not single_word))
    }


_CANONICAL: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "normalizer": _normalizer,
    "pre_tokenizer": _pre_tokenizer,
    "post_processor": _post_processor,
    "decoder": _decoder,
    "added_tokens": _added_tokens,
    "model": _model,
}
