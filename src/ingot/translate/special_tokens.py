"""Special tokens of a model folder, by the precedence of the package gguf (``gguf.SpecialVocab`` 0.19.0).

The sources, in order of precedence:

1. ``tokenizer_config.json`` has texts of tokens; the added tokens of ``tokenizer.json`` have their ids.
2. ``config.json`` has ids.
3. A post-processor of ``tokenizer.json`` lists the tokens around a text.
4. The text of a role without a token is looked up in the full vocabulary. Without ``tokenizer_config.json``, the text
   is that of the post-processor.
5. ``config.json`` has lists of ids.
6. ``generation_config.json`` has ids; gguf does not read this file.

Tokens are compared by text, even if ``tokenizer_config.json`` contains them as objects.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from ingot.translate.keys import MAX_TOKENS, text_of
from ingot.translate.pretokenizers import BEGIN_WITH_BOS, SEPARATED

ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
AROUND = ("bos", "eos", "sep")
"""Roles of tokens that may be added around a text."""
_LATER = ("eot", "eom")
"""Roles that the previous ``eos`` token gets if a template's last token replaces it."""


@dataclass(slots=True)
class SpecialTokens:
    """Special tokens by role.

    Parameters
    ----------
    ids : dict
        Ids of tokens that have a row in the embedding.
    added : dict
        Whether a role's token is added around each text, for roles of ``AROUND`` with a declared setting.
    outside : dict
        Ids of used tokens without a row in the embedding.
    ignored : list of str
        Settings of ``config.json`` whose id has no row in the embedding.
    """

    ids: dict[str, int] = field(default_factory=dict)
    added: dict[str, bool] = field(default_factory=dict)
    outside: dict[str, int] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)


def find(
    tokenizer: Mapping[str, Any],
    settings: Mapping[str, Any],
    configs: Sequence[Mapping[str, Any]],
    vocabulary: Mapping[str, int],
    rows: int,
) -> SpecialTokens:
    """Return the special tokens of a folder.

    Parameters
    ----------
    tokenizer, settings : mapping
        ``tokenizer.json`` and ``tokenizer_config.json``; empty if missing.
    configs : sequence of mapping
        ``config.json`` and ``generation_config.json``.
    vocabulary : mapping
        Ids by the texts of all tokens.
    rows : int
        Rows of the embedding; 0 if unknown.
    """
    result = SpecialTokens()
    texts = {role: text for role in ROLES if (text := text_of(settings.get(f"{role}_token")))}
    if tokenizer:
        _read_processors(_processors(tokenizer), texts, result, named=bool(settings))
    if settings:
        for role in AROUND:
            stated_ids = settings.get(f"add_{role}_token")
            if isinstance(stated_ids, bool):
                result.added[role] = stated_ids
        added = _added_ids(tokenizer) if tokenizer else vocabulary
        _set_ids(result, ((role, added.get(text)) for role, text in texts.items()), rows)
    roles = (*ROLES, *(role for role in _LATER if role in texts))
    for index, config in enumerate(configs):
        stated_ids = {role: _stated_id(config, role) for role in roles}
        if index == 0:
            _set_stated_ids(result, {role: value for role, value in stated_ids.items() if _is_id(value)}, rows)
            _set_ids(result, ((role, vocabulary.get(text)) for role, text in texts.items()), rows)
        firsts = {role: value[0] if isinstance(value, list) and value else value for role, value in stated_ids.items()}
        _set_stated_ids(result, {role: value for role, value in firsts.items() if _is_id(value)}, rows)
    return result


def default_added(model: str, pre: str) -> dict[str, bool]:
    """Return whether llama.cpp adds a role's token around a text by default.

    Parameters
    ----------
    model, pre : str
        ``tokenizer.ggml.model`` and ``tokenizer.ggml.pre``.
    """
    added = dict.fromkeys(AROUND, False)
    if model in ("llama", "bert") or (model == "gpt2" and pre in BEGIN_WITH_BOS):
        added["bos"] = True
    if model == "t5":
        added["eos"] = True
    if model == "bert" or (model == "gpt2" and pre in SEPARATED):
        added["sep"] = True
    return added


def begins_and_ends(tokenizer: Mapping[str, Any]) -> tuple[bool, bool]:
    """Return whether the post-processor adds a token before each text, and one after it."""
    begins = ends = False
    for processor in _processors(tokenizer):
        if processor.get("type") in ("RobertaProcessing", "BertProcessing"):
            return True, True
        if processor.get("type") == "TemplateProcessing":
            single = _items(processor.get("single"))
            begins, ends = (bool(single and _special_text(single[end])) for end in (0, -1))
    return begins, ends


