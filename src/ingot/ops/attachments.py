"""What travels beside the weights: packing it, and taking it out again (``spec/attachments.md``)."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator
from os import PathLike
from pathlib import Path

import msgspec

from ingot.core.archive import Entry, is_unpacked, pack, unpack
from ingot.core.atomic import flush, flush_tree
from ingot.core.options import takes
from ingot.core.oserrors import read_error, write_error
from ingot.core.paths import local_path
from ingot.core.rename import exchange
from ingot.errors import FormatError, IngotError, UnsupportedError, UsageError
from ingot.formats.base import Format
from ingot.model.part import Part
from ingot.ops.convert.draft import DraftShape, check_head
from ingot.ops.destination import destination
from ingot.ops.extract_options import CoremlOptions, DraftOptions
from ingot.ops.open import checkpoint_of, open_source
from ingot.ops.save import plan_tensors, save_planned
from ingot.stores.files import UnnamedSource

AnyPath = str | PathLike[str]

KINDS = {"draft": "draft head", "coreml": "Core ML package", "program": "Core ML program"}
PACKAGE_SUFFIX = ".mlpackage"
_MANIFEST = "Manifest.json"
_LARGEST_MANIFEST = 1 << 20
_CHUNK = 1 << 20


def require_carried(format: Format, kinds: Collection[str]) -> None:
    """Refuse, by rule ``convert.attachment``, kinds of attachments that ``format`` cannot carry."""
    for kind in sorted(set(kinds) - set(format.attachments)):
        other = "a .mlpackage" if kind == "program" else "a .squizd, for instance"
        raise UnsupportedError(
            f"{format.name} cannot carry a {KINDS[kind]}; leave --{kind} out, or write {other}",
            rule="convert.attachment",
        )


def pack_package(path: AnyPath) -> Part:
    """Zip a Core ML package into an unnamed temporary file (in ``$TMPDIR``) and return it as a part.

    The bytes depend on the files' names and contents alone. The part's source is to be closed.

    Raises
    ------
    FormatError
        ``attachments.coreml-package``; ``archive.*`` for links and for names that could not be unpacked everywhere.
    UsageError, ResourceError
        ``open.missing``; the disk is full.
    """
    folder = local_path(path)
    if not folder.is_dir():
        raise UsageError(f"expected a folder *{PACKAGE_SUFFIX}, found none", rule="open.missing", where=str(path))
    require_package(folder)
    scratch = Path(tempfile.gettempdir())
    try:
        descriptor, name = tempfile.mkstemp(prefix="ingot-", suffix=".zip", dir=scratch)
        try:
            with open(descriptor, "w+b") as out:  # noqa: PTH123 - of a descriptor
                pack(folder, out)
                out.flush()
                source = UnnamedSource(os.dup(descriptor), name)
        finally:
            Path(name).unlink()
    except OSError as error:
        raise write_error(error, str(scratch)) from error
    part = Part("u8", source.size, source, where=f"{path} (packed)")
    part.digest = f"sha256:{package_digest(part)}"
    return part


def require_package(folder: Path) -> None:
    """Check that a folder is a Core ML package: ``Manifest.json`` names a root model, and that is there.

    The layout is that of coremltools' ``ModelPackage``: items lie under ``Data``. Raises ``FormatError``
    ``attachments.coreml-package``.
    """
    try:
        with (folder / _MANIFEST).open("rb") as file:
            data = file.read(_LARGEST_MANIFEST + 1)
        manifest = msgspec.json.decode(data)
        root = manifest["rootModelIdentifier"]
        item = manifest["itemInfoEntries"][root]["path"]
        pieces = item.split("/")
    except (OSError, msgspec.DecodeError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise _no_package(folder, f"{_MANIFEST} with the root model's path, found {type(error).__name__}") from error
    inside = item.isprintable() and not any(piece in ("", ".", "..") for piece in pieces)
    if not inside or not os.path.exists(folder / "Data" / item):  # noqa: PTH110 - pathlib raises for long names
        raise _no_package(folder, f"the root model Data/{item!r}, found nothing there")


def package_digest(part: Part) -> str:
    """Return the sha256 of a zipped package in hex; checks the part's own digest on the way."""
    reader, running = part.reader(), hashlib.sha256()
    buffer = bytearray(_CHUNK)
    for start in range(0, part.nbytes, _CHUNK):
        piece = memoryview(buffer)[: min(_CHUNK, part.nbytes - start)]
        reader.readinto(piece)
        running.update(piece)
    reader.finish()
    return running.hexdigest()


