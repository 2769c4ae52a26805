"""SentencePiece and WordPiece vocabularies: tokenizer.json has llama.cpp's tokens, for each of GGUF's settings.

Needs the package xllamacpp: ``pip install xllamacpp``, or its folder in PYTHONPATH.
"""

from __future__ import annotations

import importlib.util
import io
import unicodedata
from pathlib import Path
from typing import Any

import pytest

from ingot.translate import sentencepiece, tokenizer
from tests.support.llama_vocabularies import PROBE, SPACE, file_tokens, llama_tokens, trained_merges, write_vocabulary

pytest.importorskip("tokenizers")
pytest.importorskip("gguf")
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("xllamacpp") is None, reason="the package xllamacpp is not installed"
)

TEXTS = (*(text.replace("\x85", "") for text in PROBE), "a</s>b", "  <user> x", f"{SPACE}a", "\u0000 x")
"""llama.cpp takes U+0085 for a letter in these vocabularies, and tokenizers for a space."""


def metadata(model: str, **changes: Any) -> dict[str, Any]:
    """Return GGUF metadata of a vocabulary with special tokens, bytes if the model has them, and trained tokens."""
    texts, _ = trained_merges(bytewise=False)
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)] if model == "llama" else []
    first = ["<unk>", "<s>", "</s>", "<user>"]
    tokens = [*first, *bytes_, *(text for text in texts if "\n" not in text or text == "\n")]
    trained = len(tokens) - len(first) - len(bytes_)
    types = [2, 3, 3, 4, *([6] * len(bytes_)), *([1] * trained)]
    ranked = [-1.0 - index / 64 - (index * 37 % 101) / 1024 for index in range(trained)]  # f32 values without ties
    scores = [0.0] * (len(first) + len(bytes_)) + ranked
    values: dict[str, Any] = {
        "model": model, "tokens": tokens, "token_type": types, "scores": scores, "unknown_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2, **changes,
    }  # fmt: skip
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


def wordpiece(**changes: Any) -> dict[str, Any]:
    words = sorted({word for text in TEXTS for word in text.replace("\0", "").split()})
    pieces = sorted({word[start : start + 2] for word in words for start in range(1, len(word))})
    singles = sorted({letter for text in TEXTS for letter in text if not letter.isspace() and letter != "\0"})
    spelled = [SPACE + word for word in [*words, *singles]]
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *dict.fromkeys([*spelled, *singles, *pieces])]
    values: dict[str, Any] = {
        "model": "bert", "tokens": tokens, "token_type": [3, 3, 3, 3, *([1] * (len(tokens) - 4))],
        "unknown_token_id": 1, "bos_token_id": 2, "cls_token_id": 2, "seperator_token_id": 3, **changes,
    }  # fmt: skip
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


VOCABULARIES = {
    **{f"spm, prefix {prefix}": metadata("llama", add_space_prefix=prefix) for prefix in (True, False)},
    **{
        f"unigram, prefix {prefix}, squeezed {squeezed}": metadata(
            "t5", add_space_prefix=prefix, remove_extra_whitespaces=squeezed
        )
        for prefix in (True, False)
        for squeezed in (True, False)
    },
    "wordpiece": wordpiece(),
    "wordpiece, cased": wordpiece(**{"normalizer.lowercase": False}),
    "wordpiece, accents": wordpiece(**{"normalizer.strip_accents": False}),
}


def is_compared(name: str, text: str) -> bool:
    """Return whether llama.cpp and BERT's published rules agree.

    If accents are dropped, llama.cpp drops all marks, vowels of Hangul and dots of capital letters too. It adds no
    space to a part of a text that has only spaces, unless it removes them.
    """
    if name == "wordpiece":
        parts = unicodedata.normalize("NFD", text)
        return not any(unicodedata.category(letter) == "Mc" or "\u1160" <= letter < "\u1200" for letter in parts)
    if name == "wordpiece, accents":
        return "\u0130" not in text
    return name != "unigram, prefix True, squeezed False" or (text.strip(" ") != "" and "  <" not in text)


@pytest.mark.parametrize("name", VOCABULARIES)
def test_tokens_are_those_of_llama_cpp(name: str, tmp_path: Path) -> None:
    vocabulary = VOCABULARIES[name]
    path = write_vocabulary(tmp_path / "x.gguf", vocabulary)
    texts = [text for text in TEXTS if is_compared(name, text)]
    assert len(texts) > 30
    (answer,) = llama_tokens([{"path": str(path), "texts": texts, "parse": True}], tmp_path)
    assert not answer["error"]
    files, _ = tokenizer.to_files(vocabulary)
    tokens = file_tokens(files["tokenizer.json"], texts)
    different = [text for text, *ids in zip(texts, answer["ids"], tokens, strict=True) if ids[0] != ids[1]]
    assert different == []


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
@pytest.mark.parametrize("rule", ["identity", "nmt_nfkc"])
@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("squeezed", [True, False])
def test_a_trained_model_alone_has_sentencepiece_s_tokens(
    model_type: str, rule: str, prefix: bool, squeezed: bool, tmp_path: Path
) -> None:
    """The table of characters and the removal of spaces of a BPE are what a note reports as not carried over."""
    library = pytest.importorskip("sentencepiece")
    written = io.BytesIO()
    library.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in PROBE for line in text.splitlines() if line.strip()] * 3),
        model_writer=written, model_type=model_type, vocab_size=1000, byte_fallback=model_type == "bpe",
        normalization_rule_name=rule, add_dummy_prefix=prefix, remove_extra_whitespaces=squeezed,
        hard_vocab_limit=False, num_threads=1, minloglevel=2, max_sentence_length=100000, character_coverage=1.0,
    )  # fmt: skip
    model = sentencepiece.read(written.getvalue(), "tokenizer.model")
    assert model is not None
    vocabulary = sentencepiece.to_metadata(model, {}, {})
    expected_notes = [rule == "nmt_nfkc", squeezed] if model_type == "bpe" else [squeezed and not prefix]
    assert len(vocabulary.dropped) == sum(expected_notes)
    typed = {key: value for key, (_, value) in vocabulary.typed.items()}
    typed |= {"tokenizer.ggml.unknown_token_id": 0, "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
    path = write_vocabulary(tmp_path / "x.gguf", typed)
    # SentencePiece and llama.cpp choose another order of = and ==, which has the same score
    texts = [text for text in PROBE if text.strip() and "\x85" not in text and "===" not in text]
    if sum(expected_notes):
        texts = ["the cat", "All human beings", "free and equal"] if model_type == "bpe" else []
    (answer,) = llama_tokens([{"path": str(path), "texts": texts}], tmp_path)
    own = library.SentencePieceProcessor(model_proto=written.getvalue())
    different = [text for text, ids in zip(texts, answer["ids"], strict=True) if ids != own.encode(text)]
    assert different == []
    files, _ = tokenizer.to_files(typed)
    # tokenizers does not look up the two characters of a line end in the table, because they are one grapheme
    expected = {text: ids for text, ids in zip(texts, answer["ids"], strict=True) if "\r\n" not in text}
    assert file_tokens(files["tokenizer.json"], [*expected]) == [*expected.values()]
