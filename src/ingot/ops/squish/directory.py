"""A Squish directory that is written to: read as a store, changed by name, by one process at a time."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike

from filelock import FileLock, Timeout

from ingot.core.atomic import Joining, atomic_write, flush
from ingot.core.oserrors import write_error
from ingot.errors import ResourceError
from ingot.model.store import Store, checked_name
from ingot.stores.table import from_url

LOCK = ".ingot-tiers.lock"
_PATIENCE = 3600.0  # seconds to wait for another process that builds; a lock whose holder died is free at once


class Directory:
    """The files of a Squish directory on a local disk.

    Raises ``UsageError`` ``store.missing`` and ``store.not-a-folder``, ``UnsupportedError`` ``store.not-local``.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self.store: Store = from_url(path)
        self.location = self.store.location
        self._folder = self.store.require_path("", "changing a Squish directory in place")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the directory's lock; wait for another process that holds it.

        Raises ``ResourceError`` ``tier.locked`` after an hour, ``store.read-only`` where nothing can be written.
        """
        lock = FileLock(self._folder / LOCK)
        try:
            lock.acquire(timeout=_PATIENCE)
        except Timeout as error:
            raise ResourceError(
                "another process has been building a tier for an hour; wait for it, or load with cache=False",
                rule="tier.locked",
                where=self.location,
            ) from error
        except OSError as error:
            raise write_error(error, self.store.location_of(LOCK)) from error
        try:
            yield
        finally:
            lock.release()

    def stage(self, *, resume: bool) -> Joining:
        """Return a place to write files that join those of the directory."""
        return Joining(self._folder, resume=resume)

    def write(self, name: str, data: bytes) -> None:
        """Put a small file in place, flushed to disk; see ``core.atomic.atomic_write`` for what it raises."""
        atomic_write(self._folder / checked_name(name, self.location), data)

    def remove(self, *names: str) -> None:
        """Remove files, folders with all in them, or links themselves, for good; nothing where there is none."""
        paths = [self._folder / checked_name(name, self.location) for name in names]
        try:
            for path in paths:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
            for folder in dict.fromkeys(path.parent for path in paths):
                if folder.is_dir():
                    flush(folder)
        except OSError as error:
            raise write_error(error, self.location) from error

    def is_link(self, name: str) -> bool:
        """Whether a link stands in the place of a file or folder."""
        return (self._folder / checked_name(name, self.location)).is_symlink()
