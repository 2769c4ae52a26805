"""Weight blocks (SQUIZD document, section 5): what a block's header says, and where its parts lie behind it.

Every kind has one constructor, used for writing and, with the numbers of a parsed header, for reading.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from ingot.core.bytes.checked import MAX_RANK
from ingot.core.numeric.dtypes import DTYPES
from ingot.errors import FormatError
from ingot.ext.squizd.layout import ALIGNMENT, align
from ingot.model.features import Flags
from ingot.model.layouts.affine import AffineLayout
from ingot.model.layouts.dense import DenseLayout
from ingot.model.layouts.lossless import TcaLayout
from ingot.model.layouts.sparse import MASK, NONZEROS, MaskLayout
from ingot.model.layouts.texture import AstcLayout

NPCL, INT4, INT2, ASTC, TCA = b"NPCL", b"INT4", b"INT2", b"ASTW", b"TCAW"
FLAG_OF = {INT4: Flags.INT4, INT2: Flags.INT2, ASTC: Flags.ASTC, TCA: Flags.TCA_TBE}
INTEGER_BITS = {INT4: 4, INT2: 2}

# Codes 0 to 2 are the document's. The others are ours, so that indices, masks and 8-bit floats travel too.
_OWN = (
    "f64", "i64", "i32", "i16", "i8", "u64", "u32", "u16", "u8", "bool", "f8_e4m3fn", "f8_e5m2", "f8_e4m3fnuz",
    "f8_e5m2fnuz", "f8_e8m0fnu", "f6_e2m3fn", "f6_e3m2fn", "f4_e2m1fn", "complex64", "complex128",
)  # fmt: skip
_DTYPES = {0: "f32", 1: "f16", 2: "bf16"} | dict(enumerate(_OWN, start=256))
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
# The most elements that fill up the high bytes and the fallback values of a tile.
_FILL = 24
_BITMAP = struct.Struct("<4sII")

MOST = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Piece:
    """One part inside a block: ``start`` bytes behind the block's magic; ``length`` None where only the bytes tell."""

    role: str
    dtype: str
    start: int | None
    length: int | None
    type: str | None = None


@dataclass(frozen=True, slots=True)
class Block:
    """A block: its header's bytes, and what they say.

    ``shape`` is that of the stored array: rows and columns, of any rank for ``NPCL``. ``says`` has what else is known:
    ``sub_block``, ``footprint``, ``start`` or ``kept``. ``dtype`` is None where the header does not tell it.
    """

    magic: bytes
    header: bytes
    codec: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    dtype: str | None = None
    says: Mapping[str, Any] = field(default_factory=dict)

    @property
    def length(self) -> int | None:
        """Bytes from the magic through the last part, None where not all lengths are known."""
        last = self.pieces[-1]
        return None if last.start is None or last.length is None else last.start + last.length

    @property
    def lead(self) -> int:
        """Bytes before the payload, which a writer puts at a multiple of 64."""
        return len(self.header)


def npcl(dtype: str, shape: tuple[int, ...]) -> Block:
    """Section 5.5: values as they are; KeyError for a dtype that has no code."""
    row = DTYPES[dtype]
    header = struct.pack(f"<4sII{len(shape)}I", NPCL, DTYPE_CODES[dtype], len(shape), *shape)
    piece = Piece("data", row.storage, len(header), row.nbytes(prod(shape)), None if row.is_storage else dtype)
    return Block(NPCL, header, DenseLayout.codec, shape, (piece,), dtype)


