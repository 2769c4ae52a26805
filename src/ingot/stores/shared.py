"""Folders that many processes add files to at once, and one process at a time removes files from.

A file never changes once it is there: it appears whole, under a name that nobody gives to other bytes, or it is
replaced whole. So readers and those who add need no lock against each other. Who removes has to be alone
(``alone``): while anybody else is ``using`` the folder, nothing is removed. On a local disk the system's lock on a file
tells, which a killed process loses. In object stores, which have no locks, it is leases (``stores.remote.shared``).
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
from ingot.core.files.system import flush, open_flags, read_error, remove, remove_tree, replace, write_error
from ingot.core.runtime.parallel import go_on, ordered
from ingot.errors import ResourceError
from ingot.model.store import Store
from ingot.stores.local import LocalStore, LocalTarget, file_name

WAIT = 600.0
"""Seconds that adding and reading wait for somebody who removes."""

SCRATCH = "scratch"
"""Where files are made that are not published yet; what a killed process left there goes with the next removal."""

LEASES = "leases"
"""Where folders of buckets have the leases of those who use them."""

_LOCK = ".lock"
_POLL = 0.05
_FLUSHING = 16


class Use:
    """What somebody has who uses a folder, or is alone with it."""

    def is_held(self) -> bool:
        """Whether nobody can have been alone since the use began; of who is alone, whether nobody used the folder."""
        return True


class Adding(ABC):
    """A place to make files before they appear in the folder.

    ``files`` is where to make them, under the names that they will have.
    """

    files: LocalTarget

    @abstractmethod
    def publish(self, names: Sequence[str]) -> None:
        """Have these files appear in the folder, each whole and safe from a power failure; they are gone here."""


class SharedFolder(ABC):
    """A folder for many processes; ``store`` is what is read from."""

    store: Store

    @property
    def location(self) -> str:
        """What messages call the folder."""
        return self.store.location

    @abstractmethod
    def sizes(self, folder: str) -> Mapping[str, int]:
        """Return the names of the files directly in a folder, hidden ones left out, and their bytes."""

    def states(self, folder: str) -> Mapping[str, str]:
        """Return, for the files of ``sizes``, what tells each from another under its name: its bytes, and an ETag."""
        return {name: str(size) for name, size in self.sizes(folder).items()}

    def state(self, name: str) -> str:
        """Return what ``states`` says of a file; errors as ``Store.stat``."""
        return str(self.store.stat(name).size)

    @abstractmethod
    def write(self, name: str, data: bytes) -> None:
        """Put a small file in place, or in the place of another, whole or not at all."""

    @abstractmethod
    def remove(self, names: Iterable[str]) -> None:
        """Remove files; nothing where there is none."""

    @abstractmethod
    def leftovers(self) -> Sequence[str]:
        """Return the names of what killed processes left; for who is alone."""

    def abandoned(self, *, remove: bool) -> int:
        """Count the places of ``adding`` outside of the folder that killed processes left, and remove them if asked."""
        return 0

    @abstractmethod
    def using(self, seconds: float = WAIT) -> AbstractContextManager[Use]:
        """Keep others from being alone; wait for one who is.

        Where nothing can be written the folder is used all the same. Raises ``ResourceError`` ``library.busy`` after
        ``seconds``.
        """

    @abstractmethod
    def alone(self, seconds: float) -> AbstractContextManager[Use]:
        """Keep others from using the folder; wait until nobody does. Raises ``ResourceError`` ``library.busy``."""

    @abstractmethod
    def adding(self) -> AbstractContextManager[Adding]:
        """Lend a place to make files in, which goes with what was not published."""


class LocalShared(SharedFolder):
    """A folder of the local file system."""

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
        atomic_write(self._made(name), data)

    def remove(self, names: Iterable[str]) -> None:
        folders = dict[Path, None]()
        try:
            for name in names:
                path = self.store.local_path(name)
                folders[path.parent] = None
                if path.is_dir() and not path.is_symlink():
                    remove_tree(path)
                else:
                    remove(path)
            for folder in folders:
                if folder.is_dir():
                    flush(folder)
        except OSError as error:
            raise write_error(error, self.location) from error

    def leftovers(self) -> list[str]:
        listing = self.store.list(SCRATCH)
        left = [f"{SCRATCH}/{name}" for name in (*listing.files, *listing.folders)]
        return [*left, *(name for name in self.store.tree() if name.endswith(SUFFIX) and not name.startswith(SCRATCH))]

    @contextmanager
    def using(self, seconds: float = WAIT) -> Iterator[Use]:
        with _locked(self._root / _LOCK, False, seconds, self.location):
            yield Use()

    @contextmanager
    def alone(self, seconds: float) -> Iterator[Use]:
        with _locked(self._root / _LOCK, True, seconds, self.location):
            yield Use()

    @contextmanager
    def adding(self) -> Iterator[Adding]:
        beside = self._root / SCRATCH / f"{secrets.token_hex(8)}{SUFFIX}"
        try:
            beside.mkdir(parents=True)
        except OSError as error:
            raise write_error(error, str(beside)) from error
        try:
            yield _LocalAdding(self, beside)
        finally:
            shutil.rmtree(beside, ignore_errors=True)

    def _made(self, name: str) -> Path:
        """Return the path of a file whose folder is there; a new folder's entry is on disk."""
        path = self.store.local_path(name)
        missing = [parent for parent in path.parents if not parent.is_dir()]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            for folder in missing:
                flush(folder.parent)
        except OSError as error:
            raise write_error(error, str(path.parent)) from error
        return path


class _LocalAdding(Adding):
    def __init__(self, folder: LocalShared, beside: Path) -> None:
        self._folder = folder
        self._beside = beside
        self.files = LocalTarget(beside)

    def publish(self, names: Sequence[str]) -> None:
        paths = [self._folder._made(name) for name in names]
        try:
            for _ in ordered(lambda name: flush(self._beside / name), names, min(max(len(names) - 1, 0), _FLUSHING)):
                pass
            for name, path in zip(names, paths, strict=True):
                replace(self._beside / name, path)
            for parent in {path.parent for path in paths}:
                flush(parent)
        except OSError as error:
            raise write_error(error, self._folder.location) from error


@contextmanager
def _locked(path: Path, exclusive: bool, seconds: float, where: str) -> Iterator[None]:
    """Hold a lock of the system on a file, which is free when the process ends, however it does."""
    try:
        descriptor = os.open(path, open_flags("O_RDWR", "O_CREAT", "O_NOFOLLOW"), 0o666)
    except OSError as error:
        if exclusive:
            raise write_error(error, str(path)) from error
        try:  # who can only read may still lock what is there
            descriptor = os.open(path, open_flags("O_RDONLY", "O_NOFOLLOW"))
        except OSError:
            yield
            return
    try:
        _wait(descriptor, exclusive, seconds, where)
        yield
    finally:
        os.close(descriptor)


def _wait(descriptor: int, exclusive: bool, seconds: float, where: str) -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            lock(descriptor, exclusive=exclusive)
        except BlockingIOError:
            pass
        except OSError as error:  # a file system without locks, on which nobody can be alone either
            if exclusive:
                raise write_error(error, where) from error
            return
        else:
            return
        if time.monotonic() >= end:
            raise busy(where)
        go_on()
        time.sleep(_POLL)


def busy(where: str) -> ResourceError:
    """Return the refusal of who waited long enough."""
    return ResourceError(
        "another process is using this folder, or removes files from it: try again when it is done, or wait for it "
        "longer (--wait)",
        rule="library.busy",
        where=where,
    )
