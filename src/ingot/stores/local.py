"""A folder of the local file system as a store: mapped or read files, and a target to write into.

A mapping is read-only; who insists on writable memory gets a private, copy-on-write mapping of a range. Nobody's file
changes, and a file larger than the machine's memory maps all the same.
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


def file_name(name: str, where: str) -> str:
    """Return the name of a file in a store that is a folder here.

    Raises ``FormatError`` ``store.escape`` as ``checked_name``, and for what is no file's name on this system.
    """
    checked_name(name, where)
    if not all(map(system.is_name, name.split("/"))):
        raise FormatError(
            "store.escape",
            f"expected a name that a file of this system can have, found {name[:200]!r}: rename it on another",
            where=where,
        )
    return name


def path_of(text: str) -> Path:
    """Return the path that a ``file:`` address means; any other text is a path as it is.

    Raises ``UsageError`` ``store.url`` for an address of another machine, or one without a whole path.
    """
    scheme, colon, rest = text.partition(":")
    if not colon or scheme.lower() != "file":
        return local_path(text)
    return local_path(path_text(rest, text, windows=isinstance(Path(), PureWindowsPath)))


def path_text(rest: str, text: str, *, windows: bool) -> str:
    """Return the path of a ``file:`` address, given the text after the colon; ``text`` is the address in messages."""
    address = urlsplit(rest, scheme="file")
    path = unquote(address.path, errors="surrogateescape")
    host = "" if address.netloc == "localhost" else address.netloc
    good = not host
    if windows:  # file:///C:/folder, file://server/share
        good, path = (True, f"//{host}{path}") if host else (path[2:3] == ":", path[1:])
    if not good or not address.path.startswith("/") or address.query or address.fragment:
        raise UsageError(
            "expected file:/// and a whole path, with %23 and %3F for # and ?", rule="store.url", where=text[:200]
        )
    return path


def url_of(path: Path) -> str:
    """Return the address of a path, which need not exist: from the root, links kept."""
    return address_of(path.absolute())


def address_of(path: PurePath) -> str:
    """Return the ``file:`` address of a whole path; of Windows' ``file:///C:/folder`` or ``file://server/share``."""
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
    """Whether the resolved absolute path ``folder`` lies on a network file system (any ``fuse.*`` counts as one)."""
    kind = filesystem(folder)
    return kind in NETWORK or kind.startswith("fuse.")


@lru_cache(maxsize=256)
def filesystem(folder: str) -> str:
    """Return the type of the file system that ``folder`` (resolved, absolute) lies on; "" if unknown."""
    try:
        table = MOUNTINFO.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""
    return _innermost(table, folder)


def _innermost(table: str, folder: str) -> str:
    """Return the type at the longest mount point above ``folder``; of equal ones the last, which hides the others."""
    best = -1
    kind = ""
    for line in table.splitlines():
        before, dash, after = line.partition(" - ")
        fields = before.split(" ")
        if not dash or len(fields) < 5:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4]).rstrip("/")
        if len(point) >= best and (folder == point or folder.startswith(point + "/")):
            best = len(point)
            kind = after.split(" ")[0]
    return kind


