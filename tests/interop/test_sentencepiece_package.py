"""Folders with ``tokenizer.model`` alone: what the package sentencepiece trains goes to GGUF and comes back.

The package itself and transformers say which tokens a text has.
"""

from __future__ import annotations

import io
import json
from base64 import b64decode
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.core.parsing.wire import bytes_field, number_field
from ingot.runtime.evaluation.special_tokens import surrounding_tokens
from ingot.runtime.loading.transformers_tokenizer import load_tokenizer
from ingot.translate import companions, sentencepiece, tokenizer
from ingot.translate.keys import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER

spm = pytest.importorskip("sentencepiece")
pytest.importorskip("google.protobuf")

TEXTS = (
    "the cat sat on the mat", "a  b   c", " leading", "trailing ", "line\nline\ttab",
    "caf\u00e9 \u4e2d\u6587 \U0001f600", "sat1234 x", "The Cat's hats\n\n", "",
)  # fmt: skip
STATED = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def trained(**options: Any) -> bytes:
    """Train as Llama's tokenizer was trained, on little text."""
    words = ["the cat sat on the mat", "a hat is on that mat", "the rat sat here and there", "1 2 3 4 x y z q w"] * 6
    written = io.BytesIO()
    settings = {
        "model_type": "bpe", "vocab_size": 320, "byte_fallback": True, "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False, "hard_vocab_limit": False, "num_threads": 1, "minloglevel": 2,
    }  # fmt: skip
    spm.SentencePieceTrainer.train(sentence_iterator=iter(words), model_writer=written, **{**settings, **options})
    return written.getvalue()


@pytest.fixture(scope="module")
def llama() -> bytes:
    return trained()


def folder(path: Path, model: bytes, settings: dict[str, Any], rows: int, **config: Any) -> Path:
    """A model of no layers worth speaking of, with this tokenizer."""
    path.mkdir()
    rng = np.random.default_rng(3)
    tensors = {
        name: rng.standard_normal((rows, 8)).astype("f4") for name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    ingot.save(path / "model.safetensors", {**tensors, "model.norm.weight": np.ones(8, "f4")}, {"format": "pt"})
    known = {
        "model_type": "llama", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "dtype": "float32",
        "num_attention_heads": 1, "vocab_size": rows, "bos_token_id": 1, "eos_token_id": 2,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "architectures": ["LlamaForCausalLMWithoutLayers"],
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps({**known, **config}))
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "tokenizer.model").write_bytes(model)
    return path


def there_and_back(source: Path, tmp_path: Path) -> tuple[dict[str, Any], Path, list[str]]:
    """Return the metadata of the file, the folder made of it, and what the two conversions told."""
    notes = list(ingot.convert(source, tmp_path / "x.gguf").notes)
    notes += ingot.convert(tmp_path / "x.gguf", tmp_path / "back", format="safetensors").notes
    with ingot.open(tmp_path / "x.gguf") as made:
        return dict(made.metadata), tmp_path / "back", notes


def test_llama_s_tokenizer(llama: bytes, tmp_path: Path) -> None:
    own = spm.SentencePieceProcessor(model_proto=llama)
    size = own.vocab_size()
    added = {
        "0": {"content": "<unk>", "special": True}, "1": {"content": "<s>", "special": True},
        "2": {"content": "</s>", "special": True}, str(size): {"content": "<|end|>", "special": True, "rstrip": True},
        str(size + 1): {"content": "<tool>", "special": False},
    }  # fmt: skip
    stated = {**STATED, "legacy": False, "add_bos_token": True, "added_tokens_decoder": added, "chat_template": "{{m}}"}
    source = folder(tmp_path / "model", llama, stated, rows=size + 6)
    metadata, back, notes = there_and_back(source, tmp_path)
    assert not any("not carried over" in note for note in notes)
    found = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    assert (found["model"], found["add_space_prefix"], found["add_bos_token"]) == ("llama", True, True)
    assert (found["bos_token_id"], found["eos_token_id"], found["unknown_token_id"]) == (1, 2, 0)
    assert found["tokenizer.chat_template"] == "{{m}}"
    assert found["tokens"][:size] == [own.id_to_piece(number) for number in range(size)]
    assert found["scores"][3:size] == [own.get_score(number) for number in range(3, size)]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (size - 259)]
    assert found["token_type"] == [*kinds, CONTROL, USER, *[UNUSED] * 4]
    assert found["tokens"][size : size + 3] == ["<|end|>", "<tool>", f"[PAD{size + 2}]"]

    assert (back / "tokenizer.model").read_bytes() == llama
    assert json.loads((back / "tokenizer_config.json").read_text()) == stated
    assert json.loads((back / "config.json").read_text()) == json.loads((source / "config.json").read_text())
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(source)
    ours = load_tokenizer(back)  # which warns where transformers' own makes other tokens of the folder
    for text in (*TEXTS, "a<|end|> b<tool> c"):
        assert ours(text).input_ids == theirs(text).input_ids
        if "<" not in text and not text.startswith(" "):  # before which transformers puts no second one
            assert ours(text, add_special_tokens=False).input_ids == own.encode(text)


