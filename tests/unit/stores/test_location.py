"""Locations: how text, paths and addresses are parsed, and what a location opens and writes."""

from __future__ import annotations

import os
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest

from ingot.errors import FormatError, UnsupportedError, UsageError
from ingot.model.store import Listing, OverwritePolicy
from ingot.stores.local import LocalStore
from ingot.stores.location import Location
from ingot.stores.memory import MemoryStore, shared_files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    inside = tmp_path / "ein ordner#1"
    inside.mkdir()
    (inside / "a?b").write_bytes(b"x")
    return inside


@pytest.mark.parametrize(
    ("text", "scheme", "normalized", "display", "parent", "child"),
    [
        ("a/b.zt", "file", "a/b.zt", "a/b.zt", "a", "a/b.zt/c d"),
        ("./a//b/", "file", "a/b", "a/b", "a", "a/b/c d"),
        ("/a/b", "file", "/a/b", "/a/b", "/a", "/a/b/c d"),
        ("x.zt", "file", "x.zt", "x.zt", ".", "x.zt/c d"),
        ("~/models", "file", "~/models", "~/models", "~", "~/models/c d"),
        ("C:/models", "file", "C:/models", "C:/models", "C:", "C:/models/c d"),
        ("C:\\models\\x", "file", "C:\\models\\x", "C:\\models\\x", ".", "C:\\models\\x/c d"),
        ("s3:x", "file", "s3:x", "s3:x", ".", "s3:x/c d"),
        ("nobody:x", "file", "nobody:x", "nobody:x", ".", "nobody:x/c d"),
        ("file:///a%20b/c", "file", "file:///a%20b/c", "/a b/c", "/a b", "/a b/c/c d"),
        ("FILE:///a", "file", "FILE:///a", "/a", "/", "/a/c d"),
        ("memory:n/a", "memory", "memory:n/a", "memory:n/a", "memory:n", "memory:n/a/c%20d"),
        ("memory:n", "memory", "memory:n", "memory:n", "memory:n", "memory:n/c%20d"),
        ("s3://b/k/", "s3", "s3://b/k/", "s3://b/k/", "s3://b", "s3://b/k/c%20d"),
        ("gs://b/k", "gs", "gs://b/k", "gs://b/k", "gs://b", "gs://b/k/c%20d"),
        ("az://b/k", "az", "az://b/k", "az://b/k", "az://b", "az://b/k/c%20d"),
        ("hf://o/n@v1", "hf", "hf://o/n@v1", "hf://o/n@v1", "hf://o", "hf://o/n@v1/c%20d"),
        ("http://h/a", "http", "http://h/a", "http://h/a", "http://h", "http://h/a/c%20d"),
        ("ftp://h/a", "", "ftp://h/a", "ftp://h/a", "ftp://h", "ftp://h/a/c%20d"),
    ],
)
def test_text_is_a_path_or_an_address(
    text: str, scheme: str, normalized: str, display: str, parent: str, child: str
) -> None:
    location = Location.parse(text)
    assert (location.scheme, location.text, location.display) == (scheme, normalized, display)
    assert (location.parent.display, location.child("c d").display) == (parent, child)
    assert (str(location), repr(location)) == (display, f"Location({display!r})")
    assert Location.parse(location) is location
    assert Location.parse(location.text).display == display
    assert pickle.loads(pickle.dumps(location)) == location


