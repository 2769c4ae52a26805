"""A library: a folder or bucket with objects and manifests, and the addresses of the artifacts in it.

``library:ADDRESS!NAME`` is an artifact, ``library:ADDRESS!NAME/FILE`` a file of it; ``ADDRESS`` is the library's path
or address, in which ``!`` is written ``%21``.
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
_OWN = (_MARK, manifest.FOLDER, objects.FOLDER, SCRATCH, LEASES)
_SMALL = 1 << 16


class Place:
    """An opened library.

    Raises ``UsageError`` ``library.none`` if there is no library, and the errors of ``Location.share``.

    Parameters
    ----------
    root : Location
    create : bool
        Create the library if the folder is missing or empty.
    """

    def __init__(self, root: Location, *, create: bool = False) -> None:
        self.folder: SharedFolder = root.share(create=create)
        self.root = root
        store = self.folder.store
        if store.exists(_MARK):
            mark = strict_json(store.read(_MARK, _SMALL, "library.none"), "library.none", "library.none", _MARK)
            if mark.get("format") != FORMAT:
                raise self._none(f"one of another format, {str(mark.get('format'))[:40]!r}")
        elif not create:
            raise self._none("none: `ingot store add` makes one")
        else:
            self._require_empty()
            with self.folder.using():  # who is alone takes files that are being written for leftovers
                self.folder.write(_MARK, _MARKED)

    def _require_empty(self) -> None:
        """Refuse a folder of somebody else's; of a library that is just being made, some may be there."""
        listing = self.folder.store.list()
        others = [name for name in (*listing.files, *listing.folders) if name not in _OWN and not name.startswith(".")]
        if others:
            raise self._none(
                f"a folder with other things in it, such as {others[0][:80]!r}; name a library, or a new folder"
            )

    @property
    def location(self) -> str:
        """What messages call the library."""
        return self.root.display

    def objects(self) -> Objects:
        """Return the objects as they are listed now."""
        return Objects(self.folder)

    def names(self) -> list[str]:
        """Return the names of the artifacts, sorted; what is no manifest's name is passed over.

        Raises ``FormatError`` ``library.folders``.
        """
        files = files_in(self._fresh(), manifest.FOLDER, lambda _, name: not name.startswith("."))
        start, end = f"{manifest.FOLDER}/", manifest.ENDING
        return sorted(name.removeprefix(start).removesuffix(end) for name in files if name.endswith(end))

    def manifest(self, name: str) -> Manifest:
        """Return an artifact's manifest; raises ``UsageError`` ``library.unknown``, and as ``parse_manifest``."""
        file, store = file_of(name), self._fresh()
        if not store.exists(file):
            require_known(name, self.names(), self.location)
        raw = store.read(file, manifest.MAX_MANIFEST, "library.manifest")
        return parse_manifest(raw, name, store.location_of(file))

    def has(self, name: str) -> bool:
        """Whether there is an artifact of this name; ``UsageError`` ``library.name`` for what is none."""
        return self._fresh().exists(file_of(name))

    def url_of(self, name: str) -> str:
        """Return the address of an artifact."""
        return f"{SCHEME}:{self.root.text.replace('!', '%21')}!{quote(name, errors='surrogateescape')}"

    def _fresh(self) -> Store:
        """Return the store anew: one of another machine keeps to the versions that it read first."""
        return self.root.store(io="pread")

    def _none(self, found: str) -> UsageError:
        return UsageError(f"expected a library, found {found}", rule="library.none", where=self.location)


class LibraryScheme(Scheme):
    """Addresses of artifacts in libraries; see above."""

    def store(self, text: str, io: str) -> Store:
        store, name = self.locate(text, io)
        if name:
            raise UsageError("expected a folder", rule="store.not-a-folder", where=text)
        return store

    def locate(self, text: str, io: str) -> tuple[Store, str]:
        """Return the artifact's store, and the name of the file in it; a single file's where no other is named."""
        address, mark, rest = text.partition(":")[2].partition("!")
        path = unquote(rest).strip("/")
        if not address or not mark or not path:
            raise UsageError(
                "expected library:ADDRESS!NAME, or library:ADDRESS!NAME/FILE", rule="store.url", where=text
            )
        place = Place(Location.parse(address.replace("%21", "!")))
        name, inside = _split(place, path)
        found = place.manifest(name)
        url = place.url_of(name)
        store = ArtifactStore(place.objects(), found, url)
        if not inside:
            return (store, "") if found.folder else (store, found.files[0].name)
        if any(file.name == inside for file in found.files):
            return store, inside
        if any(file.name.startswith(f"{inside}/") for file in found.files):
            return ArtifactStore(store.objects, found, f"{url}/{quote(inside)}", inside), ""
        raise UsageError("expected an existing file, found none", rule="store.missing", where=text)


def _split(place: Place, path: str) -> tuple[str, str]:
    """Split a path into the artifact's name, the shortest that there is, and the rest."""
    pieces = path.split("/")
    for count in range(1, len(pieces) + 1):
        name = "/".join(pieces[:count])
        try:
            if place.has(name):
                return name, "/".join(pieces[count:])
        except (UsageError, FormatError):
            break  # no name, nor is anything longer
    require_known(path, place.names(), place.location)
    return path, ""


@contextmanager
def using(root: Location, *, create: bool = False) -> Iterator[Place]:
    """Open a library and keep others from removing from it."""
    place = Place(root, create=create)
    with place.folder.using():
        yield place
