"""What travels with the weights, what stays behind and is named, and what config.json says afterwards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ingot
from ingot.artifacts.companions import find_companions
from ingot.stores.local import LocalStore


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def test_links_out_of_the_folder_stay_behind(model: Path, tmp_path: Path) -> None:
    (tmp_path / "id_rsa").write_text("secret")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "id_rsa").write_text("secret")
    (model / "notes.txt").symlink_to(tmp_path / "id_rsa")
    (model / "1_Pooling").symlink_to(tmp_path / "elsewhere")
    (model / "2_Dense").mkdir()
    (model / "2_Dense" / "config.json").symlink_to(tmp_path / "id_rsa")
    (model / "same.json").symlink_to("config.json")
    report = ingot.convert(model, tmp_path / "out")
    assert sorted(report.companions) == ["config.json", "same.json", "tokenizer.json"]
    assert not [path for path in (tmp_path / "out").rglob("*") if path.is_file() and b"secret" in path.read_bytes()]
    note = " ".join(report.notes)
    assert all(name in note for name in ("notes.txt", "1_Pooling/", "2_Dense/config.json"))


def test_the_cache_of_the_hub_is_made_of_links(model: Path, tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "0123", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in model.iterdir():
        path.rename(blobs / path.name)
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    report = ingot.convert(snapshot, tmp_path / "out")
    assert sorted(report.companions) == ["config.json", "tokenizer.json"]
    assert not report.notes


def test_weights_of_any_container_stay_behind(model: Path, tmp_path: Path) -> None:
    for name in ("draft.squizd", "x.wdelta", "pytorch_model.bin", "pytorch_model.bin.index.json", "half.part"):
        (model / name).write_bytes(b"x")
    for name in ("X.mlpackage/Data", "sub/deep", "other", "plain/deep"):
        (model / name).mkdir(parents=True)
    (model / "X.mlpackage" / "Manifest.json").write_text("{}")
    (model / "other" / "draft.squizd").write_bytes(b"x")
    (model / "other" / "config.json").write_text("{}")
    (model / "plain" / "vocab.txt").write_text("a")
    found = find_companions(LocalStore(model), {"model.safetensors"})
    assert set(found.files) == {"config.json", "tokenizer.json", "plain/vocab.txt"}
    left = {name for names in found.skipped.values() for name in names}
    expected = {"draft.squizd", "x.wdelta", "pytorch_model.bin", "pytorch_model.bin.index.json", "half.part"}
    assert left == expected | {"X.mlpackage/", "other/", "sub/deep/", "plain/deep/"}
    for name in ("draft.squizd", "x.wdelta"):  # two checkpoints in a folder are an error
        (model / name).rename(model / "other" / name)
    report = ingot.convert(model, tmp_path / "out", format="safetensors")
    assert set(report.companions) == set(found.files)
    assert all(name in " ".join(report.notes) for name in ("pytorch_model.bin", "X.mlpackage/", "other/"))


@pytest.mark.parametrize(
    ("recipe", "said", "then"),
    [
        ("f16", "bfloat16", "float16"),
        ("f16", "torch.bfloat16", "torch.float16"),
        ("f16", "float32", "float16"),  # was not true before either
        ("int4", "bfloat16", "bfloat16"),
        ("keep", "bfloat16", "bfloat16"),
        ("f16", "auto", "auto"),
    ],
)
def test_config_says_the_type_that_there_is(model: Path, tmp_path: Path, recipe: str, said: str, then: str) -> None:
    config = {"dtype": said, "text_config": {"torch_dtype": said}, "rope": {"dtype": said}, "eps": 1e-5}
    (model / "config.json").write_text(json.dumps(config))
    ingot.convert(model, tmp_path / "out", recipe)
    assert config_of(tmp_path / "out") == {**config, "dtype": then, "text_config": {"torch_dtype": then}}


def tie(model: Path, *, same: bool) -> dict[str, Any]:
    with ingot.open(model) as checkpoint:
        weights = {name: tensor.numpy().copy() for name, tensor in checkpoint.items()}
    if same:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    ingot.save(model / "model.safetensors", weights, overwrite=True)
    config = {"model_type": "llama", "model_file": "llama.py", "tie_word_embeddings": True}
    (model / "config.json").write_text(json.dumps(config))
    return config


def test_a_head_that_is_the_embedding_is_left_out_for_mlx(model: Path, tmp_path: Path) -> None:
    tie(model, same=True)
    report = ingot.convert(model, tmp_path / "out", "mlx-4bit", "mlx")
    with ingot.open(tmp_path / "out") as checkpoint:
        assert "lm_head.weight" not in checkpoint
    assert config_of(tmp_path / "out")["tie_word_embeddings"] is True
    assert "lm_head.weight" in " ".join(report.notes)


def test_a_head_of_its_own_is_not_tied_for_mlx(model: Path, tmp_path: Path) -> None:
    config = tie(model, same=False)
    ingot.convert(model, tmp_path / "out", "mlx-4bit", "mlx")
    with ingot.open(tmp_path / "out") as checkpoint:
        assert "lm_head.weight" in checkpoint
    assert config_of(tmp_path / "out")["tie_word_embeddings"] is False
    ingot.convert(model, tmp_path / "zt")
    assert config_of(tmp_path / "zt") == config
    with ingot.open(tmp_path / "zt") as checkpoint:
        assert checkpoint["lm_head.weight"].numpy().dtype == np.dtype(ml_dtypes.bfloat16)
