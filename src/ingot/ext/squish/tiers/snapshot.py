"""Record the state of files when a tier is built, and compare files with it later.

Files are compared by size and times; if times differ, by a checksum of the content.
"""

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

    A program cannot set ``ctime_ns``, so a file with equal size and equal times was not changed.
    """

    size: int
    mtime_ns: int
    ctime_ns: int
    crc32c: str

    def untouched(self, stamp: Stamp) -> bool:
        """Return whether size and times are equal, which implies equal content."""
        return (self.size, self.mtime_ns, self.ctime_ns) == (stamp.size, stamp.mtime_ns, stamp.ctime_ns)


Snapshot = Mapping[str, FileState]


def files_under(store: Store, roots: Iterable[str]) -> list[str]:
    """Return the sorted names of the files at or under ``roots``, without hidden files, such as staged files."""
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
        A file cannot be read.
    """
    listed = list(names)
    return dict(zip(listed, ordered(lambda name: _state(store, name), listed), strict=True))


def difference(store: Store, snapshot: Snapshot, names: Iterable[str] | None = None) -> str | None:
    """Return a description of the first difference between files and their snapshot; None if there is none.

    Files whose times differ are read and compared by content, so a copied or downloaded directory stays valid. If
    ``names`` is given, it contains the names of the present files. A name that is not in the snapshot is then a
    difference too.
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
    for name, current in take(store, touched).items():
        if current.crc32c != snapshot[name].crc32c:
            return f"{name} has other content"
    return None


def to_json(snapshot: Snapshot) -> dict[str, list[Any]]:
    """Return the snapshot as data for JSON."""
    return {name: [state.size, state.mtime_ns, state.ctime_ns, state.crc32c] for name, state in snapshot.items()}


def from_json(value: Any) -> dict[str, FileState] | None:
    """Return the snapshot from data of ``to_json``; None for any other data."""
    if not isinstance(value, dict):
        return None
    states: dict[str, FileState] = {}
    for name, row in value.items():
        if not _inside(name) or not isinstance(row, list) or [type(cell) for cell in row] != [int, int, int, str]:
            return None
        states[name] = FileState(*row)
    return states


def _inside(name: object) -> bool:
    return isinstance(name, str) and not any(component in ("", ".", "..") for component in name.split("/"))


def _state(store: Store, name: str) -> FileState:
    source = store.open(name)
    try:
        hasher = checksums.Crc32c()
        buffer = memoryview(bytearray(min(_CHUNK, source.size)))
        for start in range(0, source.size, _CHUNK):
            chunk = buffer[: min(_CHUNK, source.size - start)]
            source.readinto(start, chunk)
            hasher.update(chunk)
        stamp = source.stamp if isinstance(source, StampedSource) else Stamp(source.size)
    finally:
        source.close()
    return FileState(stamp.size, stamp.mtime_ns, stamp.ctime_ns, hasher.text())
