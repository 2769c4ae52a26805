"""Layers that predict further tokens go into GGUF files under llama.cpp's names, and come back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.errors import UnsupportedError
from ingot.translate.families import FAMILIES
from tests.support.tiny_models import write_model

pytest.importorskip("gguf")
pytest.importorskip("torch")
pytest.importorskip("transformers")

SEPARATE = ("exaone_moe", "qwen3_5_text", "qwen3_next")


def values(path: Path) -> dict[str, Any]:
    with ingot.open(path) as checkpoint:
        return {name: tensor.numpy() for name, tensor in checkpoint.items()}


def add_layer(model_type: str, folder: Path, absent: str = "") -> str:
    """Write a random model with a layer that predicts the next token; return the names' prefix of the layer."""
    write_model(model_type, folder)
    config = json.loads((folder / "config.json").read_text())
    layers, hidden = (config[key] for key in ("num_hidden_layers", "hidden_size"))
    tensors = values(folder)
    generator = np.random.default_rng(3)

    def noise(*shape: int) -> Any:
        return (0.1 * generator.standard_normal(shape)).astype(np.float32)

    copied = f"model.layers.{0 if model_type == 'exaone_moe' else layers - 1}."
    prefix = "mtp.layers.0." if model_type in SEPARATE else f"model.layers.{layers}."
    layer = {
        prefix + name.removeprefix(copied): array + noise(*array.shape)
        for name, array in tensors.items()
        if name.startswith(copied)
    }
    shapes = {"eh_proj": (hidden, 2 * hidden), "enorm": (hidden,), "hnorm": (hidden,), "shared_head.norm": (hidden,)}
    names = ("mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm")
    for name, (module, shape) in zip(names, shapes.items(), strict=True):
        layer[f"{name if model_type in SEPARATE else prefix + module}.weight"] = noise(*shape)
    if model_type not in SEPARATE:
        config["num_nextn_predict_layers"] = 1
        layer[f"{prefix}embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
        layer[f"{prefix}shared_head.head.weight"] = tensors["lm_head.weight"]
    tensors |= {name: array for name, array in layer.items() if not absent or not name.endswith(absent)}
    (folder / "config.json").write_text(json.dumps(config))
    ingot.save(folder / "model.safetensors", tensors, {"format": "pt"}, overwrite=True)
    return prefix


@pytest.mark.parametrize(
    "model_type",
    [
        "glm4_moe",
        "exaone_moe",
        "qwen3_5_text",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("deepseek_v3", "glm_moe_dsa", "kimi_k2", "qwen3_next")
        ),
    ],
)
def test_the_layer_is_kept_and_comes_back(model_type: str, tmp_path: Path) -> None:
    prefix = add_layer(model_type, tmp_path / "m")
    layers = json.loads((tmp_path / "m" / "config.json").read_text())["num_hidden_layers"]
    ingot.convert(tmp_path / "m", tmp_path / "x.gguf")
    arch = FAMILIES[model_type].arch
    with ingot.open(tmp_path / "x.gguf") as checkpoint:
        assert checkpoint.metadata[f"{arch}.block_count"] == layers + 1
        assert checkpoint.metadata[f"{arch}.nextn_predict_layers"] == 1
        assert checkpoint[f"blk.{layers}.nextn.eh_proj.weight"].shape == (64, 128)
    report = ingot.convert(tmp_path / "x.gguf", tmp_path / "back", format="safetensors")
    assert not [note for note in report.notes if "differ" in note or "not carried over" in note]
    before, after = values(tmp_path / "m"), values(tmp_path / "back")
    assert before.keys() == after.keys()
    assert any(name.startswith(prefix) for name in after)
    assert all(np.allclose(after[name], array, rtol=0, atol=1e-6) for name, array in before.items())
    assert json.loads((tmp_path / "back" / "config.json").read_text())["num_hidden_layers"] == layers


@pytest.mark.parametrize(
    ("model_type", "absent", "pattern"),
    [
        ("glm4_moe", "hnorm.weight", "model.layers.2.*"),
        ("glm4_moe", "layers.2.self_attn.q_proj.weight", "model.layers.2.*"),
        ("qwen3_5_text", "pre_fc_norm_hidden.weight", "mtp.*"),
    ],
)
def test_a_layer_that_lacks_a_tensor_is_refused(model_type: str, absent: str, pattern: str, tmp_path: Path) -> None:
    add_layer(model_type, tmp_path / "m", absent)
    with pytest.raises(UnsupportedError, match="lacks") as caught:
        ingot.convert(tmp_path / "m", tmp_path / "x.gguf")
    assert caught.value.rule == "model.missing-tensor"
    ingot.convert(tmp_path / "m", tmp_path / "x.gguf", drop=[pattern])
    with ingot.open(tmp_path / "x.gguf") as checkpoint:
        assert not [name for name in checkpoint if "nextn" in name]
        assert not [key for key in checkpoint.metadata if "nextn" in key]


def test_such_a_layer_of_another_family_is_not_left_out_silently(tmp_path: Path) -> None:
    write_model("dots1", tmp_path / "m")
    tensors = values(tmp_path / "m") | {"model.layers.2.eh_proj.weight": np.ones((64, 128), np.float32)}
    ingot.save(tmp_path / "m" / "model.safetensors", tensors, {"format": "pt"}, overwrite=True)
    with pytest.raises(UnsupportedError, match=r"model\.layers\.2\.eh_proj") as caught:
        ingot.convert(tmp_path / "m", tmp_path / "x.gguf")
    assert caught.value.rule == "account.lost"
