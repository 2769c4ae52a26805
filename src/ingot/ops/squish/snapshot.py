"""What files were when a tier was made: cheap to compare while nobody touched them, exact when somebody did."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.core import checksums
from ingot.core.oserrors import read_error
from ingot.core.parallel import ordered

_CHUNK = 8 << 20


@dataclass(frozen=True, slots=True)
class FileState:
    """A file's size in bytes, its times of change in nanoseconds, and the CRC-32C of its content.

    ``ctime_ns`` cannot be set by a program: a file with equal size and both times equal was not written to.
    """

    size: int
    mtime_ns: int
    ctime_ns: int
    crc32c: str

    def untouched(self, stat: os.stat_result) -> bool:
        """Whether size and times are the same, so that the content is too."""
        return (self.size, self.mtime_ns, self.ctime_ns) == (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


Snapshot = Mapping[str, FileState]


def files_under(folder: Path, roots: Iterable[str]) -> list[str]:
    """Return the regular files at or under ``roots`` (relative to ``folder``), sorted, staging of writers left out."""
    files: list[str] = []
    for root in roots:
        start = folder / root
        if start.is_file():
            files.append(root)
        elif start.is_dir():
            for path, folders, names in os.walk(start):
                folders[:] = [name for name in folders if not name.startswith(".")]
                relative = Path(path).relative_to(folder)
                files += [str(relative / name) for name in names if not name.startswith(".")]
    return sorted(files)


def take(folder: Path, names: Iterable[str]) -> dict[str, FileState]:
    """Read the named files and return their states.

    Raises
    ------
    UsageError, ResourceError
        One of them cannot be read.
    """
    listed = list(names)
    return dict(zip(listed, ordered(lambda name: _state(folder / name), listed), strict=True))


def difference(folder: Path, snapshot: Snapshot, names: Iterable[str] | None = None) -> str | None:
    """Say in what the files differ from their snapshot; None if they are the same.

    Files that were touched are read and compared by content: a copied or re-downloaded directory stays valid.
    ``names`` are those that are there now, where files beside the snapshot's own would matter.
    """
    if names is not None:
        extra = sorted(set(names) - set(snapshot))
        if extra:
            return f"{extra[0]} is new"
    touched: list[str] = []
    for name, state in snapshot.items():
        try:
            found = (folder / name).stat()
        except OSError:
            return f"{name} is missing"
        if not stat.S_ISREG(found.st_mode) or found.st_size != state.size:
            return f"{name} has {found.st_size} bytes, expected {state.size}"
        if not state.untouched(found):
            touched.append(name)
    for name, found_state in take(folder, touched).items():
        if found_state.crc32c != snapshot[name].crc32c:
            return f"{name} has other content"
    return None


def to_json(snapshot: Snapshot) -> dict[str, list[Any]]:
    """Return the snapshot as JSON takes it."""
    return {name: [state.size, state.mtime_ns, state.ctime_ns, state.crc32c] for name, state in snapshot.items()}


def from_json(value: Any) -> dict[str, FileState] | None:
    """Return a snapshot that ``to_json`` wrote; None for anything else."""
    if not isinstance(value, dict):
        return None
    states: dict[str, FileState] = {}
    for name, row in value.items():
        inside = isinstance(name, str) and not Path(name).is_absolute() and ".." not in Path(name).parts
        if not inside or not isinstance(row, list) or [type(cell) for cell in row] != [int, int, int, str]:
            return None
        states[name] = FileState(*row)
    return states


def _state(path: Path) -> FileState:
    hasher, buffer = checksums.Crc32c(), bytearray(_CHUNK)
    try:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                hasher.update(memoryview(buffer)[:count])
            stat = os.fstat(file.fileno())
    except OSError as error:
        raise read_error(error, str(path)) from error
    return FileState(stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, hasher.text())
