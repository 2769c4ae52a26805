"""Maintenance of a library: list and remove artifacts, delete unneeded objects, check objects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from ingot.core.options import takes
from ingot.core.runtime.progress import Progress
from ingot.errors import IngotError, ResourceError, UsageError
from ingot.inspect.findings import Finding
from ingot.library.manifest import Manifest, file_of
from ingot.library.objects import Objects, StorageForm, require_known
from ingot.library.options import CheckOptions, CollectOptions, ListOptions, RemoveOptions
from ingot.library.place import OpenLibrary, using
from ingot.reporting.report import Bytes, Count, Line, Report, figures_of, table_of
from ingot.reporting.reportable import Reportable
from ingot.stores.location import Location
from ingot.stores.shared import FolderLock

_BATCH = 1000
"""Number of files to delete before the exclusive lock is checked again."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A row of a listing: an artifact and its sizes.

    All sizes are in bytes. ``size`` is that of the artifact's files, ``stored`` that of the objects it needs, and
    ``shared`` that of the needed objects that other artifacts need too. Removing this artifact and collecting would
    free ``removable`` bytes. ``problem`` is an error rule if the artifact is damaged. ``base`` is an adapter's base.
    """

    name: str
    container: str
    files: Count
    size: Bytes
    stored: Bytes
    shared: Bytes
    removable: Bytes
    problem: str = ""
    base: str = ""


@dataclass(frozen=True, slots=True)
class Holdings(Reportable):
    """The contents of a library: artifacts, and the bytes of their files, of all objects and of unneeded objects."""

    location: str
    artifacts: list[Entry]
    size: Bytes
    stored: Bytes
    unneeded: Bytes

    def report(self) -> Report:
        """Return a report with the artifacts as a table."""
        figures = [item for item in figures_of(self) if item.name != "artifacts"]
        heads = {"name": "artifact", "container": "format", "files": "files", "size": "size", "stored": "stored"}
        heads |= {"base": "adapter of" if any(entry.base for entry in self.artifacts) else ""}
        heads |= {"shared": "of it shared", "removable": "removable", "problem": "problem" if self._damaged() else ""}
        tables = [table_of("artifacts", self.artifacts, Entry, heads if self.artifacts else None)]
        words = "{location}: {size} of files stored in {stored}"
        unneeded = ", of which {unneeded} can be removed by ingot store gc" if self.unneeded else ""
        return Report(figures, [], tables, [Line(words + unneeded)])

    def _damaged(self) -> bool:
        return any(entry.problem for entry in self.artifacts)


@takes(ListOptions, "store")
def ls(options: ListOptions) -> Holdings:
    """Return the artifacts of a library with their sizes, adapters after their base.

    The function reads manifests and a listing, but no objects.

    Returns
    -------
    Holdings
    """
    with using(Location.parse(options.library)) as library:
        objects = library.objects()
        needs: dict[str, set[StorageForm]] = {}
        manifests: dict[str, Manifest] = {}
        problems: dict[str, str] = {}
        names = library.names()
        for name in names:
            try:
                manifests[name] = library.manifest(name)
                needs[name] = objects.needed(manifests[name].objects())
            except IngotError as error:
                problems[name] = error.rule or "damaged"
        users = Counter(variant for variants in needs.values() for variant in variants)
        entries = []
        for name in names:
            variants, manifest = needs.get(name, set()), manifests.get(name)
            stored = objects.stored(variants)
            exclusive = objects.stored(variant for variant in variants if users[variant] == 1)
            files, size = (len(manifest.files), manifest.size) if manifest else (0, 0)
            container = manifest.format if manifest else ""
            base = manifest.base.name if manifest and manifest.base else ""
            problem = problems.get(name, "")
            entries.append(Entry(name, container, files, size, stored, stored - exclusive, exclusive, problem, base))
        entries.sort(key=lambda entry: (entry.base or entry.name, bool(entry.base), entry.name))
        unneeded = 0 if problems else objects.stored(set(objects.variants()) - set(users))
        stored = objects.stored(objects.variants())
        return Holdings(library.location, entries, sum(entry.size for entry in entries), stored, unneeded)


@takes(RemoveOptions, "store")
def rm(options: RemoveOptions) -> None:
    """Remove an artifact from a library's list; ``gc`` later deletes the objects that no other artifact needs.

    Returns
    -------
    None

    Raises
    ------
    UsageError
        ``library.unknown``; ``library.base``: without ``force``, adapters in the library have this base.
    """
    with using(Location.parse(options.library)) as library:
        if not library.has(options.name):
            require_known(options.name, library.names(), library.location)
        adapters = [] if options.force else _adapters_of(library, options.name)
        if adapters:
            raise UsageError(
                f"{options.name} is the base of {', '.join(adapters[:3])}{' and others' if len(adapters) > 3 else ''};"
                " remove the adapters first, or pass --force",
                rule="library.base",
                where=library.location,
            )
        library.folder.remove([file_of(options.name)])


def _adapters_of(library: OpenLibrary, base: str) -> list[str]:
    """Return the names of the adapters that were added with a base."""
    names = []
    for name in library.names():
        try:
            reference = library.manifest(name).base
        except IngotError:
            continue  # damaged, or removed by another process
        if reference is not None and reference.name == base:
            names.append(name)
    return names


@dataclass(frozen=True, slots=True)
class Collected(Reportable):
    """The number and total size of deleted objects, and the files of interrupted additions.

    With ``dry_run``, these are the objects and files that would be deleted.
    """

    location: str
    dry_run: bool
    objects: Count
    size: Bytes
    leftovers: Count

    def report(self) -> Report:
        """Return the figures as a ``Report``."""
        verb = "would be removed" if self.dry_run else "removed"
        words = (
            f"{{location}}: {{objects}} objects of {{size}} {verb}, {{leftovers}} leftovers of interrupted additions"
        )
        return Report(figures_of(self), [Line(words)])


@takes(CollectOptions, "store")
def gc(options: CollectOptions) -> Collected:
    """Delete the objects that no artifact needs, and files of interrupted additions.

    An exclusive lock excludes additions and retrievals. An interruption loses nothing: needed objects are determined
    from the manifests before the first deletion, and nothing is deleted if a manifest cannot be read.

    Returns
    -------
    Collected

    Raises
    ------
    ResourceError
        ``library.busy``: another process used the library for longer than ``wait`` seconds. ``library.lost``: this
        process lost its lease on a bucket, so other processes may use the library now; remaining objects stay.
    IntegrityError, FormatError
        ``library.manifest``, ``library.manifest-digest``, ``library.missing``, ``library.chain``: nothing was deleted.
    """
    library = OpenLibrary(Location.parse(options.library))
    with library.folder.exclusive_lock(options.wait) as use:
        objects = library.objects()
        needed = {variant for name in library.names() for variant in objects.needed(library.manifest(name).objects())}
        doomed = [variant for variant in objects.variants() if variant not in needed]
        leftovers = library.folder.leftovers()
        size = objects.stored(doomed)
        if not options.dry_run:
            files = [*(variant.file for variant in doomed), *leftovers]
            for start in range(0, len(files), _BATCH):
                _require_alone(library, use)
                library.folder.remove(files[start : start + _BATCH])
        leftover_count = len(leftovers) + library.folder.abandoned(remove=not options.dry_run)
    return Collected(library.location, options.dry_run, len(doomed), size, leftover_count)


def _require_alone(library: OpenLibrary, use: FolderLock) -> None:
    if not use.is_held():
        raise ResourceError(
            "this process lost its lease on the library, and other processes may need what it was about to delete: try "
            "again",
            rule="library.lost",
            where=library.location,
        )


@takes(CheckOptions, "store")
def verify(options: CheckOptions) -> list[Finding]:
    """Check every object and every manifest of a library, and return what is damaged or missing.

    The digests of objects and manifests are compared, and every object that a manifest needs must exist.

    Returns
    -------
    list of Finding
        Findings with their rules: errors, and notes about files that are no objects.
    """
    with using(Location.parse(options.library)) as library:
        objects = library.objects()
        state = Progress(objects.stored(objects.variants()), options.progress)
        findings: list[Finding] = []
        damaged: set[StorageForm] = set()
        for variant in sorted(objects.variants(), key=lambda variant: variant.file):
            error = _problem(objects, variant)
            if error is not None:
                damaged.add(variant)
                findings.append(_finding("error", error, library.folder.store.location_of(variant.file)))
            state.advance(objects.stored([variant]), variant.file)
        for name in library.names():
            findings += _artifact(library, objects, name, damaged)
        for stray in objects.strays:
            words = "this file is no object and is not used; delete it"
            findings.append(Finding("note", "library.stray", library.folder.store.location_of(stray), words))
        return findings


def _artifact(library: OpenLibrary, objects: Objects, name: str, bad: set[StorageForm]) -> Iterator[Finding]:
    try:
        manifest = library.manifest(name)
    except IngotError as error:
        yield _finding("error", error, name)
        return
    reported = set()
    for chunk in manifest.object_chunks():
        user = f"{name}: {chunk.tensor or chunk.object}"
        try:
            damaged = next((variant for variant in objects.chain(chunk.object) if variant in bad), None)
        except IngotError as error:
            yield _finding("error", error, user)
            continue
        if damaged is not None and user not in reported:
            reported.add(user)
            yield Finding("error", "library.damaged", user, f"needs {damaged.file}, which is damaged")


def _problem(objects: Objects, variant: StorageForm) -> IngotError | None:
    """Return the error that a check of this stored object raises; None if it is intact."""
    try:
        objects.check(variant)
    except IngotError as error:
        return error
    return None


def _finding(level: str, error: IngotError, location: str) -> Finding:
    return Finding(level, error.rule or "", location, error.message)
