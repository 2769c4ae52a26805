"""Once a result has appeared under its name, no failure of the system can turn the operation into an error."""

from __future__ import annotations

import builtins
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.core.files import atomic
from ingot.ext.squish.tiers.int4 import add_int4

_OF_THE_SYSTEM = (
    *("open", "stat", "lstat", "listdir", "scandir", "unlink", "remove", "rmdir", "mkdir", "rename", "replace"),
    *("fsync", "read", "pread", "write", "pwrite", "statvfs", "readlink"),
)
_CALLS = [(builtins, "open"), (io, "open"), *((os, name) for name in _OF_THE_SYSTEM)]


def _fails(*_: Any, **__: Any) -> Any:
    raise OSError(5, "Input/output error")


def weights(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    names = ("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight")
    return {name: rng.standard_normal((256, 256)).astype(np.float32) for name in names}


def folder(path: Path, seed: int = 0) -> Path:
    path.mkdir()
    ingot.save(path / "model.safetensors", weights(seed))
    (path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    (path / "tokenizer.json").write_text("{}")
    return path


def convert_file(tmp_path: Path) -> Callable[[], object]:
    source = folder(tmp_path / "m")
    return lambda: ingot.convert(source, tmp_path / "x.zt", "int8")


def convert_folder(tmp_path: Path) -> Callable[[], object]:
    source = folder(tmp_path / "m")
    return lambda: ingot.convert(source, tmp_path / "x", "int8", format="npydir")


def convert_over_a_folder(tmp_path: Path) -> Callable[[], object]:
    source = folder(tmp_path / "m")
    ingot.convert(source, tmp_path / "x", format="safetensors")
    return lambda: ingot.convert(source, tmp_path / "x", format="safetensors", overwrite=True, max_shard=300_000)


def diff(tmp_path: Path) -> Callable[[], object]:
    base, tuned = folder(tmp_path / "m"), folder(tmp_path / "t", 1)
    return lambda: ingot.diff(base, tuned, tmp_path / "d.zt", "int4")


def patch(tmp_path: Path) -> Callable[[], object]:
    base, tuned = folder(tmp_path / "m"), folder(tmp_path / "t", 1)
    ingot.diff(base, tuned, tmp_path / "d.zt")
    return lambda: ingot.patch(base, tmp_path / "d.zt", tmp_path / "p")


def save(tmp_path: Path) -> Callable[[], object]:
    return lambda: ingot.save(tmp_path / "s.zt", weights())


def get(tmp_path: Path) -> Callable[[], object]:
    source = folder(tmp_path / "m")
    library = ingot.Library(tmp_path / "library")
    library.add(source, "name")
    return lambda: library.get("name", tmp_path / "got")


def int4(tmp_path: Path) -> Callable[[], object]:
    ingot.convert(folder(tmp_path / "m"), tmp_path / "squish", "int8", format="npydir")
    return lambda: add_int4(tmp_path / "squish")


@pytest.mark.parametrize(
    "operation", [convert_file, convert_folder, convert_over_a_folder, diff, patch, save, get, int4]
)
def test_nothing_fails_after_publishing(
    operation: Callable[[Path], Callable[[], object]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = operation(tmp_path)
    published: list[Any] = []
    commit = atomic.Staging._committed

    def committed(self: atomic.Staging, *folders: Path) -> None:
        published.append(self.location)
        for module, name in _CALLS:
            monkeypatch.setattr(module, name, _fails)
        commit(self, *folders)

    monkeypatch.setattr(atomic.Staging, "_committed", committed)
    run()
    monkeypatch.undo()
    assert len(published) == 1
    assert Path(published[0]).exists()
