"""Headers of opened files, for the few who ask for their bytes: large ones are read again rather than kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from ingot.core.bytes.checksums import Buffer
from ingot.model.bytesource import ByteSource
from ingot.model.reading.lazy import Made
from ingot.model.reading.ranges import is_distant, read_joined

ReadHeader = Callable[[], Buffer]
"""Returns a header's bytes."""

_SMALL = 1 << 16


def header_of(raw: Buffer, source: ByteSource, offset: int) -> ReadHeader:
    """Return what gives the header that was read at ``offset``, as long as the source is open.

    One of more than 64 KiB in a local file is read again each time: it gives what the file holds by then, and raises as
    ``ByteSource.readinto`` does. Who has to notice a changed file compares its stamp.
    """
    if len(raw) <= _SMALL or is_distant(source):
        return lambda: raw
    return partial(read_joined, source, [(offset, len(raw))])


def headers_of(found: Mapping[str, ReadHeader]) -> Mapping[str, Buffer]:
    """Return the bytes of headers by file."""
    return Made(found, lambda name: found[name]())
