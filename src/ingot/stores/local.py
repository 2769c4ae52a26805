"""A folder of the local file system as a store: mapped or read files, and a target to write into.

A mapping is private and copy-on-write (``MAP_PRIVATE | MAP_NORESERVE``, readable and writable): frameworks that insist
on writable memory may have it, nobody's file changes, and a file larger than the machine's memory maps all the same.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import stat
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ingot.core.oserrors import read_error, write_error
from ingot.errors import FormatError, IngotError, IntegrityError, ResourceError, UsageError
from ingot.model.bytesource import Buffer, ByteSource
from ingot.stores.memory import flat
from ingot.stores.mounts import is_network

IO_MODES = ("auto", "mmap", "pread")
# Linux gives each architecture its own value (include/uapi/asm-generic/mman-common.h); Python knows it since 3.13.
_NORESERVE_OF_MACHINE = {"ppc64le": 0x40, "ppc64": 0x40, "ppc": 0x40, "sparc64": 0x40}
_NORESERVE = getattr(
    mmap, "MAP_NORESERVE", _NORESERVE_OF_MACHINE.get(platform.machine(), 0x4000) if sys.platform == "linux" else 0
)
# One read call moves at most 0x7ffff000 bytes on Linux and INT_MAX on macOS; below that, page-aligned.
_MAX_CALL = 1 << 30


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
        self._folder = Path(path)
        self.location = str(self._folder)
        if io not in IO_MODES:
            raise UsageError(f"expected io {', '.join(IO_MODES)}, found {io!r}", rule="store.io", where=self.location)
        try:
            mode = self._folder.stat().st_mode
        except (OSError, ValueError) as error:
            raise _cannot_open(error, self.location) from error
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
        """Names of symbolic links in the folder, or in ``folder`` in it, that lead out of the store's folder."""
        root = Path(os.path.realpath(self._folder))

        def leads_out(entry: os.DirEntry[str]) -> bool:
            return entry.is_symlink() and root not in Path(os.path.realpath(entry.path)).parents

        return self._listed(folder, leads_out)

    def _listed(self, folder: str, wanted: Callable[[os.DirEntry[str]], bool]) -> list[str]:
        path = self._folder / checked_name(folder, self.location) if folder else self._folder
        try:
            with os.scandir(path) as entries:
                return sorted(entry.name for entry in entries if not entry.name.startswith(".") and wanted(entry))
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
        descriptor = _open_regular(real, where)
        try:
            size = os.fstat(descriptor).st_size
            mode = self.io if self._asked != "auto" else _choose("auto", os.path.dirname(real))  # noqa: PTH120
            if mode == "pread":
                return PreadSource(descriptor, size, where)
            try:
                return MmapSource(descriptor, size, where)
            except OSError as error:
                if self._asked == "auto":  # some file systems cannot map (ENODEV)
                    return PreadSource(descriptor, size, where)
                raise ResourceError(
                    f"cannot map this file ({error.strerror or error}): open it with io='pread'",
                    rule="store.cannot-map",
                    where=where,
                ) from error
        except BaseException:
            os.close(descriptor)
            raise


