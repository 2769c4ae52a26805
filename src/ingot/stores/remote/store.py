"""Stores and schemes of buckets and of web servers."""

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
from ingot.stores.remote.address import Address, address_of, without_secrets
from ingot.stores.remote.client import EXTRA, Client, Opened, RangeClient, options
from ingot.stores.remote.http import origin_of
from ingot.stores.remote.shared import RemoteShared
from ingot.stores.remote.source import HEAD, RemoteSource
from ingot.stores.remote.staging import RemoteStaging
from ingot.stores.remote.web import WebClient
from ingot.stores.scheme import Scheme, WritableScheme

_MAX_OPENED = 256  # files whose first bytes a store keeps in memory
_PAGE = 8 << 20


class RemoteStore(Store):
    """The files below one remote folder.

    The first ``open`` of a file fixes its version for all later reads of this store.
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
        """Open one file with one request, which also reads its first bytes.

        Raises the errors of ``RangeClient.open``, and ``FormatError`` ``store.escape``.
        """
        checked_name(name, self.location)
        with self._lock:
            opened = self._opened.get(name)
        if opened is None:
            opened = self._client.open(self._key(name), HEAD)
            with self._lock:
                opened = self._opened.setdefault(name, opened)
                while len(self._opened) > _MAX_OPENED:
                    self._opened.popitem(last=False)
        reopen = partial(self._scheme.reopen, self.url_of(name))
        seal = partial(self._seal, name)
        return RemoteSource(self._client, self._key(name), opened, self.location_of(name), reopen, seal)

    def _seal(self, name: str) -> Seal | None:
        """Return the seal of a file, or None if it has none.

        After a file without a seal, no further seals are requested from this store.
        """
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
        """Return the stamp of a file; raise the errors of ``open``."""
        source = self.open(name)
        assert isinstance(source, RemoteSource)
        return source.stamp

    def _key(self, name: str) -> str:
        if any("\ud800" <= char <= "\udfff" for char in name):
            raise FormatError("store.escape", f"expected a name in UTF-8, found {name[:200]!r}", where=self.location)
        return self.address.within(name).path


class ObjectStore(RemoteStore):
    """A folder of a bucket; its files are the objects with the folder's prefix."""

    def __init__(self, address: Address, client: Client, scheme: RemoteScheme) -> None:
        super().__init__(address, client, scheme)
        self.client = client

    def list(self, folder: str = "") -> Listing:
        """Return the files and folders directly in the store or in ``folder``, with one request."""
        prefix = self._key(checked_name(folder, self.location)) if folder else self.address.path
        start = f"{prefix}/" if prefix else ""
        objects, folders = self.client.list(prefix)
        names = [sorted(key.removeprefix(start) for key in keys) for keys in (objects, folders)]
        for name in (*names[0], *names[1]):
            checked_name(name, self.location)
            checked_name(name.replace("/", "\0"), self.location)
        return Listing(tuple(names[0]), tuple(names[1]))