def test_the_display_of_an_address_has_no_secrets_and_requests_keep_them() -> None:
    location = Location.parse("https://user:SECRET1@host.example/folder/a.zt?sig=SECRET2")
    texts = [str(item) for item in (location, location.parent, location.child("b"))] + [repr(location), location.name]
    assert not any("SECRET" in text for text in texts)
    assert location.name == "a.zt"
    assert location.child("b").text == "https://user:SECRET1@host.example/folder/a.zt/b?sig=SECRET2"
    assert "SECRET" not in str(Location.parse("ftp://user:SECRET@host/x?sig=SECRET"))
    with pytest.raises(UsageError) as caught:
        Location.parse("ftp://user:SECRET@host/x?sig=SECRET").find()
    assert caught.value.rule == "store.scheme"
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("org/name", True),
        ("org/name.v1-x", True),
        ("org/name/", False),
        ("./org/name", False),
        ("org/name/file", False),
        ("name", False),
        ("~/name", False),
        ("hf://org/name", False),
        (Path("org/name"), False),
    ],
)
def test_only_text_of_two_names_may_be_the_id_of_a_hub_model(path: Any, expected: bool) -> None:
    assert Location.parse(path).may_be_hub_id is expected


@pytest.mark.parametrize("text", ["out/", "out\\", "s3://b/out/"])
def test_a_slash_at_the_end_marks_a_folder(text: str) -> None:
    assert Location.parse(text).ends_in_slash
    assert not Location.parse(text[:-1]).ends_in_slash