class _FileSource:
    """What both kinds of source share: the descriptor, the size at opening, and read calls.

    Reading is thread-safe; ``close`` must not run beside it.
    """

    io = "pread"
    mapped = False

    def __init__(self, descriptor: int, size: int, name: str) -> None:
        self.name = name
        self.size = size
        self._descriptor = descriptor
        self._opened = _stamp(descriptor)

    @property
    def stamp(self) -> tuple[int, int]:
        """The file's size and time of modification (ns) at opening."""
        return self._opened

    def changed(self) -> bool:
        """Whether the file's size or time of modification is another than at opening."""
        return self._descriptor >= 0 and _stamp(self._descriptor) != self._opened

    def readinto(self, offset: int, out: memoryview) -> None:
        """Fill ``out`` by read calls.

        Raises ``IntegrityError`` ``store.shrank`` where the file has become shorter, ``store.short-read`` where it ends
        before ``out`` is full; ``UsageError`` ``store.closed`` after ``close``.
        """
        self._require(offset, out.nbytes)
        _read_all(self._descriptor, offset, out, self.name)

    def close(self) -> None:
        """Close the file; views handed out before stay valid. A second call does nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _require(self, offset: int, length: int) -> None:
        """Refuse a range outside the file, and a file that has shrunk: its mapped pages would fault."""
        if self._descriptor < 0:
            raise UsageError("this file was closed", rule="store.closed", where=self.name)
        if offset < 0 or length < 0 or offset + length > self.size:
            raise IntegrityError(
                "store.short-read", f"expected {length} bytes at {offset}, found a file of {self.size}", where=self.name
            )
        now = os.fstat(self._descriptor).st_size
        if now < self.size:
            raise IntegrityError(
                "store.shrank", f"the file had {self.size} bytes when it was opened and has {now} now", where=self.name
            )

    def __del__(self) -> None:
        try:  # at the interpreter's end contextlib may be gone, as may os
            self.close()
        except Exception:
            return


class PreadSource(_FileSource):
    """A file read by ``preadv``; ``view`` copies."""

    def view(self, offset: int, length: int) -> memoryview:
        """Return a fresh buffer with ``length`` bytes at ``offset``; errors as ``readinto``."""
        self._require(offset, length)
        try:
            out = np.empty(length, np.uint8).data
        except MemoryError as error:
            raise ResourceError(f"no memory for {length} bytes", rule="store.no-memory", where=self.name) from error
        self.readinto(offset, out)
        return out


class MmapSource(_FileSource):
    """A mapped file; ``view`` is the mapping itself, writable but private to this process."""

    io = "mmap"
    mapped = True

    def __init__(self, descriptor: int, size: int, name: str) -> None:
        self._map: mmap.mmap | None = None
        if size:  # an empty mapping does not exist
            flags, protection = mmap.MAP_PRIVATE | _NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
            self._map = mmap.mmap(descriptor, size, flags=flags, prot=protection)
        super().__init__(descriptor, size, name)

    def view(self, offset: int, length: int) -> memoryview:
        """Return the mapped bytes; errors as ``readinto``.

        A file that shrinks after this check and before the bytes are touched still ends the process (SIGBUS): whoever
        expects that opens with ``io="pread"``.
        """
        self._require(offset, length)
        return memoryview(self._map)[offset : offset + length] if self._map is not None else memoryview(bytearray())

    def close(self) -> None:
        """Close the file, and the mapping once no view of it is left."""
        super().close()
        mapping, self._map = self._map, None
        if mapping is not None:
            with contextlib.suppress(BufferError):
                mapping.close()


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
                count = os.pwrite(self._descriptor, rest[:_MAX_CALL], offset)
                offset += count
                rest = rest[count:]
        except OSError as error:
            raise write_error(error, self.name) from error

    def readinto(self, offset: int, out: memoryview) -> None:
        """Fill ``out`` with bytes that were written; ``store.short-read`` past the end."""
        _read_all(self._descriptor, offset, out, self.name)

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


def _read_all(descriptor: int, offset: int, out: memoryview, where: str) -> None:
    rest = flat(out)
    while rest.nbytes:
        try:
            count = os.preadv(descriptor, [rest[:_MAX_CALL]], offset)
        except OSError as error:
            raise read_error(error, where) from error
        if count == 0:
            raise IntegrityError(
                "store.short-read",
                f"expected {rest.nbytes} more bytes at {offset}, found the end of the file",
                where=where,
            )
        offset += count
        rest = rest[count:]


def _stamp(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns


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


def _cannot_open(error: Exception, where: str) -> Exception:
    if isinstance(error, OSError):
        return read_error(error, where)
    return UsageError(
        f"expected a path, found one with a NUL or a bad character: {error}", rule="store.path", where=where[:200]
    )


def _open_regular(real: str, where: str) -> int:
    try:
        mode = os.stat(real).st_mode  # noqa: PTH116 - a directory may have thousands of files
        if stat.S_ISREG(mode):
            # O_NONBLOCK: were the file replaced by a fifo at this moment, open would wait for a writer.
            descriptor = os.open(real, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
            mode = os.fstat(descriptor).st_mode
            if stat.S_ISREG(mode):
                return descriptor
            os.close(descriptor)
    except (OSError, ValueError) as error:
        raise _cannot_open(error, where) from error
    raise FormatError("store.not-a-file", f"expected a regular file, found {_kind(mode)}", where=where)


def _kind(mode: int) -> str:
    kinds = {
        stat.S_IFDIR: "a folder",
        stat.S_IFIFO: "a fifo",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
    }
    return kinds.get(stat.S_IFMT(mode), "something else")
