"""Text models with other prefixes before their names, or inside a model of several parts, become GGUF files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.errors import UnsupportedError, UsageError
from tests.support import model_folder

pytest.importorskip("gguf")

CONFIG = model_folder.CONFIG
WRAPPER = {
    "model_type": "mistral3",
    "architectures": ["Mistral3ForConditionalGeneration"],
    "text_config": {key: value for key, value in CONFIG.items() if key != "architectures"},
    "vision_config": {"model_type": "pixtral"},
}


def read(path: Path) -> dict[str, Any]:
    with ingot.open(path) as checkpoint:
        return {name: tensor.numpy() for name, tensor in checkpoint.items()}


def write(path: Path, rename: Any, config: Any = None, more: Any = None) -> Path:
    """Write the model folder with other names, and return its path."""
    source = model_folder.write(path, dict(CONFIG))
    tensors = {rename(name): array for name, array in read(source).items()} | (more or {})
    for file in source.glob("*.safetensors*"):
        file.unlink()
    ingot.save(source / "model.safetensors", tensors, {"format": "pt"})
    if config is not None:
        (source / "config.json").write_text(json.dumps(config))
    return source


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: name.removeprefix("model."),
        lambda name: "base_model.model." + name,
        lambda name: "module." + name,
        lambda name: "_orig_mod." + name,
        lambda name: "language_model." + name,
        lambda name: "model.language_" + name if name.startswith("model.") else name,
    ],
)
def test_other_prefixes_give_the_same_file(rename: Any, tmp_path: Path) -> None:
    ingot.convert(model_folder.write(tmp_path / "m", dict(CONFIG)), tmp_path / "m.gguf")
    report = ingot.convert(write(tmp_path / "x", rename), tmp_path / "x.gguf")
    expected, result = read(tmp_path / "m.gguf"), read(tmp_path / "x.gguf")
    assert expected.keys() == result.keys()
    assert all(np.array_equal(result[name], array) for name, array in expected.items())
    assert any("names have another prefix" in note for note in report.notes)
    ingot.convert(tmp_path / "x", tmp_path / "folder", format="safetensors")
    assert read(tmp_path / "folder").keys() == read(tmp_path / "m").keys()


@pytest.mark.parametrize("prefix", ["base_model.model.module.", "module._orig_mod.", "model.", "module.model."])
def test_several_prefixes_are_removed(prefix: str, tmp_path: Path) -> None:
    source = write(tmp_path / "x", lambda name: prefix + name)
    ingot.convert(source, tmp_path / "x.gguf")
    ingot.convert(model_folder.write(tmp_path / "m", dict(CONFIG)), tmp_path / "m.gguf")
    expected, result = read(tmp_path / "m.gguf"), read(tmp_path / "x.gguf")
    assert expected.keys() == result.keys()
    assert all(np.array_equal(result[name], array) for name, array in expected.items())


def test_a_name_with_and_without_the_prefix_is_refused(tmp_path: Path) -> None:
    head = {"lm_head.weight": np.zeros((2, 2), np.float32)}
    source = write(tmp_path / "x", lambda name: "module." + name, more=head)
    with ingot.open(source) as checkpoint:
        assert "module.lm_head.weight" in checkpoint
    with pytest.raises(UnsupportedError, match=r"two tensors have the name lm_head\.weight") as caught:
        ingot.convert(source, tmp_path / "x.gguf")
    assert caught.value.rule == "architecture.names"


def test_the_text_model_of_several_parts_is_converted_if_the_others_are_left_out(tmp_path: Path) -> None:
    tower = {"vision_tower.patch_conv.weight": np.ones((4, 3), np.float32)}
    source = write(tmp_path / "x", lambda name: "language_model." + name, WRAPPER, tower)
    with pytest.raises(UnsupportedError, match=r"vision_tower\.patch_conv\.weight") as caught:
        ingot.convert(source, tmp_path / "x.gguf")
    assert caught.value.rule == "account.lost"
    ingot.convert(source, tmp_path / "x.gguf", drop=["vision_tower.*"])
    ingot.convert(model_folder.write(tmp_path / "m", dict(CONFIG)), tmp_path / "m.gguf")
    expected, result = read(tmp_path / "m.gguf"), read(tmp_path / "x.gguf")
    assert expected.keys() == result.keys()
    assert all(np.array_equal(result[name], array) for name, array in expected.items())
    ingot.convert(tmp_path / "x.gguf", tmp_path / "back", format="safetensors")
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == (CONFIG["model_type"], CONFIG["architectures"])


def test_renamed_tensors_are_converted(tmp_path: Path) -> None:
    source = write(tmp_path / "x", lambda name: name.replace("model.layers.", "net.blocks.").replace("model.norm", "n"))
    ingot.convert(source, tmp_path / "x.gguf", rename=["net.blocks.*=model.layers.*", "n.weight=model.norm.weight"])
    ingot.convert(model_folder.write(tmp_path / "m", dict(CONFIG)), tmp_path / "m.gguf")
    expected, result = read(tmp_path / "m.gguf"), read(tmp_path / "x.gguf")
    assert expected.keys() == result.keys()
    assert all(np.array_equal(result[name], array) for name, array in expected.items())


@pytest.mark.parametrize(
    ("rename", "message"),
    [
        ("absent=x", "no tensor has the name 'absent'"),
        ("absent.*=x.*", "no tensor"),
        ("model.norm.weight", "OLD=NEW"),
        ("model.*=x", "star"),
        ("model.norm.weight=lm_head.weight", "both have the name"),
    ],
)
def test_renames_that_match_nothing_or_collide_are_refused(rename: str, message: str, tmp_path: Path) -> None:
    source = model_folder.write(tmp_path / "m", dict(CONFIG))
    with pytest.raises(UsageError, match=message) as caught:
        ingot.convert(source, tmp_path / "x", format="safetensors", rename=[rename])
    assert caught.value.rule == "convert.rename"
    assert not (tmp_path / "x").exists()
