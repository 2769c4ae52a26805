"""The vision parts of tiny models become ``mmproj`` files, and llama.cpp computes transformers' embeddings of images.

`make families` compares them too, and writes the largest differences into docs/families.md.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.errors import IngotError, UnsupportedError, UsageError
from ingot.translate.projectors import PROJECTORS
from tests.support.llama_cpp import IMAGES, run_jobs
from tests.support.tiny_images import IMAGE_MODELS, embeddings, random_image, write_image_model

pytest.importorskip("gguf")
torch: Any = pytest.importorskip("torch")
pytest.importorskip("transformers")

FAST = ("gemma3", "mistral3", "qwen3_vl")
TOLERANCE = 0.005
"""Largest difference, as a share of the largest value."""


def values(path: Path) -> dict[str, Any]:
    with ingot.open(path) as checkpoint:
        return {name: tensor.numpy("f32") for name, tensor in checkpoint.items()}


def change_config(folder: Path, change: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def refusal(folder: Path, error: type[IngotError] = UnsupportedError) -> str:
    """Return the message of a refused conversion, which has written nothing."""
    with pytest.raises(error) as caught:
        ingot.convert(folder, folder / "mmproj.gguf", part="mmproj")
    assert not (folder / "mmproj.gguf").exists()
    assert caught.value.rule in ("architecture.part", "architecture.config", "account.lost")
    return caught.value.message


def test_each_projector_has_a_tiny_model() -> None:
    assert set(PROJECTORS) == set(IMAGE_MODELS)


@pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="the package xllamacpp is not installed")
@pytest.mark.parametrize(
    "name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in IMAGE_MODELS if name not in FAST)]
)
def test_llama_cpp_computes_the_embeddings_of_an_image(name: str, tmp_path: Path) -> None:
    model = write_image_model(name, tmp_path / "m")
    image = random_image(name)
    expected = embeddings(name, model, image)
    np.save(tmp_path / "image.npy", image)
    ingot.convert(tmp_path / "m", tmp_path / "text.gguf", part="text")
    jobs = []
    for variant, recipe in {"f32": None, "f16": "f16", "bf16": "bf16"}.items():
        file = tmp_path / f"{variant}.gguf"
        ingot.convert(tmp_path / "m", file, recipe, part="mmproj", runtime="llama.cpp")
        paths = {"path": "text.gguf", "image": "image.npy", "out": f"{variant}.npy", "mmproj": file.name}
        jobs.append({key: str(tmp_path / path) for key, path in paths.items()})
    assert not any(run_jobs(IMAGES, jobs, tmp_path).values())
    for variant in ("f32", "f16", "bf16"):
        distance = np.abs(np.load(tmp_path / f"{variant}.npy") - expected).max()
        assert distance <= TOLERANCE * np.abs(expected).max(), (variant, distance)


def test_the_text_model_is_that_without_the_patterns_of_other_parts(tmp_path: Path) -> None:
    write_image_model("gemma3", tmp_path / "m")
    with pytest.raises(UnsupportedError, match="part=text leaves it out") as caught:
        ingot.convert(tmp_path / "m", tmp_path / "x.gguf")
    assert caught.value.rule == "account.lost"
    report = ingot.convert(tmp_path / "m", tmp_path / "x.gguf", part="text")
    ingot.convert(tmp_path / "m", tmp_path / "y.gguf", drop=["vision_tower.*", "multi_modal_projector.*"])
    assert (tmp_path / "x.gguf").read_bytes() == (tmp_path / "y.gguf").read_bytes()
    assert "vision_tower.embeddings.patch_embedding.weight" in report.dropped


@pytest.mark.parametrize("prefix", ["model.", "base_model.model.", "module.model."])
def test_prefixes_of_other_programs_give_the_same_file(prefix: str, tmp_path: Path) -> None:
    write_image_model("gemma3", tmp_path / "m")
    ingot.convert(tmp_path / "m", tmp_path / "x.gguf", part="mmproj")
    tensors = values(tmp_path / "m")
    inner = {name.replace("vision_tower.", "vision_tower.vision_model."): array for name, array in tensors.items()}
    renamed = {prefix + name: array for name, array in inner.items()}
    ingot.save(tmp_path / "m" / "model.safetensors", renamed, {"format": "pt"}, overwrite=True)
    ingot.convert(tmp_path / "m", tmp_path / "y.gguf", part="mmproj")
    expected, result = values(tmp_path / "x.gguf"), values(tmp_path / "y.gguf")
    assert expected.keys() == result.keys()
    assert all(np.array_equal(result[name], array) for name, array in expected.items())


def test_keys_that_a_vision_config_omits_have_the_defaults_of_transformers(tmp_path: Path) -> None:
    write_image_model("gemma3", tmp_path / "m")
    ingot.convert(tmp_path / "m", tmp_path / "x.gguf", part="mmproj")
    change_config(
        tmp_path / "m", lambda config: [config["vision_config"].pop(k) for k in ("hidden_act", "layer_norm_eps")]
    )
    ingot.convert(tmp_path / "m", tmp_path / "y.gguf", part="mmproj")
    assert (tmp_path / "x.gguf").read_bytes() == (tmp_path / "y.gguf").read_bytes()


def test_an_absent_tensor_is_refused(tmp_path: Path) -> None:
    write_image_model("gemma3", tmp_path / "m")
    name = "vision_tower.encoder.layers.1.mlp.fc1.bias"
    tensors = {key: array for key, array in values(tmp_path / "m").items() if key != name}
    ingot.save(tmp_path / "m" / "model.safetensors", tensors, {"format": "pt"}, overwrite=True)
    assert "lacks v.blk.1.ffn_up.bias" in refusal(tmp_path / "m")


def test_an_unknown_tensor_is_refused_unless_it_is_dropped(tmp_path: Path) -> None:
    write_image_model("gemma3", tmp_path / "m")
    tensors = values(tmp_path / "m") | {"vision_tower.gate.weight": np.ones((2, 2), np.float32)}
    ingot.save(tmp_path / "m" / "model.safetensors", tensors, {"format": "pt"}, overwrite=True)
    assert "vision_tower.gate.weight" in refusal(tmp_path / "m")
    report = ingot.convert(tmp_path / "m", tmp_path / "x.gguf", part="mmproj", drop=["*.gate.weight"])
    assert "vision_tower.gate.weight" in report.dropped


@pytest.mark.parametrize(
    ("name", "key", "value", "message"),
    [
        ("qwen2_5_vl", "window_size", 56, "computes window_size 112 only"),
        ("qwen2_5_vl", "fullatt_block_indexes", [0], "fullatt_block_indexes"),
        ("qwen3_vl", "deepstack_visual_indexes", [7], "deepstack_visual_indexes"),
        ("qwen3_vl", "spatial_merge_size", 4, "computes spatial_merge_size 2 only"),
        ("gemma3", "hidden_act", "relu", "hidden_act 'relu'"),
        ("gemma3", "num_hidden_layers", 3, "lacks v.blk.2"),
        ("gemma3", "num_hidden_layers", 1, "contradicts its vision_config of 1 layers"),
        ("gemma3", "patch_size", "14", "patch_size"),
        ("mistral3", "model_type", "clip_vision_model", "computes model_type 'pixtral' only"),
    ],
)
def test_settings_that_llama_cpp_does_not_compute_are_refused(
    name: str, key: str, value: Any, message: str, tmp_path: Path
) -> None:
    write_image_model(name, tmp_path / "m")
    change_config(tmp_path / "m", lambda config: config["vision_config"].update({key: value}))
    assert message in refusal(tmp_path / "m")


def test_a_folder_without_the_image_processor_or_break_token_is_refused(tmp_path: Path) -> None:
    write_image_model("mistral3", tmp_path / "m")
    settings = (tmp_path / "m" / "preprocessor_config.json").read_text()
    (tmp_path / "m" / "preprocessor_config.json").unlink()
    assert "image_mean" in refusal(tmp_path / "m")
    (tmp_path / "m" / "processor_config.json").write_text(json.dumps({"image_processor": json.loads(settings)}))
    tokenizer = json.loads((tmp_path / "m" / "tokenizer.json").read_text())
    tokenizer["added_tokens"].pop()
    (tmp_path / "m" / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "[IMG_BREAK]" in refusal(tmp_path / "m")


def test_parts_are_those_of_gguf(tmp_path: Path) -> None:
    write_image_model("gemma3", tmp_path / "m")
    for part, target in (("mmproj", "x.zt"), ("text", "x.safetensors"), ("audio", "x.gguf")):
        with pytest.raises(UsageError) as caught:
            ingot.convert(tmp_path / "m", tmp_path / target, part=part)
        assert caught.value.rule == "architecture.part"