def integers(magic: bytes, rows: int, cols: int, sub_block: int = 0) -> Block:
    """Sections 5.3 and 5.4: codes of 4 or 2 bits, without padding between rows."""
    bits = INTEGER_BITS[magic]
    fields = (magic, rows, cols) if magic == INT4 else (magic, rows, cols, sub_block)
    header = struct.pack(f"<4s{len(fields) - 1}I", *fields)
    piece = Piece("packed_weight", "u8", len(header), -(-rows * cols * bits // 8))
    stated = {"sub_block": sub_block} if magic == INT2 else {}
    return Block(magic, header, AffineLayout.codec, (rows, cols), (piece,), says=stated)


def astc(rows: int, cols: int, footprint: str) -> Block:
    """Section 5.1: the matrix as an image of ``cols`` x ``rows`` texels; KeyError for an unknown footprint."""
    header = struct.pack("<4sIII", ASTC, cols, rows, _FOOTPRINT_CODES[footprint])
    width, height = map(int, footprint.split("x"))
    length = -(-cols // width) * -(-rows // height) * ASTC_BLOCK_BYTES
    piece = Piece("blocks", "u8", len(header), length)
    return Block(ASTC, header, AstcLayout.codec, (rows, cols), (piece,), says={"footprint": footprint})


def tca(rows: int, cols: int, start: int, high: int | None = None, fallback: int | None = None) -> Block:
    """Section 5.2 with our sub-header: arrays at multiples of 64 behind the magic.

    ``high`` counts bytes, ``fallback`` elements; None while they are being written.
    """
    header = _TCA.pack(TCA, rows, TCA_WORD, TCA_VERSION, cols, start, 0, high or 0, fallback or 0)
    tiles = -(-rows // _TILE) * -(-cols // _TILE)
    known = [("counts", "u16", 4 * tiles), *((f"bitmap{bit}", "u64", 512 * tiles) for bit in (1, 2, 3))]
    at, pieces = TCA_HEADER, []
    for role, dtype, length in known:
        pieces.append(Piece(role, dtype, at, length))
        at = align(at + length)
    pieces.append(Piece("high", "u8", at, high))
    behind = None if high is None else align(at + high)
    pieces.append(Piece("fallback", "u16", behind, None if fallback is None else 2 * fallback))
    return Block(
        TCA, header.ljust(TCA_HEADER, b"\0"), TcaLayout.codec, (rows, cols), tuple(pieces), TCA_DTYPE, {"start": start}
    )


def is_sound(block: Block) -> bool:
    """Whether a ``TCAW`` block with our sub-header has tiles, and ``high`` and ``fallback`` values for all of them."""
    tiles = -(-block.shape[0] // _TILE) * -(-block.shape[1] // _TILE)
    high, fallback = block.pieces[-2].length or 0, (block.pieces[-1].length or 0) // 2
    return 0 < tiles * _TILE**2 <= high + fallback <= tiles * (_TILE**2 + _FILL)


def bitmap(rows: int, cols: int, kept: int | None = None) -> Block:
    """Section 5.2 to the letter: a bit per element, rows in whole words, then the values whose bit is set.

    ``kept`` counts these; None while they are being written. Of columns and ``kept`` the header tells nothing.
    """
    header, row = _BITMAP.pack(TCA, rows, TCA_WORD), DTYPES[TCA_DTYPE]
    mask = Piece(MASK, "u8", len(header), rows * -(-cols // TCA_WORD) * TCA_WORD // 8)
    length = None if kept is None else row.nbytes(kept)
    values = Piece(
        NONZEROS, row.storage, len(header) + (mask.length or 0), length, None if row.is_storage else TCA_DTYPE
    )
    return Block(TCA, header, MaskLayout.codec, (rows, cols), (mask, values), TCA_DTYPE, {"kept": kept})


def settled(block: Block, written: Mapping[str, int]) -> Block:
    """Return a block of which not all lengths were known, with the bytes of each part as they were written."""
    rows, cols = block.shape
    if block.codec == MaskLayout.codec:
        return bitmap(rows, cols, written[NONZEROS] * 8 // DTYPES[TCA_DTYPE].bits)
    return tca(rows, cols, block.says["start"], written["high"], written["fallback"] // 2)


Read = Callable[[int, int], bytes]


def parse(read: Read, offset: int, end: int, where: str, stated: tuple[int, int] | None = None) -> Block:
    """Read the block whose magic is at ``offset`` and which may not reach past ``end``.

    ``stated`` are the columns and the kept values of a ``TCAW`` block without our sub-header, as a directory has them.

    Raises
    ------
    FormatError
        ``squizd.block-magic``, ``squizd.block-out-of-bounds``, ``squizd.npcl-dtype``, ``squizd.npcl-rank``,
        ``squizd.footprint``, ``squizd.tca-header``.
    """
    take = _taking(read, offset, end, where)
    magic = take(0, 4)
    parser = _PARSERS.get(magic)
    if parser is None:
        known = ", ".join(name.decode() for name in _PARSERS)
        raise FormatError(
            "squizd.block-magic", f"expected a block {known} at byte {offset}, found {magic!r}", where=where
        )
    block = parser(take, where) if magic != TCA or stated is None else bitmap(_parse_bitmap(take, where), *stated)
    if offset + (block.length or 0) > end:
        raise FormatError(
            "squizd.block-out-of-bounds",
            f"expected a {magic.decode()} block that ends by byte {end}, found {block.length} bytes at {offset}",
            where=where,
        )
    return block


def bitmap_rows(read: Read, offset: int, end: int, where: str) -> tuple[int, int]:
    """Return the rows that a ``TCAW`` header of the document states, and its size; errors as of ``parse``."""
    return _parse_bitmap(_taking(read, offset, end, where), where), _BITMAP.size


Take = Callable[[int, int], bytes]


def _taking(read: Read, offset: int, end: int, where: str) -> Take:
    """Return what reads a header piece by piece, most of them from one read, and none past ``end``."""
    head = read(offset, max(0, min(TCA_HEADER, end - offset)))

    def take(start: int, size: int) -> bytes:
        if offset + start + size > end:
            raise FormatError(
                "squizd.block-out-of-bounds",
                f"expected a block that ends by byte {end}, found a header of {start + size} bytes at {offset}",
                where=where,
            )
        return head[start : start + size] if start + size <= len(head) else read(offset + start, size)

    return take


def _parse_npcl(take: Take, where: str) -> Block:
    code, rank = struct.unpack("<II", take(4, 8))
    if code not in _DTYPES:
        raise FormatError("squizd.npcl-dtype", f"expected a dtype code of {sorted(_DTYPES)}, found {code}", where=where)
    if rank > MAX_RANK:
        raise FormatError("squizd.npcl-rank", f"expected at most {MAX_RANK} dimensions, found {rank}", where=where)
    return npcl(_DTYPES[code], struct.unpack(f"<{rank}I", take(12, 4 * rank)))


def _parse_int4(take: Take, where: str) -> Block:
    return integers(INT4, *struct.unpack("<II", take(4, 8)))


def _parse_int2(take: Take, where: str) -> Block:
    return integers(INT2, *struct.unpack("<III", take(4, 12)))


def _parse_astc(take: Take, where: str) -> Block:
    width, height, code = struct.unpack("<III", take(4, 12))
    if code not in FOOTPRINTS:
        raise FormatError(
            "squizd.footprint", f"expected a block footprint from 0x03 to 0x10, found {code:#x}", where=where
        )
    return astc(height, width, FOOTPRINTS[code])


def _parse_tca(take: Take, where: str) -> Block:
    data = take(0, TCA_HEADER)
    _, rows, bits, version, cols, start, reserved, high, fallback = _TCA.unpack_from(data)
    padding = int.from_bytes(data[_TCA.size :], "little")
    for name, value, wanted in (
        ("word_width_bits", bits, TCA_WORD),
        ("version", version, TCA_VERSION),
        ("reserved", reserved, 0),
        ("padding", padding, 0),
    ):
        _require(name, value, wanted, where)
    return tca(rows, cols, start, high, fallback)


def _parse_bitmap(take: Take, where: str) -> int:
    _, rows, bits = _BITMAP.unpack(take(0, _BITMAP.size))
    _require("word_width_bits", bits, TCA_WORD, where)
    return int(rows)


def _require(name: str, value: int, wanted: int, where: str) -> None:
    if value != wanted:
        raise FormatError("squizd.tca-header", f"expected {name} {wanted}, found {value}", where=where)


_PARSERS: dict[bytes, Callable[[Take, str], Block]] = {
    NPCL: _parse_npcl,
    INT4: _parse_int4,
    INT2: _parse_int2,
    ASTC: _parse_astc,
    TCA: _parse_tca,
}
MAGICS = frozenset(_PARSERS)


def gap_to(offset: int, lead: int) -> int:
    """Return the zero bytes to put at ``offset`` so that the payload behind a header of ``lead`` bytes is aligned."""
    return (-(offset + lead)) % ALIGNMENT
