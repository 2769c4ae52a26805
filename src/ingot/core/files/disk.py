"""How much room a disk has, asked before anything is written to it."""

from __future__ import annotations

import shutil
from pathlib import Path

from ingot.core.files import system
from ingot.core.runtime.memory import format_size
from ingot.errors import ResourceError


def free_disk(folder: Path) -> int | None:
    """Return the bytes that this user may still write into ``folder``; None where the file system does not tell."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None
    return usage.free if usage.total else None


def require_disk(nbytes: int, folder: Path, where: str) -> None:
    """Refuse what would not fit on the disk of ``folder``, before it is begun.

    Parameters
    ----------
    nbytes : int
        What will be written at the least, beside what is there already.
    folder : Path
        An existing folder.
    where : str
        The target, for the message.

    Raises
    ------
    ResourceError
        ``disk.guard``.
    """
    room = free_disk(folder)
    if room is not None and nbytes > room:
        raise ResourceError(
            f"expected room for {format_size(nbytes)} ({nbytes} bytes) on this disk, found {format_size(room)}: free "
            "some space or choose another disk",
            rule="disk.guard",
            where=where,
        )


def occupied(folder: Path) -> int:
    """Return the bytes that files in ``folder`` take on the disk already."""
    return sum(system.occupied(path.lstat()) for path in folder.rglob("*"))
