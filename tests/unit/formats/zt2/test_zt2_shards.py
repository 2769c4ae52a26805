"""Parts in other files: found by name or by what they are, refused where they are something else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import ingot
from ingot.conversion.options import ConvertOptions
from ingot.conversion.run import prepare
from ingot.core.bytes import checksums
from ingot.core.parsing import cbor
from ingot.errors import IngotError
from ingot.formats.base import WriteOptions
from ingot.formats.zt2 import overlay as zt2_overlay
from ingot.formats.zt2 import shards
from ingot.formats.zt2.format import Zt2Format
from ingot.formats.zt2.layout import ALIGNMENT, MAGIC, Footer, align
from ingot.formats.zt2.reader import read_manifest
from ingot.model.artifact import Artifact
from ingot.model.bytesource import MemorySource
from ingot.model.spec import PartSpec, TensorSpec
from ingot.stores.local import LocalStore
from ingot.stores.memory import MemoryTarget

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
    root = overlay(tmp_path, algorithm=algorithm)
    if way == "other bytes":
        ingot.save(tmp_path / "base.zt", {"w": BASE + 1}, format="zt2", overwrite=True)
    elif way == "absent":
        (tmp_path / "base.zt").unlink()
    elif way == "another size":
        (tmp_path / "base.zt").write_bytes((tmp_path / "base.zt").read_bytes() + b"\0")
    with pytest.raises(IngotError) as caught:
        ingot.open(root)
    assert caught.value.rule == "zt2.shard-missing"


def test_a_base_is_known_by_its_parts_and_hashed_by_verify_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = overlay(tmp_path, b"of another file that has these parts")
    with monkeypatch.context() as patch:
        for module in (shards, zt2_overlay):
            patch.setattr(module, "digest_of_range", None)  # nobody asks
        with ingot.open(root) as found:
            assert np.array_equal(found["w"].numpy(), BASE)
        ingot.save(tmp_path / "new.zt", {"w": BASE})
        options = ConvertOptions(tmp_path / "new.zt", tmp_path / "v1.zt", container=2, overlay=tmp_path / "base.zt")
        with prepare(options) as prepared:
            assert prepared.report()
    assert [item.rule for item in ingot.verify(root) if item.level == "error"] == ["zt2.shard-digest"]


def test_a_base_whose_parts_have_no_digests_is_known_by_that_of_the_file(tmp_path: Path) -> None:
    new = tuned_and_base(tmp_path)
    ingot.convert(tmp_path / "base.zt", tmp_path / "b.zt", container=2, digest=None)
    ingot.convert(tmp_path / "new.zt", tmp_path / "v1.zt", container=2, digest=None, overlay=tmp_path / "b.zt")
    (tmp_path / "base.zt").unlink()
    with ingot.open(tmp_path / "v1.zt") as found:
        assert np.array_equal(found["k1"].numpy(), new["k1"])
    data = bytearray((tmp_path / "b.zt").read_bytes())
    data[read_manifest(MemorySource(bytes(data)))[1].objects["k1"].parts["data"].blob[0]] ^= 1
    (tmp_path / "b.zt").write_bytes(data)
    with pytest.raises(IngotError) as caught:
        ingot.open(tmp_path / "v1.zt")
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


def test_a_model_is_written_in_shards(tmp_path: Path) -> None:
    """Of at most so many bytes, a larger tensor alone; the same tensors, in the same order, and back in one file."""
    tensors = {f"t{index}": np.arange(index * 40_000 + 1, dtype=np.float32) for index in range(4)}
    ingot.save(tmp_path / "one.zt", tensors, format="zt2")
    report = ingot.convert(tmp_path / "one.zt", tmp_path / "many/", container=2, max_shard=500_000)
    files = sorted(path.name for path in (tmp_path / "many").iterdir())
    assert files == ["model-00001.zt", "model-00002.zt", "model-00003.zt", "model.zt"] == sorted(report.files)
    sizes = [path.stat().st_size for path in (tmp_path / "many").iterdir()]
    assert sum(sizes) <= report.size
    assert (tmp_path / "many" / "model-00001.zt").stat().st_size <= 500_000
    with ingot.open(tmp_path / "many") as found:
        assert list(found) == list(tensors)
        assert all(found[name].numpy().tobytes() == values.tobytes() for name, values in tensors.items())
    assert not [item for item in ingot.verify(tmp_path / "many") if item.level == "error"]
    ingot.convert(tmp_path / "many", tmp_path / "back.zt", container=2)
    assert (tmp_path / "back.zt").read_bytes() == (tmp_path / "one.zt").read_bytes()
    whole = ingot.convert(tmp_path / "one.zt", tmp_path / "whole/", container=2)  # one file where nothing else is asked
    assert list(whole.files) == ["model.zt"]
    with pytest.raises(IngotError) as caught:
        ingot.convert(tmp_path / "one.zt", tmp_path / "none/", container=2, max_shard=0)
    assert caught.value.rule == "zt2.max-shard"


def test_shards_that_were_begun_are_taken_up_again() -> None:
    data = [bytes([index]) * 70_000 for index in range(4)]
    specs = [TensorSpec(f"t{index}", (1,), "u8", "x.own/1", (PartSpec("x", "u8", 70_000),)) for index in range(4)]

    def write(target: MemoryTarget, after: list[dict[str, Any]], stop: int) -> list[dict[str, Any]]:
        options = WriteOptions(max_shard=300_000)
        writer = Zt2Format().writer(target, "m.zt", Artifact(specs, {}), options)
        for record in after:
            writer.restore(record)
        records = []
        for spec, part in list(zip(specs, data, strict=True))[len(after) : stop]:
            writer.begin(spec)
            writer.write("x", part)
            records.append(writer.end())
        if stop == len(specs):
            assert writer.finish() == ["m-00001.zt", "m-00002.zt", "m.zt"]
        else:
            writer.abort()
        return records

    whole, again = MemoryTarget(), MemoryTarget()
    write(whole, [], 4)
    write(again, write(again, [], 3), 4)
    assert {name: bytes(held) for name, held in whole.files.items()} == {
        name: bytes(held) for name, held in again.files.items()
    }


@pytest.mark.parametrize("digest", [None, "crc32c", "sha256"])
def test_sizes_of_shards_are_told_to_the_byte(digest: str | None) -> None:
    """Also where a tensor's parts lie in another order than its spec has them; no shard is larger than asked for."""
    specs, limit = [], 4 * 65536 + 1000
    for index in range(3):
        parts = PartSpec("z", "u8", 20_000 + index), PartSpec("a", "u8", 100 + index)
        specs.append(TensorSpec(f"t{index}", (1,), "u8", "x.own/1", parts))
    artifact, target = Artifact(specs, {"a": 1}), MemoryTarget()
    options = WriteOptions(digest=digest, max_shard=limit)
    writer = Zt2Format().writer(target, "m.zt", artifact, options)
    for index, spec in enumerate(specs):
        writer.begin(spec)
        for part in spec.parts:
            writer.write(part.role, bytes([index]) * (part.length or 0))
        writer.end()
    shards = writer.finish()[:-1]
    assert max(len(target.files[name]) for name in shards) <= limit
    assert sum(map(len, target.files.values())) == Zt2Format().size(artifact, options)


