"""The Hugging Face Hub: ``hf://org/name[@revision][/file]``, read from its local cache or from the Hub.

huggingface_hub decides on cache, token, endpoint and offline mode. Ingot reads bytes by ranges, as from any web server.
A revision is resolved to a commit once, and all files are read from that commit.
"""

from __future__ import annotations

import builtins
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from ingot.core.border import require
from ingot.errors import FormatError, IngotError, ResourceError, UsageError
from ingot.model.bytesource import ByteSource
from ingot.model.store import Listing, Store, checked_name
from ingot.stores.local import LocalStore
from ingot.stores.memory import listing_of
from ingot.stores.remote.address import Address, without_secrets
from ingot.stores.remote.failures import missing
from ingot.stores.remote.store import RemoteScheme, RemoteStore, WebScheme
from ingot.stores.remote.web import WebClient

HUB_EXTRA = "hub"
_MAX_INDEX = 1 << 27  # bytes
_MAIN = "main"
_NAME = r"[A-Za-z0-9][\w.-]*"
_ADDRESS = re.compile(rf"hf://({_NAME}/{_NAME})(?:@([^/?#]+))?(?:/([^?#]*))?", re.IGNORECASE)
_COMMIT = re.compile(r"[A-Za-z0-9]{7,64}")
_PAGE = re.compile(
    rf"https://(?:www\.)?(?:huggingface\.co|hf\.co)/({_NAME}/{_NAME})/?(?:(?:tree|blob|resolve)/([^/?#]+)/?([^?#]*))?"
    r"(?:[?#].*)?"
)
# Suffixes of files without weights. An interrupted download may have left only such files.
_COMPANIONS = (".json", ".txt", ".md", ".model", ".jinja", ".py", ".gitattributes")


@dataclass(frozen=True, slots=True)
class HubAddress:
    """A model of the Hub, its revision, and the path of a file or folder in it; an empty path is the model."""

    model: str
    revision: str
    path: str

    def within(self, path: str, revision: str = "") -> str:
        """Return the address of ``path`` in this model, at ``revision`` or else at this address's revision."""
        revision = quote(revision or self.revision, safe="")
        start = f"hf://{self.model}" + ("" if revision == _MAIN else f"@{revision}")
        return f"{start}/{quote(path)}" if path else start


def hub_page(text: str) -> str:
    """Return the ``hf:`` address for the address of a page of the Hub; empty for other pages."""
    match = _PAGE.fullmatch(text)
    if match is None:
        return ""
    return hub_address(f"hf://{match[1]}").within(unquote(match[3] or ""), unquote(match[2] or _MAIN))


def hub_address(text: str) -> HubAddress:
    """Parse an ``hf:`` address; raise ``UsageError`` ``store.url``."""
    match = _ADDRESS.fullmatch(text)
    path = unquote(match[3] or "").removesuffix("/") if match else ""
    if match is None or any(part in ("", ".", "..") or "\0" in part for part in path.split("/") if path):
        raise UsageError(
            "expected hf://org/name, or hf://org/name@revision/file", rule="store.url", where=without_secrets(text)
        )
    return HubAddress(match[1], unquote(match[2] or _MAIN), path)


class HubStore(RemoteStore):
    """A folder of a model on the Hub at one commit."""

    def __init__(self, address: HubAddress, commit: str, names: Sequence[str], client: WebClient, scheme: HubScheme):
        org, _, name = address.model.partition("/")
        super().__init__(Address("hf", org, name), client, scheme)
        self._hub_address = address
        self._commit = commit
        self._names = names
        self.location = address.within(address.path)
        self.url = address.within(address.path, commit)
        self._start = f"{address.path}/" if address.path else ""

    def list(self, folder: str = "") -> Listing:
        """Return the files and folders directly in the folder."""
        start = f"{self._start}{checked_name(folder, self.location)}/" if folder else self._start
        for name in self._names:
            if name.startswith(start):
                checked_name(name.removeprefix(start), self.location)
        return listing_of(self._names, start)

    def open(self, name: str) -> ByteSource:
        """Open a file; raise ``UsageError`` ``store.missing``, without a request, if the commit lacks it."""
        if self._start + checked_name(name, self.location) not in self._names:
            raise missing(self.location_of(name))
        return super().open(name)

    def location_of(self, name: str = "") -> str:
        return f"{self.location}/{name}" if name else self.location

    def _key(self, name: str) -> str:
        return f"{self._hub_address.model}/resolve/{self._commit}/{self._start}{name}"


