"""Where bytes come from and where they go: what stores open, and what formats read and write."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, BinaryIO, NamedTuple, Protocol

from ingot.core.numeric.dtypes import require_inside

Buffer = bytes | bytearray | memoryview


class Stamp(NamedTuple):
    """The state of a file, read from the open file itself: equal stamps, equal bytes, as far as can be told.

    Where the store is a file system, ``ctime_ns`` cannot be set back as ``mtime_ns`` can, and ``device`` and ``inode``
    tell a file from one that replaced it. Elsewhere ``etag`` is what the store gives a version of the file. In JSON a
    stamp is a list of these values in this order: ``Stamp(*values)`` makes it again.
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

    ``size`` is in bytes. ``mapped`` tells whether ``view`` is free of copies. A copy of a source (``copy``, ``pickle``)
    opens what it reads anew, or refuses.
    """

    name: str
    size: int
    mapped: bool

    def view(self, offset: int, length: int) -> memoryview:
        """Return ``length`` bytes at ``offset``: the mapping itself where there is one, read-only; else a fresh copy.

        Raises ``IntegrityError`` where the source has become shorter than it was.
        """
        ...

    def readinto(self, offset: int, out: memoryview) -> None:
        """Fill ``out`` (writable, bytes) from ``offset``; always a read call, never a touch of mapped memory."""
        ...

    def changed(self) -> bool:
        """Whether the bytes were written to since the source was opened, as far as can be told without reading them."""
        ...

    def close(self) -> None: ...


class DerivedSource:
    """A base class of sources whose bytes are computed from other bytes as they are read.

    The defaults are those of a source that needs no memory and derives nothing from unchecked parts.
    ``integers`` are the first and the last of the integers that the values can be, if that is known before they are
    computed.
    """

    integers: tuple[int, int] | None = None

    def working_bytes(self) -> int:
        """Return the memory that reading takes, for as long as the source is read."""
        return 0

    def computing_bytes(self) -> int:
        """Return the memory that it takes to compute a full tensor when it is first read, one tensor after another."""
        return 0

    def memory_hint(self) -> str:
        """Return what the user can do to lower ``computing_bytes``, for messages."""
        return "convert it on a machine with more memory"

    def prove(self) -> None:
        """Compare the digests of the parts that the bytes derive from, as far as reading a range does not."""


class StampedSource:
    """A base class of sources that are files, and can tell one state of the file from another."""

    stamp: Stamp


class PrivateMapping(ABC):
    """A base class of mapped sources that can give a range as writable memory."""

    @abstractmethod
    def private(self, offset: int, length: int) -> memoryview:
        """Return ``length`` bytes at ``offset`` in memory of the caller's own, copied when it is written to."""


class PrivateSource:
    """The bytes of a mapped source; views are writable memory that no other source sees.

    The source is asked once for each range: whoever views it again sees what was written.
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
            own = source.private(offset, length) if isinstance(source, PrivateMapping) else None
            copy = memoryview(bytearray(source.view(offset, length))) if own is None else own
            copy = self._views.setdefault((offset, length), copy)
        return copy

    def readinto(self, offset: int, out: memoryview) -> None:
        self._source.readinto(offset, out)

    def changed(self) -> bool:
        return self._source.changed()

    def close(self) -> None:
        """Nothing to do: the source belongs to somebody else."""


Range = tuple[int, int]
"""Where bytes begin, and how many they are."""


class Ranged:
    """A base class of sources on another machine, which are asked for several ranges in one request.

    ``gap`` is the number of bytes between two ranges up to which both are requested as one.
    """

    gap: int

    def ranges(self, ranges: Sequence[Range]) -> Sequence[memoryview]:
        """Return the bytes of each range; raises what ``ByteSource.view`` raises."""
        raise NotImplementedError

    def expect(self, ranges: Sequence[Range]) -> None:
        """Begin to read ranges that will be requested, each once. A source may ignore this hint."""


class Sink(Protocol):
    """One file being written. Nobody sees it under its final name until it is published."""

    def write_at(self, offset: int, data: Buffer) -> None:
        """Write ``data`` at ``offset``, extending the file where needed (gaps read as zero bytes)."""
        ...

    def readinto(self, offset: int, out: memoryview) -> None:
        """Fill ``out`` with bytes that were written; other threads may write elsewhere meanwhile."""
        ...

    def truncate(self, size: int) -> None: ...

    def close(self) -> None: ...


class DiskSink(ABC):
    """A base class of sinks on a disk, which can also store bytes that have no offset in the file yet."""

    @abstractmethod
    def scratch(self) -> BinaryIO:
        """Return an unnamed temporary file on the same disk; raises ``OSError``."""


class Target(Protocol):
    """Where a writer creates its files."""

    def create(self, name: str) -> Sink:
        """Open the named file for writing; keeps what a resumed run left there."""
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
        piece = self.view(offset, out.nbytes)
        if piece.nbytes:  # an empty buffer of several dimensions cannot be cast
            out.cast("B")[:] = piece

    def changed(self) -> bool:
        return False

    def close(self) -> None:
        pass

    def __reduce__(self) -> tuple[Any, ...]:
        return MemorySource, (bytes(self._data), self.name)