def tree(folder: str, prefix: str) -> Iterator[str]:
    """Yield ``prefix`` and the names of all that lies in a folder, at any depth, as ``Store.tree`` does."""
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
    """Whether it is a file, or a link to one."""
    try:
        return entry.is_file()
    except OSError:  # a link in a circle
        return False


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether it is a folder, or a link to one."""
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
        self.url = url_of(self._folder)
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

    def list(self, folder: str = "") -> Listing:
        """Return what lies directly in the folder, or in ``folder`` in it, in one pass: regular files and links to
        such, folders and links to such, and links that lead out of the store's folder.

        A snapshot of the Hugging Face Hub's cache is made of links into the blobs beside it, which are its own.
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
        """As ``Store.exists``, without a listing."""
        return os.path.isfile(self._folder / file_name(name, self.location))  # noqa: PTH113 - False for long names

    def identity(self, folder: str = "") -> Hashable:
        """As ``Store.identity``: where links lead in the end."""
        return os.path.realpath(self.local_path(folder))

    def tree(self, folder: str = "") -> Iterator[str]:
        """As ``Store.tree``; devices and links in a circle are named too."""
        return tree(str(self.local_path(folder)), f"{folder}/" if folder else "")

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
        where = str(self._folder / file_name(name, self.location))
        real = os.path.realpath(where)
        mode = self.io if self._asked != "auto" else _choose("auto", str(Path(real).parent))
        if mode == "pread":
            return PreadSource(open_regular(real, where), real, where)
        try:
            return MmapSource(open_regular(real, where), real, where)
        except ResourceError as error:
            if self._asked != "auto" or error.rule != "store.cannot-map":
                raise
            return PreadSource(open_regular(real, where), real, where)  # some file systems cannot map (ENODEV)

    def stat(self, name: str) -> Stamp:
        """Return the stamp of the open file, without mapping it; errors as ``open``."""
        where = str(self._folder / file_name(name, self.location))
        descriptor = open_regular(os.path.realpath(where), where)
        try:
            return stamp_of(descriptor)
        finally:
            os.close(descriptor)

    def local_path(self, name: str = "") -> Path:
        """Return the path of a file or folder of the store; errors as of a name in ``open``."""
        return self._folder / file_name(name, self.location) if name else self._folder

    def location_of(self, name: str = "") -> str:
        """Return the path as it was given."""
        return str(self._folder / name)

    def would_overwrite(self, names: Iterable[str], target: str, *, folder: bool) -> bool:
        """As ``Store.would_overwrite``; the name in a folder counts, and where it leads to if it is a link."""
        if not target.startswith("file:"):
            return False
        final = Path(os.path.realpath(path_of(target)))
        entries = [self.local_path(name) for name in names]
        files = {Path(os.path.realpath(entry)) for entry in entries}
        if folder:
            files |= {Path(os.path.realpath(entry.parent)) / entry.name for entry in entries}
        return final in files or (folder and any(final in file.parents for file in files))

    def contains_address(self, target: str) -> bool:
        """As ``Store.contains_address``, wherever links and ``..`` lead."""
        own = Path(os.path.realpath(self._folder))
        return target.startswith("file:") and Path(os.path.realpath(path_of(target))).is_relative_to(own)


