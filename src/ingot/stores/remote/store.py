"""Buckets of object stores, and folders of web servers, as stores."""

from __future__ import annotations

import builtins
import threading
from abc import abstractmethod
from base64 import b64encode
from collections import OrderedDict
from functools import partial
from html.parser import HTMLParser
from typing import Any
from urllib.parse import quote, unquote, urljoin, urlsplit

from ingot.core.border import require
from ingot.core.files.atomic import Staging
from ingot.errors import FormatError, IngotError, UnsupportedError, UsageError
from ingot.model.bytesource import ByteSource, Stamp
from ingot.model.seal import MAX_SEAL, SUFFIX, Seal, parse_seal
from ingot.model.store import Listing, OverwritePolicy, Store, checked_name
from ingot.stores.remote.address import Address, address_of, shown
from ingot.stores.remote.client import EXTRA, Client, Opened, RangeClient, options
from ingot.stores.remote.http import origin_of
from ingot.stores.remote.shared import RemoteShared
from ingot.stores.remote.source import HEAD, RemoteSource
from ingot.stores.remote.staging import RemoteStaging
from ingot.stores.remote.web import WebClient
from ingot.stores.scheme import Scheme, WritableScheme

_HELD = 256  # files of which a store holds the first bytes
_PAGE = 8 << 20


class RemoteStore(Store):
    """The files below one folder of another machine.

    The version of a file that was opened first is the one that all later reads of this store are of.
    """

    def __init__(self, address: Address, client: RangeClient, scheme: RemoteScheme) -> None:
        self.address = address
        self._client = client
        self._scheme = scheme
        self.location = self.url = address.public
        self._lock = threading.Lock()
        self._unsealed = False
        self._opened: OrderedDict[str, Opened] = OrderedDict()

    @abstractmethod
    def list(self, folder: str = "") -> Listing: ...

    def open(self, name: str) -> ByteSource:
        """Open one file: by one request, which brings its first bytes. Errors as ``Client.open``, ``checked_name``."""
        checked_name(name, self.location)
        with self._lock:
            opened = self._opened.get(name)
        if opened is None:
            opened = self._client.open(self._key(name), HEAD)
            with self._lock:
                opened = self._opened.setdefault(name, opened)
                while len(self._opened) > _HELD:
                    self._opened.popitem(last=False)
        again = partial(self._scheme.reopen, self.url_of(name))
        seal = partial(self._seal, name)
        return RemoteSource(self._client, self._key(name), opened, self.location_of(name), again, seal)

    def _seal(self, name: str) -> Seal | None:
        """Return the seal that lies beside a file; a store in which one had none is not asked again."""
        if self._unsealed or name.endswith(SUFFIX):
            return None
        try:
            return parse_seal(self._sidecar(name + SUFFIX), self.location_of(name + SUFFIX))
        except IngotError as error:
            if error.rule not in ("store.missing", "store.denied", "remote.no-ranges"):
                raise
            self._unsealed = True
            return None

    def _sidecar(self, name: str) -> bytes:
        return self.read(name, MAX_SEAL, "seal.fields")

    def stat(self, name: str) -> Stamp:
        """Return the state of a file; errors as ``open``."""
        source = self.open(name)
        assert isinstance(source, RemoteSource)
        return source.stamp

    def _key(self, name: str) -> str:
        if any("\ud800" <= char <= "\udfff" for char in name):
            raise FormatError("store.escape", f"expected a name in UTF-8, found {name[:200]!r}", where=self.location)
        return self.address.within(name).path


class ObjectStore(RemoteStore):
    """A folder of a bucket."""

    def __init__(self, address: Address, client: Client, scheme: RemoteScheme) -> None:
        super().__init__(address, client, scheme)
        self.client = client

    def list(self, folder: str = "") -> Listing:
        """Return the objects and folders directly in the store, or in ``folder``, by one request."""
        prefix = self._key(checked_name(folder, self.location)) if folder else self.address.path
        start = f"{prefix}/" if prefix else ""
        objects, folders = self.client.list(prefix)
        names = [sorted(key.removeprefix(start) for key in keys) for keys in (objects, folders)]
        for name in (*names[0], *names[1]):
            checked_name(name, self.location)
            checked_name(name.replace("/", "\0"), self.location)
        return Listing(tuple(names[0]), tuple(names[1]))


class WebStore(RemoteStore):
    """A folder of a web server, which may list the folder by a page of links."""

    def __init__(self, address: Address, client: WebClient, scheme: RemoteScheme) -> None:
        super().__init__(address, client, scheme)
        self._pages = client

    def list(self, folder: str = "") -> Listing:
        """Return what the page of the folder links to.

        Raises ``UnsupportedError`` ``remote.no-listing`` where the server has no such page.
        """
        key = self._key(checked_name(folder, self.location)) if folder else self.address.path
        try:
            kind, page = self._pages.page(key, _PAGE)
        except IngotError as error:
            if folder and error.rule == "store.missing":
                return Listing()
            if error.rule in ("store.missing", "store.denied"):
                raise self._no_listing() from None
            raise
        if "html" not in kind.lower():
            if folder:
                return Listing()  # a file
            raise self._no_listing()
        return _linked(page.decode("utf-8", "replace"), f"/{quote(key)}".rstrip("/") + "/")

    def exists(self, name: str) -> bool:
        """As ``Store.exists``, by opening the file."""
        try:
            self.open(name)
        except IngotError as error:
            if error.rule in ("store.missing", "store.denied", "remote.no-ranges"):
                return False
            raise
        return True

    def _no_listing(self) -> UnsupportedError:
        return UnsupportedError(
            "expected a page that lists the folder, found a server that has none: give the address of a file, such as "
            "that of model.safetensors.index.json",
            rule="remote.no-listing",
            where=self.location,
        )


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links: builtins.list[str] = []

    def handle_starttag(self, tag: str, attrs: builtins.list[tuple[str, str | None]]) -> None:
        self.links += [value for name, value in attrs if tag == "a" and name == "href" and value]


