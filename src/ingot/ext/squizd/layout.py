"""Offsets and sizes in a ``.squizd`` file (SQUIZD document, sections 2 to 9), and its constants."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from ingot.core.bytes.checksums import fnv1a64
from ingot.errors import UsageError

MAGIC = b"SQZD"
VERSION = 1
HEADER = 256
INDEX_ENTRY = 32
MAX_LAYERS = 0xFFFF
MAX_ARCHITECTURE = 0xFFFF
ALIGNMENT = 64

SCALES_MAGIC = b"SCZT"
DIRECTORY_MAGIC = b"TDIR"
DRAFT_MAGIC = b"EGDH"
COREML_MAGIC = b"ANLX"

TABLE_HEADER = 8  # magic, number of entries
SCALE_ENTRY = 16
DIRECTORY_HEADER = 12  # magic, length
DRAFT_HEADER = 8  # magic, number of layers
COREML_HEADER = 12  # magic, length

SUB_BLOCK_BIT = 1 << 63

_HEADER = struct.Struct("<4sHIHHIQ")
_INDEX = struct.Struct("<IQQQI")
_ENTRIES = np.dtype([("layer", "<u4"), ("offset", "<u8"), ("length", "<u8"), ("scales", "<u8"), ("reserved", "<u4")])
_SPARSITY = struct.Struct("<IIIf16s")
_DRAFT = struct.Struct("<QQII8s")


ARCHITECTURE = "squizd.arch_id"
"""Key of the metadata for the header's arch_id, if it is not 0 (generic)."""


def split_metadata(metadata: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    """Return the arch_id that the metadata states, by default 0, and all other metadata.

    Raises ``UsageError`` ``squizd.arch-id``: the arch_id is not an integer of 16 bits. Decimal digits as text are
    accepted, because some formats store only text.
    """
    remaining = dict(metadata)
    declared = remaining.pop(ARCHITECTURE, 0)
    number = int(declared) if isinstance(declared, str) and declared.isascii() and declared.isdigit() else declared
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= MAX_ARCHITECTURE:
        raise UsageError(
            f"expected {ARCHITECTURE} from 0 to {MAX_ARCHITECTURE} in the metadata, found {declared!r:.80}",
            rule="squizd.arch-id",
        )
    return number, remaining


def align(offset: int) -> int:
    """Return the first multiple of 64 at or after ``offset``."""
    return (offset + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def tensor_id(layer: int, name: str) -> int:
    """Return the id of a matrix in the scale tables: FNV-1a-64 of the layer (u32 LE) and the UTF-8 name, top bit clear.

    The document (section 8) defines it as "hash of (layer_idx, tensor_name)"; the choice of hash is Ingot's.
    """
    return fnv1a64(struct.pack("<I", layer) + name.encode()) & ~SUB_BLOCK_BIT


@dataclass(frozen=True, slots=True)
class Sparsity:
    """The sparsity metadata at header bytes 128 to 159 (section 6)."""

    version: int = 0
    block: int = 0
    layers: int = 0
    mean: float = 0.0
    reserved: bytes = bytes(16)

    def pack(self) -> bytes:
        return _SPARSITY.pack(self.version, self.block, self.layers, self.mean, self.reserved)

    @classmethod
    def unpack(cls, data: bytes) -> Sparsity:
        return cls(*_SPARSITY.unpack(data))


@dataclass(frozen=True, slots=True)
class DraftMeta:
    """The draft head's metadata at header bytes 160 to 191 (section 7.1)."""

    offset: int = 0
    length: int = 0
    layers: int = 0
    vocab: int = 0
    reserved: bytes = bytes(8)

    def pack(self) -> bytes:
        return _DRAFT.pack(self.offset, self.length, self.layers, self.vocab, self.reserved)

    @classmethod
    def unpack(cls, data: bytes) -> DraftMeta:
        return cls(*_DRAFT.unpack(data))


@dataclass(frozen=True, slots=True)
class Header:
    """The fixed header (section 3); ``reserved`` are bytes 26 to 127, ``reserved2`` bytes 192 to 255."""

    flags: int
    layer_count: int
    version: int = VERSION
    arch: int = 0
    sparsity_crc: int = 0
    draft_hash: int = 0
    sparsity: Sparsity = Sparsity()
    draft: DraftMeta = DraftMeta()
    reserved: bytes = bytes(102)
    reserved2: bytes = bytes(64)
    magic: bytes = MAGIC

    def pack(self) -> bytes:
        head = _HEADER.pack(
            self.magic, self.version, self.flags, self.layer_count, self.arch, self.sparsity_crc, self.draft_hash
        )
        return head + self.reserved + self.sparsity.pack() + self.draft.pack() + self.reserved2

    @classmethod
    def unpack(cls, data: bytes) -> Header:
        magic, version, flags, count, arch, crc, digest = _HEADER.unpack_from(data)
        return cls(
            flags=flags,
            layer_count=count,
            version=version,
            arch=arch,
            sparsity_crc=crc,
            draft_hash=digest,
            sparsity=Sparsity.unpack(data[128:160]),
            draft=DraftMeta.unpack(data[160:192]),
            reserved=data[26:128],
            reserved2=data[192:256],
            magic=magic,
        )


def sparsity_crc(meta: bytes) -> int:
    """Return the CRC-32 (IEEE 802.3, zlib's) of header bytes 128 to 159."""
    return zlib.crc32(meta)


class IndexEntry(NamedTuple):
    """An entry of the layer index (section 4)."""

    layer: int
    offset: int
    length: int
    scales: int
    reserved: int = 0

    def pack(self) -> bytes:
        return _INDEX.pack(self.layer, self.offset, self.length, self.scales, self.reserved)


class LayerIndex(Sequence[IndexEntry]):
    """A layer index in columns; its up to 65,535 entries are built on access."""

    def __init__(self, data: bytes) -> None:
        self._entries = np.frombuffer(data, _ENTRIES)

    @overload
    def __getitem__(self, index: int) -> IndexEntry: ...

    @overload
    def __getitem__(self, index: slice) -> list[IndexEntry]: ...

    def __getitem__(self, index: int | slice) -> IndexEntry | list[IndexEntry]:
        if isinstance(index, slice):
            return [*map(IndexEntry._make, self._entries[index].tolist())]
        return IndexEntry._make(self._entries[index].item())

    def __len__(self) -> int:
        return self._entries.size

    def column(self, field: str) -> NDArray[np.unsignedinteger[Any]]:
        """Return the values of the field ``field`` in all entries."""
        column: NDArray[np.unsignedinteger[Any]] = self._entries[field]
        return column

    def spans(self) -> NDArray[np.int64]:
        """Return the begin and end of each layer as rows; zeros for a layer without bytes.

        Offsets must have been checked to be inside the file.
        """
        starts, lengths = (self.column(field).astype(np.int64) for field in ("offset", "length"))
        return np.stack([starts, starts + lengths], 1) * (lengths > 0)[:, None]

    def inside(self) -> NDArray[np.int64]:
        """Return the indices of the layers with masks: their field ``scales`` is an offset inside the layer."""
        starts, lengths, offsets = (self.column(field) for field in ("offset", "length", "scales"))
        return np.flatnonzero((starts <= offsets) & (offsets - starts < lengths))
