"""``tokenizer.model``: what SentencePiece trained, read as the protocol buffer that it is, as GGUF metadata.

Field numbers are those of ``sentencepiece_model.proto`` of SentencePiece 0.2.0, whose types of pieces GGUF has too.
What llama.cpp makes of them is in its ``conversion/base.py`` and ``conversion/bert.py``.
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
from ingot.translate.pieces import BYTES_LOST, CHARSMAP, PREFIX, SPACE, SPACES, UGM
from ingot.translate.vocabulary import PAD_SCORE, Vocabulary, lay_out

RULE = "architecture.companion"
_RULES = Rules(RULE, RULE, RULE, RULE)
_FIRST = b"\x0a"  # a model begins with its first piece; a file of tiktoken's with base64
_PIECES = 1
_TRAINER = 2
_NORMALIZER = 3
_TEXT = 1
_SCORE = 2
_TYPE = 3
_KIND = 3
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
"""The score that llama.cpp gives to tokens that are not SentencePiece's own."""


class _Special(NamedTuple):
    """Tokens in the first places of a vocabulary."""

    texts: tuple[str, ...]
    types: tuple[int, ...]


_FAIRSEQ = _Special(("<s>", "<pad>", "</s>", "<unk>"), (CONTROL, CONTROL, CONTROL, UNKNOWN))
# pieces that keep their order behind those, and what is last
_FAIRSEQ_FROM = 3
_MASK = "<mask>"


@dataclass(frozen=True, slots=True)
class SentencePieces:
    """A trained model: its pieces by their ids, and how text is put in order before it is cut.

    Parameters
    ----------
    texts, scores, types : list
        Of each piece; types as GGUF has them.
    unigram : bool
        Whether the likeliest cut is looked for, and not the best merge.
    prefix, squeezed : bool
        A space is put before a text; spaces beside spaces are dropped.
    table : bytes
        Which characters become which.
    ids : dict
        Of ``unk``, ``bos``, ``eos`` and ``pad``, where there is one.
    lost : list of str
        What no GGUF file has a word for.
    """

    texts: list[str]
    scores: list[float]
    types: list[int]
    unigram: bool
    prefix: bool
    squeezed: bool
    table: bytes
    ids: dict[str, int]
    lost: list[str]


def read(data: bytes, where: str) -> SentencePieces | None:
    """Return a trained model; None for a file that is none of SentencePiece's, or one that cuts text otherwise.

    Raises ``FormatError`` ``architecture.companion``: no protocol buffer that SentencePiece writes.
    """
    if not data.startswith(_FIRST):
        return None
    root = Node.root(data, where, _RULES)
    fields = root.select((_TRAINER, _NORMALIZER), (_PIECES,))
    trainer = _numbers(root, fields[_TRAINER], (_KIND, _SUFFIX, _BYTES, *(number for number, _ in _SPECIAL.values())))
    kind = trainer.get(_KIND, _UNIGRAM)
    if kind not in (_UNIGRAM, _BPE):
        return None
    pieces = [_piece(root.child(field)) for field in fields[_PIECES]]
    texts, scores, types = (list(column) for column in zip(*pieces, strict=True))
    if len({*texts}) != len(texts):
        raise root.refuse("pieces that differ", "one of them twice")
    rules = _numbers(root, fields[_NORMALIZER], (_DUMMY, _EXTRA))
    name, table = _table(root, fields[_NORMALIZER])
    ids = {key: _signed(trainer.get(number, default)) for key, (number, default) in _SPECIAL.items()}
    squeezed = rules.get(_EXTRA, 1) != 0
    lost = list[str]()
    lost += ["spaces behind words"] if trainer.get(_SUFFIX, 0) else []
    lost += [BYTES_LOST] if kind == _UNIGRAM and trainer.get(_BYTES, 0) else []
    if kind == _BPE:
        lost += [f"the normalizer {name[:40]}"] if table else []
        lost += ["remove_extra_whitespaces"] if squeezed else []
        lost += [] if trainer.get(_BYTES, 0) else ["what becomes of characters without a token: none are bytes"]
    return SentencePieces(
        texts,
        scores,
        types,
        kind == _UNIGRAM,
        rules.get(_DUMMY, 1) != 0,
        squeezed,
        table,
        {key: number for key, number in ids.items() if 0 <= number < len(texts)},
        lost,
    )


def _piece(node: Node) -> tuple[str, float, int]:
    text = ""
    score = 0.0
    kind = NORMAL
    for field in node.fields():
        if field.number == _TEXT:
            text = node.text(field)
        elif field.number == _SCORE:
            score = _float(node, field)
        elif field.number == _TYPE:
            kind = node.number(field)
    if not text or not NORMAL <= kind <= BYTE or not isfinite(score):
        raise node.refuse("pieces with a text, a finite score and a type from 1 to 6", f"{text!r:.40}, {score}, {kind}")
    return text, score, kind


