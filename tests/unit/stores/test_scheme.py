"""The defaults of schemes: what is only read refuses to be written to, and a small file is staged."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ingot.core.files.atomic import Staging
from ingot.errors import UsageError
from ingot.model.store import OverwritePolicy, Store
from ingot.stores.location import Location
from ingot.stores.memory import MemoryStore
from ingot.stores.scheme import STORES, Scheme, WritableScheme

WRITABLE = {"file", "memory", "s3", "gs", "az"}


class ReadScheme(Scheme):
    """Addresses of the form ``only:anything``, which lead to an empty folder."""

    def store(self, text: str, io: str) -> Store:
        return MemoryStore({}, text)

    def locate(self, text: str, io: str) -> tuple[Store, str]:
        return self.store(text, io), ""


class StagedScheme(ReadScheme, WritableScheme):
    """The same addresses, whose files are staged in a folder on the disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def stage(self, text: str, replaced: OverwritePolicy, *, directory: bool, resume: bool) -> Staging:
        target = self.folder / text.partition(":")[2]
        return Staging(target, directory=directory, overwrite=replaced.allowed, resume=resume)

    def url(self, text: str) -> str:
        return text


@pytest.mark.parametrize("name", STORES)
def test_each_scheme_derives_from_the_base_class(name: str) -> None:
    assert isinstance(STORES[name], Scheme)
    assert isinstance(STORES[name], WritableScheme) == (name in WRITABLE)


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(STORES._targets, "only", f"{__name__}:ReadScheme")
    monkeypatch.setitem(STORES._loaded, "only", ReadScheme())
    return "only:somewhere"


def test_a_scheme_that_is_only_read_refuses_writing(only: str) -> None:
    refused = (
        lambda: Location.parse(only).stage(OverwritePolicy()),
        lambda: Location.parse(only).make_folder(),
        lambda: Location.parse(only).write(b"x"),
        lambda: Location.parse(only).share(),
        lambda: Location.parse(only).url,
    )
    for attempt in refused:
        with pytest.raises(UsageError) as caught:
            attempt()
        assert (caught.value.rule, caught.value.where) == ("store.not-writable", only)


def test_a_scheme_without_pipes_and_secrets_has_defaults() -> None:
    scheme = ReadScheme()
    assert scheme.pipe("only:x", 4) is None
    assert scheme.location("only:x") == "only:x"


def test_a_small_file_is_staged_and_appears_whole(tmp_path: Path) -> None:
    scheme = StagedScheme(tmp_path)
    scheme.make_folder("only:folder")  # needs none
    scheme.write("only:a", b"first", overwrite=False)
    with pytest.raises(UsageError) as caught:
        scheme.write("only:a", b"second", overwrite=False)
    assert caught.value.rule == "target.exists"
    scheme.write("only:a", b"third", overwrite=True)
    assert (tmp_path / "a").read_bytes() == b"third"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_archives_and_libraries_are_known_before_a_model_is_opened() -> None:
    code = (
        "from ingot.stores.location import Location\n"
        "print(*(Location.parse(f'{name}:./x!y').scheme for name in ('library', 'archive')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["library", "archive"]
