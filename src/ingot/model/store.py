"""What a store is: named files somewhere, listed and read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from urllib.parse import quote

from ingot.errors import FormatError, UnsupportedError, UsageError
from ingot.model.bytesource import ByteSource, Range, Sink, Stamp, StampedSource
from ingot.model.reading.ranges import read_bytes, read_ranges

_HELD = 1 << 16
_COPIED = 1 << 20


@dataclass(frozen=True, slots=True)
class Listing:
    """What lies directly in a folder, by name, sorted, hidden names too.

    ``outside`` are links that lead to a place outside of the store; where they lead to a file or folder, the name is
    in ``files`` or ``folders`` too.
    """

    files: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    outside: tuple[str, ...] = ()


class Store(ABC):
    """A folder of named byte sources: on a local disk, in memory, on another machine.

    A subclass gives ``list`` and ``open``, and sets two attributes: ``location`` names the store in messages; ``url``
    is where another process finds it, empty where none can. A name has slashes between folders; one that is absolute or
    leads outside the store is refused with rule ``store.escape``.
    """

    location: str
    url: str = ""

    @abstractmethod
    def list(self, folder: str = "") -> Listing:
        """Return what lies directly in the store, or in one of its folders; nothing where that is missing."""

    @abstractmethod
    def open(self, name: str) -> ByteSource:
        """Open one file. Raises ``UsageError`` ``store.missing`` where there is none."""

    def identity(self, folder: str = "") -> Hashable:
        """Return what the same folder has under each of its names: there are several where links lead to folders."""
        return folder

    def tree(self, folder: str = "") -> Iterator[str]:
        """Yield the names of all that lies in the store, or in one of its folders, at any depth, each folder's sorted.

        A folder with nothing in it has a slash at the end. Links are named, and not followed.
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
        """Names of the files in the store, or in one of its folders, sorted; hidden ones left out."""
        return _shown(self.list(folder).files)

    def folders(self, folder: str = "") -> Sequence[str]:
        """Names of the folders in the store, or in one of its folders, sorted; hidden ones left out."""
        return _shown(self.list(folder).folders)

    def outside(self, folder: str = "") -> Sequence[str]:
        """Names in the store, or in one of its folders, that are links to a place outside of the store."""
        return [*self.list(folder).outside]

    def exists(self, name: str) -> bool:
        """Whether the store has a file of this name, told by the listing of its folder."""
        folder, _, last = name.rpartition("/")
        return last in self.list(folder).files

    def read(self, name: str, most: int, rule: str) -> bytes:
        """Return a whole file of at most ``most`` bytes; a longer one raises ``FormatError`` with ``rule``, unread."""
        source = self.open(name)
        try:
            if source.size > most:
                raise FormatError(rule, f"expected at most {most} bytes, found {source.size}", where=name)
            return read_bytes(source, 0, source.size)
        finally:
            source.close()

    def head(self, name: str, size: int) -> bytes:
        """Return a file's first ``size`` bytes, or all that it has."""
        source = self.open(name)
        try:
            return read_bytes(source, 0, min(size, source.size))
        finally:
            source.close()

    def get_ranges(self, name: str, ranges: Sequence[Range]) -> Sequence[memoryview]:
        """Return the bytes of each (offset, length), in this order, read with few requests.

        Raises ``IntegrityError`` ``store.short-read`` for a range outside the file, and what ``open`` does.
        """
        source = self.open(name)
        try:
            return read_ranges(source, ranges)
        finally:
            source.close()

    def stat(self, name: str) -> Stamp:
        """Return the state of a file, taken from the open file; errors as ``open``."""
        source = self.open(name)
        try:
            return source.stamp if isinstance(source, StampedSource) else Stamp(source.size)
        finally:
            source.close()

    def local_path(self, name: str = "") -> PathLike[str] | None:
        """Return where a file or folder of the store (the store itself by default) lies on a local disk.

        None where the store is not a local folder. For what needs a path of the system: mapping, free space, programs
        that open files by themselves.
        """
        return None

    def require_path(self, name: str, purpose: str) -> PathLike[str]:
        """Return ``local_path``, or refuse with ``UnsupportedError`` ``store.not-local``, which names the purpose."""
        path = self.local_path(name)
        if path is None:
            raise UnsupportedError(
                f"expected files on a local disk, which {purpose} needs: download them first",
                rule="store.not-local",
                where=self.location_of(name),
            )
        return path

    def location_of(self, name: str = "") -> str:
        """Return what a file or folder of the store is called in messages and reports."""
        return f"{self.location}/{name}" if name else self.location

    def url_of(self, name: str = "") -> str:
        """Return the address of a file or folder of the store; empty where no address leads to the store."""
        return f"{self.url}/{quote(name, errors='surrogateescape')}" if name and self.url else self.url

    def is_lost(self, names: Iterable[str], target: str, *, folder: bool) -> bool:
        """Whether one of these files would be removed by a new file, or a new folder, at the address ``target``."""
        addresses = {self.url_of(name) for name in names}
        return target in addresses or (folder and any(address.startswith(f"{target}/") for address in addresses))

    def holds(self, target: str) -> bool:
        """Whether the address ``target``, of what may be there or not, is the store's own or lies in it."""
        return bool(self.url) and f"{target}/".startswith(f"{self.url}/")


