"""What travels beside the weights: packing it, and taking it out again (``spec/attachments.md``)."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Collection, Iterator
from functools import partial
from os import PathLike

import msgspec

from ingot.artifacts.destination import destination
from ingot.artifacts.draft_head import DraftShape, check_head
from ingot.artifacts.extract_options import CoremlOptions, DraftOptions
from ingot.artifacts.open import open_source
from ingot.artifacts.save import plan_tensors, save_planned
from ingot.core.files.archive import Entry, is_unpacked, pack, unpack
from ingot.core.options import takes
from ingot.errors import FormatError, IngotError, UnsupportedError, UsageError
from ingot.formats.base import Format
from ingot.model.part import Part
from ingot.model.store import Store
from ingot.stores.cache import cached, default_cache
from ingot.stores.files import temporary_source
from ingot.stores.local import LocalStore
from ingot.stores.location import AnyPath, Location
from ingot.stores.temporary import temporary_folder

KINDS = {"draft": "draft head", "coreml": "Core ML package", "program": "Core ML program", "graph": "ONNX graph"}
WITH_WEIGHTS = ("draft", "coreml")
"""Kinds that hold weights of their own; a program or graph uses those of the checkpoint."""
PACKAGE_SUFFIX = ".mlpackage"
_MANIFEST = "Manifest.json"
_PACKAGE_RULE = "attachments.coreml-package"
_LARGEST_MANIFEST = 1 << 20
_CHUNK = 1 << 20


def require_carried(format: Format, kinds: Collection[str]) -> None:
    """Refuse, by rule ``convert.attachment``, kinds of attachments that ``format`` cannot carry."""
    for kind in sorted(set(kinds) - set(format.traits.attachments)):
        other = {"program": "a .mlpackage", "graph": "a .onnx"}.get(kind, "a .squizd, for instance")
        raise UnsupportedError(
            f"{format.name} cannot carry a {KINDS[kind]}; leave --{kind} out, or write {other}",
            rule="convert.attachment",
        )


def pack_package(location: Location) -> Part:
    """Zip a Core ML package into an unnamed temporary file (in ``$TMPDIR``) and return it as a part.

    The bytes depend on the files' names and contents alone. The part's source is to be closed.

    Raises
    ------
    FormatError
        ``attachments.coreml-package``; ``archive.*`` for links and for names that could not be unpacked everywhere.
    UsageError, ResourceError
        ``open.missing``; the disk is full.
    """
    store = _package_at(location)
    require_package(store)
    source = temporary_source(partial(pack, store.require_path("", "packing a Core ML package")))
    part = Part("u8", source.size, source, where=f"{location} (packed)")
    part.digest = f"sha256:{package_digest(part)}"
    return part


def _package_at(location: Location) -> Store:
    try:
        store, name = location.find()
    except UsageError as error:
        if error.rule != "store.missing":
            raise
        raise _no_package_folder(location) from None
    if name:
        raise _no_package_folder(location)
    return store


def _no_package_folder(location: Location) -> UsageError:
    return UsageError(f"there is no folder *{PACKAGE_SUFFIX} here", rule="open.missing", where=location.display)


def require_package(store: Store, folder: str = "") -> None:
    """Check that a folder is a Core ML package: ``Manifest.json`` names a root model, and that is there.

    The layout is that of coremltools' ``ModelPackage``: items lie under ``Data``. Raises ``FormatError``
    ``attachments.coreml-package``.
    """
    where = store.location_of(folder)
    try:
        manifest = msgspec.json.decode(store.read(_within(folder, _MANIFEST), _LARGEST_MANIFEST, _PACKAGE_RULE))
        root = manifest["rootModelIdentifier"]
        item = manifest["itemInfoEntries"][root]["path"]
        pieces = item.split("/")
    except IngotError as error:
        raise _no_package(where, f"{_MANIFEST} ({error.message})") from error
    except (msgspec.DecodeError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise _no_package(where, f"{_MANIFEST} with the root model's path, found {type(error).__name__}") from error
    inside = item.isprintable() and not any(piece in ("", ".", "..") for piece in pieces)
    if not inside or not _is_there(store, _within(folder, f"Data/{item}")):
        raise _no_package(where, f"the root model Data/{item!r}, found nothing there")


def _within(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _is_there(store: Store, name: str) -> bool:
    """Whether a store has a file or folder of this name."""
    outer, _, last = name.rpartition("/")
    try:
        return store.exists(name) or last in store.list(outer).folders
    except IngotError:  # too long a name
        return False


def package_digest(part: Part) -> str:
    """Return the sha256 of a zipped package in hex; checks the part's own digest on the way."""
    reader = part.reader()
    running = hashlib.sha256()
    buffer = bytearray(_CHUNK)
    for start in range(0, part.nbytes, _CHUNK):
        piece = memoryview(buffer)[: min(_CHUNK, part.nbytes - start)]
        reader.readinto(piece)
        running.update(piece)
    reader.finish()
    return running.hexdigest()


