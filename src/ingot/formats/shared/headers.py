"""Headers of open files, for callers that need their bytes: large headers are read again instead of cached."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from ingot.core.bytes.checksums import Buffer
from ingot.model.bytesource import ByteSource
from ingot.model.reading.lazy import Made
from ingot.model.reading.ranges import is_distant, read_joined

ReadHeader = Callable[[], Buffer]
"""A function that returns the bytes of a header."""

_SMALL = 1 << 16


def header_of(raw: Buffer, source: ByteSource, offset: int) -> ReadHeader:
    """Return a function that returns the header that was read at ``offset``, as long as the source is open.

    A header of more than 64 KiB in a local file is read again at each call. The bytes are then those that the file has
    at that time, and the function raises the errors of ``ByteSource.readinto``. To notice a changed file, compare its
    stamp.
    """
    if len(raw) <= _SMALL or is_distant(source):
        return lambda: raw
    return partial(read_joined, source, [(offset, len(raw))])


def headers_of(readers: Mapping[str, ReadHeader]) -> Mapping[str, Buffer]:
    """Return the bytes of headers by file."""
    return Made(readers, lambda name: readers[name]())
