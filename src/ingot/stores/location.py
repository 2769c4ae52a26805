"""Locations: files and folders that a user names by a path, an address or the id of a Hub model.

Options and public functions accept ``AnyPath`` and parse it once. Internal code passes a ``Location``, or a store and
the name of a file in it. The command line raises the errors for missing paths before heavy imports.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote

from ingot.core.files.system import local_path
from ingot.errors import FormatError, IngotError, MissingExtraError, UsageError
from ingot.stores.remote.address import without_secrets
from ingot.stores.scheme import STORES, Scheme, WritableScheme

if TYPE_CHECKING:
    from ingot.core.files.atomic import Staging
    from ingot.model.store import OverwritePolicy, Store
    from ingot.stores.shared import SharedFolder
from ingot.core.registry import did_you_mean
from ingot.errors import install_hint

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(//)?")  # a single letter is a drive of Windows
_PATHS = "file"


@dataclass(frozen=True, slots=True, repr=False)
class Location:
    """A file or folder that a user names; it need not exist.

    Only ``display`` may be used in messages and reports, because the other texts contain secrets of an address.

    Attributes
    ----------
    user_text : str
        The text as the user wrote it.
    text : str
        The address, or the path without redundant parts. ``parse`` accepts it again.
    scheme : str
        The name of the address's scheme in ``STORES``; ``file`` for a path, empty for an unknown scheme.
    may_be_hub_id : bool
        Whether the text has the form ``org/name``. A path-like object is never the id of a Hub model.
    """

    user_text: str
    text: str
    scheme: str
    may_be_hub_id: bool

    @classmethod
    def parse(cls, path: AnyPath) -> Location:
        """Return the location that a user names; reads no disk and no network.

        A path-like object is always a path. Text is an address if it begins with the name of a scheme; if that scheme
        is unknown, it is an address only with ``://``.

        Raises
        ------
        UsageError
            ``store.path``: neither text nor a path, or text that no file can have as its name.
        """
        if isinstance(path, Location):
            return path
        local_path(path)  # raises store.path
        user_text = os.fspath(path)
        is_text = isinstance(path, str)
        scheme = _scheme_name(user_text)
        if scheme and is_text:
            return cls(user_text, user_text, scheme, may_be_hub_id=False)
        if is_text and (match := _ADDRESS.match(user_text)) and match[2]:
            return cls(user_text, user_text, "", may_be_hub_id=False)
        text = str(Path(user_text)) if user_text else user_text
        if scheme:
            text = f"{os.curdir}{os.sep}{text}"  # Path drops the dot
        return cls(user_text, text, _PATHS, is_text and _HUB_ID.fullmatch(user_text) is not None)

    @classmethod
    def in_store(cls, store: Store, name: str = "") -> Location:
        """Return the location of a file or folder of a store; by default the location of the store.

        Raises ``UnsupportedError`` ``store.not-local`` if the store has neither a path nor an address.
        """
        path = store.local_path(name)
        if path is not None:
            return cls.parse(path)
        return cls.parse(store.url_of(name) or store.require_path(name, "opening it by a name"))

    def __str__(self) -> str:
        return self.display

    def __repr__(self) -> str:
        return f"Location({self.display!r})"

    @property
    def display(self) -> str:
        """The text for messages and reports: the user's path, or the address without secrets."""
        try:
            return self._scheme().location(self.text)
        except IngotError:
            return without_secrets(self.user_text)

    @property
    def url(self) -> str:
        """The address in the form that ``Store.url_of`` returns.

        Raises ``UsageError``: ``store.not-writable`` if Ingot cannot write to stores of this scheme; ``store.scheme``;
        ``store.url``.
        """
        return self._writable().url(self.text)

    @property
    def name(self) -> str:
        """The last component of the path or address."""
        address = self.url if isinstance(self._scheme(), WritableScheme) else self.display
        return unquote(address.rstrip("/").rpartition("/")[2])

    @property
    def ends_in_slash(self) -> bool:
        """Whether the user marked the location as a folder."""
        return self.user_text.endswith(("/", "\\"))

    @property
    def parent(self) -> Location:
        """The location of the parent folder."""
        if self.scheme == _PATHS:
            return self.parse(Path(self.display).parent)
        address = self.text.partition("?")[0].rstrip("/")
        return self.parse(address.rpartition("/")[0] or address)

    def child(self, name: str) -> Location:
        """Return the location of a file or folder in this folder."""
        if self.scheme == _PATHS:
            return self.parse(Path(self.display) / name)
        address, mark, query = self.text.partition("?")
        return self.parse(f"{address.rstrip('/')}/{quote(name, errors='surrogateescape')}{mark}{query}")

    def siblings(self) -> list[str] | None:
        """Return the names of all files and folders in the parent folder, without sending a request.

        Returns None if the parent folder does not exist or is remote.
        """
        if self.scheme != _PATHS and "://" in self.text:
            return None
        try:
            listing = self.parent.store().list()
        except IngotError:
            return None
        return [*listing.files, *listing.folders]

    def store(self, io: str = "auto") -> Store:
        """Return the folder at this location as a store.

        Parameters
        ----------
        io : {"auto", "mmap", "pread"}
            The method of reading local files.

        Raises
        ------
        UsageError
            ``store.scheme``: an unknown scheme; ``store.url``: a malformed address; ``store.missing``;
            ``store.not-a-folder``.
        """
        return self._scheme().store(self.text, io)

    def find(self, io: str = "auto") -> tuple[Store, str]:
        """Return the store that contains a file, and the file's name; for a folder, the folder and an empty name.

        Raises ``UsageError``: ``store.scheme``; ``store.url``; ``store.missing`` if neither a file nor a folder exists.
        """
        return self._scheme().locate(self.text, io)

    def find_model(self, io: str = "auto") -> tuple[Store, str]:
        """Return the result of ``find``; if ``org/name`` is no local path, find the model of that name on the Hub.

        Raises the errors of ``find``, and ``ResourceError`` ``hub.offline``.
        """
        try:
            return self.find(io)
        except UsageError as error:
            if error.rule != "store.missing" or not self.may_be_hub_id or self.siblings() is not None:
                raise
            try:
                return STORES["hf"].locate(f"hf://{self.user_text}", io)
            except MissingExtraError:
                raise error from None
            except IngotError as failed:
                failed.message = f"no local file or folder has this name; as a model of the Hub: {failed.message}"
                raise

    def find_file(self, io: str = "pread") -> tuple[Store, str]:
        """Return the store that contains a file, and the file's name in it.

        Raises ``FormatError`` ``store.not-a-file`` for a folder, and the errors of ``find``.
        """
        store, name = self.find(io)
        if not name:
            raise FormatError("store.not-a-file", "this is a folder; name a file", where=store.location)
        return store, name

    def read(self) -> bytes:
        """Return all bytes of a file; raise the errors of ``find_file`` and ``Store.open``."""
        store, name = self.find_file()
        return store.head(name, sys.maxsize)

    def head(self, limit: int) -> bytes:
        """Return a file's first ``limit`` bytes, or the full file if it is smaller; raise the errors of ``read``.

        The file may be a pipe, such as ``<(command)`` of a shell.
        """
        piped = self._scheme().pipe(self.text, limit)
        if piped is not None:
            return piped
        store, name = self.find_file()
        return store.head(name, limit)

    def require_writable(self) -> None:
        """Raise ``UsageError`` ``store.not-writable`` if Ingot cannot write to stores of this scheme."""
        self._writable()

    def stage(self, replaced: OverwritePolicy, *, directory: bool = False, resume: bool = False) -> Staging:
        """Return a staging folder whose contents will appear at this location: a file, or with ``directory`` a folder.

        Raises ``UsageError`` ``store.not-writable``, and the errors of ``Staging``.
        """
        return self._writable().stage(self.text, replaced, directory=directory, resume=resume)

    def make_folder(self) -> None:
        """Create the folder, in stores where a folder must exist before files are staged in it.

        Raises the errors of ``stage``.
        """
        self._writable().make_folder(self.text)

    def write(self, data: bytes, *, overwrite: bool = True) -> None:
        """Write a small file; a reader sees either the old file or the complete new one.

        Raises the errors of ``stage``. Without ``overwrite`` an existing file is ``UsageError`` ``target.exists``.
        """
        self._writable().write(self.text, data, overwrite=overwrite)

    def share(self, *, create: bool = False) -> SharedFolder:
        """Return the folder as a ``SharedFolder``; with ``create``, create it if it is missing.

        Raises ``UsageError`` ``store.not-writable``, and the errors of ``store``.
        """
        return self._scheme().share(self.text, create=create)

    def _scheme(self) -> Scheme:
        if self.scheme:
            return STORES[self.scheme]
        prefix = self.user_text.partition("://")[0][:37]
        raise UsageError(
            f"no store has addresses that begin with {prefix}://; give a path, or an address that begins with "
            f"{', '.join(f'{name}:' for name in STORES)}, or download it and give its path",
            rule="store.scheme",
            where=without_secrets(self.user_text),
        )

    def _writable(self) -> WritableScheme:
        scheme = self._scheme()
        if not isinstance(scheme, WritableScheme):
            raise scheme.not_writable(self.text)
        return scheme


