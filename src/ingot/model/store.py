"""Stores: folders of named files on a disk, in memory or on another machine, which are listed and read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from urllib.parse import quote

from ingot.errors import FormatError, UnsupportedError, UsageError
from ingot.model.bytesource import ByteSource, Range, Sink, Stamp, StampedSource
from ingot.model.reading.ranges import read_bytes, read_ranges

_CACHED = 1 << 16
_COPY_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Listing:
    """The direct entries of a folder: sorted names, including hidden files and folders.

    ``outside`` contains links to a target outside the store. If the target is a file or folder, the name is also in
    ``files`` or ``folders``.
    """

    files: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    outside: tuple[str, ...] = ()


class Store(ABC):
    """A folder of named byte sources: on a local disk, in memory, on another machine.

    A subclass implements ``list`` and ``open`` and sets two attributes. ``location`` identifies the store in messages.
    ``url`` is an address that other processes can open, or empty. Names separate folders by slashes. A name that is
    absolute or leads outside the store is refused with rule ``store.escape``.
    """

    location: str
    url: str = ""

    @abstractmethod
    def list(self, folder: str = "") -> Listing:
        """Return the direct entries of the store or of one of its folders; an empty listing if it does not exist."""

    @abstractmethod
    def open(self, name: str) -> ByteSource:
        """Open a file. Raises ``UsageError`` ``store.missing`` if it does not exist."""

    def identity(self, folder: str = "") -> Hashable:
        """Return a value that identifies a folder; it is equal for all links to the folder."""
        return folder

    def tree(self, folder: str = "") -> Iterator[str]:
        """Yield the names of all entries of the store or of one of its folders, at any depth, sorted per folder.

        The name of an empty folder ends in a slash. Links are listed but not followed.
        """
        listing = self.list(folder)
        start = f"{folder}/" if folder else ""
        names = sorted({*listing.files, *listing.folders, *listing.outside})
        if folder and not names:
            yield start
        for name in names:
            if name in listing.folders and name not in listing.outside:
                yield from self.tree(start + name)
            else:
                yield start + name

    def names(self, folder: str = "") -> Sequence[str]:
        """Return the sorted names of the files in the store or in one of its folders, without hidden files."""
        return _without_hidden(self.list(folder).files)

    def folders(self, folder: str = "") -> Sequence[str]:
        """Return the sorted names of the folders in the store or in one of its folders, without hidden folders."""
        return _without_hidden(self.list(folder).folders)

    def outside(self, folder: str = "") -> Sequence[str]:
        """Return the names of links to a target outside the store, in the store or in one of its folders."""
        return [*self.list(folder).outside]

    def exists(self, name: str) -> bool:
        """Return whether the listing of the file's folder contains the name."""
        folder, _, last = name.rpartition("/")
        return last in self.list(folder).files

    def read(self, name: str, max_bytes: int, rule: str) -> bytes:
        """Return the contents of a file of at most ``max_bytes``.

        Raises ``FormatError`` with ``rule``, before reading, if the file is longer.
        """
        source = self.open(name)
        try:
            if source.size > max_bytes:
                raise FormatError(rule, f"expected at most {max_bytes} bytes, found {source.size}", where=name)
            return read_bytes(source, 0, source.size)
        finally:
            source.close()

    def head(self, name: str, size: int) -> bytes:
        """Return a file's first ``size`` bytes, or all bytes of a smaller file."""
        source = self.open(name)
        try:
            return read_bytes(source, 0, min(size, source.size))
        finally:
            source.close()

    def get_ranges(self, name: str, ranges: Sequence[Range]) -> Sequence[memoryview]:
        """Return the bytes of each ``(offset, length)`` in the given order; reads them with few requests.

        Raises ``IntegrityError`` ``store.short-read`` for a range outside the file, and the errors of ``open``.
        """
        source = self.open(name)
        try:
            return read_ranges(source, ranges)
        finally:
            source.close()

    def stat(self, name: str) -> Stamp:
        """Return the stamp of a file, taken from the open file. Raises the errors of ``open``."""
        source = self.open(name)
        try:
            return source.stamp if isinstance(source, StampedSource) else Stamp(source.size)
        finally:
            source.close()

    def local_path(self, name: str = "") -> PathLike[str] | None:
        """Return the local path of a file or folder of the store, by default of the store itself.

        Returns None if the store is not a local folder. Some operations need a path: mappings, queries of the free
        space, and libraries that open files themselves.
        """
        return None

    def require_path(self, name: str, purpose: str) -> PathLike[str]:
        """Return ``local_path``. Raises ``UnsupportedError`` ``store.not-local``, with the purpose, if it is None."""
        path = self.local_path(name)
        if path is None:
            raise UnsupportedError(
                f"expected files on a local disk, which {purpose} needs: download them first",
                rule="store.not-local",
                where=self.location_of(name),
            )
        return path

    def location_of(self, name: str = "") -> str:
        """Return the text that identifies a file or folder of the store in messages and reports."""
        return f"{self.location}/{name}" if name else self.location

    def url_of(self, name: str = "") -> str:
        """Return the address of a file or folder of the store; empty if the store has no address."""
        return f"{self.url}/{quote(name, errors='surrogateescape')}" if name and self.url else self.url

    def would_overwrite(self, names: Iterable[str], target: str, *, folder: bool) -> bool:
        """Return whether writing the address ``target`` would remove one of the files ``names`` of this store.

        ``folder`` states whether a folder or a file is written.
        """
        addresses = {self.url_of(name) for name in names}
        return target in addresses or (folder and any(address.startswith(f"{target}/") for address in addresses))

    def contains_address(self, target: str) -> bool:
        """Return whether the address ``target``, which need not exist, is the store's address or inside the store."""
        return bool(self.url) and f"{target}/".startswith(f"{self.url}/")


