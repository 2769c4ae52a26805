"""Tokens and rows of the embedding, special tokens, chat templates, and models without a tokenizer, in GGUF files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import ingot
from ingot.cli.main import run
from ingot.errors import UnsupportedError
from ingot.translate.keys import CONTROL, UNUSED
from tests.support import model_folder

pytest.importorskip("gguf")

GGML = "tokenizer.ggml."
LAST = model_folder.FIRST_SPECIAL + len(model_folder.SPECIAL) - 1


def converted(path: Path, **options: Any) -> tuple[dict[str, Any], list[str]]:
    """Return the metadata of a folder's GGUF file, and the notes."""
    report = ingot.convert(path, path.with_suffix(".gguf"), **options)
    with ingot.open(path.with_suffix(".gguf")) as made:
        return dict(made.metadata), list(report.notes)


def refused(path: Path) -> UnsupportedError:
    with pytest.raises(UnsupportedError) as caught:
        ingot.convert(path, path.with_suffix(".gguf"))
    assert not path.with_suffix(".gguf").exists()
    return caught.value


@pytest.mark.parametrize("rows", [260, 264, 300])
def test_as_many_tokens_as_rows(rows: int, tmp_path: Path) -> None:
    config = {**model_folder.CONFIG, "vocab_size": rows}
    found, notes = converted(model_folder.write(tmp_path / "m", config, model_folder.tensors(rows=rows)))
    tokens, types = found[f"{GGML}tokens"], found[f"{GGML}token_type"]
    assert len(tokens) == len(types) == rows == found["llama.vocab_size"]
    assert tokens[LAST] == "<|im_end|>"
    assert types[LAST + 1 :] == [UNUSED] * (rows - LAST - 1)
    assert len(set(tokens)) == rows
    assert not any("row" in note for note in notes if "order of rows" not in note)


def test_tokens_without_a_row_are_left_out_and_named(tmp_path: Path) -> None:
    words = model_folder.tokenizer([f"<new{number}>" for number in range(12)])
    words["model"]["merges"].append(["a", "<new9>"])
    words["model"]["vocab"]["a<new9>"] = 290
    found, notes = converted(model_folder.write(tmp_path / "m", words=words))
    assert len(found[f"{GGML}tokens"]) == model_folder.ROWS
    (note,) = (note for note in notes if "without a row" in note)
    assert all(text in note for text in ("264 '<new4>'", "271 '<new11>'", "9 tokens"))
    assert found[f"{GGML}merges"] == ["t h"]


def test_a_special_token_without_a_row_is_refused(tmp_path: Path) -> None:
    words = model_folder.tokenizer([f"<new{number}>" for number in range(12)])
    source = model_folder.write(tmp_path / "m", words=words, settings={"eos_token": "<new11>"})
    error = refused(source)
    assert error.rule == "architecture.tokens"
    assert "eos_token 271" in error.message


def test_names_of_filled_rows_are_not_those_of_tokens(tmp_path: Path) -> None:
    words = model_folder.tokenizer(["[PAD261]", "[[PAD261]]"])  # ids 260 and 261
    words["added_tokens"][-1]["id"] = 262
    found, _ = converted(model_folder.write(tmp_path / "m", words=words))
    assert found[f"{GGML}tokens"][260:] == ["[PAD261]", "[[[PAD261]]]", "[[PAD261]]", "[PAD263]"]


def test_tokens_with_one_text_are_refused(tmp_path: Path) -> None:
    words = model_folder.tokenizer()
    words["added_tokens"].append({**words["added_tokens"][0], "id": 262})
    source = model_folder.write(tmp_path / "m", words=words)
    error = refused(source)
    assert error.rule == "architecture.tokens"
    assert "257 and 262" in error.message
    assert converted(source, no_tokenizer=True)[0][f"{GGML}model"] == "none"


