"""Finding the files that a manifest names as shards (section 7, appendix B): by name, then by size and digest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ingot.core import checksums
from ingot.errors import FormatError, IntegrityError, UsageError
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
    digests.

    Raises
    ------
    UsageError
        ``zt2.shard-missing``: no file fits.
    FormatError
        The rules of ``read_footer``: what fits is no container.
    """
    for shard, stated in shards.items():
        found = _find(store, name, shard, stated)
        source = store.open(found)
        try:
            read_footer(source)
        except BaseException:
            source.close()
            raise
        yield shard, found, source


def _find(store: Store, name: str, shard: str, stated: Shard) -> str:
    usual = shard_file(name, shard)
    there = store.exists(usual)
    if there and store.stat(usual).size == stated.size:
        return usual
    folder = name.rpartition("/")[0]
    prefix = f"{folder}/" if folder else ""
    for other in sorted(store.list(folder).files):
        candidate = prefix + other
        if (
            not other.lower().endswith(SUFFIX)
            or candidate in (name, usual)
            or store.stat(candidate).size != stated.size
        ):
            continue
        source = store.open(candidate)
        try:
            check_identity(source, shard, stated)
        except (FormatError, IntegrityError):
            continue
        finally:
            source.close()
        return candidate
    what = f"one of {store.stat(usual).size} bytes" if there else "none"
    raise UsageError(
        f"expected shard {shard!r}, a file {usual!r} of {stated.size} bytes or another in its folder with the digest "
        f"{stated.digest}, found {what}",
        rule="zt2.shard-missing",
        where=store.location_of(name),
    )


def check_identity(source: ByteSource, shard: str, stated: Shard) -> None:
    """Compare a file's size and the digest of all of it with what the table states; reads everything.

    Raises
    ------
    FormatError
        ``zt2.shard-identity``: another size.
    IntegrityError
        ``zt2.shard-identity``: other bytes. A digest of an algorithm that is not known here is not compared.
    """
    if source.size != stated.size:
        raise FormatError(
            "zt2.shard-identity",
            f"expected shard {shard!r} of {stated.size} bytes, found {source.size}",
            where=source.name,
        )
    algorithm = checksums.known(stated.digest, "zt2.digest-syntax", source.name)
    if algorithm is None:
        return
    running = checksums.hasher(algorithm)
    piece = bytearray(min(_PIECE, source.size))
    for start in range(0, source.size, _PIECE):
        view = memoryview(piece)[: min(_PIECE, source.size - start)]
        source.readinto(start, view)
        running.update(view)
    checksums.check(
        stated.digest, running.text(), "zt2.shard-identity", source.name, what=f"the bytes of shard {shard!r}"
    )
