"""Blob storage version 2: ``weights/weight.bin``.

Layout (coremltools, ``mlmodel/src/MILBlob/Blob/StorageFormat.hpp``), little-endian: a header of 64 bytes with u32 count
and u32 version 2; then blobs at multiples of 64, each with 64 bytes of metadata: u32 sentinel ``0xDEADBEEF``, u32 type,
u64 bytes, u64 offset of the data in the file, u64 bits of padding in the last byte. A program names a blob by the
offset of its metadata.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from ingot.errors import FormatError
from ingot.formats.coreml.types import MilType
from ingot.model.bytesource import ByteSource
from ingot.model.reading.ranges import read_bytes

VERSION = 2
SENTINEL = 0xDEADBEEF
ALIGNMENT = 64
HEADER = 64
METADATA = 64
_HEADER = struct.Struct("<II")
_METADATA = struct.Struct("<IIQQQ")
_ROUND = ALIGNMENT - 1


@dataclass(frozen=True, slots=True)
class Blob:
    """Where one blob's data lie: ``offset`` is of the data, ``length`` in bytes."""

    offset: int
    length: int


class BlobFile:
    """The reader of one weight file; nothing is read but the header and the metadata that is asked for.

    Raises ``FormatError`` ``coreml.blob-header``.
    """

    def __init__(self, source: ByteSource) -> None:
        self.source = source
        if source.size < HEADER:
            raise FormatError(
                "coreml.blob-header", f"expected a header of {HEADER} bytes, found {source.size}", where=source.name
            )
        head = read_bytes(source, 0, _HEADER.size)
        self.count, version = _HEADER.unpack(head)
        if version != VERSION:
            raise FormatError(
                "coreml.blob-header", f"expected blob storage version {VERSION}, found {version}", where=source.name
            )
        self.headers = bytearray(head)

    def blob(self, offset: int, type: MilType, count: int) -> Blob:
        """Locate the blob with metadata at ``offset``, of ``count`` elements.

        Raises ``FormatError``: ``coreml.blob-offset``, ``coreml.blob-sentinel``, ``coreml.blob-dtype``,
        ``coreml.blob-size``, ``coreml.blob-padding``, ``coreml.padding-bits``.
        """
        where = f"{self.source.name}: blob at {offset}"
        blob, code, padding, raw = self._metadata(offset, where)
        if code != type.blob:
            raise FormatError(
                "coreml.blob-dtype",
                f"expected type {type.blob} ({type.name}) as the program says, found {code}",
                where=where,
            )
        if blob.length != type.nbytes(count):
            raise FormatError(
                "coreml.blob-size",
                f"expected {type.nbytes(count)} bytes for {count} of {type.name}, found {blob.length}",
                where=where,
            )
        self.headers += raw
        self._check_padding(blob, type, count, padding, where)
        return blob

    def whole(self, offset: int) -> tuple[Blob, bytes]:
        """Locate a blob of any type; return its metadata as well.

        Raises ``FormatError``: ``coreml.blob-offset``, ``coreml.blob-sentinel``.
        """
        blob, _, _, raw = self._metadata(offset, f"{self.source.name}: blob at {offset}")
        return blob, raw

    def _metadata(self, offset: int, where: str) -> tuple[Blob, int, int, bytes]:
        if not HEADER <= offset <= self.source.size - METADATA:
            raise FormatError(
                "coreml.blob-offset", f"expected metadata within {self.source.size} bytes, found {offset}", where=where
            )
        raw = read_bytes(self.source, offset, METADATA)
        sentinel, code, length, start, padding = _METADATA.unpack(raw[: _METADATA.size])
        if sentinel != SENTINEL:
            raise FormatError(
                "coreml.blob-sentinel", f"expected {SENTINEL:#x} before a blob, found {sentinel:#x}", where=where
            )
        if start < HEADER or start > self.source.size or length > self.source.size - start:
            raise FormatError(
                "coreml.blob-offset",
                f"expected data within {self.source.size} bytes, found {length} at {start}",
                where=where,
            )
        return Blob(start, length), code, padding, raw

    def _check_padding(self, blob: Blob, type: MilType, count: int, declared: int, where: str) -> None:
        """Compare the bits that fill the last byte; they have to be 0, else two files of the same values differ."""
        spare = -count * type.bits % 8
        if type.dtype is None and declared != spare:  # other writers leave the field as it is where nothing is packed
            raise FormatError(
                "coreml.blob-padding",
                f"expected {spare} bits of padding for {count} elements, found {declared}",
                where=where,
            )
        if spare and blob.length:
            check_last_byte(self.last_byte(blob), spare, where)

    def last_byte(self, blob: Blob) -> int:
        """Return the last byte of a blob that is not empty."""
        return read_bytes(self.source, blob.offset + blob.length - 1, 1)[0]


def check_last_byte(last: int, spare: int, where: str) -> None:
    """Refuse set bits behind the last element of a packed stream: ``FormatError`` ``coreml.padding-bits``."""
    if spare and last >> (8 - spare):
        raise FormatError(
            "coreml.padding-bits",
            f"expected the last {spare} bits of the stream to be 0, found {last:#04x}",
            where=where,
        )


def aligned(offset: int) -> int:
    """Round up to where a blob may begin."""
    return (offset + _ROUND) & ~_ROUND


def header(count: int) -> bytes:
    """Return the header of a file of ``count`` blobs."""
    return _HEADER.pack(count, VERSION).ljust(HEADER, b"\0")


def metadata(offset: int, type: MilType, count: int) -> bytes:
    """Return the metadata of ``count`` elements whose metadata begin at ``offset``."""
    padding = -count * type.bits % 8
    return _METADATA.pack(SENTINEL, type.blob, type.nbytes(count), offset + METADATA, padding).ljust(METADATA, b"\0")


def moved_metadata(raw: bytes, offset: int) -> bytes:
    """Return a blob's metadata for its new place, where they begin at ``offset``; other fields as they are."""
    sentinel, code, length, _, padding = _METADATA.unpack(raw[: _METADATA.size])
    return _METADATA.pack(sentinel, code, length, offset + METADATA, padding) + raw[_METADATA.size :]
