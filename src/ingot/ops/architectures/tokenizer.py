"""Tokenizers: ``tokenizer.json`` to GGUF metadata and back, for byte-level BPE and for SentencePiece's BPE.

Types of tokens and what a pre-tokenizer is called are llama.cpp's (``llama-vocab.cpp``, ``convert_hf_to_gguf.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Typed = dict[str, tuple[str, Any]]

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)
MODEL, PRE, TOKENS, TYPES = (f"tokenizer.ggml.{key}" for key in ("model", "pre", "tokens", "token_type"))
SCORES, MERGES, ADD_BOS = (f"tokenizer.ggml.{key}" for key in ("scores", "merges", "add_bos_token"))
TEMPLATE = "tokenizer.chat_template"
BPE, SPM = "gpt2", "llama"
_SPACE = "\u2581"  # SentencePiece's mark of a space
_MOST = 1 << 22  # tokens
_LONGEST = 256  # characters of a token that is taken for merged

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_SPLITS = {"llama-bpe": _LLAMA3, "qwen2": _QWEN2, "gpt-2": None}
_ALIASES = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "smaug-bpe": "llama-bpe", "default": "gpt-2"}


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
    vocab = model.get("vocab") if isinstance(model, Mapping) else None
    if not isinstance(model, Mapping) or not isinstance(vocab, Mapping) or model.get("type") != "BPE":
        return {}, ["a tokenizer that is no BPE"]
    added = [token for token in tokenizer.get("added_tokens") or () if isinstance(token, Mapping)]
    tokens = {number: text for text, number in vocab.items() if type(number) is int}
    tokens |= {token["id"]: token["content"] for token in added if type(token.get("id")) is int}
    count = max(size, 1 + max(tokens, default=-1))
    if count > _MOST or any(number < 0 or not isinstance(text, str) for number, text in tokens.items()):
        return {}, ["a tokenizer with ids that are none"]
    special = {
        token["id"]: CONTROL if token.get("special") else USER for token in added if type(token.get("id")) is int
    }
    bytewise = model.get("byte_fallback") is True
    texts = [tokens.get(number, f"[PAD{number}]") for number in range(count)]
    types = [_type(number, texts[number], tokens, special, model, bytewise=bytewise) for number in range(count)]
    merges = [_pair(merge) for merge in model.get("merges") or ()]
    found: Typed = {
        MODEL: ("string", SPM if bytewise else BPE),
        TOKENS: ("array:string", texts),
        TYPES: ("array:i32", types),
    }
    lost = []
    if bytewise:
        found |= {PRE: ("string", "default"), SCORES: ("array:f32", _scores(texts, merges))}
    else:
        pre = _pre_of(tokenizer.get("pre_tokenizer"))
        found |= {PRE: ("string", pre or "default"), MERGES: ("array:string", [" ".join(pair) for pair in merges])}
        if pre is None:
            lost.append("a pre-tokenizer that llama.cpp has no name for")
    bos = settings.get("bos_token")
    found[ADD_BOS] = ("bool", _adds(tokenizer, bos.get("content") if isinstance(bos, Mapping) else bos, settings))
    if isinstance(settings.get("chat_template"), str):
        found[TEMPLATE] = ("string", settings["chat_template"])
    return found, lost


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


def _pair(merge: Any) -> tuple[str, str]:
    """Return a merge, which files have as two texts, or as one with a space between them."""
    if isinstance(merge, str):
        first, _, second = merge.partition(" ")
        return first, second
    first, second = merge
    return str(first), str(second)


def _scores(texts: Sequence[str], merges: Sequence[tuple[str, str]]) -> list[float]:
    """Return what SentencePiece ranks by: tokens that are merged earlier are worth more."""
    rank: dict[str, int] = {}
    for number, (first, second) in enumerate(merges):
        rank.setdefault(first + second, number)
    return [-float(rank[text]) if text in rank else 0.0 for text in texts]


def _pre_of(found: Any) -> str | None:
    """Return llama.cpp's name of a pre-tokenizer, told by its expression."""
    steps = found.get("pretokenizers", [found]) if isinstance(found, Mapping) else []
    steps = [step for step in steps if isinstance(step, Mapping)]
    if [step.get("type") for step in steps] == ["ByteLevel"] and steps[0].get("use_regex", True):
        return "gpt-2"
    for step in steps:
        pattern = step.get("pattern")
        if step.get("type") == "Split" and isinstance(pattern, Mapping):
            return next((name for name, text in _SPLITS.items() if text and text == pattern.get("Regex")), None)
    return None


