"""The base classes of address schemes, and the table of schemes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from ingot.core.files.system import write_error
from ingot.core.registry import Instances
from ingot.errors import UsageError

if TYPE_CHECKING:
    from ingot.core.files.atomic import Staging
    from ingot.model.store import OverwritePolicy, Store
    from ingot.stores.shared import SharedFolder


class Scheme(ABC):
    """An address scheme, which opens the stores at its addresses.

    In all methods, ``text`` is a full address and ``io`` a method of reading as in ``LocalStore``. If ``needs_slashes``
    is set, text that begins with the scheme's name and a colon, but without ``//``, is a path.
    """

    needs_slashes: ClassVar[bool] = False

    @abstractmethod
    def store(self, text: str, io: str) -> Store:
        """Return the folder at this address as a store."""

    @abstractmethod
    def locate(self, text: str, io: str) -> tuple[Store, str]:
        """Return the store and a file's name in it; for a folder, the folder and an empty name.

        Raises ``UsageError`` ``store.missing`` if neither a file nor a folder exists.
        """

    def location(self, text: str) -> str:
        """Return the address for messages and reports: without secrets, or the path of a local file."""
        return text

    def pipe(self, text: str, limit: int) -> bytes | None:
        """Return the first ``limit`` bytes of a pipe, which can be read only once; None if the address is no pipe."""
        return None

    def share(self, text: str, *, create: bool) -> SharedFolder:
        """Return the folder at this address as a ``SharedFolder``, which several processes may use at once.

        If ``create`` is set, a missing folder is created. Raises the errors of ``store``, and ``UsageError``
        ``store.not-writable`` if the scheme has no shared folders.
        """
        raise self.not_writable(text)

    def not_writable(self, text: str) -> UsageError:
        """Return the error ``store.not-writable`` for an address."""
        return UsageError(
            "Ingot cannot write to this type of store: choose a local path",
            rule="store.not-writable",
            where=self.location(text)[:200],
        )


class WritableScheme(Scheme):
    """A scheme with writable stores: an artifact is staged on a local disk and appears in one step."""

    @abstractmethod
    def stage(self, text: str, replaced: OverwritePolicy, *, directory: bool, resume: bool) -> Staging:
        """Return a staging folder whose files will appear at this address; raise the errors of ``Staging``."""

    @abstractmethod
    def url(self, text: str) -> str:
        """Return the address in the form that ``Store.url_of`` returns."""

    def make_folder(self, text: str) -> None:
        """Create the folder, in schemes where a folder must exist before files are staged in it."""

    def write(self, text: str, data: bytes, *, overwrite: bool) -> None:
        """Write a small file at the address; a reader sees either the old file or the complete new one.

        Raises the errors of ``stage``. Without ``overwrite`` an existing file is ``UsageError`` ``target.exists``.
        """
        from ingot.model.store import OverwritePolicy  # noqa: PLC0415 - imports NumPy, which options and --help do without

        with self.stage(text, OverwritePolicy(overwrite), directory=False, resume=False) as staging:
            staged = staging.files / "file"
            try:
                staged.write_bytes(data)
            except OSError as error:
                raise write_error(error, str(staged)) from error
            staging.publish([staged.name])


STORES: Instances[Scheme] = Instances(
    "store",
    (
        ("file", "ingot.stores.local_scheme:LocalScheme"),
        ("memory", "ingot.stores.memory:MemoryScheme"),
        ("https", "ingot.stores.remote.hub:HttpsScheme"),
        ("http", "ingot.stores.remote.store:WebScheme"),
        ("s3", "ingot.stores.remote.store:ObjectScheme"),
        ("gs", "ingot.stores.remote.store:GoogleScheme"),
        ("az", "ingot.stores.remote.store:AzureScheme"),
        ("hf", "ingot.stores.remote.hub:HubScheme"),
        ("oci", "ingot.stores.registry.store:RegistryScheme"),
        ("archive", "ingot.artifacts.archive_store:ArchiveScheme"),
        ("library", "ingot.library.place:LibraryScheme"),
    ),
    group="ingot.stores",
    contract=Scheme,
)
"""Schemes by name. To add a store, write a module with a ``Scheme`` and add a line here.

Plugins add schemes by entry points in the group ``ingot.stores``; the name of an entry is the scheme of its addresses.
"""