def test_a_folder_is_found_by_its_path_and_by_its_address(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    address = Location.parse(folder).url
    stores = [Location.parse(path).store() for path in (folder, str(folder), folder.name, address)]
    for store in stores:
        assert isinstance(store, LocalStore)
        assert (store.list(), store.url) == (Listing(("a?b",)), address)
    assert "#" not in address


@pytest.mark.parametrize("way", ["path", "text", "address", "localhost"])
def test_a_file_is_found_in_its_folder_and_a_folder_as_a_store(folder: Path, way: str) -> None:
    address = Location.parse(folder).child("a?b").url
    texts: dict[str, Any] = {"path": folder / "a?b", "text": str(folder / "a?b"), "address": address}
    texts["localhost"] = address.replace("file://", "FILE://localhost")
    store, name = Location.parse(texts[way]).find()
    assert (name, store.local_path(name)) == ("a?b", folder / "a?b")
    assert Location.parse(texts[way]).name == "a?b"
    whole, name = Location.parse(folder).find()
    assert (name, whole.local_path()) == ("", folder)


def test_memory_is_found_by_its_name_within_the_process() -> None:
    files = shared_files("test_location")
    files.update({"m/w": bytearray(b"abc"), "top": bytearray(b"d")})
    store, name = Location.parse("memory:test_location/m/w").find()
    assert (name, store.head(name, 9), store.local_path(name)) == ("w", b"abc", None)
    folder, name = Location.parse("memory://test_location/m/").find()
    assert (name, folder.list()) == ("", Listing(("w",)))
    again = Location.in_store(folder).store()
    assert isinstance(again, MemoryStore)
    files["m/x"] = bytearray()
    assert again.list() == Listing(("w", "x"))
    assert Location.parse("memory:test_location").store().list() == Listing(("top",), ("m",))


@pytest.mark.parametrize(
    ("address", "rule"),
    [
        ("ftp://bucket/a", "store.scheme"),
        ("HTTPS://example.org/a#b", "store.url"),
        ("file:a", "store.url"),
        ("file://elsewhere/a", "store.url"),
        ("file:///a?b", "store.url"),
        ("memory:", "store.url"),
        ("memory:a/../b", "store.url"),
        ("memory:nobody/a", "store.missing"),
        ("file:///nobody/nothing", "store.missing"),
        ("nobody:nothing", "store.missing"),
    ],
)
def test_an_address_that_leads_nowhere_is_refused(address: str, rule: str) -> None:
    location = Location.parse(address)
    for attempt in (location.find, location.find_model, location.find_file, location.store):
        if attempt == location.store and address.startswith("memory:nobody"):
            continue  # a folder in memory exists as soon as it is named
        with pytest.raises(UsageError) as caught:
            attempt()
        assert caught.value.rule == rule


@pytest.mark.parametrize("path", ["a\0b", 7, None, b"bytes", "half of a pair \ud800"])
def test_only_text_and_paths_are_parsed(path: Any) -> None:
    with pytest.raises(UsageError) as caught:
        Location.parse(path)
    assert caught.value.rule == "store.path"


def test_a_path_object_is_a_path_even_if_it_looks_like_an_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file:x").write_bytes(b"1")
    (tmp_path / "memory:x").mkdir()
    assert Location.parse(Path("file:x")).find()[1] == "file:x"
    folder = Location.parse(Path("memory:x"))
    assert folder.store().local_path() is not None
    assert Location.parse(folder.text).store().local_path() is not None
    folder.child("y").write(b"2")
    assert (tmp_path / "memory:x" / "y").read_bytes() == b"2"


def test_the_error_for_an_unknown_scheme_names_the_schemes() -> None:
    with pytest.raises(UsageError) as caught:
        Location.parse("ftp://bucket").store()
    assert "file:" in str(caught.value)
    assert "memory:" in str(caught.value)


def test_a_file_of_a_store_has_a_location(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    store = Location.parse(folder.name).store()
    location = Location.in_store(store, "a?b")
    assert (location.display, location.read()) == (f"{folder.name}/a?b", b"x")
    memory = MemoryStore({"m/a b": bytearray(b"y")}, "bytes of the caller", folder="m")
    with pytest.raises(UnsupportedError) as caught:
        Location.in_store(memory, "a b")
    assert caught.value.rule == "store.not-local"
    shared_files("test_location_in_store")["m/a b"] = bytearray(b"z")
    there = Location.parse("memory:test_location_in_store/m").store()
    assert Location.in_store(there, "a b").read() == b"z"


def test_siblings_are_listed_on_this_machine_alone(folder: Path) -> None:
    assert Location.parse(folder / "missing").siblings() == ["a?b"]
    assert Location.parse(folder.as_uri() + "/missing").siblings() == ["a?b"]
    assert Location.parse(folder / "missing" / "deeper").siblings() is None
    assert Location.parse("http://127.0.0.1:9/folder/file").siblings() is None


def test_the_start_of_a_file_or_of_a_pipe_is_read(tmp_path: Path) -> None:
    file, pipe = tmp_path / "file", tmp_path / "pipe"
    file.write_bytes(b"abc")
    os.mkfifo(pipe)
    assert (Location.parse(file).head(2), Location.parse(file).head(9)) == (b"ab", b"abc")
    writer = threading.Thread(target=pipe.write_bytes, args=(b"from a command",))
    writer.start()
    assert Location.parse(pipe).head(100) == b"from a command"
    writer.join()
    with pytest.raises(FormatError) as caught:
        Location.parse(tmp_path).head(9)
    assert caught.value.rule == "store.not-a-file"


def test_a_small_file_is_written_to_every_writable_store(tmp_path: Path) -> None:
    folder = Location.parse(tmp_path)
    texts = [tmp_path / "a", str(tmp_path / "b"), f"{folder.url}/c", "memory:test_small_files/d"]
    for text in texts:
        location = Location.parse(text)
        location.require_writable()
        location.write(b"old", overwrite=False)
        location.write(b"new")
        with pytest.raises(UsageError) as caught:
            location.write(b"newer", overwrite=False)
        assert (caught.value.rule, location.read()) == ("target.exists", b"new")
    assert folder.store().list() == Listing(("a", "b", "c"))


def test_an_address_that_is_only_read_refuses_every_way_to_write() -> None:
    location = Location.parse("https://name:secret@host/file")
    attempts = (
        location.require_writable,
        location.make_folder,
        location.share,
        lambda: location.url,
        lambda: location.write(b""),
        lambda: location.stage(OverwritePolicy()),
    )
    for attempt in attempts:
        with pytest.raises(UsageError) as caught:
            attempt()
        assert caught.value.rule == "store.not-writable"
        assert "secret" not in str(caught.value)
