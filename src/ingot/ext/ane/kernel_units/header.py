"""Read and write the header of a kernel unit; ``spec/ane-kernels.md`` states which facts are inferred.

After the header follow the sections, in the order of claim B25 on that page: activation table, palette, records of
output-channel groups, scales, biases, weights.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from ingot.core.bytes import checksums
from ingot.core.numeric.dtypes import MAX_RANK, element_count
from ingot.errors import FormatError, IntegrityError
from ingot.model.bytesource import Buffer, ByteSource
from ingot.model.part import CHUNK

MAGIC = b"ANEKUNIT"
VERSION = 2
HEADER = 256
TILE = 64
SECTIONS = ("lut", "pal", "ocgs", "scale", "bias", "weights")
RECORD_WORDS = 14
UNRELOCATED = 0xFFFFFFFF
RECORD = 4 * RECORD_WORDS
SPARSE, ASYMMETRIC, BLOCKS = 1, 2, 4
"""Flags of a header.

``SPARSE``: each group is stored as a mask, with the first weight in the lowest bit, and then the values that the mask
selects. ``ASYMMETRIC``: after the scales follows an int8 zero point per channel. ``BLOCKS``: each ``block`` consecutive
weights share a scale.
"""
FLAGS = SPARSE | ASYMMETRIC | BLOCKS
MAX_UNITY = 8192
"""Limit on the channels of an identity matrix, because a unit of a few bytes decodes to channels * channels weights."""

_FIXED = struct.Struct("<8s11I")
_LONG = struct.Struct("<QI")
_SECTION = struct.Struct("<QQIHH")
_DIGEST = struct.Struct("<I")
_DIMS = 8
_SECTIONS_AT = 96
_TARGET_AT = 240
_DIGEST_AT = 252


@dataclass(frozen=True, slots=True)
class Section:
    """Entry of a section in the header.

    It has the byte offset, the size of one copy in bytes, the count of tables, records or channels, the type number,
    and the bits per value.
    """

    offset: int = 0
    length: int = 0
    count: int = 0
    typeno: int = 0
    bits: int = 0


@dataclass(frozen=True, slots=True)
class Header:
    """Contents of a unit's first 256 bytes.

    ``tiles`` is the number of weight tiles, and ``ocg`` the number of output channels per group. ``copies`` is the
    number of copies of tables, scales and biases. ``target`` is the compiler's name of the chip. ``word`` is the value
    of the KernelCfg register; 0 in version 1. ``block`` is the number of weights that share a scale; 0 without the flag
    ``BLOCKS``.
    """

    kernel_format: int
    flags: int
    tiles: int
    ocg: int
    vector: int
    codebooks: int
    copies: int
    shape: tuple[int, ...]
    target: str
    sections: dict[str, Section]
    word: int = 0
    version: int = VERSION
    block: int = 0

    @property
    def channels(self) -> int:
        return self.shape[0]

    @property
    def per_channel(self) -> int:
        """The number of weights per output channel."""
        return prod(self.shape[1:])

    @property
    def scale_dtype(self) -> str:
        """Element type of the scales: ``f32`` if the section declares 32 bits, otherwise ``f16``; claim B25 allows
        both.
        """
        return "f32" if self.sections["scale"].bits == 32 else "f16"

    @property
    def scales(self) -> int:
        """The number of scales per output channel."""
        return -(-self.per_channel // self.block) if self.flags & BLOCKS else 1

    def stride(self, section: str) -> int:
        """Return the distance in bytes between copies of a section.

        Copies of the activation table and of the palette alternate, so their distance is the size of both tables
        together.
        """
        if section in ("lut", "pal"):
            return align(self.sections["lut"].length) + align(self.sections["pal"].length)
        return align(self.sections[section].length)

    def to_bytes(self) -> bytearray:
        """Return the encoded header, with a digest of zero."""
        data = bytearray(HEADER)
        _FIXED.pack_into(
            data, 0, MAGIC, self.version, HEADER, self.kernel_format, self.flags, self.tiles, self.ocg, self.vector,
            self.codebooks, self.copies, len(self.shape), self.word,
        )  # fmt: skip
        _LONG.pack_into(data, _FIXED.size, self.per_channel, self.block)
        struct.pack_into(f"<{len(self.shape)}I", data, _FIXED.size + _LONG.size, *self.shape)
        for index, name in enumerate(SECTIONS):
            section = self.sections[name]
            _SECTION.pack_into(
                data, _SECTIONS_AT + index * _SECTION.size,
                section.offset, section.length, section.count, section.typeno, section.bits,
            )  # fmt: skip
        data[_TARGET_AT : _TARGET_AT + len(self.target)] = self.target.encode("ascii")
        return data


def align(size: int, multiple: int = TILE) -> int:
    """Return ``size`` rounded up to a multiple of ``multiple``."""
    return -(-size // multiple) * multiple


def groups(header: Header) -> Iterator[tuple[int, int, int]]:
    """Yield the tile, the first channel and the number of channels of each group, in the order of the records.

    Group g starts at channel ``g * ocg`` and belongs to tile ``g mod tiles`` (claim B20: core c = c mod N).
    """
    count = -(-header.channels // header.ocg)
    for tile in range(header.tiles):
        for group in range(tile, count, header.tiles):
            first = group * header.ocg
            yield tile, first, min(header.ocg, header.channels - first)


def seal(data: bytearray) -> None:
    """Store the CRC-32C of a unit in its header."""
    hasher = checksums.hasher("crc32c")
    view = memoryview(data)
    hasher.update(view[:_DIGEST_AT])
    hasher.update(view[HEADER:])
    _DIGEST.pack_into(data, _DIGEST_AT, int(hasher.text().rpartition(":")[2], 16))


def is_unit(head: bytes) -> bool:
    """Return whether a file that begins with these bytes is a kernel unit."""
    return head.startswith(MAGIC)


def stored_digest(head: Buffer) -> str:
    """Return the digest in a unit's header as text: the name of the algorithm and the value."""
    return f"crc32c:0x{_DIGEST.unpack_from(head, _DIGEST_AT)[0]:08X}"