def tuned_and_base(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Write ``base.zt`` (container 2) and ``new.zt`` (1), with three of its four tensors, one of them renamed."""
    kept = {f"k{index}": np.arange(index * 1000, index * 1000 + 900, dtype=np.float32) for index in range(3)}
    ingot.save(folder / "base.zt", {**kept, "w": np.zeros(900, np.float32)}, format="zt2")
    new = {"k0": kept["k0"], "k1": kept["k1"], "renamed": kept["k2"], "w": np.ones(900, np.float32)}
    ingot.save(folder / "new.zt", new)
    return new


def test_overlays_are_written(tmp_path: Path) -> None:
    """What the base has is named, the rest stored; over an overlay likewise; the same every time."""
    new = tuned_and_base(tmp_path)
    report = ingot.convert(tmp_path / "new.zt", tmp_path / "v1.zt", container=2, overlay=tmp_path / "base.zt")
    manifest = read_manifest(MemorySource((tmp_path / "v1.zt").read_bytes()))[1]
    assert {name: obj.parts["data"].shard for name, obj in manifest.objects.items()} == {
        "k0": "base", "k1": "base", "renamed": "base", "w": msgspec.UNSET
    }  # fmt: skip
    assert report.size == (tmp_path / "v1.zt").stat().st_size < (tmp_path / "base.zt").stat().st_size
    (tmp_path / "v1.zt").rename(tmp_path / "first.zt")
    ingot.convert(tmp_path / "new.zt", tmp_path / "v1.zt", container=2, overlay=tmp_path / "base.zt")
    assert (tmp_path / "v1.zt").read_bytes() == (tmp_path / "first.zt").read_bytes()

    ingot.save(tmp_path / "newer.zt", {**new, "more": np.full(900, 2, np.float32)})
    ingot.convert(tmp_path / "newer.zt", tmp_path / "v2.zt", container=2, overlay=tmp_path / "v1.zt")
    (tmp_path / "v1.zt").rename(tmp_path / "v2-base-2.zt")
    shards = read_manifest(MemorySource((tmp_path / "v2.zt").read_bytes()))[1].shards
    assert sorted(shards) == ["base", "base-2"]
    with ingot.open(tmp_path / "v2.zt") as found:
        assert {name: found[name].numpy().tobytes() for name in new} == {name: x.tobytes() for name, x in new.items()}
    assert not [item for item in ingot.verify(tmp_path / "v2.zt") if item.level == "error"]


def test_an_overlay_that_was_begun_is_taken_up_again(tmp_path: Path) -> None:
    new = tuned_and_base(tmp_path)
    ingot.convert(tmp_path / "new.zt", tmp_path / "v1.zt", container=2, overlay=tmp_path / "base.zt")
    format = Zt2Format().overlay(LocalStore(tmp_path), "base.zt", "v1.zt", "crc32c")
    specs = [TensorSpec(name, (900,), "f32", "dense", (PartSpec("data", "f32", 3600),)) for name in sorted(new)]
    target, records = MemoryTarget(), list[dict[str, Any]]()
    for stop in (2, 4):
        writer = format.writer(target, "v1.zt", Artifact(specs, {}), WriteOptions())
        for record in records:
            writer.restore(record)
        for spec in specs[len(records) : stop]:
            writer.begin(spec)
            writer.write("data", new[spec.name])
            records.append(writer.end())
        (writer.abort if stop == 2 else writer.finish)()
    assert bytes(target.files["v1.zt"]) == (tmp_path / "v1.zt").read_bytes()
    assert [len(record["blobs"]) for record in records] == [0, 0, 0, 1]
    role, shard, offset, length, digest = records[0]["named"][0]
    again = format.writer(MemoryTarget(), "v1.zt", Artifact(specs, {}), WriteOptions())
    with pytest.raises(IngotError) as caught:
        again.restore({**records[0], "named": [[role, shard, offset + 4096, length, digest]]})
    assert caught.value.rule == "zt2.resume-record"
    again.abort()


@pytest.mark.parametrize(
    ("target", "base", "more"),
    [
        ("v1.zt", "base.zt", {}),  # container 1
        ("folder/", "base.zt", {"container": 2}),
        ("base.zt", "base.zt", {"container": 2, "overwrite": True}),
        ("v1.zt", "below/base.zt", {"container": 2}),
    ],
)
def test_overlays_that_nobody_could_read_are_refused(
    tmp_path: Path, target: str, base: str, more: dict[str, Any]
) -> None:
    tuned_and_base(tmp_path)
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "base.zt").write_bytes((tmp_path / "base.zt").read_bytes())
    with pytest.raises(IngotError) as caught:
        ingot.convert(tmp_path / "new.zt", f"{tmp_path}/{target}", overlay=tmp_path / base, **more)
    assert caught.value.rule == "convert.overlay"
