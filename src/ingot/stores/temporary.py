"""Files in a folder that nobody else knows: for packages that read nothing but paths."""

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

_MOST = 256 << 20  # a tokenizer with all that belongs to it


class TemporaryFolder:
    """Small files in a temporary folder, which goes with this or when it is closed; ``paths`` by name.

    Names may have a folder before a slash; the caller vouches for them.
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
        """Remove the files."""
        self._remove()


@contextmanager
def temporary_folder() -> Iterator[str]:
    """Lend an empty folder (in ``$TMPDIR``), which goes with all that is in it, whatever ends the context."""
    with tempfile.TemporaryDirectory(prefix="ingot-") as folder:
        yield folder


@contextmanager
def on_disk(store: Store, names: Callable[[str], bool], most: int = _MOST) -> Iterator[Store]:
    """Lend a folder's files on a local disk: the folder itself where it is one, else copies in a temporary folder.

    Parameters
    ----------
    store : Store
    names : callable
        Which of the files that lie directly in the folder are copied.
    most : int
        Bytes of all copies together.

    Raises
    ------
    ResourceError
        ``store.copies``: they are more; the disk is full.
    """
    if store.local_path() is not None:
        yield store
        return
    with temporary_folder() as folder:
        target = LocalTarget(folder)
        total = 0
        for name in filter(names, store.list().files):
            total += store.stat(name).size
            if total > most:
                raise ResourceError(
                    f"expected at most {most} bytes of files beside the weights, found more: download them first",
                    rule="store.copies",
                    where=store.location_of(name),
                )
            sink = target.create(name)
            try:
                copy_file(store, name, sink)
            finally:
                sink.close()
        yield LocalStore(folder)
