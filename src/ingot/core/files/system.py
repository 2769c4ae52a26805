"""File operations that differ between operating systems, and the errors of reading and writing files.

All other modules call these functions, and never check on which system they run. The tests run on Linux; for Windows
they remove the functions that it lacks and let calls fail as they do on Windows (``tests/unit/system/test_system.py``).
"""

from __future__ import annotations

import ctypes
import errno
import io
import mmap
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ingot.core.runtime import native
from ingot.errors import IngotError, ResourceError, UsageError


def map_file(descriptor: int, offset: int, length: int, *, writable: bool = False) -> memoryview:
    """Map ``length`` bytes at ``offset`` of an open file, which may be closed afterwards.

    Parameters
    ----------
    descriptor, offset, length : int
        The range must be inside the file.
    writable : bool
        Whether to return copy-on-write memory (``MAP_PRIVATE``). Writing changes neither the file nor other mappings.

    Returns
    -------
    memoryview
        Unmapped when its last view is collected.

    Raises
    ------
    OSError
        The system cannot map this file, or has too many mappings.
    """
    if not length:  # an empty mapping does not exist
        return memoryview(bytearray() if writable else b"")
    before = offset % mmap.ALLOCATIONGRANULARITY
    pages = native.kernels.map_file(descriptor, offset - before, before + length, writable)
    return pages.data[before:]


# renameat2(2), linux/fs.h; renamex_np(2) of macOS, sys/stdio.h.
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_RENAME_SWAP = 2


def exchange(first: Path, second: Path) -> bool:
    """Exchange the names of two files or folders of one file system atomically.

    Returns False and changes nothing if the system or the file system does not support the exchange or refuses it.
    """
    if sys.platform not in ("linux", "darwin"):  # on Windows, CDLL(None) fails
        return False
    library: Any = ctypes.CDLL(None, use_errno=True)
    paths = os.fsencode(first), os.fsencode(second)
    status: int | None = None
    if sys.platform == "linux" and hasattr(library, "renameat2"):
        status = library.renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], ctypes.c_uint(_RENAME_EXCHANGE))
    elif sys.platform == "darwin" and hasattr(library, "renamex_np"):
        status = library.renamex_np(*paths, ctypes.c_uint(_RENAME_SWAP))
    return status == 0


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of a local file or folder, which need not exist.

    Raises ``UsageError`` ``store.path`` if it is not text, contains a NUL, or contains half of a pair of surrogates, as
    JSON may. Bytes that are not UTF-8 are given in the form of ``os.fsdecode``.
    """
    text = path if isinstance(path, str) else os.fspath(path) if isinstance(path, os.PathLike) else None
    if not isinstance(text, str) or "\0" in text or not _is_encodable(text):
        raise UsageError(f"expected a path, found {repr(path)[:200]}", rule="store.path")
    return Path(text)


def _is_encodable(text: str) -> bool:
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return True


WINDOWS = sys.platform == "win32"
"""Whether the system is Windows: it cannot open folders or replace open files, and has more invalid names."""

PATIENCE = 2.0
"""Seconds that renaming and removing wait on Windows for other programs to close a file.

