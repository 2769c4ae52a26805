"""Opening of checkpoints: detect the format, read the catalog of tensors, and attach a decoder to each tensor."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from ingot.artifacts import ollama
from ingot.artifacts.archive_layout import KEY as ARCHIVE_KEY
from ingot.artifacts.archive_store import SCHEME as ARCHIVE
from ingot.artifacts.archive_store import ArchiveStore, archive_store, open_archive
from ingot.artifacts.companions import Companions, find_companions
from ingot.artifacts.unsupported_packers import Packer, packer_of_config, packer_of_tensors
from ingot.codecs.table import CODECS
from ingot.core.border import bordered
from ingot.core.option_calls import check_size
from ingot.errors import IngotError, IntegrityError, UsageError
from ingot.formats.base import Catalog, Format
from ingot.formats.detect import FORMATS, HEAD, detect_file, detect_folder, explain, listing
from ingot.formats.safetensors.index import unlisted_files
from ingot.formats.safetensors.patch import read_pairs
from ingot.model.bytesource import StampedSource
from ingot.model.checkpoint import Checkpoint, CheckpointSource
from ingot.model.delta import KEY
from ingot.model.reading.lazy import TensorMap, as_tensor_map
from ingot.model.reading.limits import require_decompressed
from ingot.model.store import CachedStore, FilteredStore, Store
from ingot.model.tensor import Tensor
from ingot.naming.config import CONFIG
from ingot.stores.location import AnyPath, Location, missing_error


@dataclass(slots=True)
class Source(CheckpointSource):
    """An opened artifact whose tensors have no decoders yet: its store, format, entry file and catalog.

    ``location`` is the opened address, for messages and reports. ``name`` is the opened file in ``store``; it is empty
    if the folder of the store was opened. ``requested_io`` and ``max_decompressed`` are options of ``ingot.open``, with
    which a copy of the checkpoint opens the artifact again. If ``requested_io`` is None, it cannot be copied.
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
    _is_checked: bool = False

    def require_unchanged(self) -> None:
        """Raise ``IntegrityError`` ``store.changed`` if a file was written to since it was opened.

        The values that were read may belong to two versions of the file then.
        """
        for source in self.catalog.sources:
            if source.changed():
                raise IntegrityError(
                    "store.changed",
                    "the file was written to while it was being read; try again when it is complete",
                    where=source.name,
                )

    def require_whole(self) -> None:
        """Compare the digest of the full file once, if the format stores one and ``verify`` is set.

        Raises ``IntegrityError`` with the format's rule.
        """
        if self.verify and not self._is_checked and self.catalog.check_whole is not None:
            self.catalog.check_whole()
            self._is_checked = True

    def require_decompressed(self, limit: int | str | None = None) -> None:
        """Refuse compressed parts whose decompressed size exceeds ``limit``; see ``model.reading.limits``."""
        draft = self.catalog.attachments.draft or {}
        require_decompressed(chain(self.catalog.tensors.values(), draft.values()), limit, self.location)

    def packer(self) -> Packer | None:
        """Return the tool that packed the weights if Ingot cannot decode its packing; else None.

        The tool is identified by the folder's ``config.json``, unless the format itself uses this config. Otherwise it
        is identified by the names and element types of tensors.
        """
        config = {} if self.format.traits.config_keys else self.config()
        return packer_of_config(config, self.store.location_of(CONFIG)) or packer_of_tensors(self.catalog.tensors)

    def config(self) -> dict[str, Any]:
        """Return the folder's ``config.json``; empty for a single file, or if it cannot be read as a JSON object."""
        if not self.is_folder:
            return {}
        try:
            return self.format.read_config(self.store)
        except IngotError:
            return {}

    def identity(self) -> list[list[Any]]:
        """Return JSON values that identify this source: digests of the headers, and the stamps of the open files.

        Later reads use the open files, even if the path leads to other files after a change.
        """
        headers = [[ascii(name), hashlib.sha256(raw).hexdigest()] for name, raw in self.catalog.headers.items()]
        sources = self.catalog.sources
        return [*sorted(headers), *(list(source.stamp) for source in sources if isinstance(source, StampedSource))]

    @property
    def is_folder(self) -> bool:
        """Whether a folder was opened instead of a file."""
        return not self.name

    @property
    def url(self) -> str:
        """The address at which other processes can open the artifact; empty if there is none."""
        return self.store.url_of(self.name)

    def stored(self) -> int:
        """Return the total size of the artifact's files in bytes, without companions."""
        return sum(self.store.stat(name).size for name in self.catalog.headers)

    def would_overwrite(self, target: str, *, folder: bool) -> bool:
        """Return whether writing the address ``target`` would remove one of the artifact's files.

        ``folder`` states whether a folder or a file is written.
        """
        return self.store.would_overwrite({self.name, *self.catalog.headers}, target, folder=folder)

    def companions(self) -> Companions:
        """Return the companions in the artifact's folder; none if a single file was opened."""
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
    """Return the same tensors; each gets its codec's decoder on access."""
    return _Decoding(tensors)


