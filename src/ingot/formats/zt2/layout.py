"""Offsets in a container of version 2 (section 2).

``MAGIC | blobs and the manifest, each at a multiple of 4096, zero padding between | footer of 40 bytes``
"""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple

MAGIC = b"\x89ZT2\r\n\x1a\n"
VERSION = 2
ALIGNMENT = 4096
CANONICAL = 65536
"""Alignment of blobs in the canonical form (section 6.3), and of what Ingot writes."""
MAX_MANIFEST = 1 << 30
_FOOTER = Struct("<QQQII8s")
FOOTER = _FOOTER.size
MIN_SIZE = len(MAGIC) + FOOTER


class Footer(NamedTuple):
    """The fields of a file's footer: offset, length and XXH3-64 of the manifest, version, magic.

    Without a manifest, the first three are zero.
    """

    offset: int
    length: int
    checksum: int
    version: int = VERSION
    reserved: int = 0
    magic: bytes = MAGIC

    def pack(self) -> bytes:
        """Return the bytes of the footer."""
        return _FOOTER.pack(*self)

    @classmethod
    def unpack(cls, data: bytes) -> Footer:
        """Return the footer from the ``FOOTER`` bytes at a file's end."""
        return cls(*_FOOTER.unpack(data))


def align(offset: int, alignment: int = CANONICAL) -> int:
    """Return the first multiple of ``alignment`` at or after ``offset``."""
    return -(-offset // alignment) * alignment