def test_what_only_the_model_knows(llama: bytes, tmp_path: Path) -> None:
    """No settings: the file that is made cuts a text as SentencePiece does, and begins it as transformers does."""
    source = folder(tmp_path / "model", llama, {}, rows=320)
    (source / "added_tokens.json").write_text('{"<x>": 319}')
    metadata, back, _ = there_and_back(source, tmp_path)
    assert metadata["tokenizer.ggml.tokens"][319] == "<x>"
    assert metadata["tokenizer.ggml.token_type"][319] == USER
    assert json.loads((back / "added_tokens.json").read_text()) == {"<x>": 319}
    made, own = load_tokenizer(back), spm.SentencePieceProcessor(model_proto=llama)
    for text in filter(None, TEXTS):
        assert made(text).input_ids == [1, *own.encode(text)]


@pytest.mark.parametrize(
    ("settings", "begins"),
    [
        ({}, True),
        (STATED, True),
        ({**STATED, "add_bos_token": True}, True),
        ({**STATED, "add_bos_token": False}, False),
    ],
)
def test_a_folder_and_its_gguf_file_begin_a_text_alike(
    llama: bytes, tmp_path: Path, settings: dict[str, Any], begins: bool
) -> None:
    """transformers 5 adds no BOS if the settings do not mention it; Llama's and llama.cpp's tokenizers do."""
    source = folder(tmp_path / "model", llama, settings, rows=320)
    ingot.convert(source, tmp_path / "x.gguf")
    for path in (source, tmp_path / "x.gguf"):
        assert surrounding_tokens(load_tokenizer(path)).before == ((1,) if begins else ())


def test_a_prefix_is_told_where_there_is_none(llama: bytes, tmp_path: Path) -> None:
    """As of Gemma: llama.cpp puts a space before a text unless the file says otherwise."""
    plain = trained(add_dummy_prefix=False, user_defined_symbols=["\u2581\u2581", "<user>"])
    source = folder(tmp_path / "model", plain, {**STATED, "tokenizer_class": "GemmaTokenizer"}, rows=330)
    metadata, back, _ = there_and_back(source, tmp_path)
    assert metadata["tokenizer.ggml.add_space_prefix"] is False
    assert {"  ", "<user>"} <= set(metadata["tokenizer.ggml.tokens"])  # which llama.cpp looks for in text as it is
    made, own = load_tokenizer(back), spm.SentencePieceProcessor(model_proto=plain)
    for text in ("the  cat", "a <user> mat", " x"):
        assert made(text, add_special_tokens=False).input_ids == own.encode(text)
    # a tokenizer.json of either kind says the same
    for step, wanted in (({"type": "Prepend", "prepend": "\u2581"}, True), (None, False)):
        model = {"type": "BPE", "byte_fallback": True, "vocab": {"a": 0}}
        words = tokenizer.to_metadata({"normalizer": step, "model": model})
        assert words.typed["tokenizer.ggml.add_space_prefix"] == ("bool", wanted)


