"""A GGUF file contains ``tokenizer.json`` only if its own keys do not give back an equal tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ingot
from ingot.translate import pretokenizer_probe, tokenizer, tokenizer_equality
from tests.support import model_folder

pytest.importorskip("gguf")

KEY = "tokenizer.huggingface.json"
CONFIG_KEY = "ingot.companion.config.json"
SETTINGS = {**model_folder.SETTINGS, "bos_token": "<|im_start|>"}
BYTES_STEP = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}


def template(type_id: int = 1) -> dict[str, Any]:
    """Return a template that adds the BOS token before each text of a pair."""
    bos = "<|im_start|>"
    first, second = ({"Sequence": {"id": name, "type_id": index}} for index, name in enumerate("AB"))
    before, again = ({"SpecialToken": {"id": bos, "type_id": index}} for index in (0, type_id))
    token_id = model_folder.FIRST_SPECIAL + 1
    return {
        "type": "TemplateProcessing", "single": [before, first], "pair": [before, first, again, second],
        "special_tokens": {bos: {"id": bos, "ids": [token_id], "tokens": [bos]}},
    }  # fmt: skip


def convert(folder: Path) -> tuple[dict[str, Any], list[str]]:
    report = ingot.convert(folder, folder.with_suffix(".gguf"))
    with ingot.open(folder.with_suffix(".gguf")) as checkpoint:
        return dict(checkpoint.metadata), list(report.notes)


def spaced_bpe() -> dict[str, Any]:
    """Return a BPE with bytes for unknown characters, and Gemma's steps: a split at spaces that are replaced before."""
    space = "\u2581"
    texts = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "t", "h", space, "th"]
    added = [
        {"id": index, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True} for index, text in enumerate(texts[:4])
    ]  # fmt: skip
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": space}
    restore = {"type": "Replace", "pattern": {"String": space}, "content": " "}
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": replace,
        "pre_tokenizer": {
            "type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False,
        },
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [restore, {"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {
            "type": "BPE", "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True,
            "vocab": {text: index for index, text in enumerate(texts)}, "merges": ["t h"],
        },
    }  # fmt: skip


SPACED = {f"{role}_token": f"<{role}>" for role in ("pad", "eos", "bos", "unk")}


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        (model_folder.tokenizer(), SETTINGS),
        (model_folder.tokenizer(pre="llama-bpe"), SETTINGS),
        (model_folder.tokenizer(processor=template(), pre="llama-bpe"), SETTINGS),
        (model_folder.tokenizer(processor={"type": "Sequence", "processors": [BYTES_STEP, template()]}), SETTINGS),
        (model_folder.tokenizer(processor=BYTES_STEP), SETTINGS),
        (spaced_bpe(), {**SPACED, "add_bos_token": False}),
    ],
)
def test_an_equal_tokenizer_is_not_copied(words: dict[str, Any], settings: dict[str, Any], tmp_path: Path) -> None:
    library = pytest.importorskip("tokenizers")
    metadata, notes = convert(model_folder.write(tmp_path / "m", words=words, settings=settings))
    assert KEY not in metadata
    assert not any("tokenizer.json" in note for note in notes)
    ingot.convert(tmp_path / "m.gguf", tmp_path / "back", format="safetensors")
    first, second = (library.Tokenizer.from_file(str(tmp_path / name / "tokenizer.json")) for name in ("m", "back"))
    assert first.get_vocab() == second.get_vocab()
    texts = [*pretokenizer_probe.TEXTS, "<|im_start|>th<|im_end|> the", "<bos>th  th<eos>"]
    for text in texts:
        ours, theirs = second.encode(text, "th"), first.encode(text, "th")
        assert (ours.ids, ours.type_ids, ours.offsets) == (theirs.ids, theirs.type_ids, theirs.offsets)
        assert first.decode(theirs.ids, False) == second.decode(theirs.ids, False)
    for name in ("config.json", "tokenizer_config.json"):
        original, restored = (json.loads((tmp_path / folder / name).read_text()) for folder in ("m", "back"))
        assert original == restored
    again, _ = convert(tmp_path / "back")
    assert {**again, CONFIG_KEY: ""} == {**metadata, CONFIG_KEY: ""}


