"""Whole models as packages: what is refused, memory, resumed runs; values are compared in tests/interop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.cli.main import run
from ingot.conversion.coreml.model import extract_model
from ingot.errors import IngotError
from ingot.naming.config import LlamaConfig

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}


def model(folder: Path, config: dict[str, Any] = CONFIG, **more: Any) -> Path:
    rng = np.random.default_rng(1)
    shapes = LlamaConfig.from_mapping(CONFIG).shapes()
    weights = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    for name, value in more.items():
        weights.pop(name, None)
        if value is not None:
            weights[name] = value
    ingot.save(f"{folder}/", weights, format="safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_every_tensor_is_a_constant_of_the_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = model(tmp_path / "model", **{"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)})
    arguments = ["extract", str(source), "--model", "-o", str(tmp_path / "m.mlpackage"), "--context", "8", "--json"]
    assert run(arguments) == 0
    assert json.loads(capsys.readouterr().out)["format"] == "coreml"
    with ingot.open(source) as tensors, ingot.open(tmp_path / "m.mlpackage") as package:
        names = [name for name in tensors if not name.endswith("inv_freq")]
        tables = {"rope_cos", "rope_sin"}  # arrays of floats in the program itself
        assert set(package) == {name.replace(".", "_") for name in names} | tables
        for name in names:
            np.testing.assert_array_equal(package[name.replace(".", "_")].numpy(), tensors[name].numpy("f16"))
    assert sorted(item.name for item in (tmp_path / "m.mlpackage").iterdir()) == ["Data", "Manifest.json"]
    assert run(arguments) == 2  # it exists
    assert run([*arguments, "--overwrite"]) == 0


def test_the_same_model_is_the_same_package(tmp_path: Path) -> None:
    """Whatever the order of its tensors in the file."""
    source, turned = model(tmp_path / "model"), tmp_path / "turned"
    with ingot.open(source) as tensors:
        ingot.save(f"{turned}/", {name: tensors[name].numpy() for name in reversed(list(tensors))}, format="zt")
    (turned / "config.json").write_text(json.dumps(CONFIG))
    for name, folder in (("a", source), ("b", turned)):
        extract_model(folder, tmp_path / f"{name}.mlpackage", context=8)
    for file in (tmp_path / "a.mlpackage").rglob("*"):
        other = tmp_path / "b.mlpackage" / file.relative_to(tmp_path / "a.mlpackage")
        assert file.is_dir() or file.read_bytes() == other.read_bytes()


def test_a_run_that_was_stopped_goes_on(tmp_path: Path) -> None:
    source = model(tmp_path / "model")

    def stop(event: ingot.ProgressEvent) -> None:
        if event.processed > event.total / 2:
            raise KeyboardInterrupt

    out = tmp_path / "a.mlpackage"
    with pytest.raises(KeyboardInterrupt):
        extract_model(source, out, context=8, resume=True, progress=stop)
    assert not out.exists()
    assert extract_model(source, out, context=8, resume=True).resumed > 0
    extract_model(source, tmp_path / "b.mlpackage", context=8)
    weights = "Data/com.apple.CoreML/weights/weight.bin"
    assert (out / weights).read_bytes() == (tmp_path / "b.mlpackage" / weights).read_bytes()


@pytest.mark.parametrize(
    ("config", "tensors", "options", "rule"),
    [
        ({"model_type": "gpt2"}, {}, {}, "coreml.model"),
        ({"model_type": "qwen2"}, {}, {}, "coreml.model"),  # it lacks the biases of its family
        ({"model_type": "gemma", "hidden_act": "silu"}, {}, {}, "coreml.model"),
        ({"hidden_act": "gelu"}, {}, {}, "coreml.model"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, {}, {}, "coreml.model"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}}, {}, {}, "coreml.model"),
        ({"rope_parameters": {"rope_theta": 0}}, {}, {}, "coreml.model"),
        ({"partial_rotary_factor": 0.5}, {}, {}, "coreml.model"),
        ({"num_key_value_heads": 3}, {}, {}, "coreml.model"),
        ({"num_hidden_layers": 1 << 30}, {}, {}, "coreml.model"),
        ({"head_dim": 1 << 20}, {}, {}, "coreml.model"),
        ({"vocab_size": 1 << 62}, {}, {}, "coreml.model"),
        ({"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["x"]}, {}, {}, "coreml.model"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, {}, {}, "coreml.model"),
        ({"attention_bias": True}, {}, {}, "coreml.model"),
        ({"hidden_size": "32"}, {}, {}, "coreml.model"),
        ({}, {"lm_head.weight": None}, {}, "coreml.model"),
        ({}, {"lm_head.weight": np.ones((96, 31), np.float32)}, {}, "coreml.model"),
        ({}, {"model.layers.0.self_attn.q_norm.weight": np.ones(8, np.float32)}, {}, "coreml.model"),
        ({}, {"lm_head.weight": np.full((96, 32), 1e6, np.float32)}, {}, "dense.overflow"),
        ({}, {}, {"context": 129}, "coreml.model"),
        ({}, {}, {"context": 1}, "coreml.model"),
    ],
)
def test_what_makes_no_program_is_refused(
    tmp_path: Path, config: dict[str, Any], tensors: dict[str, Any], options: dict[str, Any], rule: str
) -> None:
    source = model(tmp_path / "model", {**CONFIG, **config}, **tensors)
    with pytest.raises(IngotError) as caught:
        extract_model(source, tmp_path / "m.mlpackage", **options)
    assert caught.value.rule == rule
    assert [item.name for item in tmp_path.iterdir()] == ["model"]


def test_a_single_file_has_no_architecture(tmp_path: Path) -> None:
    source = model(tmp_path / "model")
    with pytest.raises(IngotError) as caught:
        extract_model(source / "model.safetensors", tmp_path / "m.mlpackage")
    assert caught.value.rule == "coreml.model"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--model"],
        ["--out", "x.mlpackage"],
        ["--model", "--layer", "a", "--out", "x.mlpackage"],
        ["--model", "--coreml", "--out", "x.mlpackage"],
        ["--layer", "a", "--out", "x.mlpackage", "--context", "3"],
        ["--model", "--out", "x.mlpackage", "--opset", "iOS18"],
    ],
)
def test_options_that_do_not_belong_together_are_refused(tmp_path: Path, arguments: list[str]) -> None:
    assert run(["extract", str(tmp_path), *arguments]) == 2
