"""Folders of the local disk for what can be made again: a cache that processes share, and scratch."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from platformdirs import user_cache_path

from ingot.core.files.atomic import flush_tree
from ingot.core.files.system import exchange, flush, local_path, remove_tree, rename, write_error
from ingot.stores.local import LocalStore


def default_cache(kind: str) -> os.PathLike[str]:
    """Return the folder for what can be made again: ``kind`` in ``$INGOT_CACHE``, or in the platform's usual place."""
    chosen = os.environ.get("INGOT_CACHE")
    return (Path(chosen) if chosen else user_cache_path("ingot", appauthor=False)) / kind


def cached(
    cache: str | os.PathLike[str],
    name: str,
    is_whole: Callable[[LocalStore], bool],
    make: Callable[[LocalStore], object],
) -> LocalStore:
    """Return a folder of a cache; it appears whole, flushed to disk, or not at all, also with several processes at it.

    Parameters
    ----------
    cache : path
        A local folder, made where there is none.
    name : str
        What the folder is called in it.
    is_whole : callable
        Whether a folder that is there is what it should be; one that is not is replaced.
    make : callable
        Fills a new folder; nothing is left of it where this raises.

    Raises
    ------
    ResourceError
        Disk full, cache not writable.
    """
    folder = local_path(cache)
    final = folder / name
    if not (final.is_dir() and is_whole(LocalStore(final))):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            beside = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=folder))
        except OSError as error:
            raise write_error(error, str(folder)) from error
        try:
            make(LocalStore(beside))
            flush_tree(beside)
            _settle(beside, final)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    return LocalStore(final)


@contextmanager
def scratch_folder() -> Iterator[LocalStore]:
    """Lend an empty folder in ``$TMPDIR``, which goes with all in it."""
    with tempfile.TemporaryDirectory(prefix="ingot-") as folder:
        yield LocalStore(folder)


def _settle(beside: Path, final: Path) -> None:
    """Rename, or change names with what is there: damaged, or what another process put there meanwhile, the same."""
    try:
        beside.chmod(0o755)
        if final.is_dir() and not exchange(beside, final):
            remove_tree(final)
        if beside.exists() and not final.exists():
            rename(beside, final)
        flush(final.parent)
    except OSError as error:
        if not final.is_dir():
            raise write_error(error, str(final)) from error
