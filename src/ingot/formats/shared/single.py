"""Base classes of formats that store an artifact in one file."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from ingot.formats.base import Catalog, Format
from ingot.model.bytesource import ByteSource
from ingot.model.store import Store


class BySuffix(Format):
    """A format that recognizes its files in a folder by their suffix."""

    def entry(self, names: Sequence[str]) -> str | None:
        """Return ``model`` with the first suffix, or the only file with a suffix of the format; None for none or
        several.
        """
        matching = [name for name in names if name.lower().endswith(self.suffixes) and not name.startswith(".")]
        usual = self.file_name("model")
        if usual in matching:
            return usual
        return matching[0] if len(matching) == 1 else None


class SingleFile(BySuffix):
    """A format of one file; subclasses implement how a catalog is read from it."""

    @abstractmethod
    def catalog(self, source: ByteSource, name: str, *, verify: bool) -> Catalog:
        """Validate an open file and return its catalog, which takes over the file."""

    def read(self, store: Store, name: str, *, verify: bool = True) -> Catalog:
        """Return the catalog of the file ``name``; if it is invalid, the file is closed."""
        source = store.open(name)
        try:
            return self.catalog(source, name, verify=verify)
        except BaseException:
            source.close()
            raise
