"""Parts in other files: found by name or by what they are, refused where they are something else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ingot
from ingot.core import cbor, checksums
from ingot.errors import IngotError
from ingot.formats.zt2.layout import ALIGNMENT, MAGIC, Footer, align
from ingot.formats.zt2.reader import read_manifest
from ingot.model.bytesource import MemorySource

OWN = np.arange(4, dtype=np.float32)
BASE = np.arange(6, dtype=np.float32).reshape(2, 3)


def overlay(folder: Path, stated: bytes | None = None, algorithm: str = "sha256") -> Path:
    """Write ``base.zt``, and ``tuned.zt`` that has one tensor of its own and one in the base as ``stated``."""
    ingot.save(folder / "base.zt", {"w": BASE}, format="zt2")
    base = (folder / "base.zt").read_bytes()
    part = read_manifest(MemorySource(base))[1].objects["w"].parts["data"]
    digest = checksums.digest("sha256", stated or base).replace("sha256", algorithm)
    shard = {"size": len(base), "digest": digest}
    objects = {
        "w": {
            "shape": [2, 3],
            "layout": "dense",
            "parts": {"data": {"dtype": "f32", "blob": list(part.blob), "shard": "base", "digest": part.digest}},
        },
        "own": {"shape": [4], "layout": "dense", "parts": {"data": {"dtype": "f32", "blob": [ALIGNMENT, OWN.nbytes]}}},
    }
    manifest = cbor.dumps({"objects": objects, "shards": {"base": shard}}, sort=True)
    data = MAGIC.ljust(ALIGNMENT, b"\0") + OWN.tobytes()
    start = align(len(data), ALIGNMENT)
    footer = Footer(start, len(manifest), checksums.xxh3(manifest)).pack()
    (folder / "tuned.zt").write_bytes(data.ljust(start, b"\0") + manifest + footer)
    return folder / "tuned.zt"


@pytest.mark.parametrize("name", ["tuned-base.zt", "renamed.zt"])
def test_an_overlay_reads_the_base_under_any_name(tmp_path: Path, name: str) -> None:
    root = overlay(tmp_path)
    (tmp_path / "base.zt").rename(tmp_path / name)
    with ingot.open(root) as found:
        assert found["w"].numpy().tobytes() == BASE.tobytes()
        assert found["own"].numpy().tobytes() == OWN.tobytes()
    ingot.convert(root, tmp_path / "whole.safetensors")
    assert not [item for item in ingot.verify(root) if item.level == "error"]


def test_a_folder_opens_by_the_file_that_is_no_shard(tmp_path: Path) -> None:
    overlay(tmp_path)
    (tmp_path / "base.zt").rename(tmp_path / "tuned-base.zt")
    with ingot.open(tmp_path) as found:
        assert sorted(found) == ["own", "w"]


@pytest.mark.parametrize("way", ["absent", "another size", "other bytes", "a digest that nobody here knows"])
def test_another_file_is_not_taken_for_a_shard(tmp_path: Path, way: str) -> None:
    algorithm = "md5" if way.startswith("a digest") else "sha256"
    root = overlay(tmp_path, b"other bytes" if way == "other bytes" else None, algorithm)
    if way == "absent":
        (tmp_path / "base.zt").unlink()
    elif way == "another size":
        (tmp_path / "base.zt").write_bytes((tmp_path / "base.zt").read_bytes() + b"\0")
    with pytest.raises(IngotError) as caught:
        ingot.open(root)
    assert caught.value.rule == "zt2.shard-missing"


def test_damage_in_a_shard_is_seen(tmp_path: Path) -> None:
    root = overlay(tmp_path)
    data = bytearray((tmp_path / "base.zt").read_bytes())
    start = read_manifest(MemorySource(bytes(data)))[1].objects["w"].parts["data"].blob[0]
    data[start] ^= 1
    (tmp_path / "tuned-base.zt").write_bytes(data)
    (tmp_path / "base.zt").unlink()
    with ingot.open(root) as found, pytest.raises(IngotError) as caught:
        found["w"].numpy()
    assert caught.value.rule == "part.digest-mismatch"
