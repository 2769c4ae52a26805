"""What operating systems do differently with files: each such call is made here, with a branch for those without it.

Who opens, reads, renames or removes files says what is wanted, and never asks on which system it runs. Linux is what
the tests run on; for Windows they take away what it lacks and let calls fail as they do there
(``tests/unit/core/test_system.py``).
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ingot.core.runtime import native
from ingot.errors import IngotError, ResourceError, UsageError


def map_file(descriptor: int, offset: int, length: int, *, writable: bool = False) -> memoryview:
    """Map ``length`` bytes at ``offset`` of an open file, which may be closed afterwards.

    Parameters
    ----------
    descriptor, offset, length : int
        The range lies inside the file.
    writable : bool
        Copy-on-write memory (``MAP_PRIVATE``): what is written there neither reaches the file nor another mapping.

    Returns
    -------
    memoryview
        Unmapped when its last view is gone.

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


def exchange(first: Path, other: Path) -> bool:
    """Exchange the names of two files or folders of one file system atomically.

    Returns False, with nothing changed, if the system or the file system does not support the exchange or refuses it.
    """
    if sys.platform not in ("linux", "darwin"):  # Windows loads no library without a name either
        return False
    library: Any = ctypes.CDLL(None, use_errno=True)
    paths = os.fsencode(first), os.fsencode(other)
    done: int | None = None
    if sys.platform == "linux" and hasattr(library, "renameat2"):
        done = library.renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], ctypes.c_uint(_RENAME_EXCHANGE))
    elif sys.platform == "darwin" and hasattr(library, "renamex_np"):
        done = library.renamex_np(*paths, ctypes.c_uint(_RENAME_SWAP))
    return done == 0


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of a local file or folder, which need not exist.

    Raises ``UsageError`` ``store.path`` for what the system cannot name a file by: no text, text with a NUL, or half of
    a pair of surrogates, as JSON may have it. Bytes that are not UTF-8 are what ``os.fsdecode`` makes of them.
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
"""Whether folders cannot be opened, open files cannot be replaced, and names have Windows' rules."""

PATIENCE = 2.0
"""Seconds that renaming and removing wait, on Windows, for others to close a file: search indexes and virus scanners
open every new one for a moment."""

# winerror.h: ERROR_ACCESS_DENIED, ERROR_SHARING_VIOLATION, ERROR_LOCK_VIOLATION, ERROR_USER_MAPPED_FILE.
_IN_USE = (5, 32, 33, 1224)
_MOST_OPEN = 8192  # of Microsoft's C library, which has no limit that could be asked for
# learn.microsoft.com/windows/win32/fileio/naming-a-file
_FORBIDDEN = frozenset('<>:"|?*\\') | {chr(code) for code in range(32)}
_DEVICES = frozenset({"CON", "PRN", "AUX", "NUL", "CONIN$", "CONOUT$"}) | {
    f"{port}{digit}" for port in ("COM", "LPT") for digit in "0123456789¹²³"
}
# Where there is no reading at an offset, nobody else may move a descriptor's position between seeking and reading.
_POSITIONS = tuple(threading.Lock() for _ in range(64))


def open_flags(*names: str) -> int:
    """Return the flags of ``os.open`` of these names, as far as this system has them, and that bytes stay as they are.

    Windows has no ``O_NOFOLLOW``, ``O_NONBLOCK``, ``O_NOCTTY``: it opens no fifo or terminal by the path of a file.
    """
    flags = getattr(os, "O_BINARY", 0)
    for name in ("O_CLOEXEC", *names):
        flags |= getattr(os, name, 0)
    return int(flags)


def read_at(descriptor: int, out: memoryview, offset: int) -> int:
    """Read bytes at an offset into ``out``; return how many, 0 at the end. From several threads at once."""
    read: Callable[[int, list[memoryview], int], int] | None = getattr(os, "preadv", None)
    if read is not None:
        return read(descriptor, [out], offset)
    with _POSITIONS[descriptor % len(_POSITIONS)], io.FileIO(descriptor, "rb", closefd=False) as file:
        file.seek(offset)
        return file.readinto(out) or 0


def write_at(descriptor: int, data: memoryview, offset: int) -> int:
    """Write bytes at an offset; return how many were written. From several threads at once."""
    write: Callable[[int, memoryview, int], int] | None = getattr(os, "pwrite", None)
    if write is not None:
        return write(descriptor, data, offset)
    with _POSITIONS[descriptor % len(_POSITIONS)]:
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.write(descriptor, data)


def flush(path: Path) -> None:
    """Have a file's bytes, or a folder's entries, on disk before going on (fsync).

    Windows flushes only what may be written to, and cannot open folders: NTFS keeps their entries by its own journal.
    """
    if WINDOWS and path.is_dir():
        return
    descriptor = os.open(path, open_flags("O_RDWR" if WINDOWS else "O_RDONLY"))
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace(source: Path, target: Path) -> None:
    """Give a file the name of another, which is replaced in one step, or a name that is free."""
    _patiently(lambda: source.replace(target))


def rename(source: Path, target: Path) -> None:
    """Give a folder another name."""
    _patiently(lambda: source.rename(target))


def remove(path: Path) -> None:
    """Remove a file or link; nothing where there is none."""
    _patiently(lambda: path.unlink(missing_ok=True))


def remove_tree(folder: Path) -> None:
    """Remove a folder with all in it."""
    _patiently(lambda: shutil.rmtree(folder))


