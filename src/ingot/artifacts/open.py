"""Open a checkpoint: find its format, let the format locate the parts, hand each tensor its decoder."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from ingot.artifacts.companions import Companions, find_companions
from ingot.artifacts.unread_dialects import Dialect, of_config, of_tensors
from ingot.codecs.table import CODECS
from ingot.core.border import bordered
from ingot.core.registry import did_you_mean
from ingot.errors import IngotError, IntegrityError, UsageError, install_hint
from ingot.formats.base import Catalog, Format
from ingot.formats.detect import FORMATS, detect_file, detect_folder, explain, listing
from ingot.formats.safetensors.index import unlisted_files
from ingot.formats.safetensors.patch import read_pairs
from ingot.formats.shared.foreign import HEAD
from ingot.model.bytesource import StampedSource
from ingot.model.checkpoint import Checkpoint, CheckpointSource
from ingot.model.delta import KEY
from ingot.model.reading.lazy import TensorMap, as_tensor_map
from ingot.model.reading.limits import require_decompressed
from ingot.model.store import CachedStore, FilteredStore, Store
from ingot.model.tensor import Tensor
from ingot.naming.config import CONFIG
from ingot.stores.location import AnyPath, Location
from ingot.stores.table import STORES

STORES.add("library", "ingot.library.place:LibraryScheme")  # what it reads takes formats and codecs: it lies here


@dataclass(slots=True)
class Source(CheckpointSource):
    """An opened artifact before decoders are attached: its store, format, entry file and catalog.

    ``location`` is the address that it was opened by, for messages and reports. ``name`` is the opened file in
    ``store``; empty if the store itself, a folder, was opened. ``requested_io`` and ``max_decompressed`` are options of
    ``ingot.open`` with which a copy of its checkpoint is opened; without ``requested_io`` there are no copies.
    """

    location: str
    store: Store
    name: str
    format: Format
    entry: str
    catalog: Catalog
    io: str
    verify: bool = True
    requested_io: str | None = None
    max_decompressed: int | str | None = None
    _whole: bool = False

    def require_unchanged(self) -> None:
        """Refuse a source that was written to since it was opened: what was read of it may be of two versions.

        Raises
        ------
        IntegrityError
            ``store.changed``.
        """
        for source in self.catalog.sources:
            if source.changed():
                raise IntegrityError(
                    "store.changed",
                    "the file was written to while it was being read; try again when it is complete",
                    where=source.name,
                )

    def require_whole(self) -> None:
        """Compare the digest that covers the whole file, where the format has one and digests are to be checked; once.

        Raises ``IntegrityError`` with the format's rule.
        """
        if self.verify and not self._whole and self.catalog.check_whole is not None:
            self.catalog.check_whole()
            self._whole = True

    def require_decompressed(self, asked: int | str | None = None) -> None:
        """Refuse compressed parts that would become larger than ``asked``; see ``model.reading.limits``."""
        draft = self.catalog.attachments.draft or {}
        require_decompressed(chain(self.catalog.tensors.values(), draft.values()), asked, self.location)

    def dialect(self) -> Dialect | None:
        """Return who packed the weights, where that is a program whose words Ingot does not decode.

        Told by the folder's ``config.json``, unless its format goes by that, and by the tensors themselves.
        """
        config = {} if self.format.traits.config_keys else self.config()
        return of_config(config, self.store.location_of(CONFIG)) or of_tensors(self.catalog.tensors)

    def config(self) -> dict[str, Any]:
        """Return what the folder's ``config.json`` says; nothing for a file, or where no object can be read."""
        if not self.is_folder:
            return {}
        try:
            return self.format.read_config(self.store)
        except IngotError:
            return {}

    def identity(self) -> list[list[Any]]:
        """Return what tells this source from another: digests of the headers, and the stamps of the open files.

        What is read later comes from these very files, or is refused; a path may lead elsewhere by now.
        """
        headers = [[ascii(name), hashlib.sha256(raw).hexdigest()] for name, raw in self.catalog.headers.items()]
        sources = self.catalog.sources
        return [*sorted(headers), *(list(source.stamp) for source in sources if isinstance(source, StampedSource))]

    @property
    def is_folder(self) -> bool:
        """Whether a folder was opened, not a file in one."""
        return not self.name

    @property
    def url(self) -> str:
        """Where another process finds the artifact; empty where none can."""
        return self.store.url_of(self.name)

    def stored(self) -> int:
        """Return the bytes of the artifact's own files."""
        return sum(self.store.stat(name).size for name in self.catalog.headers)

    def would_overwrite(self, target: str, *, folder: bool) -> bool:
        """Whether a new file, or a new folder, at the address ``target`` would remove one of the artifact's files."""
        return self.store.would_overwrite({self.name, *self.catalog.headers}, target, folder=folder)

    def companions(self) -> Companions:
        """Return what lies beside the artifact's own files in its folder; nothing where a single file was opened."""
        return find_companions(self.store, self.catalog.headers) if self.is_folder else Companions()

    def view(self) -> Checkpoint:
        """Return the checkpoint of the artifact, with a decoder for each tensor. Closing it closes the source."""
        catalog = self.catalog
        attachments = self.catalog.attachments
        if attachments.draft is not None:
            attachments = replace(attachments, draft=with_decoders(attachments.draft))
        return Checkpoint(
            with_decoders(catalog.tensors),
            format=self.format.name,
            location=self.location,
            metadata=catalog.metadata,
            companions=self.companions().files,
            io=self.io,
            source=self,
            attachments=attachments,
            aliases=catalog.aliases,
            features=catalog.features,
            unread=catalog.unread,
        )

    def reopen(self) -> tuple[Callable[..., Checkpoint], tuple[Any, ...]] | None:
        if self.requested_io is None:
            return None
        return _open_again, (self.url, self.requested_io, self.verify, self.identity(), self.max_decompressed)

    def close(self) -> None:
        """Close the files of the catalog."""
        for source in self.catalog.sources:
            source.close()