def without_settings(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()


def edit(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / "tokenizer.json"
        words = json.loads(path.read_text())
        change(words)
        path.write_text(json.dumps(words))

    return apply


@pytest.mark.parametrize(
    "change",
    [
        without_settings,
        edit(lambda words: words.update(truncation={"max_length": 8, "strategy": "LongestFirst", "stride": 0})),
        edit(lambda words: words.update(padding={"strategy": {"Fixed": 8}})),
        edit(lambda words: words.update(normalizer={"type": "NFC"})),
        edit(lambda words: words.update(post_processor={**BYTES_STEP, "trim_offsets": True})),
        edit(lambda words: words.update(post_processor=template(0))),
        edit(lambda words: words.update(decoder=None)),
        edit(lambda words: words["added_tokens"][0].update(lstrip=True)),
        edit(lambda words: words["added_tokens"][0].update(normalized=True)),
        edit(lambda words: words["added_tokens"].append({**words["added_tokens"][0], "id": 280, "content": "<more>"})),
        edit(lambda words: words["model"].update(ignore_merges=True)),
        edit(lambda words: words["model"].update(dropout=0.1)),
        edit(lambda words: words["model"]["vocab"].update({"unused": 270})),
    ],
)
def test_another_tokenizer_is_copied(change: Callable[[Path], None], tmp_path: Path) -> None:
    folder = model_folder.write(tmp_path / "m", settings=SETTINGS)
    change(folder)
    metadata, _ = convert(folder)
    assert metadata[KEY] == (folder / "tokenizer.json").read_text()


def test_flags_of_tokens_come_from_the_settings(tmp_path: Path) -> None:
    words = model_folder.tokenizer()
    words["added_tokens"][0]["lstrip"] = True
    settings = {**SETTINGS, "added_tokens_decoder": {"257": {"content": "<|endoftext|>", "lstrip": True}}}
    metadata, _ = convert(model_folder.write(tmp_path / "m", words=words, settings=settings))
    assert KEY not in metadata


def test_an_added_token_that_a_word_could_be_is_copied(tmp_path: Path) -> None:
    words = model_folder.tokenizer(["\u0120foo"], pre="llama-bpe")  # the bytes of " foo", and a text of its own
    metadata, _ = convert(model_folder.write(tmp_path / "m", words=words, settings=SETTINGS))
    assert KEY in metadata


def test_a_large_copy_has_a_note(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("ingot.translate.companions._LARGE_COPY", 100)
    words = model_folder.tokenizer()
    words["normalizer"] = {"type": "NFC"}
    _, notes = convert(model_folder.write(tmp_path / "m", words=words))
    (note,) = (note for note in notes if "copy of tokenizer.json" in note)
    assert "another normalizer" in note


def test_a_file_without_a_tokenizer_keeps_the_copy(tmp_path: Path) -> None:
    folder = model_folder.write(tmp_path / "m", words={"model": {"type": "WordLevel"}})
    ingot.convert(folder, tmp_path / "m.gguf", no_tokenizer=True)
    with ingot.open(tmp_path / "m.gguf") as checkpoint:
        assert KEY in checkpoint.metadata


def test_scores_are_compared_as_gguf_stores_them() -> None:
    def why(score: float) -> str:
        space = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "never", "split": True}
        words = {
            "added_tokens": [], "normalizer": None, "pre_tokenizer": space, "decoder": space,
            "model": {"type": "Unigram", "unk_id": None, "vocab": [["a", score], ["b", -1.0]]},
        }  # fmt: skip
        typed = tokenizer.to_metadata(words).typed
        return tokenizer_equality.why_not_rebuilt(words, {"eos_token": "a"}, {**typed})

    assert "model" in why(-0.1)
    assert "model" not in why(-0.5)
