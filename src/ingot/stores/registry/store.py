"""Artifacts of registries as stores: ``oci://host/name:tag[/file]``, whose files are read by ranges of blobs."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import partial
from urllib.parse import quote, unquote

from ingot.core.bytes import checksums
from ingot.errors import UnsupportedError, UsageError
from ingot.model.bytesource import ByteSource, MemorySource, Stamp
from ingot.model.store import Listing, Store, checked_name
from ingot.stores.memory import listing_of
from ingot.stores.registry.client import RegistryClient
from ingot.stores.registry.manifest import Blob, Manifest, parse_manifest
from ingot.stores.remote.address import Address, address_of, without_secrets
from ingot.stores.remote.failures import missing
from ingot.stores.remote.source import HEAD, RemoteSource
from ingot.stores.remote.store import RemoteScheme, RemoteStore

LATEST = "latest"
_COMPONENT = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_PATH = re.compile(
    rf"({_COMPONENT}(?:/{_COMPONENT})*)(?::([A-Za-z0-9_][A-Za-z0-9._-]{{0,127}}))?(?:@(sha256:[0-9a-f]{{64}}))?(?:/(.*))?"
)


@dataclass(frozen=True, slots=True)
class Reference:
    """A parsed address: host, repository, tag, digest (empty if not stated), and a path in the artifact."""

    address: Address
    repository: str
    tag: str
    digest: str
    path: str

    @property
    def version(self) -> str:
        """The digest if the address has one, else the tag."""
        return self.digest or self.tag

    def public(self, digest: str = "") -> str:
        """Return the artifact's address, by its tag or by a digest."""
        version = f"@{digest or self.digest}" if digest or self.digest else f":{self.tag}"
        return f"{self.address.origin}/{self.repository}{version}"

    def client(self, *, writing: bool = False) -> RegistryClient:
        """Return a new client of the repository."""
        return RegistryClient(self.address.host, self.repository, unquote(self.address.user), writing=writing)


def parse_reference(text: str) -> Reference:
    """Parse an address ``oci://host/name[:tag][@digest][/file]``; the tag is ``latest`` by default.

    Raises ``UsageError`` ``store.url``.
    """
    address = address_of(text)
    match = _PATH.fullmatch(address.path)
    if match is None or address.query:
        raise UsageError(
            "expected oci://HOST/NAME:TAG or oci://HOST/NAME@sha256:..., with a name in lower case",
            rule="store.url",
            where=without_secrets(text),
        )
    name, tag, digest, path = (group or "" for group in match.groups())
    return Reference(address, name, tag or LATEST, digest, path)


class RegistryStore(RemoteStore):
    """A folder of an artifact. The manifest is read once; it determines the files and their digests."""

    def __init__(
        self, reference: Reference, digest: str, manifest: Manifest, client: RegistryClient, scheme: RegistryScheme
    ) -> None:
        super().__init__(replace(reference.address, path=reference.path), client, scheme)
        self.reference = reference
        self.digest = digest
        self.manifest = manifest
        self.registry = client
        self._start = f"{reference.path}/" if reference.path else ""
        suffix = f"/{quote(reference.path)}" if reference.path else ""
        self.location = reference.public() + suffix
        self.url = reference.public(digest) + suffix

    def list(self, folder: str = "") -> Listing:
        """Return the files and folders that the manifest names directly in the store or in its folder ``folder``."""
        start = f"{self._start}{checked_name(folder, self.location)}/" if folder else self._start
        return listing_of(self.manifest.files, start)

    def blob(self, name: str) -> Blob:
        """Return digest, size and media type of a file; raise ``UsageError`` ``store.missing``."""
        blob = self.manifest.files.get(self._start + checked_name(name, self.location))
        if blob is None:
            raise missing(self.location_of(name))
        return blob

    def open(self, name: str) -> ByteSource:
        """Open a file with one request. A small file is compared with its digest.

        Raises ``IntegrityError`` ``registry.size``, ``registry.digest``, and the errors of ``RemoteStore.open``.
        """
        blob = self.blob(name)
        if not blob.size:
            return MemorySource(b"", self.location_of(name))
        source = super().open(name)
        blob.check_size(source.size, self.location_of(name))
        if blob.size <= HEAD:
            blob.check(checksums.digest("sha256", source.view(0, blob.size)), self.location_of(name))
        return source

    def open_layer(self, layer: Blob) -> ByteSource:
        """Open a layer that is an archive, with one request; raise the errors of ``open``."""
        location = f"{self.location}: layer {layer.digest}"
        if not layer.size:
            return MemorySource(b"", location)
        key = self.registry.blob_key(layer.digest)
        opened = self.registry.open(key, HEAD)
        reopen = partial(self._scheme.reopen, self.url)
        source = RemoteSource(self.registry, key, opened, location, reopen, lambda: None)
        layer.check_size(source.size, location)
        return source

    def stat(self, name: str) -> Stamp:
        return super().stat(name) if self.blob(name).size else Stamp(0)

    def read(self, name: str, max_bytes: int, rule: str) -> bytes:
        """Return the contents of a file, after comparing them with its digest."""
        data = super().read(name, max_bytes, rule)
        self.blob(name).check(checksums.digest("sha256", data), self.location_of(name))
        return data

    def _key(self, name: str) -> str:
        return self.registry.blob_key(self.blob(name).digest)


