"""What formats of one file have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from ingot.formats.base import Catalog, Format
from ingot.model.bytesource import ByteSource
from ingot.model.store import Store


class BySuffix(Format):
    """A format whose artifact goes by the name of a file with its suffix."""

    def entry(self, names: Sequence[str]) -> str | None:
        """Return ``model`` with the first suffix, or the only file with one of them; None for none or several."""
        matching = [name for name in names if name.lower().endswith(self.suffixes) and not name.startswith(".")]
        usual = self.file_name("model")
        if usual in matching:
            return usual
        return matching[0] if len(matching) == 1 else None


class SingleFile(BySuffix):
    """A format of one file; a subclass says how a catalog is read from it."""

    @abstractmethod
    def catalog(self, source: ByteSource, name: str, *, verify: bool) -> Catalog:
        """Validate an open file, which then belongs to the catalog."""

    def read(self, store: Store, name: str, *, verify: bool = True) -> Catalog:
        """Validate and locate; what cannot be read is closed."""
        source = store.open(name)
        try:
            return self.catalog(source, name, verify=verify)
        except BaseException:
            source.close()
            raise
