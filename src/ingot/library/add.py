"""Adding an artifact to a library: objects first, then proof that the files can be made again, the manifest last."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace

from ingot.artifacts.adapter_files import adapter_of
from ingot.artifacts.open import open_found
from ingot.core.bytes.checksums import Blake3
from ingot.core.options import takes
from ingot.core.runtime.parallel import go_on
from ingot.core.runtime.progress import Progress
from ingot.errors import IngotError, IntegrityError, ResourceError, UsageError
from ingot.formats.detect import detect_file, detect_folder, listing
from ingot.formats.shared.foreign import HEAD
from ingot.library.cut import Segment, covered, files_of, segments
from ingot.library.encode import LEAST_DELTA, as_delta, smallest
from ingot.library.manifest import INLINE, File, Manifest, Piece, file_of
from ingot.library.objects import MOST_DELTAS, Form, Objects, id_of
from ingot.library.options import AUTO, AddOptions
from ingot.library.place import Place
from ingot.library.remake import contents
from ingot.model.bytesource import ByteSource, Stamp
from ingot.model.store import Store
from ingot.reporting.report import Bytes, Count, Line, Report, Texts, figures_of
from ingot.reporting.shown import Shown
from ingot.stores.location import Location
from ingot.stores.shared import Adding, Use

NONE = "none"
_TRIED = 8
_SAMPLE = 8 << 20
_MUCH = 0.95

Key = tuple[str, str, str, int]


@dataclass(frozen=True, slots=True)
class Base:
    """An artifact to make differences to: its objects, by what they are of."""

    name: str = ""
    objects: Mapping[Key, str] = field(default_factory=dict)

    def of(self, segment: Segment, objects: Objects) -> str:
        """Return the object that a segment may be a delta to, empty where there is none.

        Where the base's own chain is as long as it may be, it is the whole object at its beginning.
        """
        id = self.objects.get(segment.key, "") if segment.tensor and segment.size >= LEAST_DELTA else ""
        if not id:
            return ""
        try:
            chain = objects.chain(id)
        except IngotError:
            return ""  # damaged: verify tells
        return chain[0].id if len(chain) > MOST_DELTAS else id


def base_of(manifest: Manifest) -> Base:
    """Return an artifact as a base."""
    return Base(
        manifest.name,
        {
            (piece.tensor, piece.part, piece.dtype, piece.size): piece.object
            for piece in manifest.pieces()
            if piece.tensor
        },
    )


def choose_base(
    place: Place, objects: Objects, parts: Iterable[Segment], asked: str, read: Callable[[Segment], memoryview]
) -> Base:
    """Return the base that was asked for; for ``auto`` the one to which a large tensor's difference is smallest.

    Looked at are the artifacts that have most of the tensors, by name, type and size; of those those whose objects are
    whole first. ``read`` gives a segment's bytes.

    Raises ``UsageError`` ``library.unknown``, and as ``Place.manifest`` for the one that was asked for.
    """
    if asked == NONE:
        return Base()
    if asked != AUTO:
        return base_of(place.manifest(asked))
    wanted = {part.key: part for part in parts if part.tensor and part.size >= LEAST_DELTA}
    known: list[tuple[int, Base]] = []
    for name in place.names() if wanted else ():
        try:
            base = base_of(place.manifest(name))
        except IngotError:
            continue  # damaged, or removed meanwhile
        shared = sum(key[3] for key in base.objects if key in wanted)
        if shared:
            known.append((shared, base))
    most = max((shared for shared, _ in known), default=0)
    nearest = [base for shared, base in known if shared >= most * _MUCH]
    return _nearest(nearest, wanted, objects, read) if nearest else Base()


def _nearest(
    bases: list[Base], wanted: Mapping[Key, Segment], objects: Objects, read: Callable[[Segment], memoryview]
) -> Base:
    """Return the base whose largest common tensor takes the smallest delta; of equal ones that with fewer deltas."""
    common = [key for key in wanted if all(key in base.objects for base in bases)]
    if len(bases) == 1 or not common:
        return bases[0]
    key = max(common, key=lambda each: (each[3], each))
    lengths: dict[str, int] = {}
    for base in bases:
        try:
            lengths[base.name] = len(objects.chain(base.objects[key]))
        except IngotError:
            continue
    tried = sorted((base for base in bases if base.name in lengths), key=lambda base: (lengths[base.name], base.name))
    data = read(wanted[key])
    size = min(data.nbytes, _SAMPLE)
    best, least = Base(), data.nbytes + 1
    for base in tried[:_TRIED]:
        try:
            values = objects.values(base.objects[key], data.nbytes)
        except IngotError:
            continue
        taken = as_delta(data[:size], key[2], values[:size]).nbytes
        if taken < least * _MUCH:
            best, least = base, taken
    return best


_BATCH, _BATCH_BYTES = 64, 256 << 20


@dataclass(frozen=True, slots=True)
class Added(Shown):
    """What an addition did.

    ``size`` are the bytes of the files, ``stored`` those that the library grew by; of the objects, ``known`` were there
    already, ``deltas`` were stored as differences to those of ``base``, and ``whole`` by themselves. ``notes``
    tell what was added, if it is no model.
    """

    name: str
    base: str
    files: Count
    size: Bytes
    stored: Bytes
    known: Count
    deltas: Count
    whole: Count
    notes: Texts = ()

    def report(self) -> Report:
        """Return it as figures."""
        words = (
            "{name}: {files} files of {size} added in {stored}; objects: {known} known, {deltas} deltas, {whole} whole"
        )
        base = [Line("{base}", "base")] if self.base else []
        return Report(figures_of(self), [Line(words), *base, Line("{item}", "note", each="notes")])


@takes(AddOptions, "store")
def add(options: AddOptions) -> Added:
    """Add a folder, or a file, with all in it to a library; the library is made where nothing is.

    Each tensor is stored once, whatever it is called and in whichever file it lies. One that is not there yet is stored
    as a difference, by an entropy code, in zstd or as it is, whichever is measured to be smallest. Before the artifact
    is listed every file of it was made again from the library and compared with what was read.

    Returns
    -------
    Added

    Raises
    ------
    UsageError
        ``library.name``, ``library.exists``, ``library.empty``, ``library.within``, ``library.none``;
        ``library.unknown`` for the base; ``target.no-parent``.
    IntegrityError
        ``store.changed``: the source was written to; ``library.digest``.
    ResourceError
        ``library.busy``, ``library.lost``; disk full.
    """
    library = Location.parse(options.library)
    store, single = Location.parse(options.src).find_model(io="pread")
    name = options.name if options.name is not None else _name_of(store, single)
    file_of(name)
    if not single and store.holds(library.url):
        raise UsageError(
            "expected a library that does not lie in what is to be added: choose another folder for it",
            rule="library.within",
            where=library.display,
        )
    place = Place(library, create=True)
    with place.folder.using() as use, place.folder.adding() as adding:
        addition = _Addition(place, adding, store, options)
        manifest = addition.run(name, single)
        _list(place, manifest, use)
        return addition.report(manifest)


def _name_of(store: Store, single: str) -> str:
    name = single or store.location.rstrip("/").rpartition("/")[2]
    try:
        file_of(name)
    except UsageError:
        raise UsageError(
            f"expected a name for the artifact (--name), for {name[:80]!r} cannot be one", rule="library.name"
        ) from None
    return name


def _notes_on(store: Store, single: str) -> list[str]:
    """Return what to say of what is added: whether it is an adapter."""
    try:
        source = open_found(store, single, verify=False)
    except IngotError:  # any files may be added
        return []
    with closing(source):
        adapter = adapter_of(source)
    return [] if adapter is None else [adapter.describe()]


class _Addition:
    def __init__(self, place: Place, adding: Adding, store: Store, options: AddOptions) -> None:
        self._place, self._adding, self._store, self._options = place, adding, store, options
        self._objects = place.objects()
        self._base = Base()
        self._waiting: dict[Form, int] = {}
        self._made: dict[str, Form] = {}
        self._known: set[str] = set()
        self._distrusted: set[str] = set()
        self._again = False
        self._stored = 0
        self._progress = Progress(0)
        self._notes: list[str] = []

    def run(self, name: str, single: str) -> Manifest:
        """Write all objects; return the manifest, proven and not yet written."""
        store, self._notes = self._store, _notes_on(self._store, single)
        names = [single] if single else sorted(files_of(store))
        if not names:
            raise UsageError("expected files to add, found none", rule="library.empty", where=store.location)
        stamps = {file: store.stat(file) for file in names}
        parts = segments(store, names, folder=not single)
        self._progress = Progress(2 * sum(stamp.size for stamp in stamps.values()), self._options.progress)
        every = [(file, part) for file in names for part in parts[file]]
        files = {id(part): file for file, part in every}

        def read(part: Segment) -> memoryview:
            source = store.open(files[id(part)])
            try:
                return _read(source, part)
            finally:
                source.close()

        asked = self._options.base
        self._base = choose_base(self._place, self._objects, [part for _, part in every], asked, read)

        def written() -> tuple[File, ...]:
            files = tuple(self._file(file, parts[file], stamps[file]) for file in names)
            self._flush()
            return files

        manifest = Manifest(name, not single, self._format(single), written())
        self._distrusted = self._proven(manifest)
        if self._distrusted:
            self._again = True
            manifest = replace(manifest, files=written())
            self._proven(manifest)
        if any(store.stat(file) != stamps[file] for file in names):
            raise _changed(store.location)
        self._require_free(manifest)
        return manifest

    def report(self, manifest: Manifest) -> Added:
        """Return what was done."""
        deltas = sum(bool(form.base) for form in self._made.values())
        return Added(
            name=manifest.name,
            base=self._base.name if deltas else "",
            files=len(manifest.files),
            size=manifest.size,
            stored=self._stored,
            known=len(self._known),
            deltas=deltas,
            whole=len(self._made) - deltas,
            notes=self._notes,
        )

    def _file(self, name: str, parts: Sequence[Segment], stamp: Stamp) -> File:
        source, running = self._store.open(name), Blake3()
        try:
            if source.size != stamp.size:
                raise _changed(source.name)
            pieces = []
            for segment in covered(parts, source.size):
                go_on()
                data = _read(source, segment)
                running.update(data)
                pieces.append(self._piece(segment, data))
                self._progress.advance(data.nbytes, segment.tensor or name)
            if source.changed():
                raise _changed(source.name)
        finally:
            source.close()
        return File(name, source.size, running.text(), tuple(pieces))

    def _piece(self, segment: Segment, data: memoryview) -> Piece:
        if not segment.tensor and (data.nbytes <= INLINE or not data[0]):
            raw = bytes(data)
            if not raw.strip(b"\0"):
                return Piece(len(raw))
            if len(raw) <= INLINE:
                return Piece(len(raw), data=raw)
        id = id_of(data)
        if id in self._distrusted:
            self._distrusted.discard(id)
            self._known.discard(id)
            self._write(id, segment, data, Base())
        elif id not in self._made and id in self._objects and self._is_whole(id):
            self._known.add(id)
        elif id not in self._made:
            self._write(id, segment, data, self._base)
        told = (segment.tensor, segment.part, segment.dtype, segment.shape) if segment.tensor else ()
        return Piece(data.nbytes, id, b"", *told)

    def _is_whole(self, id: str) -> bool:
        """Whether all that an object is made of is there; one that is not is written again."""
        try:
            return bool(self._objects.chain(id))
        except IngotError:
            return False

    def _write(self, id: str, segment: Segment, data: memoryview, base: Base) -> None:
        near = base.of(segment, self._objects)
        encoded = smallest(data, segment.dtype, self._values(near, data.nbytes) if near not in ("", id) else None)
        form = Form(id, near if encoded.is_delta else "")
        size = encoded.write(self._adding.files, form, segment.shape or (segment.size,))
        self._made[id] = form
        self._waiting[form] = size
        self._stored += size
        if len(self._waiting) >= _BATCH or sum(self._waiting.values()) >= _BATCH_BYTES:
            self._flush()

    def _values(self, id: str, size: int) -> memoryview | None:
        try:
            return self._objects.values(id, size)
        except IngotError:
            return None  # a damaged base is no base; verify tells

    def _flush(self) -> None:
        self._adding.publish([form.file for form in self._waiting])
        for form, size in self._waiting.items():
            self._objects.add(form, size)
        self._waiting = {}

    def _proven(self, manifest: Manifest) -> set[str]:
        """Make every file again, from what is in the library now, and compare.

        Returns the objects that were there before and are damaged, to be written anew; the second time such are
        refused, as is any other difference: ``library.digest``.
        """
        damaged: set[str] = set()
        for file in manifest.files:
            try:
                for data in contents(self._objects, file):
                    self._progress.advance(data.nbytes, file.name)
            except IngotError:
                found = {piece.object for piece in file.pieces if piece.object and self._is_damaged(piece)}
                if self._again or not found:
                    raise
                damaged |= found
        return damaged

    def _is_damaged(self, piece: Piece) -> bool:
        try:
            return not self._objects.values(piece.object, piece.size)
        except IngotError:
            return True

    def _require_free(self, manifest: Manifest) -> None:
        if self._options.overwrite or not self._place.has(manifest.name):
            return
        known = self._place.manifest(manifest.name)
        if _digests(known) != _digests(manifest) or known.folder != manifest.folder:
            raise UsageError(
                "the library has another artifact of this name: choose another with --name, or replace it with "
                "--overwrite",
                rule="library.exists",
                where=manifest.name,
            )

    def _format(self, single: str) -> str:
        """Return which format the artifact is of, to be listed; empty for none that is known."""
        try:
            if single:
                return detect_file(single, self._store.head(single, HEAD)).name
            return detect_folder(listing(self._store), self._store)[0].name
        except IngotError:
            return ""


def _list(place: Place, manifest: Manifest, use: Use) -> None:
    """Write the manifest, after which the artifact counts.

    Whoever collects takes it for needed from then on. Where somebody was alone in spite of this process, which was cut
    off for too long, what is needed may be gone: then there is no artifact.
    """
    file = file_of(manifest.name)
    place.folder.write(file, manifest.encoded())
    if use.is_held():
        return
    try:
        place.objects().needed(manifest.objects())
    except IngotError:
        place.folder.remove([file])
        raise ResourceError(
            "this process was cut off from the library for so long that others took it for dead, and removed what it "
            "had added: add the artifact again",
            rule="library.lost",
            where=place.location,
        ) from None


def _digests(manifest: Manifest) -> Mapping[str, str]:
    return {file.name: file.digest for file in manifest.files}


def _read(source: ByteSource, segment: Segment) -> memoryview:
    data = memoryview(bytearray(segment.size))
    source.readinto(segment.start, data)
    return data


def _changed(where: str) -> IntegrityError:
    return IntegrityError(
        "store.changed",
        "the files were written to while they were being read; try again when they are complete",
        where=where,
    )
