"""Getting an artifact out of a library: the files that were added, bit for bit, or another container."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from ingot.artifacts.replaceable import require_ours
from ingot.conversion.run import convert
from ingot.core.options import takes
from ingot.core.runtime.progress import Progress
from ingot.errors import UsageError
from ingot.library.manifest import Manifest
from ingot.library.options import GetOptions
from ingot.library.place import Place, using
from ingot.library.remake import write_file
from ingot.model.store import Replaced
from ingot.reporting.report import Bytes, Count, Line, Report, Texts, figures_of
from ingot.reporting.shown import Shown
from ingot.stores.local import LocalTarget
from ingot.stores.location import Location


@dataclass(frozen=True, slots=True)
class Got(Shown):
    """What was written: where, how many files, their bytes; ``notes`` are those of a conversion."""

    name: str
    destination: str
    files: Count
    size: Bytes
    notes: Texts = ()

    def report(self) -> Report:
        """Return it as figures."""
        return Report(
            figures_of(self),
            [Line("{name}: {files} files of {size} written to {destination}"), Line("note: {item}", each="notes")],
        )


@takes(GetOptions, "store")
def get(options: GetOptions) -> Got:
    """Write an artifact of a library to a file or folder.

    Without ``format`` it is what was added, bit for bit, each file compared with its digest before any appears; with
    it, the artifact is converted into that container as ``ingot.convert`` does. In memory is a tensor at a time.

    Returns
    -------
    Got

    Raises
    ------
    UsageError
        ``library.unknown``, ``library.none``, ``library.drop``, ``target.exists``, ``target.foreign``.
    IntegrityError, FormatError
        ``library.missing``, ``library.digest``, ``library.chain``, ``library.object``; what converting raises.
    """
    if options.drop and options.format is None:
        raise UsageError("--drop is for conversions: name a --format", rule="library.drop")
    with using(Location.parse(options.library)) as place:
        manifest = place.manifest(options.name)
        if options.format is not None:
            return _converted(place, manifest, options)
        return _written(place, manifest, options)


def _written(place: Place, manifest: Manifest, options: GetOptions) -> Got:
    objects = place.objects()
    objects.needed(manifest.objects())
    names = [file.name for file in manifest.files]
    replaced = Replaced(options.overwrite, partial(require_ours, also=frozenset(names)))
    state = Progress(manifest.size, options.progress)
    destination = Location.parse(options.dst)
    with destination.stage(replaced, directory=manifest.folder) as staging:
        staging.require_room(manifest.size)
        target = LocalTarget(staging.files)
        made = []
        for file in manifest.files:
            name = file.name if manifest.folder else "file"
            sink = target.create(name)
            try:
                for count in write_file(objects, file, sink):
                    state.advance(count, file.name)
            finally:
                sink.close()
            made.append(name)
        staging.publish(made)
    return Got(manifest.name, destination.display, len(made), manifest.size)


def _converted(place: Place, manifest: Manifest, options: GetOptions) -> Got:
    if not manifest.format:
        raise UsageError(
            "expected an artifact that Ingot can open, to convert it; found other files: get them as they are",
            rule="library.no-checkpoint",
            where=manifest.name,
        )
    report = convert(
        place.url_of(manifest.name),
        options.dst,
        format=options.format,
        drop=options.drop,
        overwrite=options.overwrite,
        progress=options.progress,
    )
    files = len(report.files) + len(report.companions)
    return Got(manifest.name, report.destination, files, report.size, report.notes)
