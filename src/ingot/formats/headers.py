"""Headers of opened files. Few ask for their bytes, which are many where tensors are: large ones are read again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ingot.core.checksums import Buffer
from ingot.model.bytesource import ByteSource
from ingot.model.ranges import is_distant, read_joined

_SMALL = 1 << 16


@dataclass(frozen=True, slots=True)
class Place:
    """Where a header lies."""

    source: ByteSource
    offset: int
    length: int


def kept(raw: Buffer, source: ByteSource, offset: int) -> Buffer | Place:
    """Return what to keep of a header that was read at ``offset``: its bytes where they are few, or far away."""
    length = len(raw)
    return raw if length <= _SMALL or is_distant(source) else Place(source, offset, length)


class Headers(Mapping[str, Buffer]):
    """The bytes of headers by file, of those that ``kept`` left where they lie as long as their sources are open.

    Such are what the file that was opened has by now: who may not work with another goes by its stamp too. Errors as of
    ``ByteSource.readinto``.
    """

    __slots__ = ("_found",)

    def __init__(self, found: Mapping[str, Buffer | Place]) -> None:
        self._found = found

    def __getitem__(self, name: str) -> Buffer:
        held = self._found[name]
        return read_joined(held.source, [(held.offset, held.length)]) if isinstance(held, Place) else held

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def __contains__(self, name: object) -> bool:
        return name in self._found
