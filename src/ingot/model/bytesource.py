"""Byte sources and sinks: stores open them, formats read and write them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, BinaryIO, NamedTuple, Protocol

from ingot.core.numeric.dtypes import require_inside

Buffer = bytes | bytearray | memoryview


class Stamp(NamedTuple):
    """The state of a file, taken from the open file. If two stamps are equal, the bytes are assumed to be equal.

    In a file system, programs can set ``mtime_ns`` back, but not ``ctime_ns``. ``device`` and ``inode`` distinguish a
    file from a replacement. In other stores, ``etag`` identifies the version of the file. In JSON, a stamp is a list of
    its fields in their order; ``Stamp(*values)`` restores it.
    """

    size: int
    mtime_ns: int = 0
    ctime_ns: int = 0
    device: int = 0
    inode: int = 0
    etag: str = ""

    @property
    def is_strong(self) -> bool:
        """Whether ``etag`` is a strong validator: equal tags prove equal bytes (RFC 9110, 8.8.1)."""
        return bool(self.etag) and not self.etag.startswith("W/")


class ByteSource(Protocol):
    """Random access to bytes that do not change.

    ``size`` is in bytes. If ``mapped`` is set, ``view`` copies nothing. ``copy`` and ``pickle`` create a source of the
    same bytes, or raise an error.
    """

    name: str
    size: int
    mapped: bool

    def view(self, offset: int, length: int) -> memoryview:
        """Return ``length`` bytes at ``offset``: a read-only view of the mapping if there is one, else a new copy.

        Raises ``IntegrityError`` if the source has become shorter since it was opened.
        """
        ...

    def readinto(self, offset: int, out: memoryview) -> None:
        """Fill ``out`` (writable, bytes) from ``offset`` by a read call; never accesses mapped memory."""
        ...

    def changed(self) -> bool:
        """Return whether the file was written to since the source was opened; compares stamps and reads no bytes."""
        ...

    def close(self) -> None: ...


class PagedSource(ABC):
    """A base class of sources that are files of this machine, whose pages the system caches."""

    @abstractmethod
    def prefetch(self, offset: int, length: int) -> bool:
        """Ask the system to read a range into its cache; return False if the system does not support this request."""

    @abstractmethod
    def evict(self, offset: int, length: int) -> bool:
        """Ask the system to drop the pages that lie entirely in a range from its cache.

        Returns False if the system does not support this request.
        """


class DerivedSource:
    """A base class of sources that compute their bytes from other bytes when they are read.

    The methods of this class suit a source that needs no memory and reads no unchecked parts. ``integers`` is the
    inclusive range of the integer values if the range is known before the values are computed, else None.
    """

    integers: tuple[int, int] | None = None

    def working_bytes(self) -> int:
        """Return the number of bytes of memory that the source needs while it is read."""
        return 0

    def computing_bytes(self) -> int:
        """Return the number of bytes of memory that the first read needs to compute the full tensor.

        Sources compute one tensor at a time, so these numbers are not added.
        """
        return 0

    def memory_hint(self) -> str:
        """Return advice for error messages: how the user can lower ``computing_bytes``."""
        return "convert it on a machine with more memory"

    def verify_sources(self) -> None:
        """Compare the digests of the parts from which the bytes are computed, except digests that ranged reads compare.

        Raises ``IntegrityError`` if a digest differs.
        """


class StampedSource:
    """A base class of sources that are files, with a stamp."""

    stamp: Stamp


class JoinedSource(ABC):
    """A base class of byte sources whose content is a sequence of spans, each read on its own.

    Parameters
    ----------
    sizes : iterable of int
        The bytes of each span.
    name : str
        The file, for error messages.
    """

    mapped = False

    def __init__(self, sizes: Iterable[int], name: str) -> None:
        self.name = name
        self._starts = [0, *accumulate(sizes)]
        self.size = self._starts[-1]

    @abstractmethod
    def read_span(self, index: int, offset: int, out: memoryview) -> None:
        """Read bytes of span ``index``, from ``offset`` in it, into ``out``."""

    def view(self, offset: int, length: int) -> memoryview:
        """Return a copy of a range."""
        require_inside(offset, length, self.size, self.name)
        out = memoryview(bytearray(length))
        self.readinto(offset, out)
        return out

    def readinto(self, offset: int, out: memoryview) -> None:
        """Read the range that begins at ``offset`` into ``out``."""
        require_inside(offset, out.nbytes, self.size, self.name)
        out = out.cast("B") if out.nbytes else out
        index = bisect_right(self._starts, offset) - 1
        while out.nbytes:
            count = min(self._starts[index + 1] - offset, out.nbytes)
            if count:
                self.read_span(index, offset - self._starts[index], out[:count])
            out = out[count:]
            offset += count
            index += 1


class PrivateMapping(ABC):
    """A base class of mapped sources that can return a range as writable memory."""

    @abstractmethod
    def private(self, offset: int, length: int) -> memoryview:
        """Return ``length`` bytes at ``offset`` as a copy-on-write mapping that belongs to the caller."""


class PrivateSource:
    """The bytes of a mapped source as writable memory that no other source shares.

    Each view of a range returns the same memory, which contains the caller's changes.
    """

    def __init__(self, source: ByteSource) -> None:
        self._source = source
        self._views: dict[tuple[int, int], memoryview] = {}
        self.name = source.name
        self.size = source.size
        self.mapped = source.mapped

    def view(self, offset: int, length: int) -> memoryview:
        source = self._source
        copy = self._views.get((offset, length))
        if copy is None:
            private = source.private(offset, length) if isinstance(source, PrivateMapping) else None
            copy = memoryview(bytearray(source.view(offset, length))) if private is None else private
            copy = self._views.setdefault((offset, length), copy)
        return copy

    def readinto(self, offset: int, out: memoryview) -> None:
        self._source.readinto(offset, out)

    def changed(self) -> bool:
        return self._source.changed()

    def close(self) -> None:
        """Do nothing: the caller closes the source."""


Range = tuple[int, int]
"""The offset and the length of a range, in bytes."""


class RangedSource:
    """A base class of sources on another machine that read several ranges in one request.

    Two ranges with at most ``gap`` bytes between them are requested as one.
    """

    gap: int

    def ranges(self, ranges: Sequence[Range]) -> Sequence[memoryview]:
        """Return the bytes of each range. Raises ``IntegrityError`` if the source has become shorter."""
        raise NotImplementedError

    def expect(self, ranges: Sequence[Range]) -> None:
        """Start to read ranges, which the caller must request once each. A source may ignore this hint."""


class Sink(Protocol):
    """A file that is being written. It has its final name only after it is published."""

    def write_at(self, offset: int, data: Buffer) -> None:
        """Write ``data`` at ``offset``. The file grows if necessary; gaps read as zero bytes."""
        ...

    def readinto(self, offset: int, out: memoryview) -> None:
        """Fill ``out`` with written bytes from ``offset``. Other threads may write other ranges at the same time."""
        ...

    def truncate(self, size: int) -> None: ...

    def close(self) -> None: ...


class DiskSink(ABC):
    """A base class of sinks on a disk. They can also store bytes whose offset in the file is not decided yet."""

    @abstractmethod
    def scratch(self) -> BinaryIO:
        """Return an unnamed temporary file on the same disk. Raises ``OSError``."""


class Target(Protocol):
    """The destination in which a writer creates its files."""

    def create(self, name: str) -> Sink:
        """Open the named file for writing. If a run is resumed, the file keeps the bytes of the interrupted run."""
        ...


class MemorySource:
    """Bytes in memory as a ``ByteSource``."""

    mapped = True

    def __init__(self, data: Buffer, name: str = "<memory>") -> None:
        self._data = memoryview(data).cast("B").toreadonly()
        self.name = name
        self.size = self._data.nbytes

    def view(self, offset: int, length: int) -> memoryview:
        require_inside(offset, length, self.size, self.name)
        return self._data[offset : offset + length]

    def readinto(self, offset: int, out: memoryview) -> None:
        data = self.view(offset, out.nbytes)
        if data.nbytes:  # an empty buffer of several dimensions cannot be cast
            out.cast("B")[:] = data

    def changed(self) -> bool:
        return False

    def close(self) -> None:
        pass

    def __reduce__(self) -> tuple[Any, ...]:
        return MemorySource, (bytes(self._data), self.name)
