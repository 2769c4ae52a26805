"""A folder of the local file system as a store, whose files are mapped or read by calls, and as a target.

Mappings are read-only. For callers that need writable memory, a source maps a range privately (copy on write). The file
does not change, and may be larger than the machine's memory.
"""

from __future__ import annotations

import os
import re
import stat
import tempfile
import threading
from collections.abc import Hashable, Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path, PurePath, PureWindowsPath
from typing import BinaryIO, cast
from urllib.parse import quote, unquote, urlsplit

from ingot.core.files import system
from ingot.core.files.system import local_path, read_error, write_error
from ingot.errors import FormatError, IngotError, ResourceError, UsageError
from ingot.model.bytesource import Buffer, ByteSource, DiskSink, Stamp
from ingot.model.store import Listing, Store, checked_name
from ingot.stores.files import MAX_CALL, MmapSource, PreadSource, flat, open_regular, read_all, stamp_of


def file_name(name: str, location: str) -> str:
    """Return ``name`` if it is a valid name of a file in a local store.

    Raises ``FormatError`` ``store.escape`` if the name leaves the folder or is impossible on this system.
    """
    checked_name(name, location)
    if not all(map(system.is_name, name.split("/"))):
        raise FormatError(
            "store.escape",
            f"expected a name that a file of this system can have, found {name[:200]!r}: rename it on another system",
            where=location,
        )
    return name


def path_of(text: str) -> Path:
    """Return the path of a ``file:`` address; other text is returned as a path.

    Raises ``UsageError`` ``store.url`` for an address of another machine, or one without an absolute path.
    """
    scheme, colon, address = text.partition(":")
    if not colon or scheme.lower() != "file":
        return local_path(text)
    return local_path(path_text(address, text, windows=isinstance(Path(), PureWindowsPath)))


def path_text(address: str, text: str, *, windows: bool) -> str:
    """Return the path of a ``file:`` address from the text after the colon; ``text`` is the address in messages."""
    parts = urlsplit(address, scheme="file")
    path = unquote(parts.path, errors="surrogateescape")
    host = "" if parts.netloc == "localhost" else parts.netloc
    valid = not host
    if windows:  # file:///C:/folder, file://server/share
        valid, path = (True, f"//{host}{path}") if host else (path[2:3] == ":", path[1:])
    if not valid or not parts.path.startswith("/") or parts.query or parts.fragment:
        raise UsageError(
            "expected file:/// and an absolute path, with %23 and %3F for # and ?", rule="store.url", where=text[:200]
        )
    return path


def url_of(path: Path) -> str:
    """Return the ``file:`` address of a path, made absolute; links are not resolved, and the path need not exist."""
    return address_of(path.absolute())


def address_of(path: PurePath) -> str:
    """Return the ``file:`` address of an absolute path.

    For Windows it has the form ``file:///C:/folder`` or ``file://server/share``.
    """
    if not isinstance(path, PureWindowsPath):
        return f"file://{quote(os.fsencode(path))}"
    text = quote(path.as_posix(), safe="/:")
    return f"file:{text}" if text.startswith("//") else f"file:///{text}"


MOUNTINFO = Path("/proc/self/mountinfo")
_NETWORK_TYPES = """
9p acfs afs beegfs ceph cifs coda davfs fuse gfs gfs2 glusterfs gpfs lustre mmfs ncpfs nfs nfs4 ocfs2 orangefs panfs
prl_fs pvfs2 smb2 smb3 smbfs vboxsf vmhgfs
"""
NETWORK = frozenset(_NETWORK_TYPES.split())


def is_network(folder: str) -> bool:
    """Return whether a resolved absolute path is on a network file system; all types ``fuse.*`` count as network."""
    type_name = filesystem(folder)
    return type_name in NETWORK or type_name.startswith("fuse.")


@lru_cache(maxsize=256)
def filesystem(folder: str) -> str:
    """Return the type of the file system at a resolved absolute path; "" if unknown."""
    try:
        table = MOUNTINFO.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""
    return _innermost(table, folder)