class _Decoding(TensorMap[Tensor]):
    """The tensors of another mapping, each with its decoder, which is attached on access."""

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
    """Open a checkpoint: a file in any format that Ingot reads, or a folder that contains one.

    Parameters
    ----------
    path : path or address
        A ``.zt`` or ``.safetensors`` file, a ``model.safetensors.index.json``, or a folder with one of them.
    io : {"auto", "mmap", "pread"}
        The method of reading: memory mapping (without copies), read calls (safe on network disks), or a choice by file
        system.
    verify : bool
        Whether a part's digest is checked when the full part is read.
    max_decompressed : int or str, optional
        The largest decompressed size of one part, such as ``"2GiB"``; by default the environment variable
        ``INGOT_MAX_DECOMPRESSED``. A file with a larger part is refused: ``FormatError`` ``part.max-decompressed``.

    Returns
    -------
    Checkpoint
        The header or manifest is completely validated; no tensor is read yet.

    Raises
    ------
    UsageError
        The path does not exist, or the folder contains no checkpoint or several. ``open.option``: a wrong type.
    FormatError, IntegrityError, UnsupportedError
        The file breaks a rule of its format. ``model.quantized``: another program packed its weights.

    Examples
    --------
    >>> with ingot.open("model") as checkpoint:
    ...     print(len(checkpoint), checkpoint["model.norm.weight"].shape)
    39 (192,)
    """
    if not isinstance(verify, bool):
        raise UsageError(f"expected verify to be True or False, found {verify!r:.80}", rule="open.option")
    if max_decompressed is not None:
        check_size("max_decompressed", max_decompressed)
    return open_in_store(*find(Location.parse(path), io), io=io, verify=verify, max_decompressed=max_decompressed)


def open_in_store(
    store: Store, name: str, *, io: str = "auto", verify: bool = True, max_decompressed: int | str | None = None
) -> Checkpoint:
    """Open the checkpoint ``name`` in ``store``, which ``find`` returned. Options and errors are those of ``open``."""
    return weights_of(
        open_source_in_store(store, name, verify=verify, max_decompressed=max_decompressed, requested_io=io)
    )


def weights_of(source: Source) -> Checkpoint:
    """Return the checkpoint of ``source``, with a decoder for each tensor.

    If another program packed the weights and Ingot cannot decode its packing, this closes ``source`` and raises
    ``UnsupportedError`` ``model.quantized``.
    """
    packer = source.packer()
    if packer is not None:
        source.close()
        raise _located(packer.refusal(), source.location)
    return source.view()


def _open_again(
    url: str, io: str, verify: bool, identity: list[list[Any]], max_decompressed: int | str | None
) -> Checkpoint:
    """Open the files of a pickled checkpoint again. Raises ``IntegrityError`` ``store.changed`` if they differ."""
    source = open_source(Location.parse(url), io=io, verify=verify, max_decompressed=max_decompressed, requested_io=io)
    if source.identity() != identity:
        source.close()
        raise IntegrityError(
            "store.changed",
            "expected the files of the copied checkpoint, found files that were written to or replaced since; open the "
            "checkpoint by its path",
            where=source.location,
        )
    return source.view()


def find(location: Location, io: str = "auto") -> tuple[Store, str]:
    """Return the store that contains an artifact, and the artifact's name there, which is empty for a folder.

    For an archive, the store contains the archived files. If a single file was archived, the returned name is the name
    of this file. A manifest or Modelfile of ollama is replaced by the weights that it names. No other file is opened.

    Raises ``UsageError`` ``open.io``, ``open.missing``, ``open.url``, and the errors of ``ollama.resolve`` and of the
    store.
    """
    if io not in ("auto", "mmap", "pread"):
        raise UsageError(f"expected io 'auto', 'mmap' or 'pread', found {io!r}", rule="open.io")
    if not location.user_text:  # an unset variable of a shell, not the current folder
        raise missing_error(location)
    try:
        store, name = location.find_model(io)
        weights = ollama.resolve(location, store, name)
        if weights is not location:
            store, name = weights.find(io)
    except UsageError as error:
        if error.rule in ("store.missing", "store.scheme"):
            raise missing_error(location, error) from None
        raise
    return _find_archived(store, name) if name.lower().endswith(".zt") else (store, name)


