"""Writers of an artifact that several processes write: each some of its tensors, or some of its files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from ingot.core.bytes import checksums
from ingot.formats.base import FormatWriter
from ingot.model.bytesource import ByteSource
from ingot.model.store import Store

Place = tuple[str, int, int]
"""The place of a part's stored bytes: file, offset, length."""

Read = Callable[[str, int, memoryview], None]
"""Reads from an offset of a file into a buffer."""

_CHUNK = 1 << 22


@runtime_checkable
class Skips(FormatWriter, Protocol):
    """A writer in which a tensor's place follows from the specs, so that several processes write one artifact.

    Each writes some of the tensors into the same files and skips the others. One ``restore``s all, and finishes.
    """

    def skip(self, name: str) -> None:
        """Pass over the next tensor, which another process writes. All lengths of its parts are known."""
        ...

    def locate(self, name: str) -> list[Place]:
        """Return where the parts of the next tensor lie, those of its record's ``blobs``, in order."""
        ...

    def record_of(self, name: str, places: Sequence[Place], read: Read) -> dict[str, Any]:
        """Return the record of a tensor from the bytes that lie in its places.

        It equals that of ``end`` if the process that wrote the tensor wrote what it says. Any thread may call it.
        """
        ...


@runtime_checkable
class WholeFiles(Skips, Protocol):
    """One of which each file is complete with the last of its tensors, so that it can be made elsewhere as a whole."""

    def file_of(self, name: str) -> str | None:
        """Return the file that a tensor of the specs lies in; None where it is not complete before the end."""
        ...


class OpenFiles:
    """The files of a store, each opened when it is first read; a context manager that closes them."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._sources: dict[str, ByteSource] = {}

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *_: object) -> None:
        for source in self._sources.values():
            source.close()

    def read(self, file: str, offset: int, out: memoryview) -> None:
        """As ``Read``; errors as ``Store.open`` and ``ByteSource.readinto``."""
        source = self._sources.get(file)
        if source is None:
            source = self._sources[file] = self._store.open(file)
        source.readinto(offset, out)


def read_place(read: Read, place: Place, take: Callable[[memoryview], None]) -> None:
    """Read the bytes of a part in chunks."""
    file, offset, length = place
    buffer = memoryview(bytearray(min(_CHUNK, length)))
    for start in range(0, length, _CHUNK):
        chunk = buffer[: min(_CHUNK, length - start)]
        read(file, offset + start, chunk)
        take(chunk)


def crc_record(name: str, places: Sequence[Place], read: Read) -> dict[str, Any]:
    """Return the record of a writer that states nothing but the CRC-32C of each part; as ``Skips.record_of``."""
    blobs = []
    for place in places:
        crc = checksums.hasher("crc32c")
        read_place(read, place, crc.update)
        blobs.append([*place, crc.text()])
    return {"name": name, "blobs": blobs}