class LocalTarget:
    """Creates files in an existing folder, and cuts what is there.

    ``late`` lets small pieces wait until there are more (``LocalSink``): for files that nobody else reads or writes
    before they are closed.
    """

    def __init__(self, folder: str | os.PathLike[str], *, late: bool = False) -> None:
        self._folder = Path(folder)
        self._late = late

    def store(self) -> LocalStore:
        """Return the folder as a store, whose files are read by calls."""
        return LocalStore(self._folder, "pread")

    def cut(self, sizes: Mapping[str, int]) -> None:
        """Cut the named files to these sizes, and remove all other files, and folders in which none of them lies."""
        kept = {parent for name in sizes for parent in Path(name).parents}
        try:
            for path in sorted(self._folder.rglob("*"), reverse=True):  # a folder comes after what lies in it
                name = path.relative_to(self._folder)
                if name.as_posix() in sizes:
                    os.truncate(path, sizes[name.as_posix()])
                elif not path.is_dir() or path.is_symlink():
                    system.remove(path)
                elif name not in kept:
                    path.rmdir()
        except OSError as error:
            raise write_error(error, str(self._folder)) from error

    def flush(self, names: Iterable[str]) -> None:
        """Wait until what this process wrote into these files is on disk."""
        for name in names:
            try:
                system.flush(self._folder / file_name(name, str(self._folder)))
            except OSError as error:
                raise write_error(error, str(self._folder)) from error

    def create(self, name: str) -> LocalSink:
        """Open ``name`` for writing, keeping bytes that are there; errors as ``LocalSink`` and ``store.escape``.

        A name such as ``tensors/a.npy`` makes the folder where there is none.
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


# Pieces of so many bytes wait for others, until there are so many.
_SMALL = 1 << 12
_LATE = 1 << 16


class LocalSink(DiskSink):
    """One file being written, by ``pwrite``; with ``late`` small pieces wait in memory, until ``flush`` at the latest.

    Raises
    ------
    ResourceError
        ``store.disk-full``, ``store.read-only``, ``store.file-too-large``, ``store.write-failed``.
    """

    def __init__(self, path: Path, *, late: bool = False) -> None:
        self.name = str(path)
        self._guard = threading.Lock()
        self._small = _SMALL if late else 0
        # bytes that wait, and where they belong
        self._late = bytearray()
        self._at = 0
        flags = system.open_flags("O_RDWR", "O_CREAT", "O_NOFOLLOW")
        try:
            self._descriptor = os.open(path, flags, 0o666)
        except OSError as error:
            raise write_error(error, self.name) from error

    def write_at(self, offset: int, data: Buffer) -> None:
        """Write all of ``data`` at ``offset``; small pieces, one behind the other, go to the file together."""
        view = flat(memoryview(data))
        with self._guard:
            if self._late and (offset != self._at + len(self._late) or len(self._late) >= _LATE):
                self._flush()
            if view.nbytes <= self._small:
                if not self._late:
                    self._at = offset
                self._late += view
                return
            self._flush()
        self._write(offset, view)

    def flush(self) -> None:
        """Write what waits to the file; errors as ``write_at``."""
        with self._guard:
            self._flush()

    def _flush(self) -> None:
        """Write what waits; called with the guard held."""
        if self._late:
            late = self._late
            self._late = bytearray()
            self._write(self._at, memoryview(late))

    def _write(self, offset: int, rest: memoryview) -> None:
        try:
            while rest.nbytes:
                count = system.write_at(self._descriptor, rest[:MAX_CALL], offset)
                offset += count
                rest = rest[count:]
        except OSError as error:
            raise write_error(error, self.name) from error

    def readinto(self, offset: int, out: memoryview) -> None:
        """Fill ``out`` with bytes that were written; ``store.short-read`` past the end."""
        self.flush()
        read_all(self._descriptor, offset, out, self.name)

    def truncate(self, size: int) -> None:
        """Cut or extend the file to ``size`` bytes."""
        self.flush()
        try:
            os.ftruncate(self._descriptor, size)
        except OSError as error:
            raise write_error(error, self.name) from error

    def scratch(self) -> BinaryIO:
        """Return an unnamed temporary file in the same folder."""
        return cast(BinaryIO, tempfile.TemporaryFile(dir=Path(self.name).parent))

    def close(self) -> None:
        """Close the file; a second call does nothing. Flushing to disk is left to whoever publishes."""
        if self._descriptor < 0:
            return
        try:
            self.flush()
        finally:
            descriptor = self._descriptor
            self._descriptor = -1
            try:
                os.close(descriptor)
            except OSError as error:  # NFS and quotas report a full disk only here
                raise write_error(error, self.name) from error

    def __del__(self) -> None:
        try:  # at the interpreter's end contextlib may be gone, as may os
            self.close()
        except Exception:
            return


def _roots(folder: Path) -> set[Path]:
    """Return the folders in which a store's files may lie: its own, or a cached snapshot's and that of its blobs."""
    root = Path(os.path.realpath(folder))
    return {root, root.parent.parent / "blobs"} if root.parent.name == "snapshots" else {root}


def _choose(io: str, folder: str) -> str:
    """Choose for a folder whose path is resolved."""
    if io != "auto":
        return io
    return "pread" if is_network(folder) else "mmap"
