"""Sources that read local files; a limited number of files is open at a time.

A checkpoint may have more files than a process may open. The most recently used files stay open. Another file is
reopened by its path when it is read, and is refused if it differs from the file opened first (``Stamp``).
"""

from __future__ import annotations

import errno
import itertools
import os
import stat
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, BinaryIO, cast

import numpy as np

from ingot.core.files import system
from ingot.core.files.system import map_file, read_error, write_error
from ingot.core.numeric.dtypes import require_inside
from ingot.errors import FormatError, IngotError, IntegrityError, ResourceError, UsageError
from ingot.model.bytesource import PagedSource, PrivateMapping, Stamp, StampedSource

# One read call moves at most 0x7ffff000 bytes on Linux and INT_MAX on macOS; below that, page-aligned.
MAX_CALL = 1 << 30

SMALL = 1 << 12
"""The largest range that is served from a ``ReadAhead``, and the largest gap between two such ranges, in bytes."""
WINDOW = 1 << 15
"""Size of the buffer of ``ReadAhead``, in bytes."""


def read_all(descriptor: int, offset: int, out: memoryview, location: str) -> None:
    """Read from an open file into ``out``, starting at byte ``offset``.

    Raises ``ResourceError`` ``store.read-failed``; ``IntegrityError`` ``store.short-read`` if the file ends early.
    """
    remaining = flat(out)
    while remaining.nbytes:
        try:
            count = system.read_at(descriptor, remaining[:MAX_CALL], offset)
        except OSError as error:
            raise read_error(error, location) from error
        if count == 0:
            raise IntegrityError(
                "store.short-read",
                f"expected {remaining.nbytes} more bytes at {offset}, found the end of the file",
                where=location,
            )
        offset += count
        remaining = remaining[count:]


class ReadAhead:
    """A buffer with bytes of a file from offset ``begin`` on, read before they were requested.

    Each byte is served once, in order; later requests read the file.
    """

    __slots__ = ("_begin", "_data", "_next")

    def __init__(self, begin: int, data: memoryview) -> None:
        self._begin = begin
        self._next = 0
        self._data = data

    def give(self, offset: int, out: memoryview) -> bool:
        """Fill ``out`` from the buffer; return False if bytes are outside the buffer or were served before."""
        start = offset - self._begin
        stop = start + out.nbytes
        if start < self._next or stop > self._data.nbytes:
            return False
        self._next = stop
        flat(out)[:] = self._data[start:stop]
        return True


def flat(data: memoryview) -> memoryview:
    """Return ``data`` as unsigned bytes in one dimension.

    The function exists because ``cast`` refuses memory of size 0.
    """
    return data.cast("B") if data.nbytes else memoryview(b"")


# Number of files held open for the next read: a quarter of the process's limit, within these bounds.
_MIN_OPEN = 4
_MAX_OPEN = 256
_NO_MORE_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)


class Handle:
    """A file descriptor, and the mapping if the file is mapped; closed when the last reference disappears."""

    __slots__ = ("descriptor", "pages")

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.pages = memoryview(b"")  # the mapping, if the file is mapped

    def __del__(self) -> None:
        try:  # at the interpreter's end os may be gone
            os.close(self.descriptor)
        except Exception:
            return


class OpenFiles:
    """Open handles by the key of their source, in order of last use; thread-safe.

    An evicted handle is closed when its last reference disappears, because another thread may be reading from it.
    """

    def __init__(self) -> None:
        self._handles: OrderedDict[int, Handle] = OrderedDict()
        self.renew_lock()

    def renew_lock(self) -> None:
        """Replace the lock in a forked child process: the thread that held the lock does not exist there."""
        self._lock = threading.RLock()  # the garbage collector may drop a source while its thread holds the lock

    def get(self, key: int, reopen: Callable[[], Handle]) -> Handle:
        """Return the handle of a source; ``reopen`` creates it if it was evicted."""
        with self._lock:
            handle = self._handles.get(key)
            if handle is not None:
                self._handles.move_to_end(key)
                return handle
        return self.keep(key, reopen())

    def keep(self, key: int, handle: Handle) -> Handle:
        """Store a handle and return it; if another thread stored a handle for ``key`` first, return that handle.

        If too many handles are stored, the least recently used ones are evicted.
        """
        limit = _most_open()
        evicted = []
        with self._lock:
            handle = self._handles.setdefault(key, handle)
            while len(self._handles) > limit:
                evicted.append(self._handles.popitem(last=False))
        return handle

    def drop(self, key: int) -> None:
        """Remove the handle of the source ``key``; it is closed when no other reference exists."""
        with self._lock:
            removed = self._handles.pop(key, None)
        del removed

    def clear(self) -> None:
        """Drop all handles; a file is closed when no read uses it any more."""
        with self._lock:
            removed = list(self._handles.values())
            self._handles.clear()
        del removed


_OPEN = OpenFiles()
_KEYS = itertools.count()
system.after_fork(_OPEN.renew_lock)


