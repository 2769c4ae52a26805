"""Lock a Squish directory while it is changed in place, and resume interrupted runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import TypeVar

from ingot.errors import IngotError, ResourceError, UsageError
from ingot.stores.folder import LocalFolder
from ingot.stores.location import Location

T = TypeVar("T")

LOCK = ".ingot-tiers.lock"
_PATIENCE = 3600.0  # seconds to wait for another process


class Directory(LocalFolder):
    """The files of a Squish directory on a local disk.

    Raises ``UsageError`` ``store.missing`` and ``store.not-a-folder``, ``UnsupportedError`` ``store.not-local``.
    """

    def __init__(self, location: Location) -> None:
        super().__init__(location.store().require_path("", "changing a Squish directory in place"))

    def locked(self) -> AbstractContextManager[None]:
        """Return a context that holds the directory's lock; it waits while another process holds the lock.

        Raises ``ResourceError`` ``tier.locked`` after an hour, ``store.read-only`` if the directory is not writable.
        """
        timeout_error = ResourceError(
            "another process has been building a tier for an hour; wait for it, or load with cache=False",
            rule="tier.locked",
            where=self.location,
        )
        return self.lock(LOCK, _PATIENCE, timeout_error)


def resumed(run: Callable[[bool], T], discard: Callable[[], object]) -> T:
    """Return the result of ``run(True)``, which continues an interrupted run of the same plan.

    If the staged files belong to another plan or source, ``run(False)`` starts again. After an error, ``discard``
    removes the staged files. After an interruption, they stay for the next run.
    """
    try:
        try:
            return run(True)
        except UsageError as error:
            if error.rule != "resume.changed":
                raise
        return run(False)
    except Exception:
        with suppress(IngotError):  # the first error is raised
            discard()
        raise
