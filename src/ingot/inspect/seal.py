"""Seal: write digests of a file's chunks beside it. Repair: put right what is not as it was sealed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from ingot.artifacts.identity import content_id
from ingot.artifacts.open import open_source
from ingot.core.options import takes
from ingot.core.runtime.progress import Progress
from ingot.errors import IngotError, IntegrityError, UsageError
from ingot.inspect.options import SealOptions
from ingot.model.reading.ranges import read_bytes
from ingot.model.seal import MAX_SEAL, SUFFIX, Seal, parse_seal, seal_of
from ingot.model.store import Store
from ingot.reporting.report import Bytes, Report, table_of
from ingot.stores.folder import LocalFolder
from ingot.stores.location import Location


@dataclass(frozen=True, slots=True)
class Sealed:
    """One file that was sealed: its seal's address or path, its bytes, its digest."""

    seal: str
    size: Bytes
    digest: str


def sealed_report(files: list[Sealed]) -> Report:
    """Return the seals that were written as a table."""
    return Report(tables=[table_of("seals", files, Sealed, {"seal": "seal", "size": "of a file of"})])


@takes(SealOptions, "seal")
def seal(options: SealOptions) -> list[Sealed]:
    """Write ``X.ingot.json`` beside each weight file ``X`` of a checkpoint, replacing older ones.

    Returns
    -------
    list of Sealed
        Reads every file once, and every tensor once for the content id.

    Raises
    ------
    UsageError
        No such path; ``store.not-writable``.
    IngotError
        What opening and decoding raise.
    """
    source = open_source(Location.parse(options.path))
    try:
        identity = ""
        if options.content_id and source.packer() is None:
            identity = content_id(source.view(), progress=options.progress)
        written = []
        state = Progress(source.stored(), options.progress)
        for name in source.catalog.headers:
            file = source.store.open(name)
            try:
                made = seal_of(file, identity if name == source.entry else "")
            finally:
                file.close()
            source.require_unchanged()
            target = Location.in_store(source.store, name + SUFFIX)
            target.write(made.encoded())
            written.append(Sealed(target.display, made.size, made.digest))
            state.advance(made.size, name)
        return written
    finally:
        source.close()


def seal_beside(store: Store, name: str) -> Seal | None:
    """Return the seal of a file; None where there is none. Raises ``FormatError`` ``seal.json``, ``seal.fields``."""
    try:
        raw = store.read(name + SUFFIX, MAX_SEAL, "seal.fields")
    except UsageError as error:
        if error.rule == "store.missing":
            return None
        raise
    return parse_seal(raw, store.location_of(name + SUFFIX))


@dataclass(frozen=True, slots=True)
class Repaired:
    """A file that was put right: how many of its chunks were fetched, and their bytes."""

    file: str
    chunks: int
    nbytes: Bytes


def repair(location: Location, origin: Location) -> list[Repaired]:
    """Fetch the chunks of a local file, or of a folder's files, that are not as they were sealed.

    The seal beside the file tells, or where there is none, that beside the origin's. A chunk is written only if it is
    the one that was sealed; a file that is cut short or missing is completed.

    Parameters
    ----------
    location : Location
        A file, or a folder.
    origin : Location
        The same file, or the folder that it is from.

    Raises
    ------
    UsageError
        ``seal.missing``: no seal here or there.
    IntegrityError
        ``seal.digest-mismatch``, ``seal.size``: the origin has another file.
    UnsupportedError
        ``store.not-local``: what is to be repaired lies on another machine.
    """
    (here, name), (there, other) = location.find(), origin.find()
    folder = LocalFolder(here.require_path("", "repairing"))
    found = []
    for mine, theirs in [(name, other or name)] if name else _named(folder, there):
        known = seal_beside(folder, mine) or seal_beside(there, theirs)
        if known is None:
            raise UsageError(
                f"expected a seal {mine + SUFFIX} beside the file or beside its origin, found none",
                rule="seal.missing",
                where=location.display,
            )
        done = _repaired(folder, mine, there, theirs, known)
        if done is not None:
            found.append(done)
    return found


def _named(folder: Store, there: Store) -> list[tuple[str, str]]:
    """Return the names of sealed files, here and there."""
    names = {*folder.list().files}
    with suppress(IngotError):  # a server that does not tell
        names |= {*there.list().files}
    sealed = sorted(name.removesuffix(SUFFIX) for name in names if name.endswith(SUFFIX))
    if not sealed:
        raise UsageError(
            f"expected files with seals ({SUFFIX}), found none; write them where the files are right: ingot seal",
            rule="seal.missing",
            where=folder.location,
        )
    return [(name, name) for name in sealed]


def _repaired(folder: LocalFolder, name: str, there: Store, other: str, known: Seal) -> Repaired | None:
    if folder.exists(name):
        file = folder.open(name)
        try:
            bad, whole = known.damaged_chunks(file), file.size == known.size
        finally:
            file.close()
        if not bad and whole:
            return None
    else:
        bad = [*range(-(-known.size // known.chunks.size))]
    source = there.open(other)
    try:
        if source.size != known.size:
            raise IntegrityError(
                "seal.size",
                f"expected the file of {known.size} bytes that was sealed, found {source.size}",
                where=there.location_of(other),
            )

        def pieces() -> Iterator[tuple[int, bytes]]:
            for index in bad:
                start, length = known.chunks.span(index)
                data = read_bytes(source, start, length)
                known.check(index, memoryview(data), there.location_of(other))
                yield start, data

        folder.mend(name, pieces(), known.size)
    finally:
        source.close()
    return Repaired(folder.location_of(name), len(bad), sum(known.chunks.span(index)[1] for index in bad))