def with_decoders(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the same tensors, each given its codec's decoder when it is first asked for."""

    return _Decoding(tensors)


class _Decoding(TensorMap[Tensor]):
    """Tensors that get their decoders when they are asked for: who keeps them is the mapping behind this one."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = as_tensor_map(tensors)

    def __getitem__(self, name: str) -> Tensor:
        return _decoding(self._tensors[name])

    def get_uncached(self, name: str) -> Tensor:
        return _decoding(self._tensors.get_uncached(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors


def _decoding(tensor: Tensor) -> Tensor:
    if tensor.decoder is None and tensor.codec in CODECS:
        tensor.decoder = CODECS[tensor.codec]
    return tensor


@bordered
def open(
    path: AnyPath, *, io: str = "auto", verify: bool = True, max_decompressed: int | str | None = None
) -> Checkpoint:
    """Open a checkpoint: a file in any format that Ingot reads, or a folder that holds one.

    Parameters
    ----------
    path : path or address
        A ``.zt`` or ``.safetensors`` file, a ``model.safetensors.index.json``, or a folder with one of them.
    io : {"auto", "mmap", "pread"}
        How bytes are read: mapped (free of copies), by read calls (right on network disks), or chosen by file system.
    verify : bool
        Check each part's digest when it is read whole.
    max_decompressed : int or str, optional
        The most bytes that one compressed part may become, such as ``"2GiB"``; by default what the environment variable
        ``INGOT_MAX_DECOMPRESSED`` says. A file that states more is refused: ``FormatError`` ``part.max-decompressed``.

    Returns
    -------
    Checkpoint
        Header or manifest completely validated; no tensor read yet.

    Raises
    ------
    UsageError
        The path does not exist, or the folder holds no checkpoint or several.
    FormatError, IntegrityError, UnsupportedError
        The file breaks a rule of its format; ``model.quantized``: another program packed its weights.
    """
    return open_there(*find(Location.parse(path), io), io=io, verify=verify, max_decompressed=max_decompressed)


def open_there(
    store: Store, name: str, *, io: str = "auto", verify: bool = True, max_decompressed: int | str | None = None
) -> Checkpoint:
    """Open what ``find`` has found; see ``open``."""
    return weights_of(open_found(store, name, verify=verify, max_decompressed=max_decompressed, requested_io=io))


def weights_of(source: Source) -> Checkpoint:
    """Return the checkpoint of a source whose tensors are to be decoded.

    If another program has packed them, it raises ``UnsupportedError`` ``model.quantized`` and closes the source.
    """
    dialect = source.dialect()
    if dialect is not None:
        source.close()
        raise _located(dialect.refusal(), source.location)
    return source.view()


def _open_again(
    url: str, io: str, verify: bool, identity: list[list[Any]], max_decompressed: int | str | None
) -> Checkpoint:
    """Open what a pickled checkpoint was opened from; ``IntegrityError`` ``store.changed`` where that is another."""
    source = open_source(Location.parse(url), io=io, verify=verify, max_decompressed=max_decompressed, requested_io=io)
    if source.identity() != identity:
        source.close()
        raise IntegrityError(
            "store.changed",
            "expected the checkpoint that the copied one was opened from, found one that was written to or replaced "
            "since; open it by its path",
            where=source.location,
        )
    return source.view()


def find(location: Location, io: str = "auto") -> tuple[Store, str]:
    """Return the store that contains an artifact, and the artifact's name there, which is empty for a folder.

    Opens no file. Raises ``UsageError`` ``open.io``, ``open.missing``, ``open.url``, and the errors of the store.
    """
    if io not in ("auto", "mmap", "pread"):
        raise UsageError(f"expected io 'auto', 'mmap' or 'pread', found {io!r}", rule="open.io")
    if not location.given:  # an unset variable of a shell; it would be the current folder
        raise missing_error(location)
    try:
        return location.find_model(io)
    except UsageError as error:
        if error.rule in ("store.missing", "store.scheme"):
            raise missing_error(location, error) from None
        raise


def address_of(location: Location) -> str:
    """Return the address at which another process finds an artifact; empty if no process can.

    Raises the errors of ``find``.
    """
    store, name = find(location)
    return store.url_of(name)


def local_text(text: str, address: str) -> str:
    """Return the text of a location that another process parsed, if it leads to the same address; else the address.

    With the same text, messages are the same in both processes.
    """
    try:
        return text if address_of(Location.parse(text)) == address else address
    except IngotError:
        return address


def open_source(
    location: Location,
    *,
    io: str = "auto",
    verify: bool = True,
    max_decompressed: int | str | None = None,
    trust_index: bool = False,
    requested_io: str | None = None,
) -> Source:
    """Locate and validate; see ``open``. With ``trust_index``, weight files that a folder's index does not list are
    ignored."""
    store, name = find(location, io)
    if trust_index and not name:
        store = FilteredStore(store, unlisted_files(store))
    return open_found(store, name, verify=verify, max_decompressed=max_decompressed, requested_io=requested_io)


def open_found(
    store: Store,
    name: str,
    *,
    verify: bool = True,
    max_decompressed: int | str | None = None,
    requested_io: str | None = None,
) -> Source:
    """Open and validate a file or folder of a store; see ``open`` and ``Source``."""
    listed = CachedStore(store)
    location = store.location_of(name)
    try:
        format, entry = detect(listed, name)
        catalog = format.read(listed, entry, verify=verify)
    except IngotError as error:
        inner = _fallback_folder(listed) if error.rule == "detect.none" else None
        if inner is not None:
            return open_found(inner, "", verify=verify, max_decompressed=max_decompressed, requested_io=requested_io)
        raise _located(explain(error, store), location) from None
    source = Source(
        location, store, name, format, entry, catalog, _io_of(catalog), verify, requested_io, max_decompressed
    )
    try:
        source.require_decompressed(max_decompressed)
    except BaseException:
        source.close()
        raise
    return source


def _fallback_folder(store: Store) -> Store | None:
    """Return the folder inside ``store`` that holds the weights, if a format finds one."""
    for _, format in FORMATS.available():
        folder = format.fallback_folder(store)
        if folder is not None:
            return Location.in_store(store, folder).store()
    return None


def detect(store: Store, name: str) -> tuple[Format, str]:
    """Return the format and the entry file of a file, or of a folder where ``name`` is empty; raises as the functions
    of ``formats.detect``."""
    if name:
        return detect_file(name, store.head(name, HEAD)), name
    return detect_folder(listing(store), store)


def _located(error: IngotError, location: str) -> IngotError:
    if error.where and location.endswith(f"/{error.where}"):
        error.where = location  # the same file, by its name alone
    places = (error.where or "").split(": ")
    named = any(place == location or place.startswith(f"{location}/") for place in places)
    return error if named else error.at(location)


def open_delta(
    location: Location, *, io: str = "auto", verify: bool = True, max_decompressed: int | str | None = None
) -> Source:
    """Open what is to be applied to a base; see ``open``.

    A safetensors file of nothing but pairs of positions and values is ordinary tensors elsewhere; here it is a patch.
    """
    source = open_source(location, io=io, verify=verify, max_decompressed=max_decompressed)
    if source.format.name == "safetensors" and KEY not in source.catalog.metadata:
        try:
            source.catalog = read_pairs(source.catalog, location.display) or source.catalog
        except BaseException:
            source.close()
            raise
    return source


def _io_of(catalog: Catalog) -> str:
    return "mmap" if catalog.sources and all(source.mapped for source in catalog.sources) else "pread"


_LOCAL = ("file", "memory")


def missing_error(location: Location, error: IngotError | None = None) -> UsageError:
    """Return the error for a location without a file or folder; ``error`` is the error of its store.

    Returns
    -------
    UsageError
        ``open.url``: an address of an unknown scheme; ``open.missing``: anything else.
    """
    if not location.scheme:
        return UsageError(
            "Ingot reads paths, and addresses that begin with "
            f"{', '.join(f'{name}:' for name in STORES if name not in _LOCAL)}; download it first, and give the path",
            rule="open.url",
            where=location.display,
        )
    if location.text.partition("://")[0].lower() == location.scheme:
        message = "there is no file or folder at this address" if error is None else error.message
        return UsageError(message, rule="open.missing", where=location.display)
    hint = ""
    names = location.siblings() if location.given else None
    if location.may_be_hub_id and names is None:
        hint = f"; to read a model of the Hugging Face Hub by its name: {install_hint('hub')}"
    elif names:
        hint = did_you_mean(location.name, names)
    return UsageError(f"no such file or folder{hint}", rule="open.missing", where=location.display or "''")