def require_digest(source: ByteSource, location: str) -> None:
    """Read all bytes of a unit and compare their CRC-32C.

    Raises ``IntegrityError`` ``anek.digest`` if the CRC differs from the CRC in the header.
    """
    hasher = checksums.hasher("crc32c")
    head = memoryview(bytearray(HEADER))
    buffer = memoryview(bytearray(CHUNK))
    source.readinto(0, head)
    hasher.update(head[:_DIGEST_AT])
    for start in range(HEADER, source.size, CHUNK):
        chunk = buffer[: min(CHUNK, source.size - start)]
        source.readinto(start, chunk)
        hasher.update(chunk)
    if hasher.text() != stored_digest(head):
        raise IntegrityError(
            "anek.digest",
            f"expected {stored_digest(head)}, found {hasher.text()}: the unit is damaged; build it again",
            where=location,
        )


def read_header(data: Buffer, size: int, location: str) -> Header:
    """Return the header in ``data``, the first 256 bytes of a unit, after checking it against the size of the file.

    Sections are not read. Raises ``FormatError``: ``anek.magic``, ``anek.version``, ``anek.header``, ``anek.bounds``.
    """
    if len(data) < HEADER or not is_unit(bytes(data[:8])):
        raise FormatError("anek.magic", f"expected a kernel unit of at least {HEADER} bytes", where=location)
    _, version, head_size, code, flags, tiles, ocg, vector, codebooks, copies, rank, word = _FIXED.unpack_from(data)
    if version not in (1, VERSION):
        raise FormatError("anek.version", f"expected version 1 or {VERSION}, found {version}", where=location)
    per_channel, block = _LONG.unpack_from(data, _FIXED.size)
    needs_version_2 = version == 1 and (word or block or flags & ~SPARSE)
    is_invalid = flags & ~FLAGS or bool(flags & BLOCKS) != (block > 0) or needs_version_2
    if head_size != HEADER or not 1 <= rank <= min(_DIMS, MAX_RANK) or is_invalid:
        raise FormatError(
            "anek.header",
            f"expected rank 1 to {_DIMS}, reserved words of 0, and flags that the version has",
            where=location,
        )
    dims_at = _FIXED.size + _LONG.size
    dims = struct.unpack_from(f"<{_DIMS}I", data, dims_at)
    shape = dims[:rank]
    element_count(shape, "anek.header", location)
    in_range = (
        1 <= tiles <= 4096 and 1 <= copies <= 4096 and ocg >= 1 and 1 <= vector <= 4 and 1 <= codebooks <= 1 << 20
    )
    if not in_range or any(dims[rank:]) or 0 in shape or prod(shape[1:]) != per_channel or any(data[dims_at + 32 : 96]):
        raise FormatError("anek.header", "expected a shape, and tiles and groups within their limits", where=location)
    sections = {
        name: Section(*_SECTION.unpack_from(data, _SECTIONS_AT + index * _SECTION.size))
        for index, name in enumerate(SECTIONS)
    }
    target = bytes(data[_TARGET_AT:_DIGEST_AT]).rstrip(b"\0")
    if not (target.isascii() and target.decode("ascii").isalnum()):
        raise FormatError("anek.header", f"expected the name of a target, found {target!r}", where=location)
    header = Header(
        code, flags, tiles, ocg, vector, codebooks, copies, shape, target.decode(), sections, word, version, block
    )
    _check_bounds(header, size, location)
    return header


def _check_bounds(header: Header, size: int, location: str) -> None:
    """Check that the sections follow each other in their order, without gaps, to the end of the file."""
    cursor = HEADER
    for name in SECTIONS:
        section = header.sections[name]
        if section.length > size or section.offset != cursor:
            raise FormatError(
                "anek.bounds",
                f"expected section {name} at {cursor} within {size} bytes, found {section}",
                where=location,
            )
        if name == "lut":
            cursor += align(section.length)
            continue
        if name == "pal":
            cursor = HEADER + header.copies * header.stride("pal")
        else:
            cursor += align(section.length) * (header.copies if name in ("scale", "bias") else 1)
    if cursor != size:
        raise FormatError("anek.bounds", f"expected {cursor} bytes, found {size}", where=location)
