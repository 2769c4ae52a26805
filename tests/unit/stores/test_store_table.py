"""Addresses of stores: paths, file:, memory:, and what is refused."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from ingot.errors import FormatError, UsageError
from ingot.model.store import Listing
from ingot.stores.local import LocalStore
from ingot.stores.memory import MemoryStore, shared_files
from ingot.stores.table import from_url, locate, read_file, read_start, write_file


@pytest.fixture
def folder(tmp_path):
    inside = tmp_path / "ein ordner#1"
    inside.mkdir()
    (inside / "a?b").write_bytes(b"x")
    return inside


def test_a_folder_is_found_by_path_and_by_its_own_address(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    stores = [from_url(folder), from_url(str(folder)), from_url(folder.name), from_url(from_url(folder).url)]
    for store in stores:
        assert isinstance(store, LocalStore)
        assert (store.list(), store.url) == (Listing(("a?b",)), stores[0].url)
    assert "#" not in stores[0].url


@pytest.mark.parametrize("way", ["path", "text", "address", "localhost"])
def test_a_file_is_located_in_its_folder_and_a_folder_is_a_store(folder, way):
    address = from_url(folder).url + "/a%3Fb"
    text = {"path": folder / "a?b", "text": str(folder / "a?b"), "address": address}
    text["localhost"] = address.replace("file://", "FILE://localhost")
    store, name = locate(text[way])
    assert (name, store.local_path(name)) == ("a?b", folder / "a?b")
    whole, name = locate(folder)
    assert (name, whole.local_path()) == ("", folder)


def test_memory_is_found_by_its_name_within_the_process():
    kept = shared_files("test_store_table")
    kept.update({"m/w": bytearray(b"abc"), "top": bytearray(b"d")})
    store, name = locate("memory:test_store_table/m/w")
    assert (name, store.head(name, 9), store.local_path(name)) == ("w", b"abc", None)
    folder, name = locate("memory://test_store_table/m/")
    assert (name, folder.list()) == ("", Listing(("w",)))
    again = from_url(folder.url)
    assert isinstance(again, MemoryStore)
    kept["m/x"] = bytearray()
    assert again.list() == Listing(("w", "x"))
    assert from_url("memory:test_store_table").list() == Listing(("top",), ("m",))


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
        ("a\0b", "store.path"),
        (7, "store.path"),
    ],
)
def test_what_is_no_store_is_refused(address, rule):
    for make in (from_url, locate) if not str(address).startswith("memory:nobody") else (locate,):
        with pytest.raises(UsageError) as caught:
            make(address)
        assert caught.value.rule == rule


def test_a_path_object_is_a_path_even_if_it_looks_like_an_address(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file:x").write_bytes(b"1")
    (tmp_path / "memory:x").mkdir()
    assert locate(Path("file:x"))[1] == "file:x"
    assert from_url(Path("memory:x")).local_path() is not None


def test_the_refusal_of_a_scheme_names_those_that_there_are():
    with pytest.raises(UsageError) as caught:
        from_url("ftp://bucket")
    assert "file:" in str(caught.value)
    assert "memory:" in str(caught.value)


def test_the_start_of_a_file_or_of_a_pipe_is_read(tmp_path):
    file, pipe = tmp_path / "file", tmp_path / "pipe"
    file.write_bytes(b"abc")
    os.mkfifo(pipe)
    assert (read_start(file, 2), read_start(file, 9)) == (b"ab", b"abc")
    writer = threading.Thread(target=pipe.write_bytes, args=(b"from a command",))
    writer.start()
    assert read_start(pipe, 100) == b"from a command"
    writer.join()
    with pytest.raises(FormatError) as refused:
        read_start(tmp_path, 9)
    assert refused.value.rule == "store.not-a-file"


def test_a_small_file_is_written_wherever_something_can_be_written(tmp_path):
    addresses = [tmp_path / "a", str(tmp_path / "b"), from_url(tmp_path).url + "/c", "memory:test_small_files/d"]
    for address in addresses:
        write_file(address, b"old", overwrite=False)
        write_file(address, b"new")
        with pytest.raises(UsageError) as caught:
            write_file(address, b"newer", overwrite=False)
        assert (caught.value.rule, read_file(address)) == ("target.exists", b"new")
    assert from_url(tmp_path).list() == Listing(("a", "b", "c"))
    with pytest.raises(UsageError) as caught:
        write_file("https://name:secret@host/file", b"")
    assert caught.value.rule == "store.not-writable"
    assert "secret" not in str(caught.value)
