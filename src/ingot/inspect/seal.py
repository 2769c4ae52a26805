"""Write seals, which are files with the digests of a weight file's chunks, and replace chunks whose digests differ."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from ingot.artifacts.identity import content_id
from ingot.artifacts.open import open_source
from ingot.core.bytes.checksums import digest
from ingot.core.options import takes
from ingot.core.runtime.progress import Progress
from ingot.errors import IngotError, IntegrityError, UsageError
from ingot.inspect.options import SealOptions
from ingot.inspect.signature import sign
from ingot.model.reading.ranges import read_bytes
from ingot.model.seal import MAX_SEAL, SUFFIX, Seal, parse_seal, seal_of
from ingot.model.store import Store
from ingot.reporting.report import Bytes, Report, table_of
from ingot.stores.folder import LocalFolder
from ingot.stores.location import Location


@dataclass(frozen=True, slots=True)
class Sealed:
    """A sealed weight file: the path or URL of its seal, and the weight file's size in bytes and digest."""

    seal: str
    size: Bytes
    digest: str


def sealed_report(files: list[Sealed]) -> Report:
    """Return a report with a table of the written seals."""
    return Report(tables=[table_of("seals", files, Sealed, {"seal": "seal", "size": "size of the file"})])


@takes(SealOptions, "seal")
def seal(options: SealOptions) -> list[Sealed]:
    """Write ``X.ingot.json`` next to each weight file ``X`` of a checkpoint, replacing an older seal.

    Reads every file once, and every tensor once for the content id. With ``sign``, all files are then signed, and the
    last item of the result is the signature with its size and digest.

    Returns
    -------
    list of Sealed

    Raises
    ------
    UsageError
        No such path; ``store.not-writable``; ``seal.signature``; the errors of ``signature.sign``.
    IngotError
        Errors of opening and decoding.

    Examples
    --------
    >>> len(ingot.seal("tuned.safetensors"))
    1
    """
    if options.signature is not None and options.sign is None:
        raise UsageError("expected --sign KEY (sign) with --signature", rule="seal.signature")
    written = _seal_files(options)
    if options.sign is not None:
        target = sign(Location.parse(options.path), options.sign, options.signature)
        data = target.read()
        written.append(Sealed(target.display, len(data), digest("sha256", data)))
    return written


def _seal_files(options: SealOptions) -> list[Sealed]:
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
                file_seal = seal_of(file, identity if name == source.entry else "")
            finally:
                file.close()
            source.require_unchanged()
            target = Location.in_store(source.store, name + SUFFIX)
            target.write(file_seal.encoded())
            written.append(Sealed(target.display, file_seal.size, file_seal.digest))
            state.advance(file_seal.size, name)
        return written
    finally:
        source.close()


def seal_beside(store: Store, name: str) -> Seal | None:
    """Return the seal of a file; None if it has none. Raises ``FormatError`` ``seal.json``, ``seal.fields``."""
    try:
        raw = store.read(name + SUFFIX, MAX_SEAL, "seal.fields")
    except UsageError as error:
        if error.rule == "store.missing":
            return None
        raise
    return parse_seal(raw, store.location_of(name + SUFFIX))


@dataclass(frozen=True, slots=True)
class Repaired:
    """A repaired file: the number of replaced chunks, and their size in bytes."""

    file: str
    chunks: int
    nbytes: Bytes


def repair(location: Location, origin: Location) -> list[Repaired]:
    """Replace the chunks of a local file, or of a folder's files, whose digests differ from the seal.

    The seal next to the file is used, or else the seal next to the origin. A chunk of the origin is written only if it
    has the digest in the seal. A truncated or missing file is completed.

    Parameters
    ----------
    location : Location
        A file, or a folder.
    origin : Location
        An undamaged copy of the file, or of the folder.

    Raises
    ------
    UsageError
        ``seal.missing``: neither the file nor the origin has a seal.
    IntegrityError
        ``seal.digest-mismatch``, ``seal.size``: the origin is not an undamaged copy of the sealed file.
    UnsupportedError
        ``store.not-local``: the file to repair is not on a local disk.
    """
    target_store, name = location.find()
    origin_store, origin_entry = origin.find()
    folder = LocalFolder(target_store.require_path("", "repairing"))
    repaired = []
    pairs = [(name, origin_entry or name)] if name else [(item, item) for item in _sealed_names(folder, origin_store)]
    for file_name, origin_name in pairs:
        file_seal = seal_beside(folder, file_name) or seal_beside(origin_store, origin_name)
        if file_seal is None:
            raise UsageError(
                f"there is no seal {file_name + SUFFIX} beside the file or beside its origin; write one with "
                "`ingot seal` for the undamaged file",
                rule="seal.missing",
                where=location.display,
            )
        result = _repair_file(folder, file_name, origin_store, origin_name, file_seal)
        if result is not None:
            repaired.append(result)
    return repaired


def _sealed_names(folder: Store, origin: Store) -> list[str]:
    """Return the names of files with a seal in the folder or in the origin. Raises ``UsageError`` ``seal.missing``."""
    names = {*folder.list().files}
    with suppress(IngotError):  # a store without listings
        names |= {*origin.list().files}
    sealed = sorted(name.removesuffix(SUFFIX) for name in names if name.endswith(SUFFIX))
    if not sealed:
        raise UsageError(
            f"no file has a seal ({SUFFIX}); write seals with `ingot seal` for the undamaged files",
            rule="seal.missing",
            where=folder.location,
        )
    return sealed


def _repair_file(folder: LocalFolder, name: str, origin: Store, origin_name: str, file_seal: Seal) -> Repaired | None:
    """Replace the damaged chunks of one file; return None if it has none."""
    if folder.exists(name):
        file = folder.open(name)
        try:
            damaged = file_seal.damaged_chunks(file)
            is_complete = file.size == file_seal.size
        finally:
            file.close()
        if not damaged and is_complete:
            return None
    else:
        damaged = [*range(-(-file_seal.size // file_seal.chunks.size))]
    source = origin.open(origin_name)
    try:
        if source.size != file_seal.size:
            raise IntegrityError(
                "seal.size",
                f"expected the sealed file of {file_seal.size} bytes, found one of {source.size}",
                where=origin.location_of(origin_name),
            )

        def read_chunks() -> Iterator[tuple[int, bytes]]:
            for index in damaged:
                start, length = file_seal.chunks.span(index)
                data = read_bytes(source, start, length)
                file_seal.check(index, memoryview(data), origin.location_of(origin_name))
                yield start, data

        folder.mend(name, read_chunks(), file_seal.size)
    finally:
        source.close()
    return Repaired(folder.location_of(name), len(damaged), sum(file_seal.chunks.span(i)[1] for i in damaged))
