"""Write an artifact of a library: the files that were added, bit for bit, or a conversion of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from ingot.artifacts.replaceable import require_ours
from ingot.conversion.merge import merge
from ingot.conversion.merge_options import MergeOptions
from ingot.conversion.run import convert
from ingot.core.options import takes
from ingot.core.runtime.progress import Progress
from ingot.errors import UsageError
from ingot.library.adapter_base import require_base
from ingot.library.manifest import Manifest
from ingot.library.options import GetOptions
from ingot.library.place import OpenLibrary, using
from ingot.library.remake import write_file
from ingot.model.store import OverwritePolicy
from ingot.reporting.report import Bytes, Count, Line, Report, Texts, figures_of
from ingot.reporting.reportable import Reportable
from ingot.stores.local import LocalTarget
from ingot.stores.location import Location


@dataclass(frozen=True, slots=True)
class Got(Reportable):
    """The result of ``get``: the destination, and the number and total size in bytes of the written files.

    ``notes`` are the notes of the conversion, if the artifact was converted.
    """

    name: str
    destination: str
    files: Count
    size: Bytes
    notes: Texts = ()

    def report(self) -> Report:
        """Return the figures and notes as a ``Report``."""
        return Report(
            figures_of(self),
            [Line("{name}: {files} files of {size} written to {destination}"), Line("note: {item}", items="notes")],
        )


@takes(GetOptions, "store")
def get(options: GetOptions) -> Got:
    """Write an artifact of a library to a file or folder.

    Without ``format``, the added files are restored bit for bit; no file appears before the digests of all files are
    checked. With ``format``, the artifact is converted as by ``ingot.convert``. With ``merge``, an adapter is merged
    into its base as by ``ingot.merge``. Memory holds at most one tensor.

    Returns
    -------
    Got

    Raises
    ------
    UsageError
        ``library.unknown``, ``library.none``, ``library.drop``, ``target.exists``, ``target.foreign``.
    UnsupportedError
        ``library.base``: ``merge`` was requested, but the base is missing or has changed.
    IntegrityError, FormatError
        ``library.missing``, ``library.digest``, ``library.chain``, ``library.object``; the errors of a conversion.
    """
    if options.drop and options.format is None and not options.merge:
        raise UsageError("--drop applies to conversions: add --format", rule="library.drop")
    with using(Location.parse(options.library)) as library:
        manifest = library.manifest(options.name)
        if options.merge:
            return _merge(library, manifest, options)
        if options.format is not None:
            return _convert(library, manifest, options)
        return _write(library, manifest, options)


def _write(library: OpenLibrary, manifest: Manifest, options: GetOptions) -> Got:
    objects = library.objects()
    objects.needed(manifest.objects())
    names = [file.name for file in manifest.files]
    replaced = OverwritePolicy(options.overwrite, partial(require_ours, also=frozenset(names)))
    state = Progress(manifest.size, options.progress)
    destination = Location.parse(options.dst)
    with destination.stage(replaced, directory=manifest.folder) as staging:
        staging.require_room(manifest.size)
        target = LocalTarget(staging.files)
        written = []
        for file in manifest.files:
            name = file.name if manifest.folder else "file"
            sink = target.create(name)
            try:
                for count in write_file(objects, file, sink):
                    state.advance(count, file.name)
            finally:
                sink.close()
            written.append(name)
        staging.publish(written)
    return Got(manifest.name, destination.display, len(written), manifest.size)


def _convert(library: OpenLibrary, manifest: Manifest, options: GetOptions) -> Got:
    if not manifest.format:
        raise UsageError(
            "expected an artifact that Ingot can open, to convert it; get its files without --format",
            rule="library.no-checkpoint",
            where=manifest.name,
        )
    report = convert(
        library.url_of(manifest.name),
        options.dst,
        format=options.format,
        drop=options.drop,
        overwrite=options.overwrite,
        progress=options.progress,
    )
    files = len(report.files) + len(report.companions)
    return Got(manifest.name, report.destination, files, report.size, report.notes)


def _merge(library: OpenLibrary, manifest: Manifest, options: GetOptions) -> Got:
    base = require_base(library, manifest)
    merged = merge(
        MergeOptions(
            library.url_of(base),
            [(library.url_of(manifest.name), 1.0)],
            options.dst,
            format=options.format,
            drop=options.drop,
            overwrite=options.overwrite,
            progress=options.progress,
        )
    )
    report = merged.conversion
    files = len(report.files) + len(report.companions)
    return Got(manifest.name, report.destination, files, report.size, (f"merged into {base}", *report.notes))
