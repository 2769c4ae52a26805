"""Archiving and restoring: files come back byte for byte, equal bytes are stored once, archives open as models."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import ingot
from ingot.archives.archive import archive
from ingot.archives.restore import restore
from ingot.cli.main import run
from ingot.errors import IngotError
from ingot.formats.detect import FORMATS
from ingot.inspect.inspect import inspect
from ingot.stores.location import Location
from tests.support import model_folder
from tests.support.libraries import contents, folder, weights
from tests.support.web import WebServer


def rule(call, *args, **options):
    with pytest.raises(IngotError) as caught:
        call(*args, **options)
    return caught.value.rule


def test_a_folder_comes_back_byte_for_byte(model, archived, tmp_path):
    restored = restore(archived, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(model)
    assert (restored.files, restored.damaged) == (len(contents(model)), [])
    assert archived.stat().st_size < sum(len(data) for data in contents(model).values())
    again = tmp_path / "again.zt"
    archive(model, again, threads=1)
    assert again.read_bytes() == archived.read_bytes()


@pytest.mark.parametrize("recipe", ["q4_0", "q8_0", "iq4_xs", "f16"])
def test_gguf_files_come_back(tmp_path, recipe):
    source = model_folder.write(tmp_path / "model")
    path = tmp_path / "model.gguf"
    ingot.convert(source, path, recipe=None if recipe == "f16" else recipe)
    archive(path, tmp_path / "a.zt")
    restore(tmp_path / "a.zt", tmp_path / "out")
    assert contents(tmp_path / "out") == {"model.gguf": path.read_bytes()}
    with ingot.open(path) as original, ingot.open(tmp_path / "a.zt") as opened:
        assert (opened.format, list(opened)) == ("gguf", list(original))
        for name, tensor in original.items():
            np.testing.assert_array_equal(opened[name].numpy("f32"), tensor.numpy("f32"))


@pytest.mark.parametrize("format", ["safetensors", "zt", "zt2", "npydir", "squizd"])
def test_other_formats_come_back(tmp_path, format):
    tensors = {f"model.layers.0.{name}": np.asarray(value, np.float32) for name, value in weights().items()}
    source = tmp_path / (f"m.{format}" if format not in ("npydir", "zt2") else "m")
    if format == "zt2":
        source = tmp_path / "m.zt"
        ingot.save(tmp_path / "m.safetensors", tensors)
        ingot.convert(tmp_path / "m.safetensors", source, container=2)
    else:
        ingot.save(source, tensors, format=format)
    archive(source, tmp_path / "a.zt")
    restore(tmp_path / "a.zt", tmp_path / "out")
    expected = contents(source) if source.is_dir() else {source.name: source.read_bytes()}
    assert contents(tmp_path / "out") == expected


def test_torch_checkpoints_and_optimizer_states_come_back(tmp_path):
    torch = pytest.importorskip("torch")
    layer = torch.nn.Linear(64, 64)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    path = tmp_path / "run"
    path.mkdir()
    torch.save(layer.state_dict(), path / "pytorch_model.bin")
    torch.save(optimizer.state_dict(), path / "optimizer.pt")
    torch.save({"model": layer.state_dict()}, path / "legacy.pt", _use_new_zipfile_serialization=False)
    archive(path, tmp_path / "a.zt")
    restore(tmp_path / "a.zt", tmp_path / "out")
    assert contents(tmp_path / "out") == contents(path)
    names = objects(tmp_path / "a.zt")
    assert {"weight", "state.0.exp_avg", "state.0.exp_avg_sq"} <= names


def objects(path: Path) -> set[str]:
    """Return the names of the objects in a ``.zt`` file."""
    store, name = Location.parse(path).find()
    return {*FORMATS["zt"].read(store, name).tensors}


@pytest.mark.parametrize("data", [b"", b"\0", bytes(300), b"PK\x03\x04", b"ZTEN1000", b"GGUF\3\0\0\0" + bytes(30)])
def test_files_of_any_content_come_back(tmp_path, data):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "data.safetensors").write_bytes(data)
    (tmp_path / "x" / "data.gguf").write_bytes(data)
    (tmp_path / "x" / "data").write_bytes(data)
    archive(tmp_path / "x", tmp_path / "a.zt")
    restore(tmp_path / "a.zt", tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "x")


def test_equal_tensors_are_stored_once(tmp_path):
    torch = pytest.importorskip("torch")
    tensors = weights()
    source = folder(tmp_path / "model", tensors)
    archive(source, tmp_path / "single.zt")
    ingot.save(source / "consolidated.safetensors", {f"other.{name}": value for name, value in tensors.items()})
    (source / "original").mkdir()
    states = {
        name: torch.from_numpy(value.view(np.int16).copy()).view(torch.bfloat16) for name, value in tensors.items()
    }
    torch.save(states, source / "original" / "consolidated.00.pth")
    result = archive(source, tmp_path / "both.zt")
    assert result.duplicates >= 2 * sum(value.nbytes > 1024 for value in tensors.values())
    assert (tmp_path / "both.zt").stat().st_size < (tmp_path / "single.zt").stat().st_size * 1.2
    restore(tmp_path / "both.zt", tmp_path / "out")
    assert contents(tmp_path / "out") == contents(source)


def test_f32_that_is_bf16_takes_the_space_of_bf16(tmp_path):
    values = np.random.default_rng(0).standard_normal((256, 256)).astype(ml_dtypes.bfloat16)
    ingot.save(tmp_path / "bf16.safetensors", {"x": values})
    ingot.save(tmp_path / "f32.safetensors", {"x": values.astype(np.float32)})
    narrow = archive(tmp_path / "bf16.safetensors", tmp_path / "bf16.zt")
    wide = archive(tmp_path / "f32.safetensors", tmp_path / "f32.zt")
    assert wide.stored < narrow.stored * 1.05
    restore(tmp_path / "f32.zt", tmp_path / "out")
    assert (tmp_path / "out" / "f32.safetensors").read_bytes() == (tmp_path / "f32.safetensors").read_bytes()


def test_an_archive_opens_as_the_model(tmp_path):
    source = model_folder.write(tmp_path / "model")
    path = tmp_path / "a!b.zt"
    archive(source, path)
    with ingot.open(source) as original, ingot.open(path) as opened:
        assert (opened.format, list(opened)) == (original.format, list(original))
        assert set(opened.companions) == set(original.companions)
        name = next(iter(original))
        np.testing.assert_array_equal(opened[name][1:5], original[name][1:5])
        copied = pickle.loads(pickle.dumps(opened))
        np.testing.assert_array_equal(copied[name].numpy(), original[name].numpy())
    ingot.convert(path, tmp_path / "out.gguf")
    ingot.convert(source, tmp_path / "expected.gguf")
    assert (tmp_path / "out.gguf").read_bytes() == (tmp_path / "expected.gguf").read_bytes()
    assert inspect(path).format == "safetensors"


def test_load_model_reads_an_archive(tmp_path):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    source = model_folder.write(tmp_path / "model")
    archive(source, tmp_path / "a.zt")
    expected = ingot.load_model(source).state_dict()
    loaded = ingot.load_model(tmp_path / "a.zt").state_dict()
    assert expected.keys() == loaded.keys()
    assert all(torch.equal(loaded[name], value) for name, value in expected.items())


def test_objects_have_the_names_of_tensors(archived):
    assert {"z", "a", *(name for name, value in weights().items() if value.nbytes > 1024)} <= objects(archived)


def test_folders_in_an_archive_have_addresses(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    for step in (1, 2):
        folder(run / f"checkpoint-{step}", weights(step))
    archive(run, tmp_path / "run.zt")
    assert rule(ingot.open, tmp_path / "run.zt") == "detect.none"
    with ingot.open(f"archive:{tmp_path / 'run.zt'}!checkpoint-2") as opened:
        name, expected = next(iter(weights(2).items()))
        np.testing.assert_array_equal(opened[name].numpy(), expected)
    assert rule(ingot.open, f"archive:{tmp_path / 'run.zt'}!checkpoint-3") == "open.missing"
    assert rule(ingot.open, f"archive:{run / 'checkpoint-1' / 'model.safetensors'}!x") in (
        "archive.none",
        "open.missing",
    )
    assert [item.level for item in ingot.verify(tmp_path / "run.zt")] == ["note"]


def test_one_tensor_is_read_by_ranges(tmp_path):
    tensors = {f"t{index}": np.random.default_rng(index).standard_normal((512, 512), np.float32) for index in range(6)}
    ingot.save(tmp_path / "m.safetensors", tensors)
    archive(tmp_path / "m.safetensors", tmp_path / "m.zt")
    data = (tmp_path / "m.zt").read_bytes()
    with WebServer({"m.zt": data}) as server, ingot.open(f"{server.url}/m.zt") as opened:
        np.testing.assert_array_equal(opened["t3"].numpy(), tensors["t3"])
        ranges = [item.range for item in server.gets() if item.range]
        read = sum(min(len(data) if last is None else last + 1, len(data)) - first for first, last in ranges)
        assert read < len(data) / 2
    with WebServer({"m.zt": data}) as server:
        restore(f"{server.url}/m.zt", tmp_path / "out")
    assert (tmp_path / "out" / "m.safetensors").read_bytes() == (tmp_path / "m.safetensors").read_bytes()


def test_only_files_that_match_are_restored(archived, model, tmp_path):
    restored = restore(archived, tmp_path / "out", only=["*.json", "assets/*"])
    expected = {name: data for name, data in contents(model).items() if name.endswith(".json") or "assets/" in name}
    assert contents(tmp_path / "out") == expected
    assert restored.files == len(expected)
    assert rule(restore, archived, tmp_path / "none", only=["*.json", "nothing"]) == "archive.only"
    assert not (tmp_path / "none").exists()


def test_memory_limits_are_kept_or_refused(archived, model, tmp_path):
    archive(model, tmp_path / "limited.zt", max_ram="2GiB")
    assert (tmp_path / "limited.zt").read_bytes() == archived.read_bytes()
    assert rule(archive, model, tmp_path / "small.zt", max_ram="1MiB") == "ram.ceiling"
    assert rule(restore, archived, tmp_path / "small", max_ram="1MiB") == "ram.ceiling"
    restore(archived, tmp_path / "out", max_ram="2GiB")
    assert contents(tmp_path / "out") == contents(model)


class StopRunError(Exception):
    pass


def test_interrupted_runs_resume(model, archived, tmp_path, monkeypatch):
    expected = archived.read_bytes()
    monkeypatch.setattr("ingot.archives.archive.problems", stop)
    with pytest.raises(StopRunError):
        archive(model, tmp_path / "b.zt", resume=True)
    assert not (tmp_path / "b.zt").exists()
    monkeypatch.undo()
    result = archive(model, tmp_path / "b.zt", resume=True)
    assert result.resumed > 3
    assert (tmp_path / "b.zt").read_bytes() == expected
    calls = []

    def progress(event):
        calls.append(event)
        if len(calls) == 3:
            raise StopRunError

    with pytest.raises(StopRunError):
        restore(archived, tmp_path / "out", resume=True, progress=progress)
    assert not (tmp_path / "out").exists()
    restore(archived, tmp_path / "out", resume=True)
    assert contents(tmp_path / "out") == contents(model)


def stop(*args):
    raise StopRunError


def test_links_are_followed_and_devices_refused(tmp_path):
    source = folder(tmp_path / "source", weights())
    links = tmp_path / "links"
    links.mkdir()
    for path in source.iterdir():
        (links / path.name).symlink_to(path)
    (links / "inner").symlink_to(source)
    archive(links, tmp_path / "a.zt")
    restore(tmp_path / "a.zt", tmp_path / "out")
    expected = contents(source)
    assert contents(tmp_path / "out") == expected | {f"inner/{name}": data for name, data in expected.items()}
    assert not any(path.is_symlink() for path in (tmp_path / "out").rglob("*"))
    (links / "nowhere").symlink_to(tmp_path / "missing")
    assert rule(archive, links, tmp_path / "b.zt") == "archive.device"
    (links / "nowhere").unlink()
    os.mkfifo(links / "pipe")
    assert rule(archive, links, tmp_path / "b.zt") == "archive.device"
    (links / "pipe").unlink()
    (links / "loop").symlink_to(links)
    assert rule(archive, links, tmp_path / "b.zt") == "library.folders"


@pytest.mark.parametrize(
    ("name", "expected"), [("README.md", "archive.collision"), ("a:b", "archive.name"), ("a\\b", "archive.name")]
)
def test_names_that_other_systems_lack_are_refused(tmp_path, name, expected):
    source = folder(tmp_path / "source", weights())
    (source / "readme.md").touch()
    (source / name).touch()
    assert rule(archive, source, tmp_path / "a.zt") == expected
    assert not (tmp_path / "a.zt").exists()


def test_folders_of_other_tools_are_left_out_and_named(tmp_path):
    source = folder(tmp_path / "source", weights())
    (source / ".git" / "objects").mkdir(parents=True)
    (source / ".git" / "objects" / "x").touch()
    (source / "nothing").mkdir()
    result = archive(source, tmp_path / "a.zt")
    assert result.notes == ["not archived: .git", "not archived: empty folders nothing"]
    restore(tmp_path / "a.zt", tmp_path / "out")
    assert ".git/objects/x" not in contents(tmp_path / "out")


def test_targets_are_checked(model, archived, tmp_path):
    assert rule(archive, model, model / "a.zt") == "archive.within"
    assert rule(archive, archived, archived, overwrite=True) == "archive.within"
    assert rule(archive, model, tmp_path / "a.tar") == "archive.suffix"
    assert rule(archive, model, archived) == "target.exists"
    (tmp_path / "empty").mkdir()
    assert rule(archive, tmp_path / "empty", tmp_path / "a.zt") == "archive.none"
    assert rule(restore, model / "tokenizer.json", tmp_path / "out") == "archive.none"
    ingot.save(tmp_path / "plain.zt", {"x": np.ones(3)})
    assert rule(restore, tmp_path / "plain.zt", tmp_path / "out") == "archive.none"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    assert rule(restore, archived, tmp_path / "mine", overwrite=True) == "target.foreign"


def test_an_archive_of_an_archive_comes_back(archived, tmp_path):
    (tmp_path / "outer").mkdir()
    shutil.copy(archived, tmp_path / "outer" / "inner.zt")
    archive(tmp_path / "outer", tmp_path / "outer.zt")
    restore(tmp_path / "outer.zt", tmp_path / "out")
    assert (tmp_path / "out" / "inner.zt").read_bytes() == archived.read_bytes()


def test_inspect_describes_an_archive(model, archived, tmp_path, capsys):
    source = folder(tmp_path / "source", weights())
    shutil.copytree(source, source / "copy")
    archive(source, tmp_path / "twice.zt")
    assert run(["inspect", str(tmp_path / "twice.zt"), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)["archive"]
    stored = (tmp_path / "twice.zt").stat().st_size
    size = sum(map(len, contents(source).values()))
    assert (figures["size"], figures["stored"], figures["saved"]) == (size, stored, 1 - stored / size)
    assert {item["name"]: item["size"] for item in figures["files"]} == {
        name: len(data) for name, data in contents(source).items()
    }
    duplicates = {item["name"]: item["duplicate_bytes"] for item in figures["files"]}
    assert sum(duplicates.values()) == figures["duplicate_bytes"]
    first, second = (name for name in duplicates if name.endswith(".safetensors"))
    assert duplicates[first] < 100 < sum(value.nbytes for value in weights().values()) * 0.9 < duplicates[second]
    assert 0.8 * stored < sum(item["stored"] for item in figures["files"]) < stored
    assert run(["inspect", str(tmp_path / "twice.zt")]) == 0
    assert "copy/model.safetensors" in capsys.readouterr().out
    assert [table.name for table in ingot.report(archived).tables if table.name == "archive"]


def test_inspect_describes_an_archive_of_several_models(tmp_path, capsys):
    for step in (1, 2):
        folder(tmp_path / "run" / f"checkpoint-{step}", weights(step))
    archive(tmp_path / "run", tmp_path / "run.zt")
    assert run(["inspect", str(tmp_path / "run.zt"), "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    assert (described["format"], described["tensors"]) == ("archive", [])
    assert len(described["archive"]["files"]) == len(contents(tmp_path / "run"))
    assert run(["inspect", f"archive:{tmp_path / 'run.zt'}!checkpoint-2", "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    assert "archive" not in described
    assert len(described["tensors"]) == len(weights())


def test_commands_report_json_and_exit_codes(model, tmp_path, capsys):
    path = tmp_path / "a.zt"
    assert run(["archive", str(model), "-o", str(path), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["files"], figures["stored"]) == (len(contents(model)), path.stat().st_size)
    assert run(["restore", str(path), "-o", str(tmp_path / "out"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["files"] == len(contents(model))
    path.write_bytes(path.read_bytes()[:-20])
    assert run(["restore", str(path), "-o", str(tmp_path / "cut")]) == 1
    printed = capsys.readouterr()
    assert "zt.footer-magic" in printed.out
    assert contents(tmp_path / "cut") == contents(model)
