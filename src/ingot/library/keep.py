"""Keeping a library: what is in it and what it takes, removing what nobody needs, checking all of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from ingot.core.options import takes
from ingot.core.runtime.progress import Progress
from ingot.errors import IngotError, ResourceError
from ingot.inspect.findings import Finding
from ingot.library.manifest import Manifest, file_of
from ingot.library.objects import Form, Objects, require_known
from ingot.library.options import CheckOptions, CollectOptions, ListOptions, RemoveOptions
from ingot.library.place import Place, using
from ingot.reporting.report import Bytes, Count, Line, Report, figures_of, table_of
from ingot.reporting.shown import Shown
from ingot.stores.location import Location
from ingot.stores.shared import Use

_BATCH = 1000
"""Files that are removed before it is looked again whether nobody else uses the library."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One artifact: ``size`` are its files' bytes, ``stored`` those of the objects that it needs, of which ``shared``
    are needed by others too; ``own`` are what removing it would free. ``problem`` is a rule, where it is damaged."""

    name: str
    container: str
    files: Count
    size: Bytes
    stored: Bytes
    shared: Bytes
    own: Bytes
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Holdings(Shown):
    """What is in a library: artifacts, the bytes of their files, those of all objects, those that nobody needs."""

    location: str
    artifacts: list[Entry]
    size: Bytes
    stored: Bytes
    unneeded: Bytes

    def report(self) -> Report:
        """Return the artifacts as a table."""
        figures = [item for item in figures_of(self) if item.name != "artifacts"]
        heads = {"name": "artifact", "container": "format", "files": "files", "size": "size", "stored": "stored"}
        heads |= {"shared": "of it shared", "own": "own", "problem": "problem" if self._damaged() else ""}
        tables = [table_of("artifacts", self.artifacts, Entry, heads if self.artifacts else None)]
        words = "{location}: {size} of files stored in {stored}"
        unneeded = ", of which {unneeded} can be removed by ingot store gc" if self.unneeded else ""
        return Report(figures, [], tables, [Line(words + unneeded)])

    def _damaged(self) -> bool:
        return any(entry.problem for entry in self.artifacts)


@takes(ListOptions, "store")
def ls(options: ListOptions) -> Holdings:
    """Tell which artifacts are in a library, and what they take. Reads manifests and a listing, no object.

    Returns
    -------
    Holdings
    """
    with using(Location.parse(options.library)) as place:
        objects = place.objects()
        needs: dict[str, set[Form]] = {}
        known: dict[str, Manifest] = {}
        problems: dict[str, str] = {}
        names = place.names()
        for name in names:
            try:
                known[name] = place.manifest(name)
                needs[name] = objects.needed(known[name].objects())
            except IngotError as error:
                problems[name] = error.rule or "damaged"
        users = Counter(form for forms in needs.values() for form in forms)
        entries = []
        for name in names:
            forms, manifest = needs.get(name, set()), known.get(name)
            stored = objects.stored(forms)
            own = objects.stored(form for form in forms if users[form] == 1)
            files, size = (len(manifest.files), manifest.size) if manifest else (0, 0)
            container = manifest.format if manifest else ""
            entries.append(Entry(name, container, files, size, stored, stored - own, own, problems.get(name, "")))
        unneeded = 0 if problems else objects.stored(set(objects.forms()) - set(users))
        stored = objects.stored(objects.forms())
        return Holdings(place.location, entries, sum(entry.size for entry in entries), stored, unneeded)


@takes(RemoveOptions, "store")
def rm(options: RemoveOptions) -> None:
    """Remove an artifact from a library's list. Its objects stay until ``gc``, and those that others need after it.

    Returns
    -------
    None

    Raises
    ------
    UsageError
        ``library.unknown``.
    """
    with using(Location.parse(options.library)) as place:
        if not place.has(options.name):
            require_known(options.name, place.names(), place.location)
        place.folder.remove([file_of(options.name)])


@dataclass(frozen=True, slots=True)
class Collected(Shown):
    """What was removed, or would be: objects, the bytes of their files, and what interrupted additions had left."""

    location: str
    dry_run: bool
    objects: Count
    size: Bytes
    leftovers: Count

    def report(self) -> Report:
        """Return it as figures."""
        verb = "would be removed" if self.dry_run else "removed"
        words = (
            f"{{location}}: {{objects}} objects of {{size}} {verb}, {{leftovers}} leftovers of interrupted additions"
        )
        return Report(figures_of(self), [Line(words)])


@takes(CollectOptions, "store")
def gc(options: CollectOptions) -> Collected:
    """Remove the objects that no artifact needs, and what interrupted additions left.

    Nobody adds or gets meanwhile. Whatever is interrupted, what artifacts need is there: it was told from the manifests
    before the first removal, and only manifests make needs. With a manifest that cannot be read nothing is removed.

    Returns
    -------
    Collected

    Raises
    ------
    ResourceError
        ``library.busy``: somebody was using the library for longer than ``wait`` seconds. ``library.lost``: this
        process was cut off from a bucket for so long that others may have begun to use it; what is left stays.
    IntegrityError, FormatError
        ``library.manifest``, ``library.manifest-digest``, ``library.missing``, ``library.chain``: nothing was removed.
    """
    place = Place(Location.parse(options.library))
    with place.folder.alone(options.wait) as use:
        objects = place.objects()
        needed = {form for name in place.names() for form in objects.needed(place.manifest(name).objects())}
        doomed = [form for form in objects.forms() if form not in needed]
        leftovers = place.folder.leftovers()
        size = objects.stored(doomed)
        if not options.dry_run:
            files = [*(form.file for form in doomed), *leftovers]
            for start in range(0, len(files), _BATCH):
                _require_alone(place, use)
                place.folder.remove(files[start : start + _BATCH])
        left = len(leftovers) + place.folder.abandoned(remove=not options.dry_run)
    return Collected(place.location, options.dry_run, len(doomed), size, left)


def _require_alone(place: Place, use: Use) -> None:
    if not use.is_held():
        raise ResourceError(
            "this process was cut off from the library for so long that others took it for dead, and may need what it "
            "was about to remove: try again",
            rule="library.lost",
            where=place.location,
        )


@takes(CheckOptions, "store")
def verify(options: CheckOptions) -> list[Finding]:
    """Check every object's digest, and that every manifest is whole and all that it needs is there.

    Returns
    -------
    list of Finding
        Errors by rule; those of artifacts say what they are missing.
    """
    with using(Location.parse(options.library)) as place:
        objects = place.objects()
        state = Progress(objects.stored(objects.forms()), options.progress)
        found: list[Finding] = []
        bad: set[Form] = set()
        for form in sorted(objects.forms(), key=lambda form: form.file):
            error = _wrong(objects, form)
            if error is not None:
                bad.add(form)
                found.append(_finding("error", error, place.folder.store.location_of(form.file)))
            state.advance(objects.stored([form]), form.file)
        for name in place.names():
            found += _artifact(place, objects, name, bad)
        for stray in objects.strays:
            words = "a file that is no object; nothing reads it"
            found.append(Finding("note", "library.stray", place.folder.store.location_of(stray), words))
        return found


def _artifact(place: Place, objects: Objects, name: str, bad: set[Form]) -> Iterator[Finding]:
    try:
        manifest = place.manifest(name)
    except IngotError as error:
        yield _finding("error", error, name)
        return
    told = set()
    for piece in manifest.pieces():
        what = f"{name}: {piece.tensor or piece.object}"
        try:
            damaged = next((form for form in objects.chain(piece.object) if form in bad), None)
        except IngotError as error:
            yield _finding("error", error, what)
            continue
        if damaged is not None and what not in told:
            told.add(what)
            yield Finding("error", "library.damaged", what, f"needs {damaged.file}, which is damaged")


def _wrong(objects: Objects, form: Form) -> IngotError | None:
    """Return what is wrong with an object as it is stored in this form."""
    try:
        objects.check(form)
    except IngotError as error:
        return error
    return None


def _finding(level: str, error: IngotError, where: str) -> Finding:
    return Finding(level, error.rule or "", where, error.message)
