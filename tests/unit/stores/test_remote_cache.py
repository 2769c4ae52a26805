"""The cache of ranges: what it answers, what it does not, how large it grows, who may use it at once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import ingot
from ingot.cli.main import run
from ingot.errors import IngotError
from ingot.stores.location import Location
from ingot.stores.remote import transfer
from ingot.stores.remote.cache import FOLDER, SIZE, RangeCache, range_cache
from tests.support.web import MODIFIED, Fault, Request, WebServer

DATA = np.random.default_rng(0).bytes(1 << 20)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER, str(tmp_path / "cache"))
    monkeypatch.setenv(SIZE, "1MiB")
    return tmp_path / "cache"


@pytest.fixture
def server() -> Iterator[WebServer]:
    with WebServer({"a": DATA, "mirror/a": DATA}) as running:
        yield running


def blobs(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in (folder / "blobs").glob("*/*")}


def read(server: WebServer, name: str, start: int = 100_000, length: int = 200_000) -> int:
    """Read from afar; return how many bytes came."""
    folder, _, last = name.rpartition("/")
    file = Location.parse(f"{server.url}/{folder}").store().open(last)
    server.sent = 0
    assert bytes(file.view(start, length)) == server.files[name][start : start + length]
    return server.sent


def test_what_was_read_is_not_asked_for_again(server: WebServer, cache: Path) -> None:
    assert read(server, "a") == 200_000
    assert read(server, "a") == 0
    assert read(server, "mirror/a") == 200_000  # another address
    assert len(blobs(cache)) == 1  # of the same bytes
    server.files["a"] = DATA[::-1]
    assert read(server, "a") == 200_000  # another version
    for path in (cache / "blobs").glob("*/*"):
        path.write_bytes(bytes(200_000))
    assert read(server, "a") == 200_000  # damaged
    assert read(server, "a") == 0
    server.etags = False
    assert read(server, "a") == 200_000  # a version without a name
    assert read(server, "a") == 200_000


def test_a_weak_tag_proves_nothing_and_is_not_cached(server: WebServer, cache: Path) -> None:
    """RFC 9110, 8.8.1: two answers with one weak tag may have different bytes, also at one time."""
    server.fault = lambda request: Fault(etag='W/"1"')
    assert read(server, "a") == 200_000
    server.files["a"] = DATA[::-1]
    assert read(server, "a") == 200_000
    assert not cache.exists()
    assert not any("if-match" in request.headers or "if-range" in request.headers for request in server.log)


@pytest.mark.parametrize(
    ("first", "later"),
    [
        (Fault(etag='W/"1"'), Fault(etag='W/"2"')),
        (Fault(etag='W/"1"'), Fault(etag='W/"1"', modified=MODIFIED + 1)),
        (Fault(etag='"1"'), Fault(etag='W/"1"')),
        (Fault(etag='W/"1"'), Fault(etag='"1"')),
        (Fault(etag='"1"'), Fault(etag="")),
        (Fault(etag=""), Fault(etag="", modified=MODIFIED + 1)),
    ],
)
def test_ranges_of_versions_that_may_differ_are_not_mixed(server: WebServer, first: Fault, later: Fault) -> None:
    faults = [first, later]
    server.fault = lambda request: faults[len(server.gets("a")) > 1] if request.key == "a" else None
    file = Location.parse(server.url).store().open("a")
    with pytest.raises(IngotError) as caught:
        file.view(100_000, 200_000)
    assert caught.value.rule == "store.changed"


def test_the_time_and_size_are_part_of_what_is_cached(server: WebServer, cache: Path) -> None:
    """Servers exist whose strong tags are not changed with the file."""
    for modified, data in ((MODIFIED, DATA), (MODIFIED + 5, DATA[::-1]), (MODIFIED + 5, DATA[::-1] + b"x")):
        server.files["a"] = data
        server.fault = lambda request, modified=modified: Fault(etag='"same"', modified=modified)
        assert read(server, "a") == 200_000
        assert read(server, "a") == 0


@pytest.mark.parametrize("umask", [0, 0o022, 0o277])
def test_what_is_cached_is_for_this_user_alone(server: WebServer, cache: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        assert read(server, "a") == 200_000
        assert read(server, "a", 0, 700_000) > 0  # makes the cache look for what to remove
    finally:
        os.umask(before)
    assert read(server, "a") == 0
    modes = {path.is_dir(): path.stat().st_mode & 0o777 for path in (cache, *cache.rglob("*"))}
    assert modes == {True: 0o700, False: 0o600}


def test_a_cache_that_others_may_write_is_repaired_or_refused(
    server: WebServer, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ingot.stores.remote.cache._CACHES", {})
    assert read(server, "a") == 200_000
    for path in (cache, *cache.rglob("*")):
        path.chmod(0o777 if path.is_dir() else 0o666)
    (cache / "ranges" / "link").symlink_to("/etc")
    monkeypatch.setattr("ingot.stores.remote.cache._CACHES", {})
    assert read(server, "a") == 0
    assert not [path for path in (cache, *cache.rglob("*")) if path.stat().st_mode & 0o077]
    assert not [path for path in cache.rglob("*") if path.is_symlink()]
    monkeypatch.setattr("ingot.stores.remote.cache._CACHES", {})
    monkeypatch.setattr("ingot.stores.remote.cache.user_id", lambda: os.geteuid() + 1)
    with pytest.raises(IngotError) as caught:
        read(server, "a")
    assert caught.value.rule == "remote.cache-folder"


def test_off_and_wrong_sizes(server: WebServer, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, "off")
    assert read(server, "a") == read(server, "a") == 200_000
    assert not cache.exists()
    monkeypatch.setenv(FOLDER, str(cache))
    for size in ("x", "-1", "0"):
        monkeypatch.setenv(SIZE, size)
        with pytest.raises(IngotError) as caught:
            range_cache()
        assert caught.value.rule == "remote.cache-size"
    monkeypatch.setenv(SIZE, "1MiB")
    cache.write_bytes(b"no folder")
    assert read(server, "a") == 200_000


def test_the_least_used_goes_first_and_the_size_holds(tmp_path: Path) -> None:
    cache, names = RangeCache(tmp_path, 100_000), [f"{index:064x}" for index in range(40)]
    for index, name in enumerate(names):
        cache.put(name, memoryview(bytes([index]) * 10_000))
        (made,) = (path for path in (tmp_path / "blobs").glob("*/*") if path.read_bytes()[0] == index)
        os.utime(made, (index, index))
        if index >= 1:
            out = memoryview(bytearray(10_000))
            assert cache.get(names[1], out)  # is read again and again, and stays
    assert sum(blobs(tmp_path).values()) <= 110_000
    assert not cache.get(names[2], memoryview(bytearray(10_000)))
    assert len([*(tmp_path / "ranges").glob("*/*")]) <= len(blobs(tmp_path)) + 1


def test_many_readers_share_one(server: WebServer, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "MAX_REQUEST", 1 << 15)
    with ThreadPoolExecutor(6) as pool:
        assert all(count >= 0 for count in pool.map(lambda _: read(server, "a", 0, 900_000), range(12)))
    assert sum(blobs(cache).values()) <= (1 << 20) * 17 // 16
    assert read(server, "a", 0, 900_000) == 0
    assert not [path for path in cache.rglob(".*") if path.is_file()]


def test_the_command_line_chooses_it(
    server: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.numpy import save

    monkeypatch.setenv(FOLDER, "off")
    monkeypatch.setenv(SIZE, "")
    server.files["m.safetensors"] = save({"w": np.ones((300, 300), np.float32)})
    url = f"{server.url}/m.safetensors"
    before = ["--cache", str(tmp_path / "there"), "--cache-size", "1MiB"]
    assert run([*before, "inspect", url, "--content-id"]) == 0
    assert blobs(tmp_path / "there")
    server.sent = 0
    assert run([*before, "inspect", url, "--content-id"]) == 0
    assert server.sent <= 3 << 16  # what comes with opening a file, and proves its version


def test_what_the_way_damaged_does_not_stay_in_the_cache(server: WebServer, tmp_path: Path, cache: Path) -> None:
    weights = {"w": np.random.default_rng(1).standard_normal((300, 256)).astype(np.float32)}
    ingot.save(tmp_path / "m.zt", weights)
    server.files["m.zt"] = (tmp_path / "m.zt").read_bytes()
    place = len(server.files["m.zt"]) // 2
    seen: list[Request] = []

    def once(request: Request) -> Fault | None:
        if request.range and request.range[0] <= place <= (request.range[1] or 0) and not seen:
            seen.append(request)
            return Fault(flip=place)
        return None

    server.fault = once
    for _ in range(2):
        with ingot.open(f"{server.url}/m.zt") as checkpoint:
            server.sent = 0
            assert np.array_equal(checkpoint["w"].numpy(), weights["w"])
    assert seen
    assert not server.sent