def test_rows_count_before_the_config(tmp_path: Path) -> None:
    config = {**model_folder.CONFIG, "vocab_size": 300, "architectures": ["LlamaOfOtherSizes"]}
    found, notes = converted(model_folder.write(tmp_path / "m", config))
    assert found["llama.vocab_size"] == model_folder.ROWS == len(found[f"{GGML}tokens"])
    assert any("vocab_size 300" in note for note in notes)


@pytest.mark.parametrize(
    ("settings", "config", "generation", "eos"),
    [
        ({"eos_token": "<|im_end|>"}, {"eos_token_id": 5}, {}, LAST),
        ({"eos_token": "<|im_end|>"}, {}, {"eos_token_id": 5}, LAST),
        ({"eos_token": "th"}, {"eos_token_id": 5}, {}, 5),  # the package looks at added tokens alone
        ({"eos_token": "th"}, {}, {"eos_token_id": 5}, 256),
        ({}, {"eos_token_id": [5, 6]}, {}, 5),
        ({}, {"eos_token_id": 5}, {"eos_token_id": 6}, 5),
        ({}, {}, {"eos_token_id": [6, 7]}, 6),
        ({}, {"eos_token_id": -1}, {"eos_token_id": True}, None),
        ({}, {"eos_token_id": 5000}, {}, None),
    ],
)
def test_precedence_of_special_tokens(
    settings: dict[str, Any], config: dict[str, Any], generation: dict[str, Any], eos: int | None, tmp_path: Path
) -> None:
    files = {"generation_config.json": generation}
    source = model_folder.write(
        tmp_path / "m", {**model_folder.CONFIG, **config}, settings={"model_max_length": 8, **settings}, files=files
    )
    found, notes = converted(source)
    assert found.get(f"{GGML}eos_token_id") == eos
    assert any("eos token" in note for note in notes) == (eos is None)
    assert any("5000" in note for note in notes) == (config.get("eos_token_id") == 5000)
    # and back: the files say what they said
    ingot.convert(source.with_suffix(".gguf"), tmp_path / "back", format="safetensors")
    for name in ("config.json", "tokenizer_config.json"):
        assert json.loads((tmp_path / "back" / name).read_text()) == json.loads((source / name).read_text())


def test_a_token_that_the_metadata_name_by_now_counts_on_the_way_back(tmp_path: Path) -> None:
    converted(model_folder.write(tmp_path / "m", {**model_folder.CONFIG, "eos_token_id": LAST}))
    with ingot.open(tmp_path / "m.gguf") as checkpoint:
        ingot.save(tmp_path / "y.gguf", dict(checkpoint), {**checkpoint.metadata, f"{GGML}eos_token_id": LAST - 1})
    ingot.convert(tmp_path / "y.gguf", tmp_path / "back", format="safetensors")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["eos_token_id"] == LAST - 1
    assert json.loads((tmp_path / "back" / "tokenizer_config.json").read_text())["eos_token"] == "<|im_start|>"


def test_what_llama_cpp_does_of_itself_is_turned_off_if_the_tokenizer_does_not(tmp_path: Path) -> None:
    """For ``llama-bpe`` it puts a token before each text unless the file says otherwise."""
    words = model_folder.tokenizer(pre="llama-bpe")
    found, _ = converted(model_folder.write(tmp_path / "m", words=words))
    assert found[f"{GGML}add_bos_token"] is False
    assert f"{GGML}add_eos_token" not in found
    settings = {**model_folder.SETTINGS, "bos_token": "<|im_start|>", "add_bos_token": True}
    found, _ = converted(model_folder.write(tmp_path / "n", words=words, settings=settings))
    assert found[f"{GGML}add_bos_token"] is True


