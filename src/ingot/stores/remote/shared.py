"""Folders of buckets that several processes use at once (``stores.shared``).

Object stores have no locks, but list an object as soon as it is written (S3 since 2020, Google, Azure). To get a shared
or exclusive lock, a process first writes a lease, an object in ``leases/``, and then lists the other leases. The later
of two processes thus sees the other's lease. If the leases conflict, it removes its lease and waits.

A process renews its lease every minute. A lease that was not renewed for ten minutes belongs to a process that died or
lost its connection. The age is measured by the store's clock, relative to a lease just written. After a long loss of
its connection, a process finds its lease removed (``FolderLock.is_held``).
"""

from __future__ import annotations

import os
import secrets
import shutil
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import mkdtemp

from ingot.core.files import locks
from ingot.core.files.system import open_flags, write_error
from ingot.core.runtime.parallel import check_cancelled, ordered
from ingot.errors import IngotError, IntegrityError
from ingot.model.bytesource import Stamp
from ingot.model.store import Store
from ingot.stores.cache import default_cache
from ingot.stores.local import LocalTarget
from ingot.stores.remote.address import Address
from ingot.stores.remote.client import Client
from ingot.stores.shared import LEASES, WAIT, FolderLock, SharedFolder, SharedStaging, busy

RENEWED, STALE = 60.0, 600.0
"""Seconds between renewals of a lease, and the age in seconds from which a lease is ignored."""

_SHARED = ".use"
_ALONE = ".alone"
_POLL = 1.0
_PUTTING = 8
_UPLOAD_PREFIX = "library-"


class RemoteShared(SharedFolder):
    """A folder of a bucket that several processes use at once.

    Parameters
    ----------
    store : Store
        The folder as a store.
    address : Address
        The address of the folder.
    client : Client
        The client of the bucket.
    """

    def __init__(self, store: Store, address: Address, client: Client) -> None:
        self.store = store
        self.client = client
        self._address = address

    def key(self, name: str) -> str:
        """Return the key of the file ``name`` in the bucket."""
        return self._address.within(name).path

    def sizes(self, folder: str) -> dict[str, int]:
        return {name: stamp.size for name, stamp in self.stamps(folder).items() if not name.startswith(".")}

    def states(self, folder: str) -> dict[str, str]:
        return {name: _version(stamp) for name, stamp in self.stamps(folder).items() if not name.startswith(".")}

    def state(self, name: str) -> str:
        return _version(self.client.state(self.key(name)))

    def stamps(self, folder: str) -> dict[str, Stamp]:
        """Return the stamps of the files directly in a folder, by name, with one request."""
        prefix = self.key(folder)
        names = {key.removeprefix(f"{prefix}/"): stamp for key, stamp in self.client.stamps(prefix).items()}
        return {name: stamp for name, stamp in names.items() if "/" not in name}

    def write(self, name: str, data: bytes) -> None:
        self.client.put_bytes(self.key(name), data)

    def remove(self, names: Iterable[str]) -> None:
        for _ in ordered(lambda name: self.client.delete(self.key(name)), names, _PUTTING):
            pass

    def leftovers(self) -> list[str]:
        """Return an empty list, because an interrupted upload leaves no object."""
        return []

    @contextmanager
    def shared_lock(self, seconds: float = WAIT) -> Iterator[FolderLock]:
        lease = _Lease(self, _SHARED)
        try:
            lease.write()
        except IngotError as error:
            if error.rule != "store.denied":
                raise
            yield FolderLock()  # a process without write permission
            return
        with lease.hold(seconds, (_ALONE,)):
            yield lease

    @contextmanager
    def exclusive_lock(self, seconds: float) -> Iterator[FolderLock]:
        lease = _Lease(self, _ALONE)
        lease.write()
        with lease.hold(seconds, (_ALONE, _SHARED)):
            yield lease

    @contextmanager
    def stage(self) -> Iterator[SharedStaging]:
        around = Path(default_cache("uploads"))
        try:
            around.mkdir(parents=True, exist_ok=True)
            path, lock = _locked_folder(around)
        except OSError as error:
            raise write_error(error, str(around)) from error
        try:
            yield _RemoteSharedStaging(self, path)
        finally:
            shutil.rmtree(path, ignore_errors=True)
            if lock is not None:
                os.close(lock)

    def abandoned(self, *, remove: bool) -> int:
        """Implement ``SharedFolder.abandoned`` for staging folders of all buckets; their uploads are never resumed."""
        count = 0
        for path in Path(default_cache("uploads")).glob(f"{_UPLOAD_PREFIX}*"):
            try:
                lock = _locked(path)
            except OSError:
                continue  # in use, or not accessible
            count += 1
            if remove:
                shutil.rmtree(path, ignore_errors=True)
            os.close(lock)
        return count


def _version(stamp: Stamp) -> str:
    return f"{stamp.size} {stamp.etag}" if stamp.is_strong else f"{stamp.size} {stamp.etag} {stamp.mtime_ns}"


