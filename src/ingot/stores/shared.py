"""Folders to which several processes add files at once, and from which one process at a time removes files.

A file appears in one step, and is replaced in one step. Processes that read or add files therefore need only a shared
lock (``SharedFolder.shared_lock``). A process that removes files needs the exclusive lock. On a local disk, both are
file locks, which the system releases if a process is killed. Object stores have no locks, so processes write leases
(``stores.remote.shared``).
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from ingot.core.files.atomic import SUFFIX, atomic_write
from ingot.core.files.locks import lock
from ingot.core.files.system import flush, open_flags, read_error, remove_all, replace, write_error
from ingot.core.runtime.parallel import check_cancelled, ordered
from ingot.errors import ResourceError
from ingot.model.store import Store
from ingot.stores.local import LocalStore, LocalTarget, file_name

WAIT = 600.0
"""Seconds that a process waits for the shared lock while another process removes files."""

SCRATCH = "scratch"
"""The folder for files that are not published yet; the next removal deletes files that killed processes left in it."""

LEASES = "leases"
"""The folder for the leases of processes that use a bucket's folder."""

_LOCK = ".lock"
_POLL = 0.05
_FLUSHING = 16


class FolderLock:
    """A shared or exclusive lock that this process holds on a folder."""

    def is_held(self) -> bool:
        """Return whether the lock was held without a gap, so that no other process had a conflicting lock."""
        return True


class SharedStaging(ABC):
    """A staging area for files that will appear in a shared folder.

    ``files`` is the target to write them into, under their final names.
    """

    files: LocalTarget

    @abstractmethod
    def publish(self, names: Sequence[str]) -> None:
        """Move the named files into the folder, each in one step and flushed to disk."""


class SharedFolder(ABC):
    """A folder that several processes use at once; ``store`` reads its files."""

    store: Store

    @property
    def location(self) -> str:
        """The folder's path, or its address without secrets, for messages."""
        return self.store.location

    @abstractmethod
    def sizes(self, folder: str) -> Mapping[str, int]:
        """Return the size in bytes of each file directly in a folder, by name, without hidden files."""

    def states(self, folder: str) -> Mapping[str, str]:
        """Return a text for each file of ``sizes`` that changes if the file is replaced: its size or ETag."""
        return {name: str(size) for name, size in self.sizes(folder).items()}

    def state(self, name: str) -> str:
        """Return the text of ``states`` for one file; raise the errors of ``Store.stat``."""
        return str(self.store.stat(name).size)

    @abstractmethod
    def write(self, name: str, data: bytes) -> None:
        """Write or replace a small file in one step."""

    @abstractmethod
    def remove(self, names: Iterable[str]) -> None:
        """Remove files; ignore missing ones."""

    @abstractmethod
    def leftovers(self) -> Sequence[str]:
        """Return the names of unfinished files of killed processes; the caller must hold the exclusive lock."""

    def abandoned(self, *, remove: bool) -> int:
        """Return the number of staging areas outside the folder that killed processes left; ``remove`` deletes them."""
        return 0

    @abstractmethod
    def shared_lock(self, seconds: float = WAIT) -> AbstractContextManager[FolderLock]:
        """Hold the shared lock; a folder that is not writable needs no lock.

        Raises ``ResourceError`` ``library.busy`` if another process holds the exclusive lock for ``seconds``.
        """

    @abstractmethod
    def exclusive_lock(self, seconds: float) -> AbstractContextManager[FolderLock]:
        """Hold the exclusive lock; raise ``ResourceError`` ``library.busy`` if other processes use the folder."""

    @abstractmethod
    def stage(self) -> AbstractContextManager[SharedStaging]:
        """Yield a staging area; at the end of the context, remove it with all unpublished files."""


