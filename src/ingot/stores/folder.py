"""A folder of the local file system that is changed in place, by one process at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from ingot.core.files.atomic import atomic_write
from ingot.core.files.joining import Joining
from ingot.core.files.system import flush, remove, remove_tree, write_error
from ingot.errors import ResourceError
from ingot.stores.local import LocalStore, LocalTarget


class LocalFolder(LocalStore):
    """The files of one folder, to be read and changed. Parameters and errors as of ``LocalStore``."""

    @contextmanager
    def lock(self, name: str, seconds: float, held: ResourceError) -> Iterator[None]:
        """Hold the lock that the named file is; wait for another process that holds it. It is free when that dies.

        Raises ``held`` after ``seconds``; ``ResourceError`` ``store.read-only`` where nothing can be written.
        """
        from filelock import FileLock, Timeout

        lock = FileLock(self.local_path(name))
        try:
            lock.acquire(timeout=seconds)
        except Timeout as error:
            raise held from error
        except OSError as error:
            raise write_error(error, self.location_of(name)) from error
        try:
            yield
        finally:
            lock.release()

    def join(self, *, resume: bool) -> Joining:
        """Return a place to write files that join those of the folder."""
        return Joining(self.local_path(), resume=resume)

    def write(self, name: str, data: bytes) -> None:
        """Put a small file in place, flushed to disk; see ``core.files.atomic.atomic_write`` for what it raises."""
        atomic_write(self.local_path(name), data)

    def mend(self, name: str, pieces: Iterable[tuple[int, bytes]], size: int) -> None:
        """Write pieces into a file, which need not be there, cut or extend it to ``size`` bytes, and flush it to disk.

        The only writing that is not atomic: of a file that is damaged as it is.
        """
        sink = LocalTarget(self.local_path()).create(name)
        try:
            for start, data in pieces:
                sink.write_at(start, data)
            sink.truncate(size)
            flush(self.local_path(name))
        except OSError as error:
            raise write_error(error, self.location_of(name)) from error
        finally:
            sink.close()

    def remove(self, *names: str) -> None:
        """Remove files, folders with all in them, or links themselves, for good; nothing where there is none."""
        paths = [self.local_path(name) for name in names]
        try:
            for path in paths:
                if path.is_dir() and not path.is_symlink():
                    remove_tree(path)
                else:
                    remove(path)
            for folder in dict.fromkeys(path.parent for path in paths):
                if folder.is_dir():
                    flush(folder)
        except OSError as error:
            raise write_error(error, self.location) from error

    def is_link(self, name: str) -> bool:
        """Whether a link stands in the place of a file or folder."""
        return self.local_path(name).is_symlink()