@dataclass(frozen=True, slots=True)
class Replaced:
    """What may become of an artifact that is there: ``allowed`` to be replaced, of folders those that ``require_ours``
    does not refuse."""

    allowed: bool = False
    require_ours: Callable[[Store], None] | None = None


def checked_name(name: str, where: str) -> str:
    """Return ``name`` if it names a file inside its store: relative, no empty, ``.`` or ``..`` component, no NUL, no
    half of a pair of surrogates.

    Raises ``FormatError`` with rule ``store.escape``.
    """
    try:
        name.encode("utf-8", "surrogateescape")  # bytes that are not UTF-8 may be in the name of a local file
        good = "\0" not in name and not any(piece in ("", ".", "..") for piece in name.split("/"))
    except UnicodeEncodeError:
        good = False
    if not good:
        raise FormatError(
            "store.escape", f"expected the name of a file in this store, found {name[:200]!r}", where=where
        )
    return name


def copy_file(store: Store, name: str, sink: Sink) -> None:
    """Write a file of a store into a sink, a megabyte at a time; the sink is left open."""
    source = store.open(name)
    try:
        buffer = memoryview(bytearray(min(_COPIED, source.size)))
        for start in range(0, source.size, _COPIED):
            piece = buffer[: min(_COPIED, source.size - start)]
            source.readinto(start, piece)
            sink.write_at(start, piece)
        sink.truncate(source.size)
    finally:
        source.close()


class Listed(Store):
    """Another store while an artifact is opened: each folder is listed once, and each small file that is read whole is
    read once, however often somebody asks."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._listings: dict[str, Listing] = {}
        self._small: dict[str, bytes] = {}
        self.location = store.location
        self.url = store.url

    def list(self, folder: str = "") -> Listing:
        """Return the folder's files and folders as they were when it was asked for first."""
        listing = self._listings.get(folder)
        if listing is None:
            listing = self._listings[folder] = self._store.list(folder)
        return listing

    def read(self, name: str, most: int, rule: str) -> bytes:
        """Return a whole file, a small one as it was when it was asked for first; errors as ``Store.read``."""
        held = self._small.get(name)
        if held is None or len(held) > most:
            held = self._store.read(name, most, rule)
            if len(held) <= _HELD:
                self._small[name] = held
        return held

    def open(self, name: str) -> ByteSource:
        return self._store.open(name)

    def stat(self, name: str) -> Stamp:
        return self._store.stat(name)

    def tree(self, folder: str = "") -> Iterator[str]:
        return self._store.tree(folder)

    def local_path(self, name: str = "") -> PathLike[str] | None:
        return self._store.local_path(name)


class Without(Store):
    """A store as if it did not hold some of its files.

    Parameters
    ----------
    store : Store
    hidden : frozenset of str
        The names of files that are neither listed nor opened.
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
            raise UsageError("this file is left out here", rule="store.missing", where=self.location_of(name))
        return self._store.open(name)

    def stat(self, name: str) -> Stamp:
        return self._store.stat(name)

    def local_path(self, name: str = "") -> PathLike[str] | None:
        return self._store.local_path(name)


class Joined(Store):
    """Two stores as one: files of the first hide files of the second that have the same name.

    Parameters
    ----------
    first, second : Store
    names : mapping, optional
        Files of the second store that have another name here: name here to name there.
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


def _shown(names: tuple[str, ...]) -> list[str]:
    return [name for name in names if not name.startswith(".")]