class RegistryScheme(RemoteScheme):
    """The scheme of addresses ``oci://host/name:tag[/file]``."""

    def store(self, text: str, io: str) -> RegistryStore:
        """Return a folder of an artifact; ``io`` has no effect."""
        store = open_artifact(parse_reference(text), self)
        _require_files(store.manifest, without_secrets(text))
        return store

    def locate(self, text: str, io: str) -> tuple[Store, str]:
        """Return the store and the name of the file in it; for a folder, the folder and an empty name.

        Raises ``UsageError`` ``store.missing``, ``UnsupportedError`` ``registry.layer`` if layers are archives, and the
        errors of ``open_artifact``.
        """
        return self.find(text)

    def find(self, text: str, *, unpacks: bool = False) -> tuple[RegistryStore, str]:
        """Return the result of ``locate``.

        If ``unpacks`` is true and the address names no file, layers may be archives; then no error is raised for them.
        """
        reference = parse_reference(text)
        folder, _, last = reference.path.rpartition("/")
        store = open_artifact(replace(reference, path=folder), self)
        if reference.path or not unpacks:
            _require_files(store.manifest, without_secrets(text))
        if last and store.exists(last):
            return store, last
        if last:
            store = RegistryStore(reference, store.digest, store.manifest, store.registry, self)
            if store.list() == Listing():
                raise missing(without_secrets(text))
        return store, ""

    def not_writable(self, text: str) -> UsageError:
        return UsageError(
            "write to a local folder, and copy it to the registry with `ingot push`",
            rule="store.not-writable",
            where=self.location(text),
        )


def _require_files(manifest: Manifest, location: str) -> None:
    """Raise ``UnsupportedError`` ``registry.layer`` if files of the artifact are in archives."""
    if manifest.archives:
        raise UnsupportedError(
            "files of this artifact are in tar archives, which cannot be read by ranges: `ingot pull` unpacks them",
            rule="registry.layer",
            where=location,
        )


def open_artifact(reference: Reference, scheme: RegistryScheme) -> RegistryStore:
    """Return the folder that an address names; reads the manifest.

    Raises ``UsageError`` ``store.missing``, and the errors of ``RegistryClient.manifest`` and ``parse_manifest``.
    """
    client = reference.client()
    try:
        raw, digest = client.manifest(reference.version)
    except UsageError as error:
        if error.rule != "store.missing":
            raise
        message = "the registry has no artifact of this name and tag, or hides it from you"
        raise UsageError(message, rule="store.missing", where=reference.public()) from None
    return RegistryStore(reference, digest, parse_manifest(raw, reference.public()), client, scheme)
