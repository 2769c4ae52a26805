"""GGUF metadata of other programs survive a model folder, and edited metadata replace the stored files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import ingot
from ingot.errors import FormatError
from tests.support import model_folder

pytest.importorskip("gguf")

FILE = "gguf_metadata.json"
TEMPLATE = "tokenizer.chat_template"
ADDED: dict[str, Any] = {
    "general.name": "A name",
    "general.tags": ["chat", "en"],
    "quantize.imatrix.chunks_count": 7,
    "llama.unusual": 3,
    "vendor.factor": 1.5,
    "vendor.flag": True,
    "tokenizer.ggml.vendor": "x",
    "tokenizer.ggml.mask_token_id": 5,
    "tokenizer.ggml.eom_token_id": 6,
}


def metadata_of(path: Path) -> dict[str, Any]:
    with ingot.open(path) as checkpoint:
        return dict(checkpoint.metadata)


def edited(tmp_path: Path, *, is_stripped: bool, files: Any = None, **values: Any) -> Path:
    """Write a GGUF file whose metadata another program changed, and return its path."""
    ingot.convert(model_folder.write(tmp_path / "m", dict(model_folder.CONFIG), files=files), tmp_path / "x.gguf")
    with ingot.open(tmp_path / "x.gguf") as checkpoint:
        stored = {k: v for k, v in checkpoint.metadata.items() if not (is_stripped and k.startswith("ingot."))}
        ingot.save(tmp_path / "y.gguf", dict(checkpoint), {**stored, **values})
    return tmp_path / "y.gguf"


@pytest.mark.parametrize("is_stripped", [False, True])
def test_unknown_metadata_come_back(is_stripped: bool, tmp_path: Path) -> None:
    source = edited(tmp_path, is_stripped=is_stripped, **ADDED)
    report = ingot.convert(source, tmp_path / "folder", format="safetensors")
    assert any(FILE in note for note in report.notes)
    ingot.convert(tmp_path / "folder", tmp_path / "z.gguf")
    before, after = metadata_of(source), metadata_of(tmp_path / "z.gguf")
    assert {key: after.get(key) for key in ADDED} == ADDED
    types, new_types = (metadata["ingot.gguf"]["types"] for metadata in (before, after))
    assert {key: new_types[key] for key in ADDED} == {key: types[key] for key in ADDED}
    assert after["general.architecture"] == "llama"


def test_a_file_of_ingot_leaves_no_such_file(tmp_path: Path) -> None:
    source = edited(tmp_path, is_stripped=False)
    ingot.convert(source, tmp_path / "folder", format="safetensors")
    assert not (tmp_path / "folder" / FILE).exists()


@pytest.mark.parametrize("where_stored", ["tokenizer_config.json", "chat_template.jinja", "chat_template.json", None])
def test_a_template_that_was_replaced_in_the_file_is_used(where_stored: str | None, tmp_path: Path) -> None:
    old = {"chat_template": "{{ old }}"}
    contents = {
        "tokenizer_config.json": {**model_folder.SETTINGS, **old},
        "chat_template.jinja": "{{ old }}",
        "chat_template.json": old,
    }
    files = {where_stored: contents[where_stored]} if where_stored else None
    source = edited(tmp_path, is_stripped=False, files=files, **{TEMPLATE: "{{ new }}", f"{TEMPLATE}.rag": "{{ rag }}"})
    ingot.convert(source, tmp_path / "folder", format="safetensors")
    texts = [path.read_text() for path in (tmp_path / "folder").iterdir() if "template" in path.name]
    assert not texts
    settings = json.loads((tmp_path / "folder" / "tokenizer_config.json").read_text())
    assert {item["name"]: item["template"] for item in settings["chat_template"]} == {
        "default": "{{ new }}",
        "rag": "{{ rag }}",
    }
    ingot.convert(tmp_path / "folder", tmp_path / "z.gguf")
    assert metadata_of(tmp_path / "z.gguf")[TEMPLATE] == "{{ new }}"


def test_a_flag_that_was_changed_in_the_file_is_used(tmp_path: Path) -> None:
    files = {"tokenizer_config.json": {**model_folder.SETTINGS, "add_eos_token": True}}
    source = edited(tmp_path, is_stripped=False, files=files, **{"tokenizer.ggml.add_eos_token": False})
    ingot.convert(source, tmp_path / "folder", format="safetensors")
    assert json.loads((tmp_path / "folder" / "tokenizer_config.json").read_text())["add_eos_token"] is False


@pytest.mark.parametrize("text", ["{", "[]", '{"values": []}', '{"values": {"a": 1}, "types": 3}'])
def test_a_malformed_file_is_refused(text: str, tmp_path: Path) -> None:
    source = model_folder.write(tmp_path / "m", dict(model_folder.CONFIG), files={FILE: text})
    with pytest.raises(FormatError) as caught:
        ingot.convert(source, tmp_path / "x.gguf")
    assert caught.value.rule == "architecture.companion"
    assert not (tmp_path / "x.gguf").exists()


def test_the_file_does_not_replace_what_the_folder_states(tmp_path: Path) -> None:
    values = {"general.architecture": "qwen2", "llama.block_count": 9, "general.alignment": 64, "split.count": 3}
    content = {"values": values, "types": {"llama.block_count": "u32", "general.alignment": "text"}}
    source = model_folder.write(tmp_path / "m", dict(model_folder.CONFIG), files={FILE: content})
    ingot.convert(source, tmp_path / "x.gguf")
    metadata = metadata_of(tmp_path / "x.gguf")
    assert metadata["general.architecture"] == "llama"
    assert metadata["llama.block_count"] == 1
    assert "split.count" not in metadata