def _find_archived(store: Store, name: str) -> tuple[Store, str]:
    """Return the files of the archive ``name`` as a store, and the name of the archived file; empty for a folder.

    If the file ``name`` is no archive, return the arguments. If it is damaged, also return them, because opening the
    file raises the precise error.
    """
    try:
        opened = open_archive(store, name)
    except IngotError:
        return store, name
    return (store, name) if opened is None else (opened[1], opened[1].only_file)


def address_of(location: Location) -> str:
    """Return the address at which other processes can open an artifact; empty if there is none.

    Raises the errors of ``find``.
    """
    store, name = find(location)
    return store.url_of(name)


def local_text(text: str, address: str) -> str:
    """Return ``text`` if it leads to ``address`` in this process, else ``address``.

    ``text`` is a location that another process parsed. If both processes use the same text, their messages are equal.
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
    """Open and validate an artifact; return it without decoders. Options and errors are those of ``open``.

    With ``trust_index``, weight files that a folder's index does not list are ignored.
    """
    store, name = find(location, io)
    if trust_index and not name:
        store = FilteredStore(store, unlisted_files(store))
    return open_source_in_store(
        store, name, verify=verify, max_decompressed=max_decompressed, requested_io=requested_io
    )


def open_source_in_store(
    store: Store,
    name: str,
    *,
    verify: bool = True,
    max_decompressed: int | str | None = None,
    requested_io: str | None = None,
) -> Source:
    """Open and validate the file ``name`` of ``store``, or the folder if ``name`` is empty.

    Options and errors are those of ``open``.
    """
    listed = CachedStore(store)
    location = store.location_of(name)
    try:
        format, entry = detect(listed, name)
        catalog = format.read(listed, entry, verify=verify)
    except IngotError as error:
        inner = _fallback_folder(listed) if error.rule == "detect.none" else None
        if inner is not None:
            return open_source_in_store(
                inner, "", verify=verify, max_decompressed=max_decompressed, requested_io=requested_io
            )
        if isinstance(store, ArchiveStore) and (error.rule or "").startswith("detect."):
            error.message += f"; to open a folder or file of the archive, name it: {ARCHIVE}:ARCHIVE!NAME"
        raise _located(explain(error, store), location) from None
    if ARCHIVE_KEY in catalog.metadata:
        return _open_archived(
            catalog, store, entry, verify=verify, max_decompressed=max_decompressed, requested_io=requested_io
        )
    source = Source(
        location, store, name, format, entry, catalog, _io_of(catalog), verify, requested_io, max_decompressed
    )
    try:
        source.require_decompressed(max_decompressed)
    except BaseException:
        source.close()
        raise
    return source


def _open_archived(catalog: Catalog, store: Store, entry: str, **options: Any) -> Source:
    """Open the model in the archive ``entry``, without restoring its files; ``options`` are those of ``open``."""
    try:
        inner = archive_store(catalog, store, entry)
        return open_source_in_store(inner, inner.only_file, **options)
    except BaseException:
        for opened in catalog.sources:
            opened.close()
        raise


def _fallback_folder(store: Store) -> Store | None:
    """Return the folder inside ``store`` in which a format recognizes the weights, or None if no format does."""
    for _, format in FORMATS.available():
        folder = format.fallback_folder(store)
        if folder is not None:
            return Location.in_store(store, folder).store()
    return None


def detect(store: Store, name: str) -> tuple[Format, str]:
    """Return the format and the entry file of a file, or of the folder if ``name`` is empty.

    Raises the errors of ``formats.detect``.
    """
    if name:
        return detect_file(name, store.head(name, HEAD)), name
    return detect_folder(listing(store), store)


def _located(error: IngotError, location: str) -> IngotError:
    if error.where and location.endswith(f"/{error.where}"):
        error.where = location  # the error names the same file without its folder
    locations = (error.where or "").split(": ")
    has_location = any(item == location or item.startswith(f"{location}/") for item in locations)
    return error if has_location else error.add_location(location)


def open_delta(
    location: Location, *, io: str = "auto", verify: bool = True, max_decompressed: int | str | None = None
) -> Source:
    """Open and validate a delta or a patch; options and errors are those of ``open``.

    A safetensors file that consists of pairs of positions and values is opened as a sparse patch here. ``open_source``
    opens it as ordinary tensors.
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
