"""Tokenizers: ``tokenizer.json`` to GGUF metadata and back: BPE of bytes, SentencePiece's BPE and Unigram, WordPiece.

Types of tokens and what a pre-tokenizer is called are llama.cpp's (``llama-vocab.cpp``, ``convert_hf_to_gguf.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from ingot.ops.architectures import pieces, pretokenizers
from ingot.ops.architectures.keys import (
    ADD_BOS,
    ADD_EOS,
    BPE,
    BYTE,
    CONTROL,
    ID,
    IDS,
    MERGES,
    MODEL,
    MOST,
    NORMAL,
    PRE,
    SCORES,
    SPM,
    TEMPLATE,
    TOKENS,
    TYPES,
    UNKNOWN,
    UNUSED,
    USER,
    Typed,
    ids_of,
    settings_tokens,
    stated_tokens,
    text_of,
)
from ingot.ops.architectures.pieces import PREFIX, UNIGRAM, WORDPIECE

_LONGEST = 256  # characters of a token that is taken for merged
_BERT = {key: f"[{key.upper()}]" for key in ("cls", "sep", "unk", "pad", "mask")}


def to_metadata(tokenizer: Mapping[str, Any], settings: Mapping[str, Any], size: int) -> tuple[Typed, list[str]]:
    """Return GGUF metadata of a tokenizer, and what of it llama.cpp has no word for.

    Parameters
    ----------
    tokenizer, settings : mapping
        ``tokenizer.json`` and ``tokenizer_config.json``.
    size : int
        Rows of the embedding; ids without a token are filled up.
    """
    model = tokenizer.get("model")
    kind = model.get("type") if isinstance(model, Mapping) else None
    vocab = model.get("vocab") if isinstance(model, Mapping) else None
    if kind == UNIGRAM and isinstance(vocab, list) and all(_is_piece(piece) for piece in vocab):
        vocab = {number: piece[0] for number, piece in enumerate(vocab)}
    elif isinstance(vocab, Mapping) and kind in ("BPE", WORDPIECE):
        vocab = {number: text for text, number in vocab.items() if type(number) is int}
    else:
        return {}, ["a tokenizer that is no BPE, WordPiece or Unigram"]
    assert isinstance(model, Mapping)
    merges = model.get("merges") or []
    if not isinstance(merges, list) or not all(_is_merge(merge) for merge in merges):
        return {}, ["a tokenizer whose merges are no pairs of texts"]
    added = [token for token in _listed(tokenizer.get("added_tokens")) if isinstance(token, Mapping)]
    tokens = vocab | {token["id"]: token.get("content") for token in added if type(token.get("id")) is int}
    count = max(size, 1 + max(tokens, default=-1))
    if count > MOST or any(number < 0 or not isinstance(text, str) for number, text in tokens.items()):
        return {}, ["a tokenizer with negative or too large ids, or with tokens that are no text"]
    special = {
        token["id"]: CONTROL if token.get("special") else USER for token in added if type(token.get("id")) is int
    }
    if kind == UNIGRAM:
        special = {**special, **({model["unk_id"]: UNKNOWN} if type(model.get("unk_id")) is int else {})}
    bytewise = model.get("byte_fallback") is True
    texts = [tokens.get(number, f"[PAD{number}]") for number in range(count)]
    types = [_type(number, texts[number], tokens, special, model, bytewise=bytewise) for number in range(count)]
    made, lost = _FORTH[str(kind)](tokenizer, settings, texts, types)
    bos = text_of(settings.get("bos_token" if kind != WORDPIECE else "cls_token"))
    bos = _BERT["cls"] if bos is None and kind == WORDPIECE else bos
    before, after = _template(tokenizer)
    if bos is None and len(before) == 1:  # no settings: the template alone states it
        bos = before[0]
        made |= ids_of({"bos": bos}, IDS, texts)
    made[ADD_BOS] = ("bool", _adds(tokenizer, bos, settings))
    eos = text_of(settings.get("eos_token"))
    if kind == "BPE" and eos is not None and _adds(tokenizer, eos, {}, last=True):
        made[ADD_EOS] = ("bool", True)
    if len(before) > made[ADD_BOS][1]:
        lost = [*lost, f"the tokens before each text {' '.join(before)[:80]}"]
    if len(after) > made.get(ADD_EOS, ("bool", kind == WORDPIECE))[1]:
        lost = [*lost, f"the tokens after each text {' '.join(after)[:80]}"]
    if isinstance(settings.get("chat_template"), str):
        made[TEMPLATE] = ("string", settings["chat_template"])
    return {TOKENS: ("array:string", texts), TYPES: ("array:i32", types), **made}, lost


def _bpe_to(
    tokenizer: Mapping[str, Any], settings: Mapping[str, Any], texts: Sequence[str], types: Sequence[int]
) -> tuple[Typed, list[str]]:
    model = tokenizer["model"]
    merges = [_pair(merge) for merge in _listed(model.get("merges"))]
    if model.get("byte_fallback") is True:
        scores = ("array:f32", _scores(texts, merges))
        prefix = ("bool", _prefixes(tokenizer))
        return {MODEL: ("string", SPM), PRE: ("string", "default"), SCORES: scores, PREFIX: prefix}, []
    around = _wraps(tokenizer.get("post_processor"))
    whole = model.get("ignore_merges") is True
    pre = pretokenizers.name_of(tokenizer.get("pre_tokenizer"), whole=whole)
    joined = ("array:string", [" ".join(pair) for pair in merges])
    found: Typed = {MODEL: ("string", BPE), PRE: ("string", pre or "default"), MERGES: joined}
    if around and pre == "gpt-2":
        found[PRE] = ("string", pretokenizers.ROBERTA)
        found |= ids_of(settings_tokens(settings), IDS, texts)
    if pre is None:
        return found, ["a pre-tokenizer that llama.cpp has no name for"]
    return found, [f"ignore_merges {whole}"] if whole != pretokenizers.STEPS[pre].whole else []


def _wordpiece_to(
    tokenizer: Mapping[str, Any], settings: Mapping[str, Any], texts: Sequence[str], types: Sequence[int]
) -> tuple[Typed, list[str]]:
    real = [text for text, kind in zip(texts, types, strict=True) if kind != UNUSED]
    found: Typed = {MODEL: ("string", pieces.WPM), PRE: ("string", "default")}
    found[TOKENS] = ("array:string", [pieces.marked(text) for text in texts])
    ids = {"cls": "bos", **{key: name for key, name in IDS.items() if key in _BERT}}
    return found | ids_of({**_BERT, **settings_tokens(settings)}, ids, texts), pieces.wordpiece_lost(tokenizer, real)


def _unigram_to(
    tokenizer: Mapping[str, Any], settings: Mapping[str, Any], texts: Sequence[str], types: Sequence[int]
) -> tuple[Typed, list[str]]:
    found, lost = pieces.unigram_to(tokenizer, len(texts))
    eos = text_of(settings.get("eos_token"))
    found |= {MODEL: ("string", pieces.UGM), PRE: ("string", "default")}
    found[ADD_EOS] = ("bool", eos is not None and _adds(tokenizer, eos, {}, last=True))
    found |= ids_of(settings_tokens(settings), IDS, texts)
    unknown = tokenizer["model"].get("unk_id")
    if type(unknown) is int and 0 <= unknown < len(texts):
        found[ID.format("unknown")] = ("u32", unknown)
    return found, lost


_FORTH = {"BPE": _bpe_to, WORDPIECE: _wordpiece_to, UNIGRAM: _unigram_to}


def _is_piece(piece: Any) -> bool:
    pair = isinstance(piece, list) and len(piece) == 2 and isinstance(piece[0], str)
    return pair and isinstance(piece[1], int | float) and not isinstance(piece[1], bool)


def _type(
    number: int,
    text: str,
    tokens: Mapping[int, str],
    special: Mapping[int, int],
    model: Mapping[str, Any],
    *,
    bytewise: bool,
) -> int:
    if number not in tokens:
        return UNUSED
    if text == model.get("unk_token"):
        return UNKNOWN if bytewise else special.get(number, NORMAL)
    if bytewise and len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        return BYTE
    return special.get(number, NORMAL)


def _listed(found: Any) -> list[Any]:
    return found if isinstance(found, list) else []


def _is_merge(merge: Any) -> bool:
    return isinstance(merge, str) or (isinstance(merge, list) and [type(text) for text in merge] == [str, str])


def _pair(merge: Any) -> tuple[str, str]:
    """Return a merge, which files have as two texts, or as one with a space between them."""
    if isinstance(merge, str):
        first, _, second = merge.partition(" ")
        return first, second
    first, second = merge
    return first, second


def _scores(texts: Sequence[str], merges: Sequence[tuple[str, str]]) -> list[float]:
    """Return what SentencePiece ranks by: tokens that are merged earlier are worth more."""
    rank: dict[str, int] = {}
    for number, (first, second) in enumerate(merges):
        rank.setdefault(first + second, number)
    return [-float(rank[text]) if text in rank else 0.0 for text in texts]


def _adds(tokenizer: Mapping[str, Any], token: Any, settings: Mapping[str, Any], *, last: bool = False) -> bool:
    """Whether a text begins with a token, or ends with it."""
    steps = tokenizer.get("post_processor")
    every = steps.get("processors", [steps]) if isinstance(steps, Mapping) else []
    if _wraps(steps):
        return True
    for step in _listed(every):
        single = step.get("single") if isinstance(step, Mapping) else None
        end = single[-1 if last else 0] if isinstance(single, list) and single else None
        if isinstance(end, Mapping) and "SpecialToken" in end:
            return bool(end["SpecialToken"].get("id") == token)
    return settings.get("add_bos_token") is True


def _template(tokenizer: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the special tokens that a template of ``tokenizer.json`` puts before a text and after it."""
    steps = tokenizer.get("post_processor")
    every = steps.get("processors", [steps]) if isinstance(steps, Mapping) else []
    for step in _listed(every):
        single = step.get("single") if isinstance(step, Mapping) else None
        if isinstance(single, list):
            before = [*takewhile(bool, map(_special_text, single))]
            after = [*takewhile(bool, map(_special_text, reversed(single)))]
            return before, after[::-1]
    return [], []


