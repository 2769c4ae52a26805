"""Base classes of formats that store an artifact in one file."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from ingot.core.bytes.checksums import Buffer
from ingot.formats.base import Catalog, Format
from ingot.model.bytesource import ByteSource
from ingot.model.reading.lazy import ComputedMap
from ingot.model.reading.ranges import is_remote, read_joined
from ingot.model.store import Store

ReadHeader = Callable[[], Buffer]
"""A function that returns the contents of a header."""

_SMALL = 1 << 16


def header_of(raw: Buffer, source: ByteSource, offset: int) -> ReadHeader:
    """Return a function that returns ``raw``, the header at ``offset``, while the source is open.

    In a local file, a header of more than 64 KiB is not cached but read again in each call. The result is then the
    file's current bytes; the errors are those of ``ByteSource.readinto``. To detect a changed file, callers compare its
    stamp.
    """
    if len(raw) <= _SMALL or is_remote(source):
        return lambda: raw
    return partial(read_joined, source, [(offset, len(raw))])


def headers_of(readers: Mapping[str, ReadHeader]) -> Mapping[str, Buffer]:
    """Return the headers of files by name; each is read by its function in ``readers`` on access."""
    return ComputedMap(readers, lambda name: readers[name]())


class BySuffix(Format):
    """A format that recognizes its files in a folder by their suffix."""

    def entry(self, names: Sequence[str]) -> str | None:
        """Return ``model`` with the first suffix, or the only file with a suffix of the format; None if there are none
        or several.
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
        """Check an open file and return its catalog, which then owns the file."""

    def read(self, store: Store, name: str, *, verify: bool = True) -> Catalog:
        """Return the catalog of the file ``name``; if it is invalid, the file is closed."""
        source = store.open(name)
        try:
            return self.catalog(source, name, verify=verify)
        except BaseException:
            source.close()
            raise
