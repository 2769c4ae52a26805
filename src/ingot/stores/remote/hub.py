"""The Hugging Face Hub: ``hf://org/name[@revision][/file]``, from its cache on this machine or from afar.

The cache, the token, the endpoint and whether one is offline are huggingface_hub's business; bytes are asked for by
ranges like those of any web server. A revision becomes a commit once: what is read is of that commit, whatever becomes
of the branch.
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
from ingot.stores.remote.address import Address, shown
from ingot.stores.remote.store import RemoteScheme, RemoteStore, WebScheme
from ingot.stores.remote.web import WebClient

HUB_EXTRA = "hub"
_INDEX = 1 << 27  # bytes of an index at most
_MAIN = "main"
_NAME = r"[A-Za-z0-9][\w.-]*"
_ADDRESS = re.compile(rf"hf://({_NAME}/{_NAME})(?:@([^/?#]+))?(?:/([^?#]*))?", re.IGNORECASE)
_COMMIT = re.compile(r"[A-Za-z0-9]{7,64}")
_PAGE = re.compile(
    rf"https://(?:www\.)?(?:huggingface\.co|hf\.co)/({_NAME}/{_NAME})/?(?:(?:tree|blob|resolve)/([^/?#]+)/?([^?#]*))?"
    r"(?:[?#].*)?"
)
# Files of a model without weights: what a download that was given up after them has left.
_BESIDE = (".json", ".txt", ".md", ".model", ".jinja", ".py", ".gitattributes")


@dataclass(frozen=True, slots=True)
class HubAddress:
    """A model, its revision, and what is meant in it: a file, a folder, or all with an empty path."""

    model: str
    revision: str
    path: str

    def within(self, path: str, revision: str = "") -> str:
        """Return the address of a path of this model; without ``revision`` as it was given."""
        revision = quote(revision or self.revision, safe="")
        start = f"hf://{self.model}" + ("" if revision == _MAIN else f"@{revision}")
        return f"{start}/{quote(path)}" if path else start


def hub_page(text: str) -> str:
    """Return the ``hf:`` address of a page of the Hub, such as one copied from a browser; empty for another page."""
    match = _PAGE.fullmatch(text)
    if match is None:
        return ""
    return hub_address(f"hf://{match[1]}").within(unquote(match[3] or ""), unquote(match[2] or _MAIN))


def hub_address(text: str) -> HubAddress:
    """Take an address apart; raises ``UsageError`` ``store.url``."""
    match = _ADDRESS.fullmatch(text)
    path = unquote(match[3] or "").removesuffix("/") if match else ""
    if match is None or any(piece in ("", ".", "..") or "\0" in piece for piece in path.split("/") if path):
        raise UsageError("expected hf://org/name, or hf://org/name@revision/file", rule="store.url", where=shown(text))
    return HubAddress(match[1], unquote(match[2] or _MAIN), path)


class HubStore(RemoteStore):
    """A folder of a model at one commit, read from the Hub."""

    def __init__(self, address: HubAddress, commit: str, names: Sequence[str], client: WebClient, scheme: HubScheme):
        org, _, name = address.model.partition("/")
        super().__init__(Address("hf", org, name), client, scheme)
        self._at = address
        self._commit = commit
        self._names = names
        self.location = address.within(address.path)
        self.url = address.within(address.path, commit)
        self._start = f"{address.path}/" if address.path else ""

    def list(self, folder: str = "") -> Listing:
        """Return what lies directly in the folder, as the commit has it."""
        start = f"{self._start}{checked_name(folder, self.location)}/" if folder else self._start
        inside = [name.removeprefix(start) for name in self._names if name.startswith(start)]
        for name in inside:
            checked_name(name, self.location)
        files = sorted(name for name in inside if "/" not in name)
        return Listing(tuple(files), tuple(sorted({name.split("/")[0] for name in inside if "/" in name})))

    def open(self, name: str) -> ByteSource:
        """Open a file; one that the commit does not have is refused without a request."""
        if self._start + checked_name(name, self.location) not in self._names:
            raise UsageError(
                "expected an existing file, found none", rule="store.missing", where=self.location_of(name)
            )
        return super().open(name)

    def location_of(self, name: str = "") -> str:
        return f"{self.location}/{name}" if name else self.location

    def _key(self, name: str) -> str:
        return f"{self._at.model}/resolve/{self._commit}/{self._start}{name}"


class HubScheme(RemoteScheme):
    """Addresses of the form ``hf://org/name[@revision][/file]``."""

    def store(self, text: str, io: str) -> Store:
        """Return the model, or a folder of it."""
        return self._cached(hub_address(text), io, file=False) or self._online(hub_address(text))

    def locate(self, text: str, io: str) -> tuple[Store, str]:
        """Return the store and the name in it: from the cache where it has what is meant, else from the Hub.

        Raises ``UsageError`` ``store.missing``; ``ResourceError`` ``hub.offline``, ``store.denied``, ``remote.failed``.
        """
        address = hub_address(text)
        if address.path and not text.endswith("/"):
            held = self._cached(address, io, file=True)
            if held is not None:
                return held, address.path.rpartition("/")[2]
        whole = self._cached(address, io, file=False)
        if whole is not None:
            return whole, ""
        folder, _, last = address.path.rpartition("/")
        parent = self._online(HubAddress(address.model, address.revision, folder))
        if last and parent.exists(last):
            return parent, last
        inside = self._online(address) if last else parent
        if inside.list() == Listing():
            raise UsageError("expected a file or folder of the model", rule="store.missing", where=text[:200])
        return inside, ""

    def _cached(self, address: HubAddress, io: str, *, file: bool) -> LocalStore | None:
        """Return the folder of a cached snapshot that has what is meant: the file, or all files of the model."""
        hub = require("huggingface_hub", HUB_EXTRA)
        cache = require("huggingface_hub.constants", HUB_EXTRA).HF_HUB_CACHE
        if file:
            try:
                path = hub.try_to_load_from_cache(
                    address.model, address.path, cache_dir=cache, revision=address.revision
                )
            except ValueError:  # a name that huggingface_hub never caches, such as C:x
                return None
            return LocalStore(Path(path).parent, io) if isinstance(path, str) else None
        try:
            root = hub.snapshot_download(
                address.model, revision=address.revision, cache_dir=cache, local_files_only=True
            )
        except (OSError, ValueError):  # not there, or not whole
            return None
        folder = Path(root) / address.path
        if not folder.is_dir() or not _has_weights(LocalStore(folder)):
            return None
        return LocalStore(folder, io)

    def _online(self, address: HubAddress) -> HubStore:
        hub = require("huggingface_hub", HUB_EXTRA)
        where = address.within(address.path)
        try:
            api = hub.HfApi(endpoint=_endpoint())
            about = api.model_info(address.model, revision=address.revision, timeout=30)
        except Exception as error:
            raise _refusal(error, where) from None
        names = [item.rfilename for item in about.siblings or ()]
        if not all(isinstance(name, str) for name in names) or not _COMMIT.fullmatch(str(about.sha)):
            raise FormatError("hub.answer", "expected a commit and names of files in the Hub's answer", where=where)
        return HubStore(address, str(about.sha), names, _client(hub), self)