class HubScheme(RemoteScheme):
    """The scheme of addresses ``hf://org/name[@revision][/file]``."""

    def store(self, text: str, io: str) -> Store:
        """Return the model at the address ``text``, or a folder of it, as a store."""
        return self._cached(hub_address(text), io, file=False) or self._online(hub_address(text))

    def locate(self, text: str, io: str) -> tuple[Store, str]:
        """Return the store and a file's name in it; for a folder, the folder and an empty name.

        If the local cache has the file, or all files of the model, it is used; otherwise the Hub.
        Raises ``UsageError`` ``store.missing``; ``ResourceError`` ``hub.offline``, ``store.denied``, ``remote.failed``.
        """
        address = hub_address(text)
        if address.path and not text.endswith("/"):
            file_folder = self._cached(address, io, file=True)
            if file_folder is not None:
                return file_folder, address.path.rpartition("/")[2]
        snapshot = self._cached(address, io, file=False)
        if snapshot is not None:
            return snapshot, ""
        folder, _, last = address.path.rpartition("/")
        parent = self._online(HubAddress(address.model, address.revision, folder))
        if last and parent.exists(last):
            return parent, last
        inside = self._online(address) if last else parent
        if inside.list() == Listing():
            raise UsageError("expected a file or folder of the model", rule="store.missing", where=text[:200])
        return inside, ""

    def _cached(self, address: HubAddress, io: str, *, file: bool) -> LocalStore | None:
        """Return the cached snapshot's folder if it has the file, or all files of the model; else None."""
        hub = require("huggingface_hub", HUB_EXTRA)
        cache = require("huggingface_hub.constants", HUB_EXTRA).HF_HUB_CACHE
        if file:
            try:
                path = hub.try_to_load_from_cache(
                    address.model, address.path, cache_dir=cache, revision=address.revision
                )
            except ValueError:  # huggingface_hub never caches such a name, for example C:x
                return None
            return LocalStore(Path(path).parent, io) if isinstance(path, str) else None
        try:
            root = hub.snapshot_download(
                address.model, revision=address.revision, cache_dir=cache, local_files_only=True
            )
        except (OSError, ValueError):  # missing or incomplete
            return None
        folder = Path(root) / address.path
        if not folder.is_dir() or not _has_weights(LocalStore(folder)):
            return None
        return LocalStore(folder, io)

    def _online(self, address: HubAddress) -> HubStore:
        hub = require("huggingface_hub", HUB_EXTRA)
        location = address.within(address.path)
        try:
            api = hub.HfApi(endpoint=_endpoint())
            info = api.model_info(address.model, revision=address.revision, timeout=30)
        except Exception as error:
            raise _hub_error(error, location) from None
        names = [item.rfilename for item in info.siblings or ()]
        if not all(isinstance(name, str) for name in names) or not _COMMIT.fullmatch(str(info.sha)):
            raise FormatError("hub.answer", "expected a commit and names of files in the Hub's answer", where=location)
        return HubStore(address, str(info.sha), names, _client(hub), self)


class HttpsScheme(WebScheme):
    """The scheme of web addresses; the address of a page of the Hub leads to the page's model."""

    def store(self, text: str, io: str) -> Store:
        page = hub_page(text)
        return HubScheme().store(page, io) if page else super().store(text, io)

    def locate(self, text: str, io: str) -> tuple[Store, str]:
        page = hub_page(text)
        return HubScheme().locate(page, io) if page else super().locate(text, io)


def _endpoint() -> str:
    return str(require("huggingface_hub.constants", HUB_EXTRA).ENDPOINT)


def _client(hub: Any) -> WebClient:
    token = hub.get_token()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return WebClient(_endpoint().rstrip("/"), headers, immutable=True)


def _has_weights(store: LocalStore) -> bool:
    """Return whether a cached snapshot is complete: it has weights, and all shards that its indexes list."""
    names = store.list().files
    if not any(not name.lower().endswith(_COMPANIONS) for name in names if not name.startswith(".")):
        return bool(store.list().folders)
    try:
        indexes = [json.loads(store.head(name, _MAX_INDEX)) for name in names if name.endswith(".index.json")]
        return all(shard in names for index in indexes for shard in index["weight_map"].values())
    except (IngotError, ValueError, LookupError, TypeError, AttributeError):
        return True  # the format's reader will raise the precise error


def _hub_error(error: Exception, location: str) -> IngotError:
    """Return the Ingot error for an error of huggingface_hub, without the address of a request."""
    names: builtins.list[str] = [cls.__name__ for cls in type(error).__mro__]
    if "OfflineModeIsEnabled" in names or "LocalEntryNotFoundError" in names:
        return ResourceError(
            "the Hub's cache on this machine lacks the model or a part of it, and HF_HUB_OFFLINE is set: download it "
            "when online (`hf download`)",
            rule="hub.offline",
            where=location,
        )
    if "GatedRepoError" in names:
        return ResourceError(
            "the owner of the model grants access: request it on the model's page, and log in with `hf auth login`",
            rule="store.denied",
            where=location,
        )
    if "RepositoryNotFoundError" in names or "RevisionNotFoundError" in names or "HFValidationError" in names:
        return UsageError(
            "the Hub has no such model or revision, or it is private: check the name, or log in with `hf auth login`",
            rule="store.missing",
            where=location,
        )
    return ResourceError(
        "the model is not in the Hub's cache on this machine, and the Hub cannot be reached; check the network, or "
        "download it when online (`hf download`)",
        rule="hub.offline",
        where=location,
    )
