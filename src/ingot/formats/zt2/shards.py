"""Finding the files that a manifest names as shards (section 7, appendix B): by name, then by size and digest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ingot.core import checksums
from ingot.errors import UsageError
from ingot.formats.zt2.manifest import Shard
from ingot.formats.zt2.reader import read_footer
from ingot.model.bytesource import ByteSource
from ingot.model.store import Store

SUFFIX = ".zt"
_PIECE = 4 << 20


def shard_file(name: str, shard: str) -> str:
    """Return how the file of a shard is called: ``model-00001.zt`` of ``model.zt``."""
    stem = name[: -len(SUFFIX)] if name.lower().endswith(SUFFIX) else name
    return f"{stem}-{shard}{SUFFIX}"


def open_shards(store: Store, name: str, shards: Mapping[str, Shard]) -> Iterator[tuple[str, str, ByteSource]]:
    """Open the shards of the file ``name``; yield each one's name, its file's and its source.

    A file is taken by its name if its size is right; else the folder's other files of that size are compared by their
    digests, each of which is computed once.

    Raises
    ------
    UsageError
        ``zt2.shard-missing``: no file fits.
    FormatError
        The rules of ``read_footer``: what fits is no container.
    """
    digests: dict[tuple[str, str], str] = {}
    for shard, stated in shards.items():
        found = _find(store, name, shard, stated, digests)
        source = store.open(found)
        try:
            read_footer(source)
        except BaseException:
            source.close()
            raise
        yield shard, found, source


def _find(store: Store, name: str, shard: str, stated: Shard, digests: dict[tuple[str, str], str]) -> str:
    usual = shard_file(name, shard)
    there = store.exists(usual)
    if there and store.stat(usual).size == stated.size:
        return usual
    folder = name.rpartition("/")[0]
    prefix = f"{folder}/" if folder else ""
    algorithm = checksums.known(stated.digest, "zt2.digest-syntax", store.location_of(name))
    for other in sorted(store.list(folder).files) if algorithm is not None else ():
        candidate = prefix + other
        fits = other.lower().endswith(SUFFIX) and candidate not in (name, usual)
        if not fits or store.stat(candidate).size != stated.size:
            continue
        assert algorithm is not None
        if (candidate, algorithm) not in digests:
            digests[candidate, algorithm] = _digest(store, candidate, algorithm)
        if checksums.same(stated.digest, digests[candidate, algorithm]):
            return candidate
    what = f"one of {store.stat(usual).size} bytes" if there else "none"
    raise UsageError(
        f"expected shard {shard!r}, a file {usual!r} of {stated.size} bytes or another in its folder with the digest "
        f"{stated.digest[:80]}, found {what}",
        rule="zt2.shard-missing",
        where=store.location_of(name),
    )


def _digest(store: Store, name: str, algorithm: str) -> str:
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
