"""What formats of one file have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from ingot.formats.base import Catalog
from ingot.model.bytesource import ByteSource
from ingot.model.store import Store


class BySuffix:
    """A format whose artifact goes by the name of a file with its suffix."""

    suffixes: tuple[str, ...]

    def entry(self, names: Sequence[str]) -> str | None:
        """Return ``model`` with the first suffix, or the only file with one of them; None for none or several."""
        matching = [name for name in names if name.lower().endswith(self.suffixes) and not name.startswith(".")]
        usual = self.file_name("model")
        if usual in matching:
            return usual
        return matching[0] if len(matching) == 1 else None

    def metadata(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Any metadata can be carried as it is."""
        return values

    def file_name(self, stem: str) -> str:
        """The stem with the suffix."""
        return stem + self.suffixes[0]


class SingleFile(BySuffix, ABC):
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