class WebStore(RemoteStore):
    """A folder of a web server, which may have a page that lists the folder."""

    def __init__(self, address: Address, client: WebClient, scheme: RemoteScheme) -> None:
        super().__init__(address, client, scheme)
        self._pages = client

    def list(self, folder: str = "") -> Listing:
        """Return the files and folders to which the folder's page links.

        Raises ``UnsupportedError`` ``remote.no-listing`` if no page lists the folder.
        """
        key = self._key(checked_name(folder, self.location)) if folder else self.address.path
        try:
            media_type, page = self._pages.page(key, _PAGE)
        except IngotError as error:
            if folder and error.rule == "store.missing":
                return Listing()
            if error.rule in ("store.missing", "store.denied"):
                raise self._no_listing() from None
            raise
        if "html" not in media_type.lower():
            if folder:
                return Listing()  # the link leads to a file
            raise self._no_listing()
        return _linked(page.decode("utf-8", "replace"), f"/{quote(key)}".rstrip("/") + "/")

    def exists(self, name: str) -> bool:
        """Implement ``Store.exists`` by opening the file."""
        try:
            self.open(name)
        except IngotError as error:
            if error.rule in ("store.missing", "store.denied", "remote.no-ranges"):
                return False
            raise
        return True

    def _no_listing(self) -> UnsupportedError:
        return UnsupportedError(
            "the server has no page that lists this folder: give the address of a file, such as "
            "model.safetensors.index.json",
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
    """Return the files and folders directly below ``folder`` to which a page links."""
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
    """A scheme whose files are remote; a base class."""

    needs_slashes = True  # s3:x is a path

    def location(self, text: str) -> str:
        """Return the address without its secrets."""
        return without_secrets(text)

    def reopen(self, text: str) -> ByteSource:
        """Open the file at an address; copies of sources call this."""
        store, name = self.locate(text, "auto")
        return store.open(name)


class FolderScheme(RemoteScheme):
    """A scheme whose addresses do not show whether they name a file or a folder."""

    def store(self, text: str, io: str) -> Store:
        """Return the folder at an address; ``io`` has no effect."""
        return self.open_folder(address_of(text))

    def locate(self, text: str, io: str) -> tuple[Store, str]:
        """Return the store and a file's name in it; for a folder, the folder and an empty name.

        Raises ``UsageError`` ``store.missing`` if neither exists, and the errors of ``RemoteStore.open``.
        """
        address = address_of(text)
        if address.folder:
            return self.open_folder(address), ""
        parent = self.open_folder(address.parent)
        try:
            parent.open(address.last)
        except IngotError as error:
            if error.rule not in ("store.missing", "remote.no-ranges", "store.denied"):
                raise
            folder = self.open_folder(address)
            if not self.is_folder(folder):
                raise
            return folder, ""
        return parent, address.last

    def is_folder(self, store: RemoteStore) -> bool:
        """Return whether a folder exists, which means that its listing is not empty."""
        try:
            return store.list() != Listing()
        except IngotError:
            return False

    @abstractmethod
    def open_folder(self, address: Address) -> RemoteStore:
        """Return the folder as a store."""


class WebScheme(FolderScheme):
    """The scheme of addresses ``https://host/folder/file``."""

    def open_folder(self, address: Address) -> WebStore:
        headers = {}
        if address.user:
            headers["Authorization"] = f"Basic {b64encode(unquote(address.user).encode()).decode()}"
        try:
            origin_of(address.origin)
        except ValueError:
            raise _address_error(address) from None
        return WebStore(address, WebClient(address.origin, headers, query=address.query), self)


class ObjectScheme(FolderScheme, WritableScheme):
    """The scheme of addresses ``s3://bucket/folder/file``.

    obstore reads credentials and endpoints from the environment.

    Parameters
    ----------
    class_name : str
        The name of obstore's class.
    """

    def __init__(self, class_name: str = "S3Store") -> None:
        self._class_name = class_name

    def stage(self, text: str, replaced: OverwritePolicy, *, directory: bool, resume: bool) -> Staging:
        """Return a local staging folder whose files will be uploaded to the bucket."""
        store = self.open_folder(address_of(text))
        return RemoteStaging(store, store.address, store.client, replaced, directory=directory, resume=resume)

    def share(self, text: str, *, create: bool) -> RemoteShared:
        """Return a folder of a bucket; ``create`` has no effect, because the first object creates the folder."""
        store = self.open_folder(address_of(text))
        return RemoteShared(store, store.address, store.client)

    def url(self, text: str) -> str:
        """Return the address without redundant slashes."""
        return address_of(text).public

    def open_folder(self, address: Address) -> ObjectStore:
        client = Client(_obstore(self._class_name, address.host, options(), address), address.origin)
        return ObjectStore(address, client, self)


class GoogleScheme(ObjectScheme):
    """The scheme of addresses ``gs://bucket/folder/file``."""

    def __init__(self) -> None:
        super().__init__("GCSStore")


class AzureScheme(ObjectScheme):
    """The scheme of addresses ``az://container/folder/file``."""

    def __init__(self) -> None:
        super().__init__("AzureStore")


def _obstore(class_name: str, bucket: str, settings: dict[str, Any], address: Address) -> Any:
    """Return obstore's store ``class_name`` for a bucket.

    Raises ``UsageError`` ``store.url``, without the secrets of ``address``, if obstore rejects the settings.
    """
    api = require("obstore", EXTRA)
    try:
        return getattr(require("obstore.store", EXTRA), class_name)(bucket, **settings)
    except (api.exceptions.BaseError, ValueError) as error:
        raise _address_error(address) from (None if address.user or address.query else error)


def _address_error(address: Address) -> UsageError:
    return UsageError(
        "this address, or a setting in the environment, is not valid for this type of store; see spec/remote.md",
        rule="store.url",
        where=address.public,
    )
