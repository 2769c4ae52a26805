"""Search for the files that a manifest names as shards (section 7, appendix B): by name, then by contents.

When a file is opened, the digest of a complete shard is compared only if nothing else distinguishes it from other files
of its size. ``check_shards`` compares all digests (the last step of section 7.3).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from functools import cached_property
from typing import NamedTuple

from ingot.core.bytes import checksums
from ingot.errors import IngotError, IntegrityError, UsageError
from ingot.formats.zt2.manifest import Blob, Manifest, Shard, optional_value
from ingot.formats.zt2.reader import read_footer, read_manifest
from ingot.model.bytesource import ByteSource
from ingot.model.store import Store

SUFFIX = ".zt"
_CHUNK = 4 << 20


def shard_file(name: str, shard: str) -> str:
    """Return the file name of a shard: ``model-00001.zt`` for ``model.zt``."""
    stem = name[: -len(SUFFIX)] if name.lower().endswith(SUFFIX) else name
    return f"{stem}-{shard}{SUFFIX}"


def open_shards(store: Store, name: str, manifest: Manifest) -> Iterator[tuple[str, str, ByteSource]]:
    """Open the shards of the file ``name``; yield the name, the file name and the source of each.

    The file with the expected name is used if its size is right. Otherwise, other files of that size in the folder are
    examined. First, a file is used if its manifest contains every part that is referred to, with the same digest. Then,
    a file is used if the complete file has the expected digest.

    Raises
    ------
    UsageError
        ``zt2.shard-missing``: no file fits.
    FormatError
        The rules of ``read_footer``: the file is not a container.
    """
    finder = _Finder(store, name, manifest)
    for shard in optional_value(manifest.shards) or {}:
        file = finder.find(shard)
        source = store.open(file)
        try:
            read_footer(source)
        except BaseException:
            source.close()
            raise
        yield shard, file, source


def check_shards(name: str, shards: Mapping[str, Shard], sources: Mapping[str, ByteSource]) -> Iterator[IngotError]:
    """Read the shards of the file ``name``; yield an error ``zt2.shard-digest`` for each whose digest differs."""
    for shard, entry in shards.items():
        algorithm = checksums.algorithm_of(entry.digest, "zt2.digest-syntax", name)
        source = sources[shard]
        if algorithm is None:
            continue
        digest = digest_of_range(source, 0, source.size, algorithm)
        if not checksums.same(entry.digest, digest):
            yield IntegrityError(
                "zt2.shard-digest",
                f"expected the file of shard {shard!r} to have the digest {entry.digest[:80]}, found {digest}",
                where=source.name,
            )


class _Finder:
    """A finder of the files of shards; the manifest and the digest of each candidate are read once."""

    def __init__(self, store: Store, name: str, manifest: Manifest) -> None:
        self._store = store
        self._name = name
        self._shards: Mapping[str, Shard] = optional_value(manifest.shards) or {}
        self._manifest = manifest
        self._contents: dict[str, set[_StoredPart]] = {}
        self._digests: dict[tuple[str, str], str] = {}

    @cached_property
    def _required(self) -> dict[str, set[_StoredPart]]:
        """The parts in each shard to which the manifest refers, computed only if a file's name does not identify the
        shard.
        """
        required: dict[str, set[_StoredPart]] = {shard: set() for shard in self._shards}
        for blob in _blobs(self._manifest):
            if optional_value(blob.shard) in required:
                required[optional_value(blob.shard)].add(_stored_part(blob))
        return required

    def find(self, shard: str) -> str:
        """Return the name of the file of the shard ``shard``; raises ``UsageError`` ``zt2.shard-missing``."""
        entry = self._shards[shard]
        usual = shard_file(self._name, shard)
        store = self._store
        exists = store.exists(usual)
        if exists and store.stat(usual).size == entry.size:
            return usual
        algorithm = checksums.algorithm_of(entry.digest, "zt2.digest-syntax", store.location_of(self._name))
        if algorithm is not None:
            candidates = self._of_size(entry.size, usual)
            for candidate in candidates:
                if self._has(candidate, self._required[shard]):
                    return candidate
            for candidate in candidates:
                if checksums.same(entry.digest, self._digest(candidate, algorithm)):
                    return candidate
        actual = f"one of {store.stat(usual).size} bytes" if exists else "none"
        raise UsageError(
            f"expected shard {shard!r}, a file {usual!r} of {entry.size} bytes or another in its folder with the "
            f"digest {entry.digest[:80]}, found {actual}",
            rule="zt2.shard-missing",
            where=store.location_of(self._name),
        )

    def _of_size(self, size: int, usual: str) -> list[str]:
        folder = self._name.rpartition("/")[0]
        prefix = f"{folder}/" if folder else ""
        candidates = [
            prefix + candidate
            for candidate in sorted(self._store.list(folder).files)
            if candidate.lower().endswith(SUFFIX)
        ]
        return [
            candidate
            for candidate in candidates
            if candidate not in (self._name, usual) and self._store.stat(candidate).size == size
        ]

    def _has(self, candidate: str, required: Set[_StoredPart]) -> bool:
        """Return whether the manifest of the file ``candidate`` lists all parts in ``required``, each with its
        digest.
        """
        if not required or any(part.digest is None for part in required):
            return False
        if candidate not in self._contents:
            self._contents[candidate] = self._read(candidate)
        return required <= self._contents[candidate]

    def _read(self, candidate: str) -> set[_StoredPart]:
        source = self._store.open(candidate)
        try:
            manifest = read_manifest(source)[1]
        except IngotError:  # no container, or a data shard
            return set()
        finally:
            source.close()
        return {_stored_part(blob) for blob in _blobs(manifest) if optional_value(blob.shard) is None}

    def _digest(self, candidate: str, algorithm: str) -> str:
        if (candidate, algorithm) not in self._digests:
            self._digests[candidate, algorithm] = digest_of_file(self._store, candidate, algorithm)
        return self._digests[candidate, algorithm]


class _StoredPart(NamedTuple):
    """The byte range, encoding, decoded length and digest of a part, by which two manifests are compared."""

    byte_range: tuple[int, int]
    encoding: str | None
    decoded: int | None
    digest: str | None


def _stored_part(blob: Blob) -> _StoredPart:
    return _StoredPart(
        blob.blob, optional_value(blob.encoding), optional_value(blob.decoded_length), optional_value(blob.digest)
    )


def _blobs(manifest: Manifest) -> Iterator[Blob]:
    for obj in manifest.objects.values():
        yield from obj.parts.values()


def digest_of_file(store: Store, name: str, algorithm: str) -> str:
    """Return the digest of a complete file."""
    source = store.open(name)
    try:
        return digest_of_range(source, 0, source.size, algorithm)
    finally:
        source.close()


def digest_of_range(source: ByteSource, offset: int, length: int, algorithm: str) -> str:
    """Return the digest of a range of a file, read in chunks."""
    running = checksums.hasher(algorithm)
    buffer = memoryview(bytearray(min(_CHUNK, length)))
    for start in range(0, length, _CHUNK):
        view = buffer[: min(_CHUNK, length - start)]
        source.readinto(offset + start, view)
        running.update(view)
    return running.text()
