"""A check whether the package ``tokenizers`` can read a ``tokenizer.json``, by the required keys of each component."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_SECTIONS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_BYTE_LEVEL = ("add_prefix_space", "trim_offsets")
_KEYS: Mapping[str, tuple[str, ...]] = {
    "BPEDecoder": ("suffix",),
    "BertNormalizer": ("clean_text", "handle_chinese_chars", "lowercase"),
    "BertProcessing": ("sep", "cls"),
    "CTC": ("pad_token", "word_delimiter_token", "cleanup"),
    "CharDelimiterSplit": ("delimiter",),
    "Digits": ("individual_digits",),
    "Metaspace": ("replacement",),
    "Prepend": ("prepend",),
    "Replace": ("pattern", "content"),
    "RobertaProcessing": ("sep", "cls"),
    "Split": ("pattern", "behavior", "invert"),
    "TemplateProcessing": ("single", "pair", "special_tokens"),
    "WordPiece": ("prefix", "cleanup"),
}
"""The required keys of each type of component. The keys of ``ByteLevel`` and ``Strip`` depend on the section."""
_MEMBERS = ("normalizers", "pretokenizers", "processors", "decoders")
_MAX_DEPTH = 8


def why_unreadable(tokenizer: Mapping[str, Any]) -> str:
    """Return the first component that lacks a required key; empty if ``tokenizers`` can read the file."""
    for section in _SECTIONS:
        for component in _components(tokenizer.get(section), _MAX_DEPTH):
            name = str(component.get("type"))[:80]
            missing = [key for key in _keys_of(name, section) if key not in component]
            if missing:
                return f"{section} {name} lacks {', '.join(missing)}"
    return ""


def _keys_of(name: str, section: str) -> tuple[str, ...]:
    if name == "ByteLevel":
        return () if section == "normalizer" else _BYTE_LEVEL
    if name == "Strip":
        return ("content", "start", "stop") if section == "decoder" else ("strip_left", "strip_right")
    return _KEYS.get(name, ())


def _components(value: Any, depth: int) -> Iterator[Mapping[str, Any]]:
    """Yield a component, and the components of a sequence."""
    if not isinstance(value, Mapping) or depth == 0:
        return
    yield value
    for key in _MEMBERS:
        members = value.get(key)
        for member in members if isinstance(members, list) else []:
            yield from _components(member, depth - 1)