def _special_text(item: Any) -> str:
    """Return the text of a template's special token; empty for any other item."""
    token = item.get("SpecialToken") if isinstance(item, Mapping) else None
    return str(token.get("id")) if isinstance(token, Mapping) else ""


def _wraps(step: Any) -> bool:
    """Whether a step puts a token before each text and behind it, of the two kinds that do nothing else."""
    return isinstance(step, Mapping) and step.get("type") in ("RobertaProcessing", "BertProcessing")


def _prefixes(tokenizer: Mapping[str, Any]) -> bool:
    """Whether a space is put before a text, by one of the two steps that can do that."""
    before = pieces.steps_of(tokenizer.get("normalizer"), "normalizers")
    cut = pieces.steps_of(tokenizer.get("pre_tokenizer"), "pretokenizers")
    spaces = [step for step in cut if step.get("type") == "Metaspace"]
    return any(step.get("type") == "Prepend" for step in before) or any(
        step.get("prepend_scheme", "always") != "never" for step in spaces
    )


def to_files(metadata: Mapping[str, Any], stated: Mapping[str, Any] = {}) -> tuple[dict[str, Any], list[str]]:
    """Return ``tokenizer.json`` and ``tokenizer_config.json`` of GGUF metadata, and what cannot be said in them.

    ``stated``: the ``tokenizer_config.json`` that the file was made with, where it keeps that.
    """
    texts, types, kind = metadata.get(TOKENS), metadata.get(TYPES), metadata.get(MODEL)
    if not isinstance(texts, list) or not texts or kind not in _BACK or not all(isinstance(t, str) for t in texts):
        return {}, [f"a tokenizer of model {str(kind)[:40]}"] if kind is not None else []
    types = types if isinstance(types, list) and len(types) == len(texts) else [NORMAL] * len(texts)
    texts = [pieces.unmarked(text) for text in texts] if kind == pieces.WPM else texts
    known = stated_tokens(stated)
    added = [
        {"id": number, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": kind_of != USER, **_flags(known.get(number, {}), text)}
        for number, (text, kind_of) in enumerate(zip(texts, types, strict=True))
        if kind_of in (UNKNOWN, CONTROL, USER)
    ]  # fmt: skip
    vocab = {text: number for number, text in enumerate(texts) if types[number] != UNUSED}
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    ids = {**IDS, "cls": "bos"} if kind == pieces.WPM else IDS
    read: dict[str, Any] = {key: metadata.get(ID.format(name)) for key, name in ids.items()}
    numbers: dict[str, int] = {
        key: number for key, number in read.items() if type(number) is int and 0 <= number < len(texts)
    }
    settings |= {f"{key}_token": texts[number] for key, number in numbers.items()}
    if isinstance(metadata.get(TEMPLATE), str):
        settings["chat_template"] = metadata[TEMPLATE]
    if isinstance(metadata.get(ADD_BOS), bool):
        settings["add_bos_token"] = metadata[ADD_BOS]
    adds = metadata.get(ADD_BOS, _begins_by_default(kind, metadata)) is True and "bos_token" in settings
    bos = (settings["bos_token"], numbers["bos"]) if adds else None
    adds_eos = metadata.get(ADD_EOS, kind == pieces.UGM) is True
    ends = "sep" if kind == pieces.WPM else "eos" if adds_eos else ""
    eos = (settings[f"{ends}_token"], numbers[ends]) if ends in numbers else None
    if stated.get("legacy") is False:
        settings["legacy"] = False
    made, lost = _BACK[str(kind)](metadata, vocab, settings)
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, **made,
        "post_processor": _wrapped(bos, eos) if metadata.get(PRE) == pretokenizers.ROBERTA else _around(bos, eos),
    }  # fmt: skip
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": settings}, lost


