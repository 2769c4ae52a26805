"""The kernel unit's file: header, geometry, checks. What is inferred of it is listed in ``spec/ane-kernels.md``.

Sections in the order of B25: activation table, palette, records of output-channel groups, scales, biases, weights.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from ingot.core.bytes import checksums
from ingot.core.bytes.checked import MAX_RANK, element_count
from ingot.errors import FormatError, IntegrityError
from ingot.model.bytesource import Buffer, ByteSource
from ingot.model.part import CHUNK

MAGIC, VERSION = b"ANEKUNIT", 2
HEADER, TILE = 256, 64
SECTIONS = ("lut", "pal", "ocgs", "scale", "bias", "weights")
RECORD_WORDS, UNRELOCATED = 14, 0xFFFFFFFF
RECORD = 4 * RECORD_WORDS
SPARSE, ASYMMETRIC, BLOCKS = 1, 2, 4
"""Flags: the weights of a group are a mask, LSB first, and the kept values; behind the scales lies an int8 zero point
per channel; a scale serves a run of ``block`` weights."""
FLAGS = SPARSE | ASYMMETRIC | BLOCKS
MOST_UNITY = 8192
"""Channels of an identity: a unit of a few bytes stands for their square."""

_FIXED = struct.Struct("<8s11I")
_LONG = struct.Struct("<QI")
_SECTION = struct.Struct("<QQIHH")
_DIGEST = struct.Struct("<I")
_DIMS, _SECTIONS_AT, _TARGET_AT, _DIGEST_AT = 8, 96, 240, 252


@dataclass(frozen=True, slots=True)
class Section:
    """Where a section lies: offset in the file, bytes of one copy, count (tables, records, channels), type, bits."""

    offset: int = 0
    length: int = 0
    count: int = 0
    typeno: int = 0
    bits: int = 0


@dataclass(frozen=True, slots=True)
class Header:
    """What the first 256 bytes say.

    ``tiles`` weight tiles; ``ocg`` output channels per group; ``copies`` of tables, scales and biases; ``target`` is
    the compiler's name of the chip; ``word`` the KernelCfg register, 0 in version 1;
    ``block`` the weights that share a scale, with the flag.
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
        """Weights per output channel."""
        return prod(self.shape[1:])

    @property
    def scale_dtype(self) -> str:
        """Type of the scales: ``f16``, or ``f32`` where the section has 32 bits (B25 has both)."""
        return "f32" if self.sections["scale"].bits == 32 else "f16"

    @property
    def scales(self) -> int:
        """Scales per output channel."""
        return -(-self.per_channel // self.block) if self.flags & BLOCKS else 1

    def stride(self, section: str) -> int:
        """Bytes from one copy of a section to the next; the two tables lie behind one cursor and share theirs."""
        if section in ("lut", "pal"):
            return aligned(self.sections["lut"].length) + aligned(self.sections["pal"].length)
        return aligned(self.sections[section].length)

    def to_bytes(self) -> bytearray:
        """Return the header with a digest of zero."""
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


def aligned(size: int, to: int = TILE) -> int:
    """Return ``size`` rounded up to a multiple of ``to``."""
    return -(-size // to) * to


def groups(header: Header) -> Iterator[tuple[int, int, int]]:
    """Yield tile, first channel and number of channels of every group, in the order of the records.

    Group g holds the channels from ``g * ocg`` on and belongs to tile ``g mod tiles`` (B20: core c = c mod N).
    """
    count = -(-header.channels // header.ocg)
    for tile in range(header.tiles):
        for group in range(tile, count, header.tiles):
            first = group * header.ocg
            yield tile, first, min(header.ocg, header.channels - first)


def seal(data: bytearray) -> None:
    """Put the digest into a unit."""
    hasher, view = checksums.hasher("crc32c"), memoryview(data)
    hasher.update(view[:_DIGEST_AT])
    hasher.update(view[HEADER:])
    _DIGEST.pack_into(data, _DIGEST_AT, int(hasher.text().rpartition(":")[2], 16))


def is_unit(head: bytes) -> bool:
    """Whether a file that begins with these bytes is a kernel unit."""
    return head.startswith(MAGIC)


def stated(head: Buffer) -> str:
    """Return the digest that a unit states of itself, as digests are spelled."""
    return f"crc32c:0x{_DIGEST.unpack_from(head, _DIGEST_AT)[0]:08X}"


def require_digest(source: ByteSource, where: str) -> None:
    """Read a whole unit and compare its CRC-32C; raises ``IntegrityError`` ``anek.digest``."""
    hasher = checksums.hasher("crc32c")
    head, buffer = memoryview(bytearray(HEADER)), memoryview(bytearray(CHUNK))
    source.readinto(0, head)
    hasher.update(head[:_DIGEST_AT])
    for start in range(HEADER, source.size, CHUNK):
        piece = buffer[: min(CHUNK, source.size - start)]
        source.readinto(start, piece)
        hasher.update(piece)
    if hasher.text() != stated(head):
        raise IntegrityError("anek.digest", f"expected {stated(head)}, found {hasher.text()}: damaged", where=where)


def read_header(data: Buffer, size: int, where: str) -> Header:
    """Read and check the header of a unit, its first 256 bytes, against the file's size; reads no section.

    Raises ``FormatError``: ``anek.magic``, ``anek.version``, ``anek.header``, ``anek.bounds``.
    """
    if len(data) < HEADER or not is_unit(bytes(data[:8])):
        raise FormatError("anek.magic", f"expected a kernel unit of at least {HEADER} bytes", where=where)
    _, version, head_size, code, flags, tiles, ocg, vector, books, copies, rank, word = _FIXED.unpack_from(data)
    if version not in (1, VERSION):
        raise FormatError("anek.version", f"expected version 1 or {VERSION}, found {version}", where=where)
    per_channel, block = _LONG.unpack_from(data, _FIXED.size)
    old = version == 1 and (word or block or flags & ~SPARSE)
    odd = flags & ~FLAGS or bool(flags & BLOCKS) != (block > 0) or old
    if head_size != HEADER or not 1 <= rank <= min(_DIMS, MAX_RANK) or odd:
        raise FormatError("anek.header", f"expected rank 1 to {_DIMS} and reserved words of 0", where=where)
    dims_at = _FIXED.size + _LONG.size
    dims = struct.unpack_from(f"<{_DIMS}I", data, dims_at)
    shape = dims[:rank]
    element_count(shape, "anek.header", where)
    tight = 1 <= tiles <= 4096 and 1 <= copies <= 4096 and ocg >= 1 and 1 <= vector <= 4 and 1 <= books <= 1 << 20
    if not tight or any(dims[rank:]) or 0 in shape or prod(shape[1:]) != per_channel or any(data[dims_at + 32 : 96]):
        raise FormatError("anek.header", "expected tiles, groups and a shape that fit each other", where=where)
    sections = {
        name: Section(*_SECTION.unpack_from(data, _SECTIONS_AT + index * _SECTION.size))
        for index, name in enumerate(SECTIONS)
    }
    target = bytes(data[_TARGET_AT:_DIGEST_AT]).rstrip(b"\0")
    if not (target.isascii() and target.decode("ascii").isalnum()):
        raise FormatError("anek.header", f"expected a target's name, found {target!r}", where=where)
    header = Header(
        code, flags, tiles, ocg, vector, books, copies, shape, target.decode(), sections, word, version, block
    )
    _check_bounds(header, size, where)
    return header


def _check_bounds(header: Header, size: int, where: str) -> None:
    """Sections lie in their order, side by side, to the end of the file."""
    cursor = HEADER
    for name in SECTIONS:
        section = header.sections[name]
        if section.length > size or section.offset != cursor:
            raise FormatError(
                "anek.bounds", f"expected section {name} at {cursor} within {size} bytes, found {section}", where=where
            )
        if name == "lut":
            cursor += aligned(section.length)
            continue
        if name == "pal":
            cursor = HEADER + header.copies * header.stride("pal")
        else:
            cursor += aligned(section.length) * (header.copies if name in ("scale", "bias") else 1)
    if cursor != size:
        raise FormatError("anek.bounds", f"expected {cursor} bytes, found {size}", where=where)
