"""A library as an object: what ``ingot store`` does, from Python."""

from __future__ import annotations

from typing import Any

from ingot.core.border import bordered
from ingot.inspect.findings import Finding
from ingot.library import add, get, keep
from ingot.library.add import Added
from ingot.library.get import Got
from ingot.library.keep import Collected, Holdings
from ingot.library.options import (
    AddOptions,
    CheckOptions,
    CollectOptions,
    GetOptions,
    ListOptions,
    RemoveOptions,
)
from ingot.library.place import Place
from ingot.stores.location import AnyPath, Location


class Library:
    """A folder or bucket in which each tensor of many models lies once (``spec/store.md``).

    Bases, fine-tunes and quantized copies are added under names; what they have in common is stored once, fine-tunes as
    exact differences. Several processes may use one library at once. An artifact is opened where it lies, decoded as it
    is read, by its address: ``ingot.open(library.url_of("org/model"))``.

    Parameters
    ----------
    address : path or address
        A folder, or ``s3://bucket/library``. ``add`` makes a library where nothing is.
    """

    def __init__(self, address: AnyPath) -> None:
        self.address, self.location = address, Location.parse(address)

    def __repr__(self) -> str:
        return f"Library({self.location.display!r})"

    def add(self, src: AnyPath, name: str | None = None, **options: Any) -> Added:
        """Add a folder or file; see ``ops.library.add.add`` for options, result and errors."""
        return add.add(AddOptions(self.location, src, name, **options))

    def get(self, name: str, dst: AnyPath, **options: Any) -> Got:
        """Write an artifact to a file or folder, bit for bit or, with ``format``, converted."""
        return get.get(GetOptions(self.location, name, dst, **options))

    def ls(self) -> Holdings:
        """Return the artifacts, and what they take."""
        return keep.ls(ListOptions(self.location))

    def rm(self, name: str) -> None:
        """Remove an artifact from the list; ``gc`` frees what nobody else needs."""
        keep.rm(RemoveOptions(self.location, name))

    def gc(self, **options: Any) -> Collected:
        """Remove what no artifact needs; ``dry_run=True`` tells only."""
        return keep.gc(CollectOptions(self.location, **options))

    def verify(self, **options: Any) -> list[Finding]:
        """Check every object and manifest."""
        return keep.verify(CheckOptions(self.location, **options))

    @bordered
    def url_of(self, name: str) -> str:
        """Return the address of an artifact, which everything that reads checkpoints takes."""
        return Place(self.location).url_of(name)
