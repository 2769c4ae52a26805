"""Bytes in memory as a store and as a target."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar
from urllib.parse import quote, unquote

from ingot.core.files.atomic import Staging
from ingot.errors import UsageError
from ingot.model.bytesource import Buffer, MemorySource
from ingot.model.store import Listing, OverwritePolicy, Store, checked_name
from ingot.stores.files import flat
from ingot.stores.scheme import WritableScheme


class MemoryStore(Store):
    """Named buffers as a store; nothing is copied.

    Parameters
    ----------
    files : mapping of name to buffer
    location : str
        For messages.
    url : str
        Where this process finds the buffers again (``memory:NAME``), if it does.
    folder : str
        The store is this folder of the names.
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
        start = f"{self._start}{folder}/" if folder else self._start
        inside = [name.removeprefix(start) for name in self._files if name.startswith(start)]
        files = sorted(name for name in inside if "/" not in name)
        return Listing(tuple(files), tuple(sorted({name.split("/")[0] for name in inside if "/" in name})))

    def open(self, name: str) -> MemorySource:
        """Return the buffer as a source; ``store.escape`` and ``store.missing`` as for a folder."""
        checked_name(name, self.location)
        key = self._start + name
        if key not in self._files:
            raise UsageError(
                "expected an existing file, found none", rule="store.missing", where=f"{self.location}/{name}"
            )
        return MemorySource(self._files[key], name)


class MemoryScheme(WritableScheme):
    """Addresses of the form ``memory:NAME/folder/file``: what this process keeps under ``NAME``, empty at first."""

    def store(self, text: str, io: str) -> MemoryStore:
        """Return the store, or a folder in it; ``io`` says nothing here."""
        name, _, folder = _name_of(text).partition("/")
        return MemoryStore(shared_files(name), text, url=self.url(text), folder=folder)

    def locate(self, text: str, io: str) -> tuple[MemoryStore, str]:
        """Return the store and the name in it: none for a folder.

        Raises ``UsageError`` ``store.missing`` where there is neither.
        """
        path = _name_of(text)
        name, _, key = path.partition("/")
        files = shared_files(name)
        if key in files:
            folder, _, last = path.rpartition("/")
            return self.store(f"memory:{quote(folder)}", io), last
        if not any(other.startswith(f"{key}/" if key else "") for other in files):
            raise UsageError("expected a file or folder in memory, found none", rule="store.missing", where=text[:200])
        return self.store(text, io), ""

    def stage(self, text: str, replaced: OverwritePolicy, *, directory: bool, resume: bool) -> Staging:
        """Stage in a temporary folder, whose files go into memory when they are published."""
        return MemoryStaging(_name_of(text), replaced, directory=directory, resume=resume)

    def url(self, text: str) -> str:
        """Return the address without needless slashes."""
        return f"memory:{quote(_name_of(text))}"


_SHARED: dict[str, dict[str, bytearray]] = {}


def shared_files(name: str) -> dict[str, bytearray]:
    """Return the files that this process keeps under a name, by their names."""
    return _SHARED.setdefault(name, {})


def _name_of(text: str) -> str:
    """Return the decoded name after ``memory:``, without slashes at its ends; raise ``store.url`` if it is no name."""
    path = unquote(text.partition(":")[2], errors="surrogateescape").strip("/")
    if not path or "\0" in path or any(piece in ("", ".", "..") for piece in path.split("/")):
        raise UsageError("expected memory:NAME, or memory:NAME/file", rule="store.url", where=text[:200])
    return path


class MemoryStaging(Staging):
    """Staging of what will appear in memory, at ``NAME/folder/file``; for the rest as ``Staging``.

    Raises ``UsageError`` ``target.name``, ``target.exists``, ``target.not-a-file``, ``target.not-a-folder``.
    """

    _kept: ClassVar[dict[str, Path]] = {}  # folders with what a run has left, to go on with

    def __init__(self, path: str, replaced: OverwritePolicy, *, directory: bool, resume: bool) -> None:
        name, _, self._key = path.partition("/")
        self._shared = shared_files(name)
        self._path = path
        if not self._key and not directory:
            raise UsageError("expected memory:NAME/file to write a file", rule="target.name", where=f"memory:{path}")
        self._require_free(replaced, directory)
        kept = self._kept.pop(path, None)
        self._around = kept if kept is not None else Path(tempfile.mkdtemp(prefix="ingot-"))
        self._done = False
        super().__init__(self._around / (self._key.rpartition("/")[2] or name), directory=directory, resume=resume)

    def publish(self, names: Sequence[str]) -> Path:
        """Take the named files into memory in one step."""
        self._done = True
        final = super().publish(names)
        under = f"{self._key}/" if self._key else ""
        found = {f"{under}{name}" if final.is_dir() else self._key: final / name for name in names}
        new = {key: bytearray((path if final.is_dir() else final).read_bytes()) for key, path in found.items()}
        for key in [key for key in self._shared if final.is_dir() and key.startswith(under) and key not in new]:
            del self._shared[key]
        self._shared.update(new)
        shutil.rmtree(self._around)
        return final

    def keep(self) -> None:
        """Leave everything for a later run of this process."""
        self._kept[self._path] = self._around
        super().keep()

    def discard(self) -> None:
        """Remove everything."""
        super().discard()
        if not self._done and self._path not in self._kept:
            shutil.rmtree(self._around, ignore_errors=True)

    def _require_free(self, replaced: OverwritePolicy, directory: bool) -> None:
        where = f"memory:{self._path}"
        under = f"{self._key}/" if self._key else ""
        inside = any(name.startswith(under) for name in self._shared)
        if directory and self._key in self._shared:
            raise UsageError("expected a folder or nothing, found a file", rule="target.not-a-folder", where=where)
        if not directory and inside:
            raise UsageError("expected a file or nothing, found a folder", rule="target.not-a-file", where=where)
        if not replaced.allowed and (inside or self._key in self._shared):
            raise UsageError(
                "the target exists: choose another, or pass --overwrite (overwrite=True)",
                rule="target.exists",
                where=where,
            )


class MemoryTarget:
    """Collects written files in ``files``: name to ``bytearray``."""

    def __init__(self) -> None:
        self.files: dict[str, bytearray] = {}

    def create(self, name: str) -> MemorySink:
        """Open ``name`` for writing; what is there stays."""
        checked_name(name, "<memory>")
        return MemorySink(self.files.setdefault(name, bytearray()))


class MemorySink:
    """One growing buffer."""

    def __init__(self, data: bytearray) -> None:
        self._data = data

    def write_at(self, offset: int, data: Buffer) -> None:
        """Write ``data`` at ``offset``; a gap before it is filled with zero bytes."""
        piece = flat(memoryview(data))
        if offset > len(self._data):
            self._data.extend(bytes(offset - len(self._data)))
        self._data[offset : offset + piece.nbytes] = piece

    def readinto(self, offset: int, out: memoryview) -> None:
        """Fill ``out`` with bytes that were written; ``store.short-read`` past the end."""
        MemorySource(bytes(self._data[offset : offset + out.nbytes])).readinto(0, out)

    def truncate(self, size: int) -> None:
        """Cut or extend with zero bytes."""
        del self._data[size:]
        self._data.extend(bytes(size - len(self._data)))

    def close(self) -> None:
        """Nothing to do."""
