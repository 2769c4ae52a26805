"""The one place where the operating system's refusals become Ingot's, with a rule and what to do."""

from __future__ import annotations

import errno

from ingot.core.system import is_in_use
from ingot.errors import IngotError, ResourceError, UsageError

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_DENIED = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})


def write_error(error: OSError, where: str) -> IngotError:
    """Return what to raise when creating, writing or renaming ``where`` failed.

    Rules: ``store.disk-full`` (ENOSPC, EDQUOT), ``store.read-only`` (EROFS, EACCES, EPERM), ``store.file-too-large``
    (EFBIG), ``store.name-too-long``, on Windows ``store.in-use``, ``store.write-failed`` for the rest.
    """
    code, reason = error.errno, error.strerror or str(error)
    if is_in_use(error):
        return ResourceError(
            f"the file is open or mapped, in this process or another ({reason}): close what was opened from it, or "
            "choose another target",
            rule="store.in-use",
            where=where,
        )
    if code in _FULL:
        return ResourceError(
            f"the disk is full ({reason}): free some space or choose another disk", rule="store.disk-full", where=where
        )
    if code in _DENIED:
        return ResourceError(
            f"expected a place that can be written to; found: {reason}. Choose another or change its permissions",
            rule="store.read-only",
            where=where,
        )
    if code == errno.EFBIG:
        return ResourceError(
            f"the file system or a limit of this process forbids a file this large ({reason}): "
            "write smaller shards or choose another disk",
            rule="store.file-too-large",
            where=where,
        )
    if code == errno.ENAMETOOLONG:
        return UsageError("expected a shorter file name", rule="store.name-too-long", where=where)
    return ResourceError(f"cannot write: {reason}", rule="store.write-failed", where=where)


def read_error(error: OSError, where: str) -> IngotError:
    """Return what to raise when opening or reading ``where`` failed.

    Rules: ``store.missing``, ``store.denied``, ``store.name-too-long``, ``store.read-failed`` for the rest.
    """
    code, reason = error.errno, error.strerror or str(error)
    if code in (errno.ENOENT, errno.ENOTDIR):
        return UsageError("expected an existing file, found none", rule="store.missing", where=where)
    if code in (errno.EACCES, errno.EPERM):
        return ResourceError(f"expected a readable file; found: {reason}", rule="store.denied", where=where)
    if code == errno.ENAMETOOLONG:
        return UsageError("expected a shorter file name", rule="store.name-too-long", where=where)
    return ResourceError(f"cannot read: {reason}", rule="store.read-failed", where=where)
