"""The class ``Library``: the commands ``ingot store`` in Python."""

from __future__ import annotations

from typing import Any

from ingot.core.border import bordered
from ingot.inspect.findings import Finding
from ingot.library import add, get, keep
from ingot.library.add import Added
from ingot.library.get import Got
from ingot.library.keep import Collected, Holdings
from ingot.library.place import OpenLibrary
from ingot.stores.location import AnyPath, Location


class Library:
    """A folder or bucket that stores each tensor of many models once (``spec/store.md``).

    Bases, fine-tunes and quantized copies are added under names. Common tensors are stored once, and fine-tunes as
    exact differences. Several processes may use a library at once. ``ingot.open(library.url_of("org/model"))`` opens an
    artifact without copying it, and decodes only the objects that are read.

    Parameters
    ----------
    address : path or address
        A folder, or ``s3://bucket/library``. ``add`` creates the library if it does not exist.

    Examples
    --------
    >>> library = ingot.Library("library")
    >>> library.add("model", "org/base").stored < library.ls().size
    True
    >>> library.get("org/base", "copy").files
    5
    >>> library.rm("org/base")
    >>> library.gc().objects
    34
    >>> library.verify()
    []
    """

    def __init__(self, address: AnyPath) -> None:
        self.address = address
        self.location = Location.parse(address)

    def __repr__(self) -> str:
        return f"Library({self.location.display!r})"

    def add(self, src: AnyPath, name: str | None = None, **options: Any) -> Added:
        """Add a folder or file; ``ingot.library.add.add`` documents options, result and errors."""
        return add.add(self.location, src, name, **options)

    def get(self, name: str, dst: AnyPath, **options: Any) -> Got:
        """Write an artifact to a file or folder, bit for bit, or converted with ``format``."""
        return get.get(self.location, name, dst, **options)

    def ls(self) -> Holdings:
        """Return the artifacts with their sizes."""
        return keep.ls(self.location)

    def rm(self, name: str, **options: Any) -> None:
        """Remove an artifact from the list; ``gc`` then frees the objects that no other artifact needs.

        The base of adapters in the library is removed with ``force=True`` only.
        """
        keep.rm(self.location, name, **options)

    def gc(self, **options: Any) -> Collected:
        """Delete objects that no artifact needs; ``dry_run=True`` only reports them."""
        return keep.gc(self.location, **options)

    def verify(self, **options: Any) -> list[Finding]:
        """Check every object and manifest of the library; return the findings."""
        return keep.verify(self.location, **options)

    @bordered
    def url_of(self, name: str) -> str:
        """Return the address of an artifact, which every function that reads checkpoints accepts."""
        return OpenLibrary(self.location).url_of(name)