def extract_package(part: Part, cache: AnyPath | None = None) -> PathLike[str]:
    """Unpack a zipped Core ML package into the cache and return the package's folder.

    The folder is named by the sha256 of the zip and appears whole, flushed to disk, or not at all, also with several
    processes at it. What is there already is compared with the zip, and replaced where a file is missing or another.

    Raises
    ------
    FormatError, IntegrityError
        ``archive.*``, ``attachments.coreml-package``: nothing is left in the cache.
    ResourceError
        Disk full, cache not writable.
    """
    name = f"{package_digest(part)}{PACKAGE_SUFFIX}"
    folder = default_cache("coreml") if cache is None else Location.parse(cache).text
    store = cached(folder, name, partial(_holds, part), partial(_fill, part))
    return store.local_path(_package_in(store))


def _holds(part: Part, store: LocalStore) -> bool:
    return is_unpacked(_reading(part), part.nbytes, store.local_path(), part.where)


def _fill(part: Part, store: LocalStore) -> None:
    unpack(_reading(part), part.nbytes, store.local_path(), part.where)
    _package_in(store)


def check_package(part: Part) -> None:
    """Check that a zipped Core ML package can be unpacked; only its names and its manifest are, for a moment.

    Raises as ``extract_package``.
    """
    with temporary_folder() as folder:
        store = LocalStore(folder)
        package_digest(part)
        unpack(_reading(part), part.nbytes, store.local_path(), part.where, keep=_is_manifest)
        _package_in(store)


def _is_manifest(entry: Entry) -> bool:
    return entry.name.split("/")[-1] == _MANIFEST and entry.size <= _LARGEST_MANIFEST


@takes(DraftOptions, "extract")
def extract_draft(options: DraftOptions) -> DraftShape | None:
    """Write the draft head of the artifact ``path`` to ``out`` (a file by its suffix, or a folder), names included.

    Raises
    ------
    UsageError
        ``attachments.none``: the artifact carries none; ``target.exists``, ``target.foreign``.
    FormatError
        ``draft.*``.
    """
    location = Location.parse(options.path)
    source = open_source(location)
    try:
        draft = source.view().attachments.draft
        if draft is None:
            raise no_attachment("draft", location)
        with located(location.display):
            shape = check_head(draft)
        target_place = destination(Location.parse(options.out), options.format)
        target = target_place.format
        tensors = {
            name: tensor if not target.why_unsupported(tensor.spec()) else tensor.numpy()
            for name, tensor in draft.items()
        }
        save_planned(target_place, plan_tensors(target, tensors), {}, overwrite=options.overwrite)
    finally:
        source.close()
    return shape


@takes(CoremlOptions, "extract")
def extract_coreml(options: CoremlOptions) -> PathLike[str]:
    """Unpack the Core ML package of the artifact ``path``; see ``extract_package``.

    Raises ``UsageError`` ``attachments.none`` where the artifact carries none.
    """
    location = Location.parse(options.path)
    source = open_source(location, io="pread")
    try:
        part = source.catalog.attachments.coreml
        if part is None:
            raise no_attachment("coreml", location)
        return extract_package(part, options.cache)
    finally:
        source.close()


def _package_in(store: Store) -> str:
    """Return the package's own folder: the archive's root, or the one folder in it, as other packers make them."""
    folder = ""
    if not store.exists(_MANIFEST):
        listing = store.list()
        inner = [name for name in (*listing.files, *listing.folders) if name != "__MACOSX"]
        folder = inner[0] if len(inner) == 1 and inner[0] in listing.folders else ""
    require_package(store, folder)
    return folder


def _reading(part: Part) -> Callable[[int, memoryview], None]:
    if part.encoding != "raw":
        raise FormatError("attachments.encoding", f"expected stored bytes, found {part.encoding}", where=part.where)

    def read_at(offset: int, out: memoryview) -> None:
        part.source.readinto(part.offset + offset, out)

    return read_at


@contextlib.contextmanager
def located(where: str) -> Iterator[None]:
    """Say in errors of draft heads where the head is."""
    try:
        yield
    except IngotError as error:
        raise error.at(where) from None


def _no_package(where: str, expected: str) -> FormatError:
    return FormatError(_PACKAGE_RULE, f"expected a Core ML package: {expected}", where=where)


def no_attachment(kind: str, location: Location) -> UsageError:
    """Return the error ``attachments.none``."""
    advice = f"put one in with `ingot convert MODEL OUT --{kind} PATH`"
    return UsageError(
        f"expected a {KINDS[kind]} in this artifact, found none: {advice}",
        rule="attachments.none",
        where=location.display,
    )
