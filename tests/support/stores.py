"""Stores and targets that count requests or fail on purpose."""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from pathlib import Path

from ingot.errors import IngotError, IntegrityError, ResourceError
from ingot.model.bytesource import Buffer, ByteSource, Range, RangedSource, Sink, Target
from ingot.model.reading.ranges import coalesce, slice_ranges
from ingot.model.store import Listing, Store


class CountingStore(Store):
    """A store on another machine, as far as costs go: sources are not mapped, and requests are counted.

    ``requests`` are ranges that were read, after those close to each other were joined; ``journeys`` are reads, however
    many ranges each asked for at once; ``nbytes`` the bytes of all; ``opened`` and ``listed`` the names of files and
    folders, each time.

    Parameters
    ----------
    store : Store
        Where the bytes are.
    gap : int
        Bytes between two ranges up to which they are joined.
    """

    def __init__(self, store: Store, gap: int = 1 << 16) -> None:
        self._store = store
        self.location, self.gap = store.location, gap
        self.requests = self.journeys = self.nbytes = 0
        self.opened: builtins.list[str] = []
        self.listed: builtins.list[str] = []

    def list(self, folder: str = "") -> Listing:
        self.listed.append(folder)
        return self._store.list(folder)

    def open(self, name: str) -> ByteSource:
        self.opened.append(name)
        return _CountedSource(self, self._store.open(name))

    def count(self, ranges: Sequence[Range]) -> None:
        """Note one read of these ranges."""
        self.journeys += 1
        self.requests += len(ranges)
        self.nbytes += sum(length for _, length in ranges)


class _CountedSource(RangedSource):
    mapped = False

    def __init__(self, store: CountingStore, source: ByteSource) -> None:
        self._store, self._source = store, source
        self.name, self.size, self.gap = source.name, source.size, store.gap

    def view(self, offset: int, length: int) -> memoryview:
        self._store.count([(offset, length)])
        return memoryview(bytes(self._source.view(offset, length)))

    def readinto(self, offset: int, out: memoryview) -> None:
        self._store.count([(offset, out.nbytes)])
        self._source.readinto(offset, out)

    def ranges(self, ranges: Sequence[Range]) -> Sequence[memoryview]:
        joined = coalesce(ranges, self.gap)
        self._store.count(joined)
        return slice_ranges(ranges, {start: self._source.view(start, length) for start, length in joined})

    def changed(self) -> bool:
        return self._source.changed()

    def close(self) -> None:
        self._source.close()


class FaultyStore(Store):
    """A store whose sources go wrong at a chosen read (``view`` and ``readinto`` count alike, over all its sources).

    Parameters
    ----------
    store : Store
        The sound store behind it.
    fail_at : int
        Number of the first read that fails, from 0.
    fault : {"error", "shrank", "short-read", "corrupt"}
        Raise a ``ResourceError``; raise ``IntegrityError`` as a file that shrank or ended does; or flip one bit of
        what is read, silently, from then on.
    """

    def __init__(self, store: Store, fail_at: int, fault: str = "error") -> None:
        self._store = store
        self.location = store.location
        self.reads = 0
        self.fail_at = fail_at
        self.fault = fault

    def list(self, folder: str = "") -> Listing:
        return self._store.list(folder)

    def open(self, name: str) -> ByteSource:
        return _FaultySource(self, self._store.open(name))

    def check(self, name: str) -> bool:
        """Count a read; raise if it is to fail, tell whether it is to be corrupted."""
        self.reads += 1
        if self.reads <= self.fail_at:
            return False
        if self.fault == "error":
            raise ResourceError("cannot read: simulated", rule="store.read-failed", where=name)
        if self.fault in ("shrank", "short-read"):
            raise IntegrityError(f"store.{self.fault}", "simulated", where=name)
        return True


class _FaultySource:
    mapped = False

    def __init__(self, store: FaultyStore, source: ByteSource) -> None:
        self._store, self._source = store, source
        self.name, self.size = source.name, source.size

    def view(self, offset: int, length: int) -> memoryview:
        out = memoryview(bytearray(length))
        self.readinto(offset, out)
        return out

    def readinto(self, offset: int, out: memoryview) -> None:
        corrupt = self._store.check(self.name)
        self._source.readinto(offset, out)
        if corrupt and out.nbytes:
            out.cast("B")[out.nbytes // 2] ^= 1

    def changed(self) -> bool:
        return self._source.changed()

    def close(self) -> None:
        self._source.close()


class FullTarget:
    """A target that has room for ``room`` bytes; what would not fit raises ``ResourceError`` ``store.disk-full``."""

    def __init__(self, target: Target, room: int) -> None:
        self._target = target
        self.room = room

    def create(self, name: str) -> Sink:
        return _FullSink(self, self._target.create(name))


class _FullSink:
    def __init__(self, target: FullTarget, sink: Sink) -> None:
        self._target, self._sink = target, sink

    def write_at(self, offset: int, data: Buffer) -> None:
        self._target.room -= memoryview(data).nbytes
        if self._target.room < 0:
            raise ResourceError("the disk is full: simulated", rule="store.disk-full")
        self._sink.write_at(offset, data)

    def readinto(self, offset: int, out: memoryview) -> None:
        self._sink.readinto(offset, out)

    def truncate(self, size: int) -> None:
        self._sink.truncate(size)

    def close(self) -> None:
        self._sink.close()


def leftovers(folder: Path) -> list[str]:
    """Names of everything that staging left in a folder."""
    return sorted(path.name for path in folder.iterdir() if ".ingot-partial" in path.name)


def rule_of(error: BaseException) -> str | None:
    """The rule that an error names, None for one that is not Ingot's."""
    return error.rule if isinstance(error, IngotError) else None
