"""Temporary copies of files, for packages that read local paths only."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree
from weakref import finalize

from ingot.errors import ResourceError
from ingot.model.store import Store, copy_file
from ingot.stores.local import LocalStore, LocalTarget

_MAX_BYTES = 256 << 20  # enough for all files of a tokenizer


class TemporaryFolder:
    """Small files in a temporary folder; ``paths`` maps their names to paths.

    The folder is removed by ``close``, or when this object is garbage-collected. A name may contain one slash. Names
    are not checked, so the caller must trust them.
    """

    def __init__(self, files: Mapping[str, bytes]) -> None:
        folder = tempfile.mkdtemp(prefix="ingot-")
        self._remove = finalize(self, rmtree, folder, ignore_errors=True)
        self.paths: dict[str, str] = {}
        for name, data in sorted(files.items()):
            path = Path(folder) / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)
            self.paths[name] = str(path)

    def close(self) -> None:
        """Remove the temporary folder with its files."""
        self._remove()


def temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """Return a context with an empty folder in ``$TMPDIR``, which is removed with its contents at the end."""
    return tempfile.TemporaryDirectory(prefix="ingot-")


@contextmanager
def on_disk(store: Store, names: Callable[[str], bool], max_bytes: int = _MAX_BYTES) -> Iterator[Store]:
    """Yield a local folder with a store's files: the store if it is local, else copies in a temporary folder.

    Parameters
    ----------
    store : Store
    names : callable
        Returns whether to copy a file with this name. Files in subfolders are not copied.
    max_bytes : int
        The limit of the copies' total size.

    Raises
    ------
    ResourceError
        ``store.copies``: the copies exceed ``max_bytes``; or the disk is full.
    """
    if store.local_path() is not None:
        yield store
        return
    with temporary_folder() as folder:
        target = LocalTarget(folder)
        total = 0
        for name in filter(names, store.list().files):
            total += store.stat(name).size
            if total > max_bytes:
                raise ResourceError(
                    f"the files next to the weights have more than {max_bytes} bytes: download them first",
                    rule="store.copies",
                    where=store.location_of(name),
                )
            sink = target.create(name)
            try:
                copy_file(store, name, sink)
            finally:
                sink.close()
        yield LocalStore(folder)
