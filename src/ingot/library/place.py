"""Opened libraries: a folder or bucket with objects and manifests, and the addresses of the artifacts in it.

``library:ADDRESS!NAME`` is an artifact, ``library:ADDRESS!NAME/FILE`` a file of it. ``ADDRESS`` is the library's path
or address, with ``!`` written as ``%21``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import quote, unquote

from ingot.core.parsing.strictjson import strict_json
from ingot.errors import FormatError, UsageError
from ingot.library import manifest, objects
from ingot.library.manifest import FORMAT, Manifest, file_of, parse_manifest
from ingot.library.objects import Objects, require_known
from ingot.library.remake import ArtifactStore
from ingot.library.tree import files_in
from ingot.model.store import Store
from ingot.stores.location import Location
from ingot.stores.scheme import Scheme
from ingot.stores.shared import LEASES, SCRATCH, SharedFolder

SCHEME = "library"
_MARK = "library.json"
_MARKED = b'{"format": "%s"}\n' % FORMAT.encode()
_LIBRARY_NAMES = (_MARK, manifest.FOLDER, objects.FOLDER, SCRATCH, LEASES)
_SMALL = 1 << 16


class OpenLibrary:
    """An open library: a folder or bucket, which is created if requested.

    Raises ``UsageError`` ``library.none`` if the folder is no library, and the errors of ``Location.share``.

    Parameters
    ----------
    root : Location
    create : bool
        Whether to create a library if the folder is empty or missing.
    """

    def __init__(self, root: Location, *, create: bool = False) -> None:
        self.folder: SharedFolder = root.share(create=create)
        self.root = root
        store = self.folder.store
        if store.exists(_MARK):
            mark = strict_json(store.read(_MARK, _SMALL, "library.none"), "library.none", "library.none", _MARK)
            if mark.get("format") != FORMAT:
                raise self._not_a_library(f"a folder of another format, {str(mark.get('format'))[:40]!r}")
        elif not create:
            raise self._not_a_library("no library; `ingot store add` creates one")
        else:
            self._require_empty()
            with self.folder.shared_lock():  # take the shared lock: an exclusive holder deletes unfinished files
                self.folder.write(_MARK, _MARKED)

    def _require_empty(self) -> None:
        """Raise ``UsageError`` ``library.none`` if the folder contains anything that is not part of a library.

        Files and folders of a library are accepted, because another process may be creating it.
        """
        listing = self.folder.store.list()
        foreign = [
            name
            for name in (*listing.files, *listing.folders)
            if name not in _LIBRARY_NAMES and not name.startswith(".")
        ]
        if foreign:
            raise self._not_a_library(
                f"a folder with other content, such as {foreign[0][:80]!r}; name a library, or a new folder"
            )

    @property
    def location(self) -> str:
        """The library's address or path without secrets, for messages."""
        return self.root.display

    def objects(self) -> Objects:
        """Return the objects that the library has now."""
        return Objects(self.folder)

    def names(self) -> list[str]:
        """Return the names of the artifacts, sorted. Other files are ignored.

        Raises ``FormatError`` ``library.folders``.
        """
        files = files_in(self._reopen(), manifest.FOLDER, lambda _, name: not name.startswith("."))
        start, end = f"{manifest.FOLDER}/", manifest.ENDING
        return sorted(name.removeprefix(start).removesuffix(end) for name in files if name.endswith(end))

    def manifest(self, name: str) -> Manifest:
        """Return an artifact's manifest. Raises ``UsageError`` ``library.unknown``, and the errors of parsing."""
        file = file_of(name)
        store = self._reopen()
        if not store.exists(file):
            require_known(name, self.names(), self.location)
        raw = store.read(file, manifest.MAX_MANIFEST, "library.manifest")
        return parse_manifest(raw, name, store.location_of(file))

    def has(self, name: str) -> bool:
        """Return whether an artifact of this name exists. Raises ``UsageError`` ``library.name`` for invalid names."""
        return self._reopen().exists(file_of(name))

    def url_of(self, name: str) -> str:
        """Return the address of an artifact."""
        return f"{SCHEME}:{self.root.text.replace('!', '%21')}!{quote(name, errors='surrogateescape')}"

    def _reopen(self) -> Store:
        """Return the library's store, opened again to read the present versions of files.

        A remote store that stays open returns the versions that it read first.
        """
        return self.root.store(io="pread")

    def _not_a_library(self, content: str) -> UsageError:
        return UsageError(f"expected a library, found {content}", rule="library.none", where=self.location)


class LibraryScheme(Scheme):
    """The scheme ``library:`` for addresses of artifacts in libraries."""

    def store(self, text: str, io: str) -> Store:
        store, name = self.locate(text, io)
        if name:
            raise UsageError("expected a folder", rule="store.not-a-folder", where=text)
        return store

    def locate(self, text: str, io: str) -> tuple[Store, str]:
        """Return the store of an artifact or of a folder in it, and the name of the file that the address names.

        If it names no file, the name is that of the artifact's only file, or empty if the artifact is a folder.
        """
        address, mark, artifact_path = text.partition(":")[2].partition("!")
        path = unquote(artifact_path).strip("/")
        if not address or not mark or not path:
            raise UsageError(
                "expected library:ADDRESS!NAME, or library:ADDRESS!NAME/FILE", rule="store.url", where=text
            )
        library = OpenLibrary(Location.parse(address.replace("%21", "!")))
        name, inside = _split(library, path)
        artifact = library.manifest(name)
        url = library.url_of(name)
        store = ArtifactStore(library.objects(), artifact, url)
        if not inside:
            return (store, "") if artifact.folder else (store, artifact.files[0].name)
        if any(file.name == inside for file in artifact.files):
            return store, inside
        if any(file.name.startswith(f"{inside}/") for file in artifact.files):
            return ArtifactStore(store.objects, artifact, f"{url}/{quote(inside)}", inside), ""
        raise UsageError("expected an existing file, but there is none", rule="store.missing", where=text)


def _split(library: OpenLibrary, path: str) -> tuple[str, str]:
    """Return the shortest prefix of ``path`` that is an artifact's name, and the rest of the path."""
    names = path.split("/")
    for count in range(1, len(names) + 1):
        name = "/".join(names[:count])
        try:
            if library.has(name):
                return name, "/".join(names[count:])
        except (UsageError, FormatError):
            break  # invalid names; longer ones are invalid too
    require_known(path, library.names(), library.location)
    return path, ""


@contextmanager
def using(root: Location, *, create: bool = False) -> Iterator[OpenLibrary]:
    """Open a library in this context, during which other processes delete no objects."""
    library = OpenLibrary(root, create=create)
    with library.folder.shared_lock():
        yield library
