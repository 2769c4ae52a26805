"""Files of a folder at any depth. Links to folders are followed; they may form cycles."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from itertools import count

from ingot.errors import FormatError
from ingot.model.store import Listing, Store

_MAX_DEPTH = 128
_MAX_FOLDERS = 1 << 16
"""Maximum number of folders, because a few dozen folders with links to each other would yield billions."""


def files_in(store: Store, top: str, belongs: Callable[[Listing, str], bool]) -> Iterator[str]:
    """Yield the names of files below a folder, the files of a folder before those of its subfolders.

    Parameters
    ----------
    store : Store
    top : str
        The folder; empty for the store.
    belongs : callable
        Gets the listing of a folder and a name in it; returns whether to include this file or folder.

    Raises
    ------
    FormatError
        ``library.folders``: a link leads to one of its parent folders, or there are too many folders.
    """
    counter = count()

    def walk(folder: str, parents: frozenset[Hashable]) -> Iterator[str]:
        identity = store.identity(folder)
        if identity in parents:
            raise _refused(store, folder, "a link to one of its parent folders: remove the link")
        if len(parents) >= _MAX_DEPTH or next(counter) >= _MAX_FOLDERS:
            raise _refused(store, folder, f"more than {_MAX_FOLDERS}, or a depth of more than {_MAX_DEPTH}")
        listing, start = store.list(folder), f"{folder}/" if folder else ""
        yield from (start + name for name in listing.files if belongs(listing, name))
        for name in listing.folders:
            if belongs(listing, name):
                yield from walk(start + name, parents | {identity})

    return walk(top, frozenset())


def _refused(store: Store, folder: str, problem: str) -> FormatError:
    return FormatError(
        "library.folders", f"expected finitely many folders, found {problem}", where=store.location_of(folder)
    )