@pytest.mark.parametrize("kind", ["T5", "XLMRoberta"])
def test_unigram(kind: str, tmp_path: Path) -> None:
    """XLM-RoBERTa's ids are others than its file's: four tokens, then pieces from the fourth on, and a mask."""
    fairseq = kind == "XLMRoberta"
    ids = {} if fairseq else {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
    model = trained(
        model_type="unigram", vocab_size=40, byte_fallback=False, normalization_rule_name="nmt_nfkc",
        remove_extra_whitespaces=True, **ids,
    )  # fmt: skip
    own = spm.SentencePieceProcessor(model_proto=model)
    file = "sentencepiece.bpe.model" if fairseq else "tokenizer.model"
    rows = own.vocab_size() + 2 * fairseq
    numbers = {"bos_token_id": 0, "eos_token_id": 2} if fairseq else {"bos_token_id": None, "eos_token_id": 1}
    source = folder(tmp_path / "model", model, {"tokenizer_class": f"{kind}Tokenizer"}, rows, **numbers)
    (source / "tokenizer.model").rename(source / file)
    metadata, back, _ = there_and_back(source, tmp_path)
    assert metadata["tokenizer.ggml.model"] == "t5"
    assert len(metadata["tokenizer.ggml.tokens"]) == rows
    # what llama.cpp does of itself is not stated: it puts no token before a text, and one behind it
    assert metadata.get("tokenizer.ggml.add_bos_token", False) == fairseq
    assert metadata.get("tokenizer.ggml.add_eos_token", True) is True
    assert (back / file).read_bytes() == model
    made = load_tokenizer(back)
    start, end = ([0], [2]) if fairseq else ([], [1])
    for text in ("the cat sat", "a  b ", " \u2163 \ufb01", "x\u4e2dy"):
        pieces = [number + 1 if number else 3 for number in own.encode(text)] if fairseq else own.encode(text)
        assert made(text).input_ids == [*start, *pieces, *end]
    if fairseq:
        transformers = pytest.importorskip("transformers")
        theirs = transformers.XLMRobertaTokenizer.from_pretrained(source)
        assert theirs("the cat sat").input_ids == made("the cat sat").input_ids


@pytest.mark.parametrize(
    ("options", "told"),
    [({"normalization_rule_name": "nmt_nfkc"}, 1), ({"remove_extra_whitespaces": True}, 1),
     ({"byte_fallback": False}, 1), ({}, 0),
     ({"model_type": "unigram", "remove_extra_whitespaces": True}, 1)],
)  # fmt: skip
def test_what_llama_cpp_cannot_do_is_told(options: dict[str, Any], told: int) -> None:
    vocab = {"vocab_size": 40} if "byte_fallback" in options else {"vocab_size": 290} if "model_type" in options else {}
    found = sentencepiece.read(trained(**options, **vocab), "x")
    assert found is not None
    assert len(sentencepiece.to_metadata(found, {}, {}).dropped) == told


def test_models_of_other_kinds_are_refused(tmp_path: Path) -> None:
    for number, data in enumerate((trained(model_type="char", vocab_size=300), b"IQ== 0\nIg== 1\n", b"")):
        source = folder(tmp_path / f"model{number}", data, STATED, rows=32)
        with pytest.raises(ingot.IngotError) as caught:
            ingot.convert(source, tmp_path / f"{number}.gguf")
        assert (caught.value.rule, caught.value.where) == ("architecture.tokenizer", "tokenizer.model")
        report = ingot.convert(source, tmp_path / f"{number}.gguf", no_tokenizer=True)
        assert any("no tokenizer" in note for note in report.notes)
        with ingot.open(tmp_path / f"{number}.gguf") as made:
            assert "tokenizer.ggml.tokens" not in made.metadata
            assert b64decode(made.metadata["ingot.companion.tokenizer.model"]) == data


PIECE = bytes_field(1, bytes_field(1, "<unk>") + number_field(3, 2))


@pytest.mark.parametrize(
    "data",
    [
        PIECE[:-1],
        PIECE + b"\x0a\xff\xff\xff\xff\x0f",
        PIECE + PIECE,
        PIECE + bytes_field(1, b""),
        PIECE + bytes_field(1, bytes_field(1, b"\xff")),
        PIECE + bytes_field(1, bytes_field(1, "a") + number_field(3, 7)),
        PIECE + bytes_field(1, bytes_field(1, "a") + number_field(2, 0)),
        PIECE + bytes_field(1, bytes_field(1, "a") + b"\x15\x00\x00\x80\x7f"),
        PIECE + bytes_field(2, b"\x18") ,
        PIECE + bytes_field(2, b"") + bytes_field(2, b""),
        PIECE + number_field(3, 1),
        PIECE + bytes_field(3, number_field(2, 1)),
        PIECE + number_field(1, 1),
    ],
)  # fmt: skip
def test_what_no_trainer_writes_is_refused(data: bytes) -> None:
    with pytest.raises(ingot.IngotError) as caught:
        sentencepiece.read(data, "tokenizer.model")
    assert caught.value.rule == "architecture.companion"


def test_ids_outside_are_told_and_never_filled_up_to() -> None:
    found = sentencepiece.read(PIECE, "x")
    assert found is not None
    settings = {"added_tokens_decoder": {"4000000": {"content": "a"}, "-1": {"content": "b"}, "x": {}, "9" * 30: {}}}
    words = sentencepiece.to_metadata(found, settings, {"c": 1 << 40, "d": True}, 3)
    assert words.typed["tokenizer.ggml.tokens"][1] == ["<unk>", "[PAD1]", "[PAD2]"]
    assert words.outside == {4000000: "a"}


def test_metadata_that_hold_no_base64_hold_no_model() -> None:
    assert not companions.stored_files({"ingot.companion.tokenizer.model": "%%%"})