Search indexes and virus scanners open new files for a moment.
"""

# winerror.h: ERROR_ACCESS_DENIED, ERROR_SHARING_VIOLATION, ERROR_LOCK_VIOLATION, ERROR_USER_MAPPED_FILE.
_IN_USE = (5, 32, 33, 1224)
_MAX_OPEN = 8192  # files; the limit of Microsoft's C library, which has no function that returns it
# learn.microsoft.com/windows/win32/fileio/naming-a-file
_FORBIDDEN = frozenset('<>:"|?*\\') | {chr(code) for code in range(32)}
_DEVICES = frozenset({"CON", "PRN", "AUX", "NUL", "CONIN$", "CONOUT$"}) | {
    f"{port}{digit}" for port in ("COM", "LPT") for digit in "0123456789¹²³"
}
# Without preadv, no other thread may move a descriptor's position between seeking and reading.
_POSITIONS = tuple(threading.Lock() for _ in range(64))


def open_flags(*names: str) -> int:
    """Return the flags of ``os.open`` with these names, plus ``O_BINARY`` and ``O_CLOEXEC``; skip missing ones.

    Windows lacks ``O_NOFOLLOW``, ``O_NONBLOCK`` and ``O_NOCTTY``; it opens no fifo or terminal by a file's path.
    """
    flags = getattr(os, "O_BINARY", 0)
    for name in ("O_CLOEXEC", *names):
        flags |= getattr(os, name, 0)
    return int(flags)


def read_at(descriptor: int, out: memoryview, offset: int) -> int:
    """Read bytes at an offset into ``out``; return their number, 0 at the end of the file. Thread-safe."""
    read: Callable[[int, list[memoryview], int], int] | None = getattr(os, "preadv", None)
    if read is not None:
        return read(descriptor, [out], offset)
    with _POSITIONS[descriptor % len(_POSITIONS)], io.FileIO(descriptor, "rb", closefd=False) as file:
        file.seek(offset)
        return file.readinto(out) or 0


def write_at(descriptor: int, data: memoryview, offset: int) -> int:
    """Write bytes at an offset; return the number of bytes written. Thread-safe."""
    write: Callable[[int, memoryview, int], int] | None = getattr(os, "pwrite", None)
    if write is not None:
        return write(descriptor, data, offset)
    with _POSITIONS[descriptor % len(_POSITIONS)]:
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.write(descriptor, data)


def prefetch(descriptor: int, offset: int, length: int) -> bool:
    """Ask the system to read a range of a file into its cache; return whether it has such a request (not on macOS)."""
    return _advise(descriptor, offset, length, "POSIX_FADV_WILLNEED")


def evict(descriptor: int, pages: memoryview, offset: int, length: int) -> bool:
    """Ask the system to drop the pages that lie entirely in a range of a file; return whether it has such a request.

    ``pages`` is the mapping of the file, empty if it is not mapped; its pages are released first, because the system
    keeps pages that a process has mapped.
    """
    start = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (offset + length) // mmap.PAGESIZE * mmap.PAGESIZE - start
    if length <= 0 or not hasattr(os, "posix_fadvise"):
        return hasattr(os, "posix_fadvise")
    if pages.nbytes:
        import numpy as np  # noqa: PLC0415 - options and --help do without it

        address = np.frombuffer(pages, np.uint8).ctypes.data + start
        advice: int = getattr(mmap, "MADV_DONTNEED")  # noqa: B009 - Windows has none, and no posix_fadvise either
        ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), advice)
    return _advise(descriptor, start, length, "POSIX_FADV_DONTNEED")


def _advise(descriptor: int, offset: int, length: int, advice: str) -> bool:
    call: Callable[[int, int, int, int], None] | None = getattr(os, "posix_fadvise", None)
    if call is None:
        return False
    try:
        call(descriptor, offset, length, getattr(os, advice))
    except OSError:  # a hint: a file system that has no pages to cache may refuse it
        return False
    return True


def flush(path: Path) -> None:
    """Flush a file's bytes, or a folder's entries, to disk (fsync).

    Windows flushes only writable files, and cannot open folders: the journal of NTFS protects their entries.
    """
    if WINDOWS and path.is_dir():
        return
    descriptor = os.open(path, open_flags("O_RDWR" if WINDOWS else "O_RDONLY"))
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace(source: Path, target: Path) -> None:
    """Rename a file; an existing target is replaced in one step."""
    _patiently(lambda: source.replace(target))


def rename(source: Path, target: Path) -> None:
    """Rename the folder ``source`` to ``target``."""
    _patiently(lambda: source.rename(target))


def remove(path: Path) -> None:
    """Remove a file or link; ignore a missing one."""
    _patiently(lambda: path.unlink(missing_ok=True))


def remove_tree(folder: Path) -> None:
    """Remove a folder with its content."""
    _patiently(lambda: shutil.rmtree(folder))


def remove_all(paths: Iterable[Path]) -> None:
    """Remove files, links (not their targets) and folders with their content; flush the folders that contained them.

    Missing paths are ignored.
    """
    parents = dict[Path, None]()
    for path in paths:
        parents[path.parent] = None
        if path.is_dir() and not path.is_symlink():
            remove_tree(path)
        else:
            remove(path)
    for folder in parents:
        if folder.is_dir():
            flush(folder)


def is_in_use(error: OSError) -> bool:
    """Return whether Windows refused a call because this or another process has the file open or mapped."""
    return getattr(error, "winerror", None) in _IN_USE


def _patiently(call: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE
    pause = 0.005
    while True:
        try:
            call()
        except OSError as error:
            if not is_in_use(error) or time.monotonic() >= end:
                raise
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        else:
            return


def is_name(name: str) -> bool:
    """Return whether a file of this system can have this name.

    On Windows, backslashes and colons have a meaning, ``NUL.txt`` is a device, and the system drops a dot or blank at
    the end.
    """
    if not WINDOWS:
        return True
    if name.endswith((".", " ")) or not _FORBIDDEN.isdisjoint(name):
        return False
    return name.partition(".")[0].rstrip(" ").upper() not in _DEVICES


def most_open() -> int | None:
    """Return the number of files that this process may have open; None for no limit."""
    try:
        import resource  # noqa: PLC0415 - Windows has none
    except ImportError:
        return _MAX_OPEN
    limits: Any = resource
    soft = int(limits.getrlimit(limits.RLIMIT_NOFILE)[0])
    return None if soft == limits.RLIM_INFINITY else soft


def peak_resident() -> int:
    """Return the highest resident set of this process so far in bytes, by the system's call."""
    try:
        import resource  # noqa: PLC0415 - Windows has none
    except ImportError:
        import psutil  # noqa: PLC0415 - only Windows needs it

        return int(psutil.Process().memory_info().peak_wset)
    usage: Any = resource
    peak = int(usage.getrusage(usage.RUSAGE_SELF).ru_maxrss)
    return peak if sys.platform == "darwin" else peak * 1024


