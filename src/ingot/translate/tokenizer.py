"""Conversion of tokenizers between ``tokenizer.json`` and GGUF metadata: byte-level BPE, SentencePiece, WordPiece.

Token types and names of pre-tokenizers are those of llama.cpp (``llama-vocab.cpp``, ``convert_hf_to_gguf.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ingot.errors import UnsupportedError
from ingot.formats.gguf.metadata import ABOUT, RAW
from ingot.translate import chat_templates, pretokenizer_probe, pretokenizers, special_tokens, wordpiece_unigram
from ingot.translate.keys import (
    ADD,
    BPE,
    BYTE,
    CONTROL,
    GEMMA4,
    ID,
    IDS,
    MAX_TOKENS,
    MERGES,
    MODEL,
    NO_VOCABULARIES,
    NORMAL,
    PRE,
    SCORES,
    SPM,
    TOKENS,
    TYPES,
    UNKNOWN,
    UNUSED,
    USER,
    Typed,
    added_tokens_decoder,
)
from ingot.translate.vocabulary import PAD_SCORE, Vocabulary, lay_out
from ingot.translate.wordpiece_unigram import PREFIX, UNIGRAM, WORDPIECE

RULE = "architecture.tokenizer"
_TEMPLATE_ROLES = ("bos", "eos")
_UNSTATED_ROLES = ("eot", "eom")
_MAX_TOKEN = 256  # characters; longer tokens are taken to be unmerged
_SPACE = chr(ord(" ") + 256)  # replaces a space within a merge, as in the package gguf


def to_metadata(tokenizer: Mapping[str, Any], rows: int = 0) -> Vocabulary:
    """Return the vocabulary of a ``tokenizer.json``, without special tokens (see ``special_tokens``).

    Parameters
    ----------
    tokenizer : mapping
    rows : int
        Rows of the embedding; 0 if unknown.

    Raises
    ------
    UnsupportedError
        ``architecture.tokenizer``: a type that llama.cpp does not support; ``architecture.tokens``.
    """
    model = tokenizer.get("model")
    model_type = model.get("type") if isinstance(model, Mapping) else None
    vocab = model.get("vocab") if isinstance(model, Mapping) else None
    if model_type == UNIGRAM and isinstance(vocab, list) and all(_is_scored_text(entry) for entry in vocab):
        vocab = {token_id: entry[0] for token_id, entry in enumerate(vocab)}
    elif isinstance(vocab, Mapping) and model_type in ("BPE", WORDPIECE):
        vocab = {token_id: text for text, token_id in vocab.items() if type(token_id) is int}
    else:
        raise unsupported("it is no BPE, WordPiece or Unigram")
    assert isinstance(model, Mapping)
    merges = model.get("merges") or []
    if not isinstance(merges, list) or not (set(map(type, merges)) <= {str} or all(map(_is_merge, merges))):
        raise unsupported("its merges are no pairs of texts")
    added = {
        token["id"]: token
        for token in _as_list(tokenizer.get("added_tokens"))
        if isinstance(token, Mapping) and type(token.get("id")) is int
    }
    tokens = vocab | {token_id: token.get("content") for token_id, token in added.items()}
    classes = set(map(type, tokens.values()))
    if tokens and (min(tokens) < 0 or max(tokens) >= MAX_TOKENS or classes != {str}):
        raise unsupported("it has negative or too large ids, or tokens that are no text")
    special = {token_id: CONTROL if token.get("special") else USER for token_id, token in added.items()}
    if model_type == UNIGRAM:
        special = {**special, **({model["unk_id"]: UNKNOWN} if type(model.get("unk_id")) is int else {})}
    bytewise = model.get("byte_fallback") is True
    texts, outside = lay_out(tokens, rows)
    types = [
        _token_type(token_id, text, tokens, special, model, bytewise=bytewise) for token_id, text in enumerate(texts)
    ]
    typed, dropped = _TO_METADATA[str(model_type)](tokenizer, texts, types)
    return Vocabulary({TOKENS: ("array:string", texts), TYPES: ("array:i32", types), **typed}, dropped, outside)


def ids_by_convention(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    """Return the ids of special tokens that the model type defines: Unigram's unknown token, WordPiece's BERT
    tokens.
    """
    model = tokenizer["model"]
    if model["type"] == UNIGRAM:
        unknown = model.get("unk_id")
        return {"unk": unknown} if type(unknown) is int and 0 <= unknown < len(model["vocab"]) else {}
    if model["type"] != WORDPIECE:
        return {}
    texts = {"bos": "[CLS]", "sep": "[SEP]", "unk": "[UNK]", "pad": "[PAD]", "mask": "[MASK]"}
    ids = {role: model["vocab"].get(text) for role, text in texts.items()}
    return {role: token_id for role, token_id in ids.items() if type(token_id) is int and 0 <= token_id < MAX_TOKENS}


def unsupported(reason: str, name: str = "tokenizer.json") -> UnsupportedError:
    """Return the error for a tokenizer that GGUF metadata cannot describe."""
    return UnsupportedError(
        f"llama.cpp does not support this tokenizer: {reason}; --no-tokenizer writes a file without one, for token ids",
        rule=RULE,
        where=name,
    )


def _bpe_metadata(tokenizer: Mapping[str, Any], texts: Sequence[str], types: Sequence[int]) -> tuple[Typed, list[str]]:
    model = tokenizer["model"]
    merges = pairs_of(_as_list(model.get("merges")))
    if model.get("byte_fallback") is True:
        scores = ("array:f32", _scores(texts, types, merges))
        prefix = ("bool", _adds_space(tokenizer))
        return {MODEL: ("string", SPM), PRE: ("string", "default"), SCORES: scores, PREFIX: prefix}, []
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise unsupported(f"its tokens have a {key}, {str(model[key])[:20]!r}, which BPE of llama.cpp does not add")
    identified = pretokenizer_probe.identify(tokenizer)
    match = identified.match
    if match is None:
        raise unsupported(identified.reason)
    merge_texts = ("array:string", _merge_texts(merges))
    metadata: Typed = {MODEL: ("string", BPE), PRE: ("string", match.name), MERGES: merge_texts}
    if _is_wrapping(tokenizer.get("post_processor")) and match.name == "gpt-2":
        metadata[PRE] = ("string", pretokenizers.ROBERTA)
    ignore_merges = model.get("ignore_merges") is True
    dropped = [f"the normalizer {name}" for name in pretokenizer_probe.unicode_forms(tokenizer)]
    if match.difference:
        dropped.append(f"the splitting of {match.difference}: llama.cpp's {match.name} is used")
    if ignore_merges != pretokenizers.STEPS[match.name].ignore_merges:
        dropped.append(f"ignore_merges {ignore_merges}")
    return metadata, dropped


def _wordpiece_metadata(
    tokenizer: Mapping[str, Any], texts: Sequence[str], types: Sequence[int]
) -> tuple[Typed, list[str]]:
    normal_texts = [text for text, token_type in zip(texts, types, strict=True) if token_type not in (UNUSED, CONTROL)]
    to_gguf_token = [
        text if token_type == CONTROL else wordpiece_unigram.to_gguf_token(text)
        for text, token_type in zip(texts, types, strict=True)
    ]
    metadata: Typed = {
        MODEL: ("string", wordpiece_unigram.WPM),
        PRE: ("string", "default"),
        TOKENS: ("array:string", to_gguf_token),
        **wordpiece_unigram.case_metadata(tokenizer),
    }
    return metadata, wordpiece_unigram.wordpiece_differences(tokenizer, normal_texts)


def _unigram_metadata(
    tokenizer: Mapping[str, Any], texts: Sequence[str], types: Sequence[int]
) -> tuple[Typed, list[str]]:
    metadata, dropped = wordpiece_unigram.unigram_metadata(tokenizer, types)
    return metadata | {MODEL: ("string", wordpiece_unigram.UGM), PRE: ("string", "default")}, dropped


_TO_METADATA = {"BPE": _bpe_metadata, WORDPIECE: _wordpiece_metadata, UNIGRAM: _unigram_metadata}


def _is_scored_text(entry: Any) -> bool:
    pair = isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str)
    return pair and isinstance(entry[1], int | float) and not isinstance(entry[1], bool)


def _token_type(
    token_id: int,
    text: str,
    tokens: Mapping[int, str],
    special: Mapping[int, int],
    model: Mapping[str, Any],
    *,
    bytewise: bool,
) -> int:
    if token_id not in tokens:
        return UNUSED
    if text == model.get("unk_token"):
        return UNKNOWN if bytewise else special.get(token_id, NORMAL)
    if bytewise and len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        return BYTE
    return special.get(token_id, NORMAL)


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _is_merge(merge: Any) -> bool:
    return isinstance(merge, str) or (isinstance(merge, list) and [type(text) for text in merge] == [str, str])


def pairs_of(merges: Sequence[Any]) -> list[tuple[str, str]]:
    """Return merges as pairs. Files contain them as two texts, or as one text with a space in between."""
    if set(map(type, merges)) <= {str}:
        return [(first, second) for first, _, second in (merge.partition(" ") for merge in merges)]
    return [(merge[0], merge[1]) if isinstance(merge, list | tuple) else merge.partition(" ")[::2] for merge in merges]


def _merge_texts(merges: Sequence[tuple[str, str]]) -> list[str]:
    if not any(" " in first or " " in second for first, second in merges):
        return [f"{first} {second}" for first, second in merges]
    return [" ".join(part.replace(" ", _SPACE) for part in pair) for pair in merges]


def _scores(texts: Sequence[str], types: Sequence[int], merges: Sequence[tuple[str, str]]) -> list[float]:
    """Return scores as in SentencePiece: a token that is merged earlier has a higher score."""
    rank: dict[str, int] = {}
    for index, (first, second) in enumerate(merges):
        rank.setdefault(first + second, index)
    scores = [-float(rank[text]) if text in rank else 0.0 for text in texts]
    return [PAD_SCORE if token_type == UNUSED else score for score, token_type in zip(scores, types, strict=True)]


def _is_wrapping(step: Any) -> bool:
    """Return whether a step is a post-processor that only adds a token before and after each text."""
    return isinstance(step, Mapping) and step.get("type") in ("RobertaProcessing", "BertProcessing")


def _adds_space(tokenizer: Mapping[str, Any]) -> bool:
    """Return whether the tokenizer adds a space before a text, by ``Prepend`` or ``Metaspace``."""
    before = wordpiece_unigram.steps_of(tokenizer.get("normalizer"), "normalizers")
    cut = wordpiece_unigram.steps_of(tokenizer.get("pre_tokenizer"), "pretokenizers")
    spaces = [step for step in cut if step.get("type") == "Metaspace"]
    return any(step.get("type") == "Prepend" for step in before) or any(
        step.get("prepend_scheme", "always") != "never" for step in spaces
    )


def to_files(metadata: Mapping[str, Any], original: Mapping[str, Any] = {}) -> tuple[dict[str, Any], list[str]]:
    """Return ``tokenizer.json`` and ``tokenizer_config.json`` from GGUF metadata, and notes.

    The notes name texts that these files tokenize differently from llama.cpp.

    Parameters
    ----------
    metadata : mapping
        Metadata of a GGUF file; if it has no tokenizer, no files are returned.
    original : mapping
        The original ``tokenizer_config.json``, if the file contains it.

    Raises
    ------
    UnsupportedError
        ``architecture.tokenizer``: a model that ``tokenizer.json`` does not support, or two tokens with one text.
    """
    model = metadata.get(MODEL)
    if model is None or model in NO_VOCABULARIES:
        return {}, ["no tokenizer, because the file has none"]
    texts, types = _token_columns(metadata, metadata.get(TOKENS), metadata.get(TYPES), model)
    vocab = {text: token_id for token_id, text in enumerate(texts) if types[token_id] != UNUSED}
    special_ids = _ids_of_roles(metadata, len(texts))
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    settings |= {f"{role}_token": texts[token_id] for role, token_id in special_ids.items()}
    template = chat_templates.from_metadata(metadata)
    settings |= {} if template is None else {"chat_template": template}
    settings |= {f"add_{role}_token": metadata[key] for role, key in ADD.items() if isinstance(metadata.get(key), bool)}
    if original.get("legacy") is False:
        settings["legacy"] = False
    built, differences = _TO_FILES[str(model)](metadata, vocab, settings)
    added, processor = _special_sections(metadata, original, texts, types)
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, **built,
        "post_processor": processor,
    }  # fmt: skip
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": settings}, differences


def special_sections(metadata: Mapping[str, Any], original: Mapping[str, Any]) -> dict[str, Any]:
    """Return the added tokens and the post-processor of the ``tokenizer.json`` from ``to_files``.

    The result is empty if the metadata have no tokenizer. Raises the errors of ``to_files``.
    """
    model = metadata.get(MODEL)
    if model is None or model in NO_VOCABULARIES:
        return {}
    columns = _token_columns(metadata, metadata.get(TOKENS), metadata.get(TYPES), model)
    return dict(zip(("added_tokens", "post_processor"), _special_sections(metadata, original, *columns), strict=True))


def _special_sections(
    metadata: Mapping[str, Any], original: Mapping[str, Any], texts: Sequence[str], types: Sequence[int]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the added tokens, and the post-processor that adds tokens around a text."""
    flags = added_tokens_decoder(original)
    added = [
        {"id": token_id, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
              "special": token_type != USER, **_flags(flags.get(token_id, {}), text)}
        for token_id, (text, token_type) in enumerate(zip(texts, types, strict=True))
        if token_type in (UNKNOWN, CONTROL, USER)
    ]  # fmt: skip
    is_wordpiece = metadata[MODEL] == wordpiece_unigram.WPM
    special_ids = _ids_of_roles(metadata, len(texts))
    default = special_tokens.default_added(str(metadata[MODEL]), str(metadata.get(PRE)))
    adds = metadata.get(ADD["bos"], default["bos"]) is True
    start = "cls" if is_wordpiece else "bos"
    bos = (texts[special_ids[start]], special_ids[start]) if adds and start in special_ids else None
    ends = "sep" if is_wordpiece else "eos" if metadata.get(ADD["eos"], default["eos"]) is True else ""
    eos = (texts[special_ids[ends]], special_ids[ends]) if ends in special_ids else None
    processor = _roberta_processor if metadata.get(PRE) in pretokenizers.SEPARATED else _template_processor
    return added, processor(bos, eos)


