"""Local files that are read: opened when their bytes are wanted, a limited number of them at a time.

A checkpoint may be thousands of files, more than a process may hold open. The last used ones stay open; another is
opened again by its path when it is read, and refused unless it is still the same file in the same state (``Stamp``).
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
from ingot.model.bytesource import PrivateMapping, Stamp, StampedSource

# One read call moves at most 0x7ffff000 bytes on Linux and INT_MAX on macOS; below that, page-aligned.
MAX_CALL = 1 << 30

SMALL = 1 << 12
"""The largest range that ``Ahead`` serves, and the largest gap between two such ranges, in bytes."""
WINDOW = 1 << 15
"""Bytes that ``Ahead`` reads in one call."""


def read_all(descriptor: int, offset: int, out: memoryview, where: str) -> None:
    """Fill ``out`` from an open file; ``store.read-failed``, and ``store.short-read`` past the end."""
    rest = flat(out)
    while rest.nbytes:
        try:
            count = system.read_at(descriptor, rest[:MAX_CALL], offset)
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


class Ahead:
    """Bytes of a file from ``begin`` on that were read before they were requested.

    Each byte is served once, in order; later requests read the file.
    """

    __slots__ = ("_begin", "_data", "_next")

    def __init__(self, begin: int, data: memoryview) -> None:
        self._begin = begin
        self._next = 0
        self._data = data

    def give(self, offset: int, out: memoryview) -> bool:
        """Fill ``out``; return False if the buffer lacks some of its bytes, or served some before."""
        start = offset - self._begin
        stop = start + out.nbytes
        if start < self._next or stop > self._data.nbytes:
            return False
        self._next = stop
        flat(out)[:] = self._data[start:stop]
        return True


def flat(data: memoryview) -> memoryview:
    """Return ``data`` as unsigned bytes in one dimension; it may be empty in any shape, which ``cast`` refuses."""
    return data.cast("B") if data.nbytes else memoryview(b"")


# Files held open for the next read: a quarter of what the process may open, within these bounds.
_LEAST = 4
_MOST = 256
_NO_MORE_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)


class Handle:
    """One descriptor, with the mapping of its whole file where there is one; closed when nobody refers to it."""

    __slots__ = ("descriptor", "pages")

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.pages = memoryview(b"")  # of a mapped file

    def __del__(self) -> None:
        try:  # at the interpreter's end os may be gone
            os.close(self.descriptor)
        except Exception:
            return


class OpenFiles:
    """The handles that are kept for the next read, the last used at the end. Thread-safe.

    A handle that is let go is closed by its last user: another thread may be reading from it.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[int, Handle] = OrderedDict()
        self.renew_lock()

    def renew_lock(self) -> None:
        """Forget who held the lock: in a forked child that thread does not exist."""
        self._lock = threading.RLock()  # a source may be collected, and dropped, while its thread is in here

    def get(self, key: int, reopen: Callable[[], Handle]) -> Handle:
        """Return the handle of a source; ``reopen`` makes it where it was let go."""
        with self._lock:
            handle = self._kept.get(key)
            if handle is not None:
                self._kept.move_to_end(key)
                return handle
        return self.keep(key, reopen())

    def keep(self, key: int, handle: Handle) -> Handle:
        """Keep a handle, unless another thread was first, and let go of the ones that were not used for longest."""
        most = _most_open()
        gone = []
        with self._lock:
            handle = self._kept.setdefault(key, handle)
            while len(self._kept) > most:
                gone.append(self._kept.popitem(last=False))
        return handle

    def drop(self, key: int) -> None:
        """Let go of a source's handle."""
        with self._lock:
            gone = self._kept.pop(key, None)
        del gone

    def clear(self) -> None:
        """Let go of all handles."""
        with self._lock:
            gone = list(self._kept.values())
            self._kept.clear()
        del gone


_OPEN = OpenFiles()
_KEYS = itertools.count()
system.after_fork(_OPEN.renew_lock)


