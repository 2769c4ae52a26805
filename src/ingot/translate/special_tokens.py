"""Special tokens of a model folder, by the precedence of the package gguf (``gguf.SpecialVocab`` 0.19.0).

``tokenizer_config.json`` names tokens by their text, whose id is that of ``tokenizer.json``'s added tokens; then
``config.json`` states ids. A post-processor of ``tokenizer.json`` says which tokens stand around a text. If a role is
left without a token, its text is looked for in the vocabulary, also that of a post-processor beside which there is no
``tokenizer_config.json``; then lists of ids in ``config.json`` count and ``generation_config.json``, which gguf does
not read. Tokens are compared by their texts, also those that ``tokenizer_config.json`` has as objects.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from ingot.translate.keys import MOST, text_of
from ingot.translate.pretokenizers import BEGIN_WITH_BOS

ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
AROUND = ("bos", "eos", "sep")
"""Roles of tokens that may be put around a text."""
_LATER = ("eot", "eom")
"""Roles that a template's last token gives to the token it replaces as ``eos``."""


@dataclass(slots=True)
class SpecialTokens:
    """Special tokens by role.

    Parameters
    ----------
    ids : dict
        Ids of rows of the embedding.
    added : dict
        Whether the token of a role of ``AROUND`` is put around each text, if a file says so.
    outside : dict
        Ids of tokens in use that have no row.
    ignored : list of str
        Statements of ``config.json`` that name no row.
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
        ``tokenizer.json`` and ``tokenizer_config.json``; empty if there is none.
    configs : sequence of mapping
        ``config.json`` and ``generation_config.json``.
    vocabulary : mapping
        Ids by the texts of all tokens.
    rows : int
        Rows of the embedding; 0 if that is not known.
    """
    result = SpecialTokens()
    texts = {role: text for role in ROLES if (text := text_of(settings.get(f"{role}_token")))}
    if tokenizer:
        _read_processors(_processors(tokenizer), texts, result, named=bool(settings))
    if settings:
        for role in AROUND:
            stated = settings.get(f"add_{role}_token")
            if isinstance(stated, bool):
                result.added[role] = stated
        added = _added_ids(tokenizer) if tokenizer else vocabulary
        _take(result, ((role, added.get(text)) for role, text in texts.items()), rows)
    roles = (*ROLES, *(role for role in _LATER if role in texts))
    for number, config in enumerate(configs):
        stated = {role: _stated_id(config, role) for role in roles}
        if number == 0:
            _take_stated(result, {role: value for role, value in stated.items() if _is_id(value)}, rows)
            _take(result, ((role, vocabulary.get(text)) for role, text in texts.items()), rows)
        firsts = {role: value[0] if isinstance(value, list) and value else value for role, value in stated.items()}
        _take_stated(result, {role: value for role, value in firsts.items() if _is_id(value)}, rows)
    return result


def by_default(model: str, pre: str) -> dict[str, bool]:
    """Return whether llama.cpp puts the token of a role around a text if a file does not say so.

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
    if model == "bert" or (model == "gpt2" and pre == "roberta-bpe"):
        added["sep"] = True
    return added


def begins_and_ends(tokenizer: Mapping[str, Any]) -> tuple[bool, bool]:
    """Return whether the post-processor puts a token before each text, and one after it."""
    begins = ends = False
    for processor in _processors(tokenizer):
        if processor.get("type") in ("RobertaProcessing", "BertProcessing"):
            return True, True
        if processor.get("type") == "TemplateProcessing":
            single = _items(processor.get("single"))
            begins, ends = (bool(single and _special(single[end])) for end in (0, -1))
    return begins, ends


def around_text(tokenizer: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the special tokens that a template of ``tokenizer.json`` puts before a text, and those after it."""
    for processor in _processors(tokenizer):
        single = processor.get("single")
        if isinstance(single, list):
            before = [text for text in takewhile(bool, map(_special, single)) if text]
            after = [text for text in takewhile(bool, map(_special, reversed(single))) if text]
            return before, after[::-1]
    return [], []


def _take(result: SpecialTokens, found: Iterator[tuple[str, Any]] | Any, rows: int) -> None:
    """Give roles without a token the ids of tokens that a text names; ids without a row are tokens outside."""
    for role, number in found:
        if not _is_id(number) or role in result.ids or role in result.outside:
            continue
        if rows and number >= rows:
            result.outside[role] = number
        else:
            result.ids[role] = number


def _take_stated(result: SpecialTokens, found: Mapping[str, int], rows: int) -> None:
    """Give roles without a token the ids that a file states; an id without a row is ignored."""
    for role, number in found.items():
        if role in result.ids or role in result.outside:
            continue
        if rows and number >= rows:
            result.ignored.append(f"{role}_token_id {number}, for which the embedding has no row")
        else:
            result.ids[role] = number


def _stated_id(config: Mapping[str, Any], role: str) -> Any:
    value = config.get(f"{role}_token_id")
    inner = config.get("text_config")
    return inner.get(f"{role}_token_id") if value is None and isinstance(inner, Mapping) else value


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < MOST


def _added_ids(tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ids of ``tokenizer.json``'s added tokens by their texts; of equal texts the first."""
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


def _special(step: Any) -> str | None:
    """Return the special token that a step of a template puts into a text; None if it puts another thing."""
    token = step.get("SpecialToken") if isinstance(step, Mapping) else None
    return text_of(token.get("id")) or None if isinstance(token, Mapping) else None


def _sequence(step: Any) -> Any:
    sequence = step.get("Sequence") if isinstance(step, Mapping) else None
    return sequence.get("id") if isinstance(sequence, Mapping) else None


def _read_processors(
    processors: Sequence[Mapping[str, Any]], texts: dict[str, str], result: SpecialTokens, *, named: bool
) -> None:
    """Note which tokens stand around a text; ``texts`` get what the processors say of roles.

    ``named``: whether a ``tokenizer_config.json`` names tokens; without it the processors' own tokens count.
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
                _name_pair(texts, "cls", processor.get("cls"), "bos")
                _name_pair(texts, "sep", processor.get("sep"), "eos")
        elif processor.get("type") == "TemplateProcessing":
            _read_template(processor, texts, result, named=named)


def _name_pair(texts: dict[str, str], role: str, stated: Any, other: str) -> None:
    """Give a role the token of a processor's pair of text and id, or that of another role."""
    text = text_of(stated[0]) if isinstance(stated, list) and stated else texts.get(other)
    if role not in texts and text:
        texts[role] = text


def _read_template(processor: Mapping[str, Any], texts: dict[str, str], result: SpecialTokens, *, named: bool) -> None:
    single, pair = _items(processor.get("single")), _items(processor.get("pair"))
    whole = len(single) > 1
    first, last = (_special(single[end]) if whole else None for end in (0, -1))
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
    """Note whether a separator stands between the two texts of a pair, at most two tokens apart."""
    if not pair:
        return
    start = 1 if first and _special(pair[0]) == first else 0
    inner = pair[start : len(pair) - 1 if last and _special(pair[-1]) == last else None]
    between = inner[1:-1]
    if not between or (_sequence(inner[0]), _sequence(inner[-1])) != ("A", "B"):
        return
    ends = {text for role in ("sep", "eos") if (text := texts.get(role))}
    separated = _special(between[0]) in ends and not last
    if len(between) == 2:
        separated = separated or _special(between[1]) in ends
    result.added["sep"] = separated
    if separated and "sep" not in texts and named and "eos" in texts:
        texts["sep"] = texts["eos"]
