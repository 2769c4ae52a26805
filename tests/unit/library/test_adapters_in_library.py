"""Adapters in a library: stored beside their base, listed under it, merged on the way out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.artifacts.identity import content_id
from ingot.cli.main import run
from ingot.errors import IngotError
from tests.support import model_folder
from tests.support.adapters import DOWN, Q, lora, peft_folder


@pytest.fixture
def library(tmp_path: Path) -> ingot.Library:
    library = ingot.Library(tmp_path / "library")
    library.add(model_folder.write(tmp_path / "base"), "org/base")
    return library


def adapter(path: Path, seed: int = 1, **config: Any) -> Path:
    return peft_folder(path, lora(Q, rows=64, cols=64, rank=8, seed=seed), r=8, **config)


def rule(call: Any, *args: Any, **options: Any) -> str | None:
    with pytest.raises(IngotError) as error:
        call(*args, **options)
    return error.value.rule


def test_adapters_are_listed_under_their_base(
    library: ingot.Library, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {**model_folder.CONFIG, "intermediate_size": 96}
    library.add(model_folder.write(tmp_path / "other", config, {"w": np.ones((3, 3), np.float32)}), "org/other")
    added = library.add(adapter(tmp_path / "style"), "a/style")
    assert "adapter of org/base" in added.notes
    library.add(adapter(tmp_path / "facts", seed=2), "z/facts")
    entries = library.ls().artifacts
    assert [(entry.name, entry.base) for entry in entries] == [
        ("org/base", ""),
        ("a/style", "org/base"),
        ("z/facts", "org/base"),
        ("org/other", ""),
    ]
    assert run(["store", "ls", str(library.address)]) == 0
    assert "adapter of" in capsys.readouterr().out
    assert library.verify() == []


def test_the_manifest_states_the_content_id_of_the_base(library: ingot.Library, tmp_path: Path) -> None:
    library.add(adapter(tmp_path / "style"), "style")
    manifest = json.loads((Path(library.address) / "artifacts" / "style.json").read_text())
    with ingot.open(tmp_path / "base") as base:
        assert manifest["base"]["content"] == content_id(base)
    assert manifest["base"]["name"] == "org/base"


def test_an_adapter_comes_back_bit_for_bit_or_merged(library: ingot.Library, tmp_path: Path) -> None:
    style = adapter(tmp_path / "style")
    library.add(style, "style")
    library.get("style", tmp_path / "copy")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "copy" / name).read_bytes() == (style / name).read_bytes()
    got = library.get("style", tmp_path / "merged", merge=True)
    assert "merged into org/base" in got.notes
    ingot.merge(tmp_path / "base", style, tmp_path / "expected")
    with ingot.open(tmp_path / "merged") as merged, ingot.open(tmp_path / "expected") as expected:
        assert content_id(merged) == content_id(expected)
    assert (tmp_path / "merged" / "config.json").exists()
    library.get("style", tmp_path / "merged.zt", merge=True, format="zt")
    with ingot.open(tmp_path / "merged.zt") as merged, ingot.open(tmp_path / "expected") as expected:
        assert content_id(merged) == content_id(expected)


def test_equal_tensors_of_adapters_are_stored_once(library: ingot.Library, tmp_path: Path) -> None:
    library.add(adapter(tmp_path / "one"), "one")
    added = library.add(adapter(tmp_path / "two", lora_dropout=0.1), "two")
    assert added.present >= 2
    assert added.full == 0


def test_a_named_base_must_fit(library: ingot.Library, tmp_path: Path) -> None:
    wrong_shape = peft_folder(tmp_path / "shape", lora(DOWN, rows=64, cols=40))
    assert rule(library.add, wrong_shape, "x", base="org/base") == "adapter.shape"
    no_module = peft_folder(tmp_path / "module", lora("model.layers.9.self_attn.q_proj"))
    assert rule(library.add, no_module, "x", base="org/base") == "adapter.base"
    assert rule(library.add, adapter(tmp_path / "a"), "x", base="org/missing") == "library.unknown"
    assert [entry.name for entry in library.ls().artifacts] == ["org/base"]


def test_a_damaged_adapter_is_added_only_on_request(library: ingot.Library, tmp_path: Path) -> None:
    factors = lora(Q, 64, 64)
    factors[f"{Q}.lora_A.weight"][2, 3] = np.nan
    damaged = peft_folder(tmp_path / "damaged", factors)
    assert rule(library.add, damaged, "x") == "library.adapter"
    assert rule(library.add, damaged, "x", base="org/base") == "library.adapter"
    assert [entry.name for entry in library.ls().artifacts] == ["org/base"]
    library.add(damaged, "x", base="none")
    assert rule(library.get, "x", tmp_path / "out", merge=True) == "library.base"
    library.get("x", tmp_path / "copy")
    file = "adapter_model.safetensors"
    assert (tmp_path / "copy" / file).read_bytes() == (damaged / file).read_bytes()


def test_an_adapter_without_a_base_is_kept_with_a_note(library: ingot.Library, tmp_path: Path) -> None:
    added = library.add(peft_folder(tmp_path / "shape", lora(DOWN, rows=64, cols=40)), "lonely")
    assert any("no base of this adapter" in note for note in added.notes)
    assert rule(library.get, "lonely", tmp_path / "out", merge=True) == "library.base"
    assert rule(library.get, "org/base", tmp_path / "out", merge=True) == "library.base"
    assert not (tmp_path / "out").exists()


def test_of_several_bases_the_adapter_names_one(library: ingot.Library, tmp_path: Path) -> None:
    weights = {name: value + np.float32(1) for name, value in model_folder.tensors().items()}
    library.add(model_folder.write(tmp_path / "second", weights=weights), "org/second")
    added = library.add(adapter(tmp_path / "a"), "a")
    assert any("2 artifacts fit" in note for note in added.notes)
    library.add(adapter(tmp_path / "b", base_model_name_or_path="hub/second"), "b")
    library.add(adapter(tmp_path / "c"), "c", base="org/base")
    bases = {entry.name: entry.base for entry in library.ls().artifacts}
    assert (bases["a"], bases["b"], bases["c"]) == ("", "org/second", "org/base")


def test_a_base_with_other_values_is_refused(library: ingot.Library, tmp_path: Path) -> None:
    library.add(adapter(tmp_path / "style"), "style")
    library.add(model_folder.write(tmp_path / "again", files={"README.md": "new"}), "org/base", overwrite=True)
    library.get("style", tmp_path / "merged", merge=True)
    weights = {name: value + np.float32(1) for name, value in model_folder.tensors().items()}
    library.add(model_folder.write(tmp_path / "changed", weights=weights), "org/base", overwrite=True)
    assert rule(library.get, "style", tmp_path / "out", merge=True) == "library.base"
    library.rm("org/base", force=True)
    assert rule(library.get, "style", tmp_path / "out", merge=True) == "library.base"
    assert not (tmp_path / "out").exists()


def test_the_base_of_adapters_is_removed_only_on_request(library: ingot.Library, tmp_path: Path) -> None:
    for name in ("style", "tone"):
        library.add(adapter(tmp_path / name), name)
    with pytest.raises(IngotError, match="org/base is the base of style, tone") as caught:
        library.rm("org/base")
    assert caught.value.rule == "library.base"
    library.rm("style")
    assert rule(library.rm, "org/base") == "library.base"
    library.rm("tone")
    library.rm("org/base")
    assert library.ls().artifacts == []


@pytest.mark.parametrize("base", ["x", {}, {"name": "../x", "content": "blake3:" + 64 * "0", "manifest": ""}])
def test_a_damaged_base_in_a_manifest_is_refused(library: ingot.Library, tmp_path: Path, base: Any) -> None:
    from ingot.library.manifest import _digest

    library.add(adapter(tmp_path / "style"), "style")
    path = Path(library.address) / "artifacts" / "style.json"
    fields = {**json.loads(path.read_text()), "base": base}
    fields.pop("digest")
    path.write_text(json.dumps({**fields, "digest": _digest(fields)}))
    assert rule(library.get, "style", tmp_path / "out") == "library.manifest"
