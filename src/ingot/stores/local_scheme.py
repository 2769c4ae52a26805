"""The scheme of paths and ``file:`` addresses: stores, staging and shared folders on the local disk."""

from __future__ import annotations

import stat

from ingot.core.files.atomic import Staging, atomic_write
from ingot.core.files.system import read_error, write_error
from ingot.errors import UsageError
from ingot.model.store import OverwritePolicy
from ingot.stores.local import LocalStore, path_of, url_of
from ingot.stores.scheme import WritableScheme
from ingot.stores.shared import LocalShared, SharedFolder


class LocalScheme(WritableScheme):
    """Paths, and addresses of the form ``file:///folder/file``."""

    def store(self, text: str, io: str) -> LocalStore:
        """Return the folder at a path or ``file:`` address."""
        return LocalStore(path_of(text), io)

    def locate(self, text: str, io: str) -> tuple[LocalStore, str]:
        """Return a file's parent folder and its name; for a folder, the folder and an empty name.

        Raises ``UsageError`` ``store.missing`` if the path does not exist.
        """
        path = path_of(text)
        try:
            mode = path.stat().st_mode
        except OSError as error:
            raise read_error(error, str(path)) from error
        return (LocalStore(path, io), "") if stat.S_ISDIR(mode) else (LocalStore(path.parent, io), path.name)

    def pipe(self, text: str, limit: int) -> bytes | None:
        """Return the first ``limit`` bytes of a fifo; None if the path is no fifo or cannot be read."""
        path = path_of(text)
        try:
            if not stat.S_ISFIFO(path.stat().st_mode):
                return None
            with path.open("rb") as file:
                return file.read(limit)
        except OSError:
            return None  # opening the path as a file will raise the precise error

    def stage(self, text: str, replaced: OverwritePolicy, *, directory: bool, resume: bool) -> Staging:
        """Return a staging folder next to the path; raise the errors of ``Staging``."""
        require = replaced.require_ours
        require_ours = None if require is None else lambda folder: require(LocalStore(folder))
        return Staging(
            path_of(text),
            directory=directory,
            overwrite=replaced.allowed,
            resume=resume,
            require_ours=require_ours,
        )

    def make_folder(self, text: str) -> None:
        """Create a folder at the path; the parent folder must exist.

        Raises ``UsageError`` ``target.no-parent``, ``target.not-a-folder``; ``ResourceError`` if it cannot be written.
        """
        path = path_of(text)
        try:
            path.mkdir(exist_ok=True)
        except FileNotFoundError:
            raise UsageError(
                "expected an existing folder to write into; create it first",
                rule="target.no-parent",
                where=str(path.parent),
            ) from None
        except FileExistsError:
            raise UsageError(
                "expected a folder or nothing at the target; found a file", rule="target.not-a-folder", where=text
            ) from None
        except OSError as error:
            raise write_error(error, text) from error

    def write(self, text: str, data: bytes, *, overwrite: bool) -> None:
        """Write a small file; raise the errors of ``core.files.atomic.atomic_write``."""
        atomic_write(path_of(text), data, overwrite=overwrite)

    def share(self, text: str, *, create: bool) -> SharedFolder:
        """Return the folder as a ``SharedFolder``; with ``create``, create it if it is missing."""
        if create:
            self.make_folder(text)
        return LocalShared(path_of(text))

    def url(self, text: str) -> str:
        """Return the ``file:`` address of a path."""
        return url_of(path_of(text))

    def location(self, text: str) -> str:
        """Return the path of a ``file:`` address; a path is returned unchanged."""
        return str(path_of(text)) if text.lower().startswith("file:") else text
