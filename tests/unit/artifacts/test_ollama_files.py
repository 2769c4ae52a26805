"""Manifests and Modelfiles of ollama are opened as the weights that they name, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.errors import FormatError, IngotError, UnsupportedError, UsageError

DIGEST = "ab" * 32
TENSORS = {"w": np.arange(64, dtype=np.float32).reshape(2, 32)}
MODEL: dict[str, Any] = {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{DIGEST}"}


def weights(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    ingot.save(path.with_suffix(".gguf"), TENSORS)
    return path.with_suffix(".gguf").rename(path)


def manifest(folder: Path, layers: Any) -> Path:
    """Write a manifest and the weights that it names, and return the manifest's path."""
    weights(folder / "models" / "blobs" / f"sha256-{DIGEST}")
    path = folder / "models" / "manifests" / "registry.ollama.ai" / "library" / "tiny" / "latest"
    path.parent.mkdir(parents=True)
    path.write_text(layers if isinstance(layers, str) else json.dumps({"schemaVersion": 2, "layers": layers}))
    return path


def modelfile(folder: Path, text: str, name: str = "Modelfile") -> Path:
    weights(folder / "x.gguf")
    (folder / name).write_text(text)
    return folder / name


def read(path: Path) -> Any:
    with ingot.open(path) as checkpoint:
        return checkpoint["w"].numpy()


def test_a_manifest_of_weights_is_opened(tmp_path: Path) -> None:
    source = manifest(tmp_path, [MODEL])
    assert np.array_equal(read(source), TENSORS["w"])
    ingot.convert(source, tmp_path / "y.gguf", keep_names=True)
    assert np.array_equal(read(tmp_path / "y.gguf"), TENSORS["w"])


@pytest.mark.parametrize("part", ["template", "params", "system", "adapter", "projector", "license", "messages"])
def test_a_manifest_with_other_parts_is_refused_with_the_path(part: str, tmp_path: Path) -> None:
    layers = [MODEL, {"mediaType": f"application/vnd.ollama.image.{part}", "digest": f"sha256:{'0' * 64}"}]
    with pytest.raises(UnsupportedError, match=f"states {part} .*sha256-{DIGEST}") as caught:
        ingot.open(manifest(tmp_path, layers))
    assert caught.value.rule == "open.ollama"


@pytest.mark.parametrize(
    "layers", ["{", [{**MODEL, "digest": "sha256:../../etc/passwd"}], [{**MODEL, "digest": 3}], [MODEL, MODEL]]
)
def test_a_malformed_manifest_is_refused(layers: Any, tmp_path: Path) -> None:
    with pytest.raises((FormatError, UnsupportedError)) as caught:
        ingot.open(manifest(tmp_path, layers))
    assert caught.value.rule == "open.ollama"


def test_a_manifest_whose_weights_are_absent_is_refused(tmp_path: Path) -> None:
    source = manifest(tmp_path, [MODEL])
    (tmp_path / "models" / "blobs" / f"sha256-{DIGEST}").unlink()
    with pytest.raises(UsageError) as caught:
        ingot.open(source)
    assert caught.value.rule == "open.missing"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("FROM ./x.gguf\n", "Modelfile"),
        ("# TEMPLATE none\nfrom x.gguf", "modelfile"),
        ('\nFROM "./x.gguf"\n', "tiny.Modelfile"),
        ("FROM {folder}/x.gguf", "Modelfile.tiny"),
    ],
)
def test_a_modelfile_of_weights_is_opened(text: str, name: str, tmp_path: Path) -> None:
    assert np.array_equal(read(modelfile(tmp_path, text.format(folder=tmp_path), name)), TENSORS["w"])


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ('TEMPLATE """{{ .Prompt }}\nFROM ./other.gguf\n"""', "TEMPLATE"),
        ("parameter stop x", "PARAMETER"),
        ("ADAPTER ./a.gguf", "ADAPTER"),
        ("SYSTEM You answer.", "SYSTEM"),
        ("MESSAGE user hello", "MESSAGE"),
    ],
)
def test_a_modelfile_with_other_parts_is_refused_with_the_path(line: str, name: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=rf"states {name} .*x\.gguf") as caught:
        ingot.open(modelfile(tmp_path, f"FROM ./x.gguf\n{line}\n"))
    assert caught.value.rule == "open.ollama"


@pytest.mark.parametrize("text", ["FROM llama3.2\n", "FROM llama3.2:latest", "FROM ./x.gguf\nFROM ./x.gguf"])
def test_a_modelfile_without_one_file_of_weights_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError) as caught:
        ingot.open(modelfile(tmp_path, text))
    assert caught.value.rule == "open.ollama"


@pytest.mark.parametrize("data", [b"", b"\xff\xfe", b"nothing"])
def test_another_file_of_this_name_is_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "Modelfile").write_bytes(data)
    with pytest.raises(IngotError):
        ingot.open(tmp_path / "Modelfile")
