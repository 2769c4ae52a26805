"""Conversions for a program: the container, what is refused, and the commands that run the result."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import ingot
from ingot.cli.main import run as run_command
from ingot.errors import IngotError, UsageError
from tests.support import model_folder


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return model_folder.write(tmp_path / "m")


def format_of(path: str) -> str:
    with ingot.open(path) as checkpoint:
        return str(checkpoint.format)


@pytest.mark.parametrize(
    ("runtime", "recipe", "format"),
    [
        ("vllm", None, "safetensors"),
        ("vllm", "w4a16", "compressed-tensors"),
        ("mlx", "mlx-4bit", "mlx"),
        ("mlx", "int4", "mlx"),
        ("llama.cpp", "q8_0", "gguf"),
        ("llama.cpp", None, "gguf"),
        ("ollama", "INT4", "gguf"),
        ("transformers", "bf16", "safetensors"),
    ],
)
def test_the_program_decides_the_container(model: Path, runtime: str, recipe: str | None, format: str) -> None:
    ingot.convert(model, "out", recipe=recipe, runtime=runtime)
    assert format_of("out") == format
    assert not [item for item in ingot.verify("out", runtime=runtime) if item.level == "error"]


def test_a_quantized_model_goes_into_the_container_that_keeps_most(model: Path) -> None:
    Path("four.toml").write_text(
        '[[rules]]\nroles = ["attention", "mlp"]\nmin_ndim = 2\ncodec = "affine"\n'
        'options = { bits = 4, group = 32, symmetric = true, scales = "f16" }\n'
    )
    ingot.convert(model, "w4", recipe="four.toml", format="compressed-tensors")
    for runtime, format in (("mlx", "mlx"), ("llama.cpp", "gguf"), ("vllm", "compressed-tensors")):
        report = ingot.convert("w4", f"for-{format}", runtime=runtime)
        assert format_of(f"for-{format}") == format
        assert "decoded" not in report.actions


def test_what_the_program_does_not_read_is_refused_before_anything_is_written(model: Path) -> None:
    with pytest.raises(UsageError, match="does not read gguf") as caught:
        ingot.convert(model, "x.gguf", runtime="vllm")
    assert caught.value.rule == "convert.runtime"
    with pytest.raises(UsageError, match="w4a16-calibrated") as caught:
        ingot.convert(model, "x", recipe="trellis4-calibrated", runtime="vllm")
    assert caught.value.rule == "convert.runtime"
    Path("three.toml").write_text(
        '[[rules]]\nroles = ["mlp"]\nmin_ndim = 2\ncodec = "affine"\n'
        'options = { bits = 3, group = 32, symmetric = true, scales = "f16" }\n'
    )
    with pytest.raises(IngotError, match=r"3 bits"):
        ingot.convert(model, "x", recipe="three.toml", runtime="vllm", format="compressed-tensors")
    assert not Path("x").exists()


def test_a_preset_that_a_container_cannot_hold_is_refused_with_those_that_it_holds(model: Path) -> None:
    for format in ("compressed-tensors", "gptq", "awq", "mlx", "gguf", "safetensors"):
        for preset in ("trellis4-calibrated", "table3-calibrated"):
            with pytest.raises(IngotError) as caught:
                ingot.convert(model, "x", recipe=preset, format=format)
            assert caught.value.rule in ("convert.not-held", "convert.unsupported", "convert.nothing-packed")
            if caught.value.rule == "convert.not-held" and format != "safetensors":
                assert "q4_0" in caught.value.message or "int4" in caught.value.message
    assert not Path("x").exists()
    assert run_command(["convert", "m", "x", "--format", "mlx", "--recipe", "trellis4-calibrated", "--dry-run"]) == 1


def test_a_container_of_one_group_size_gets_the_largest_common_one(model: Path) -> None:
    report = ingot.convert(model, "x", recipe="w4a16", format="awq")
    config = json.loads(Path("x/config.json").read_text())["quantization_config"]
    assert config["group_size"] == 64
    encoded = [tensor for tensor in report.tensors if tensor.action == "encoded"]
    assert len(encoded) == 7
    assert all(tensor.error is not None and tensor.error["snr_db"] > 15 for tensor in encoded)


def test_columns_that_groups_do_not_divide_get_smaller_groups_in_one_step(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    values = np.random.default_rng(0).standard_normal((64, 96)).astype(np.float16)
    (tmp_path / "m").mkdir()
    ingot.save(tmp_path / "m" / "model.safetensors", {name: values})
    (tmp_path / "m" / "config.json").write_text('{"model_type": "llama"}')
    ingot.convert(tmp_path / "m", tmp_path / "g", recipe="int4", format="gptq")
    config = json.loads((tmp_path / "g" / "config.json").read_text())["quantization_config"]
    assert config["group_size"] == 32
    with ingot.open(tmp_path / "g") as packed:
        error = packed[name].numpy("f32") - values.astype(np.float32)
    assert 0.02 < np.sqrt((error**2).mean()) < 0.15


def test_next_names_only_a_program_that_would_load_the_result(model: Path, tmp_path: Path) -> None:
    def first(*arguments: object, **options: object) -> str:
        return ingot.convert(*arguments, **options).commands[0]  # type: ignore[call-overload,no-any-return]

    asymmetric = (
        '[[rules]]\nroles = ["attention", "mlp"]\nmin_ndim = 2\ncodec = "affine"\n'
        'options = { bits = 4, group = 32, symmetric = false, scales = "f16" }\n'
    )
    Path("points.toml").write_text(asymmetric)
    assert first("m", "w4", recipe="w4a16", format="gptq") == "vllm serve w4"
    assert "transformers" in first("m", "points", recipe="points.toml", format="gptq")  # vLLM refuses zero points
    assert first("m", "x.gguf", recipe="q8_0").startswith("llama-cli -m x.gguf")
    assert first("m", "y.gguf", recipe="q8_0", runtime="ollama") == "ollama create y -f y.Modelfile"
    assert "llama" not in first("m", "named.gguf", recipe="q8_0", keep_names=True)


def test_lists_for_a_program(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["matrix", "m", "--for", "mlx", "--json"]) == 0
    assert [row["format"] for row in json.loads(capsys.readouterr().out)["targets"]] == ["mlx", "safetensors"]
    assert run_command(["recipes", "--for", "openvino", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows][:3] == ["f16", "q8_0", "q4_0"]
    assert {row["container"] for row in rows} == {"gguf"}
    assert run_command(["recipes", "Q4_0"]) == 0
    assert 'name = "q4_0"' in capsys.readouterr().out
    assert run_command(["convert", "m", "x.gguf", "--recipe", "Q4_K_X"]) == 2
    error = capsys.readouterr().err
    assert "did you mean 'Q4_K_S'" in error
    assert len(error) < 200