def _ids_of_roles(metadata: Mapping[str, Any], count: int) -> dict[str, int]:
    """Return the ids of special tokens in the metadata, by role."""
    names = {role: name for role, name in IDS.items() if role not in (*_TEMPLATE_ROLES, *_UNSTATED_ROLES)}
    is_wordpiece = metadata[MODEL] == wordpiece_unigram.WPM
    names |= {"cls": "bos"} if is_wordpiece else {role: role for role in _TEMPLATE_ROLES}
    ids: dict[str, Any] = {role: metadata.get(ID.format(name)) for role, name in names.items()}
    return {role: token_id for role, token_id in ids.items() if type(token_id) is int and 0 <= token_id < count}


def _token_columns(metadata: Mapping[str, Any], texts: Any, types: Any, model: Any) -> tuple[list[str], list[int]]:
    """Return the texts and types of tokens; raises ``UnsupportedError`` ``architecture.tokenizer``."""
    if model not in _TO_FILES:
        raise _unsupported_by_files(f"its model is {str(model)[:40]!r}")
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise _unsupported_by_files("it has no list of tokens")
    types = types if isinstance(types, list) and len(types) == len(texts) else [NORMAL] * len(texts)
    if model == wordpiece_unigram.WPM:
        texts = [
            text if token_type == CONTROL else wordpiece_unigram.from_gguf_token(text)
            for text, token_type in zip(texts, types, strict=True)
        ]
    used = [text for text, token_type in zip(texts, types, strict=True) if token_type != UNUSED]
    about = metadata.get(ABOUT)
    if isinstance(about, Mapping) and TOKENS in about.get(RAW, {}):
        raise _unsupported_by_files("some of its tokens are not UTF-8")
    if len(set(used)) != len(used):
        raise _unsupported_by_files("two of its tokens have one text")
    return texts, types


