"""Packing and extraction of attachments, such as draft heads and Core ML packages (``spec/attachments.md``)."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Collection, Iterator
from functools import partial
from os import PathLike

import msgspec

from ingot.artifacts.destination import destination
from ingot.artifacts.draft_head import DraftShape, check_head_or_none
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

ATTACHMENT_TITLES = {
    "draft": "draft head",
    "coreml": "Core ML package",
    "program": "Core ML program",
    "graph": "ONNX graph",
}
WITH_WEIGHTS = ("draft", "coreml")
"""Types of attachments that contain separate weights. A program or graph uses the weights of the checkpoint."""
PACKAGE_SUFFIX = ".mlpackage"
_MANIFEST = "Manifest.json"
_PACKAGE_RULE = "attachments.coreml-package"
_LARGEST_MANIFEST = 1 << 20
_CHUNK = 1 << 20


def require_carried(format: Format, names: Collection[str]) -> None:
    """Raise ``UnsupportedError`` ``convert.attachment`` for attachments that ``format`` cannot store."""
    for name in sorted(set(names) - set(format.traits.attachments)):
        alternative = {"program": "a .mlpackage", "graph": "a .onnx"}.get(name, "a .squizd, for instance")
        raise UnsupportedError(
            f"{format.name} cannot carry a {ATTACHMENT_TITLES[name]}; leave --{name} out, or write {alternative}",
            rule="convert.attachment",
        )


def pack_package(location: Location) -> Part:
    """Zip a Core ML package into an unnamed temporary file (in ``$TMPDIR``) and return it as a part.

    The bytes depend only on the names and contents of the files. The caller closes the part's source.

    Raises
    ------
    FormatError
        ``attachments.coreml-package``; ``archive.*`` for links and for names that some systems cannot unpack.
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
    """Check that a folder is a Core ML package: ``Manifest.json`` names a root model, which exists.

    As in coremltools' ``ModelPackage``, the items of a package are in the folder ``Data``. Raises ``FormatError``
    ``attachments.coreml-package``.
    """
    location = store.location_of(folder)
    try:
        manifest = msgspec.json.decode(store.read(_join(folder, _MANIFEST), _LARGEST_MANIFEST, _PACKAGE_RULE))
        root = manifest["rootModelIdentifier"]
        path = manifest["itemInfoEntries"][root]["path"]
        components = path.split("/")
    except IngotError as error:
        raise _no_package(location, f"{_MANIFEST} ({error.message})") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise _no_package(location, f"{_MANIFEST} with the root model's path, found {type(error).__name__}") from error
    is_inside = path.isprintable() and not any(component in ("", ".", "..") for component in components)
    if not is_inside or not _exists(store, _join(folder, f"Data/{path}")):
        raise _no_package(location, f"the root model Data/{path!r}, which does not exist")


def _join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _exists(store: Store, name: str) -> bool:
    """Return whether a store has a file or folder with this name."""
    folder, _, base_name = name.rpartition("/")
    try:
        return store.exists(name) or base_name in store.list(folder).folders
    except IngotError:  # the name is too long
        return False


def package_digest(part: Part) -> str:
    """Return the SHA-256 of a zipped package in hexadecimal digits; also checks the part's digest."""
    reader = part.reader()
    running = hashlib.sha256()
    buffer = bytearray(_CHUNK)
    for start in range(0, part.nbytes, _CHUNK):
        chunk = memoryview(buffer)[: min(_CHUNK, part.nbytes - start)]
        reader.readinto(chunk)
        running.update(chunk)
    reader.finish()
    return running.hexdigest()


def extract_package(part: Part, cache: AnyPath | None = None) -> PathLike[str]:
    """Unpack a zipped Core ML package into the cache and return the package's folder.

    The folder's name is the SHA-256 of the zip. It appears only when it is complete and on disk, also if several
    processes unpack it. An existing folder is compared with the zip and replaced if a file is missing or differs.

    Raises
    ------
    FormatError, IntegrityError
        ``archive.*``, ``attachments.coreml-package``; nothing remains in the cache.
    ResourceError
        Disk full, cache not writable.
    """
    name = f"{package_digest(part)}{PACKAGE_SUFFIX}"
    folder = default_cache("coreml") if cache is None else Location.parse(cache).text
    store = cached(folder, name, partial(_is_unpacked, part), partial(_unpack, part))
    return store.local_path(_package_in(store))


def _is_unpacked(part: Part, store: LocalStore) -> bool:
    return is_unpacked(_reading(part), part.nbytes, store.local_path(), part.where)


def _unpack(part: Part, store: LocalStore) -> None:
    unpack(_reading(part), part.nbytes, store.local_path(), part.where)
    _package_in(store)


def check_package(part: Part) -> None:
    """Check that a zipped Core ML package can be unpacked; unpacks only its manifest, into a temporary folder.

    Raises the errors of ``extract_package``.
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
    """Write the draft head of the artifact ``path`` to ``out``, a file with a format's suffix or a folder.

    Raises
    ------
    UsageError
        ``attachments.none``: the artifact has no draft head; ``target.exists``, ``target.foreign``.
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
            shape = check_head_or_none(draft)
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
    """Unpack the Core ML package of the artifact ``path``; return its folder.

    Raises ``UsageError`` ``attachments.none`` if the artifact has no Core ML package.
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
    """Return the folder of the package: the root of the archive, or its only folder, as some tools pack it."""
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
def located(location: str) -> Iterator[None]:
    """Return a context manager that adds the location of a draft head to the errors that its body raises."""
    try:
        yield
    except IngotError as error:
        raise error.add_location(location) from None


def _no_package(location: str, expected: str) -> FormatError:
    return FormatError(_PACKAGE_RULE, f"expected a Core ML package: {expected}", where=location)


def no_attachment(name: str, location: Location) -> UsageError:
    """Return the error ``attachments.none`` for a missing attachment."""
    advice = f"add it with `ingot convert MODEL OUT --{name} PATH`"
    return UsageError(
        f"this artifact has no {ATTACHMENT_TITLES[name]}; {advice}",
        rule="attachments.none",
        where=location.display,
    )
