"""Archives that refer to another model, and tensors that are stored as differences to earlier versions."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest

import ingot
from ingot.archives.archive import archive
from ingot.archives.restore import restore
from ingot.artifacts.archive_layout import MAX_DELTAS, ArchivedFile, ArchiveLayout, External, Span, parse_layout
from ingot.cli.main import run
from ingot.errors import FormatError, IngotError
from tests.support.libraries import contents, folder, moved, weights


@pytest.fixture
def base(tmp_path):
    return folder(tmp_path / "base", weights())


@pytest.fixture
def tuned(tmp_path):
    return folder(tmp_path / "tuned", moved(weights(), 1))


def rule(call, *args, **options):
    with pytest.raises(IngotError) as caught:
        call(*args, **options)
    return caught.value.rule


def test_a_fine_tune_is_restored_with_its_base(base, tuned, tmp_path):
    path = tmp_path / "tuned.zt"
    result = archive(tuned, path, against=base)
    assert result.differences == 2
    assert result.stored < 40_000
    archive(base, tmp_path / "base.zt")
    library = ingot.Library(tmp_path / "library")
    library.add(base)
    for index, against in enumerate((base, tmp_path / "base.zt", library.url_of("base"))):
        restore(path, tmp_path / f"out{index}", against=against)
        assert contents(tmp_path / f"out{index}") == contents(tuned)
    base.rename(tmp_path / "moved")
    base = tmp_path / "moved"
    assert rule(restore, path, tmp_path / "none") == "archive.base"
    assert rule(restore, path, tmp_path / "none", against=tuned) == "archive.base-digest"
    assert not (tmp_path / "none").exists()
    assert {item.level for item in ingot.verify(path, base=base)} == {"note"}
    assert "archive.base" in {item.rule for item in ingot.verify(path)}
    archive(tuned, tmp_path / "again.zt", against=tmp_path / "base.zt")
    restore(tmp_path / "again.zt", tmp_path / "again", against=base)
    assert contents(tmp_path / "again") == contents(tuned)


def test_an_archive_opens_as_a_model_with_its_base(base, tuned, tmp_path, capsys):
    path = tmp_path / "tuned!.zt"
    archive(tuned, path, against=base)
    with ingot.open(tuned) as original, ingot.open(path) as opened:
        name = next(iter(original))
        np.testing.assert_array_equal(opened[name].numpy(), original[name].numpy())
        file = next(base.rglob("*.safetensors"))
        data = file.read_bytes()
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        assert rule(opened.require_unchanged) == "store.changed"
    assert rule(restore, path, tmp_path / "none") == "archive.base-digest"
    file.write_bytes(data)
    assert {item.level for item in ingot.verify(path)} == {"note"}
    assert {item.level for item in ingot.verify(path, engine="processes")} == {"note"}
    base.rename(tmp_path / "moved")
    assert rule(ingot.open, path) == "archive.base"
    assert run(["inspect", str(path), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["format"], printed["archive"]["base"], printed["tensors"]) == ("archive", "base", [])
    assert printed["archive"]["external_bytes"] > 0
    address = f"archive:{tmp_path}/tuned%21.zt!!{tmp_path}/moved"
    with ingot.open(tuned) as original, ingot.open(address) as opened:
        copied = pickle.loads(pickle.dumps(opened))
        np.testing.assert_array_equal(copied[name].numpy(), original[name].numpy())
    with ingot.open(f"archive:{tmp_path}/tuned%21.zt!{file.relative_to(base)}!{tmp_path}/moved") as opened:
        np.testing.assert_array_equal(opened[name].numpy(), copied[name].numpy())
    assert rule(ingot.open, f"archive:{tmp_path}/tuned%21.zt!!{tmp_path}/nothing") == "open.missing"


def test_bases_do_not_refer_to_each_other(base, tuned, tmp_path):
    archive(base, tmp_path / "x.zt")
    archive(tuned, tmp_path / "y.zt", against=tmp_path / "x.zt")
    archive(base, tmp_path / "z.zt", against=tuned)
    (tmp_path / "z.zt").rename(tmp_path / "x.zt")  # x now needs `tuned`, y needs x
    tuned.rename(tmp_path / "moved")
    assert rule(ingot.open, tmp_path / "y.zt") in ("archive.base", "archive.base-digest")


def test_what_the_base_contains_is_not_stored(base, tmp_path):
    result = archive(base, tmp_path / "a.zt", against=base)
    assert result.duplicates > 2
    assert result.stored < 4_000
    restore(tmp_path / "a.zt", tmp_path / "out", against=base)
    assert contents(tmp_path / "out") == contents(base)
    other = folder(tmp_path / "other", weights(7))
    alone = archive(other, tmp_path / "other.zt", against=base)
    assert alone.differences == 0
    without = {name: data for name, data in contents(other).items() if name.startswith("sub/")}
    restore(tmp_path / "other.zt", tmp_path / "weights", only=["sub/*"])
    assert contents(tmp_path / "weights") == without


def test_checkpoints_of_a_run_are_stored_as_differences(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    tensors = weights()
    for step in range(MAX_DELTAS + 3):
        folder(run / f"checkpoint-{step}", tensors)
        tensors = moved(tensors, step, 0.01)
    result = archive(run, tmp_path / "run.zt")
    assert result.differences == 2 * (MAX_DELTAS + 2)
    archive(run / "checkpoint-0", tmp_path / "first.zt")
    assert result.stored < 1.5 * (tmp_path / "first.zt").stat().st_size
    restore(tmp_path / "run.zt", tmp_path / "out")
    assert contents(tmp_path / "out") == contents(run)
    with (
        ingot.open(f"archive:{tmp_path / 'run.zt'}!checkpoint-5") as opened,
        ingot.open(run / "checkpoint-5") as expected,
    ):
        for name, tensor in expected.items():
            np.testing.assert_array_equal(opened[name][3:7], tensor[3:7])


def test_truncated_archives_restore_differences(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    for step in range(3):
        folder(run / f"checkpoint-{step}", moved(weights(), 1, 0.01 * step))
    archive(run, tmp_path / "run.zt")
    (tmp_path / "run.zt").write_bytes((tmp_path / "run.zt").read_bytes()[:-40])
    assert restore(tmp_path / "run.zt", tmp_path / "out").damaged
    assert contents(tmp_path / "out") == contents(run)


def layout(**changes):
    """Return the fields of a layout with two objects, of which the second is a difference to the first."""
    part = {"role": "data", "dtype": "u8", "length": 100}
    dense = {"name": "a", "shape": [100], "dtype": "u8", "codec": "dense", "parts": [part], "params": {}}
    parts = [{"role": "sizes", "dtype": "u32", "length": 4}, {"role": "planes", "dtype": "u8", "length": None}]
    delta = {"name": "b", "shape": [100], "dtype": "u8", "codec": "delta_exact", "parts": parts, "params": {}}
    file = {"name": "f", "size": 200, "sha256": "0" * 64, "spans": [[0, 0, 100], [1, 0, 100]]}
    fields = {"format": "ingot-archive-1", "folder": True, "objects": [dense, delta], "files": [file]}
    return json.dumps(fields | {"bases": [[1, 0]]} | changes).encode()


def test_a_layout_with_bases_is_read_back():
    parsed = parse_layout(layout(), 1000, "x")
    assert parsed.bases == {1: 0}
    external = External("g", 5, 100, "1" * 64)
    file = ArchivedFile("f", 200, "0" * 64, (Span(0, 0, 100), Span(1, 0, 100)))
    written = ArchiveLayout(True, parsed.objects, [file], {1: 2}, (external,), "base")
    again = parse_layout(written.encoded(), 1000, "x")
    assert (again.bases, again.external, again.against) == ({1: 2}, (external,), "base")


@pytest.mark.parametrize(
    "changes",
    [
        {"bases": []},
        {"bases": [[1, 1]]},
        {"bases": [[0, 1]]},
        {"bases": [[1, 2]]},
        {"bases": [[1, 0], [1, 0]]},
        {"bases": [[1, 0], [0, 0]]},
        {"bases": [[1, -1]]},
        {"bases": {}},
        {"bases": [[1, 2]], "external": [["g", 0, 99, "1" * 64]]},
        {"bases": [[1, 2]], "external": [["../g", 0, 100, "1" * 64]]},
        {"bases": [[1, 2]], "external": [["g", -1, 100, "1" * 64]]},
        {"bases": [[1, 2]], "external": [["g", 0, 100, "1"]]},
        {"bases": [[1, 2]], "external": [["g", 0, 100]]},
        {"external": [["g", 0, 100, "1" * 64]]},
        {"external": 3},
    ],
)
def test_hostile_bases_are_refused(changes):
    with pytest.raises(FormatError) as caught:
        parse_layout(layout(**changes), 1000, "x")
    assert caught.value.rule in ("archive.layout", "archive.name")
