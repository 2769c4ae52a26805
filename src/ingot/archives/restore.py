"""Restore the files of an archive, byte for byte."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial

from ingot.archives.options import RestoreOptions
from ingot.artifacts.archive_layout import ArchivedFile
from ingot.artifacts.archive_read import check_padding, contents, matches, plan_reading
from ingot.artifacts.archive_salvage import salvage
from ingot.artifacts.archive_store import BASE_DIGEST, ArchiveStore, open_archive
from ingot.artifacts.open import find
from ingot.artifacts.replaceable import require_ours
from ingot.core.options import takes
from ingot.core.runtime.progress import Progress
from ingot.errors import IngotError, ResourceError, UsageError
from ingot.model.store import OverwritePolicy
from ingot.reporting.report import Bytes, Count, Line, Report, Texts, figures_of
from ingot.reporting.reportable import Reportable
from ingot.stores.local import LocalTarget
from ingot.stores.location import Location


@dataclass(frozen=True, slots=True)
class Restored(Reportable):
    """The result of restoring: the folder, and the number and total size in bytes of the restored files.

    ``damaged`` contains a line for each file that could not be restored.
    """

    source: str
    destination: str
    files: Count
    size: Bytes
    damaged: Texts = ()

    def report(self) -> Report:
        """Return the figures and lines as a ``Report``."""
        words = "{destination}: {files} files of {size} restored; each has the SHA-256 of the original"
        return Report(figures_of(self), [Line(words), Line("not restored: {item}", items="damaged")])


@takes(RestoreOptions, "restore")
def restore(options: RestoreOptions) -> Restored:
    """Restore the files of an archive into a folder; each restored file has the SHA-256 of the original.

    Files that cannot be restored, because the archive is damaged or was cut off, are left out, and ``damaged`` names
    them. The folder appears when all other files are complete.

    Returns
    -------
    Restored

    Raises
    ------
    UsageError
        ``archive.none``: this is no archive; ``archive.only``: no file matches; ``target.exists``, ``target.foreign``.
    FormatError, IntegrityError
        ``archive.*``: no file can be restored; ``archive.base-digest``: ``against`` is another model.
    UnsupportedError
        ``archive.base``: the archive refers to another model, which its folder lacks and ``against`` does not name.
    ResourceError
        ``ram.ceiling``; disk full.

    Examples
    --------
    >>> report = ingot.archive("model", "model.zt")
    >>> ingot.restore("model.zt", "copy", only=["config.json"]).files
    1
    """
    with _opened(Location.parse(options.src)) as (store, fault):
        files = _selected(store, options.only)
        objects = store.objects
        if options.against is not None:
            objects.use_base(*find(Location.parse(options.against), "pread"))
        elif any(map(objects.needs_base, files)):
            objects.require_base()
        reading = plan_reading(objects, files, options.max_ram, options.threads)
        size = sum(file.size for file in files)
        destination = Location.parse(options.out)
        policy = OverwritePolicy(options.overwrite, partial(require_ours, also=frozenset(file.name for file in files)))
        problems = list(_padding(store)) if fault is None else []
        written: list[ArchivedFile] = []
        with destination.stage(policy, directory=True, resume=options.resume) as staging:
            staging.require_room(size)
            target = LocalTarget(staging.files)
            progress = Progress(size, options.progress)
            for file in files:
                if staging.resumed and matches(target.store(), file):
                    written.append(file)
                    continue
                try:
                    _write(target, file, contents(objects, file, reading), progress)
                except IngotError as error:
                    if isinstance(error, ResourceError) or error.rule == BASE_DIGEST:
                        raise
                    problems.append(error)
                else:
                    written.append(file)
            if not written:
                raise fault or problems[-1]
            staging.publish([file.name for file in written])
    return Restored(
        source=store.location,
        destination=destination.display,
        files=len(written),
        size=sum(file.size for file in written),
        damaged=[*([str(fault)] if fault else []), *(str(error) for error in problems)],
    )


@contextmanager
def _opened(location: Location) -> Iterator[tuple[ArchiveStore, IngotError | None]]:
    """Open an archive; yield its files, and the error of its manifest if the archive was cut off, else None."""
    outer, name = location.find_file()
    fault: IngotError | None = None
    try:
        opened = open_archive(outer, name)
    except IngotError as error:
        salvaged = salvage(outer, name)
        if salvaged is None:
            raise
        fault = error
        source, store = salvaged
        sources = [source]
    else:
        if opened is None:
            raise UsageError("expected an archive of `ingot archive`", rule="archive.none", where=location.display)
        catalog, store = opened
        sources = list(catalog.sources)
    try:
        yield store, fault
    finally:
        for source in sources:
            source.close()


def _padding(store: ArchiveStore) -> Iterator[IngotError]:
    """Yield an error if bytes between the objects are damaged. Such damage affects no file."""
    try:
        check_padding(store.objects)
    except IngotError as error:
        yield error


def _selected(store: ArchiveStore, patterns: Sequence[str]) -> list[ArchivedFile]:
    """Return the files whose names match a pattern; all files if there are no patterns."""
    files = list(store.layout.files)
    for pattern in patterns:
        if not any(fnmatchcase(file.name, pattern) for file in files):
            message = f"no file of the archive matches {pattern[:200]!r}; it has {', '.join(f.name for f in files[:8])}"
            raise UsageError(message, rule="archive.only", where=store.location)
    return [file for file in files if not patterns or any(fnmatchcase(file.name, item) for item in patterns)]


def _write(target: LocalTarget, file: ArchivedFile, chunks: Iterator[memoryview], progress: Progress) -> None:
    """Write the content of a file. Raises the errors of ``contents``."""
    sink = target.create(file.name)
    offset = 0
    try:
        for data in chunks:
            sink.write_at(offset, data)
            offset += data.nbytes
            progress.advance(data.nbytes, file.name)
        sink.truncate(offset)
    finally:
        sink.close()
