"""The one place where the operating system's refusals become Ingot's, with a rule and what to do."""

from __future__ import annotations

import errno

from ingot.core.files.system import is_in_use
from ingot.errors import IngotError, ResourceError, UsageError

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
    code, reason = error.errno, error.strerror or str(error)
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
    code, reason = error.errno, error.strerror or str(error)
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
