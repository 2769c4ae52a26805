"""Options of archiving and restoring. The command line imports this module at startup, so its imports are fast."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING

from ingot.artifacts.destination import MAX_RAM, PROGRESS, RESUME, THREADS
from ingot.core.options import about
from ingot.stores.location import AnyPath

if TYPE_CHECKING:
    from ingot.core.runtime.progress import ProgressCallback


@dataclass(frozen=True, slots=True)
class ArchiveOptions:
    """Options of archiving: the source and the archive."""

    src: AnyPath = field(
        metadata=about("Folder with all of its content, or file, to archive; a path or address.", argument=True)
    )
    out: AnyPath = field(metadata=about("Archive to write, such as model.zt.", "--out", "-o", metavar="FILE"))
    _: KW_ONLY
    against: AnyPath | None = field(
        default=None,
        metadata=about(
            "Another model, archive or artifact of a library: what it contains is not stored, and tensors "
            "may be stored as differences to it. Restoring needs it too.",
            metavar="MODEL",
        ),
    )
    overwrite: bool = field(default=False, metadata=about("Replace a file."))
    resume: bool = field(default=False, metadata=RESUME)
    max_ram: int | str | None = field(default=None, metadata=MAX_RAM)
    threads: int | None = field(default=None, metadata=THREADS)
    progress: ProgressCallback | None = field(default=None, metadata=PROGRESS)


@dataclass(frozen=True, slots=True)
class RestoreOptions:
    """Options of restoring: the archive and the folder."""

    src: AnyPath = field(metadata=about("Archive; a path or address.", argument=True, metavar="ARCHIVE"))
    out: AnyPath = field(metadata=about("Folder for the restored files.", "--out", "-o", metavar="FOLDER"))
    _: KW_ONLY
    only: Sequence[str] = field(
        default=(),
        metadata=about("Restore only files whose names match (a glob). Any number.", "--only", metavar="PATTERN"),
    )
    against: AnyPath | None = field(
        default=None,
        metadata=about(
            "The model that the archive was made against; by default the one of its name beside the archive.",
            metavar="MODEL",
        ),
    )
    overwrite: bool = field(default=False, metadata=about("Replace a folder that holds a checkpoint and nothing else."))
    resume: bool = field(default=False, metadata=RESUME)
    max_ram: int | str | None = field(default=None, metadata=MAX_RAM)
    threads: int | None = field(default=None, metadata=THREADS)
    progress: ProgressCallback | None = field(default=None, metadata=PROGRESS)
