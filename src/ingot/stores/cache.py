"""The local cache, which processes share, for data that can be recreated."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from platformdirs import user_cache_path

from ingot.core.files.atomic import flush_tree
from ingot.core.files.system import exchange, flush, local_path, remove_tree, rename, write_error
from ingot.stores.local import LocalStore


def default_cache(name: str) -> os.PathLike[str]:
    """Return the cache folder ``name`` in ``$INGOT_CACHE``, or in the platform's cache folder."""
    root = os.environ.get("INGOT_CACHE")
    return (Path(root) if root else user_cache_path("ingot", appauthor=False)) / name


def cached(
    cache: str | os.PathLike[str],
    name: str,
    is_complete: Callable[[LocalStore], bool],
    fill: Callable[[LocalStore], object],
) -> LocalStore:
    """Return the folder ``name`` of a cache; fill it first if it is missing or incomplete.

    A new folder appears in one step, flushed to disk, even if several processes create it at once.

    Parameters
    ----------
    cache : path
        A local folder, created if it is missing.
    name : str
        The name of the folder in the cache.
    is_complete : callable
        Returns whether an existing folder is valid; an invalid one is replaced.
    fill : callable
        Fills a new folder. If it raises an error, the new folder is removed.

    Raises
    ------
    ResourceError
        The disk is full, or the cache is not writable.
    """
    folder = local_path(cache)
    final = folder / name
    if not (final.is_dir() and is_complete(LocalStore(final))):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            temporary = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=folder))
        except OSError as error:
            raise write_error(error, str(folder)) from error
        try:
            fill(LocalStore(temporary))
            flush_tree(temporary)
            _publish(temporary, final)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return LocalStore(final)


def _publish(temporary: Path, final: Path) -> None:
    """Rename the complete folder ``temporary`` to ``final``, in one step.

    If ``final`` exists, being damaged or just created by another process, the folders exchange their names.
    """
    try:
        temporary.chmod(0o755)
        if final.is_dir() and not exchange(temporary, final):
            remove_tree(final)
        if temporary.exists() and not final.exists():
            rename(temporary, final)
        flush(final.parent)
    except OSError as error:
        if not final.is_dir():
            raise write_error(error, str(final)) from error
