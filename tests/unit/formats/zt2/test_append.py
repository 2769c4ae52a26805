"""Appending to container 2: the file is valid at every moment, and both ways with the package."""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import ingot
from ingot.cli.main import run
from ingot.core.parsing import cbor
from ingot.errors import IngotError
from ingot.formats.zt2.layout import FOOTER
from ingot.stores.local import LocalSink

FIRST = {"a": np.arange(1000, dtype=np.float32), "b": np.ones((3, 5), np.int64)}
SECOND = {"c": np.arange(7, dtype=np.uint8), "é": np.zeros((0, 4), np.float32), "d": np.full((300, 500), 0.5)}
NAME = "model.layers.0.mlp.up_proj.weight"
PEER = Path(__file__).parents[3] / "golden" / "zt2" / "peer.zip"


def appended_by_the_package(path):
    """Write a file to which the package appended; return its path."""
    path.write_bytes(zipfile.ZipFile(PEER).read("appended.zt"))
    return path


def rule(call, *args, **options):
    with pytest.raises(IngotError) as caught:
        call(*args, **options)
    return caught.value.rule


@pytest.fixture
def path(tmp_path):
    ingot.save(tmp_path / "m.zt", FIRST, {"note": "é", "list": [1, 2.5]}, format="zt2")
    return tmp_path / "m.zt"


def check(path, expected):
    """Compare all tensors of a file, and its digests."""
    with ingot.open(path) as opened:
        assert set(opened) == set(expected)
        for name, values in expected.items():
            np.testing.assert_array_equal(opened[name].numpy(), values)
        assert opened.metadata == {"note": "é", "list": [1, 2.5]}
    assert [item for item in ingot.verify(path) if item.level == "error"] == []


def test_the_old_file_is_a_prefix_of_the_new_one(path):
    old = path.read_bytes()
    result = ingot.append(path, SECOND)
    assert (result.tensors, result.size) == (3, path.stat().st_size)
    assert path.read_bytes().startswith(old)
    check(path, FIRST | SECOND)
    ingot.append(path, {"e": np.arange(3)}, digest="sha256")
    check(path, FIRST | SECOND | {"e": np.arange(3)})
    with ingot.open(path) as opened:
        digests = {name: tensor.parts["data"].digest.partition(":")[0] for name, tensor in opened.items()}
        assert digests == {"a": "xxh3", "b": "xxh3", "c": "xxh3", "d": "xxh3", "é": "xxh3", "e": "sha256"}
        assert all(tensor.parts["data"].offset % 65536 == 0 for tensor in opened.values())


def test_the_file_is_valid_after_each_write(path, monkeypatch):
    """Each write call is cut into two; after each part the file opens with the old or with all tensors."""
    original = LocalSink._write
    seen = []

    def write(sink, offset, data):
        middle = data.nbytes // 2 if data.nbytes > FOOTER else 0  # a footer is written at once
        for start, end in ((0, middle), (middle, data.nbytes)):
            if start < end:
                original(sink, offset + start, data[start:end])
                with ingot.open(path) as opened:
                    seen.append(set(opened))
                    np.testing.assert_array_equal(opened["a"].numpy(), FIRST["a"])

    monkeypatch.setattr(LocalSink, "_write", write)
    ingot.append(path, SECOND)
    assert seen[-1] == {*FIRST, *SECOND}
    assert all(names == {*FIRST} for names in seen[:-1])
    assert len(seen) > 6
    with path.open("rb") as file:  # the footer lies within a page, and so in one sector of a disk
        assert file.seek(0, os.SEEK_END) % 4096 == 0


def test_a_killed_run_leaves_the_old_tensors(path, monkeypatch):
    old = path.read_bytes()
    original = LocalSink._write
    for count in range(1, 7):
        path.write_bytes(old)
        pid = os.fork()
        if not pid:
            calls = []

            def write(sink, offset, data, calls=calls, count=count):
                original(sink, offset, data)
                calls.append(offset)
                if len(calls) == count:
                    os.kill(os.getpid(), 9)

            monkeypatch.setattr(LocalSink, "_write", write)
            ingot.append(path, SECOND)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        ended = os.WIFEXITED(status) or count == 5  # the last call writes the footer
        check(path, FIRST | SECOND if ended else FIRST)
    path.write_bytes(old[:-1] + old[-1:])
    ingot.append(path, SECOND)
    check(path, FIRST | SECOND)


def test_errors_leave_the_file_as_it_was(path, tmp_path):
    old = path.read_bytes()
    ingot.save(tmp_path / "damaged.zt", SECOND, format="zt2")
    data = bytearray((tmp_path / "damaged.zt").read_bytes())
    data[data.index(np.full(4, 0.5).tobytes())] ^= 1
    (tmp_path / "damaged.zt").write_bytes(data)
    with ingot.open(tmp_path / "damaged.zt", io="pread") as opened:
        assert rule(ingot.append, path, opened) == "part.digest-mismatch"
    assert path.read_bytes() == old
    assert rule(ingot.append, path, {"a": np.ones(2)}) == "append.duplicate"
    assert rule(ingot.append, path, {"\0": np.ones(2)}) == "save.unsupported"
    ingot.save(tmp_path / "v1.zt", FIRST)
    assert rule(ingot.append, tmp_path / "v1.zt", SECOND) == "append.container"
    assert rule(ingot.append, "memory://nothing/x.zt", SECOND) in ("store.missing", "append.remote")
    ingot.seal(path)
    assert rule(ingot.append, path, SECOND) == "append.sealed"
    assert path.read_bytes() == old


def test_one_process_appends_at_a_time(path):
    fcntl = pytest.importorskip("fcntl")
    with path.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert rule(ingot.append, path, SECOND) == "append.busy"
    ingot.append(path, SECOND)


