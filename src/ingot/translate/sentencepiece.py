"""Conversion of ``tokenizer.model``, a trained SentencePiece model in protobuf, to GGUF metadata.

Field numbers and types of pieces are those of ``sentencepiece_model.proto`` of SentencePiece 0.2.0; GGUF uses the same
types. The conversion follows llama.cpp's ``conversion/base.py`` and ``conversion/bert.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from struct import unpack
from typing import Any, NamedTuple

from ingot.core.parsing.wire import FIXED32, Field, Node, Rules
from ingot.translate import keys
from ingot.translate.keys import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER, Typed
from ingot.translate.vocabulary import PAD_SCORE, Vocabulary, lay_out
from ingot.translate.wordpiece_unigram import (
    BYTE_FALLBACK_DROPPED,
    CHARSMAP,
    NO_PREFIX_DROPPED,
    PREFIX,
    SPACE,
    SPACES,
    UGM,
)

RULE = "architecture.companion"
_RULES = Rules(RULE, RULE, RULE, RULE)
_FIRST = b"\x0a"  # a model begins with its first piece; a tiktoken file begins with base64
_PIECE_FIELD = 1
_TRAINER = 2
_NORMALIZER = 3
_TEXT = 1
_SCORE = 2
_TYPE = 3
_MODEL_TYPE = 3
_SUFFIX = 24
_BYTES = 35
_UNIGRAM = 1
_BPE = 2
_SPECIAL = {"unk": (40, 0), "bos": (41, 1), "eos": (42, 2), "pad": (43, -1)}
_NAME = 1
_TABLE = 2
_DUMMY = 3
_EXTRA = 4
_ADDED = -1000.0
"""llama.cpp's score for tokens outside of the SentencePiece model."""


class _Special(NamedTuple):
    """The first tokens of a vocabulary: texts and GGUF types."""

    texts: tuple[str, ...]
    types: tuple[int, ...]


_FAIRSEQ = _Special(("<s>", "<pad>", "</s>", "<unk>"), (CONTROL, CONTROL, CONTROL, UNKNOWN))
# The fairseq vocabulary continues with the pieces from this index on, and ends with the mask.
_FAIRSEQ_FROM = 3
_MASK = "<mask>"


@dataclass(frozen=True, slots=True)
class SentencePieces:
    """A trained model: its pieces by id, and its normalization of text.

    Parameters
    ----------
    texts, scores, types : list
        Text, score and GGUF type of each piece.
    unigram : bool
        Whether the model is a Unigram; otherwise it is a BPE.
    prefix, squeezes_spaces : bool
        Whether a space is added before a text, and whether repeated spaces are merged.
    charsmap : bytes
        SentencePiece's precompiled map of characters.
    ids : dict
        Ids of ``unk``, ``bos``, ``eos`` and ``pad``, if present.
    dropped : list of str
        Descriptions of settings that GGUF cannot store.
    """

    texts: list[str]
    scores: list[float]
    types: list[int]
    unigram: bool
    prefix: bool
    squeezes_spaces: bool
    charsmap: bytes
    ids: dict[str, int]
    dropped: list[str]


def read(data: bytes, location: str) -> SentencePieces | None:
    """Return a trained model; None if the file is not a SentencePiece model of type Unigram or BPE.

    Raises ``FormatError`` ``architecture.companion``: a malformed protocol buffer.
    """
    if not data.startswith(_FIRST):
        return None
    root = Node.root(data, location, _RULES)
    fields = root.select((_TRAINER, _NORMALIZER), (_PIECE_FIELD,))
    trainer = _integer_fields(
        root, fields[_TRAINER], (_MODEL_TYPE, _SUFFIX, _BYTES, *(field_number for field_number, _ in _SPECIAL.values()))
    )
    model_type = trainer.get(_MODEL_TYPE, _UNIGRAM)
    if model_type not in (_UNIGRAM, _BPE):
        return None
    pieces_read = [_read_piece(root.child(field)) for field in fields[_PIECE_FIELD]]
    texts, scores, types = (list(column) for column in zip(*pieces_read, strict=True))
    if len({*texts}) != len(texts):
        raise root.refuse("pieces that differ", "one of them twice")
    rules = _integer_fields(root, fields[_NORMALIZER], (_DUMMY, _EXTRA))
    name, charsmap = _table(root, fields[_NORMALIZER])
    ids = {key: _signed(trainer.get(field_number, default)) for key, (field_number, default) in _SPECIAL.items()}
    squeezes_spaces = rules.get(_EXTRA, 1) != 0
    dropped = list[str]()
    dropped += ["spaces behind words"] if trainer.get(_SUFFIX, 0) else []
    if model_type == _UNIGRAM:
        dropped += [BYTE_FALLBACK_DROPPED] if trainer.get(_BYTES, 0) else []
        dropped += [NO_PREFIX_DROPPED] if squeezes_spaces and not rules.get(_DUMMY, 1) else []
    if model_type == _BPE:
        dropped += [f"the normalizer {name[:40]}"] if charsmap else []
        dropped += ["remove_extra_whitespaces"] if squeezes_spaces else []
        dropped += (
            [] if trainer.get(_BYTES, 0) else ["the handling of characters without a token: there are no byte tokens"]
        )
    return SentencePieces(
        texts,
        scores,
        types,
        model_type == _UNIGRAM,
        rules.get(_DUMMY, 1) != 0,
        squeezes_spaces,
        charsmap,
        {key: field_number for key, field_number in ids.items() if 0 <= field_number < len(texts)},
        dropped,
    )