def _linked(page: str, folder: str) -> Listing:
    """Return the names that links of a page lead to, directly below its own folder."""
    parser = _Links()
    parser.feed(page)
    files: set[str] = set()
    folders: set[str] = set()
    for link in parser.links:
        target = urlsplit(urljoin(f"http://x{folder}", link))
        name = target.path.removeprefix(folder)
        inside = target.path.startswith(folder) and target.netloc == "x" and not target.query
        decoded = unquote(name.removesuffix("/"))
        if inside and decoded not in ("", ".", "..") and not set(decoded) & set("/\0"):
            (folders if name.endswith("/") else files).add(decoded)
    return Listing(tuple(sorted(files)), tuple(sorted(folders)))


class RemoteScheme(Scheme):
    """Addresses of other machines; what all kinds of them have in common."""

    needs_slashes = True  # s3:x is a path

    def location(self, text: str) -> str:
        """Return the address without its secrets."""
        return shown(text)

    def reopen(self, text: str) -> ByteSource:
        """Open the file at an address: what copies of sources do."""
        store, name = self.locate(text, "auto")
        return store.open(name)


class FolderScheme(RemoteScheme):
    """Addresses that lead to a file, or to the folder that files lie below."""

    def store(self, text: str, io: str) -> Store:
        """Return the folder at an address; ``io`` says nothing here."""
        return self.at(address_of(text))

    def locate(self, text: str, io: str) -> tuple[Store, str]:
        """Return the store and the name in it: none for a folder.

        Raises ``UsageError`` ``store.missing`` where there is neither, and as ``RemoteStore.open``.
        """
        address = address_of(text)
        if address.folder:
            return self.at(address), ""
        parent = self.at(address.parent)
        try:
            parent.open(address.last)
        except IngotError as error:
            if error.rule not in ("store.missing", "remote.no-ranges", "store.denied"):
                raise
            folder = self.at(address)
            if not self.is_folder(folder):
                raise
            return folder, ""
        return parent, address.last

    def is_folder(self, store: RemoteStore) -> bool:
        """Whether there is anything in what would be a folder."""
        try:
            return store.list() != Listing()
        except IngotError:
            return False

    @abstractmethod
    def at(self, address: Address) -> RemoteStore:
        """Return the folder as a store."""


class WebScheme(FolderScheme):
    """Addresses of the form ``https://host/folder/file``."""

    def at(self, address: Address) -> WebStore:
        headers = {}
        if address.user:
            headers["Authorization"] = f"Basic {b64encode(unquote(address.user).encode()).decode()}"
        try:
            origin_of(address.origin)
        except ValueError:
            raise _no_address(address) from None
        return WebStore(address, WebClient(address.origin, headers, query=address.query), self)


class ObjectScheme(FolderScheme, WritableScheme):
    """Addresses of the form ``s3://bucket/folder/file``; obstore takes credentials and endpoints from the environment.

    Parameters
    ----------
    kind : str
        obstore's class.
    """

    def __init__(self, kind: str = "S3Store") -> None:
        self._kind = kind

    def stage(self, text: str, replaced: OverwritePolicy, *, directory: bool, resume: bool) -> Staging:
        """Stage on a local disk what will be put into the bucket."""
        store = self.at(address_of(text))
        return RemoteStaging(store, store.address, store.client, replaced, directory=directory, resume=resume)

    def share(self, text: str, *, create: bool) -> RemoteShared:
        """Return a folder of a bucket, which is there as soon as anything lies in it."""
        store = self.at(address_of(text))
        return RemoteShared(store, store.address, store.client)

    def url(self, text: str) -> str:
        """Return the address without needless slashes."""
        return address_of(text).public

    def at(self, address: Address) -> ObjectStore:
        client = Client(_made(self._kind, address.host, options(), address), address.origin)
        return ObjectStore(address, client, self)


class GoogleScheme(ObjectScheme):
    """Addresses of the form ``gs://bucket/folder/file``."""

    def __init__(self) -> None:
        super().__init__("GCSStore")


class AzureScheme(ObjectScheme):
    """Addresses of the form ``az://container/folder/file``."""

    def __init__(self) -> None:
        super().__init__("AzureStore")


def _made(kind: str, place: str, settings: dict[str, Any], address: Address) -> Any:
    """Make obstore's store; what it refuses in words that tell no secret."""
    api = require("obstore", EXTRA)
    try:
        return getattr(require("obstore.store", EXTRA), kind)(place, **settings)
    except (api.exceptions.BaseError, ValueError) as error:
        raise _no_address(address) from (None if address.user or address.query else error)


def _no_address(address: Address) -> UsageError:
    return UsageError(
        "expected an address, and settings in the environment, that this kind of store takes; see spec/remote.md",
        rule="store.url",
        where=address.public,
    )
