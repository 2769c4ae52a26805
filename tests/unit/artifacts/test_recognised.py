"""What a folder is taken for: sentinels, two claimants, and what lies in the place of weights."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

import ingot
from ingot.errors import IngotError, UsageError
from ingot.formats.detect import TRUNCATED_HINT

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4\n"


def rule_of(path: Path) -> str | None:
    with pytest.raises(IngotError) as caught:
        ingot.open(path)
    return caught.value.rule


def test_a_stray_array_does_not_hide_the_weights(model: Path, tmp_path: Path) -> None:
    np.save(model / "speaker.npy", np.zeros(3, np.float32))
    with pytest.raises(IngotError) as caught:
        ingot.convert(model, tmp_path / "out.zt")
    assert caught.value.rule == "detect.several"
    assert "model.safetensors" in str(caught.value)
    assert "speaker.npy" in str(caught.value)
    assert not (tmp_path / "out.zt").exists()


def test_a_marked_cache_hides_other_weights(model: Path) -> None:
    np.save(model / "a.npy", np.zeros(3, np.float32))
    (model / ".ready").touch()
    with ingot.open(model) as checkpoint:
        assert (checkpoint.format, list(checkpoint)) == ("npy", ["a"])


def test_an_unmarked_squish_directory_does_not_hide_other_weights(model: Path, tmp_path: Path) -> None:
    ingot.convert(model, tmp_path / "squish", format="npydir")
    (model / "model.safetensors").rename(tmp_path / "squish" / "model.safetensors")
    with ingot.open(tmp_path / "squish") as checkpoint:
        assert checkpoint.format == "npydir"
    (tmp_path / "squish" / "tensors" / ".manifest_ready").unlink()
    assert rule_of(tmp_path / "squish") == "detect.several"


def test_an_empty_manifest_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    (tmp_path / "tensors").mkdir()
    assert rule_of(tmp_path) == "npydir.empty"
    (tmp_path / "tensors" / ".manifest_ready").touch()
    with ingot.open(tmp_path) as checkpoint:
        assert len(checkpoint) == 0


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (LFS, "detect.lfs-pointer"),
        (b"<!doctype html><html><body>Sign in</body></html>", "detect.html"),
        (b'{"error":"Access to model x is restricted"}', "detect.error-text"),
        (b"\x80\x02}q\x00." + bytes(64), "detect.pickle"),
    ],
)
def test_a_shard_that_is_something_else_is_named(model: Path, content: bytes, rule: str) -> None:
    half = {"b": np.ones(3, np.float32)}
    ingot.save(model / "model-00001-of-00002.safetensors", half)
    (model / "model-00002-of-00002.safetensors").write_bytes(content)
    index = {
        "metadata": {},
        "weight_map": {"b": "model-00001-of-00002.safetensors", "c": "model-00002-of-00002.safetensors"},
    }
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    (model / "model.safetensors").unlink()
    with pytest.raises(IngotError) as caught:
        ingot.open(model)
    assert caught.value.rule == rule
    assert "model-00002-of-00002.safetensors" in str(caught.value)


def test_a_folder_is_told_though_its_name_is_within_that_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    Path("model/model.safetensors").write_bytes(LFS)
    with pytest.raises(IngotError) as caught:
        ingot.open("model")
    assert str(caught.value).startswith("model: model.safetensors: expected")


@pytest.mark.parametrize("content", [b"\x10\0\0", bytes(4096)], ids=["a few bytes", "zeros"])
def test_a_download_that_has_only_begun_is_told_of(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(IngotError, match=re.escape(TRUNCATED_HINT)):
        ingot.open(tmp_path / "model.safetensors")


def test_an_array_that_is_a_pointer_is_named(model: Path, tmp_path: Path) -> None:
    ingot.convert(model, tmp_path / "squish", format="npydir")
    (tmp_path / "squish" / "tensors" / "model__norm__weight__pt.npy").write_bytes(LFS)
    assert rule_of(tmp_path / "squish") == "detect.lfs-pointer"


@pytest.mark.parametrize(
    ("name", "content", "rule"),
    [
        ("pytorch_model.bin", b"\x80\x02}q" + bytes(64), "detect.pickle"),
        ("model.h5", b"\x89HDF\r\n\x1a\n" + bytes(64), "detect.hdf5"),
        ("model.safetensors.incomplete", b"\x10\0\0\0\0\0\0\0{" + bytes(64), "detect.unfinished"),
    ],
)
def test_a_folder_with_nothing_but_another_container_says_which(
    tmp_path: Path, name: str, content: bytes, rule: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "README.md").write_text("<html>")  # no weights by its name
    (tmp_path / name).write_bytes(content)
    assert rule_of(tmp_path) == rule


@pytest.mark.parametrize(
    ("path", "rule", "advice"),
    [
        ("./meta-llama/Llama-3-8B", "open.missing", "no such file"),
        ("ftp://host/model.zt", "open.url", "download it first"),
        ("modle.zt", "open.missing", "'model.zt'"),
    ],
)
def test_what_is_no_path_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, rule: str, advice: str
) -> None:
    monkeypatch.chdir(tmp_path)
    ingot.save("model.zt", {"a": np.zeros(3, np.float32)})
    with pytest.raises(UsageError) as caught:
        ingot.open(path)
    assert caught.value.rule == rule
    assert advice in str(caught.value)


@pytest.mark.parametrize("kept", [12, 10_000])
@pytest.mark.parametrize("name", ["m.safetensors", "m.gguf", "m.zt", "m.squizd"])
def test_half_downloads_are_told_as_such(model: Path, tmp_path: Path, name: str, kept: int) -> None:
    file = tmp_path / name
    ingot.convert(model, file, keep_names=True)
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(IngotError) as caught:
        ingot.open(file)
    assert TRUNCATED_HINT in str(caught.value)