AnyPath = str | os.PathLike[str] | Location
"""The types that options and public functions accept as a location: a path, an address, or a location."""


def _scheme_name(text: str) -> str:
    """Return the name of the scheme with which an address begins; empty for other text, such as a file ``s3:x``."""
    match = _ADDRESS.match(text)
    name = match[1].lower() if match else ""
    if match is None or name not in STORES or (not match[2] and STORES[name].needs_slashes):
        return ""
    return name


_LOCAL = ("file", "memory")


def missing_error(location: Location, error: IngotError | None = None) -> UsageError:
    """Return the error for a location that does not exist; ``error`` is the error of its store.

    Returns
    -------
    UsageError
        ``open.url``: an address of an unknown scheme; ``open.missing``: anything else.
    """
    if not location.scheme:
        return UsageError(
            "Ingot reads paths, and addresses that begin with "
            f"{', '.join(f'{name}:' for name in STORES if name not in _LOCAL)}; download it first, and give the path",
            rule="open.url",
            where=location.display,
        )
    if location.text.partition("://")[0].lower() == location.scheme:
        message = "there is no file or folder at this address" if error is None else error.message
        return UsageError(message, rule="open.missing", where=location.display)
    hint = ""
    names = location.siblings() if location.user_text else None
    if location.may_be_hub_id and names is None:
        hint = f"; to read a model of the Hugging Face Hub by its name: {install_hint('hub')}"
    elif names:
        hint = did_you_mean(location.name, names)
    return UsageError(f"no such file or folder{hint}", rule="open.missing", where=location.display or "''")


def require_local(path: AnyPath) -> None:
    """Raise ``UsageError`` ``open.missing`` if a local path does not exist; sends no request.

    Addresses, the empty path, and texts that may name a model of the Hub are not checked.
    """
    location = Location.parse(path)
    if location.scheme != _LOCAL[0] or not location.user_text or "://" in location.text:
        return
    try:
        Path(location.text).stat()
    except (FileNotFoundError, NotADirectoryError):
        if not location.may_be_hub_id or location.siblings() is not None:
            raise missing_error(location) from None
    except OSError:  # the command will report it
        return
