"""Locks of the system on open files, shared or exclusive; released when the file is closed or the process ends."""

from __future__ import annotations

import ctypes
from typing import Any

# Flags of LockFileEx (fileapi.h), and its error codes if another process has the lock (winerror.h).
_FAIL_AT_ONCE = 1
_EXCLUSIVE = 2
_LOCKED = (33, 997)  # ERROR_LOCK_VIOLATION, ERROR_IO_PENDING
# Windows prevents other processes from reading locked bytes: the locked byte is far past the end of any file.
_FAR = 0x7FFF_FFFF


class _Overlapped(ctypes.Structure):
    """OVERLAPPED of minwinbase.h, which contains the offset of the locked byte."""

    _fields_ = (
        ("internal", ctypes.c_size_t),
        ("internal_high", ctypes.c_size_t),
        ("offset", ctypes.c_uint32),
        ("offset_high", ctypes.c_uint32),
        ("event", ctypes.c_void_p),
    )


def lock(descriptor: int, *, exclusive: bool) -> None:
    """Lock an open file against other descriptors, without waiting.

    Raises ``BlockingIOError`` if another descriptor has a conflicting lock, and other subclasses of ``OSError`` if the
    file system has no locks.
    """
    try:
        import fcntl  # noqa: PLC0415 - Windows has none
    except ImportError:
        _lock_windows(descriptor, exclusive)
        return
    calls: Any = fcntl
    calls.flock(descriptor, (calls.LOCK_EX if exclusive else calls.LOCK_SH) | calls.LOCK_NB)


def _lock_windows(descriptor: int, exclusive: bool) -> None:
    import msvcrt  # noqa: PLC0415 - only Windows has it

    system: Any = ctypes
    files: Any = msvcrt
    library = system.WinDLL("kernel32", use_last_error=True)
    library.LockFileEx.argtypes = (
        ctypes.c_void_p,
        ctypes.c_uint32,
        ctypes.c_uint32,
        ctypes.c_uint32,
        ctypes.c_uint32,
        ctypes.POINTER(_Overlapped),
    )
    position = _Overlapped(0, 0, 0, _FAR, None)
    flags = _FAIL_AT_ONCE | (_EXCLUSIVE if exclusive else 0)
    if library.LockFileEx(files.get_osfhandle(descriptor), flags, 0, 1, 0, ctypes.byref(position)):
        return
    code = system.get_last_error()
    if code in _LOCKED:
        raise BlockingIOError(code, "another process has locked this file")
    raise system.WinError(code)
