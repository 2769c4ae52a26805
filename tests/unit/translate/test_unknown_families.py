"""A model that the target's program would not open is refused, by every command alike, unless names are to be kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.cli.main import run
from ingot.conversion.matrix import matrix
from ingot.errors import IngotError, UnsupportedError
from ingot.translate.families import FAMILIES
from tests.support import model_folder

pytest.importorskip("gguf")

UNKNOWN: dict[str, tuple[dict[str, Any] | None, str]] = {
    "another": ({"model_type": "helium"}, "helium"),
    "none": ({"model_type": None}, "states no model_type"),
    "number": ({"model_type": 5}, "'5'"),
    "wrapper": ({"model_type": "gemma3n", "text_config": {"model_type": "gemma3n_text"}}, "gemma3n_text"),
    "no config": (None, "no config.json"),
}


def model(path: Path, change: dict[str, Any] | None) -> Path:
    return model_folder.write(path, None if change is None else {**model_folder.CONFIG, **change})


def refusal(call: Any) -> UnsupportedError:
    with pytest.raises(UnsupportedError) as caught:
        call()
    return caught.value


@pytest.mark.parametrize("name", UNKNOWN)
def test_into_gguf(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change, said = UNKNOWN[name]
    source, out = model(tmp_path / "m", change), tmp_path / "x.gguf"
    error = refusal(lambda: ingot.convert(source, out))
    assert error.rule == "architecture.unknown"
    assert said in error.message
    assert "keep_names=True" in error.message
    assert "\n" not in error.message
    assert not out.exists()
    listed = change is not None and name != "wrapper"
    assert not listed or all(family in error.message for family in FAMILIES)

    # the plan, the table of formats and a command say the same
    assert refusal(lambda: ingot.convert(source, tmp_path / "d", format="gguf")).rule == error.rule
    assert run(["convert", str(source), str(out), "--dry-run"]) == error.exit_code == 1
    assert said in capsys.readouterr().err
    (target,) = matrix(source, to=["gguf"]).targets
    assert target.refused == len(model_folder.tensors())
    assert said in (target.obstacle or "")
    assert not matrix(source, to=["gguf"], keep_names=True).targets[0].refused

    report = ingot.convert(source, out, keep_names=True)
    assert any("llama.cpp does not open" in note for note in report.notes)
    with ingot.open(out) as made:
        assert set(made) == set(model_folder.tensors())
        assert "general.architecture" not in made.metadata


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "deepseek_v32"}, "deepseek32"),
        ({"model_type": "gemma4", "text_config": {"model_type": "gemma4_text"}}, "confirmed by llama.cpp"),
    ],
)
def test_a_known_reason_is_stated_instead_of_the_list(change: dict[str, Any], reason: str, tmp_path: Path) -> None:
    source = model(tmp_path / "m", change)
    error = refusal(lambda: ingot.convert(source, tmp_path / "x.gguf"))
    assert reason in error.message
    assert len(error.message) < 300
    assert not (tmp_path / "x.gguf").exists()


@pytest.mark.parametrize("recipe", [None, "q8_0"])
def test_arrays_that_are_no_model(recipe: str | None, tmp_path: Path) -> None:
    ingot.save(tmp_path / "a.safetensors", {"x": np.ones((32, 32), np.float32)})
    error = refusal(lambda: ingot.convert(tmp_path / "a.safetensors", tmp_path / "x.gguf", recipe))
    assert error.rule == "architecture.unknown"
    ingot.convert(tmp_path / "a.safetensors", tmp_path / "x.gguf", recipe, keep_names=True)
    # what is GGUF already, or was, is copied
    ingot.convert(tmp_path / "x.gguf", tmp_path / "y.gguf")


def test_a_container_made_of_a_gguf_file_is_one_again(tmp_path: Path) -> None:
    ingot.convert(model_folder.write(tmp_path / "m"), tmp_path / "x.gguf")
    ingot.convert(tmp_path / "x.gguf", tmp_path / "x.zt")
    ingot.convert(tmp_path / "x.zt", tmp_path / "y.gguf")
    assert (tmp_path / "y.gguf").read_bytes() == (tmp_path / "x.gguf").read_bytes()


@pytest.mark.parametrize("name", UNKNOWN)
def test_into_mlx(name: str, tmp_path: Path) -> None:
    change, said = UNKNOWN[name]
    if name in ("another", "wrapper"):  # which mlx_lm knows
        change, said = {"model_type": "bert"}, "bert"
    source = model(tmp_path / "m", change)
    error = refusal(lambda: ingot.convert(source, tmp_path / "x", format="mlx"))
    assert error.rule == "architecture.unknown"
    assert said in error.message
    assert matrix(source, to=["mlx"]).targets[0].refused
    report = ingot.convert(source, tmp_path / "x", format="mlx", keep_names=True)
    assert any("mlx_lm" in note for note in report.notes)
    with ingot.open(tmp_path / "x") as made:
        assert set(made) == set(model_folder.tensors())


@pytest.mark.parametrize("kind", ["llama", "mistral", "smollm3", "qwen2_5_vl", "phi-msft", "lfm2-vl", "gemma3"])
def test_families_that_mlx_lm_computes(kind: str, tmp_path: Path) -> None:
    source = model(tmp_path / "m", {"model_type": kind})
    report = ingot.convert(source, tmp_path / "x", "mlx-4bit", format="mlx")
    assert not report.superseded
    assert json.loads((tmp_path / "x" / "config.json").read_text())["model_type"] == kind


@pytest.mark.parametrize("format", ["safetensors", "mlx", "zt"])
@pytest.mark.parametrize("arch", [None, "plamo", "clip"])
def test_out_of_gguf(arch: str | None, format: str, tmp_path: Path) -> None:
    metadata = {} if arch is None else {"general.architecture": arch}
    ingot.save(tmp_path / "x.gguf", {"token_embd.weight": np.ones((4, 32), np.float32)}, metadata)
    error = refusal(lambda: ingot.convert(tmp_path / "x.gguf", tmp_path / "out", format=format))
    assert error.rule == "architecture.unknown"
    assert (arch or "no general.architecture") in error.message
    report = ingot.convert(tmp_path / "x.gguf", tmp_path / "out", format=format, keep_names=True)
    assert any("names are unchanged" in note for note in report.notes)
    ingot.convert(tmp_path / "x.gguf", tmp_path / "x.safetensors")  # a file of arrays is no model's folder


def test_a_config_beside_a_single_file_is_used(tmp_path: Path) -> None:
    folder = model_folder.write(tmp_path / "m")
    ingot.convert(folder, tmp_path / "wanted.gguf")
    report = ingot.convert(folder / "model.safetensors", tmp_path / "x.gguf")
    assert (tmp_path / "x.gguf").read_bytes() == (tmp_path / "wanted.gguf").read_bytes()
    assert report.source == str(folder / "model.safetensors")
    assert any("beside model.safetensors" in note for note in report.notes)
    assert not matrix(folder / "model.safetensors", to=["gguf", "mlx"]).targets[0].refused
    ingot.convert(folder / "model.safetensors", tmp_path / "mlx", format="mlx")
    assert (tmp_path / "mlx" / "tokenizer.json").exists()
    assert run(["convert", str(folder / "model.safetensors"), str(tmp_path / "p.gguf"), "--plan-out",
                str(tmp_path / "plan.json")]) == 0  # fmt: skip
    ingot.execute(tmp_path / "plan.json")
    assert (tmp_path / "p.gguf").read_bytes() == (tmp_path / "wanted.gguf").read_bytes()


def test_a_file_that_is_a_part_of_the_folder_is_not_the_model(tmp_path: Path) -> None:
    folder = model_folder.write(tmp_path / "m")
    ingot.convert(folder, tmp_path / "s", format="safetensors", max_shard=20_000)
    shard = min((tmp_path / "s").glob("model-00001-of-*.safetensors"))
    (folder / "adapter.safetensors").write_bytes(shard.read_bytes())
    for part in (shard, folder / "adapter.safetensors"):
        with pytest.raises(IngotError) as caught:
            ingot.convert(part, tmp_path / "x.gguf")
        assert caught.value.rule == "convert.part"
        assert "convert the folder" in caught.value.message
        assert "convert the folder" in (matrix(part, to=["gguf"]).targets[0].obstacle or "")
        ingot.convert(part, tmp_path / f"{part.stem}.gguf", keep_names=True)
    ingot.convert(tmp_path / "s" / "model.safetensors.index.json", tmp_path / "x.gguf")


def test_verify_says_what_no_program_opens(tmp_path: Path) -> None:
    source = model(tmp_path / "m", {"model_type": "brandnew"})
    ingot.convert(source, tmp_path / "x.gguf", keep_names=True)
    ingot.convert(source, tmp_path / "x", format="mlx", recipe="mlx-4bit", keep_names=True)
    ingot.convert(model_folder.write(tmp_path / "llama"), tmp_path / "y.gguf")
    with ingot.open(tmp_path / "y.gguf") as opened:
        kept = {name.replace("token_embd", "model.embed_tokens"): tensor for name, tensor in opened.items()}
        ingot.save(tmp_path / "z.gguf", kept, opened.metadata)
    for path, program in (("x.gguf", "llama.cpp"), ("x", "mlx_lm"), ("z.gguf", "llama.cpp"), ("y.gguf", "")):
        notes = [item.message for item in ingot.verify(tmp_path / path) if item.rule == "architecture.unknown"]
        assert [note.split(" does not open")[0] for note in notes] == ([program] if program else [])
