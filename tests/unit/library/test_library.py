"""Adding, getting, listing: what is stored once, as what, and that every container comes back bit for bit."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ingot
from ingot.artifacts.identity import content_id
from ingot.cli.main import run
from ingot.errors import IngotError
from ingot.library.objects import MAX_DELTAS, Objects
from ingot.stores.location import Location
from tests.support import model_folder
from tests.support.libraries import contents, folder, moved, weights


def rule(call, *args, **kwargs):
    with pytest.raises(IngotError) as caught:
        call(*args, **kwargs)
    return caught.value.rule


def files(library: ingot.Library) -> set[str]:
    return {path.name for path in (Path(library.address) / "objects").iterdir()}


def test_an_artifact_comes_back_bit_for_bit(library, base, tmp_path):
    (base / ".ready").touch()
    (base / "empty.txt").touch()
    added = library.add(base, "org/base")
    assert (added.present, added.deltas, added.files) == (0, 0, 5)
    library.get("org/base", tmp_path / "out")
    assert contents(tmp_path / "out") == contents(base)
    assert rule(library.get, "org/base", tmp_path / "out") == "target.exists"
    library.get("org/base", tmp_path / "out", overwrite=True)
    assert library.verify() == []


@pytest.mark.parametrize("name", ["m.safetensors", "m.zt", "m.gguf", "m.bin"])
def test_a_single_file_of_any_kind_comes_back(library, tmp_path, name):
    path = tmp_path / name
    if name == "m.bin":
        path.write_bytes(b"\x80\x02" + bytes(5000) + np.random.default_rng(0).bytes(70_000))
    else:
        ingot.save(path, {key: np.asarray(value, np.float32) for key, value in weights().items()})
    library.add(path)
    library.get(name, tmp_path / "out.bin")
    assert (tmp_path / "out.bin").read_bytes() == path.read_bytes()


def test_copies_in_other_shards_names_and_containers_meet(library, base, tmp_path):
    library.add(base)
    known = files(library)
    tensors = weights()
    sharded = tmp_path / "sharded"
    ingot.convert(base, sharded, format="safetensors", max_shard=40_000)
    ingot.save(tmp_path / "renamed.safetensors", {f"model.{name}": value for name, value in tensors.items()})
    ingot.convert(base, tmp_path / "other.zt")
    for path in (sharded, tmp_path / "renamed.safetensors", tmp_path / "other.zt"):
        added = library.add(path)
        assert added.deltas == 0
        library.get(path.name, tmp_path / "back" if path.is_dir() else tmp_path / f"back-{path.name}")
    assert contents(tmp_path / "back") == contents(sharded)
    weights_again = {
        name for name in files(library) - known if (Path(library.address) / "objects" / name).stat().st_size > 20_000
    }
    assert weights_again == set()
    entries = {entry.name: entry for entry in library.ls().artifacts}
    assert entries["other.zt"].shared > entries["other.zt"].removable
    assert {entry.container for entry in entries.values()} == {"safetensors", "zt"}


def test_a_fine_tune_is_stored_as_differences(library, base, tmp_path):
    library.add(base)
    tuned = folder(tmp_path / "tuned", moved(weights(), 1))
    added = library.add(tuned)
    assert added.base == "base"
    assert added.deltas == 2  # the norm is too small
    assert added.stored < 40_000
    library.get("tuned", tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tuned)
    assert library.verify() == []
    unrelated = library.add(folder(tmp_path / "unrelated", weights(9)))
    assert unrelated.deltas == 0  # measured: an entropy code is smaller
    alone = library.add(folder(tmp_path / "alone", moved(weights(), 2)), base="none")
    assert (alone.deltas, alone.base) == (0, "")
    assert rule(library.add, tuned, "x", base="nobody") == "library.unknown"


def test_the_nearest_base_is_taken(library, base, tmp_path):
    library.add(folder(tmp_path / "another", weights(5)), "a-other")
    library.add(base, "z-base")
    step = moved(weights(), 1, 0.3)
    library.add(folder(tmp_path / "step", step))
    assert library.add(folder(tmp_path / "sibling", moved(weights(), 2)), "sibling").base == "z-base"
    assert library.add(folder(tmp_path / "next", moved(step, 3, 0.01)), "next").base == "step"


def test_chains_are_bounded(library, base, tmp_path):
    library.add(base, "v0")
    tensors = weights()
    for version in range(1, MAX_DELTAS + 3):
        tensors = moved(tensors, version, 0.001)
        library.add(folder(tmp_path / f"v{version}", tensors), base=f"v{version - 1}")
    objects = Objects(Location.parse(library.address).share())
    lengths = {len(objects.chain(form.id)) - 1 for form in objects.variants()}
    assert lengths == {*range(MAX_DELTAS + 1)}
    for version in range(MAX_DELTAS + 3):
        library.get(f"v{version}", tmp_path / f"out{version}")
        source = base if version == 0 else tmp_path / f"v{version}"
        assert contents(tmp_path / f"out{version}") == contents(source)
    assert library.verify() == []


def test_artifacts_are_opened_and_converted_where_they_lie(library, base, tmp_path):
    library.add(base)
    tuned = folder(tmp_path / "tuned", moved(weights(), 1))
    library.add(tuned, "org/tuned")
    address = library.url_of("org/tuned")
    with ingot.open(address) as checkpoint, ingot.open(tuned) as expected:
        assert content_id(checkpoint) == content_id(expected)
        assert (checkpoint["embed.weight"][3:5] == expected["embed.weight"][3:5]).all()
        assert checkpoint.companions.keys() == expected.companions.keys()
    with ingot.open(f"{address}/model.safetensors") as checkpoint:
        assert len(checkpoint) == 3
    library.get("org/tuned", tmp_path / "made", format="zt")
    ingot.convert(tuned, tmp_path / "expected", format="zt")
    assert contents(tmp_path / "made") == contents(tmp_path / "expected")
    for wrong in (f"{address}/x", f"library:{library.address}!nobody", f"library:{library.address}", "library:x!"):
        with pytest.raises(IngotError):
            ingot.open(wrong)


def test_a_conversion_of_an_artifact_keeps_its_account(library, tmp_path):
    tensors = {**model_folder.tensors(), "v_head.summary.weight": np.ones((1, 64), np.float32)}
    library.add(model_folder.write(tmp_path / "m", weights=tensors), "org/m")
    with pytest.raises(IngotError, match=r"v_head\.summary\.weight") as caught:
        library.get("org/m", tmp_path / "x.gguf", format="gguf")
    assert caught.value.rule == "account.lost"
    assert not (tmp_path / "x.gguf").exists()
    got = library.get("org/m", tmp_path / "x.gguf", format="gguf", drop=["v_head.*"])
    assert any("v_head.summary.weight" in note for note in got.notes)
    with pytest.raises(IngotError, match="add format="):
        library.get("org/m", tmp_path / "y", drop=["v_head.*"])


def test_gc_removes_what_nobody_needs_and_nothing_else(library, base, tmp_path):
    library.add(base)
    tuned = folder(tmp_path / "tuned", moved(weights(), 1))
    library.add(tuned)
    before = files(library)
    assert library.gc().objects == 0
    library.rm("base")
    planned = library.gc(dry_run=True)
    assert files(library) == before
    done = library.gc()
    assert (done.objects, done.size) == (planned.objects, planned.size)
    assert done.objects == 1  # a note; the matrices are what the fine-tune's are made of
    assert len(before - files(library)) == done.objects
    library.get("tuned", tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tuned)
    library.rm("tuned")
    library.gc()
    assert files(library) == set()
    assert rule(library.rm, "tuned") == "library.unknown"


def test_a_name_belongs_to_one_artifact(library, base, tmp_path):
    library.add(base, "m")
    assert library.add(base, "m").stored == 0  # the same again
    other = folder(tmp_path / "other", weights(3))
    assert rule(library.add, other, "m") == "library.exists"
    library.add(other, "m", overwrite=True)
    library.get("m", tmp_path / "out")
    assert contents(tmp_path / "out") == contents(other)
    for name in ("../m", "/m", "m.json", ".m", "a//b", "a/..", "", "x" * 300, "m\n"):
        assert rule(library.add, base, name) == "library.name"


def test_what_is_no_library_is_left_alone(base, tmp_path):
    assert rule(ingot.Library(base).add, base / "model.safetensors") == "library.none"
    (tmp_path / "empty").mkdir()
    assert rule(ingot.Library(tmp_path / "empty").gc) == "library.none"
    assert rule(ingot.Library(tmp_path / "nowhere").ls) == "store.missing"
    assert rule(ingot.Library("https://localhost:1/x").add, base) == "store.not-writable"
    assert rule(ingot.Library(tmp_path / "new").add, tmp_path / "empty") == "library.empty"
    assert rule(ingot.Library(base / "library").add, base) == "library.within"
    assert not (base / "library").exists()
    assert rule(ingot.Library(tmp_path / "no" / "folder").add, base) == "target.no-parent"


def test_a_library_lies_where_links_and_dots_lead(base, tmp_path, monkeypatch):
    monkeypatch.chdir(base)
    assert ingot.Library("../library").add(".", "m").files == 3
    (tmp_path / "link").symlink_to(base)
    assert rule(ingot.Library(tmp_path / "link" / "library").add, base) == "library.within"


@pytest.mark.parametrize("work", ["add", "get"])
def test_an_interruption_leaves_nothing_half_written(library, base, tmp_path, work):
    library.add(base, "first")
    seen = []

    def interrupted(event):
        seen.append(event)
        if event.processed > event.total * 0.6:
            raise KeyboardInterrupt

    tuned = folder(tmp_path / "tuned", moved(weights(), 1))
    call, what = (library.add, (tuned,)) if work == "add" else (library.get, ("first", tmp_path / "out"))
    with pytest.raises(KeyboardInterrupt):
        call(*what, progress=interrupted)
    assert len(seen) > 1
    assert [entry.name for entry in library.ls().artifacts] == ["first"]
    assert {path.name for path in tmp_path.iterdir()} <= {"base", "library", "tuned"}
    assert not [*(Path(library.address) / "scratch").iterdir()]
    assert library.gc(wait=0).leftovers == 0
    assert library.verify() == []


def test_a_source_that_changes_is_refused(library, base, monkeypatch):
    from ingot.library import add

    def changing(*args, **kwargs):
        (base / "config.json").write_text("{}")
        return smallest(*args, **kwargs)

    smallest = add.smallest
    monkeypatch.setattr(add, "smallest", changing)
    assert rule(library.add, base) == "store.changed"
    assert library.ls().artifacts == []


def test_the_command_line_tells_figures(library, base, tmp_path, capsys):
    place = str(library.address)
    assert run(["store", "add", place, str(base), "--name", "b", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["size"] == sum(len(data) for data in contents(base).values())
    assert run(["store", "ls", place, "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [entry["name"] for entry in listed["artifacts"]] == ["b"]
    assert run(["store", "get", place, "b", str(tmp_path / "out")]) == 0
    capsys.readouterr()
    manifest = Path(place) / "artifacts" / "b.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"b"', b'"c"'))
    assert run(["store", "verify", place, "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["ok"], [item["rule"] for item in told["findings"]]) == (False, ["library.manifest-digest"])
    assert run(["store", "rm", place, "b"]) == 0
    assert run(["store", "gc", place, "--dry-run"]) == 0
    assert run(["store", "verify", place]) == 0
    assert run(["store", "get", place, "b", str(tmp_path / "out")]) == 2


@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_bytes_come_back(tmp_path_factory, data):
    """Files that are no checkpoint, or one with gaps, padding and damage in any place."""
    around = tmp_path_factory.mktemp("any")
    source = around / "source"
    source.mkdir()
    for index in range(data.draw(st.integers(1, 3))):
        values = np.random.default_rng(index).bytes(data.draw(st.sampled_from([0, 1, 1025, 40_000])))
        header = json.dumps(
            {"a": {"dtype": "BF16", "shape": [len(values) // 2], "data_offsets": [0, len(values) // 2 * 2]}}
        )
        raw = bytearray(struct.pack("<Q", len(header)) + header.encode() + values + bytes(data.draw(st.integers(0, 3))))
        if data.draw(st.booleans()):
            raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
        (source / f"{index}.safetensors").write_bytes(raw[: data.draw(st.integers(0, len(raw)))])
    library = ingot.Library(around / "library")
    library.add(source)
    library.get("source", around / "out")
    assert contents(around / "out") == contents(source)