class LocalShared(SharedFolder):
    """A shared folder on a local disk, locked by the system's file locks."""

    store: LocalStore

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.store = LocalStore(path, "pread")
        self._root = self.store.local_path()

    def sizes(self, folder: str) -> dict[str, int]:
        try:
            with os.scandir(self._root / file_name(folder, self.location)) as entries:
                return {
                    entry.name: entry.stat(follow_symlinks=False).st_size
                    for entry in entries
                    if entry.is_file(follow_symlinks=False) and not entry.name.startswith(".")
                }
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise read_error(error, self.store.location_of(folder)) from error

    def write(self, name: str, data: bytes) -> None:
        atomic_write(self._create_parents(name), data)

    def remove(self, names: Iterable[str]) -> None:
        try:
            remove_all(map(self.store.local_path, names))
        except OSError as error:
            raise write_error(error, self.location) from error

    def leftovers(self) -> list[str]:
        listing = self.store.list(SCRATCH)
        staged = [f"{SCRATCH}/{name}" for name in (*listing.files, *listing.folders)]
        partial = [name for name in self.store.tree() if name.endswith(SUFFIX) and not name.startswith(SCRATCH)]
        return [*staged, *partial]

    @contextmanager
    def shared_lock(self, seconds: float = WAIT) -> Iterator[FolderLock]:
        with _locked(self._root / _LOCK, False, seconds, self.location):
            yield FolderLock()

    @contextmanager
    def exclusive_lock(self, seconds: float) -> Iterator[FolderLock]:
        with _locked(self._root / _LOCK, True, seconds, self.location):
            yield FolderLock()

    @contextmanager
    def stage(self) -> Iterator[SharedStaging]:
        staging = self._root / SCRATCH / f"{secrets.token_hex(8)}{SUFFIX}"
        try:
            staging.mkdir(parents=True)
        except OSError as error:
            raise write_error(error, str(staging)) from error
        try:
            yield _LocalSharedStaging(self, staging)
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    def _create_parents(self, name: str) -> Path:
        """Create the folders of the file ``name``, flush them to disk, and return the file's path."""
        path = self.store.local_path(name)
        missing = [parent for parent in path.parents if not parent.is_dir()]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            for folder in missing:
                flush(folder.parent)
        except OSError as error:
            raise write_error(error, str(path.parent)) from error
        return path


class _LocalSharedStaging(SharedStaging):
    def __init__(self, folder: LocalShared, staging: Path) -> None:
        self._folder = folder
        self._staging = staging
        self.files = LocalTarget(staging)

    def publish(self, names: Sequence[str]) -> None:
        paths = [self._folder._create_parents(name) for name in names]
        try:
            for _ in ordered(lambda name: flush(self._staging / name), names, min(max(len(names) - 1, 0), _FLUSHING)):
                pass
            for name, path in zip(names, paths, strict=True):
                replace(self._staging / name, path)
            for parent in {path.parent for path in paths}:
                flush(parent)
        except OSError as error:
            raise write_error(error, self._folder.location) from error


@contextmanager
def _locked(path: Path, exclusive: bool, seconds: float, location: str) -> Iterator[None]:
    """Hold a file lock in this context; the system releases it if the process ends."""
    try:
        descriptor = os.open(path, open_flags("O_RDWR", "O_CREAT", "O_NOFOLLOW"), 0o666)
    except OSError as error:
        if exclusive:
            raise write_error(error, str(path)) from error
        try:  # a process without write permission may lock an existing file
            descriptor = os.open(path, open_flags("O_RDONLY", "O_NOFOLLOW"))
        except OSError:
            yield
            return
    try:
        _wait(descriptor, exclusive, seconds, location)
        yield
    finally:
        os.close(descriptor)


def _wait(descriptor: int, exclusive: bool, seconds: float, location: str) -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            lock(descriptor, exclusive=exclusive)
        except BlockingIOError:
            pass
        except OSError as error:  # a file system without locks never grants the exclusive lock
            if exclusive:
                raise write_error(error, location) from error
            return
        else:
            return
        if time.monotonic() >= end:
            raise busy(location)
        check_cancelled()
        time.sleep(_POLL)


def busy(location: str) -> ResourceError:
    """Return the error for a lock that another process holds too long."""
    return ResourceError(
        "another process is using this folder, or removes files from it: try again when it is done, or wait for it "
        "longer (--wait)",
        rule="library.busy",
        where=location,
    )
