"""Overlays (section 7.2): an overlay refers to parts that another file contains byte for byte, instead of storing them.

A base offers the blobs of its manifest, in its own file and in its shards. An overlay over an overlay refers to the
files of both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

from ingot.core.bytes.checksums import xxh3
from ingot.formats.zt2.manifest import Shard, optional_value
from ingot.formats.zt2.reader import read_manifest
from ingot.formats.zt2.rules import is_shard_name
from ingot.formats.zt2.shards import SUFFIX, digest_of_range, open_shards
from ingot.model.bytesource import ByteSource
from ingot.model.store import Store

_DEFAULT_LABEL = "base"


class BaseLocation(NamedTuple):
    """The location of a blob in a base: a shard's name and an offset."""

    shard: str
    offset: int


@dataclass(frozen=True)
class Base:
    """The file to which an overlay refers, and the shards of this file.

    Parameters
    ----------
    store : Store
    label : str
        The name of the file in the table of an overlay.
    files : mapping
        File names by shard name.
    shards : mapping
        The entries of the base's table of shards.
    locations : mapping
        The locations of all blobs of a length, by the length in bytes; each list is in ascending order.
    algorithm : str
        Algorithm of the digest by which an overlay identifies the file.
    identity : str
        The identity of the file: its size, the checksum of its manifest, and the digests of its shards.
    """

    store: Store
    label: str
    files: Mapping[str, str]
    shards: Mapping[str, Shard]
    locations: Mapping[int, Sequence[BaseLocation]]
    algorithm: str
    identity: str

    def open(self) -> OpenBase:
        """Return an open base to compare parts with."""
        return OpenBase(self)


class OpenBase:
    """A base whose files are open while an overlay is written; each is opened when its first blob is compared."""

    def __init__(self, base: Base) -> None:
        self._base = base
        self._sources = dict[str, ByteSource]()
        self._sums: dict[tuple[BaseLocation, int], str] = {}

    def candidates(self, length: int, crc: str) -> list[BaseLocation]:
        """Return the locations of the base's blobs with this length and CRC-32C, which may equal a part of the
        overlay.
        """
        return [location for location in self._base.locations.get(length, ()) if self._sum(location, length) == crc]

    def has(self, location: BaseLocation, length: int) -> bool:
        """Return whether the base has a blob of ``length`` bytes at ``location``."""
        return location in self._base.locations.get(length, ())

    def read(self, location: BaseLocation, start: int, length: int) -> bytes:
        """Return ``length`` bytes of the base, from the byte ``start`` bytes after a blob's location."""
        data = bytearray(length)
        self._source(location.shard).readinto(location.offset + start, memoryview(data))
        return bytes(data)

    def table(self, shards: set[str]) -> dict[str, Any]:
        """Return the entries (size and digest) of the overlay's table for ``shards``.

        If the base file itself is one of them, it is read to compute its digest.
        """
        return {name: {"size": entry.size, "digest": entry.digest} for name in shards for entry in [self._entry(name)]}

    def _entry(self, shard: str) -> Shard:
        if shard != self._base.label:
            return self._base.shards[shard]
        source = self._source(shard)
        return Shard(source.size, digest_of_range(source, 0, source.size, self._base.algorithm))

    def close(self) -> None:
        """Close all files of the base that were opened."""
        for source in self._sources.values():
            source.close()
        self._sources.clear()

    def _source(self, shard: str) -> ByteSource:
        if shard not in self._sources:
            self._sources[shard] = self._base.store.open(self._base.files[shard])
        return self._sources[shard]

    def _sum(self, location: BaseLocation, length: int) -> str:
        if (location, length) not in self._sums:
            digest = digest_of_range(self._source(location.shard), location.offset, length, "crc32c")
            self._sums[location, length] = digest
        return self._sums[location, length]


def read_base(store: Store, name: str, target: str, algorithm: str) -> Base:
    """Return the base of an overlay that will be called ``target``; reads only its manifest.

    Raises the errors of the reader: ``zt2.*``, ``cbor.*``.
    """
    with ExitStack() as opened:
        source = store.open(name)
        opened.callback(source.close)
        data, manifest = read_manifest(source)
        table: Mapping[str, Shard] = optional_value(manifest.shards) or {}
        files = {}
        for shard, file, shard_source in open_shards(store, name, manifest):
            opened.callback(shard_source.close)
            files[shard] = file
        own_label = _label(name, target, table)
        identity = " ".join([str(source.size), f"{xxh3(data):016x}", *(shard.digest for shard in table.values())])
    by_length: dict[int, set[BaseLocation]] = {}
    for obj in manifest.objects.values():
        for part in obj.parts.values():
            by_length.setdefault(part.blob[1], set()).add(
                BaseLocation(optional_value(part.shard) or own_label, part.blob[0])
            )
    order = {shard: index for index, shard in enumerate((own_label, *table))}
    locations = {
        length: sorted(unordered, key=lambda location: (order[location.shard], location.offset))
        for length, unordered in by_length.items()
        if length
    }
    return Base(store, own_label, {own_label: name, **files}, table, locations, algorithm, identity)


def _label(name: str, target: str, used: Mapping[str, Shard]) -> str:
    """Return the name of the base in the table: the part of its name after the overlay's name, else ``base``."""
    stem = name.rpartition("/")[2][: -len(SUFFIX)]
    suffix = stem.removeprefix(f"{target[: -len(SUFFIX)]}-")
    label = suffix if suffix != stem and is_shard_name(suffix) else _DEFAULT_LABEL
    number = 2
    while label in used:
        label = f"{_DEFAULT_LABEL}-{number}"
        number = number + 1
    return label