def _most_open() -> int:
    process_limit = system.most_open()
    return _MAX_OPEN if process_limit is None else min(_MAX_OPEN, max(_MIN_OPEN, process_limit // 4))


class PreadSource(StampedSource, PagedSource):
    """A file that is read by ``preadv``; ``view`` copies.

    A copy (``copy``, ``pickle``) reopens the file by its path. It raises ``IntegrityError`` ``store.changed`` if the
    path leads to another file by then. Reading is thread-safe, also while another thread calls ``close``.

    Parameters
    ----------
    descriptor : int
        An open regular file; the source closes it, also if the constructor raises an error.
    path : str
        The absolute path, with links resolved, by which the file is reopened.
    name : str
        The file's name in messages.
    """

    io = "pread"
    mapped = False
    _ahead: ReadAhead | None = None
    _end = 0  # end of the last small range read

    def __init__(self, descriptor: int, path: str, name: str) -> None:
        handle = Handle(descriptor)
        self._key: int | None = None
        self.name = name
        self.path = path
        self.stamp = stamp_of(descriptor)
        self.size = self.stamp.size
        self._links = os.fstat(descriptor).st_nlink
        self._prepare(handle)
        self._key = next(_KEYS)
        _OPEN.keep(self._key, handle)

    def view(self, offset: int, length: int) -> memoryview:
        """Return a new buffer with ``length`` bytes at ``offset``; raise the errors of ``readinto``."""
        handle = self._ready(offset, length)
        try:
            out = np.empty(length, np.uint8).data
        except MemoryError as error:
            raise ResourceError(f"no memory for {length} bytes", rule="store.no-memory", where=self.name) from error
        read_all(handle.descriptor, offset, out, self.name)
        return out

    def readinto(self, offset: int, out: memoryview) -> None:
        """Fill ``out`` by read calls.

        Raises ``IntegrityError``: ``store.shrank`` if the file has become shorter, ``store.short-read`` if it ends
        before ``out`` is full, ``store.changed`` if it was reopened and differs; ``UsageError`` ``store.closed`` after
        ``close``.
        """
        size = out.nbytes
        if 0 < size <= SMALL:
            ahead = self._ahead
            if ahead is not None and ahead.give(offset, out):
                return
            follows = 0 <= offset - self._end <= SMALL
            self._end = offset + size
            if follows and size <= self.size - offset:
                data = memoryview(bytearray(min(WINDOW, self.size - offset)))
                handle = self._ready(offset, data.nbytes)  # the reference keeps the file open
                read_all(handle.descriptor, offset, data, self.name)
                self._ahead = ReadAhead(offset, data)
                self._ahead.give(offset, out)
                return
        handle = self._ready(offset, size)
        read_all(handle.descriptor, offset, out, self.name)

    def prefetch(self, offset: int, length: int) -> bool:
        return system.prefetch(self._ready(offset, length).descriptor, offset, length)

    def evict(self, offset: int, length: int) -> bool:
        handle = self._ready(offset, length)
        return system.evict(handle.descriptor, handle.pages, offset, length)

    def changed(self) -> bool:
        """Return whether the file's stamp differs from the one at opening.

        A replaced or removed file counts as unchanged while it is open, and as changed if it must be reopened.
        """
        if self._key is None:
            return False
        try:
            handle = self._handle()  # the reference keeps the descriptor open
        except IngotError as error:
            if error.rule in ("store.changed", "store.missing", "store.not-a-file"):
                return True
            raise
        now = stamp_of(handle.descriptor)
        if os.fstat(handle.descriptor).st_nlink != self._links:  # a link was added or removed, which sets ctime
            now = now._replace(ctime_ns=self.stamp.ctime_ns)
        return now != self.stamp

    def close(self) -> None:
        """Close the file; views that were returned before stay valid. A second call does nothing."""
        key = self._key
        self._key = None
        self._ahead = None
        if key is not None:
            _OPEN.drop(key)

    def _handle(self) -> Handle:
        if self._key is None:
            raise UsageError("this file was closed", rule="store.closed", where=self.name)
        return _OPEN.get(self._key, self._reopened)

    def _reopened(self) -> Handle:
        handle = Handle(open_regular(self.path, self.name))
        if stamp_of(handle.descriptor) != self.stamp:
            raise IntegrityError(
                "store.changed",
                "the file was written to or replaced since it was opened; open the checkpoint again",
                where=self.name,
            )
        self._prepare(handle)
        return handle

    def _prepare(self, handle: Handle) -> None:
        """Prepare a newly opened handle for reads; a file that is not mapped needs no preparation."""

    def _ready(self, offset: int, length: int) -> Handle:
        """Return the handle of the file.

        Raises ``IntegrityError`` if the range is outside the file, or if the file is shorter than when it was opened.
        Without this check, reading mapped pages after the end of the file would end the process.
        """
        handle = self._handle()
        require_inside(offset, length, self.size, self.name)
        now = os.fstat(handle.descriptor).st_size
        if now < self.size:
            raise IntegrityError(
                "store.shrank", f"the file had {self.size} bytes when it was opened and has {now} now", where=self.name
            )
        return handle

    def __reduce__(self) -> tuple[Any, ...]:
        if self._key is None:
            raise UsageError("a file that was closed cannot be copied", rule="store.closed", where=self.name)
        return _reopen, (type(self), self.path, self.name, self.stamp)

    def __del__(self) -> None:
        try:  # at the interpreter's end other modules may be gone
            self.close()
        except Exception:
            return


class MmapSource(PreadSource, PrivateMapping):
    """A mapped file; ``view`` returns a read-only part of the mapping.

    Raises ``ResourceError`` ``store.cannot-map`` if the system cannot map the file.
    """

    io = "mmap"
    mapped = True

    def view(self, offset: int, length: int) -> memoryview:
        """Return the mapped bytes; raise the errors of ``readinto``.

        If the file shrinks after the check of its size, reading the bytes ends the process (SIGBUS). Open files that
        may shrink with ``io="pread"``.
        """
        handle = self._ready(offset, length)
        return handle.pages[offset : offset + length]

    def private(self, offset: int, length: int) -> memoryview:
        """Return the bytes as writable memory (copy on write); raise the errors of ``readinto``.

        Writing changes neither the file nor other views.
        """
        handle = self._ready(offset, length)
        try:
            return map_file(handle.descriptor, offset, length, writable=True)
        except OSError:  # too many mappings
            return PreadSource.view(self, offset, length)

    def _prepare(self, handle: Handle) -> None:
        try:
            handle.pages = map_file(handle.descriptor, 0, self.size)
        except OSError as error:
            raise ResourceError(
                f"cannot map this file ({error.strerror or error}): open it with io='pread'",
                rule="store.cannot-map",
                where=self.name,
            ) from error


class TemporarySource(PreadSource):
    """A file without a path, such as a temporary file; it stays open and cannot be copied."""

    def __init__(self, descriptor: int, name: str) -> None:
        self._open_handle: Handle | None = Handle(descriptor)
        self._key = None
        self.name = name
        self.path = ""
        self.stamp = stamp_of(descriptor)
        self.size = self.stamp.size

    def changed(self) -> bool:
        return False

    def close(self) -> None:
        self._open_handle = self._ahead = None

    def _handle(self) -> Handle:
        if self._open_handle is None:
            raise UsageError("this file was closed", rule="store.closed", where=self.name)
        return self._open_handle

    def __reduce__(self) -> tuple[Any, ...]:
        raise UsageError("a temporary file cannot be copied", rule="store.closed", where=self.name)


def temporary_source(fill: Callable[[BinaryIO], object]) -> TemporarySource:
    """Return an unnamed temporary file in ``$TMPDIR`` with the bytes that ``fill`` writes; closing it removes it.

    Raises ``ResourceError`` if the disk is full or not writable.
    """
    folder = tempfile.gettempdir()
    try:
        with tempfile.TemporaryFile(prefix="ingot-", dir=folder) as out:
            fill(cast(BinaryIO, out))
            out.flush()
            return TemporarySource(os.dup(out.fileno()), f"a temporary file in {folder}")
    except OSError as error:
        raise write_error(error, folder) from error


def _reopen(source_type: type[PreadSource], path: str, name: str, stamp: Stamp) -> PreadSource:
    """Return a copied or unpickled source; raise ``IntegrityError`` ``store.changed`` if the file differs."""
    source = source_type(open_regular(path, name), path, name)
    if source.stamp != stamp:
        raise IntegrityError(
            "store.changed",
            "the file was written to or replaced since the copied checkpoint was opened; open the checkpoint again",
            where=name,
        )
    return source


def stamp_of(descriptor: int) -> Stamp:
    """Return the stamp (``Stamp``) of the open file ``descriptor``."""
    status = os.fstat(descriptor)
    return Stamp(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_dev, status.st_ino)


def open_regular(real: str, location: str) -> int:
    """Open a regular file by its resolved path, and return the descriptor; never wait for a fifo or device.

    Raises ``FormatError`` ``store.not-a-file``, or the error that ``read_error`` returns.
    """
    try:
        mode = os.stat(real).st_mode  # noqa: PTH116 - a directory may have thousands of files
        if stat.S_ISREG(mode):
            descriptor = _open(real)
            mode = os.fstat(descriptor).st_mode
            if stat.S_ISREG(mode):
                return descriptor
            os.close(descriptor)
    except OSError as error:
        raise read_error(error, location) from error
    raise FormatError("store.not-a-file", f"expected a regular file, found {_file_type(mode)}", where=location)


def _open(real: str) -> int:
    # O_NONBLOCK: if a fifo has just replaced the file, open would wait for a writer.
    flags = system.open_flags("O_RDONLY", "O_NONBLOCK", "O_NOCTTY")
    try:
        return os.open(real, flags)
    except OSError as error:
        if error.errno not in _NO_MORE_DESCRIPTORS:
            raise
    _OPEN.clear()  # other code of the process uses all descriptors
    return os.open(real, flags)


def _file_type(mode: int) -> str:
    names = {
        stat.S_IFDIR: "a folder",
        stat.S_IFIFO: "a fifo",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
    }
    return names.get(stat.S_IFMT(mode), "something else")
