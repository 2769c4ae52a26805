"""Staging for buckets: files are written to a local disk, then uploaded.

The file that completes the artifact is uploaded last.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from ingot.core.bytes.checksums import Blake3
from ingot.core.files.atomic import LONGEST_NAME, SUFFIX, Staging, atomic_write, partial_name
from ingot.core.files.system import write_error
from ingot.core.runtime.parallel import check_cancelled, ordered
from ingot.errors import IngotError, IntegrityError, UsageError
from ingot.model.store import Listing, OverwritePolicy, Store
from ingot.stores.cache import default_cache
from ingot.stores.remote.address import Address
from ingot.stores.remote.client import Client

_DECIDING = (".index.json", "manifest.json")
_UPLOADED = "uploaded.json"
_BLOCK = 8 << 20
_DELETING = 8
_COPYING = 32  # copies that the store makes at once
# Files with these suffixes are uploaded first, the index of shards last, so that no reader sees an artifact that looks
# complete but is not. If an artifact is replaced, its index or weights are deleted first: a reader then sees no
# artifact instead of a mixture of two.
_COMPANIONS = (".json", ".txt", ".md", ".model", ".jinja", ".py", ".tiktoken")


class RemoteStaging(Staging):
    """A ``Staging`` whose files are uploaded to a bucket.

    The local folder is in Ingot's cache. With ``resume``, an interrupted upload continues: objects that are unchanged
    in the bucket are not uploaded again.

    Raises ``UsageError`` ``target.name``, ``target.exists``, ``target.not-a-file``, ``target.not-a-folder``; and the
    errors of ``OverwritePolicy.require_ours`` and ``Client``.
    """

    takes_over = True

    def __init__(
        self,
        store: Store,
        address: Address,
        client: Client,
        replaced: OverwritePolicy,
        *,
        directory: bool,
        resume: bool,
    ) -> None:
        """Create the staging folder for ``address``; ``store`` is the store at this address, even for a single file."""
        self._target = store
        self._address = address
        self._client = client
        self._replaced = replaced
        self._is_folder = directory
        self._shared: Address | None = None
        self._taken: Mapping[str, str] = {}
        self._guard = threading.Lock()
        if not self._address.last and not directory:
            raise UsageError("expected the name of a file to write", rule="target.name", where=store.location)
        around = Path(default_cache("uploads")) / sha256(self._address.public.encode()).hexdigest()[:32]
        last = self._address.last or "bucket"
        if len(last.encode()) > LONGEST_NAME:  # a name in a bucket may have up to 1024 bytes
            last = sha256(last.encode()).hexdigest()
        self._uploaded = set(_earlier(around / partial_name(last))) if resume else set()
        self._require_free()
        try:
            around.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise write_error(error, str(around)) from error
        super().__init__(around / last, directory=directory, overwrite=True, resume=resume)

    @property
    def location(self) -> str:
        return self._address.public

    @property
    def shared_files(self) -> str | None:
        return None

    def share(self) -> str:
        """Return the address of a folder next to the target; with ``resume``, files of an earlier run stay in it.

        Raises ``UsageError`` ``target.name`` if the target is a full bucket.
        """
        if not self._address.last:
            raise UsageError(
                "the target is a full bucket: choose a folder of it",
                rule="target.name",
                where=self.location,
            )
        if self._shared is None:
            self._shared = self._address.parent.within(f".{self._address.last}{SUFFIX}")
            if not self.resuming:
                self._empty_shared()
        return f"{self._shared.public}/"

    def take_over(self, files: Mapping[str, str]) -> None:
        """Register files of the shared folder (name to path) for ``publish``, which copies them within the bucket."""
        assert self._shared is not None
        self._taken = {name: self._shared.within(path).path for name, path in files.items()}

    def publish(self, names: Sequence[str]) -> Path:
        """Upload the named files, delete other files of a replaced folder, and remove the staging folder.

        Returns the path of the staged files.
        """
        self._require_open()
        if not self._is_folder and len(names) != 1:
            raise UsageError(
                f"expected one file to publish, found {len(names)}", rule="target.one-file", where=self.location
            )
        self._require_free()
        self._keep_only(names)
        uploaded = _earlier(self.folder)
        if self._is_folder:
            old = {name for name in self._target.tree() if not name.endswith("/")}
            ranks = {name: _rank(name) for name in sorted(old - self._uploaded)}
            self._delete(name for name in ranks if ranks[name] == max(ranks.values()))
            copied = [name for name in names if name in self._taken]  # neither companions nor index: any order is safe
            for _ in ordered(lambda name: self._put(name, uploaded), copied, min(len(copied), _COPYING)):
                pass
            staged = sorted((name for name in names if name not in self._taken), key=_rank)
            for name in staged[:-1]:
                self._put(name, uploaded)
            self._delete(sorted(old.difference(names)))
            for name in staged[-1:]:  # the file that completes the artifact, after all steps that can fail
                self._put(name, uploaded)
        else:
            self._put(names[0], uploaded)
        self._committed()
        return self.dst

    def discard(self) -> None:
        """Remove the local staging folder, and the shared folder of other processes next to the target."""
        opened = self._open
        super().discard()
        if opened:
            self._empty_shared()
        if opened and not self.folder.exists() and not any(self.folder.parent.iterdir()):
            self.folder.parent.rmdir()

    def _empty_shared(self) -> None:
        if self._shared is not None:
            for _ in ordered(self._client.delete, self._client.stamps(self._shared.path), _DELETING):
                pass

    def _empty(self) -> None:
        super()._empty()
        (self.folder / _UPLOADED).unlink(missing_ok=True)

    def _key(self, name: str) -> str:
        return self._address.within(name).path if self._is_folder else self._address.path

    def _put(self, name: str, uploaded: dict[str, Any]) -> None:
        """Upload one file, unless an earlier run did and the object is unchanged."""
        path = self.files / name
        key = self._key(name)
        source_key = self._taken.get(name)
        state = [path.stat().st_size, _digest(path) if source_key is None else source_key]
        if name in uploaded and uploaded[name][:2] == state:
            try:
                now = self._client.state(key)
                if now.is_strong and now.etag == uploaded[name][2] and now.size == state[0]:
                    return
            except UsageError:  # the object no longer exists
                pass
        if source_key is None:
            self._client.put(key, path)
        else:
            self._client.copy(source_key, key)
        now = self._client.state(key)
        if now.size != state[0]:
            raise IntegrityError(
                "remote.length", f"expected {state[0]} bytes in the bucket, found {now.size}", where=self.location
            )
        with self._guard:
            uploaded[name] = [*state, now.etag]
            atomic_write(self.folder / _UPLOADED, json.dumps(uploaded).encode())

    def _delete(self, names: Any) -> None:
        for name in names:
            self._client.delete(self._key(name))

    def _require_free(self) -> None:
        """Raise an error if the target must not be replaced; called before and after the long work."""
        location = self._address.public
        listing = self._target.list()
        try:
            is_file = bool(self._address.last) and self._client.state(self._address.path) is not None
        except IngotError as error:
            if error.rule != "store.missing":
                raise
            is_file = False
        if is_file and self._is_folder:
            raise UsageError("expected a folder or nothing, found a file", rule="target.not-a-folder", where=location)
        if listing != Listing() and not self._is_folder:
            raise UsageError("expected a file or nothing, found a folder", rule="target.not-a-file", where=location)
        if not (is_file or listing != Listing()):
            return
        if self._is_folder and self._uploaded.issuperset(self._target.tree()):
            return  # an earlier run of this conversion uploaded these files
        if not self._replaced.allowed:
            raise UsageError(
                "the target exists: choose another, or pass --overwrite (overwrite=True)",
                rule="target.exists",
                where=location,
            )
        if self._is_folder and self._replaced.require_ours is not None:
            self._replaced.require_ours(self._target)


def _earlier(folder: Path) -> dict[str, Any]:
    """Return the files that an interrupted run uploaded: name to size, digest and ETag."""
    try:
        uploaded = json.loads((folder / _UPLOADED).read_bytes())
    except (OSError, ValueError):
        return {}
    return uploaded if isinstance(uploaded, dict) else {}


def _rank(name: str) -> int:
    low = name.lower()
    return 2 if low.endswith(_DECIDING) else 0 if low.endswith(_COMPANIONS) and "/" not in low else 1


def _digest(path: Path) -> str:
    running = Blake3()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            check_cancelled()
            running.update(block)
    return running.text()
