"""Overlays (section 7.2): parts that another file has, byte for byte, are named there instead of being stored.

What a base offers are the blobs of its manifest, in its own file and in the shards that it names: an overlay over an
overlay refers to the files of both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

from ingot.core.bytes.checksums import xxh3
from ingot.formats.zt2.manifest import Shard, stated
from ingot.formats.zt2.reader import read_manifest
from ingot.formats.zt2.rules import is_shard_name
from ingot.formats.zt2.shards import SUFFIX, digest_of_range, open_shards
from ingot.model.bytesource import ByteSource
from ingot.model.store import Store

_USUAL = "base"


class Place(NamedTuple):
    """Where a base has bytes: in the file that a shard's name stands for."""

    shard: str
    offset: int


@dataclass(frozen=True)
class Base:
    """A file that an overlay refers to, and the files that it refers to itself.

    Parameters
    ----------
    store : Store
    own : str
        What the table of an overlay calls the file itself.
    files : mapping
        The file's name by the shard's name that stands for it.
    shards : mapping
        The entries of its own table.
    places : mapping
        All blobs by their number of bytes, in order.
    algorithm : str
        Of the digest by which an overlay knows the file.
    identity : str
        What tells the file from others: its size and the checksum of its manifest, and the digests of its shards.
    """

    store: Store
    own: str
    files: Mapping[str, str]
    shards: Mapping[str, Shard]
    places: Mapping[int, Sequence[Place]]
    algorithm: str
    identity: str

    def open(self) -> OpenBase:
        """Return the base to compare with."""
        return OpenBase(self)


class OpenBase:
    """A base while an overlay is written; files are opened when a blob of theirs is compared."""

    def __init__(self, base: Base) -> None:
        self._base, self._sources = base, dict[str, ByteSource]()
        self._sums: dict[tuple[Place, int], str] = {}

    def candidates(self, length: int, crc: str) -> list[Place]:
        """Return where bytes lie that have this length and CRC-32C."""
        return [place for place in self._base.places.get(length, ()) if self._sum(place, length) == crc]

    def has(self, place: Place, length: int) -> bool:
        """Whether a blob of this length lies there."""
        return place in self._base.places.get(length, ())

    def read(self, place: Place, start: int, length: int) -> bytes:
        """Return bytes from ``start`` on behind a place."""
        data = bytearray(length)
        self._source(place.shard).readinto(place.offset + start, memoryview(data))
        return bytes(data)

    def table(self, shards: set[str]) -> dict[str, Any]:
        """Return the entries of the table for these shards; reads the whole base for its digest, if it is one."""
        return {name: {"size": found.size, "digest": found.digest} for name in shards for found in [self._entry(name)]}

    def _entry(self, shard: str) -> Shard:
        if shard != self._base.own:
            return self._base.shards[shard]
        source = self._source(shard)
        return Shard(source.size, digest_of_range(source, 0, source.size, self._base.algorithm))

    def close(self) -> None:
        """Close what was opened."""
        for source in self._sources.values():
            source.close()
        self._sources.clear()

    def _source(self, shard: str) -> ByteSource:
        if shard not in self._sources:
            self._sources[shard] = self._base.store.open(self._base.files[shard])
        return self._sources[shard]

    def _sum(self, place: Place, length: int) -> str:
        if (place, length) not in self._sums:
            found = digest_of_range(self._source(place.shard), place.offset, length, "crc32c")
            self._sums[place, length] = found
        return self._sums[place, length]


def read_base(store: Store, name: str, target: str, algorithm: str) -> Base:
    """Look at the base of an overlay that will be called ``target``; its manifest alone is read.

    Errors as the reader's: ``zt2.*``, ``cbor.*``.
    """
    with ExitStack() as opened:
        source = store.open(name)
        opened.callback(source.close)
        data, manifest = read_manifest(source)
        table: Mapping[str, Shard] = stated(manifest.shards) or {}
        files = {}
        for shard, file, other in open_shards(store, name, manifest):
            opened.callback(other.close)
            files[shard] = file
        own = _label(name, target, table)
        identity = " ".join([str(source.size), f"{xxh3(data):016x}", *(shard.digest for shard in table.values())])
    found: dict[int, set[Place]] = {}
    for obj in manifest.objects.values():
        for part in obj.parts.values():
            found.setdefault(part.blob[1], set()).add(Place(stated(part.shard) or own, part.blob[0]))
    order = {shard: number for number, shard in enumerate((own, *table))}
    places = {
        length: sorted(several, key=lambda place: (order[place.shard], place.offset))
        for length, several in found.items()
        if length
    }
    return Base(store, own, {own: name, **files}, table, places, algorithm, identity)


def _label(name: str, target: str, taken: Mapping[str, Shard]) -> str:
    """Return what the table calls the base: as its file is called behind the overlay's name, else ``base``."""
    stem = name.rpartition("/")[2][: -len(SUFFIX)]
    behind = stem.removeprefix(f"{target[: -len(SUFFIX)]}-")
    label = behind if behind != stem and is_shard_name(behind) else _USUAL
    number = 2
    while label in taken:
        label, number = f"{_USUAL}-{number}", number + 1
    return label
