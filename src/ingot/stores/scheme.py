"""The contract of a scheme: addresses of one kind, and the stores that they lead to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from ingot.core.files.system import write_error
from ingot.errors import UsageError

if TYPE_CHECKING:
    from ingot.core.files.atomic import Staging
    from ingot.model.store import OverwritePolicy, Store
    from ingot.stores.shared import SharedFolder


class Scheme(ABC):
    """Addresses of one kind, whose stores are read.

    In all methods ``text`` is a full address, and ``io`` is as in ``LocalStore``. If ``needs_slashes`` is set, text
    that begins with the scheme's name and a colon, but without ``//``, is a path.
    """

    needs_slashes: ClassVar[bool] = False

    @abstractmethod
    def store(self, text: str, io: str) -> Store:
        """Return the folder at this address as a store."""

    @abstractmethod
    def locate(self, text: str, io: str) -> tuple[Store, str]:
        """Return a store and the name of the file in it; for a folder, the folder itself and an empty name.

        Raises ``UsageError`` ``store.missing`` if there is neither.
        """

    def location(self, text: str) -> str:
        """Return the address as reports and messages show it: without secrets, a local file by its path."""
        return text

    def pipe(self, text: str, limit: int) -> bytes | None:
        """Return the first bytes of a pipe, whose bytes come once and are in no store; None if it is not a pipe."""
        return None

    def share(self, text: str, *, create: bool) -> SharedFolder:
        """Return the folder at this address, to which many processes may add, while one at a time may remove.

        If ``create`` is set, a missing folder is made. Raises what ``store`` raises, and ``UsageError``
        ``store.not-writable`` if there are no such folders.
        """
        raise self.not_writable(text)

    def not_writable(self, text: str) -> UsageError:
        """Return the refusal ``store.not-writable`` of an address."""
        return UsageError(
            "expected a place that can be written to, found a kind of store that is only read: choose a local path",
            rule="store.not-writable",
            where=self.location(text)[:200],
        )


class WritableScheme(Scheme):
    """Addresses of one kind, whose stores can be written to: an artifact is staged on a disk and appears whole."""

    @abstractmethod
    def stage(self, text: str, replaced: OverwritePolicy, *, directory: bool, resume: bool) -> Staging:
        """Return a folder to write files in that will appear at this address; raises what ``Staging`` raises."""

    @abstractmethod
    def url(self, text: str) -> str:
        """Return the address in the one form in which ``Store.url_of`` has it."""

    def make_folder(self, text: str) -> None:
        """Make a folder to stage in, if stores need one and there is none."""

    def write(self, text: str, data: bytes, *, overwrite: bool) -> None:
        """Put a small file at the address: a reader sees the old file or all of the new one.

        Raises what ``stage`` raises; without ``overwrite`` ``UsageError`` ``target.exists`` if a file is there.
        """
        from ingot.model.store import OverwritePolicy  # noqa: PLC0415 - imports NumPy, which options and --help do without

        with self.stage(text, OverwritePolicy(overwrite), directory=False, resume=False) as staging:
            staged = staging.files / "file"
            try:
                staged.write_bytes(data)
            except OSError as error:
                raise write_error(error, str(staged)) from error
            staging.publish([staged.name])