@dataclass(frozen=True, slots=True)
class OverwritePolicy:
    """The permission to overwrite an existing artifact.

    If ``allowed`` is false, nothing may be overwritten. Otherwise ``require_ours`` receives an existing folder, and
    raises an error if this folder must not be overwritten.
    """

    allowed: bool = False
    require_ours: Callable[[Store], None] | None = None


def checked_name(name: str, location: str) -> str:
    """Return ``name`` if it is a valid name of a file inside a store.

    A valid name is relative and has no empty, ``.`` or ``..`` component, no NUL and no unpaired surrogate. Raises
    ``FormatError`` ``store.escape`` otherwise.
    """
    try:
        name.encode("utf-8", "surrogateescape")  # names of local files may contain bytes that are not UTF-8
        is_valid = "\0" not in name and not any(component in ("", ".", "..") for component in name.split("/"))
    except UnicodeEncodeError:
        is_valid = False
    if not is_valid:
        raise FormatError(
            "store.escape", f"expected the name of a file in this store, found {name[:200]!r}", where=location
        )
    return name


def copy_file(store: Store, name: str, sink: Sink) -> None:
    """Copy a file of a store into a sink, in chunks of 1 MiB. The sink stays open."""
    source = store.open(name)
    try:
        buffer = memoryview(bytearray(min(_COPY_CHUNK, source.size)))
        for start in range(0, source.size, _COPY_CHUNK):
            chunk = buffer[: min(_COPY_CHUNK, source.size - start)]
            source.readinto(start, chunk)
            sink.write_at(start, chunk)
        sink.truncate(source.size)
    finally:
        source.close()


class CachedStore(Store):
    """A store that caches listings and small files of another store while an artifact is opened.

    Each folder is listed once. ``read`` reads each small file once.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._listings: dict[str, Listing] = {}
        self._small: dict[str, bytes] = {}
        self.location = store.location
        self.url = store.url

    def list(self, folder: str = "") -> Listing:
        """Return the folder's listing at the time of the first call."""
        listing = self._listings.get(folder)
        if listing is None:
            listing = self._listings[folder] = self._store.list(folder)
        return listing

    def read(self, name: str, max_bytes: int, rule: str) -> bytes:
        """Return the contents of a file, for a small file at the time of the first call.

        Raises the errors of ``Store.read``.
        """
        data = self._small.get(name)
        if data is None or len(data) > max_bytes:
            data = self._store.read(name, max_bytes, rule)
            if len(data) <= _CACHED:
                self._small[name] = data
        return data

    def open(self, name: str) -> ByteSource:
        return self._store.open(name)

    def stat(self, name: str) -> Stamp:
        return self._store.stat(name)

    def tree(self, folder: str = "") -> Iterator[str]:
        return self._store.tree(folder)

    def local_path(self, name: str = "") -> PathLike[str] | None:
        return self._store.local_path(name)


class FilteredStore(Store):
    """A view of a store that hides some of its files.

    Parameters
    ----------
    store : Store
    hidden : frozenset of str
        The names of the files that are neither listed nor opened.
    """

    def __init__(self, store: Store, hidden: frozenset[str]) -> None:
        self._store = store
        self._hidden = hidden
        self.location = store.location
        self.url = store.url

    def list(self, folder: str = "") -> Listing:
        listing = self._store.list(folder)
        if folder:
            return listing
        files = tuple(name for name in listing.files if name not in self._hidden)
        return Listing(files, listing.folders, listing.outside)

    def open(self, name: str) -> ByteSource:
        if name in self._hidden:
            raise UsageError("this file is hidden", rule="store.missing", where=self.location_of(name))
        return self._store.open(name)

    def stat(self, name: str) -> Stamp:
        return self._store.stat(name)

    def local_path(self, name: str = "") -> PathLike[str] | None:
        return self._store.local_path(name)


class MergedStore(Store):
    """A view of two stores as one. Files of the first store hide files of the second with the same name.

    Parameters
    ----------
    first, second : Store
    names : mapping, optional
        New names for files of the second store: name in this store to name in the second store.
    """

    def __init__(self, first: Store, second: Store, names: Mapping[str, str] | None = None) -> None:
        self._first = first
        self._second = second
        self._names = dict(names or {})
        self.location = first.location
        self.url = first.url

    def list(self, folder: str = "") -> Listing:
        first = self._first.list(folder)
        second = self._second.list(folder)
        renamed = () if folder else tuple(self._names)
        return Listing(
            tuple(sorted({*first.files, *second.files, *renamed})),
            tuple(sorted({*first.folders, *second.folders})),
            tuple(sorted({*first.outside, *second.outside})),
        )

    def open(self, name: str) -> ByteSource:
        if self._first.exists(name):
            return self._first.open(name)
        return self._second.open(self._names.get(name, name))


def _without_hidden(names: tuple[str, ...]) -> list[str]:
    return [name for name in names if not name.startswith(".")]
