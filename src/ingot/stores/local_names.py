"""Names and addresses of local files, and the paths that they are here."""

from __future__ import annotations

import os
from pathlib import Path, PurePath, PureWindowsPath
from urllib.parse import quote, unquote, urlsplit

from ingot.core.files import system
from ingot.core.files.paths import local_path
from ingot.errors import FormatError, UsageError
from ingot.model.store import checked_name


def file_name(name: str, where: str) -> str:
    """Return the name of a file in a store that is a folder here.

    Raises ``FormatError`` ``store.escape`` as ``checked_name``, and for what is no file's name on this system.
    """
    checked_name(name, where)
    if not all(map(system.is_name, name.split("/"))):
        raise FormatError(
            "store.escape",
            f"expected a name that a file of this system can have, found {name[:200]!r}: rename it on another",
            where=where,
        )
    return name


def path_of(text: str) -> Path:
    """Return the path that a ``file:`` address means; any other text is a path as it is.

    Raises ``UsageError`` ``store.url`` for an address of another machine, or one without a whole path.
    """
    scheme, colon, rest = text.partition(":")
    if not colon or scheme.lower() != "file":
        return local_path(text)
    return local_path(path_text(rest, text, windows=isinstance(Path(), PureWindowsPath)))


def path_text(rest: str, text: str, *, windows: bool) -> str:
    """Return the path in what follows ``file:`` in an address; errors as ``path_of``, with ``text`` in the message."""
    address = urlsplit(rest, scheme="file")
    path = unquote(address.path, errors="surrogateescape")
    host = "" if address.netloc == "localhost" else address.netloc
    good = not host
    if windows:  # file:///C:/folder, file://server/share
        good, path = (True, f"//{host}{path}") if host else (path[2:3] == ":", path[1:])
    if not good or not address.path.startswith("/") or address.query or address.fragment:
        raise UsageError(
            "expected file:/// and a whole path, with %23 and %3F for # and ?", rule="store.url", where=text[:200]
        )
    return path


def url_of(path: Path) -> str:
    """Return the address of a path, which need not exist: from the root, links kept."""
    return address_of(path.absolute())


def address_of(path: PurePath) -> str:
    """Return the ``file:`` address of a whole path; of Windows' ``file:///C:/folder`` or ``file://server/share``."""
    if not isinstance(path, PureWindowsPath):
        return f"file://{quote(os.fsencode(path))}"
    text = quote(path.as_posix(), safe="/:")
    return f"file:{text}" if text.startswith("//") else f"file:///{text}"