def _innermost(table: str, folder: str) -> str:
    """Return the type of the file system at the longest mount point that contains ``folder``.

    If a mount point occurs several times, the last one counts, because it hides the earlier ones.
    """
    best = -1
    type_name = ""
    for line in table.splitlines():
        before, dash, after = line.partition(" - ")
        fields = before.split(" ")
        if not dash or len(fields) < 5:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4]).rstrip("/")
        if len(point) >= best and (folder == point or folder.startswith(point + "/")):
            best = len(point)
            type_name = after.split(" ")[0]
    return type_name


def tree(folder: str, prefix: str) -> Iterator[str]:
    """Yield ``prefix`` plus the name of each file in a folder, at any depth.

    For an empty folder it yields the folder's name and a slash.
    """
    try:
        with os.scandir(folder) as scanned:
            entries = sorted(scanned, key=lambda entry: entry.name)
    except OSError as error:
        raise read_error(error, folder) from error
    if prefix and not entries:
        yield prefix
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from tree(entry.path, f"{prefix}{entry.name}/")
        else:
            yield prefix + entry.name


def is_regular(entry: os.DirEntry[str]) -> bool:
    """Return whether the entry is a file, or a link to one."""
    try:
        return entry.is_file()
    except OSError:  # a circular link
        return False


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether the entry is a folder, or a link to one."""
    try:
        return entry.is_dir()
    except OSError:
        return False


IO_MODES = ("auto", "mmap", "pread")


class LocalStore(Store):
    """The files of one folder.

    Parameters
    ----------
    path : str or path-like
        An existing folder.
    io : {"auto", "mmap", "pread"}
        ``auto`` maps local files. It reads files on network file systems by calls, because each mapped page would cost
        a round trip. The attribute ``io`` of the store is the method for files in the folder. The attribute ``io`` of
        a source is the method for its file, which may differ.

    Raises
    ------
    UsageError
        ``store.missing``, ``store.not-a-folder``: the folder does not exist; ``store.io``: an unknown ``io``.
    """

    def __init__(self, path: str | os.PathLike[str], io: str = "auto") -> None:
        self._folder = local_path(path)
        self.location = str(self._folder)
        self.url = url_of(self._folder)
        if io not in IO_MODES:
            raise UsageError(f"expected io {', '.join(IO_MODES)}, found {io!r}", rule="store.io", where=self.location)
        try:
            mode = self._folder.stat().st_mode
        except OSError as error:
            raise read_error(error, self.location) from error
        if not stat.S_ISDIR(mode):
            raise UsageError("expected a folder", rule="store.not-a-folder", where=self.location)
        self._io_option = io
        self.io = _choose(io, os.path.realpath(self._folder))

    def list(self, folder: str = "") -> Listing:
        """Return the files and folders directly in the store, or in its subfolder ``folder``.

        Links are listed as the file or folder that they lead to. The listing also names links that lead out of the
        store's folder, except links of a snapshot in the Hugging Face Hub's cache to the blobs of the same model.
        """
        path = self._folder / file_name(folder, self.location) if folder else self._folder
        files = []
        folders = []
        links = []
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    if is_regular(entry):
                        files.append(entry.name)
                    elif is_folder(entry):
                        folders.append(entry.name)
                    if entry.is_symlink():
                        links.append(entry)
        except OSError as error:
            if folder and isinstance(error, FileNotFoundError | NotADirectoryError):
                return Listing()
            raise read_error(error, str(path)) from error
        roots = _roots(self._folder) if links else set()
        outside = [link.name for link in links if roots.isdisjoint(Path(os.path.realpath(link.path)).parents)]
        return Listing(tuple(sorted(files)), tuple(sorted(folders)), tuple(sorted(outside)))

    def exists(self, name: str) -> bool:
        """Implement ``Store.exists`` without a listing."""
        return os.path.isfile(self._folder / file_name(name, self.location))  # noqa: PTH113 - False for long names

    def identity(self, folder: str = "") -> Hashable:
        """Implement ``Store.identity``: return the path with all links resolved."""
        return os.path.realpath(self.local_path(folder))

    def tree(self, folder: str = "") -> Iterator[str]:
        """Implement ``Store.tree``; the names include devices and circular links."""
        return tree(str(self.local_path(folder)), f"{folder}/" if folder else "")

    def open(self, name: str) -> ByteSource:
        """Open one regular file; never wait for a fifo or device.

        Raises
        ------
        FormatError
            ``store.escape``: the name is absolute, leads out of the folder, or is no valid file name;
            ``store.not-a-file``: the name is not a regular file.
        UsageError, ResourceError
            ``store.missing``, ``store.denied``, ``store.read-failed``.
        """
        location = str(self._folder / file_name(name, self.location))
        real = os.path.realpath(location)
        mode = self.io if self._io_option != "auto" else _choose("auto", str(Path(real).parent))
        if mode == "pread":
            return PreadSource(open_regular(real, location), real, location)
        try:
            return MmapSource(open_regular(real, location), real, location)
        except ResourceError as error:
            if self._io_option != "auto" or error.rule != "store.cannot-map":
                raise
            return PreadSource(open_regular(real, location), real, location)  # some file systems cannot map (ENODEV)

    def stat(self, name: str) -> Stamp:
        """Return the stamp of a file, without mapping it; raise the errors of ``open``."""
        location = str(self._folder / file_name(name, self.location))
        descriptor = open_regular(os.path.realpath(location), location)
        try:
            return stamp_of(descriptor)
        finally:
            os.close(descriptor)

    def local_path(self, name: str = "") -> Path:
        """Return the path of a file or folder of the store; raise ``FormatError`` ``store.escape``."""
        return self._folder / file_name(name, self.location) if name else self._folder

    def location_of(self, name: str = "") -> str:
        """Return the path of a file, relative or absolute like the folder's path."""
        return str(self._folder / name)

    def would_overwrite(self, names: Iterable[str], target: str, *, folder: bool) -> bool:
        """Implement ``Store.would_overwrite``; for a link both its name and its target count."""
        if not target.startswith("file:"):
            return False
        final = Path(os.path.realpath(path_of(target)))
        entries = [self.local_path(name) for name in names]
        files = {Path(os.path.realpath(entry)) for entry in entries}
        if folder:
            files |= {Path(os.path.realpath(entry.parent)) / entry.name for entry in entries}
        return final in files or (folder and any(final in file.parents for file in files))

    def contains_address(self, target: str) -> bool:
        """Implement ``Store.contains_address`` on paths with links and ``..`` resolved."""
        root = Path(os.path.realpath(self._folder))
        return target.startswith("file:") and Path(os.path.realpath(path_of(target))).is_relative_to(root)


