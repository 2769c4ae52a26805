"""What operating systems do differently with files: each such call is made here, with a branch for those without it.

Who opens, reads, renames or removes files says what is wanted, and never asks on which system it runs. Linux is what
the tests run on; for Windows they take away what it lacks and let calls fail as they do there
(``tests/unit/core/test_system.py``).
"""

from __future__ import annotations

import errno
import io
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
    end, pause = time.monotonic() + PATIENCE, 0.005
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
