"""Identification of the pre-tokenizer of a byte-level BPE, by its steps or by how it splits probe texts.

The probe texts are in more than 20 languages, and contain code, numbers, spaces and emoji. The package ``tokenizers``
splits them; the package is needed only for steps that ``pretokenizers`` does not list.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import Any, NamedTuple

from ingot.core.border import require
from ingot.errors import MissingExtraError
from ingot.translate import pretokenizers
from ingot.translate.pretokenizers import Match, Steps, byte_characters
from ingot.translate.wordpiece_unigram import steps_of

_EXTRA = "transformers"
_UNICODE_FORMS = frozenset(("NFC", "NFD", "NFKC", "NFKD"))
_SHOWN = 40
_NOT_INSTALLED = (
    "its pre-tokenizer is not in Ingot's table, and the package tokenizers, which compares its words with llama.cpp's, "
    "is not installed (pip install tokenizers)"
)
TEXTS: Sequence[str] = json.loads(resources.files("ingot.translate").joinpath("probe_texts.json").read_bytes())


class Identified(NamedTuple):
    """The result of the identification.

    Parameters
    ----------
    match : Match or None
        llama.cpp's name; None if no pre-tokenizer of llama.cpp gives the same tokens.
    reason : str
        Why there is no name.
    """

    match: Match | None
    reason: str = ""


def identify(tokenizer: Mapping[str, Any]) -> Identified:
    """Return llama.cpp's name for the pre-tokenizer in a ``tokenizer.json`` with a byte-level BPE."""
    ignore_merges = tokenizer["model"].get("ignore_merges") is True
    if not other_normalizers(tokenizer):
        match = pretokenizers.match_steps(tokenizer.get("pre_tokenizer"), ignore_merges=ignore_merges)
        if match is not None:
            return Identified(match)
    try:
        library = require("tokenizers", _EXTRA)
    except MissingExtraError:
        return Identified(None, _NOT_INSTALLED)
    try:
        return _identify_by_words(library, tokenizer, ignore_merges=ignore_merges)
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # tokenizers raises Exception, and its panics derive from BaseException only
        return Identified(None, f"the package tokenizers does not read its pre-tokenizer: {str(error)[:120]}")


def unicode_forms(tokenizer: Mapping[str, Any]) -> list[str]:
    """Return the Unicode normalization forms that a tokenizer applies, for example NFC. llama.cpp applies none."""
    return [name for name in _normalizers(tokenizer) if name in _UNICODE_FORMS]


def other_normalizers(tokenizer: Mapping[str, Any]) -> list[str]:
    """Return the types of a tokenizer's normalizers that are not Unicode normalization forms."""
    return [name for name in _normalizers(tokenizer) if name not in _UNICODE_FORMS]


def _normalizers(tokenizer: Mapping[str, Any]) -> list[str]:
    return [str(step.get("type")) for step in steps_of(tokenizer.get("normalizer"), "normalizers")]


def _identify_by_words(library: Any, tokenizer: Mapping[str, Any], *, ignore_merges: bool) -> Identified:
    """Return llama.cpp's name that splits the probe texts into the same words; if none does, compare tokens."""
    source = _splitter(library, tokenizer.get("normalizer"), tokenizer.get("pre_tokenizer"))
    texts = list(TEXTS)
    if source.normalizer is not None:
        normalized = [source.normalizer.normalize_str(text) for text in texts]
        if not other_normalizers(tokenizer):
            texts = normalized
    else:
        normalized = texts
    expected = [_words(source, text) for text in normalized]
    closest = ("", "", len(texts) + 1)
    for match, splits in pretokenizers.candidates(ignore_merges=ignore_merges):
        candidate = _splitter(library, None, pretokenizers.pre_tokenizer(Steps(splits)))
        words = [_words(candidate, text) for text in texts]
        if words == expected:
            return Identified(match)
        different = [text for text, *pair in zip(texts, words, expected, strict=True) if pair[0] != pair[1]]
        if len(different) < closest[2]:
            closest = (match.name, different[0], len(different))
    same_tokens = _match_tokens(library, tokenizer, texts, ignore_merges=ignore_merges)
    name, text, count = closest
    return Identified(same_tokens, "" if same_tokens else (
        f"no pre-tokenizer of llama.cpp splits text as its does; {name} is closest, and splits {count} of "
        f"{len(texts)} probe texts differently, for example {text[:_SHOWN]!r}"
    ))  # fmt: skip


def _splitter(library: Any, normalizer: Any, pre_tokenizer: Any) -> Any:
    """Return a tokenizer without a vocabulary, which only normalizes and splits text."""
    empty = {"type": "BPE", "vocab": {}, "merges": []}
    parts = {"added_tokens": [], "normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "model": empty}
    none = dict.fromkeys(("truncation", "padding", "post_processor", "decoder"))
    return library.Tokenizer.from_str(json.dumps({"version": "1.0", **none, **parts}))


def _words(splitter: Any, text: str) -> list[str]:
    if splitter.pre_tokenizer is None:
        return [text]
    return [word for word, _ in splitter.pre_tokenizer.pre_tokenize_str(text)]


def _match_tokens(library: Any, tokenizer: Mapping[str, Any], texts: list[str], *, ignore_merges: bool) -> Match | None:
    """Return llama.cpp's name that splits words differently but gives the same tokens; None if there is none.

    The compared texts are ``texts`` and the text of each token.
    """
    merged = library.Tokenizer.from_str(json.dumps(tokenizer))
    source = (merged.normalizer, merged.pre_tokenizer)
    expected = _ids(merged, source, texts)
    characters = {character: byte for byte, character in enumerate(byte_characters())}
    vocab = [
        bytes(characters[character] for character in token).decode(errors="ignore")
        for token in tokenizer["model"]["vocab"]
        if all(character in characters for character in token)
    ]
    expected_of_vocab: list[list[int]] = []
    for match, splits in pretokenizers.candidates(ignore_merges=ignore_merges):
        if match.difference:
            continue
        candidate = (None, _splitter(library, None, pretokenizers.pre_tokenizer(Steps(splits))).pre_tokenizer)
        if _ids(merged, candidate, texts) != expected:
            continue
        expected_of_vocab = expected_of_vocab or _ids(merged, source, vocab)
        if _ids(merged, candidate, vocab) == expected_of_vocab:
            return Match(match.name, f"other words, which have the same tokens ({len(texts)} probe texts, all tokens)")
    return None


def _ids(tokenizer: Any, steps: tuple[Any, Any], texts: Iterable[str]) -> list[list[int]]:
    """Return the tokens of texts with another normalizer and pre-tokenizer; ``tokenizer`` is changed permanently."""
    tokenizer.normalizer = steps[0]
    tokenizer.pre_tokenizer = steps[1]
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return [encoding.ids for encoding in tokenizer.encode_batch(list(texts), add_special_tokens=False)]
