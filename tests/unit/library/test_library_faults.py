"""Libraries that are damaged or hostile, killed processes, several at once, and buckets."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import ingot
from ingot.errors import IngotError
from ingot.library import manifest, tree
from ingot.library.encode import as_delta, smallest
from ingot.library.objects import Objects, StorageForm, id_of
from ingot.stores.local import LocalTarget
from ingot.stores.location import Location
from ingot.stores.remote import client, shared
from ingot.stores.shared import SCRATCH
from tests.support.libraries import contents, folder, moved, weights
from tests.support.web import Fault, WebServer


def rule(call, *args, **kwargs):
    with pytest.raises(IngotError) as caught:
        call(*args, **kwargs)
    return caught.value.rule


def rules(library: ingot.Library) -> set[str]:
    return {item.rule for item in library.verify() if item.level == "error"}


def rewritten(library: ingot.Library, name: str, change) -> None:
    """Change a manifest so that its digest fits again."""
    path = Path(library.address) / "artifacts" / f"{name}.json"
    fields = json.loads(path.read_text())
    del fields["digest"]
    change(fields)
    path.write_text(json.dumps({**fields, "digest": manifest._digest(fields)}))


def first_object(fields):
    return next(piece for file in fields["files"] for piece in file["pieces"] if "object" in piece)


CHANGES = {
    "up": lambda fields: fields["files"][0].update(name="../evil"),
    "root": lambda fields: fields["files"][0].update(name="/tmp/evil"),
    "twice": lambda fields: fields["files"].append(fields["files"][0]),
    "inside": lambda fields: fields["files"][0].update(name="sub"),
    "size": lambda fields: fields["files"][0].update(size=1 << 60),
    "negative": lambda fields: first_object(fields).update(size=-1),
    "id": lambda fields: first_object(fields).update(object="../../library"),
    "digest": lambda fields: fields["files"][0].update(digest="blake3:0"),
    "piece": lambda fields: fields["files"][0].update(pieces=[7]),
    "shape": lambda fields: first_object(fields).update(tensor="a", part="data", dtype="u8", shape=[-1]),
    "single": lambda fields: fields.update(folder=False),
    "name": lambda fields: fields.update(name="other"),
    "files": lambda fields: fields.update(files={}),
    "format": lambda fields: fields.update(format="ingot-library-9"),
}


def test_hostile_manifests_are_refused(library, base, tmp_path):
    library.add(base)
    path = Path(library.address) / "artifacts" / "base.json"
    right = path.read_bytes()
    for name, change in CHANGES.items():
        rewritten(library, "base", change)
        assert rule(library.get, "base", tmp_path / "out") == "library.manifest", name
        path.write_bytes(right)
    assert rules(library) == set()
    path.write_bytes(right.replace(b'"base"', b'"bese"'))
    assert rule(library.get, "base", tmp_path / "out") == "library.manifest-digest"
    assert rule(library.gc) == "library.manifest-digest"  # nothing is removed on the word of a damaged manifest
    assert library.ls().artifacts[0].problem == rules(library).pop() == "library.manifest-digest"
    library.add(base, overwrite=True)
    assert library.verify() == []


def test_links_in_circles_are_refused(library, base, tmp_path, monkeypatch):
    """Two of them are 2 ** depth folders for who follows them, and so are links that lead to the next folder's."""
    library.add(base)
    artifacts, here = Path(library.address) / "artifacts", tmp_path / "model"
    (here / "sub").mkdir(parents=True)
    (here / "sub" / "a").write_bytes(b"1")
    for name in ("x", "y"):
        (artifacts / name).symlink_to(".")
        (here / "sub" / name).symlink_to("../sub")
    held = contents(Path(library.address) / "objects")
    for call in (
        library.ls,
        library.gc,
        lambda: library.add(base, "again"),
        lambda: library.get("none", tmp_path / "o"),
    ):
        assert rule(call) == "library.folders"
    assert contents(Path(library.address) / "objects") == held
    for name in ("x", "y"):
        (artifacts / name).unlink()
    assert rule(library.add, here) == "library.folders"
    monkeypatch.setattr(tree, "_MAX_FOLDERS", 100)
    levels = [tmp_path / "deep" / str(level) for level in range(9)]
    for level, after in zip(levels, [*levels[1:], here], strict=True):
        level.mkdir(parents=True)
        for name in ("x", "y"):
            (level / name).symlink_to(f"../{after.name}" if after != here else "nowhere")
    assert rule(library.add, tmp_path / "deep") == "library.folders"


