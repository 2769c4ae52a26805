"""A Squish directory that is written to: read as a store, changed by name, by one process at a time."""

from __future__ import annotations

from contextlib import AbstractContextManager

from ingot.errors import ResourceError
from ingot.stores.folder import LocalFolder
from ingot.stores.location import Location

LOCK = ".ingot-tiers.lock"
_PATIENCE = 3600.0  # seconds to wait for another process that builds


class Directory(LocalFolder):
    """The files of a Squish directory on a local disk.

    Raises ``UsageError`` ``store.missing`` and ``store.not-a-folder``, ``UnsupportedError`` ``store.not-local``.
    """

    def __init__(self, location: Location) -> None:
        super().__init__(location.store().require_path("", "changing a Squish directory in place"))

    def locked(self) -> AbstractContextManager[None]:
        """Hold the directory's lock; wait for another process that holds it.

        Raises ``ResourceError`` ``tier.locked`` after an hour, ``store.read-only`` where nothing can be written.
        """
        held = ResourceError(
            "another process has been building a tier for an hour; wait for it, or load with cache=False",
            rule="tier.locked",
            where=self.location,
        )
        return self.lock(LOCK, _PATIENCE, held)
