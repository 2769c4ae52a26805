"""Weight blocks (SQUIZD document, section 5): the fields of their headers, and the offsets of their parts.

Each type of block has one constructor. Writers call it, and readers call it with the fields of a parsed header.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from ingot.core.numeric.dtypes import DTYPES, MAX_RANK
from ingot.errors import FormatError
from ingot.ext.squizd.layout import ALIGNMENT, align
from ingot.model.layouts.affine import AffineLayout
from ingot.model.layouts.dense import DenseLayout, TcaLayout
from ingot.model.layouts.sparse import MASK, NONZEROS, MaskLayout
from ingot.model.layouts.texture import AstcLayout
from ingot.model.stacks import Flags

NPCL = b"NPCL"
INT4 = b"INT4"
INT2 = b"INT2"
ASTC = b"ASTW"
TCA = b"TCAW"
FLAG_OF = {INT4: Flags.INT4, INT2: Flags.INT2, ASTC: Flags.ASTC, TCA: Flags.TCA_TBE}
INTEGER_BITS = {INT4: 4, INT2: 2}

# Codes 0 to 2 are defined by the document. The others are extensions of Ingot, for indices, masks and 8-bit floats.
_INGOT_DTYPES = (
    "f64", "i64", "i32", "i16", "i8", "u64", "u32", "u16", "u8", "bool", "f8_e4m3fn", "f8_e5m2", "f8_e4m3fnuz",
    "f8_e5m2fnuz", "f8_e8m0fnu", "f6_e2m3fn", "f6_e3m2fn", "f4_e2m1fn", "complex64", "complex128",
)  # fmt: skip
_DTYPES = {0: "f32", 1: "f16", 2: "bf16"} | dict(enumerate(_INGOT_DTYPES, start=256))
DTYPE_CODES = {name: code for code, name in _DTYPES.items()}

# Ordinal of the Khronos texture formats plus 3, which fits both examples of section 5.1 (0x05 = 5x5, 0x08 = 8x5).
_KHRONOS = (
    "4x4", "5x4", "5x5", "6x5", "6x6", "8x5", "8x6", "8x8", "10x5", "10x6", "10x8", "10x10", "12x10", "12x12",
)  # fmt: skip
FOOTPRINTS = dict(enumerate(_KHRONOS, start=3))
_FOOTPRINT_CODES = {name: code for code, name in FOOTPRINTS.items()}
ASTC_BLOCK_BYTES = 16

_TCA = struct.Struct("<4sIIIIiIQQ")
TCA_HEADER = 64
TCA_VERSION = 1
TCA_WORD = 64
TCA_DTYPE = "bf16"
_TILE = 64
# The maximum number of fill elements in the high bytes and the fallback values of a tile.
_FILL = 24
_BITMAP = struct.Struct("<4sII")

MAX_U32 = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class BlockPart:
    """A part inside a block, ``start`` bytes after the block's magic.

    ``start`` and ``length`` are None while they are unknown, because they depend on the values.
    """

    role: str
    dtype: str
    start: int | None
    length: int | None
    type: str | None = None


@dataclass(frozen=True, slots=True)
class Block:
    """A block: the bytes of its header, and their meaning.

    ``shape`` is the shape of the stored array: rows and columns, or any rank for ``NPCL``. ``properties`` are fields
    that only some types of blocks have: ``sub_block``, ``footprint``, ``start`` or ``kept``. ``dtype`` is None if the
    header does not state it.
    """

    magic: bytes
    header: bytes
    codec: str
    shape: tuple[int, ...]
    parts: tuple[BlockPart, ...]
    dtype: str | None = None
    properties: Mapping[str, Any] = field(default_factory=dict)

    @property
    def length(self) -> int | None:
        """The number of bytes from the magic to the end of the last part; None if not all lengths are known."""
        last = self.parts[-1]
        return None if last.start is None or last.length is None else last.start + last.length

    @property
    def lead(self) -> int:
        """The number of bytes of the header, before the payload; writers align the payload to a multiple of 64."""
        return len(self.header)


def npcl(dtype: str, shape: tuple[int, ...]) -> Block:
    """Return a block of section 5.5, with unchanged values. Raises ``KeyError`` if the format has no code for
    ``dtype``.
    """
    row = DTYPES[dtype]
    header = struct.pack(f"<4sII{len(shape)}I", NPCL, DTYPE_CODES[dtype], len(shape), *shape)
    part = BlockPart("data", row.storage, len(header), row.nbytes(prod(shape)), None if row.is_storage else dtype)
    return Block(NPCL, header, DenseLayout.codec, shape, (part,), dtype)


def integers(magic: bytes, rows: int, cols: int, sub_block: int = 0) -> Block:
    """Return the block of a matrix of 4-bit or 2-bit codes (SQUIZD, sections 5.3 and 5.4), without padding between
    rows.
    """
    bits = INTEGER_BITS[magic]
    fields = (magic, rows, cols) if magic == INT4 else (magic, rows, cols, sub_block)
    header = struct.pack(f"<4s{len(fields) - 1}I", *fields)
    part = BlockPart("packed_weight", "u8", len(header), -(-rows * cols * bits // 8))
    properties = {"sub_block": sub_block} if magic == INT2 else {}
    return Block(magic, header, AffineLayout.codec, (rows, cols), (part,), properties=properties)


def astc(rows: int, cols: int, footprint: str) -> Block:
    """Return a block of section 5.1: an ASTC texture of ``cols`` x ``rows`` texels, one for each element.

    Raises KeyError for an unknown footprint.
    """
    header = struct.pack("<4sIII", ASTC, cols, rows, _FOOTPRINT_CODES[footprint])
    width, height = map(int, footprint.split("x"))
    length = -(-cols // width) * -(-rows // height) * ASTC_BLOCK_BYTES
    part = BlockPart("blocks", "u8", len(header), length)
    return Block(ASTC, header, AstcLayout.codec, (rows, cols), (part,), properties={"footprint": footprint})


def tca(rows: int, cols: int, start: int, high: int | None = None, fallback: int | None = None) -> Block:
    """Return a block of section 5.2 with Ingot's sub-header; its arrays start at multiples of 64 bytes after the magic.

    ``high`` is the number of bytes of the part ``high``, and ``fallback`` the number of elements of the part
    ``fallback``. Both are None while the block is being written.
    """
    header = _TCA.pack(TCA, rows, TCA_WORD, TCA_VERSION, cols, start, 0, high or 0, fallback or 0)
    tiles = -(-rows // _TILE) * -(-cols // _TILE)
    fixed_parts = [("counts", "u16", 4 * tiles), *((f"bitmap{bit}", "u64", 512 * tiles) for bit in (1, 2, 3))]
    offset = TCA_HEADER
    parts = []
    for role, dtype, length in fixed_parts:
        parts.append(BlockPart(role, dtype, offset, length))
        offset = align(offset + length)
    parts.append(BlockPart("high", "u8", offset, high))
    fallback_start = None if high is None else align(offset + high)
    parts.append(BlockPart("fallback", "u16", fallback_start, None if fallback is None else 2 * fallback))
    return Block(
        TCA, header.ljust(TCA_HEADER, b"\0"), TcaLayout.codec, (rows, cols), tuple(parts), TCA_DTYPE, {"start": start}
    )


def is_sound(block: Block) -> bool:
    """Return whether a ``TCAW`` block with Ingot's sub-header has tiles, and parts whose sizes fit these tiles."""
    tiles = -(-block.shape[0] // _TILE) * -(-block.shape[1] // _TILE)
    high = block.parts[-2].length or 0
    fallback = (block.parts[-1].length or 0) // 2
    return 0 < tiles * _TILE**2 <= high + fallback <= tiles * (_TILE**2 + _FILL)


def bitmap(rows: int, cols: int, value_count: int | None = None) -> Block:
    """Return a block as section 5.2 defines it: a bitmap of the elements, then the values of the set bits.

    Each row of the bitmap is padded to complete words.

    ``value_count`` is the number of values; None while the block is being written. The header states neither it nor the
    columns.
    """
    header = _BITMAP.pack(TCA, rows, TCA_WORD)
    row = DTYPES[TCA_DTYPE]
    mask = BlockPart(MASK, "u8", len(header), rows * -(-cols // TCA_WORD) * TCA_WORD // 8)
    length = None if value_count is None else row.nbytes(value_count)
    values = BlockPart(
        NONZEROS, row.storage, len(header) + (mask.length or 0), length, None if row.is_storage else TCA_DTYPE
    )
    return Block(TCA, header, MaskLayout.codec, (rows, cols), (mask, values), TCA_DTYPE, {"kept": value_count})


def with_lengths(block: Block, written: Mapping[str, int]) -> Block:
    """Return ``block`` with the lengths of its parts in bytes, which were unknown when its writing began."""
    rows, cols = block.shape
    if block.codec == MaskLayout.codec:
        return bitmap(rows, cols, written[NONZEROS] * 8 // DTYPES[TCA_DTYPE].bits)
    return tca(rows, cols, block.properties["start"], written["high"], written["fallback"] // 2)


Read = Callable[[int, int], bytes]


def parse(read: Read, offset: int, end: int, location: str, declared: tuple[int, int] | None = None) -> Block:
    """Return the block whose magic is at ``offset``; it must end by ``end``.

    For a ``TCAW`` block without Ingot's sub-header, ``declared`` has the columns and the number of values that the
    directory states.

    Raises
    ------
    FormatError
        ``squizd.block-magic``, ``squizd.block-out-of-bounds``, ``squizd.npcl-dtype``, ``squizd.npcl-rank``,
        ``squizd.footprint``, ``squizd.tca-header``.
    """
    take = _range_reader(read, offset, end, location)
    magic = take(0, 4)
    parser = _PARSERS.get(magic)
    if parser is None:
        names = ", ".join(name.decode() for name in _PARSERS)
        raise FormatError(
            "squizd.block-magic", f"expected a block {names} at byte {offset}, found {magic!r}", where=location
        )
    block = (
        parser(take, location) if magic != TCA or declared is None else bitmap(_parse_bitmap(take, location), *declared)
    )
    if offset + (block.length or 0) > end:
        raise FormatError(
            "squizd.block-out-of-bounds",
            f"expected a {magic.decode()} block that ends by byte {end}, found {block.length} bytes at {offset}",
            where=location,
        )
    return block


def bitmap_rows(read: Read, offset: int, end: int, location: str) -> tuple[int, int]:
    """Return the rows that a ``TCAW`` header without Ingot's fields states, and the header's size in bytes.

    Raises the errors of ``parse``.
    """
    return _parse_bitmap(_range_reader(read, offset, end, location), location), _BITMAP.size


Take = Callable[[int, int], bytes]


def _range_reader(read: Read, offset: int, end: int, location: str) -> Take:
    """Return a function that reads ranges of the block header at ``offset`` and refuses ranges past ``end``.

    Most headers are read by one read call.
    """
    head = read(offset, max(0, min(TCA_HEADER, end - offset)))

    def take(start: int, size: int) -> bytes:
        if offset + start + size > end:
            raise FormatError(
                "squizd.block-out-of-bounds",
                f"expected a block that ends by byte {end}, found a header of {start + size} bytes at {offset}",
                where=location,
            )
        return head[start : start + size] if start + size <= len(head) else read(offset + start, size)

    return take


def _parse_npcl(take: Take, location: str) -> Block:
    code, rank = struct.unpack("<II", take(4, 8))
    if code not in _DTYPES:
        raise FormatError(
            "squizd.npcl-dtype", f"expected a dtype code of {sorted(_DTYPES)}, found {code}", where=location
        )
    if rank > MAX_RANK:
        raise FormatError("squizd.npcl-rank", f"expected at most {MAX_RANK} dimensions, found {rank}", where=location)
    return npcl(_DTYPES[code], struct.unpack(f"<{rank}I", take(12, 4 * rank)))


def _parse_int4(take: Take, location: str) -> Block:
    return integers(INT4, *struct.unpack("<II", take(4, 8)))


def _parse_int2(take: Take, location: str) -> Block:
    return integers(INT2, *struct.unpack("<III", take(4, 12)))


def _parse_astc(take: Take, location: str) -> Block:
    width, height, code = struct.unpack("<III", take(4, 12))
    if code not in FOOTPRINTS:
        raise FormatError(
            "squizd.footprint", f"expected a block footprint from 0x03 to 0x10, found {code:#x}", where=location
        )
    return astc(height, width, FOOTPRINTS[code])


def _parse_tca(take: Take, location: str) -> Block:
    data = take(0, TCA_HEADER)
    _, rows, bits, version, cols, start, reserved, high, fallback = _TCA.unpack_from(data)
    padding = int.from_bytes(data[_TCA.size :], "little")
    for name, value, expected in (
        ("word_width_bits", bits, TCA_WORD),
        ("version", version, TCA_VERSION),
        ("reserved", reserved, 0),
        ("padding", padding, 0),
    ):
        _require(name, value, expected, location)
    return tca(rows, cols, start, high, fallback)


def _parse_bitmap(take: Take, location: str) -> int:
    _, rows, bits = _BITMAP.unpack(take(0, _BITMAP.size))
    _require("word_width_bits", bits, TCA_WORD, location)
    return int(rows)


def _require(name: str, value: int, expected: int, location: str) -> None:
    if value != expected:
        raise FormatError("squizd.tca-header", f"expected {name} {expected}, found {value}", where=location)


_PARSERS: dict[bytes, Callable[[Take, str], Block]] = {
    NPCL: _parse_npcl,
    INT4: _parse_int4,
    INT2: _parse_int2,
    ASTC: _parse_astc,
    TCA: _parse_tca,
}
MAGICS = frozenset(_PARSERS)


def gap_to(offset: int, lead: int) -> int:
    """Return the number of zero bytes at ``offset`` that align the payload after a header of ``lead`` bytes."""
    return (-(offset + lead)) % ALIGNMENT