def around_text(tokenizer: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the special tokens that a template of ``tokenizer.json`` adds before a text, and those after it."""
    for processor in _processors(tokenizer):
        single = processor.get("single")
        if isinstance(single, list):
            before = [text for text in takewhile(bool, map(_special_text, single)) if text]
            after = [text for text in takewhile(bool, map(_special_text, reversed(single))) if text]
            return before, after[::-1]
    return [], []


def _set_ids(result: SpecialTokens, candidates: Iterator[tuple[str, Any]] | Any, rows: int) -> None:
    """Set the ids of roles without a token from texts of tokens; ids without a row are added to ``outside``."""
    for role, token_id in candidates:
        if not _is_id(token_id) or role in result.ids or role in result.outside:
            continue
        if rows and token_id >= rows:
            result.outside[role] = token_id
        else:
            result.ids[role] = token_id


def _set_stated_ids(result: SpecialTokens, stated_ids: Mapping[str, int], rows: int) -> None:
    """Set the ids of roles without a token from declared ids; ids without a row are added to ``ignored``."""
    for role, token_id in stated_ids.items():
        if role in result.ids or role in result.outside:
            continue
        if rows and token_id >= rows:
            result.ignored.append(f"{role}_token_id {token_id}, but the embedding has no row for it")
        else:
            result.ids[role] = token_id


def _stated_id(config: Mapping[str, Any], role: str) -> Any:
    value = config.get(f"{role}_token_id")
    inner = config.get("text_config")
    return inner.get(f"{role}_token_id") if value is None and isinstance(inner, Mapping) else value


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < MAX_TOKENS


def _added_ids(tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ids of the added tokens of ``tokenizer.json`` by text; the first id of equal texts."""
    ids: dict[str, Any] = {}
    for token in _items(tokenizer.get("added_tokens")):
        if isinstance(token, Mapping) and isinstance(token.get("content"), str):
            ids.setdefault(token["content"], token.get("id"))
    return ids


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _processors(tokenizer: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    processor = tokenizer.get("post_processor")
    steps = processor.get("processors", [processor]) if isinstance(processor, Mapping) else []
    return [step for step in _items(steps) if isinstance(step, Mapping)]


def _special_text(step: Any) -> str | None:
    """Return the special token that a step of a template inserts; None for another step."""
    token = step.get("SpecialToken") if isinstance(step, Mapping) else None
    return text_of(token.get("id")) or None if isinstance(token, Mapping) else None


def _sequence_id(step: Any) -> Any:
    sequence = step.get("Sequence") if isinstance(step, Mapping) else None
    return sequence.get("id") if isinstance(sequence, Mapping) else None


def _read_processors(
    processors: Sequence[Mapping[str, Any]], texts: dict[str, str], result: SpecialTokens, *, named: bool
) -> None:
    """Record the tokens that post-processors add around a text, and add the texts of their roles to ``texts``.

    ``named`` states whether ``tokenizer_config.json`` declares tokens; otherwise the processors' tokens are used.
    """
    if named:
        if "bos" not in texts and "cls" in texts:
            texts["bos"] = texts["cls"]
        if "eos" not in texts and "sep" in texts:
            texts["eos"] = texts["sep"]
    for processor in processors:
        if processor.get("type") == "RobertaProcessing":
            result.added.update(dict.fromkeys(AROUND, True))
            if named:
                _set_pair_text(texts, "cls", processor.get("cls"), "bos")
                _set_pair_text(texts, "sep", processor.get("sep"), "eos")
        elif processor.get("type") == "TemplateProcessing":
            _read_template(processor, texts, result, named=named)


def _set_pair_text(texts: dict[str, str], role: str, pair: Any, fallback_role: str) -> None:
    """Set a role's text from a processor's pair of text and id; without one, copy the text of ``fallback_role``."""
    text = text_of(pair[0]) if isinstance(pair, list) and pair else texts.get(fallback_role)
    if role not in texts and text:
        texts[role] = text


def _read_template(processor: Mapping[str, Any], texts: dict[str, str], result: SpecialTokens, *, named: bool) -> None:
    single = _items(processor.get("single"))
    pair = _items(processor.get("pair"))
    is_wrapped = len(single) > 1
    first, last = (_special_text(single[end]) if is_wrapped else None for end in (0, -1))
    if first:
        if not named:
            texts["bos"] = first
        result.added["bos"] = first in (texts.get("bos"), texts.get("cls"))
    if last:
        if named and last != texts.get("eos"):
            later = next((role for role in _LATER if role not in texts), None)
            if later is not None:
                texts[later] = texts.get("eos", "")
        texts["eos"] = last
        result.added["eos"] = True
    _read_pair(pair, first, last, texts, result, named=named)


def _read_pair(
    pair: Sequence[Any],
    first: str | None,
    last: str | None,
    texts: dict[str, str],
    result: SpecialTokens,
    *,
    named: bool,
) -> None:
    """Record whether a template puts a separator of at most two tokens between the two texts of a pair."""
    if not pair:
        return
    start = 1 if first and _special_text(pair[0]) == first else 0
    inner = pair[start : len(pair) - 1 if last and _special_text(pair[-1]) == last else None]
    between = inner[1:-1]
    if not between or (_sequence_id(inner[0]), _sequence_id(inner[-1])) != ("A", "B"):
        return
    ends = {text for role in ("sep", "eos") if (text := texts.get(role))}
    separated = _special_text(between[0]) in ends and not last
    if len(between) == 2:
        separated = separated or _special_text(between[1]) in ends
    result.added["sep"] = separated
    if separated and "sep" not in texts and named and "eos" in texts:
        texts["sep"] = texts["eos"]