def is_in_use(error: OSError) -> bool:
    """Whether Windows refused because somebody, this process perhaps, has the file open or mapped."""
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


def is_name(piece: str) -> bool:
    """Whether a file can have this name here, and it names nothing else.

    On Windows backslashes and colons lead elsewhere, ``NUL.txt`` is a device, and a dot or blank at the end is dropped.
    """
    if not WINDOWS:
        return True
    if piece.endswith((".", " ")) or not _FORBIDDEN.isdisjoint(piece):
        return False
    return piece.partition(".")[0].rstrip(" ").upper() not in _DEVICES


def most_open() -> int | None:
    """Return how many files this process may have open; None for any number."""
    try:
        import resource  # noqa: PLC0415 - Windows has none
    except ImportError:
        return _MOST_OPEN
    limits: Any = resource
    soft = int(limits.getrlimit(limits.RLIMIT_NOFILE)[0])
    return None if soft == limits.RLIM_INFINITY else soft


def peak_resident() -> int:
    """Return the highest resident set of this process so far in bytes, as the system's own call tells it."""
    try:
        import resource  # noqa: PLC0415 - Windows has none
    except ImportError:
        import psutil  # noqa: PLC0415 - of which most calls have no need

        return int(psutil.Process().memory_info().peak_wset)
    usage: Any = resource
    peak = int(usage.getrusage(usage.RUSAGE_SELF).ru_maxrss)
    return peak if sys.platform == "darwin" else peak * 1024


def occupied(state: os.stat_result) -> int:
    """Return the bytes that a file takes on the disk; its size where the system does not tell more."""
    blocks = getattr(state, "st_blocks", None)
    return state.st_size if blocks is None else min(state.st_size, int(blocks) * 512)


def after_fork(function: Callable[[], object]) -> None:
    """Have a function called in every forked child, where processes fork."""
    register: Any = getattr(os, "register_at_fork", None)
    if register is not None:
        register(after_in_child=function)


def own_group() -> dict[str, Any]:
    """Return what makes ``subprocess.Popen`` start a process that Ctrl-C at the terminal does not reach."""
    if WINDOWS:
        return {"creationflags": 0x200}  # CREATE_NEW_PROCESS_GROUP
    return {"process_group": 0}


def end_with_parent() -> None:
    """Have the system kill this process as soon as the thread that started it ends, on Linux; elsewhere do nothing.

    The system does so even if this process is stopped.
    """
    if sys.platform == "linux":
        import ctypes  # noqa: PLC0415 - of which only workers have need

        ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL


def user_id() -> int | None:
    """Return the id of the user whose rights this process has; None on Windows, where files have no modes."""
    get: Callable[[], int] | None = getattr(os, "geteuid", None)
    return None if get is None else get()


def is_reader_gone(error: OSError) -> bool:
    """Whether writing to a pipe failed as nobody reads it any more; Windows calls that an invalid argument."""
    return isinstance(error, BrokenPipeError) or (WINDOWS and error.errno == errno.EINVAL)


_OPEN_FILES = (errno.EMFILE, errno.ENFILE)
_FULL = "store.disk-full", "the disk is full ({reason}): free some space or choose another disk"
_DENIED = (
    "store.read-only",
    "expected a place that can be written to; found: {reason}. Choose another or change its permissions",
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


def write_error(error: OSError, where: str) -> IngotError:
    """Return what to raise when creating, writing or renaming ``where`` failed.

    Rules: ``store.disk-full`` (ENOSPC, EDQUOT), ``store.read-only`` (EROFS, EACCES, EPERM), ``store.file-too-large``
    (EFBIG), ``store.name-too-long``, ``store.open-files`` (EMFILE, ENFILE), on Windows ``store.in-use``,
    ``store.write-failed`` for the rest.
    """
    code = error.errno
    reason = error.strerror or str(error)
    if code in _OPEN_FILES:
        return open_files(where)
    if is_in_use(error):
        return ResourceError(
            f"the file is open or mapped, in this process or another ({reason}): close what was opened from it, or "
            "choose another target",
            rule="store.in-use",
            where=where,
        )
    if code == errno.ENAMETOOLONG:
        return UsageError("expected a shorter file name", rule="store.name-too-long", where=where)
    rule, message = _WRITING.get(code or 0, ("store.write-failed", "cannot write: {reason}"))
    return ResourceError(message.format(reason=reason), rule=rule, where=where)


def read_error(error: OSError, where: str) -> IngotError:
    """Return what to raise when opening or reading ``where`` failed.

    Rules: ``store.missing``, ``store.denied``, ``store.name-too-long``, ``store.open-files``, ``store.read-failed`` for
    the rest.
    """
    code = error.errno
    reason = error.strerror or str(error)
    if code in _OPEN_FILES:
        return open_files(where)
    if code in (errno.ENOENT, errno.ENOTDIR):
        return UsageError("expected an existing file, found none", rule="store.missing", where=where)
    if code in (errno.EACCES, errno.EPERM):
        return ResourceError(f"expected a readable file; found: {reason}", rule="store.denied", where=where)
    if code == errno.ENAMETOOLONG:
        return UsageError("expected a shorter file name", rule="store.name-too-long", where=where)
    return ResourceError(f"cannot read: {reason}", rule="store.read-failed", where=where)


def open_files(where: str) -> ResourceError:
    """Return the error for a process, or a system, that may open no further file."""
    return ResourceError(
        "too many files are open: raise the limit (ulimit -n), or close some", rule="store.open-files", where=where
    )