def test_links_inside_and_deep_folders_are_added(library, tmp_path):
    deep = tmp_path / "model" / "/".join("abcdefghijklmnopqrst")
    deep.mkdir(parents=True)
    (deep / "file").write_bytes(b"1")
    (tmp_path / "model" / "latest").symlink_to("a/b")
    library.add(tmp_path / "model")
    library.get("model", tmp_path / "out")
    names = ("a/b/c/d", "latest/c/d")
    rest = "/".join("efghijklmnopqrst")
    assert contents(tmp_path / "out") == {f"{name}/{rest}/file": b"1" for name in names}


def test_a_manifest_that_asks_for_too_much_writes_nothing(library, base, tmp_path):
    library.add(base)

    def huge(fields):
        fields["files"][0].update(size=1 << 52, pieces=[{"zeros": 1 << 52}])

    rewritten(library, "base", huge)
    assert rule(library.get, "base", tmp_path / "out") == "disk.guard"
    rewritten(library, "base", lambda fields: fields["files"][0].update(size=9, pieces=[{"bytes": "YWJjZGVmZ2hp"}]))
    assert rule(library.get, "base", tmp_path / "out") == "library.digest"  # of the file, which is another
    assert not (tmp_path / "out").exists()


def test_damaged_and_missing_objects_are_named_and_put_right(library, base, tmp_path):
    library.add(base)
    tuned = folder(tmp_path / "tuned", moved(weights(), 1))
    library.add(tuned)
    place = Path(library.address) / "objects"
    whole = max((path for path in place.iterdir() if "-" not in path.name), key=lambda path: path.stat().st_size)
    right = whole.read_bytes()
    spoilt = bytearray(right)
    spoilt[len(right) // 2] ^= 1
    for data in (bytes(spoilt), right[:100], b""):
        whole.write_bytes(data)
        found = [item for item in library.verify() if item.level == "error"]
        assert {"library.damaged"} < {item.rule for item in found}
        assert {item.where.partition(":")[0] for item in found if item.rule == "library.damaged"} == {"base", "tuned"}
        with pytest.raises(IngotError):
            library.get("tuned", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    library.add(base)  # the same again puts right what is wrong
    assert library.verify() == []
    whole.unlink()
    assert rules(library) == {"library.missing"}
    assert rule(library.gc) == rule(library.get, "tuned", tmp_path / "out") == "library.missing"
    assert {entry.problem for entry in library.ls().artifacts} == {"library.missing"}
    library.add(tuned)
    library.add(base)
    assert library.verify() == []
    library.get("tuned", tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tuned)


def written(library: ingot.Library, form: StorageForm, data: np.ndarray, base: np.ndarray | None = None) -> None:
    encoded = smallest(data.data, "u8", None) if base is None else as_delta(data.data, "u8", base.data)
    encoded.write(LocalTarget(library.address), form, data.shape)


def test_hostile_objects_are_refused(library, base, tmp_path):
    library.add(base)
    rng = np.random.default_rng(0)
    a, b = (rng.integers(0, 9, 5000, np.uint8) for _ in range(2))
    ids = id_of(a.data), id_of(b.data)
    written(library, StorageForm(ids[0], ids[1]), a, b)
    written(library, StorageForm(ids[1], ids[0]), b, a)
    objects = Objects(Location.parse(library.address).share())
    assert rule(objects.values, ids[0]) == rule(objects.chain, ids[1]) == "library.chain"
    written(library, StorageForm(ids[1]), b)  # whole after all: then the circle is none
    objects.refresh()
    assert bytes(objects.values(ids[0])) == a.tobytes()
    assert rule(objects.values, ids[0], 4999) == "library.object"
    written(library, StorageForm(ids[1]), b[:4000])  # bytes that the name is not of
    assert rule(objects.values, ids[1]) == "library.digest"
    assert rule(objects.values, ids[0]) == "library.object"  # a delta to more bytes than these
    place = Path(library.address) / "objects"
    (place / f"{ids[1]}.zt").unlink()
    ingot.save(place / f"{ids[1]}.zt", {ids[1]: a, "more": b})
    ingot.save(place / "stray.zt", {"x": a})
    assert rule(objects.values, ids[1]) == "library.object"
    assert "library.object" in rules(library)
    assert {item.rule for item in library.verify()} >= {"library.stray"}
    library.gc()  # no artifact needs any of them
    assert library.verify()[0].rule == "library.stray"
    library.get("base", tmp_path / "out")


PRELUDE = """
import os, signal, sys, time
from pathlib import Path
import ingot
from tests.support.libraries import contents, folder, moved, weights
around = Path(sys.argv[1])
library = ingot.Library(around / "library")

def forked(work):
    child = os.fork()
    if child:
        return child
    try:
        work()
    except BaseException as error:
        print(repr(error), file=sys.stderr)
        os._exit(1)
    os._exit(0)

def get(name):
    library.get(name, around / "out", overwrite=(around / "out").exists())
    assert contents(around / "out") == contents(around / name), name
"""

KILLED = """
from ingot.stores import shared

def dying(name, count):
    left, call = [count], getattr(Path, name)
    def counted(self, *args, **kwargs):
        result = call(self, *args, **kwargs)
        if "library" in str(self):
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
        return result
    setattr(Path, name, counted)

def killed(work, name, count):
    def run():
        dying(name, count)
        work()
    return os.WTERMSIG(os.waitpid(forked(run), 0)[1]) == signal.SIGKILL

folder(around / "base", weights())
folder(around / "tuned", moved(weights(), 1))
library.add(around / "base")
adds = [killed(lambda: library.add(around / "tuned"), "replace", count) for count in (1, 2, 1, 2)]
assert adds == [True, True, True, False], adds
get("base")
get("tuned")
assert not [item for item in library.verify() if item.level == "error"]
library.rm("tuned")
assert killed(library.gc, "unlink", 2)
assert killed(lambda: library.add(around / "tuned"), "mkdir", 1)
get("base")
assert library.verify() == []
library.gc()
assert not list((around / "library" / "scratch").iterdir())
library.add(around / "tuned")
get("tuned")
"""

TOGETHER = """
made = {f"{index}": folder(around / f"{index}", moved(weights(index % 2), index, 0.1)) for index in range(4)}

def adding(names):
    library.add(made[names[0]])
    library.rm(names[0])
    for name in names:
        library.add(made[name])

def collecting():
    for _ in range(12):
        try:
            library.gc(wait=0)
        except ingot.IngotError as error:
            assert error.rule in ("library.busy", "library.none", "store.missing"), error
        time.sleep(0.01)

children = [forked(lambda: adding(["0", "1"])), forked(lambda: adding(["2", "3"])), forked(collecting)]
assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
for name in made:
    get(name)
assert library.verify() == []
"""


@pytest.mark.parametrize("script", [KILLED, TOGETHER], ids=["killed", "together"])
def test_processes_that_are_killed_or_work_together(tmp_path, script):
    subprocess.run([sys.executable, "-c", PRELUDE + script, str(tmp_path)], check=True)


def test_nobody_removes_while_somebody_uses(library, base):
    library.add(base)
    folder_of = Location.parse(library.address).share()
    with folder_of.shared_lock():
        with folder_of.shared_lock(0):
            pass
        assert rule(library.gc, wait=0) == "library.busy"
    with folder_of.exclusive_lock(0):
        assert rule(folder_of.shared_lock(0).__enter__) == "library.busy"
        (Path(library.address) / SCRATCH / "x.ingot-partial").mkdir()
    assert library.gc().leftovers == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="NOT TESTED: root may write everywhere")
def test_a_library_that_can_only_be_read_is_read(library, base, tmp_path):
    library.add(base)
    place = Path(library.address)
    for path in (place, place / "artifacts", place / "objects"):
        path.chmod(0o555)
    try:
        library.get("base", tmp_path / "out")
        assert rule(library.gc) == "store.read-only"
    finally:
        for path in (place, place / "artifacts", place / "objects"):
            path.chmod(0o755)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[WebServer]:
    pytest.importorskip("obstore")
    for name, value in {"ACCESS_KEY_ID": "KEYOFTEST", "SECRET_ACCESS_KEY": "SECRETOFTEST", "REGION": "x"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setattr(client, "_PAUSE", 0.001)
    monkeypatch.setattr(client, "RETRIES", 1)
    monkeypatch.setattr(shared, "_POLL", 0.01)
    monkeypatch.setenv("INGOT_CACHE", str(tmp_path / "cache"))
    with WebServer(bucket="bucket") as running:
        monkeypatch.setenv("AWS_ENDPOINT_URL", running.url)
        yield running


def test_a_library_in_a_bucket(server, base, tmp_path):
    library = ingot.Library("s3://bucket/lib")
    library.add(base)
    tuned = folder(tmp_path / "tuned", moved(weights(), 1))
    assert library.add(tuned).deltas == 2
    library.get("tuned", tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tuned)
    with ingot.open(library.url_of("tuned")) as checkpoint:
        assert len(checkpoint) == 3
    library.get("tuned", "s3://bucket/again")
    assert server.files["again/model.safetensors"] == (tuned / "model.safetensors").read_bytes()
    assert [entry.name for entry in library.ls().artifacts] == ["base", "tuned"]
    library.rm("base")
    before = set(server.files)
    assert library.gc().objects == len(before - set(server.files)) == 1
    assert library.verify() == []
    library.add(base, overwrite=True)  # of a store that read the older manifest
    library.rm("tuned")
    library.gc()
    assert library.verify() == []
    assert not [name for name in server.files if "leases" in name]
    assert not [*(tmp_path / "cache" / "uploads").iterdir()]


def test_what_killed_additions_to_a_bucket_left_here_is_collected(server, base, tmp_path):
    library = ingot.Library("s3://bucket/lib")
    library.add(base)
    uploads, other = tmp_path / "cache" / "uploads", "artifact-of-another-run"
    (uploads / other).mkdir()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover - killed
        with Location.parse(library.address).share().stage() as adding:  # which makes no request
            adding.files.create("objects/x").write_at(0, b"123")
            os.write(writing, b"1")
            time.sleep(60)
        os._exit(0)
    os.read(reading, 1)
    assert library.gc().leftovers == 0  # it is at work
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert library.gc(dry_run=True).leftovers == 1
    assert len([*uploads.iterdir()]) == 2
    assert library.gc().leftovers == 1
    assert [path.name for path in uploads.iterdir()] == [other]
    for end in (reading, writing):
        os.close(end)


def test_leases_keep_a_bucket_from_being_collected(server, base, monkeypatch):
    library = ingot.Library("s3://bucket/lib")
    library.add(base)
    lease = "lib/leases/0123456789abcdef.use"
    server.files[lease] = b"1"
    assert rule(library.gc, wait=0) == "library.busy"
    server.old.add(lease)  # of a process that is dead
    library.gc(wait=0)
    assert lease not in server.files
    server.files["lib/leases/0123456789abcdef.alone"] = b"1"
    folder_of = Location.parse(library.address).share()
    assert rule(folder_of.shared_lock(0).__enter__) == rule(folder_of.exclusive_lock(0).__enter__) == "library.busy"
    assert [name for name in server.files if "leases" in name] == ["lib/leases/0123456789abcdef.alone"]


def test_who_was_taken_for_dead_lists_nothing_that_is_not_there(server, base, monkeypatch):
    """The lease is gone by the time at which the manifest is written: what it needs is looked for once more."""
    library = ingot.Library("s3://bucket/lib")

    def cut_off(request):
        if request.method == "PUT" and request.key.endswith("artifacts/base.json"):
            for name in [name for name in server.files if "leases" in name or (gone and "objects" in name)]:
                del server.files[name]

    for gone in (False, True):
        server.fault = cut_off
        if gone:
            assert rule(library.add, base, overwrite=True) == "library.lost"
            assert library.ls().artifacts == []
        else:
            library.add(base)


def test_who_may_only_read_a_bucket_reads_it(server, base, tmp_path):
    library = ingot.Library("s3://bucket/lib")
    library.add(base)
    server.fault = lambda request: Fault(403, body=b"<Code>AccessDenied</Code>") if request.method == "PUT" else None
    library.get("base", tmp_path / "out")
    assert contents(tmp_path / "out") == contents(base)
    assert rule(library.gc) == "store.denied"


def test_who_was_taken_for_dead_removes_nothing(server, base):
    """The lease becomes too old while manifests are read; others may have begun to need what nobody needed then."""
    library = ingot.Library("s3://bucket/lib")
    library.add(base)
    library.add(base / "model.safetensors", "part")
    library.rm("base")

    def cut_off(request):
        if request.method == "GET" and request.key.endswith("artifacts/part.json"):
            server.old.update(name for name in server.files if "leases" in name)
        elif request.method == "PUT":
            server.old.difference_update([name for name in server.old if request.key.endswith(name)])

    before = {name for name in server.files if "objects" in name}
    server.fault = cut_off
    assert rule(library.gc) == "library.lost"
    assert {name for name in server.files if "objects" in name} == before
    server.fault = None
    assert library.gc().objects == 1