TOKENIZERS = {
    "none": {},
    "words": {"model": {"type": "WordLevel", "vocab": {"a": 0}}},
    "not an object": {"model": 5},
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_file_without_a_tokenizer_has_to_be_asked_for(name: str, tmp_path: Path) -> None:
    source = model_folder.write(tmp_path / "m", words=TOKENIZERS[name])
    error = refused(source)
    assert error.rule == "architecture.tokenizer"
    assert "no_tokenizer=True" in error.message
    assert run(["convert", str(source), str(tmp_path / "x.gguf"), "--no-tokenizer", "--quiet"]) == 0
    found, notes = converted(source, no_tokenizer=True)
    assert found[f"{GGML}model"] == "none"
    assert found["llama.vocab_size"] == model_folder.ROWS
    assert f"{GGML}tokens" not in found
    assert any("no tokenizer" in note for note in notes)
    report = ingot.convert(source.with_suffix(".gguf"), tmp_path / "back", format="safetensors")
    assert name != "none" or any("no tokenizer" in note for note in report.notes)
    assert (tmp_path / "back" / "tokenizer.json").exists() == (name != "none")


def test_the_option_takes_nothing_from_a_folder_with_a_tokenizer(tmp_path: Path) -> None:
    found, _ = converted(model_folder.write(tmp_path / "m"), no_tokenizer=True)
    assert found[f"{GGML}model"] == "gpt2"


NAMED = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}, {"name": "a-b", "template": "A"}]


@pytest.mark.parametrize(
    ("settings", "files", "templates", "unused"),
    [
        ({"chat_template": "D"}, {}, {"": "D"}, ()),
        ({"chat_template": NAMED}, {}, {"": "D", ".tool_use": "T", ".a_b": "A"}, ()),
        ({"chat_template": NAMED[1:]}, {}, {".tool_use": "T", ".a_b": "A"}, ()),
        ({}, {"chat_template.jinja": "J"}, {"": "J"}, ()),
        ({}, {"chat_template.json": {"chat_template": "N"}}, {"": "N"}, ()),
        (
            {},
            {"chat_template.jinja": "J", "additional_chat_templates/rag.jinja": "R"},
            {"": "J", ".rag": "R"},
            (),
        ),
        ({}, {"additional_chat_templates/rag.jinja": "R"}, {".rag": "R"}, ()),
        ({"chat_template": "D"}, {"chat_template.jinja": "J"}, {"": "D"}, ("chat_template.jinja",)),
        ({"chat_template": "J"}, {"chat_template.jinja": "J"}, {"": "J"}, ()),
        ({"chat_template": [*NAMED, {"name": "a b", "template": "B"}]}, {}, {"": "D", ".tool_use": "T", ".a_b": "A"},
         ("'a b'",)),
        ({"chat_template": 5}, {"chat_template.jinja": "J"}, {"": "J"}, ()),
    ],
)  # fmt: skip
def test_chat_templates(
    settings: dict[str, Any], files: dict[str, Any], templates: dict[str, str], unused: tuple[str, ...], tmp_path: Path
) -> None:
    source = model_folder.write(tmp_path / "m", settings={**model_folder.SETTINGS, **settings}, files=files)
    found, notes = converted(source)
    key = "tokenizer.chat_template"
    assert {
        name.removeprefix(key): found[name] for name in found if name.startswith(key) and name != f"{key}s"
    } == templates
    names = sorted(name[1:] for name in templates if name)
    assert found.get("tokenizer.chat_templates", []) == names
    assert all(any(name in note for note in notes) for name in unused)
    # all files come back; a file of another program gives the same templates
    ingot.convert(source.with_suffix(".gguf"), tmp_path / "back", format="safetensors")
    assert all((tmp_path / "back" / name).read_text() == (source / name).read_text() for name in files)
    with ingot.open(source.with_suffix(".gguf")) as checkpoint:
        others = {name: value for name, value in checkpoint.metadata.items() if "companion" not in name}
        ingot.save(tmp_path / "o.gguf", dict(checkpoint), others)
    ingot.convert(tmp_path / "o.gguf", tmp_path / "other", format="safetensors")
    again, _ = converted(tmp_path / "other")
    assert {name: again[name] for name in found if name.startswith(key)} == {
        name: value for name, value in found.items() if name.startswith(key)
    }


