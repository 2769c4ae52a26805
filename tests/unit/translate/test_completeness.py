"""A model that lacks what its config.json implies is reported by verify and refused by convert."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.cli.main import run
from ingot.errors import UnsupportedError
from ingot.translate.expected import expected_tensors

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 20, "tie_word_embeddings": False,
}  # fmt: skip


def weights() -> dict[str, Any]:
    shapes = expected_tensors(CONFIG)
    assert shapes is not None
    return {name: np.ones(shape, np.float32) for name, shape in shapes.items()}


def folder(path: Path, tensors: Mapping[str, Any], config: Mapping[str, Any] = CONFIG) -> Path:
    path.mkdir(exist_ok=True)
    ingot.save(path / "model.safetensors", tensors)
    (path / "config.json").write_text(json.dumps(config))
    return path


def rules(path: Path) -> set[str]:
    return {item.rule for item in ingot.verify(path) if item.level == "error"}


def refusal(path: Path, out: Path, **options: Any) -> UnsupportedError:
    with pytest.raises(UnsupportedError) as caught:
        ingot.convert(path, out, **options)
    assert not out.exists()
    return caught.value


def test_a_complete_model_passes(tmp_path: Path) -> None:
    path = folder(tmp_path / "m", weights())
    assert not rules(path)
    ingot.convert(path, tmp_path / "out")


@pytest.mark.parametrize(
    "name", ["lm_head.weight", "model.layers.1.mlp.up_proj.weight", "model.norm.weight", "model.embed_tokens.weight"]
)
def test_a_missing_tensor_is_refused_unless_dropped(name: str, tmp_path: Path) -> None:
    tensors = weights()
    del tensors[name]
    path = folder(tmp_path / "m", tensors)
    assert rules(path) == {"model.missing-tensor"}
    error = refusal(path, tmp_path / "out")
    assert error.rule == "model.missing-tensor"
    assert name in error.message
    ingot.convert(path, tmp_path / "out", drop=[name])


def test_a_tied_model_needs_no_head(tmp_path: Path) -> None:
    tensors = weights()
    del tensors["lm_head.weight"]
    path = folder(tmp_path / "m", tensors, {**CONFIG, "tie_word_embeddings": True})
    assert not rules(path)


@pytest.mark.parametrize("shape", [(0,), (16, 24), (24, 8)])
def test_another_shape_is_refused(shape: tuple[int, ...], tmp_path: Path) -> None:
    tensors = weights() | {"model.layers.0.mlp.up_proj.weight": np.ones(shape, np.float32)}
    path = folder(tmp_path / "m", tensors)
    assert rules(path) == {"model.shape"}
    error = refusal(path, tmp_path / "out")
    assert error.rule == "model.shape"
    assert ("ZeRO-3" in error.message) == (shape == (0,))


def test_empty_tensors_are_refused_in_families_that_are_not_known(tmp_path: Path) -> None:
    path = folder(tmp_path / "m", {"x.weight": np.ones(0, np.float32)}, {"model_type": "other"})
    assert rules(path) == {"model.shape"}


def test_a_config_without_sizes_says_nothing(tmp_path: Path) -> None:
    path = folder(tmp_path / "m", {"model.norm.weight": np.ones(16, np.float32)}, {"model_type": "llama"})
    assert not rules(path)
    ingot.convert(path, tmp_path / "out")


def test_weights_outside_the_index_are_refused_unless_it_is_trusted(tmp_path: Path) -> None:
    source = folder(tmp_path / "m", weights())
    path = tmp_path / "sharded"
    ingot.convert(source, path, format="safetensors", max_shard=2000)
    assert len([*path.glob("*.safetensors")]) > 1
    ingot.save(path / "old.safetensors", {"unrelated": np.ones(3, np.float32)})
    assert not rules(path)
    ingot.save(path / "stale.safetensors", {"model.norm.weight": np.zeros(16, np.float32)})
    assert rules(path) == {"model.stale-duplicate"}
    assert "trust_index=True" in str(refusal(path, tmp_path / "out"))
    ingot.convert(path, tmp_path / "out", trust_index=True)
    assert ingot.compare(source, tmp_path / "out").same


def test_a_single_file_beside_an_index_that_lists_others(tmp_path: Path) -> None:
    """transformers reads the file, vLLM the shards: nobody can know which is meant."""
    source = folder(tmp_path / "m", weights())
    path = tmp_path / "sharded"
    ingot.convert(source, path, format="safetensors", max_shard=2000)
    zeros = {name: np.zeros_like(values) for name, values in weights().items()}
    ingot.save(path / "model.safetensors", zeros)
    assert rules(path) == {"model.stale-duplicate"}
    assert refusal(path, tmp_path / "out").rule == "model.stale-duplicate"
    plan = tmp_path / "plan.json"
    assert run(["convert", str(path), str(tmp_path / "out"), "--trust-index", "--plan-out", str(plan), "-q"]) == 0
    ingot.execute(plan)
    assert ingot.compare(source, tmp_path / "out").same
