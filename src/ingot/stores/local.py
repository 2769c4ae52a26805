"""A folder of the local file system as a store: mapped or read files, and a target to write into.

A mapping is read-only; who insists on writable memory gets a private, copy-on-write mapping of a range. Nobody's file
changes, and a file larger than the machine's memory maps all the same.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from ingot.core.oserrors import read_error, write_error
from ingot.core.paths import local_path
from ingot.errors import FormatError, IngotError, ResourceError, UsageError
from ingot.model.bytesource import Buffer, ByteSource
from ingot.stores.files import MAX_CALL, MmapSource, PreadSource, open_regular, read_all
from ingot.stores.memory import flat
from ingot.stores.mounts import is_network

IO_MODES = ("auto", "mmap", "pread")


class LocalStore:
    """The files of one folder.

    Parameters
    ----------
    path : str or path-like
        An existing folder.
    io : {"auto", "mmap", "pread"}
        ``auto`` maps local files and reads those on network file systems, where each touched page would be a round
        trip. The choice made for the folder is in ``io``, that for a file in its source's ``io``.

    Raises
    ------
    UsageError
        No folder there (``store.missing``, ``store.not-a-folder``) or an unknown ``io`` (``store.io``).
    """

    def __init__(self, path: str | os.PathLike[str], io: str = "auto") -> None:
        self._folder = local_path(path)
        self.location = str(self._folder)
        if io not in IO_MODES:
            raise UsageError(f"expected io {', '.join(IO_MODES)}, found {io!r}", rule="store.io", where=self.location)
        try:
            mode = self._folder.stat().st_mode
        except OSError as error:
            raise read_error(error, self.location) from error
        if not stat.S_ISDIR(mode):
            raise UsageError("expected a folder", rule="store.not-a-folder", where=self.location)
        self._asked = io
        self.io = _choose(io, os.path.realpath(self._folder))

    def names(self, folder: str = "") -> list[str]:
        """Names of the regular files (or links to such) in the folder, or in ``folder`` in it; hidden ones left out."""
        return self._listed(folder, _is_regular)

    def folders(self, folder: str = "") -> list[str]:
        """Names of the folders (or links to such) in the folder, or in ``folder`` in it; hidden ones left out."""
        return self._listed(folder, _is_folder)

    def outside(self, folder: str = "") -> list[str]:
        """Names of symbolic links in the folder, or in ``folder`` in it, that lead out of the store's folder; hidden
        ones too."""
        root = Path(os.path.realpath(self._folder))

        def leads_out(entry: os.DirEntry[str]) -> bool:
            return entry.is_symlink() and root not in Path(os.path.realpath(entry.path)).parents

        return self._listed(folder, leads_out, hidden=True)

    def _listed(self, folder: str, wanted: Callable[[os.DirEntry[str]], bool], *, hidden: bool = False) -> list[str]:
        path = self._folder / checked_name(folder, self.location) if folder else self._folder
        try:
            with os.scandir(path) as entries:
                shown = (entry for entry in entries if hidden or not entry.name.startswith("."))
                return sorted(entry.name for entry in shown if wanted(entry))
        except OSError as error:
            if folder and isinstance(error, FileNotFoundError | NotADirectoryError):
                return []
            raise read_error(error, str(path)) from error

    def open(self, name: str) -> ByteSource:
        """Open one regular file, without ever waiting for a fifo or device.

        Raises
        ------
        FormatError
            ``store.escape``: the name is absolute, leads out of the folder, or is no file name at all;
            ``store.not-a-file``: there is something else than a regular file.
        UsageError, ResourceError
            ``store.missing``, ``store.denied``, ``store.read-failed``.
        """
        where = str(self._folder / checked_name(name, self.location))
        real = os.path.realpath(where)
        mode = self.io if self._asked != "auto" else _choose("auto", os.path.dirname(real))  # noqa: PTH120
        if mode == "pread":
            return PreadSource(open_regular(real, where), real, where)
        try:
            return MmapSource(open_regular(real, where), real, where)
        except ResourceError as error:
            if self._asked != "auto" or error.rule != "store.cannot-map":
                raise
            return PreadSource(open_regular(real, where), real, where)  # some file systems cannot map (ENODEV)


class LocalTarget:
    """Creates files in an existing folder."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)

    def create(self, name: str) -> LocalSink:
        """Open ``name`` for writing, keeping bytes that are there; errors as ``LocalSink`` and ``store.escape``.

        A name such as ``tensors/a.npy`` makes the folder where there is none.
        """
        path = self._folder / checked_name(name, str(self._folder))
        try:
            return LocalSink(path)
        except IngotError:
            if path.parent == self._folder or path.parent.exists():
                raise
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise write_error(error, str(path.parent)) from error
        return LocalSink(path)


class LocalSink:
    """One file being written, by ``pwrite``.

    Raises
    ------
    ResourceError
        ``store.disk-full``, ``store.read-only``, ``store.file-too-large``, ``store.write-failed``.
    """

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._descriptor = os.open(path, flags, 0o666)
        except OSError as error:
            raise write_error(error, self.name) from error

    def write_at(self, offset: int, data: Buffer) -> None:
        """Write all of ``data`` at ``offset``."""
        rest = flat(memoryview(data))
        try:
            while rest.nbytes:
                count = os.pwrite(self._descriptor, rest[:MAX_CALL], offset)
                offset += count
                rest = rest[count:]
        except OSError as error:
            raise write_error(error, self.name) from error

    def readinto(self, offset: int, out: memoryview) -> None:
        """Fill ``out`` with bytes that were written; ``store.short-read`` past the end."""
        read_all(self._descriptor, offset, out, self.name)

    def truncate(self, size: int) -> None:
        """Cut or extend the file to ``size`` bytes."""
        try:
            os.ftruncate(self._descriptor, size)
        except OSError as error:
            raise write_error(error, self.name) from error

    def scratch(self) -> BinaryIO:
        """Return an unnamed temporary file in the same folder."""
        return tempfile.TemporaryFile(dir=Path(self.name).parent)

    def close(self) -> None:
        """Close the file; a second call does nothing. Flushing to disk is left to whoever publishes."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            try:
                os.close(descriptor)
            except OSError as error:  # NFS and quotas report a full disk only here
                raise write_error(error, self.name) from error

    def __del__(self) -> None:
        try:  # at the interpreter's end contextlib may be gone, as may os
            self.close()
        except Exception:
            return


def checked_name(name: str, where: str) -> str:
    """Return ``name`` if it names a file inside its folder: relative, no empty, ``.`` or ``..`` component, no NUL.

    Raises ``FormatError`` with rule ``store.escape``.
    """
    pieces = name.replace(os.sep, "/").split("/")
    if "\0" in name or Path(name).is_absolute() or any(piece in ("", ".", "..") for piece in pieces):
        raise FormatError(
            "store.escape", f"expected the name of a file in this folder, found {name[:200]!r}", where=where
        )
    return name


def _choose(io: str, folder: str) -> str:
    """Choose for a folder whose path is resolved."""
    if io != "auto":
        return io
    return "pread" if is_network(folder) else "mmap"


def _is_regular(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file()
    except OSError:  # a link in a circle
        return False


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False
