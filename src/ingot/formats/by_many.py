"""Writers of an artifact that several processes share; each process writes part of the tensors or of the files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from ingot.core.bytes import checksums
from ingot.formats.base import FormatWriter
from ingot.model.bytesource import ByteSource
from ingot.model.store import Store

BlobLocation = tuple[str, int, int]
"""The location of a part's stored bytes: file, offset, length."""

Read = Callable[[str, int, memoryview], None]
"""A function that reads bytes from an offset of a file into a buffer."""

_CHUNK = 1 << 22


@runtime_checkable
class Skips(FormatWriter, Protocol):
    """A writer whose tensors have offsets that follow from the specs, so that several processes write one artifact.

    Each process writes its tensors into the same files and skips the tensors of other processes. One process then calls
    ``restore`` for every tensor and ``finish``.
    """

    def skip(self, name: str) -> None:
        """Pass over the next tensor, which another process writes. All lengths of its parts must be known."""
        ...

    def locate(self, name: str) -> list[BlobLocation]:
        """Return the locations of the next tensor's parts: the ``blobs`` of its record, in order."""
        ...

    def record_of(self, name: str, locations: Sequence[BlobLocation], read: Read) -> dict[str, Any]:
        """Return the record of a tensor, computed from the bytes at its locations.

        If the bytes were written correctly, it equals the record that ``end`` returned. Any thread may call this
        method.
        """
        ...


@runtime_checkable
class WholeFiles(Skips, Protocol):
    """A writer whose files are complete with their last tensor, so that another process can write complete files."""

    def file_of(self, name: str) -> str | None:
        """Return the file that contains a tensor of the specs; None if ``finish`` has to complete this file."""
        ...


class OpenFiles:
    """The open files of a store, each opened at its first read; a context manager that closes them."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._sources: dict[str, ByteSource] = {}

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *_: object) -> None:
        for source in self._sources.values():
            source.close()

    def read(self, file: str, offset: int, out: memoryview) -> None:
        """Read from ``offset`` of a file into ``out``.

        Raises the errors of ``Store.open`` and ``ByteSource.readinto``.
        """
        source = self._sources.get(file)
        if source is None:
            source = self._sources[file] = self._store.open(file)
        source.readinto(offset, out)


def read_place(read: Read, location: BlobLocation, take: Callable[[memoryview], None]) -> None:
    """Read the bytes at ``location`` in chunks and pass each chunk to ``take``, which must not keep it."""
    file, offset, length = location
    buffer = memoryview(bytearray(min(_CHUNK, length)))
    for start in range(0, length, _CHUNK):
        chunk = buffer[: min(_CHUNK, length - start)]
        read(file, offset + start, chunk)
        take(chunk)


def crc_record(name: str, locations: Sequence[BlobLocation], read: Read) -> dict[str, Any]:
    """Return a writer's record that contains only the CRC-32C of each part; see ``Skips.record_of``."""
    blobs = []
    for location in locations:
        crc = checksums.hasher("crc32c")
        read_place(read, location, crc.update)
        blobs.append([*location, crc.text()])
    return {"name": name, "blobs": blobs}