def extract_package(part: Part, cache: AnyPath | None = None) -> Path:
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
    folder = local_path(cache) if cache is not None else default_cache() / "coreml"
    final = folder / f"{package_digest(part)}{PACKAGE_SUFFIX}"
    if not is_unpacked(_reading(part), part.nbytes, final, part.where):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            beside = Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=folder))
        except OSError as error:
            raise write_error(error, str(folder)) from error
        try:
            unpack(_reading(part), part.nbytes, beside, part.where)
            _package_in(beside)
            flush_tree(beside)
            _settle(beside, final)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    return _package_in(final)


def check_package(part: Part) -> None:
    """Check that a zipped Core ML package can be unpacked; only its names and its manifest are, for a moment.

    Raises as ``extract_package``.
    """
    with tempfile.TemporaryDirectory(prefix="ingot-") as folder:
        package_digest(part)
        unpack(_reading(part), part.nbytes, Path(folder), part.where, keep=_is_manifest)
        _package_in(Path(folder))


def _is_manifest(entry: Entry) -> bool:
    return entry.name.split("/")[-1] == _MANIFEST and entry.size <= _LARGEST_MANIFEST


def default_cache() -> Path:
    """Return the folder for what can be made again: ``$INGOT_CACHE``, or the platform's usual place."""
    from platformdirs import user_cache_path

    chosen = os.environ.get("INGOT_CACHE")
    return Path(chosen) if chosen else user_cache_path("ingot", appauthor=False)


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
    path = options.path
    source = open_source(path)
    try:
        draft = checkpoint_of(source).attachments.draft
        if draft is None:
            raise no_attachment("draft", path)
        with located(str(path)):
            shape = check_head(draft)
        target_place = destination(options.out, options.format)
        target = target_place.format
        tensors = {
            name: tensor if not target.refuses(tensor.spec()) else tensor.numpy() for name, tensor in draft.items()
        }
        save_planned(target_place, plan_tensors(target, tensors), {}, overwrite=options.overwrite)
    finally:
        source.close()
    return shape


@takes(CoremlOptions, "extract")
def extract_coreml(options: CoremlOptions) -> Path:
    """Unpack the Core ML package of the artifact ``path``; see ``extract_package``.

    Raises ``UsageError`` ``attachments.none`` where the artifact carries none.
    """
    source = open_source(options.path, io="pread")
    try:
        part = source.catalog.attachments.coreml
        if part is None:
            raise no_attachment("coreml", options.path)
        return extract_package(part, options.cache)
    finally:
        source.close()


def _package_in(folder: Path) -> Path:
    """Return the package's own folder: the archive's root, or the one folder in it, as other packers make them."""
    if not (folder / _MANIFEST).exists():
        try:
            inner = [entry for entry in folder.iterdir() if entry.name != "__MACOSX"]
        except OSError as error:
            raise read_error(error, str(folder)) from error
        if len(inner) == 1 and inner[0].is_dir():
            folder = inner[0]
    require_package(folder)
    return folder


def _settle(beside: Path, final: Path) -> None:
    """Rename, or change names with what is there: damaged, or what another process put there meanwhile, the same."""
    try:
        beside.chmod(0o755)
        if final.is_dir() and not exchange(beside, final):
            shutil.rmtree(final)
        if beside.exists() and not final.exists():
            beside.rename(final)
        flush(final.parent)
    except OSError as error:
        if not final.is_dir():
            raise write_error(error, str(final)) from error


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


def _no_package(folder: Path, expected: str) -> FormatError:
    return FormatError("attachments.coreml-package", f"expected a Core ML package: {expected}", where=str(folder))


def no_attachment(kind: str, path: AnyPath) -> UsageError:
    """Return the refusal ``attachments.none``."""
    return UsageError(
        f"expected a {KINDS[kind]} in this artifact, found none", rule="attachments.none", where=str(path)
    )
