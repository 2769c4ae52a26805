"""Writers of an artifact that several processes write: each some of its tensors, or some of its files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from ingot.core import checksums
from ingot.formats.base import FormatWriter
from ingot.model.store import Store

Place = tuple[str, int, int]
"""Where the stored bytes of a part lie: file, offset, length."""

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

    def record_of(self, name: str, places: Sequence[Place], store: Store) -> dict[str, Any]:
        """Return the record of a tensor from the bytes that lie in its places; errors as ``Store.open``.

        It equals that of ``end`` if the process that wrote the tensor wrote what it says. Any thread may call it.
        """
        ...


@runtime_checkable
class WholeFiles(Skips, Protocol):
    """One of which each file is complete with the last of its tensors, so that it can be made elsewhere as a whole."""

    def file_of(self, name: str) -> str | None:
        """Return the file that a tensor of the specs lies in; None where it is not complete before the end."""
        ...


def read_place(store: Store, place: Place, take: Callable[[memoryview], None]) -> None:
    """Read the bytes of a part in chunks; errors as ``Store.open`` and ``ByteSource.readinto``."""
    file, offset, length = place
    buffer = memoryview(bytearray(min(_CHUNK, length)))
    source = store.open(file)
    try:
        for start in range(0, length, _CHUNK):
            chunk = buffer[: min(_CHUNK, length - start)]
            source.readinto(offset + start, chunk)
            take(chunk)
    finally:
        source.close()


def crc_record(name: str, places: Sequence[Place], store: Store) -> dict[str, Any]:
    """Return the record of a writer that states nothing but the CRC-32C of each part; as ``Skips.record_of``."""
    blobs = []
    for place in places:
        crc = checksums.hasher("crc32c")
        read_place(store, place, crc.update)
        blobs.append([*place, crc.text()])
    return {"name": name, "blobs": blobs}
