"""A folder of the local file system that one process at a time changes in place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from ingot.core.files.atomic import atomic_write
from ingot.core.files.merge_staging import MergeStaging
from ingot.core.files.system import flush, remove_all, write_error
from ingot.errors import ResourceError
from ingot.stores.local import LocalStore, LocalTarget


class LocalFolder(LocalStore):
    """A ``LocalStore`` whose files can be changed."""

    @contextmanager
    def lock(self, name: str, seconds: float, timeout_error: ResourceError) -> Iterator[None]:
        """Hold the lock on the file ``name``; the system releases it if the process ends.

        Raises ``timeout_error`` if another process holds it for ``seconds``; ``ResourceError`` ``store.read-only`` if
        the folder is not writable.
        """
        from filelock import FileLock, Timeout

        lock = FileLock(self.local_path(name))
        try:
            lock.acquire(timeout=seconds)
        except Timeout as error:
            raise timeout_error from error
        except OSError as error:
            raise write_error(error, self.location_of(name)) from error
        try:
            yield
        finally:
            lock.release()

    def join(self, *, resume: bool) -> MergeStaging:
        """Return a staging folder whose files will be added to this folder."""
        return MergeStaging(self.local_path(), resume=resume)

    def write(self, name: str, data: bytes) -> None:
        """Write a small file, flushed to disk; raise the errors of ``core.files.atomic.atomic_write``."""
        atomic_write(self.local_path(name), data)

    def mend(self, name: str, segments: Iterable[tuple[int, bytes]], size: int) -> None:
        """Write segments (offset, bytes) into a file, cut or extend it to ``size`` bytes, and flush it to disk.

        A missing file is created. A reader may see a part of the changes; this does no harm, because the file is
        damaged already.
        """
        sink = LocalTarget(self.local_path()).create(name)
        try:
            for start, data in segments:
                sink.write_at(start, data)
            sink.truncate(size)
            flush(self.local_path(name))
        except OSError as error:
            raise write_error(error, self.location_of(name)) from error
        finally:
            sink.close()

    def remove(self, *names: str) -> None:
        """Remove files, folders with their content, or links (not their targets); missing names are ignored."""
        try:
            remove_all([self.local_path(name) for name in names])
        except OSError as error:
            raise write_error(error, self.location) from error

    def is_link(self, name: str) -> bool:
        """Return whether a name is a symbolic link."""
        return self.local_path(name).is_symlink()