def _unsupported_by_files(reason: str) -> UnsupportedError:
    return UnsupportedError(
        f"tokenizer.json cannot hold the tokenizer of this GGUF file: {reason}; --no-tokenizer writes a folder "
        "without a tokenizer",
        rule=RULE,
    )


def _flags(token: Mapping[str, Any], text: str) -> dict[str, bool]:
    """Return the flags of a token in ``tokenizer_config.json``, such as ``lstrip``.

    The result is empty if the token's text is not ``text``.
    """
    flags = ("single_word", "lstrip", "rstrip", "normalized")
    return (
        {key: token[key] for key in flags if isinstance(token.get(key), bool)} if token.get("content") == text else {}
    )


def _bpe_files(
    metadata: Mapping[str, Any], vocab: Mapping[str, int], settings: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    pre = "gemma4" if metadata[MODEL] == GEMMA4 else str(metadata.get(PRE) or "default")
    steps = pretokenizers.steps_of(pre)
    if steps is None:
        raise _unsupported_by_files(f"its pre-tokenizer {pre[:40]!r} is unknown")
    merges = list(map(list, pairs_of([merge for merge in _as_list(metadata.get(MERGES)) if isinstance(merge, str)])))
    if not steps.bytewise:
        return _spaced_bpe_files(vocab, merges, steps), []
    differences = [
        f"the published splitting of {difference}: tokenizer.json splits them as llama.cpp's {pre} does"
        for name, _, difference in pretokenizers.PUBLISHED
        if name == pretokenizers.ALIASES.get(pre, pre) and name != "gpt-2"
    ]
    return {
        "normalizer": None,
        "pre_tokenizer": pretokenizers.pre_tokenizer(steps),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _bpe_model(vocab, merges, {"ignore_merges": steps.ignore_merges}),
    }, differences


def _spaced_bpe_files(vocab: Mapping[str, int], merges: list[list[str]], steps: pretokenizers.Steps) -> dict[str, Any]:
    """Return the fields of ``tokenizer.json`` for a BPE whose tokens are text with marks for spaces.

    Characters that are not in the vocabulary become tokens of bytes.
    """
    mark = {"type": "Replace", "pattern": {"String": " "}, "content": wordpiece_unigram.SPACE}
    unmark = {"type": "Replace", "pattern": {"String": wordpiece_unigram.SPACE}, "content": " "}
    return {
        "normalizer": mark,
        "pre_tokenizer": pretokenizers.pre_tokenizer(steps),
        "decoder": {"type": "Sequence", "decoders": [unmark, {"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": _bpe_model(vocab, merges, {"byte_fallback": True}),
    }


def _wordpiece_files(
    metadata: Mapping[str, Any], vocab: Mapping[str, int], settings: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    return wordpiece_unigram.wordpiece(metadata, vocab, settings), []


def _unigram_files(
    metadata: Mapping[str, Any], vocab: Mapping[str, int], settings: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    texts = metadata[TOKENS]
    unknown = metadata.get(ID.format("unknown"))
    has_unknown = type(unknown) is int and 0 <= unknown < len(texts)
    return wordpiece_unigram.unigram(metadata, texts, unknown if has_unknown else None), []


def _sentencepiece_files(
    metadata: Mapping[str, Any], vocab: Mapping[str, int], settings: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    scores: Any = metadata.get(SCORES)
    count = max(vocab.values(), default=-1) + 1
    if not wordpiece_unigram.are_scores(scores) or len(scores) < count:
        scores = [0.0] * count
    prefix = metadata.get(PREFIX, True) is not False
    first: list[dict[str, Any]] = [{"type": "Prepend", "prepend": wordpiece_unigram.SPACE}] if prefix else []
    steps = [*first, {"type": "Replace", "pattern": {"String": " "}, "content": wordpiece_unigram.SPACE}]
    normalizer: dict[str, Any] | None = {"type": "Sequence", "normalizers": steps}
    pre_tokenizer = None
    if settings.get("legacy") is False:  # transformers' setting: only the beginning of a text gets a space
        scheme = "first" if prefix else "never"
        normalizer = None
        pre_tokenizer = {
            "type": "Metaspace",
            "replacement": wordpiece_unigram.SPACE,
            "prepend_scheme": scheme,
            "split": False,
        }
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": wordpiece_unigram.SPACE}, "content": " "},
        {"type": "ByteFallback"}, {"type": "Fuse"},
    ]  # fmt: skip
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    changes = {"unk_token": settings.get("unk_token"), "fuse_unk": True, "byte_fallback": True}
    return {
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe_model(vocab, _merges(vocab, scores), changes),
    }, []


def _merges(vocab: Mapping[str, int], scores: Sequence[float]) -> list[list[str]]:
    """Return all pairs of tokens that form a token, ordered by the score of this token, the highest first.

    transformers builds the merges of a vocabulary with scores in the same way.
    """
    merges = list[list[str]]()
    for text in sorted(vocab, key=lambda text: -scores[vocab[text]]):
        if len(text) > _MAX_TOKEN:
            continue
        pairs = [
            [first, second]
            for cut in range(1, len(text))
            if (first := text[:cut]) in vocab and (second := text[cut:]) in vocab
        ]
        if len(pairs) > 1:
            pairs.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        merges += pairs
    return merges


def _bpe_model(vocab: Mapping[str, int], merges: list[list[str]], changes: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, **changes,
        "vocab": dict(vocab), "merges": merges,
    }  # fmt: skip


def _roberta_processor(bos: tuple[str, int] | None, eos: tuple[str, int] | None) -> dict[str, Any]:
    """Return RoBERTa's post-processor, with two tokens between a pair of texts.

    If a token is missing, return a template instead.
    """
    if bos is None or eos is None:
        return _template_processor(bos, eos)
    return {
        "type": "RobertaProcessing", "sep": list(eos), "cls": list(bos), "trim_offsets": True,
        "add_prefix_space": False,
    }  # fmt: skip


def _template_processor(bos: tuple[str, int] | None, eos: tuple[str, int] | None) -> dict[str, Any]:
    """Return a template that adds ``bos`` before and ``eos`` after each text."""
    first, second = ({"Sequence": {"id": name, "type_id": token_id}} for token_id, name in enumerate("AB"))
    ids = {text: {"id": text, "ids": [token_id], "tokens": [text]} for text, token_id in filter(None, (bos, eos))}
    start, again, end, last = (
        [{"SpecialToken": {"id": token[0], "type_id": type_id}}] if token else []
        for token, type_id in ((bos, 0), (None if eos else bos, 1), (eos, 0), (eos, 1))
    )
    return {
        "type": "TemplateProcessing", "single": [*start, first, *end],
        "pair": [*start, first, *end, *again, second, *last], "special_tokens": ids,
    }  # fmt: skip


_TO_FILES = {
    BPE: _bpe_files,
    GEMMA4: _bpe_files,
    SPM: _sentencepiece_files,
    wordpiece_unigram.WPM: _wordpiece_files,
    wordpiece_unigram.UGM: _unigram_files,
}