def occupied(state: os.stat_result) -> int:
    """Return the number of bytes that a file occupies on disk; its size if the system does not count blocks."""
    blocks = getattr(state, "st_blocks", None)
    return state.st_size if blocks is None else min(state.st_size, int(blocks) * 512)


def after_fork(function: Callable[[], object]) -> None:
    """Register a function to be called in each forked child process; do nothing on systems without fork."""
    register: Any = getattr(os, "register_at_fork", None)
    if register is not None:
        register(after_in_child=function)


def own_group() -> dict[str, Any]:
    """Return arguments of ``subprocess.Popen`` that start a process which Ctrl-C at the terminal does not interrupt."""
    if WINDOWS:
        return {"creationflags": 0x200}  # CREATE_NEW_PROCESS_GROUP
    return {"process_group": 0}


def end_with_parent() -> None:
    """Have Linux kill this process as soon as the thread that started it ends; do nothing on other systems.

    The system kills the process even if it is stopped.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL


def user_id() -> int | None:
    """Return the effective user id of this process; None on Windows, where files have no modes."""
    get: Callable[[], int] | None = getattr(os, "geteuid", None)
    return None if get is None else get()


def is_reader_gone(error: OSError) -> bool:
    """Return whether writing to a pipe failed because its reader is closed; on Windows this is ``EINVAL``."""
    return isinstance(error, BrokenPipeError) or (WINDOWS and error.errno == errno.EINVAL)


_OPEN_FILES = (errno.EMFILE, errno.ENFILE)
_FULL = "store.disk-full", "the disk is full ({reason}): free some space or choose another disk"
_DENIED = (
    "store.read-only",
    "the target cannot be written to: {reason}; choose another or change its permissions",
)
_TOO_LARGE = (
    "store.file-too-large",
    "the file is larger than the file system or a limit of this process allows ({reason}): write smaller shards",
)
_WRITING = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EROFS: _DENIED,
    errno.EACCES: _DENIED,
    errno.EPERM: _DENIED,
    errno.EFBIG: _TOO_LARGE,
}


def write_error(error: OSError, location: str) -> IngotError:
    """Return the error to raise if creating, writing or renaming a file failed.

    Rules: ``store.disk-full`` (ENOSPC, EDQUOT), ``store.read-only`` (EROFS, EACCES, EPERM), ``store.file-too-large``
    (EFBIG), ``store.name-too-long``, ``store.open-files`` (EMFILE, ENFILE), ``store.in-use`` (Windows); otherwise
    ``store.write-failed``.
    """
    code = error.errno
    reason = error.strerror or str(error)
    if code in _OPEN_FILES:
        return open_files(location)
    if is_in_use(error):
        return ResourceError(
            f"the file is open or mapped, in this process or another ({reason}): close what was opened from it, or "
            "choose another target",
            rule="store.in-use",
            where=location,
        )
    if code == errno.ENAMETOOLONG:
        return UsageError("expected a shorter file name", rule="store.name-too-long", where=location)
    rule, message = _WRITING.get(code or 0, ("store.write-failed", "cannot write: {reason}"))
    return ResourceError(message.format(reason=reason), rule=rule, where=location)


def read_error(error: OSError, location: str) -> IngotError:
    """Return the error to raise if opening or reading a file failed.

    Rules: ``store.missing``, ``store.denied``, ``store.name-too-long``, ``store.open-files``; otherwise
    ``store.read-failed``.
    """
    code = error.errno
    reason = error.strerror or str(error)
    if code in _OPEN_FILES:
        return open_files(location)
    if code in (errno.ENOENT, errno.ENOTDIR):
        return UsageError("this file or folder does not exist", rule="store.missing", where=location)
    if code in (errno.EACCES, errno.EPERM):
        return ResourceError(f"the file cannot be read: {reason}", rule="store.denied", where=location)
    if code == errno.ENAMETOOLONG:
        return UsageError("expected a shorter file name", rule="store.name-too-long", where=location)
    return ResourceError(f"cannot read: {reason}", rule="store.read-failed", where=location)


def open_files(location: str) -> ResourceError:
    """Return the error for a process or system that has reached its limit of open files."""
    return ResourceError(
        "too many files are open: raise the limit (ulimit -n), or close some", rule="store.open-files", where=location
    )