class LocalTarget:
    """A target that writes files in an existing folder.

    With ``late``, small writes are buffered (see ``LocalSink``). Set it only if no other code reads or writes the files
    before they are closed.
    """

    def __init__(self, folder: str | os.PathLike[str], *, late: bool = False) -> None:
        self._folder = Path(folder)
        self._late = late

    def store(self) -> LocalStore:
        """Return the folder as a store that reads files by calls."""
        return LocalStore(self._folder, "pread")

    def cut(self, sizes: Mapping[str, int]) -> None:
        """Truncate the files in ``sizes`` to their sizes; remove all other files, and empty folders."""
        parents = {parent for name in sizes for parent in Path(name).parents}
        try:
            for path in sorted(self._folder.rglob("*"), reverse=True):  # a folder comes after its contents
                name = path.relative_to(self._folder)
                if name.as_posix() in sizes:
                    os.truncate(path, sizes[name.as_posix()])
                elif not path.is_dir() or path.is_symlink():
                    system.remove(path)
                elif name not in parents:
                    path.rmdir()
        except OSError as error:
            raise write_error(error, str(self._folder)) from error

    def flush(self, names: Iterable[str]) -> None:
        """Flush the files ``names`` to disk."""
        for name in names:
            try:
                system.flush(self._folder / file_name(name, str(self._folder)))
            except OSError as error:
                raise write_error(error, str(self._folder)) from error

    def create(self, name: str) -> LocalSink:
        """Open a file for writing without truncating it; missing parent folders are created.

        Raises the errors of ``LocalSink``, and ``FormatError`` ``store.escape``.
        """
        path = self._folder / file_name(name, str(self._folder))
        try:
            return LocalSink(path, late=self._late)
        except IngotError:
            if path.parent == self._folder or path.parent.exists():
                raise
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise write_error(error, str(path.parent)) from error
        return LocalSink(path, late=self._late)


