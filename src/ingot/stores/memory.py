"""Buffers in memory as a store and as a target."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar
from urllib.parse import quote, unquote

from ingot.core.files.atomic import Staging
from ingot.errors import UsageError
from ingot.model.bytesource import Buffer, MemorySource
from ingot.model.store import Listing, OverwritePolicy, Store, checked_name
from ingot.stores.files import flat
from ingot.stores.scheme import WritableScheme


def listing_of(names: Iterable[str], prefix: str) -> Listing:
    """Return the files and folders directly below a prefix, given the names of all files at any depth."""
    inside = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
    files = sorted(name for name in inside if "/" not in name)
    return Listing(tuple(files), tuple(sorted({name.split("/")[0] for name in inside if "/" in name})))


class MemoryStore(Store):
    """A store of named buffers, which are not copied.

    Parameters
    ----------
    files : mapping of name to buffer
    location : str
        The store's name in messages.
    url : str
        The address of the buffers in this process (``memory:NAME``), or empty.
    folder : str
        The folder of ``files`` to which the store is restricted; by default none.
    """

    def __init__(
        self, files: Mapping[str, Buffer], location: str = "<memory>", *, url: str = "", folder: str = ""
    ) -> None:
        self._files = files
        self._start = f"{folder}/" if folder else ""
        self.location = location
        self.url = url

    def list(self, folder: str = "") -> Listing:
        """Return the names directly in the store, or in ``folder``; there are no links."""
        return listing_of(self._files, f"{self._start}{folder}/" if folder else self._start)

    def open(self, name: str) -> MemorySource:
        """Return the buffer as a source.

        Raises ``FormatError`` ``store.escape``; ``UsageError`` ``store.missing``.
        """
        checked_name(name, self.location)
        key = self._start + name
        if key not in self._files:
            raise UsageError("this file does not exist", rule="store.missing", where=f"{self.location}/{name}")
        return MemorySource(self._files[key], name)


class MemoryScheme(WritableScheme):
    """The scheme of addresses ``memory:NAME/folder/file``: files that this process stores in memory under ``NAME``."""

    def store(self, text: str, io: str) -> MemoryStore:
        """Return the store, or a folder in it; ``io`` has no effect."""
        name, _, folder = _name_of(text).partition("/")
        return MemoryStore(shared_files(name), text, url=self.url(text), folder=folder)

    def locate(self, text: str, io: str) -> tuple[MemoryStore, str]:
        """Return the store and a file's name in it; for a folder, the folder and an empty name.

        Raises ``UsageError`` ``store.missing`` if neither a file nor a folder exists.
        """
        path = _name_of(text)
        name, _, key = path.partition("/")
        files = shared_files(name)
        if key in files:
            folder, _, last = path.rpartition("/")
            return self.store(f"memory:{quote(folder)}", io), last
        if not any(name.startswith(f"{key}/" if key else "") for name in files):
            raise UsageError("no file or folder in memory has this name", rule="store.missing", where=text[:200])
        return self.store(text, io), ""

    def stage(self, text: str, replaced: OverwritePolicy, *, directory: bool, resume: bool) -> Staging:
        """Return a temporary staging folder; publishing its files reads them into memory."""
        return MemoryStaging(_name_of(text), replaced, directory=directory, resume=resume)

    def url(self, text: str) -> str:
        """Return the address without redundant slashes."""
        return f"memory:{quote(_name_of(text))}"


_SHARED: dict[str, dict[str, bytearray]] = {}


def shared_files(name: str) -> dict[str, bytearray]:
    """Return the files that this process stores under ``memory:name``, by their names."""
    return _SHARED.setdefault(name, {})


def _name_of(text: str) -> str:
    """Return the decoded path after ``memory:`` without slashes at its ends; raise ``store.url`` for an invalid one."""
    path = unquote(text.partition(":")[2], errors="surrogateescape").strip("/")
    if not path or "\0" in path or any(part in ("", ".", "..") for part in path.split("/")):
        raise UsageError("expected memory:NAME, or memory:NAME/file", rule="store.url", where=text[:200])
    return path


class MemoryStaging(Staging):
    """A ``Staging`` whose files appear in memory, at ``NAME/folder/file``.

    Raises ``UsageError`` ``target.name``, ``target.exists``, ``target.not-a-file``, ``target.not-a-folder``.
    """

    _interrupted: ClassVar[dict[str, Path]] = {}  # folders of interrupted runs, for later runs to resume

    def __init__(self, path: str, replaced: OverwritePolicy, *, directory: bool, resume: bool) -> None:
        name, _, self._key = path.partition("/")
        self._shared = shared_files(name)
        self._path = path
        if not self._key and not directory:
            raise UsageError("expected memory:NAME/file to write a file", rule="target.name", where=f"memory:{path}")
        self._require_free(replaced, directory)
        interrupted = self._interrupted.pop(path, None)
        self._around = interrupted if interrupted is not None else Path(tempfile.mkdtemp(prefix="ingot-"))
        self._published = False
        super().__init__(self._around / (self._key.rpartition("/")[2] or name), directory=directory, resume=resume)

    def publish(self, names: Sequence[str]) -> Path:
        """Read the named files into memory; all appear in one step."""
        self._published = True
        final = super().publish(names)
        under = f"{self._key}/" if self._key else ""
        paths = {f"{under}{name}" if final.is_dir() else self._key: final / name for name in names}
        new = {key: bytearray((path if final.is_dir() else final).read_bytes()) for key, path in paths.items()}
        for key in [key for key in self._shared if final.is_dir() and key.startswith(under) and key not in new]:
            del self._shared[key]
        self._shared.update(new)
        shutil.rmtree(self._around)
        return final

    def keep(self) -> None:
        """Leave the staged files for a later run of this process."""
        self._interrupted[self._path] = self._around
        super().keep()

    def discard(self) -> None:
        """Remove the staging folder."""
        super().discard()
        if not self._published and self._path not in self._interrupted:
            shutil.rmtree(self._around, ignore_errors=True)

    def _require_free(self, replaced: OverwritePolicy, directory: bool) -> None:
        location = f"memory:{self._path}"
        under = f"{self._key}/" if self._key else ""
        inside = any(name.startswith(under) for name in self._shared)
        if directory and self._key in self._shared:
            raise UsageError("expected a folder or nothing, found a file", rule="target.not-a-folder", where=location)
        if not directory and inside:
            raise UsageError("expected a file or nothing, found a folder", rule="target.not-a-file", where=location)
        if not replaced.allowed and (inside or self._key in self._shared):
            raise UsageError(
                "the target exists: choose another, or pass --overwrite (overwrite=True)",
                rule="target.exists",
                where=location,
            )


class MemoryTarget:
    """A target whose attribute ``files`` collects the written files: name to ``bytearray``."""

    def __init__(self) -> None:
        self.files: dict[str, bytearray] = {}

    def create(self, name: str) -> MemorySink:
        """Open a file for writing without truncating it."""
        checked_name(name, "<memory>")
        return MemorySink(self.files.setdefault(name, bytearray()))


class MemorySink:
    """A growing buffer to write a file into."""

    def __init__(self, data: bytearray) -> None:
        self._data = data

    def write_at(self, offset: int, data: Buffer) -> None:
        """Write ``data`` at ``offset``; a gap before it is filled with zero bytes."""
        view = flat(memoryview(data))
        if offset > len(self._data):
            self._data.extend(bytes(offset - len(self._data)))
        self._data[offset : offset + view.nbytes] = view

    def readinto(self, offset: int, out: memoryview) -> None:
        """Fill ``out`` with written bytes; raise ``IntegrityError`` ``store.short-read`` past the end."""
        MemorySource(bytes(self._data[offset : offset + out.nbytes])).readinto(0, out)

    def truncate(self, size: int) -> None:
        """Cut the file to ``size`` bytes, or extend it with zero bytes."""
        del self._data[size:]
        self._data.extend(bytes(size - len(self._data)))

    def close(self) -> None:
        """Do nothing: the buffer stays in ``MemoryTarget.files``."""