def _read_piece(node: Node) -> tuple[str, float, int]:
    text = ""
    score = 0.0
    piece_type = NORMAL
    for field in node.fields():
        if field.number == _TEXT:
            text = node.text(field)
        elif field.number == _SCORE:
            score = _float(node, field)
        elif field.number == _TYPE:
            piece_type = node.number(field)
    if not text or not NORMAL <= piece_type <= BYTE or not isfinite(score):
        raise node.refuse(
            "pieces with a text, a finite score and a type from 1 to 6", f"{text!r:.40}, {score}, {piece_type}"
        )
    return text, score, piece_type


def _float(node: Node, field: Field) -> float:
    if field.wire_type != FIXED32:
        raise node.refuse("a score as a number of 32 bits", f"wire type {field.wire_type}")
    value: float = unpack("<f", node.data[field.start : field.end])[0]
    return value


def _integer_fields(root: Node, messages: list[Field], field_numbers: tuple[int, ...]) -> dict[int, int]:
    """Return the integer fields of a nested message, by field number; ``messages`` may be empty."""
    if not messages:
        return {}
    node = root.child(messages[0])
    return {
        field_number: node.number(fields[0]) for field_number, fields in node.select(field_numbers).items() if fields
    }


def _table(root: Node, messages: list[Field]) -> tuple[str, bytes]:
    if not messages:
        return "", b""
    node = root.child(messages[0])
    fields = node.select((_NAME, _TABLE))
    name = node.text(fields[_NAME][0]) if fields[_NAME] else ""
    return name, node.child(fields[_TABLE][0]).payload() if fields[_TABLE] else b""


def _signed(value: int) -> int:
    """Return an unsigned 64-bit integer as a signed one: protobuf extends negative int32 values to 64 bits."""
    return value - (1 << 64) if value >> 63 else value


def with_fairseq_ids(model: SentencePieces) -> SentencePieces:
    """Return the model with the token ids of XLM-RoBERTa: fairseq's special tokens first, a mask token last.

    The four special tokens are followed by all pieces from the fourth on (transformers,
    ``tokenization_xlm_roberta.py``).
    """
    first = _FAIRSEQ
    tail = slice(_FAIRSEQ_FROM, None)
    return SentencePieces(
        [*first.texts, *model.texts[tail], _MASK],
        [0.0] * len(first.texts) + [*model.scores[tail], 0.0],
        [*first.types, *model.types[tail], CONTROL],
        model.unigram,
        model.prefix,
        model.squeezes_spaces,
        model.charsmap,
        {"bos": 0, "pad": 1, "eos": 2, "unk": 3},
        model.dropped,
    )


def to_metadata(
    model: SentencePieces, settings: Mapping[str, Any], added: Mapping[str, Any], rows: int = 0
) -> Vocabulary:
    """Return a trained model's vocabulary, without special tokens (see ``special_tokens``).

    Parameters
    ----------
    model : SentencePieces
    settings, added : mapping
        ``tokenizer_config.json`` and ``added_tokens.json``.
    rows : int
        Rows of the embedding; 0 if unknown.

    Raises
    ------
    UnsupportedError
        ``architecture.tokens``.
    """
    tokens = dict(enumerate(zip(model.texts, model.scores, model.types, strict=True)))
    for token_id, text, special in keys.added_tokens(settings, added):
        before = tokens.get(token_id, ("", 0.0, NORMAL))
        token_type = CONTROL if special else USER
        if before[0] == text and before[2] in (UNKNOWN, BYTE):
            continue
        tokens[token_id] = (text, before[1] if before[0] == text and before[2] == token_type else _ADDED, token_type)
    # user-defined tokens match text before spaces are marked
    spelled = {
        token_id: text.replace(SPACE, " ") if token_type == USER else text
        for token_id, (text, _, token_type) in tokens.items()
    }
    texts, outside = lay_out(spelled, rows)
    filled = [tokens.get(token_id, ("", PAD_SCORE, UNUSED)) for token_id in range(len(texts))]
    metadata: Typed = {
        keys.MODEL: ("string", UGM if model.unigram else keys.SPM),
        keys.PRE: ("string", "default"),
        keys.TOKENS: ("array:string", texts),
        keys.SCORES: ("array:f32", [score for _, score, _ in filled]),
        keys.TYPES: ("array:i32", [token_type for *_, token_type in filled]),
        PREFIX: ("bool", model.prefix),
    }
    if model.unigram:
        metadata[SPACES] = ("bool", model.squeezes_spaces)
        metadata |= {CHARSMAP: ("array:u8", list(model.charsmap))} if model.charsmap else {}
    return Vocabulary(metadata, list(model.dropped), outside)


def adds_bos(data: bytes, location: str, settings: Mapping[str, Any]) -> bool:
    """Return whether transformers adds BOS before a text by default; raises the errors of ``read``."""
    model = read(data, location)
    return model is not None and begins_and_ends(model, settings)[0]


def begins_and_ends(model: SentencePieces, settings: Mapping[str, Any]) -> tuple[bool, bool]:
    """Return whether transformers adds a token before each text, and one after it, by default."""
    tokenizer_class = str(settings.get("tokenizer_class"))
    is_t5 = model.unigram and tokenizer_class.startswith("T5")
    is_xlm_roberta = model.unigram and tokenizer_class.startswith("XLMRoberta")
    return not is_t5 and "bos" in model.ids, (is_t5 or is_xlm_roberta) and "eos" in model.ids
