"""Writing to a bucket: staged on a local disk, then put there object by object, the one that makes it whole last."""

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
from ingot.core.runtime.parallel import go_on, ordered
from ingot.errors import IngotError, IntegrityError, UsageError
from ingot.model.store import Listing, OverwritePolicy, Store
from ingot.stores.cache import default_cache
from ingot.stores.remote.address import Address
from ingot.stores.remote.client import Client

_DECIDING = (".index.json", "manifest.json")
_DONE = "uploaded.json"
_BLOCK = 8 << 20
_DELETING = 8
_COPYING = 32  # at once: the store does the work
# What lies beside weights comes first, the index of shards last: a reader in between finds no whole artifact. Of one
# that is replaced the index, or the weights, go first: rather none than half of each.
_BESIDE = (".json", ".txt", ".md", ".model", ".jinja", ".py", ".tiktoken")


class RemoteStaging(Staging):
    """Staging of what will appear in a bucket; for the rest as ``Staging``.

    The local folder is one of Ingot's cache. An upload that is interrupted is gone on with by ``resume``: objects that
    are there as they were put are not put again.

    Raises ``UsageError`` ``target.name``, ``target.exists``, ``target.not-a-file``, ``target.not-a-folder``, what
    ``OverwritePolicy.require_ours`` does, and as ``Client``.
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
        """Prepare to write ``address``; ``store`` is that address as a folder, also if a single file will be there."""
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
        if len(last.encode()) > LONGEST_NAME:  # of keys each name may have up to 1024 bytes
            last = sha256(last.encode()).hexdigest()
        self._mine = set(_earlier(around / partial_name(last))) if resume else set()
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
        """Return the address of a folder beside the target; what an earlier run left there stays with ``resume``.

        Raises ``UsageError`` ``target.name`` for a bucket as a whole, beside which there is nothing.
        """
        if not self._address.last:
            raise UsageError(
                "expected a folder of the bucket: beside the bucket itself nothing can be put",
                rule="target.name",
                where=self.location,
            )
        if self._shared is None:
            self._shared = self._address.parent.within(f".{self._address.last}{SUFFIX}")
            if not self.resuming:
                self._empty_shared()
        return f"{self._shared.public}/"

    def take_over(self, files: Mapping[str, str]) -> None:
        """Publish files of the shared folder; the store copies their bytes by itself."""
        assert self._shared is not None
        self._taken = {name: self._shared.within(path).path for name, path in files.items()}

    def publish(self, names: Sequence[str]) -> Path:
        """Put the named files into the bucket; remove those of a folder that was replaced; remove the staging folder.

        Returns where the files were staged.
        """
        self._require_open()
        if not self._is_folder and len(names) != 1:
            raise UsageError(
                f"expected one file to publish, found {len(names)}", rule="target.one-file", where=self.location
            )
        self._require_free()
        self._keep_only(names)
        done = _earlier(self.folder)
        if self._is_folder:
            old = {name for name in self._target.tree() if not name.endswith("/")}
            ranks = {name: _rank(name) for name in sorted(old - self._mine)}
            self._delete(name for name in ranks if ranks[name] == max(ranks.values()))
            taken = [name for name in names if name in self._taken]  # no companions, no index: order tells nothing
            for _ in ordered(lambda name: self._put(name, done), taken, min(len(taken), _COPYING)):
                pass
            staged = sorted((name for name in names if name not in self._taken), key=_rank)
            for name in staged[:-1]:
                self._put(name, done)
            self._delete(sorted(old.difference(names)))
            for name in staged[-1:]:  # the file that makes the others count comes after all that can fail
                self._put(name, done)
        else:
            self._put(names[0], done)
        self._committed()
        return self.dst

    def discard(self) -> None:
        """Remove everything on the local disk, and what other processes have put beside the target."""
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
        (self.folder / _DONE).unlink(missing_ok=True)

    def _key(self, name: str) -> str:
        return self._address.within(name).path if self._is_folder else self._address.path

    def _put(self, name: str, done: dict[str, Any]) -> None:
        """Put one file, unless an earlier run has and it is still there."""
        path = self.files / name
        key = self._key(name)
        taken = self._taken.get(name)
        state = [path.stat().st_size, _digest(path) if taken is None else taken]
        if name in done and done[name][:2] == state:
            try:
                now = self._client.state(key)
                if now.is_strong and now.etag == done[name][2] and now.size == state[0]:
                    return
            except UsageError:  # gone
                pass
        if taken is None:
            self._client.put(key, path)
        else:
            self._client.copy(taken, key)
        now = self._client.state(key)
        if now.size != state[0]:
            raise IntegrityError(
                "remote.length", f"expected {state[0]} bytes in the bucket, found {now.size}", where=self.location
            )
        with self._guard:
            done[name] = [*state, now.etag]
            atomic_write(self.folder / _DONE, json.dumps(done).encode())

    def _delete(self, names: Any) -> None:
        for name in names:
            self._client.delete(self._key(name))

    def _require_free(self) -> None:
        """Refuse what cannot be replaced, before hours of work and not after."""
        where = self._address.public
        listing = self._target.list()
        try:
            there = bool(self._address.last) and self._client.state(self._address.path) is not None
        except IngotError as error:
            if error.rule != "store.missing":
                raise
            there = False
        if there and self._is_folder:
            raise UsageError("expected a folder or nothing, found a file", rule="target.not-a-folder", where=where)
        if listing != Listing() and not self._is_folder:
            raise UsageError("expected a file or nothing, found a folder", rule="target.not-a-file", where=where)
        if not (there or listing != Listing()):
            return
        if self._is_folder and self._mine.issuperset(self._target.tree()):
            return  # what an earlier run of this has put there
        if not self._replaced.allowed:
            raise UsageError(
                "the target exists: choose another, or pass --overwrite (overwrite=True)",
                rule="target.exists",
                where=where,
            )
        if self._is_folder and self._replaced.require_ours is not None:
            self._replaced.require_ours(self._target)


def _earlier(folder: Path) -> dict[str, Any]:
    """Return what an interrupted run has put into the bucket: names to size, digest and tag."""
    try:
        done = json.loads((folder / _DONE).read_bytes())
    except (OSError, ValueError):
        return {}
    return done if isinstance(done, dict) else {}


def _rank(name: str) -> int:
    low = name.lower()
    return 2 if low.endswith(_DECIDING) else 0 if low.endswith(_BESIDE) and "/" not in low else 1


def _digest(path: Path) -> str:
    running = Blake3()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            go_on()
            running.update(block)
    return running.text()
