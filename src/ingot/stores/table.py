"""The one table of stores. A new one (an object store, a hub) is a module with a ``Scheme`` and a line here.

Plugins add stores by entry points in the group ``ingot.stores``; the name of an entry is a scheme of addresses.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath

from ingot.core.files.atomic import Staging
from ingot.core.files.paths import local_path
from ingot.core.registry import Instances
from ingot.errors import FormatError, IngotError, MissingExtraError, UsageError
from ingot.model.reading.ranges import read_bytes
from ingot.model.store import Replaced, Store
from ingot.stores.remote.address import shown
from ingot.stores.scheme import Scheme, WritableScheme
from ingot.stores.shared import SharedFolder

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
    ),
    group="ingot.stores",
    contract=Scheme,
)

_MODEL = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(//)?")  # one letter is a drive of Windows


def from_url(url: str | os.PathLike[str], *, io: str = "auto") -> Store:
    """Return the store at an address: a folder by its path, ``file:///folder``, ``memory:NAME/folder``, or on another
    machine (``spec/remote.md``).

    Parameters
    ----------
    url : str or path-like
        A path-like object is always a path; so is text whose beginning is no known scheme and has no ``://``.
    io : {"auto", "mmap", "pread"}
        How local files are read.

    Raises
    ------
    UsageError
        ``store.scheme``: an address of a kind that there is no store for; ``store.url``: one that is not well formed;
        what the store itself refuses (``store.missing``, ``store.not-a-folder``).
    """
    return scheme_of(url).store(text_of(url), io)


def locate(url: str | os.PathLike[str], *, io: str = "auto") -> tuple[Store, str]:
    """Return the store of a file, and the file's name in it; for a folder the folder as a store, and an empty name.

    Parameters and errors as of ``from_url``.
    """
    return scheme_of(url).locate(text_of(url), io)


def locate_model(url: str | os.PathLike[str], *, io: str = "auto") -> tuple[Store, str]:
    """As ``locate``, of what is read only: text such as ``org/name`` that is no path here may be a model of the Hub.

    Raises ``ResourceError`` ``hub.offline`` beside what ``locate`` raises.
    """
    try:
        return locate(url, io=io)
    except UsageError as error:
        if error.rule != "store.missing" or not isinstance(url, str) or not _MODEL.fullmatch(url):
            raise
        if beside(url) is not None:
            raise
        try:
            return STORES["hf"].locate(f"hf://{url}", io)
        except MissingExtraError:
            raise error from None
        except IngotError as failed:
            failed.message = f"no file or folder here has this name; as a name of the Hub: {failed.message}"
            raise


def locate_file(url: str | os.PathLike[str], *, io: str = "pread") -> tuple[Store, str]:
    """Return the store of a file, and the file's name in it.

    Raises ``FormatError`` ``store.not-a-file`` for a folder, else as ``locate``.
    """
    store, name = locate(url, io=io)
    if not name:
        raise FormatError("store.not-a-file", "expected a file, found a folder", where=store.location)
    return store, name


def read_file(url: str | os.PathLike[str]) -> bytes:
    """Return what a file holds, all of it; errors as ``locate_file`` and ``Store.open``."""
    store, name = locate_file(url)
    source = store.open(name)
    try:
        return read_bytes(source, 0, source.size)
    finally:
        source.close()


def read_start(url: str | os.PathLike[str], limit: int) -> bytes:
    """Return a file's first ``limit`` bytes, or all that it has; of a pipe too, such as a shell's ``<(command)``.

    Errors as ``read_file``.
    """
    piped = scheme_of(url).pipe(text_of(url), limit)
    if piped is not None:
        return piped
    store, name = locate_file(url)
    return store.head(name, limit)


def beside(url: str) -> list[str] | None:
    """Return the names of what lies in the same folder as an address, at which nothing has to be.

    None where there is no such folder.
    """
    try:
        listing = from_url(str(PurePosixPath(url).parent)).list()
    except IngotError:
        return None
    return [*listing.files, *listing.folders]


def stage(url: str | os.PathLike[str], replaced: Replaced, *, directory: bool = False, resume: bool = False) -> Staging:
    """Return a place to write what will appear at an address: a file, or a folder with ``directory``.

    Raises ``UsageError`` ``store.not-writable`` where that kind of store is only read, and what ``Staging`` does.
    """
    return _writable(url).stage(text_of(url), replaced, directory=directory, resume=resume)


def make_folder(url: str | os.PathLike[str]) -> None:
    """Make a folder to stage in, where stores need one and there is none; errors as ``stage``."""
    _writable(url).make_folder(text_of(url))


def write_file(url: str | os.PathLike[str], data: bytes, *, overwrite: bool = True) -> None:
    """Put a small file at an address: what lies there is the old file or all of the new one.

    Errors as ``stage``; ``UsageError`` ``target.exists`` for a file that is there, without ``overwrite``.
    """
    _writable(url).write(text_of(url), data, overwrite=overwrite)


def share(url: str | os.PathLike[str], *, create: bool = False) -> SharedFolder:
    """Return the folder at an address for many processes (``stores.shared``); made where there is none if ``create``.

    Raises ``UsageError`` ``store.not-writable`` where that kind of store is only read, and what ``from_url`` does.
    """
    return scheme_of(url).share(text_of(url), create=create)


def url_of(url: str | os.PathLike[str]) -> str:
    """Return the address, in the form in which stores have theirs, of what may be there or not; errors as ``stage``."""
    return _writable(url).url(text_of(url))


def location_of(url: str | os.PathLike[str]) -> str:
    """Return an address, of what may be there or not, as reports and messages have it: without secrets.

    Of what is none, as much as can be shown.
    """
    try:
        return scheme_of(url).location(text_of(url))
    except IngotError:
        return shown(str(url))


def _writable(url: str | os.PathLike[str]) -> WritableScheme:
    scheme = scheme_of(url)
    if not isinstance(scheme, WritableScheme):
        raise scheme.not_writable(text_of(url))
    return scheme


def scheme_of(url: str | os.PathLike[str]) -> Scheme:
    """Return who makes stores of such addresses; ``UsageError`` ``store.scheme`` where nobody does."""
    local_path(url)  # what is no text is refused in one place
    name = _scheme_name(url) if isinstance(url, str) else ""
    if name:
        return STORES[name]
    match = _ADDRESS.match(url) if isinstance(url, str) else None
    if match and match[2]:
        raise UsageError(
            f"expected a path, or an address that begins with {', '.join(f'{known}:' for known in STORES)}; found one "
            f"that begins with {match[0][:40]}: download it first, and give its path",
            rule="store.scheme",
            where=shown(os.fspath(url)),
        )
    return STORES["file"]


def _scheme_name(text: str) -> str:
    """Return which scheme an address is of; empty for what is none, such as a file called ``s3:x``."""
    match = _ADDRESS.match(text)
    name = match[1].lower() if match else ""
    if match is None or name not in STORES or (not match[2] and STORES[name].needs_slashes):
        return ""
    return name


def text_of(url: str | os.PathLike[str]) -> str:
    """Return an address as it is, and a path as text that is no address, also where it looks like one."""
    local_path(url)  # what is no text is refused in one place
    text = os.fspath(url)
    if not _scheme_name(text):
        return str(Path(text)) if text else text
    return text if isinstance(url, str) else f"{os.curdir}{os.sep}{text}"  # Path drops the dot