def _adds(tokenizer: Mapping[str, Any], bos: Any, settings: Mapping[str, Any]) -> bool:
    """Whether a text begins with the token ``bos``."""
    steps = tokenizer.get("post_processor")
    every = steps.get("processors", [steps]) if isinstance(steps, Mapping) else []
    for step in every:
        single = step.get("single") if isinstance(step, Mapping) else None
        if isinstance(single, list) and single and isinstance(single[0], Mapping) and "SpecialToken" in single[0]:
            return bool(single[0]["SpecialToken"].get("id") == bos)
    return settings.get("add_bos_token") is True


def to_files(metadata: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return ``tokenizer.json`` and ``tokenizer_config.json`` of GGUF metadata, and what cannot be said in them."""
    texts, types, kind = metadata.get(TOKENS), metadata.get(TYPES), metadata.get(MODEL)
    if not isinstance(texts, list) or not texts or kind not in (BPE, SPM) or not all(isinstance(t, str) for t in texts):
        return {}, [f"a tokenizer of model {str(kind)[:40]}"] if kind is not None else []
    types = types if isinstance(types, list) and len(types) == len(texts) else [NORMAL] * len(texts)
    added = [
        {"id": number, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": kind_of != USER}
        for number, (text, kind_of) in enumerate(zip(texts, types, strict=True))
        if kind_of in (UNKNOWN, CONTROL, USER)
    ]  # fmt: skip
    vocab = {text: number for number, text in enumerate(texts) if types[number] != UNUSED}
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for key, name in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        number = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if isinstance(number, int) and 0 <= number < len(texts):
            settings[f"{key}_token"] = texts[number]
    if isinstance(metadata.get(TEMPLATE), str):
        settings["chat_template"] = metadata[TEMPLATE]
    if isinstance(metadata.get(ADD_BOS), bool):
        settings["add_bos_token"] = metadata[ADD_BOS]
    adds = metadata.get(ADD_BOS, kind == SPM) is True and "bos_token" in settings
    bos = (settings["bos_token"], metadata["tokenizer.ggml.bos_token_id"]) if adds else None
    made, lost = (_bytewise if kind == BPE else _sentences)(metadata, vocab, settings)
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, **made,
        "post_processor": _begins(bos),
    }  # fmt: skip
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": settings}, lost


def _bytewise(
    metadata: Mapping[str, Any], vocab: Mapping[str, int], settings: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    pre = str(metadata.get(PRE, "default"))
    pattern = _SPLITS.get(_ALIASES.get(pre, pre), "")
    level: dict[str, Any] = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": not pattern,
    }
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    merges = [list(_pair(merge)) for merge in metadata.get(MERGES) or () if isinstance(merge, str)]
    return {
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]} if pattern else level,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _model(vocab, merges, {"ignore_merges": _ALIASES.get(pre, pre) == "llama-bpe"}),
    }, [] if pattern != "" else [f"the pre-tokenizer {pre[:40]}: tokenizer.json splits as GPT-2's does"]


def _sentences(
    metadata: Mapping[str, Any], vocab: Mapping[str, int], settings: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    scores = metadata.get(SCORES)
    if not isinstance(scores, list) or len(scores) < max(vocab.values(), default=-1) + 1:
        scores = [0.0] * (max(vocab.values(), default=-1) + 1)
    steps: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}]
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True) is not False
    if prefix:
        steps.insert(0, {"type": "Prepend", "prepend": _SPACE})
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
    ]  # fmt: skip
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    more = {"unk_token": settings.get("unk_token"), "fuse_unk": True, "byte_fallback": True}
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
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


def _begins(bos: tuple[str, int] | None) -> dict[str, Any]:
    """Return the step that puts a token before each text."""
    first, second = ({"Sequence": {"id": name, "type_id": number}} for number, name in enumerate("AB"))
    if bos is None:
        return {"type": "TemplateProcessing", "single": [first], "pair": [first, second], "special_tokens": {}}
    text, number = bos
    start = {"SpecialToken": {"id": text, "type_id": 0}}
    ids = {text: {"id": text, "ids": [number], "tokens": [text]}}
    return {
        "type": "TemplateProcessing", "single": [start, first], "pair": [start, first, start, second],
        "special_tokens": ids,
    }  # fmt: skip