def _most_open() -> int:
    most = system.most_open()
    return _MOST if most is None else min(_MOST, max(_LEAST, most // 4))


class PreadSource(StampedSource):
    """A file that is read by ``preadv``; ``view`` copies.

    A copy (``copy``, ``pickle``) opens the file again by its path, and is refused with ``store.changed`` where that is
    another file now. Reading is thread-safe, beside ``close`` too.

    Parameters
    ----------
    descriptor : int
        An open regular file; closed by the source, also where this raises.
    path : str
        Absolute, without links: where the file is opened again.
    name : str
        For messages.
    """

    io = "pread"
    mapped = False
    _ahead: Ahead | None = None
    _end = 0  # of the last small range that was read

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
        """Return a fresh buffer with ``length`` bytes at ``offset``; errors as ``readinto``."""
        handle = self._ready(offset, length)
        try:
            out = np.empty(length, np.uint8).data
        except MemoryError as error:
            raise ResourceError(f"no memory for {length} bytes", rule="store.no-memory", where=self.name) from error
        read_all(handle.descriptor, offset, out, self.name)
        return out

    def readinto(self, offset: int, out: memoryview) -> None:
        """Fill ``out`` by read calls.

        Raises ``IntegrityError``: ``store.shrank`` where the file has become shorter, ``store.short-read`` where it
        ends before ``out`` is full, ``store.changed`` where it had to be opened again and is another; ``UsageError``
        ``store.closed`` after ``close``.
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
                handle = self._ready(offset, data.nbytes)  # held: else another thread may close the file
                read_all(handle.descriptor, offset, data, self.name)
                self._ahead = Ahead(offset, data)
                self._ahead.give(offset, out)
                return
        handle = self._ready(offset, size)
        read_all(handle.descriptor, offset, out, self.name)

    def changed(self) -> bool:
        """Whether the file was written to since it was opened, as far as its stamp tells.

        One that was replaced or removed and is still open is as it was; one that would have to be opened again is not.
        """
        if self._key is None:
            return False
        try:
            handle = self._handle()  # held for as long as its number is used
        except IngotError as error:
            if error.rule in ("store.changed", "store.missing", "store.not-a-file"):
                return True
            raise
        now = stamp_of(handle.descriptor)
        if os.fstat(handle.descriptor).st_nlink != self._links:  # a name came or went, which sets ctime
            now = now._replace(ctime_ns=self.stamp.ctime_ns)
        return now != self.stamp

    def close(self) -> None:
        """Let go of the file; views handed out before stay valid. A second call does nothing."""
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
                "expected the file as it was when it was opened first, found one that was written to or replaced "
                "since; open the checkpoint again",
                where=self.name,
            )
        self._prepare(handle)
        return handle

    def _prepare(self, handle: Handle) -> None:
        """Nothing to do for read calls."""

    def _ready(self, offset: int, length: int) -> Handle:
        """Refuse a range outside the file, and a file that has shrunk: its mapped pages would fault."""
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
        return _copied, (type(self), self.path, self.name, self.stamp)

    def __del__(self) -> None:
        try:  # at the interpreter's end other modules may be gone
            self.close()
        except Exception:
            return


class MmapSource(PreadSource, PrivateMapping):
    """A mapped file; ``view`` is the mapping itself, read-only.

    Raises ``ResourceError`` ``store.cannot-map`` where the system cannot map the file.
    """

    io = "mmap"
    mapped = True

    def view(self, offset: int, length: int) -> memoryview:
        """Return the mapped bytes; errors as ``readinto``.

        A file that shrinks after this check and before the bytes are touched still ends the process (SIGBUS): whoever
        expects that opens with ``io="pread"``.
        """
        handle = self._ready(offset, length)
        return handle.pages[offset : offset + length]

    def private(self, offset: int, length: int) -> memoryview:
        """Return the bytes as writable memory of the caller's own; errors as ``readinto``.

        Pages are the file's until they are written to, and what is written reaches neither the file nor other views.
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


class UnnamedSource(PreadSource):
    """A file that no path leads to any more, such as a temporary one: it stays open, and cannot be copied."""

    def __init__(self, descriptor: int, name: str) -> None:
        self._held: Handle | None = Handle(descriptor)
        self._key = None
        self.name = name
        self.path = ""
        self.stamp = stamp_of(descriptor)
        self.size = self.stamp.size

    def changed(self) -> bool:
        return False

    def close(self) -> None:
        self._held = self._ahead = None

    def _handle(self) -> Handle:
        if self._held is None:
            raise UsageError("this file was closed", rule="store.closed", where=self.name)
        return self._held

    def __reduce__(self) -> tuple[Any, ...]:
        raise UsageError("a temporary file cannot be copied", rule="store.closed", where=self.name)


def unnamed(fill: Callable[[BinaryIO], object]) -> UnnamedSource:
    """Return what ``fill`` writes as an unnamed temporary file (in ``$TMPDIR``), which goes when it is closed.

    Raises ``ResourceError``: the disk is full, or not writable.
    """
    folder = tempfile.gettempdir()
    try:
        with tempfile.TemporaryFile(prefix="ingot-", dir=folder) as out:
            fill(cast(BinaryIO, out))
            out.flush()
            return UnnamedSource(os.dup(out.fileno()), f"a temporary file in {folder}")
    except OSError as error:
        raise write_error(error, folder) from error


def _copied(kind: type[PreadSource], path: str, name: str, stamp: Stamp) -> PreadSource:
    """Open a source again in another place or process."""
    source = kind(open_regular(path, name), path, name)
    if source.stamp != stamp:
        raise IntegrityError(
            "store.changed",
            "expected the file that the copied checkpoint was opened from, found one that was written to or replaced "
            "since; open the checkpoint again",
            where=name,
        )
    return source


def stamp_of(descriptor: int) -> Stamp:
    """Return the stamp of an open file."""
    status = os.fstat(descriptor)
    return Stamp(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_dev, status.st_ino)


def open_regular(real: str, where: str) -> int:
    """Open a regular file by its resolved path, without ever waiting for a fifo or device; return the descriptor.

    Raises ``FormatError`` ``store.not-a-file``; ``UsageError`` or ``ResourceError`` as ``read_error``.
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
        raise read_error(error, where) from error
    raise FormatError("store.not-a-file", f"expected a regular file, found {_kind(mode)}", where=where)


def _open(real: str) -> int:
    # O_NONBLOCK: were the file replaced by a fifo at this moment, open would wait for a writer.
    flags = system.open_flags("O_RDONLY", "O_NONBLOCK", "O_NOCTTY")
    try:
        return os.open(real, flags)
    except OSError as error:
        if error.errno not in _NO_MORE_DESCRIPTORS:
            raise
    _OPEN.clear()  # somebody else has taken what we thought free
    return os.open(real, flags)


def _kind(mode: int) -> str:
    kinds = {
        stat.S_IFDIR: "a folder",
        stat.S_IFIFO: "a fifo",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
    }
    return kinds.get(stat.S_IFMT(mode), "something else")
