"""Read the files of an archive, and compare them with the SHA-256 of the originals."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ingot.artifacts.archive_layout import MAX_DELTAS, ArchivedFile
from ingot.artifacts.archive_store import ArchiveObjects, ArchiveStore
from ingot.core.bytes.checksums import Sha256, hex_of
from ingot.core.runtime.memory import anonymous_in_use, format_size, parse_size
from ingot.core.runtime.parallel import default_workers, ordered
from ingot.core.runtime.progress import Progress
from ingot.errors import IngotError, IntegrityError, ResourceError
from ingot.formats.zt.manifest import ALIGNMENT, MAGIC
from ingot.formats.zt.reader import manifest_span
from ingot.model.reading.ranges import read_bytes
from ingot.model.store import Store

STEP = 16 << 20
"""The largest number of bytes of an object that is decoded in one call, if its codec can decode ranges."""
_MIN_STEP = 1 << 20
_RESERVE = 48 << 20
_COST = 3  # bytes of memory for each byte of a chunk: stored, decoded, returned
_READ = 1 << 20


@dataclass(frozen=True, slots=True)
class Reading:
    """The bytes that are decoded in one call, and the number of threads."""

    step: int = STEP
    workers: int | None = None


def plan_reading(
    objects: ArchiveObjects, files: Iterable[ArchivedFile], max_ram: int | str | None, threads: int | None
) -> Reading:
    """Return how to read files with at most ``max_ram`` bytes of memory.

    Raises ``ResourceError`` ``ram.ceiling`` if an object that cannot be divided does not fit.
    """
    workers = threads or default_workers()
    if max_ram is None:
        return Reading(STEP, workers)
    budget = parse_size(max_ram) - anonymous_in_use() - _RESERVE
    undivided = max(
        (span.size for file in files for span in file.spans if not objects.is_divisible(span.object)), default=0
    )
    needed = max(2 * undivided, 3 * _COST * _MIN_STEP)
    if budget < needed:
        raise ResourceError(
            f"expected {format_size(needed)} of working memory, found {format_size(max(budget, 0))} in addition to the "
            f"memory of Python; raise --max-ram by {format_size(needed - budget)} or more",
            rule="ram.ceiling",
            where=objects.location,
        )
    objects.max_cached = min(objects.max_cached, budget // 4)
    workers = min(workers, max(1, budget // max(2 * undivided, 1) // 3)) if undivided else workers
    cost = _COST * (MAX_DELTAS if objects.layout.bases else 1)  # a chunk of each base is decoded with that of an object
    share = budget // (cost * (2 * workers + 1))
    if share < _MIN_STEP:
        return Reading(_MIN_STEP, 1)
    return Reading(min(STEP, share // _MIN_STEP * _MIN_STEP), workers)


def contents(objects: ArchiveObjects, file: ArchivedFile, reading: Reading) -> Iterator[memoryview]:
    """Yield the content of a file in order, decoded by several threads.

    Raises the errors of reading, and at the end ``IntegrityError`` ``archive.digest`` if the SHA-256 differs.
    """

    def read(chunk: tuple[int, int, int]) -> memoryview:
        index, offset, size = chunk
        out = memoryview(bytearray(size))
        objects.readinto(index, offset, out)
        return out

    hasher = Sha256()
    workers = reading.workers if len(file.spans) > 1 or file.size > reading.step else 0
    try:
        for data in ordered(read, _chunks(objects, file, reading.step), workers):
            hasher.update(data)
            yield data
    except IngotError as error:
        raise error.add_location(location_in(objects, file)) from None
    if hex_of(hasher) != file.sha256:
        raise _difference(objects, file, hex_of(hasher))


def location_in(objects: ArchiveObjects, file: ArchivedFile) -> str:
    """Return the location of a file in an archive, for error messages."""
    return f"{objects.location}!{file.name}"


def _difference(objects: ArchiveObjects, file: ArchivedFile, digest: str) -> IntegrityError:
    return IntegrityError(
        "archive.digest",
        f"expected a file with SHA-256 {file.sha256}, found {digest}: the archive is damaged",
        where=location_in(objects, file),
    )


def _chunks(objects: ArchiveObjects, file: ArchivedFile, step: int) -> Iterator[tuple[int, int, int]]:
    """Yield the parts of a file that are decoded in one call: object, offset and size."""
    for span in file.spans:
        count = step if objects.is_divisible(span.object) else span.size
        for start in range(0, span.size, count):
            yield span.object, span.offset + start, min(count, span.size - start)


def check_padding(objects: ArchiveObjects) -> None:
    """Raise ``IntegrityError`` ``archive.padding`` unless the bytes between the objects are zeros, less than 64 each.

    No digest covers these bytes.
    """
    source = objects.source
    end = len(MAGIC)
    for offset, length in [*objects.blobs(), (manifest_span(source)[0], 0)]:
        gap = offset - end
        if gap >= ALIGNMENT or (gap > 0 and any(read_bytes(source, end, gap))):
            raise IntegrityError(
                "archive.padding", f"expected zeros before byte {offset}: the archive is damaged", where=source.name
            )
        end = max(end, offset + length)


def problems(store: ArchiveStore, progress: Progress, reading: Reading | None = None) -> Iterator[IngotError]:
    """Yield all errors of an archive: damaged padding, and each file that cannot be restored or whose SHA-256 differs.

    ``progress`` receives the number of bytes that were compared.
    """
    try:
        check_padding(store.objects)
    except IngotError as error:
        yield error
    for file in store.layout.files:
        try:
            for data in contents(store.objects, file, reading or Reading()):
                progress.advance(data.nbytes, file.name)
        except IngotError as error:
            yield error


def matches(store: Store, file: ArchivedFile) -> bool:
    """Return whether a store has a file with the name, the size and the SHA-256 of an archived file."""
    if not store.exists(file.name):
        return False
    source = store.open(file.name)
    try:
        if source.size != file.size:
            return False
        hasher = Sha256()
        buffer = memoryview(bytearray(min(_READ, file.size)))
        for start in range(0, file.size, _READ):
            chunk = buffer[: min(_READ, file.size - start)]
            source.readinto(start, chunk)
            hasher.update(chunk)
        return hex_of(hasher) == file.sha256
    finally:
        source.close()
