"""Folders of buckets that many processes add to at once (``stores.shared``).

Object stores have no locks, but what was written is listed at once (S3 since 2020, Google, Azure). So each process that
uses the folder, or wants to be alone, first writes a lease, an object of its own in ``leases/``, and then looks at the
others': of two, at least the later one sees the earlier. Who sees that it is not alone takes its lease back and waits.
A lease is renewed every minute. One that was not for ten is of a process that is dead or cut off; its age is reckoned
by the store's clock alone, from the times that the store gives it and a lease just written. A process that was cut off
for so long finds its own lease gone (``Use.is_held``).
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
from ingot.core.runtime.parallel import go_on, ordered
from ingot.errors import IngotError, IntegrityError
from ingot.model.bytesource import Stamp
from ingot.model.store import Store
from ingot.stores.cache import default_cache
from ingot.stores.local import LocalTarget
from ingot.stores.remote.address import Address
from ingot.stores.remote.client import Client
from ingot.stores.shared import LEASES, WAIT, Adding, SharedFolder, Use, busy

RENEWED, STALE = 60.0, 600.0
"""Seconds between two renewals of a lease, and after which one that was not renewed counts for nothing."""

_SHARED = ".use"
_ALONE = ".alone"
_POLL = 1.0
_PUTTING = 8
_BESIDE = "library-"


class RemoteShared(SharedFolder):
    """A folder of a bucket.

    Parameters
    ----------
    store : Store
        The folder as a store.
    address : Address
        Its address.
    client : Client
        Sends the requests.
    """

    def __init__(self, store: Store, address: Address, client: Client) -> None:
        self.store = store
        self.client = client
        self._address = address

    def key(self, name: str) -> str:
        """Return the key of a file."""
        return self._address.within(name).path

    def sizes(self, folder: str) -> dict[str, int]:
        return {name: stamp.size for name, stamp in self.stamps(folder).items() if not name.startswith(".")}

    def states(self, folder: str) -> dict[str, str]:
        return {name: _version(stamp) for name, stamp in self.stamps(folder).items() if not name.startswith(".")}

    def state(self, name: str) -> str:
        return _version(self.client.state(self.key(name)))

    def stamps(self, folder: str) -> dict[str, Stamp]:
        """Return the files directly in a folder, and their states, by one listing."""
        prefix = self.key(folder)
        found = self.client.stamps(prefix)
        names = {key.removeprefix(f"{prefix}/"): stamp for key, stamp in found.items()}
        return {name: stamp for name, stamp in names.items() if "/" not in name}

    def write(self, name: str, data: bytes) -> None:
        self.client.put_bytes(self.key(name), data)

    def remove(self, names: Iterable[str]) -> None:
        for _ in ordered(lambda name: self.client.delete(self.key(name)), names, _PUTTING):
            pass

    def leftovers(self) -> list[str]:
        """Nothing: an object is there whole or not at all."""
        return []

    @contextmanager
    def using(self, seconds: float = WAIT) -> Iterator[Use]:
        lease = _Lease(self, _SHARED)
        try:
            lease.write()
        except IngotError as error:
            if error.rule != "store.denied":
                raise
            yield Use()  # who can only read
            return
        with lease.kept(seconds, (_ALONE,)):
            yield lease

    @contextmanager
    def alone(self, seconds: float) -> Iterator[Use]:
        lease = _Lease(self, _ALONE)
        lease.write()
        with lease.kept(seconds, (_ALONE, _SHARED)):
            yield lease

    @contextmanager
    def adding(self) -> Iterator[Adding]:
        around = Path(default_cache("uploads"))
        try:
            around.mkdir(parents=True, exist_ok=True)
            path, lock = _lent(around)
        except OSError as error:
            raise write_error(error, str(around)) from error
        try:
            yield _RemoteAdding(self, path)
        finally:
            shutil.rmtree(path, ignore_errors=True)
            if lock is not None:
                os.close(lock)

    def abandoned(self, *, remove: bool) -> int:
        """As ``SharedFolder.abandoned``: those of any library in a bucket, for nothing goes on with them."""
        found = 0
        for path in Path(default_cache("uploads")).glob(f"{_BESIDE}*"):
            try:
                lock = _locked(path)
            except OSError:
                continue  # in use, or nothing that this process may touch
            found += 1
            if remove:
                shutil.rmtree(path, ignore_errors=True)
            os.close(lock)
        return found


def _version(stamp: Stamp) -> str:
    return f"{stamp.size} {stamp.etag}" if stamp.is_strong else f"{stamp.size} {stamp.etag} {stamp.mtime_ns}"


def _lent(around: Path) -> tuple[Path, int | None]:
    """Make a folder and lock it: one that nobody has locked is of a process that is dead."""
    while True:
        path = Path(mkdtemp(prefix=_BESIDE, dir=around))
        try:
            return path, _locked(path)
        except (BlockingIOError, FileNotFoundError):
            continue  # somebody who removes those of the dead was there in between
        except OSError:
            return path, None  # no locks on folders, as on Windows: nobody removes any there


def _locked(path: Path) -> int:
    """Return a descriptor that holds the system's lock on a folder until it is closed.

    Raises ``BlockingIOError`` where another has it, ``FileNotFoundError`` where there is no folder, other ``OSError``s.
    """
    descriptor = os.open(path, open_flags("O_RDONLY", "O_DIRECTORY", "O_NOFOLLOW"))
    try:
        locks.lock(descriptor, exclusive=True)
        path.stat()
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


class _RemoteAdding(Adding):
    def __init__(self, folder: RemoteShared, beside: Path) -> None:
        self._folder = folder
        self._beside = beside
        self.files = LocalTarget(beside)

    def publish(self, names: Sequence[str]) -> None:
        for _ in ordered(self._put, names, min(len(names), _PUTTING)):
            pass

    def _put(self, name: str) -> None:
        path = self._beside / name
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


class _Lease(Use):
    def __init__(self, folder: RemoteShared, kind: str) -> None:
        self._folder = folder
        self._kind = kind
        self._name = f"{LEASES}/{secrets.token_hex(8)}{kind}"
        self._lost = False
        self._guard = threading.Lock()

    def write(self) -> None:
        self._folder.write(self._name, f"{os.getpid()} {secrets.token_hex(8)}\n".encode())

    def is_held(self) -> bool:
        """As ``Use.is_held``: whether the lease is there, and was not stale when it is put once more now."""
        with self._guard:
            if not self._lost:
                before = self._folder.stamps(LEASES).get(self._last)
                if before is not None:
                    self.write()
                now = self._folder.stamps(LEASES).get(self._last)
                self._lost = before is None or now is None or now.mtime_ns - before.mtime_ns >= STALE * 1e9
            return not self._lost

    @property
    def _last(self) -> str:
        return self._name.rpartition("/")[2]

    @contextmanager
    def kept(self, seconds: float, others: tuple[str, ...]) -> Iterator[None]:
        """Wait until there is no lease of these kinds, then renew this one for as long as the block runs."""
        try:
            self._wait(seconds, others)
            ended = threading.Event()
            thread = threading.Thread(target=self._renew, args=(ended,), name="ingot-lease", daemon=True)
            thread.start()
            try:
                yield
            finally:
                ended.set()
                thread.join()
        finally:
            with suppress(IngotError):  # it goes stale by itself
                self._folder.remove([self._name])

    def _wait(self, seconds: float, others: tuple[str, ...]) -> None:
        end = time.monotonic() + seconds
        while self._met(others):
            self._folder.remove([self._name])
            if time.monotonic() >= end:
                raise busy(self._folder.location)
            go_on()
            time.sleep(min(_POLL, max(0.0, end - time.monotonic())) * (0.5 + secrets.randbelow(100) / 100))
            self.write()

    def _met(self, others: tuple[str, ...]) -> bool:
        """Whether somebody else's lease counts; who is alone removes those that do not."""
        stamps = self._folder.stamps(LEASES)
        if self._last not in stamps:
            return True  # taken for a stale one: once more
        now = stamps[self._last].mtime_ns
        theirs = {name: now - stamp.mtime_ns for name, stamp in stamps.items() if name != self._last}
        if any(age < STALE * 1e9 and name.endswith(others) for name, age in theirs.items()):
            return True
        if self._kind == _ALONE:
            self._folder.remove([f"{LEASES}/{name}" for name, age in theirs.items() if age >= STALE * 1e9])
        return False

    def _renew(self, ended: threading.Event) -> None:
        while not ended.wait(RENEWED):
            try:
                if not self.is_held():
                    return
            except IngotError:  # another minute; the lease tells whether it was too long
                continue
