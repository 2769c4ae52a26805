"""Bytes in memory as a store and as a target."""

from __future__ import annotations

from collections.abc import Mapping

from ingot.errors import FormatError, UsageError
from ingot.model.bytesource import Buffer, MemorySource


class MemoryStore:
    """Named buffers as a store; nothing is copied."""

    def __init__(self, files: Mapping[str, Buffer], location: str = "<memory>") -> None:
        self._files = files
        self.location = location

    def names(self, folder: str = "") -> list[str]:
        """Names of the buffers directly in the store, or in ``folder``, sorted; hidden ones left out in a folder."""
        if not folder:
            return sorted(name for name in self._files if "/" not in name)
        inside = [name.removeprefix(f"{folder}/") for name in self._files if name.startswith(f"{folder}/")]
        return sorted(name for name in inside if "/" not in name and not name.startswith("."))

    def folders(self, folder: str = "") -> list[str]:
        """First components of names such as ``tensors/a.npy``, behind those of ``folder``, sorted."""
        start = f"{folder}/" if folder else ""
        inside = [name.removeprefix(start) for name in self._files if name.startswith(start)]
        return sorted({name.split("/")[0] for name in inside if "/" in name})

    def outside(self, folder: str = "") -> list[str]:
        """None: there are no links."""
        return []

    def open(self, name: str) -> MemorySource:
        """Return the buffer as a source; ``store.escape`` and ``store.missing`` as for a folder."""
        _check(name, self.location)
        if name not in self._files:
            raise UsageError(
                "expected an existing file, found none", rule="store.missing", where=f"{self.location}/{name}"
            )
        return MemorySource(self._files[name], name)


class MemoryTarget:
    """Collects written files in ``files``: name to ``bytearray``."""

    def __init__(self) -> None:
        self.files: dict[str, bytearray] = {}

    def create(self, name: str) -> MemorySink:
        """Open ``name`` for writing; what is there stays."""
        _check(name, "<memory>")
        return MemorySink(self.files.setdefault(name, bytearray()))


class MemorySink:
    """One growing buffer."""

    def __init__(self, data: bytearray) -> None:
        self._data = data

    def write_at(self, offset: int, data: Buffer) -> None:
        """Write ``data`` at ``offset``; a gap before it is filled with zero bytes."""
        piece = flat(memoryview(data))
        if offset > len(self._data):
            self._data.extend(bytes(offset - len(self._data)))
        self._data[offset : offset + piece.nbytes] = piece

    def readinto(self, offset: int, out: memoryview) -> None:
        """Fill ``out`` with bytes that were written; ``store.short-read`` past the end."""
        MemorySource(bytes(self._data[offset : offset + out.nbytes])).readinto(0, out)

    def truncate(self, size: int) -> None:
        """Cut or extend with zero bytes."""
        del self._data[size:]
        self._data.extend(bytes(size - len(self._data)))

    def close(self) -> None:
        """Nothing to do."""


def flat(data: memoryview) -> memoryview:
    """Return ``data`` as unsigned bytes in one dimension; it may be empty in any shape, which ``cast`` refuses."""
    return data.cast("B") if data.nbytes else memoryview(b"")


def _check(name: str, where: str) -> None:
    if "\0" in name or any(piece in ("", ".", "..") for piece in name.split("/")):
        raise FormatError(
            "store.escape", f"expected the name of a file in this store, found {name[:200]!r}", where=where
        )