def _float(node: Node, field: Field) -> float:
    if field.wire_type != FIXED32:
        raise node.refuse("a score as a number of 32 bits", f"wire type {field.wire_type}")
    found: float = unpack("<f", node.data[field.start : field.end])[0]
    return found


def _numbers(root: Node, found: list[Field], wanted: tuple[int, ...]) -> dict[int, int]:
    """Return the numbers of a message within the model, by their fields."""
    if not found:
        return {}
    node = root.child(found[0])
    return {number: node.number(fields[0]) for number, fields in node.select(wanted).items() if fields}


def _table(root: Node, found: list[Field]) -> tuple[str, bytes]:
    if not found:
        return "", b""
    node = root.child(found[0])
    fields = node.select((_NAME, _TABLE))
    name = node.text(fields[_NAME][0]) if fields[_NAME] else ""
    return name, node.child(fields[_TABLE][0]).payload() if fields[_TABLE] else b""


def _signed(number: int) -> int:
    """Return a number of 32 bits that stands as one of 64, as protobuf has those below 0."""
    return number - (1 << 64) if number >> 63 else number


def as_fairseq(found: SentencePieces) -> SentencePieces:
    """Return the model with the ids of XLM-RoBERTa: its first tokens are not SentencePiece's, its last is a mask.

    As transformers has them (``tokenization_xlm_roberta.py``): four tokens, then all pieces from the fourth on.
    """
    first = _FAIRSEQ
    rest = slice(_FAIRSEQ_FROM, None)
    return SentencePieces(
        [*first.texts, *found.texts[rest], _MASK],
        [0.0] * len(first.texts) + [*found.scores[rest], 0.0],
        [*first.types, *found.types[rest], CONTROL],
        found.unigram,
        found.prefix,
        found.squeezed,
        found.table,
        {"bos": 0, "pad": 1, "eos": 2, "unk": 3},
        found.lost,
    )


def to_metadata(
    found: SentencePieces, settings: Mapping[str, Any], added: Mapping[str, Any], rows: int = 0
) -> Vocabulary:
    """Return a trained model's vocabulary; special tokens are found by ``special_tokens``.

    Parameters
    ----------
    found : SentencePieces
    settings, added : mapping
        ``tokenizer_config.json`` and ``added_tokens.json``.
    rows : int
        Rows of the embedding; 0 if that is not known.

    Raises
    ------
    UnsupportedError
        ``architecture.tokens``.
    """
    tokens = dict(enumerate(zip(found.texts, found.scores, found.types, strict=True)))
    for number, text, special in keys.added_tokens(settings, added):
        before = tokens.get(number, ("", 0.0, NORMAL))
        kind = CONTROL if special else USER
        if before[0] == text and before[2] in (UNKNOWN, BYTE):
            continue
        tokens[number] = (text, before[1] if before[0] == text and before[2] == kind else _ADDED, kind)
    # what users define is looked for in text as it is
    spelled = {number: text.replace(SPACE, " ") if kind == USER else text for number, (text, _, kind) in tokens.items()}
    texts, outside = lay_out(spelled, rows)
    filled = [tokens.get(number, ("", PAD_SCORE, UNUSED)) for number in range(len(texts))]
    made: Typed = {
        keys.MODEL: ("string", UGM if found.unigram else keys.SPM),
        keys.PRE: ("string", "default"),
        keys.TOKENS: ("array:string", texts),
        keys.SCORES: ("array:f32", [score for _, score, _ in filled]),
        keys.TYPES: ("array:i32", [kind for *_, kind in filled]),
        PREFIX: ("bool", found.prefix),
    }
    if found.unigram:
        made[SPACES] = ("bool", found.squeezed)
        made |= {CHARSMAP: ("array:u8", list(found.table))} if found.table else {}
    return Vocabulary(made, list(found.lost), outside)


def adds_bos(data: bytes, where: str, settings: Mapping[str, Any]) -> bool:
    """Return whether transformers puts BOS before a text if no file says so; raises the errors of ``read``."""
    model = read(data, where)
    return model is not None and begins_and_ends(model, settings)[0]


def begins_and_ends(found: SentencePieces, settings: Mapping[str, Any]) -> tuple[bool, bool]:
    """Return whether transformers puts a token before each text and after it, if no file says so."""
    kind = str(settings.get("tokenizer_class"))
    sentences = found.unigram and kind.startswith("T5")
    both = found.unigram and kind.startswith("XLMRoberta")
    return not sentences and "bos" in found.ids, (sentences or both) and "eos" in found.ids