_MAX_BUFFERED_WRITE = 1 << 12
_BUFFER_LIMIT = 1 << 16


class LocalSink(DiskSink):
    """A file written by ``pwrite``; with ``late``, small adjacent writes are buffered until ``flush``.

    Raises
    ------
    ResourceError
        ``store.disk-full``, ``store.read-only``, ``store.file-too-large``, ``store.write-failed``.
    """

    def __init__(self, path: Path, *, late: bool = False) -> None:
        self.name = str(path)
        self._guard = threading.Lock()
        self._max_buffered = _MAX_BUFFERED_WRITE if late else 0
        self._buffer = bytearray()
        self._buffer_offset = 0
        flags = system.open_flags("O_RDWR", "O_CREAT", "O_NOFOLLOW")
        try:
            self._descriptor = os.open(path, flags, 0o666)
        except OSError as error:
            raise write_error(error, self.name) from error

    def write_at(self, offset: int, data: Buffer) -> None:
        """Write all of ``data`` at ``offset``; small adjacent writes may be buffered."""
        view = flat(memoryview(data))
        with self._guard:
            end = self._buffer_offset + len(self._buffer)
            if self._buffer and (offset != end or len(self._buffer) >= _BUFFER_LIMIT):
                self._flush()
            if view.nbytes <= self._max_buffered:
                if not self._buffer:
                    self._buffer_offset = offset
                self._buffer += view
                return
            self._flush()
        self._write(offset, view)

    def flush(self) -> None:
        """Write the buffered bytes to the file; raise the errors of ``write_at``."""
        with self._guard:
            self._flush()

    def _flush(self) -> None:
        """Write the buffered bytes; the caller holds ``_guard``."""
        if self._buffer:
            buffered = self._buffer
            self._buffer = bytearray()
            self._write(self._buffer_offset, memoryview(buffered))

    def _write(self, offset: int, data: memoryview) -> None:
        try:
            while data.nbytes:
                count = system.write_at(self._descriptor, data[:MAX_CALL], offset)
                offset += count
                data = data[count:]
        except OSError as error:
            raise write_error(error, self.name) from error

    def readinto(self, offset: int, out: memoryview) -> None:
        """Fill ``out`` with written bytes; raise ``IntegrityError`` ``store.short-read`` past the end."""
        self.flush()
        read_all(self._descriptor, offset, out, self.name)

    def truncate(self, size: int) -> None:
        """Cut the file to ``size`` bytes, or extend it with zero bytes."""
        self.flush()
        try:
            os.ftruncate(self._descriptor, size)
        except OSError as error:
            raise write_error(error, self.name) from error

    def scratch(self) -> BinaryIO:
        """Return an unnamed temporary file in the same folder."""
        return cast(BinaryIO, tempfile.TemporaryFile(dir=Path(self.name).parent))

    def close(self) -> None:
        """Close the file without flushing it to disk; a second call does nothing."""
        if self._descriptor < 0:
            return
        try:
            self.flush()
        finally:
            descriptor = self._descriptor
            self._descriptor = -1
            try:
                os.close(descriptor)
            except OSError as error:  # NFS and quotas report a full disk only at this call
                raise write_error(error, self.name) from error

    def __del__(self) -> None:
        try:  # at the interpreter's end os may be gone
            self.close()
        except Exception:
            return


def _roots(folder: Path) -> set[Path]:
    """Return the folders in which the targets of links in ``folder`` may be.

    These are the folder itself and, for a snapshot in the Hub's cache, the blobs of its model.
    """
    root = Path(os.path.realpath(folder))
    return {root, root.parent.parent / "blobs"} if root.parent.name == "snapshots" else {root}


def _choose(io: str, folder: str) -> str:
    """Return the method of reading files of a resolved folder: ``mmap`` or ``pread``.

    It is ``io``, unless that is ``auto``.
    """
    if io != "auto":
        return io
    return "pread" if is_network(folder) else "mmap"
