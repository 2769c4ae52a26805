"""Paths and ``file:`` addresses as stores, as places to publish to, and as folders that many processes share."""

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
        """Return the store and the name in it: a folder is a store of its own, with no name, a file is in its folder.

        Raises ``UsageError`` ``store.missing`` where there is neither.
        """
        path = path_of(text)
        try:
            mode = path.stat().st_mode
        except OSError as error:
            raise read_error(error, str(path)) from error
        return (LocalStore(path, io), "") if stat.S_ISDIR(mode) else (LocalStore(path.parent, io), path.name)

    def pipe(self, text: str, limit: int) -> bytes | None:
        """Return the first bytes of a fifo; None where there is something else or nothing."""
        path = path_of(text)
        try:
            if not stat.S_ISFIFO(path.stat().st_mode):
                return None
            with path.open("rb") as file:
                return file.read(limit)
        except OSError:
            return None  # what is wrong is said where it is opened as a file

    def stage(self, text: str, replaced: OverwritePolicy, *, directory: bool, resume: bool) -> Staging:
        """Stage beside the path."""
        refuse = replaced.require_ours
        ours = None if refuse is None else lambda folder: refuse(LocalStore(folder))
        return Staging(path_of(text), directory=directory, overwrite=replaced.allowed, resume=resume, require_ours=ours)

    def make_folder(self, text: str) -> None:
        """Make a folder at the path, in one that is there."""
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
        """Put a small file at the path; errors as ``core.files.atomic.atomic_write``."""
        atomic_write(path_of(text), data, overwrite=overwrite)

    def share(self, text: str, *, create: bool) -> SharedFolder:
        """Return a folder for many processes, made where there is none if ``create``."""
        if create:
            self.make_folder(text)
        return LocalShared(path_of(text))

    def url(self, text: str) -> str:
        """Return the ``file:`` address of a path."""
        return url_of(path_of(text))

    def location(self, text: str) -> str:
        """Return a path as it is, and that of a ``file:`` address."""
        return str(path_of(text)) if text.lower().startswith("file:") else text
