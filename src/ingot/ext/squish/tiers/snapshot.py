"""What files were when a tier was made: cheap to compare while nobody touched them, exact when somebody did."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ingot.core.bytes import checksums
from ingot.core.runtime.parallel import ordered
from ingot.errors import IngotError
from ingot.model.bytesource import Stamp, StampedSource
from ingot.model.store import Store

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

    def untouched(self, stamp: Stamp) -> bool:
        """Whether size and times are the same, so that the content is too."""
        return (self.size, self.mtime_ns, self.ctime_ns) == (stamp.size, stamp.mtime_ns, stamp.ctime_ns)


Snapshot = Mapping[str, FileState]


def files_under(store: Store, roots: Iterable[str]) -> list[str]:
    """Return the files at or under ``roots``, names in a store, sorted; hidden ones, as writers stage in, left out."""
    top = store.list()
    names = list[str]()
    for root in roots:
        if root in top.files:
            names.append(root)
        elif root in top.folders:
            names += _within(store, root)
    return sorted(names)


def _within(store: Store, folder: str) -> Iterable[str]:
    listing = store.list(folder)
    yield from (f"{folder}/{name}" for name in listing.files if not name.startswith("."))
    for name in listing.folders:
        if not name.startswith(".") and name not in listing.outside:
            yield from _within(store, f"{folder}/{name}")


def take(store: Store, names: Iterable[str]) -> dict[str, FileState]:
    """Read the named files and return their states.

    Raises
    ------
    UsageError, ResourceError
        One of them cannot be read.
    """
    listed = list(names)
    return dict(zip(listed, ordered(lambda name: _state(store, name), listed), strict=True))


def difference(store: Store, snapshot: Snapshot, names: Iterable[str] | None = None) -> str | None:
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
            stamp = store.stat(name)
        except IngotError:
            return f"{name} is missing"
        if stamp.size != state.size:
            return f"{name} has {stamp.size} bytes, expected {state.size}"
        if not state.untouched(stamp):
            touched.append(name)
    for name, found in take(store, touched).items():
        if found.crc32c != snapshot[name].crc32c:
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
        if not _inside(name) or not isinstance(row, list) or [type(cell) for cell in row] != [int, int, int, str]:
            return None
        states[name] = FileState(*row)
    return states


def _inside(name: object) -> bool:
    return isinstance(name, str) and not any(piece in ("", ".", "..") for piece in name.split("/"))


def _state(store: Store, name: str) -> FileState:
    source = store.open(name)
    try:
        hasher, buffer = checksums.Crc32c(), memoryview(bytearray(min(_CHUNK, source.size)))
        for start in range(0, source.size, _CHUNK):
            piece = buffer[: min(_CHUNK, source.size - start)]
            source.readinto(start, piece)
            hasher.update(piece)
        stamp = source.stamp if isinstance(source, StampedSource) else Stamp(source.size)
    finally:
        source.close()
    return FileState(stamp.size, stamp.mtime_ns, stamp.ctime_ns, hasher.text())
