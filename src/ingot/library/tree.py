"""Files of a folder at any depth, where links to folders are followed and may lead in circles."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from itertools import count

from ingot.errors import FormatError
from ingot.model.store import Listing, Store

_DEEPEST = 128
_MOST = 1 << 16
"""Folders that are looked into: some tens of links that lead to each other's folders make billions of them."""


def files_in(store: Store, top: str, belongs: Callable[[Listing, str], bool]) -> Iterator[str]:
    """Yield the names of files below a folder, each folder's own first.

    Parameters
    ----------
    store : Store
    top : str
        The folder; the store itself where it is empty.
    belongs : callable
        Gets what lies in a folder, and one of its names; tells whether that file or folder counts.

    Raises
    ------
    FormatError
        ``library.folders``: a link leads back to a folder that it lies in, or there are too many folders.
    """
    met = count()

    def inside(folder: str, around: frozenset[Hashable]) -> Iterator[str]:
        identity = store.identity(folder)
        if identity in around:
            raise _refused(store, folder, "a link back to a folder that it lies in: remove the link")
        if len(around) >= _DEEPEST or next(met) >= _MOST:
            raise _refused(store, folder, f"more than {_MOST} of them, or deeper ones than {_DEEPEST}")
        listing, start = store.list(folder), f"{folder}/" if folder else ""
        yield from (start + name for name in listing.files if belongs(listing, name))
        for name in listing.folders:
            if belongs(listing, name):
                yield from inside(start + name, around | {identity})

    return inside(top, frozenset())


def _refused(store: Store, folder: str, found: str) -> FormatError:
    return FormatError(
        "library.folders", f"expected folders with an end, found {found}", where=store.location_of(folder)
    )
