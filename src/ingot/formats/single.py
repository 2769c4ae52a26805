"""What formats of one file have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from ingot.formats.base import Catalog
from ingot.model.bytesource import ByteSource
from ingot.model.store import Store


class SingleFile(ABC):
    """A format whose artifact is one file with its suffix; a subclass says how a catalog is read from it."""

    suffixes: tuple[str, ...]

    @abstractmethod
    def catalog(self, source: ByteSource, name: str, *, verify: bool) -> Catalog:
        """Validate an open file, which then belongs to the catalog."""

    def entry(self, names: Sequence[str]) -> str | None:
        """``model`` with the suffix, or the only file that has it."""
        return entry_of(names, self.suffixes)

    def read(self, store: Store, name: str, *, verify: bool = True) -> Catalog:
        """Validate and locate; what cannot be read is closed."""
        source = store.open(name)
        try:
            return self.catalog(source, name, verify=verify)
        except BaseException:
            source.close()
            raise

    def metadata(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Any metadata can be carried as it is."""
        return values

    def file_name(self, stem: str) -> str:
        """The stem with the suffix."""
        return stem + self.suffixes[0]


def entry_of(names: Sequence[str], suffixes: tuple[str, ...]) -> str | None:
    """Return ``model`` with the first suffix, or the only file with one of them; None for none or several."""
    matching = [name for name in names if name.lower().endswith(suffixes) and not name.startswith(".")]
    if f"model{suffixes[0]}" in matching:
        return f"model{suffixes[0]}"
    return matching[0] if len(matching) == 1 else None
