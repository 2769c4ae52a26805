"""The one table of stores. A new one (an object store, a hub) is a module with a ``Scheme`` and a line here."""

from __future__ import annotations

import os
import re
from typing import Protocol

from ingot.core.paths import local_path
from ingot.core.registry import Instances
from ingot.errors import UsageError
from ingot.model.store import Store


class Scheme(Protocol):
    """How addresses of one kind become stores. ``text`` is a whole address, ``io`` as for ``LocalStore``."""

    def store(self, text: str, io: str) -> Store:
        """Return the folder at this address as a store."""
        ...

    def locate(self, text: str, io: str) -> tuple[Store, str]:
        """Return a store and the name of the file in it; the folder itself and an empty name where it is a folder.

        Raises ``UsageError`` ``store.missing`` where there is neither.
        """
        ...


STORES: Instances[Scheme] = Instances(
    "store",
    (
        ("file", "ingot.stores.local:LocalScheme"),
        ("memory", "ingot.stores.memory:MemoryScheme"),
    ),
)

_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(//)?")


def from_url(url: str | os.PathLike[str], *, io: str = "auto") -> Store:
    """Return the store at an address: a folder by its path, ``file:///folder`` or ``memory:NAME/folder``.

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
    return scheme_of(url).store(_text(url), io)


def locate(url: str | os.PathLike[str], *, io: str = "auto") -> tuple[Store, str]:
    """Return the store of a file, and the file's name in it; for a folder the folder as a store, and an empty name.

    Parameters and errors as of ``from_url``.
    """
    return scheme_of(url).locate(_text(url), io)


def scheme_of(url: str | os.PathLike[str]) -> Scheme:
    """Return who makes stores of such addresses; ``UsageError`` ``store.scheme`` where nobody does."""
    local_path(url)  # what is no text is refused in one place
    found = _ADDRESS.match(url) if isinstance(url, str) else None
    name = found[1].lower() if found else "file"
    if name in STORES:
        return STORES[name]
    if found and found[2]:
        raise UsageError(
            f"expected a path, or an address that begins with {', '.join(f'{known}:' for known in STORES)}; found one "
            f"that begins with {found[0][:40]}: download it first, and give its path",
            rule="store.scheme",
            where=os.fspath(url)[:200],
        )
    return STORES["file"]


def _text(url: str | os.PathLike[str]) -> str:
    """Return the address as text; a path-like object is a path even where it looks like an address."""
    text = os.fspath(url)
    return text if isinstance(url, str) or not _ADDRESS.match(text) else os.path.join(os.curdir, text)  # noqa: PTH118
