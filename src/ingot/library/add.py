"""Add an artifact to a library: write objects, verify that the files can be reassembled, then write the manifest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace

from ingot.artifacts.adapter_files import CONFIG as ADAPTER_CONFIG
from ingot.artifacts.adapter_files import Adapter, adapter_of
from ingot.artifacts.open import open_source_in_store
from ingot.core.bytes.checksums import Blake3
from ingot.core.options import takes
from ingot.core.runtime.parallel import check_cancelled
from ingot.core.runtime.progress import Progress
from ingot.errors import CodecError, FormatError, IngotError, IntegrityError, ResourceError, UsageError
from ingot.formats.detect import HEAD, detect_file, detect_folder, listing
from ingot.library.adapter_base import find_base, require_sound
from ingot.library.cut import Segment, covered, files_of, segments
from ingot.library.encode import MIN_DELTA, as_delta, smallest
from ingot.library.manifest import INLINE, AdapterBase, Chunk, File, Manifest, file_of
from ingot.library.objects import MAX_DELTAS, Objects, StorageForm, id_of
from ingot.library.options import AUTO, AddOptions
from ingot.library.place import OpenLibrary
from ingot.library.remake import contents
from ingot.model.bytesource import ByteSource, Stamp
from ingot.model.store import Store
from ingot.reporting.report import Bytes, Count, Line, Report, Texts, figures_of
from ingot.reporting.reportable import Reportable
from ingot.stores.location import Location
from ingot.stores.shared import FolderLock, SharedStaging

NONE = "none"
_MAX_TRIED = 8
_SAMPLE = 8 << 20
_NEARLY = 0.95

Key = tuple[str, str, str, int]


@dataclass(frozen=True, slots=True)
class Base:
    """An artifact from which differences of new objects may be stored.

    ``objects`` maps the key of each tensor part to the id of its object.
    """

    name: str = ""
    objects: Mapping[Key, str] = field(default_factory=dict)

    def object_for(self, segment: Segment, objects: Objects) -> str:
        """Return the id of the object from which a segment's difference may be stored; empty if no object is suitable.

        If the base object has the maximum number of deltas, return the first object of its chain.
        """
        id = self.objects.get(segment.key, "") if segment.tensor and segment.size >= MIN_DELTA else ""
        if not id:
            return ""
        try:
            chain = objects.chain(id)
        except IngotError:
            return ""  # the base is damaged; verify reports it
        return chain[0].id if len(chain) > MAX_DELTAS else id


def base_of(manifest: Manifest) -> Base:
    """Return the artifact of ``manifest`` as a base for new objects."""
    return Base(
        manifest.name,
        {
            (chunk.tensor, chunk.part, chunk.dtype, chunk.size): chunk.object
            for chunk in manifest.object_chunks()
            if chunk.tensor
        },
    )


def choose_base(
    library: OpenLibrary,
    objects: Objects,
    parts: Iterable[Segment],
    requested: str,
    read: Callable[[Segment], memoryview],
) -> Base:
    """Return the requested base; for ``auto``, the candidate to which the largest common tensor has the smallest delta.

    The candidates for ``auto`` are the artifacts with the most bytes in tensors of the same name, dtype and size.
    Candidates with short chains of deltas are tried first. ``read`` returns the content of a segment.

    Raises ``UsageError`` ``library.unknown``, and the errors of reading the requested artifact's manifest.
    """
    if requested == NONE:
        return Base()
    if requested != AUTO:
        return base_of(library.manifest(requested))
    segments = {part.key: part for part in parts if part.tensor and part.size >= MIN_DELTA}
    candidates: list[tuple[int, Base]] = []
    for name in library.names() if segments else ():
        try:
            base = base_of(library.manifest(name))
        except IngotError:
            continue  # damaged, or removed by another process
        shared = sum(key[3] for key in base.objects if key in segments)
        if shared:
            candidates.append((shared, base))
    most_shared = max((shared for shared, _ in candidates), default=0)
    nearest = [base for shared, base in candidates if shared >= most_shared * _NEARLY]
    return _nearest(nearest, segments, objects, read) if nearest else Base()


def _nearest(
    bases: list[Base], segments: Mapping[Key, Segment], objects: Objects, read: Callable[[Segment], memoryview]
) -> Base:
    """Return the base to which the largest common tensor has the smallest delta.

    Among bases with nearly equal deltas, it is the base with the shortest chain of deltas.
    """
    common = [key for key in segments if all(key in base.objects for base in bases)]
    if len(bases) == 1 or not common:
        return bases[0]
    key = max(common, key=lambda item: (item[3], item))
    lengths: dict[str, int] = {}
    for base in bases:
        try:
            lengths[base.name] = len(objects.chain(base.objects[key]))
        except IngotError:
            continue
    ordered = sorted((base for base in bases if base.name in lengths), key=lambda base: (lengths[base.name], base.name))
    data = read(segments[key])
    size = min(data.nbytes, _SAMPLE)
    best = Base()
    smallest = data.nbytes + 1
    for base in ordered[:_MAX_TRIED]:
        try:
            values = objects.values(base.objects[key], data.nbytes)
        except IngotError:
            continue
        size_of_delta = as_delta(data[:size], key[2], values[:size]).nbytes
        if size_of_delta < smallest * _NEARLY:
            best = base
            smallest = size_of_delta
    return best


_BATCH = 64
_BATCH_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Added(Reportable):
    """The result of an addition.

    ``size`` is the total size of the files in bytes, ``stored`` the growth of the library in bytes. ``present`` counts
    the objects that existed already, ``deltas`` those stored as differences to objects of ``base``, and ``full`` those
    stored without a base. ``notes`` describe an artifact that is not a model.
    """

    name: str
    base: str
    files: Count
    size: Bytes
    stored: Bytes
    present: Count
    deltas: Count
    full: Count
    notes: Texts = ()

    def report(self) -> Report:
        """Return the figures and notes as a ``Report``."""
        words = (
            "{name}: {files} files of {size} added in {stored}; "
            "objects: {present} present already, {deltas} deltas, {full} in full"
        )
        base = [Line("{base}", "base")] if self.base else []
        return Report(figures_of(self), [Line(words), *base, Line("{item}", "note", items="notes")])


@takes(AddOptions, "store")
def add(options: AddOptions) -> Added:
    """Add a folder with all of its files, or a single file, to a library; create the library if it does not exist.

    Each tensor is stored once, regardless of its name and file. A new tensor is stored as a difference, with an entropy
    code, in zstd or raw, whichever is smallest. Before the artifact is listed, each of its files is reassembled from
    the library and compared with the source.

    Returns
    -------
    Added

    Raises
    ------
    UsageError
        ``library.name``, ``library.exists``, ``library.empty``, ``library.within``, ``library.none``;
        ``library.unknown`` for the base; ``target.no-parent``.
    FormatError
        ``library.adapter``: a damaged adapter; ``base`` ``none`` stores it without the check.
    UnsupportedError
        ``adapter.base``, ``adapter.shape``: ``base`` is not the base of an adapter.
    IntegrityError
        ``store.changed``: the source changed during the addition; ``library.digest``.
    ResourceError
        ``library.busy``, ``library.lost``; disk full.
    """
    location = Location.parse(options.library)
    store, single = Location.parse(options.src).find_model(io="pread")
    name = options.name if options.name is not None else _name_of(store, single)
    file_of(name)
    if not single and store.contains_address(location.url):
        raise UsageError(
            "expected a library outside the folder to add: choose another folder for it",
            rule="library.within",
            where=location.display,
        )
    adapter = _adapter_in(store, single, check=options.base != NONE)
    library = OpenLibrary(location, create=True)
    with library.folder.shared_lock() as use, library.folder.stage() as adding:
        addition = _Addition(library, adding, store, options)
        manifest = addition.run(name, single, adapter)
        _publish_manifest(library, manifest, use)
        return addition.report(manifest)


def _name_of(store: Store, single: str) -> str:
    name = single or store.location.rstrip("/").rpartition("/")[2]
    try:
        file_of(name)
    except UsageError:
        raise UsageError(
            f"{name[:80]!r} cannot be the name of an artifact: set one with --name", rule="library.name"
        ) from None
    return name


def _adapter_in(store: Store, single: str, *, check: bool) -> Adapter | None:
    """Return the adapter in the artifact; None if it contains a model or other files.

    With ``check``, raise ``FormatError`` ``library.adapter`` for a damaged adapter, which ``get`` could not merge. An
    adapter is not checked if Ingot does not support its method.
    """
    try:
        source = open_source_in_store(store, single, verify=False)
    except IngotError as error:  # artifacts may consist of any files
        if check and not single and store.exists(ADAPTER_CONFIG):
            raise _damaged(error, store.location) from None
        return None
    with closing(source):
        adapter = adapter_of(source)
        if adapter is None or not check:
            return adapter
        try:
            require_sound(source)
        except (FormatError, CodecError) as error:
            raise _damaged(error, store.location) from None
        return adapter


def _damaged(error: IngotError, location: str) -> FormatError:
    return FormatError(
        "library.adapter",
        f"the adapter is damaged and could not be merged: {error}; get it again, or add the files as they are "
        "(--base none)",
        where=location,
    )


class _Addition:
    def __init__(self, library: OpenLibrary, adding: SharedStaging, store: Store, options: AddOptions) -> None:
        self._library = library
        self._adding = adding
        self._store = store
        self._options = options
        self._objects = library.objects()
        self._base = Base()
        self._waiting: dict[StorageForm, int] = {}
        self._written: dict[str, StorageForm] = {}
        self._present: set[str] = set()
        self._distrusted: set[str] = set()
        self._retried = False
        self._stored = 0
        self._progress = Progress(0)
        self._notes: list[str] = []

    def run(self, name: str, single: str, adapter: Adapter | None) -> Manifest:
        """Write all objects; return the manifest, verified but not yet written."""
        store = self._store
        adapter_base = None if adapter is None else self._find_base(adapter)
        names = [single] if single else sorted(files_of(store))
        if not names:
            raise UsageError("expected files, but the folder is empty", rule="library.empty", where=store.location)
        stamps = {file: store.stat(file) for file in names}
        parts = segments(store, names, folder=not single)
        self._progress = Progress(2 * sum(stamp.size for stamp in stamps.values()), self._options.progress)
        all_parts = [(file, part) for file in names for part in parts[file]]
        files = {id(part): file for file, part in all_parts}

        def read(part: Segment) -> memoryview:
            source = store.open(files[id(part)])
            try:
                return _read(source, part)
            finally:
                source.close()

        requested = self._options.base if adapter is None or self._options.base == NONE else AUTO
        self._base = choose_base(self._library, self._objects, [part for _, part in all_parts], requested, read)

        def write_files() -> tuple[File, ...]:
            files = tuple(self._file(file, parts[file], stamps[file]) for file in names)
            self._flush()
            return files

        manifest = Manifest(name, not single, self._format(single), write_files(), adapter_base)
        self._distrusted = self._proven(manifest)
        if self._distrusted:
            self._retried = True
            manifest = replace(manifest, files=write_files())
            self._proven(manifest)
        if any(store.stat(file) != stamps[file] for file in names):
            raise _changed(store.location)
        self._require_free(manifest)
        return manifest

    def _find_base(self, adapter: Adapter) -> AdapterBase | None:
        """Return the adapter's base in the library, and add notes about both."""
        requested = self._options.base
        if requested == NONE:
            self._notes.append(adapter.describe())
            return None
        try:
            base, note = find_base(self._library, self._options.src, requested)
        except IngotError as error:
            if requested != AUTO:
                raise
            self._notes += [adapter.describe(), f"the base of this adapter was not searched: {error}"]
            return None
        self._notes += [note] if base is not None else [adapter.describe(), note]
        return base

    def report(self, manifest: Manifest) -> Added:
        """Return the result of the addition."""
        deltas = sum(bool(variant.base) for variant in self._written.values())
        return Added(
            name=manifest.name,
            base=self._base.name if deltas else "",
            files=len(manifest.files),
            size=manifest.size,
            stored=self._stored,
            present=len(self._present),
            deltas=deltas,
            full=len(self._written) - deltas,
            notes=self._notes,
        )

    def _file(self, name: str, parts: Sequence[Segment], stamp: Stamp) -> File:
        source = self._store.open(name)
        hasher = Blake3()
        try:
            if source.size != stamp.size:
                raise _changed(source.name)
            chunks = []
            for segment in covered(parts, source.size):
                check_cancelled()
                data = _read(source, segment)
                hasher.update(data)
                chunks.append(self._chunk(segment, data))
                self._progress.advance(data.nbytes, segment.tensor or name)
            if source.changed():
                raise _changed(source.name)
        finally:
            source.close()
        return File(name, source.size, hasher.text(), tuple(chunks))

    def _chunk(self, segment: Segment, data: memoryview) -> Chunk:
        if not segment.tensor and (data.nbytes <= INLINE or not data[0]):
            raw = bytes(data)
            if not raw.strip(b"\0"):
                return Chunk(len(raw))
            if len(raw) <= INLINE:
                return Chunk(len(raw), data=raw)
        id = id_of(data)
        if id in self._distrusted:
            self._distrusted.discard(id)
            self._present.discard(id)
            self._write(id, segment, data, Base())
        elif id not in self._written and id in self._objects and self._is_whole(id):
            self._present.add(id)
        elif id not in self._written:
            self._write(id, segment, data, self._base)
        tensor_fields = (segment.tensor, segment.part, segment.dtype, segment.shape) if segment.tensor else ()
        return Chunk(data.nbytes, id, b"", *tensor_fields)

    def _is_whole(self, id: str) -> bool:
        """Return whether all objects from which the object ``id`` is decoded exist."""
        try:
            return bool(self._objects.chain(id))
        except IngotError:
            return False

    def _write(self, id: str, segment: Segment, data: memoryview, base: Base) -> None:
        base_id = base.object_for(segment, self._objects)
        encoded = smallest(data, segment.dtype, self._values(base_id, data.nbytes) if base_id not in ("", id) else None)
        variant = StorageForm(id, base_id if encoded.is_delta else "")
        size = encoded.write(self._adding.files, variant, segment.shape or (segment.size,))
        self._written[id] = variant
        self._waiting[variant] = size
        self._stored += size
        if len(self._waiting) >= _BATCH or sum(self._waiting.values()) >= _BATCH_BYTES:
            self._flush()

    def _values(self, id: str, size: int) -> memoryview | None:
        try:
            return self._objects.values(id, size)
        except IngotError:
            return None  # the base is damaged, so it is not used; verify reports it

    def _flush(self) -> None:
        self._adding.publish([variant.file for variant in self._waiting])
        for variant, size in self._waiting.items():
            self._objects.add(variant, size)
        self._waiting = {}

    def _proven(self, manifest: Manifest) -> set[str]:
        """Reassemble every file from the library and compare it with its digest.

        Return damaged objects of the library, which the caller writes again before it repeats the check. Raises
        ``library.digest`` for any other difference, and for objects that stay damaged.
        """
        damaged: set[str] = set()
        for file in manifest.files:
            try:
                for data in contents(self._objects, file):
                    self._progress.advance(data.nbytes, file.name)
            except IngotError:
                damaged_objects = {chunk.object for chunk in file.chunks if chunk.object and self._is_damaged(chunk)}
                if self._retried or not damaged_objects:
                    raise
                damaged |= damaged_objects
        return damaged

    def _is_damaged(self, chunk: Chunk) -> bool:
        try:
            return not self._objects.values(chunk.object, chunk.size)
        except IngotError:
            return True

    def _require_free(self, manifest: Manifest) -> None:
        if self._options.overwrite or not self._library.has(manifest.name):
            return
        existing = self._library.manifest(manifest.name)
        if _digests(existing) != _digests(manifest) or existing.folder != manifest.folder:
            raise UsageError(
                "the library has another artifact with this name: choose another name with --name, or replace the "
                "artifact with --overwrite",
                rule="library.exists",
                where=manifest.name,
            )

    def _format(self, single: str) -> str:
        """Return the name of the artifact's format for listings; empty if it is not supported."""
        try:
            if single:
                return detect_file(single, self._store.head(single, HEAD)).name
            return detect_folder(listing(self._store), self._store)[0].name
        except IngotError:
            return ""


def _publish_manifest(library: OpenLibrary, manifest: Manifest, use: FolderLock) -> None:
    """Write the manifest, which makes the artifact visible and its objects needed.

    If this process lost its lease and a collector ran, objects may be missing; then the manifest is deleted again.
    """
    file = file_of(manifest.name)
    library.folder.write(file, manifest.encoded())
    if use.is_held():
        return
    try:
        library.objects().needed(manifest.objects())
    except IngotError:
        library.folder.remove([file])
        raise ResourceError(
            "this process lost its lease on the library, and another process deleted objects that it had added: add "
            "the artifact again",
            rule="library.lost",
            where=library.location,
        ) from None


def _digests(manifest: Manifest) -> Mapping[str, str]:
    return {file.name: file.digest for file in manifest.files}


def _read(source: ByteSource, segment: Segment) -> memoryview:
    data = memoryview(bytearray(segment.size))
    source.readinto(segment.start, data)
    return data


def _changed(location: str) -> IntegrityError:
    return IntegrityError(
        "store.changed",
        "the files were written to while they were being read; try again when they are complete",
        where=location,
    )