def _locked_folder(around: Path) -> tuple[Path, int | None]:
    """Create a locked staging folder in ``around``; return its path and the descriptor of the lock.

    A folder without a lock belongs to a process that died, so other processes remove it. The descriptor is None if the
    system cannot lock folders.
    """
    while True:
        path = Path(mkdtemp(prefix=_UPLOAD_PREFIX, dir=around))
        try:
            return path, _locked(path)
        except (BlockingIOError, FileNotFoundError):
            continue  # another process removed or locked the folder first
        except OSError:
            return path, None  # on Windows folders have no locks, and no process removes them


def _locked(path: Path) -> int:
    """Return a descriptor that holds the system's lock on a folder until the descriptor is closed.

    Raises ``BlockingIOError`` if another process holds the lock, ``FileNotFoundError`` if the folder is missing, and
    other subclasses of ``OSError``.
    """
    descriptor = os.open(path, open_flags("O_RDONLY", "O_DIRECTORY", "O_NOFOLLOW"))
    try:
        locks.lock(descriptor, exclusive=True)
        path.stat()
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


class _RemoteSharedStaging(SharedStaging):
    def __init__(self, folder: RemoteShared, staging: Path) -> None:
        self._folder = folder
        self._staging = staging
        self.files = LocalTarget(staging)

    def publish(self, names: Sequence[str]) -> None:
        for _ in ordered(self._put, names, min(len(names), _PUTTING)):
            pass

    def _put(self, name: str) -> None:
        path = self._staging / name
        key = self._folder.key(name)
        size = path.stat().st_size
        self._folder.client.put(key, path)
        now = self._folder.client.state(key)
        if now.size != size:
            raise IntegrityError(
                "remote.length",
                f"expected {size} bytes in the bucket, found {now.size}",
                where=self._folder.store.location_of(name),
            )
        path.unlink()


class _Lease(FolderLock):
    def __init__(self, folder: RemoteShared, suffix: str) -> None:
        self._folder = folder
        self._suffix = suffix
        self._name = f"{LEASES}/{secrets.token_hex(8)}{suffix}"
        self._expired = False
        self._guard = threading.Lock()

    def write(self) -> None:
        self._folder.write(self._name, f"{os.getpid()} {secrets.token_hex(8)}\n".encode())

    def is_held(self) -> bool:
        """Renew the lease; return whether it existed and had not expired."""
        with self._guard:
            if not self._expired:
                before = self._folder.stamps(LEASES).get(self._last)
                if before is not None:
                    self.write()
                now = self._folder.stamps(LEASES).get(self._last)
                self._expired = before is None or now is None or now.mtime_ns - before.mtime_ns >= STALE * 1e9
            return not self._expired

    @property
    def _last(self) -> str:
        return self._name.rpartition("/")[2]

    @contextmanager
    def hold(self, seconds: float, conflicting: tuple[str, ...]) -> Iterator[None]:
        """Wait until no other lease has a suffix of ``conflicting``; then renew this lease until the context ends."""
        try:
            self._wait(seconds, conflicting)
            ended = threading.Event()
            thread = threading.Thread(target=self._renew, args=(ended,), name="ingot-lease", daemon=True)
            thread.start()
            try:
                yield
            finally:
                ended.set()
                thread.join()
        finally:
            with suppress(IngotError):  # if it cannot be removed, the lease expires
                self._folder.remove([self._name])

    def _wait(self, seconds: float, conflicting: tuple[str, ...]) -> None:
        end = time.monotonic() + seconds
        while self._has_conflict(conflicting):
            self._folder.remove([self._name])
            if time.monotonic() >= end:
                raise busy(self._folder.location)
            check_cancelled()
            time.sleep(min(_POLL, max(0.0, end - time.monotonic())) * (0.5 + secrets.randbelow(100) / 100))
            self.write()

    def _has_conflict(self, conflicting: tuple[str, ...]) -> bool:
        """Return whether another process has an unexpired lease with one of these suffixes.

        If no process has one and this lease is exclusive, remove the expired leases.
        """
        stamps = self._folder.stamps(LEASES)
        if self._last not in stamps:
            return True  # another process removed this lease as expired
        now = stamps[self._last].mtime_ns
        ages = {name: now - stamp.mtime_ns for name, stamp in stamps.items() if name != self._last}
        if any(age < STALE * 1e9 and name.endswith(conflicting) for name, age in ages.items()):
            return True
        if self._suffix == _ALONE:
            self._folder.remove([f"{LEASES}/{name}" for name, age in ages.items() if age >= STALE * 1e9])
        return False

    def _renew(self, ended: threading.Event) -> None:
        while not ended.wait(RENEWED):
            try:
                if not self.is_held():
                    return
            except IngotError:  # retry in a minute; the lease's age then shows whether it expired
                continue
