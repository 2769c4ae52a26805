"""Finding the files that a manifest names as shards (section 7, appendix B): by name, then by what they hold.

The digest of a whole file is compared where nothing else tells it from others of its size, and by ``check_shards``
(the last step of section 7.3), not at each opening.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from functools import cached_property
from typing import NamedTuple

from ingot.core.bytes import checksums
from ingot.errors import IngotError, IntegrityError, UsageError
from ingot.formats.zt2.manifest import Blob, Manifest, Shard, stated
from ingot.formats.zt2.reader import read_footer, read_manifest
from ingot.model.bytesource import ByteSource
from ingot.model.store import Store

SUFFIX = ".zt"
_PIECE = 4 << 20


def shard_file(name: str, shard: str) -> str:
    """Return how the file of a shard is called: ``model-00001.zt`` of ``model.zt``."""
    stem = name[: -len(SUFFIX)] if name.lower().endswith(SUFFIX) else name
    return f"{stem}-{shard}{SUFFIX}"


def open_shards(store: Store, name: str, manifest: Manifest) -> Iterator[tuple[str, str, ByteSource]]:
    """Open the shards of the file ``name``; yield each one's name, its file's and its source.

    A file is taken by its name if its size is right; else, of the folder's other files of that size, one whose own
    manifest has every part that is referred to, with the same digest; else one with the digest of the whole file.

    Raises
    ------
    UsageError
        ``zt2.shard-missing``: no file fits.
    FormatError
        The rules of ``read_footer``: what fits is no container.
    """
    finder = _Finder(store, name, manifest)
    for shard in stated(manifest.shards) or {}:
        found = finder.find(shard)
        source = store.open(found)
        try:
            read_footer(source)
        except BaseException:
            source.close()
            raise
        yield shard, found, source


def check_shards(name: str, shards: Mapping[str, Shard], sources: Mapping[str, ByteSource]) -> Iterator[IngotError]:
    """Read the shards of the file ``name``; yield an error ``zt2.shard-digest`` for each that is another file."""
    for shard, entry in shards.items():
        algorithm, source = checksums.known(entry.digest, "zt2.digest-syntax", name), sources[shard]
        if algorithm is None:
            continue
        found = digest_of_range(source, 0, source.size, algorithm)
        if not checksums.same(entry.digest, found):
            yield IntegrityError(
                "zt2.shard-digest",
                f"expected the file of shard {shard!r} to have the digest {entry.digest[:80]}, found {found}",
                where=source.name,
            )


class _Finder:
    """Finds the files of shards; each candidate's manifest and digest are read once."""

    def __init__(self, store: Store, name: str, manifest: Manifest) -> None:
        self._store, self._name = store, name
        self._shards: Mapping[str, Shard] = stated(manifest.shards) or {}
        self._manifest = manifest
        self._held: dict[str, set[_Held]] = {}
        self._digests: dict[tuple[str, str], str] = {}

    @cached_property
    def _wanted(self) -> dict[str, set[_Held]]:
        """What is referred to, by shard; of many tensors, so that it is asked for where a file's name does not tell."""
        wanted: dict[str, set[_Held]] = {shard: set() for shard in self._shards}
        for blob in _blobs(self._manifest):
            if stated(blob.shard) in wanted:
                wanted[stated(blob.shard)].add(_held(blob))
        return wanted

    def find(self, shard: str) -> str:
        """Return the name of the file; raises ``UsageError`` ``zt2.shard-missing``."""
        entry, usual, store = self._shards[shard], shard_file(self._name, shard), self._store
        there = store.exists(usual)
        if there and store.stat(usual).size == entry.size:
            return usual
        algorithm = checksums.known(entry.digest, "zt2.digest-syntax", store.location_of(self._name))
        if algorithm is not None:
            candidates = self._of_size(entry.size, usual)
            for candidate in candidates:
                if self._has(candidate, self._wanted[shard]):
                    return candidate
            for candidate in candidates:
                if checksums.same(entry.digest, self._digest(candidate, algorithm)):
                    return candidate
        what = f"one of {store.stat(usual).size} bytes" if there else "none"
        raise UsageError(
            f"expected shard {shard!r}, a file {usual!r} of {entry.size} bytes or another in its folder with the "
            f"digest {entry.digest[:80]}, found {what}",
            rule="zt2.shard-missing",
            where=store.location_of(self._name),
        )

    def _of_size(self, size: int, usual: str) -> list[str]:
        folder = self._name.rpartition("/")[0]
        prefix = f"{folder}/" if folder else ""
        others = [prefix + other for other in sorted(self._store.list(folder).files) if other.lower().endswith(SUFFIX)]
        return [other for other in others if other not in (self._name, usual) and self._store.stat(other).size == size]

    def _has(self, candidate: str, wanted: Set[_Held]) -> bool:
        """Whether a file says of itself that it has all these parts, each of which has a digest."""
        if not wanted or any(held.digest is None for held in wanted):
            return False
        if candidate not in self._held:
            self._held[candidate] = self._read(candidate)
        return wanted <= self._held[candidate]

    def _read(self, candidate: str) -> set[_Held]:
        source = self._store.open(candidate)
        try:
            manifest = read_manifest(source)[1]
        except IngotError:  # no container, or a data shard
            return set()
        finally:
            source.close()
        return {_held(blob) for blob in _blobs(manifest) if stated(blob.shard) is None}

    def _digest(self, candidate: str, algorithm: str) -> str:
        if (candidate, algorithm) not in self._digests:
            self._digests[candidate, algorithm] = digest_of_file(self._store, candidate, algorithm)
        return self._digests[candidate, algorithm]


class _Held(NamedTuple):
    """What a manifest says of bytes: where they lie, and what they are."""

    place: tuple[int, int]
    encoding: str | None
    decoded: int | None
    digest: str | None


def _held(blob: Blob) -> _Held:
    return _Held(blob.blob, stated(blob.encoding), stated(blob.decoded_length), stated(blob.digest))


def _blobs(manifest: Manifest) -> Iterator[Blob]:
    for obj in manifest.objects.values():
        yield from obj.parts.values()


def digest_of_file(store: Store, name: str, algorithm: str) -> str:
    """Return the digest of a whole file."""
    source = store.open(name)
    try:
        return digest_of_range(source, 0, source.size, algorithm)
    finally:
        source.close()


def digest_of_range(source: ByteSource, offset: int, length: int, algorithm: str) -> str:
    """Return the digest of a range of a file, read in pieces."""
    running, piece = checksums.hasher(algorithm), memoryview(bytearray(min(_PIECE, length)))
    for start in range(0, length, _PIECE):
        view = piece[: min(_PIECE, length - start)]
        source.readinto(offset + start, view)
        running.update(view)
    return running.text()