def _begins_by_default(kind: Any, metadata: Mapping[str, Any]) -> bool:
    """Return whether llama.cpp puts BOS before a text if the file does not state it (``llama-vocab.cpp``)."""
    return kind in (SPM, pieces.WPM) or (kind == BPE and metadata.get(PRE) in pretokenizers.BEGIN_WITH_BOS)


def _flags(token: Mapping[str, Any], text: str) -> dict[str, bool]:
    """Return what is stated of how a token is looked for; of one of the same text."""
    flags = ("single_word", "lstrip", "rstrip", "normalized")
    return (
        {key: token[key] for key in flags if isinstance(token.get(key), bool)} if token.get("content") == text else {}
    )


def _bytewise(
    metadata: Mapping[str, Any], vocab: Mapping[str, int], settings: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    pre = str(metadata.get(PRE, "default"))
    steps = pretokenizers.steps_of(pre)
    known = steps or pretokenizers.STEPS["gpt-2"]
    merges = [list(_pair(merge)) for merge in _listed(metadata.get(MERGES)) if isinstance(merge, str)]
    return {
        "normalizer": None,
        "pre_tokenizer": pretokenizers.pre_tokenizer(known),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _model(vocab, merges, {"ignore_merges": known.whole}),
    }, [] if steps else [f"the pre-tokenizer {pre[:40]}: tokenizer.json splits as GPT-2's does"]


def _wordpiece(
    metadata: Mapping[str, Any], vocab: Mapping[str, int], settings: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    return pieces.wordpiece(vocab, settings), []


def _unigram(
    metadata: Mapping[str, Any], vocab: Mapping[str, int], settings: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    texts, unknown = metadata[TOKENS], metadata.get(ID.format("unknown"))
    known = type(unknown) is int and 0 <= unknown < len(texts)
    return pieces.unigram(metadata, texts, unknown if known else None), []


def _sentences(
    metadata: Mapping[str, Any], vocab: Mapping[str, int], settings: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    scores: Any = metadata.get(SCORES)
    count = max(vocab.values(), default=-1) + 1
    if not pieces.are_scores(scores) or len(scores) < count:
        scores = [0.0] * count
    prefix = metadata.get(PREFIX, True) is not False
    first: list[dict[str, Any]] = [{"type": "Prepend", "prepend": pieces.SPACE}] if prefix else []
    steps = [*first, {"type": "Replace", "pattern": {"String": " "}, "content": pieces.SPACE}]
    normalizer: dict[str, Any] | None = {"type": "Sequence", "normalizers": steps}
    once = None
    if settings.get("legacy") is False:  # transformers' word: only what a text begins with gets a space
        scheme = "first" if prefix else "never"
        normalizer = None
        once = {"type": "Metaspace", "replacement": pieces.SPACE, "prepend_scheme": scheme, "split": False}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": pieces.SPACE}, "content": " "},
        {"type": "ByteFallback"}, {"type": "Fuse"},
    ]  # fmt: skip
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    more = {"unk_token": settings.get("unk_token"), "fuse_unk": True, "byte_fallback": True}
    return {
        "normalizer": normalizer,
        "pre_tokenizer": once,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _model(vocab, _merges(vocab, scores), more),
    }, []


def _merges(vocab: Mapping[str, int], scores: Sequence[float]) -> list[list[str]]:
    """Return the pairs of tokens that are a token, those of the most valuable first, as transformers makes them."""
    found = []
    for text, number in vocab.items():
        if len(text) > _LONGEST:
            continue
        pairs = [
            (vocab[text[:cut]], vocab[text[cut:]], text[:cut], text[cut:])
            for cut in range(1, len(text))
            if text[:cut] in vocab and text[cut:] in vocab
        ]
        found += [(-scores[number], *pair) for pair in sorted(pairs)]
    return [[first, second] for *_, first, second in sorted(found, key=lambda item: item[0])]


def _model(vocab: Mapping[str, int], merges: list[list[str]], more: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, **more,
        "vocab": dict(vocab), "merges": merges,
    }  # fmt: skip


def _wrapped(bos: tuple[str, int] | None, eos: tuple[str, int] | None) -> dict[str, Any]:
    """Return RoBERTa's step, which puts two tokens between a pair of texts; plain where there are no two."""
    if bos is None or eos is None:
        return _around(bos, eos)
    return {
        "type": "RobertaProcessing", "sep": list(eos), "cls": list(bos), "trim_offsets": True,
        "add_prefix_space": False,
    }  # fmt: skip


def _around(bos: tuple[str, int] | None, eos: tuple[str, int] | None) -> dict[str, Any]:
    """Return the step that puts a token before each text, and one behind it."""
    first, second = ({"Sequence": {"id": name, "type_id": number}} for number, name in enumerate("AB"))
    ids = {text: {"id": text, "ids": [number], "tokens": [text]} for text, number in filter(None, (bos, eos))}
    start, end, last = (
        [{"SpecialToken": {"id": token[0], "type_id": kind}}] if token else []
        for token, kind in ((bos, 0), (eos, 0), (eos, 1))
    )
    again = [] if eos else start
    return {
        "type": "TemplateProcessing", "single": [*start, first, *end],
        "pair": [*start, first, *end, *again, second, *last], "special_tokens": ids,
    }  # fmt: skip


_BACK = {BPE: _bytewise, SPM: _sentences, pieces.WPM: _wordpiece, pieces.UGM: _unigram}