def test_the_command_adds_stored_tensors(path, tmp_path, capsys):
    ingot.save(tmp_path / "extra.safetensors", {NAME: np.ones((256, 256), np.float32)})
    ingot.convert(tmp_path / "extra.safetensors", tmp_path / "packed.zt", recipe="int8", container=2)
    assert run(["append", str(path), str(tmp_path / "packed.zt"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tensors"] == 1
    with ingot.open(path) as opened, ingot.open(tmp_path / "packed.zt") as packed:
        assert opened[NAME].codec == packed[NAME].codec == "affine"
        np.testing.assert_array_equal(opened[NAME].numpy(), packed[NAME].numpy())


def test_files_that_the_package_appended_to_are_extended(tmp_path):
    appended_by_the_package(tmp_path / "m.zt")
    with ingot.open(tmp_path / "m.zt") as opened:
        before = {name: tensor.numpy() for name, tensor in opened.items()}
    ingot.append(tmp_path / "m.zt", {"mine": np.arange(5)})
    with ingot.open(tmp_path / "m.zt") as opened:
        assert {*opened} == {*before, "mine"}
        for name, values in before.items():
            np.testing.assert_array_equal(opened[name].numpy(), values)
        assert opened["mine"].parts["data"].offset % 4096 == 0
        assert opened["mine"].parts["data"].offset % 65536  # the file's own alignment


def content(entries):
    """Return the content digest of section 6.4 for a map of objects."""
    return "sha256:" + hashlib.sha256(cbor.dumps(["zt.content/1", entries], sort=True)).hexdigest()


def identity(path, capsys):
    assert run(["inspect", str(path), "--id", "--json"]) == 0
    return json.loads(capsys.readouterr().out)["id"]


def test_the_id_depends_on_contents_alone(path, tmp_path, capsys):
    with ingot.open(path) as opened:
        entries = {
            name: {
                "shape": list(tensor.shape),
                "layout": "dense",
                "parts": {"data": {"dtype": tensor.dtype, "digest": tensor.parts["data"].digest}},
            }
            for name, tensor in opened.items()
        }
    assert identity(path, capsys) == content(entries)
    ingot.save(tmp_path / "grown.zt", {"b": FIRST["b"]}, format="zt2")
    ingot.append(tmp_path / "grown.zt", {"a": FIRST["a"]})
    assert identity(tmp_path / "grown.zt", capsys) == content(entries)
    ingot.convert(path, tmp_path / "shards", container=2, max_shard_size=70_000)
    assert identity(tmp_path / "shards", capsys) == content(entries)
    ingot.save(tmp_path / "other.zt", FIRST | {"b": np.zeros((3, 5), np.int64)}, format="zt2")
    assert identity(tmp_path / "other.zt", capsys) != content(entries)


def test_the_id_of_container_1_does_not_depend_on_order(tmp_path, capsys):
    values = {"a": np.ones((4, 8), ml_dtypes.bfloat16), "b": np.arange(9)}
    ingot.save(tmp_path / "a.zt", values)
    ingot.save(tmp_path / "b.zt", dict(reversed(values.items())))
    assert identity(tmp_path / "a.zt", capsys) == identity(tmp_path / "b.zt", capsys)
    ingot.save(tmp_path / "c.zt", values | {"b": np.arange(9, dtype=np.uint64)})
    assert identity(tmp_path / "a.zt", capsys) != identity(tmp_path / "c.zt", capsys)
    ingot.save(tmp_path / "d.safetensors", values)
    assert run(["inspect", str(tmp_path / "d.safetensors"), "--id"]) == 1
    assert "inspect.id" in capsys.readouterr().err


def test_canonical_files_are_told_from_others(path, tmp_path):
    def findings(file):
        return [(item.level, item.rule) for item in ingot.verify(file, canonical=True)]

    assert findings(path) == [("note", "zt2.canonical")]
    ingot.append(path, SECOND)
    assert ("error", "zt2.canonical") in findings(path)
    ingot.convert(path, tmp_path / "again.zt", container=2)
    assert findings(tmp_path / "again.zt") == [("note", "zt2.canonical")]
    ingot.save(tmp_path / "sha.zt", FIRST, format="zt2", digest="sha256")
    assert findings(tmp_path / "sha.zt") == [("error", "zt2.canonical")] * 2
    assert findings(appended_by_the_package(tmp_path / "theirs.zt")).count(("error", "zt2.canonical")) > 2
    ingot.save(tmp_path / "v1.zt", FIRST)
    assert rule(ingot.verify, tmp_path / "v1.zt", canonical=True) == "verify.canonical"


@pytest.mark.parametrize("io", ["mmap", "pread"])
def test_hints_change_no_value(path, io, monkeypatch):
    ingot.append(path, SECOND)
    calls = []
    original = os.posix_fadvise
    monkeypatch.setattr(os, "posix_fadvise", lambda *call: (calls.append(call[1:]), original(*call)))
    with ingot.open(path, io=io) as opened:
        tensor = opened["d"]
        view = tensor.numpy()
        assert tensor.prefetch()
        assert tensor.evict()
        np.testing.assert_array_equal(view, SECOND["d"])
        np.testing.assert_array_equal(tensor.numpy(), SECOND["d"])
        part = tensor.parts["data"]
        assert calls[0] == (part.offset, part.length, os.POSIX_FADV_WILLNEED)
        assert calls[1] == (part.offset, part.length // 4096 * 4096, os.POSIX_FADV_DONTNEED)
        assert opened["c"].evict()  # seven bytes: no page is its own
        assert len(calls) == 2
    monkeypatch.delattr(os, "posix_fadvise")  # as on macOS
    with ingot.open(path, io=io) as opened:
        assert not opened["d"].prefetch()
        assert not opened["d"].evict()