class HttpsScheme(WebScheme):
    """Addresses of web servers; those of the Hub's pages lead to the model that they are about."""

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
    """Whether a snapshot has more than what lies beside weights, and all files that an index of it names."""
    names = store.list().files
    if not any(not name.lower().endswith(_BESIDE) for name in names if not name.startswith(".")):
        return bool(store.list().folders)
    try:
        indexes = [json.loads(store.head(name, _INDEX)) for name in names if name.endswith(".index.json")]
        return all(shard in names for index in indexes for shard in index["weight_map"].values())
    except (IngotError, ValueError, LookupError, TypeError, AttributeError):
        return True  # what is wrong with it, its format says


def _refusal(error: Exception, where: str) -> IngotError:
    """Return what huggingface_hub raised in our words, which have no address of a request in them."""
    kinds: builtins.list[str] = [kind.__name__ for kind in type(error).__mro__]
    if "OfflineModeIsEnabled" in kinds or "LocalEntryNotFoundError" in kinds:
        return ResourceError(
            "expected the model in the Hub's cache on this machine, found none or not all of it, and HF_HUB_OFFLINE is "
            "set: download it when online (`hf download`)",
            rule="hub.offline",
            where=where,
        )
    if "GatedRepoError" in kinds:
        return ResourceError(
            "the model is open to those only whom its owner lets in: ask on its page, and log in with `hf auth login`",
            rule="store.denied",
            where=where,
        )
    if "RepositoryNotFoundError" in kinds or "RevisionNotFoundError" in kinds or "HFValidationError" in kinds:
        return UsageError(
            "expected a model and a revision of the Hub, found none that is open to you (`hf auth login` for private "
            "ones)",
            rule="store.missing",
            where=where,
        )
    return ResourceError(
        "the model is not in the Hub's cache on this machine, and the Hub cannot be reached; check the network, or "
        "download it when online (`hf download`)",
        rule="hub.offline",
        where=where,
    )