@pytest.mark.parametrize(
    "name", ["../x.jinja", "additional_chat_templates/../../x.jinja", "/etc/x", "a/Pooling/config.json"]
)
def test_names_of_files_in_metadata_lead_nowhere(name: str, tmp_path: Path) -> None:
    converted(model_folder.write(tmp_path / "m"))
    with ingot.open(tmp_path / "m.gguf") as checkpoint:
        ingot.save(tmp_path / "y.gguf", dict(checkpoint), {**checkpoint.metadata, f"ingot.companion.{name}": "{}"})
    ingot.convert(tmp_path / "y.gguf", tmp_path / "back", format="safetensors")
    assert sorted(path.name for path in (tmp_path / "back").iterdir()) == [
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip


def gguf_with(tmp_path: Path, **changes: Any) -> Path:
    converted(model_folder.write(tmp_path / "m"))
    with ingot.open(tmp_path / "m.gguf") as checkpoint:
        kept = {key: value for key, value in checkpoint.metadata.items() if "companion" not in key}
        ingot.save(
            tmp_path / "y.gguf", dict(checkpoint), {**kept, **{GGML + key: value for key, value in changes.items()}}
        )
    return tmp_path / "y.gguf"


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "rwkv"},
        {"tokens": ["a"] * model_folder.ROWS},
        {"tokens": []},
    ],
)
def test_a_tokenizer_that_no_folder_can_hold_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    source = gguf_with(tmp_path, **changes)
    with pytest.raises(UnsupportedError) as caught:
        ingot.convert(source, tmp_path / "back", format="safetensors")
    assert caught.value.rule == "architecture.tokenizer"
    report = ingot.convert(source, tmp_path / "back", format="safetensors", no_tokenizer=True)
    assert any("--no-tokenizer" in note for note in report.notes)
    assert not (tmp_path / "back" / "tokenizer.json").exists()


def test_metadata_that_no_file_of_a_folder_holds_are_named(tmp_path: Path) -> None:
    source = gguf_with(tmp_path, eot_token_id=LAST, fim_pre_token_id=4)
    with ingot.open(source) as checkpoint:
        more = {
            "llama.logit_scale": 0.5,
            "llama.attention.scale": 0.25,
            "llama.expert_count": 0,
            "general.license": "mit",
        }
        ingot.save(tmp_path / "z.gguf", dict(checkpoint), {**checkpoint.metadata, **more})
    notes = " ".join(ingot.convert(tmp_path / "z.gguf", tmp_path / "back", format="safetensors").notes)
    for key in ("eot_token_id", "fim_pre_token_id", "llama.logit_scale", "llama.attention.scale", "general.license"):
        assert key in notes
    assert "expert_count" not in notes
    assert "padding_token_id" not in notes


def test_control_tokens_of_wordpiece_keep_their_texts(tmp_path: Path) -> None:
    texts = ["<pad>", "<s>", "</s>", "[UNK]", "the", "##re"]
    words = model_folder.tokenizer()
    words["added_tokens"] = [
        {**words["added_tokens"][0], "id": number, "content": text} for number, text in enumerate(texts[:3])
    ]
    words["model"] = {"type": "WordPiece", "unk_token": "[UNK]", "vocab": {text: n for n, text in enumerate(texts)}}
    words["normalizer"], words["pre_tokenizer"] = (
        {"type": "BertNormalizer", "lowercase": True},
        {"type": "BertPreTokenizer"},
    )
    found, _ = converted(model_folder.write(tmp_path / "m", words=words, settings={"cls_token": "<s>"}))
    assert found[f"{GGML}tokens"][:6] == ["<pad>", "<s>", "</s>", "[UNK]", "\u2581the", "re"]
    assert found[f"{GGML}token_type"][:3] == [CONTROL] * 3
    assert found[f"{GGML}bos_token_id"] == 1
