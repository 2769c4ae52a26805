"""Where bytes come from and where they go: the protocols that stores implement and formats use."""

from __future__ import annotations

from typing import Any, BinaryIO, NamedTuple, Protocol, runtime_checkable

from ingot.errors import IntegrityError

Buffer = bytes | bytearray | memoryview


class Stamp(NamedTuple):
    """The state of a file, read from the open file itself: equal stamps, equal bytes, as far as can be told.

    ``ctime_ns`` cannot be set back as ``mtime_ns`` can; ``device`` and ``inode`` tell a file from one that replaced it.
    """

    size: int
    mtime_ns: int
    ctime_ns: int
    device: int
    inode: int


@runtime_checkable
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


@runtime_checkable
class Stamped(Protocol):
    """A source that is a file, and can tell one state of it from another."""

    stamp: Stamp


@runtime_checkable
class Mapped(Protocol):
    """A mapped source that can give a range as writable memory."""

    def private(self, offset: int, length: int) -> memoryview:
        """Return ``length`` bytes at ``offset`` in memory of the caller's own, copied where it is written to."""
        ...


class PrivateSource:
    """The bytes of another source; views are writable memory that no other source sees.

    A mapped source is asked once for each range: whoever views it again sees what was written.
    """

    def __init__(self, source: ByteSource) -> None:
        self._source = source
        self._views: dict[tuple[int, int], memoryview] = {}
        self.name, self.size, self.mapped = source.name, source.size, source.mapped

    def view(self, offset: int, length: int) -> memoryview:
        source = self._source
        if not source.mapped:
            return source.view(offset, length)
        found = self._views.get((offset, length))
        if found is None:
            own = source.private(offset, length) if isinstance(source, Mapped) else None
            found = memoryview(bytearray(source.view(offset, length))) if own is None else own
            found = self._views.setdefault((offset, length), found)
        return found

    def readinto(self, offset: int, out: memoryview) -> None:
        self._source.readinto(offset, out)

    def changed(self) -> bool:
        return self._source.changed()

    def close(self) -> None:
        """Nothing to do: the source belongs to somebody else."""


class Store(Protocol):
    """A folder of named byte sources: a local directory, memory, later HTTP or S3."""

    location: str

    def names(self, folder: str = "") -> list[str]:
        """Names of the files directly in the store, or in one of its folders, sorted; none where that is missing."""
        ...

    def folders(self, folder: str = "") -> list[str]:
        """Names of the folders directly in the store, or in one of its folders, sorted."""
        ...

    def outside(self, folder: str = "") -> list[str]:
        """Names directly in the store, or in one of its folders, that are links to a place outside of the store."""
        ...

    def open(self, name: str) -> ByteSource:
        """Open one file. A name that leads outside the store is refused with rule ``store.escape``."""
        ...


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


@runtime_checkable
class Scratch(Protocol):
    """A sink on a disk that can also hold what has no place in the file yet."""

    def scratch(self) -> BinaryIO:
        """Return an unnamed temporary file on the same disk; raises ``OSError``."""
        ...


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
        piece = self._data[max(0, offset) : offset + length]
        if piece.nbytes != length:
            raise IntegrityError(
                "store.short-read", f"expected {length} bytes at {offset}, found {piece.nbytes}", where=self.name
            )
        return piece

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
