"""Version 2 of Core ML's blob storage: the file ``weights/weight.bin``.

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
    """The location of a blob's data: the ``offset`` of the data, and their ``length`` in bytes."""

    offset: int
    length: int


class BlobFile:
    """A reader of one weight file; it reads only the header and the requested metadata.

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
        """Return the blob of ``count`` elements whose metadata are at ``offset``.

        Raises ``FormatError``: ``coreml.blob-offset``, ``coreml.blob-sentinel``, ``coreml.blob-dtype``,
        ``coreml.blob-size``, ``coreml.blob-padding``, ``coreml.padding-bits``.
        """
        location = f"{self.source.name}: blob at {offset}"
        blob, code, padding, raw = self._metadata(offset, location)
        if code != type.blob:
            raise FormatError(
                "coreml.blob-dtype",
                f"expected type {type.blob} ({type.name}), which the program declares, found {code}",
                where=location,
            )
        if blob.length != type.nbytes(count):
            raise FormatError(
                "coreml.blob-size",
                f"expected {type.nbytes(count)} bytes for {count} of {type.name}, found {blob.length}",
                where=location,
            )
        self.headers += raw
        self._check_padding(blob, type, count, padding, location)
        return blob

    def blob_of_any_type(self, offset: int) -> tuple[Blob, bytes]:
        """Return a blob and its metadata without checking its type.

        Raises ``FormatError``: ``coreml.blob-offset``, ``coreml.blob-sentinel``.
        """
        blob, _, _, raw = self._metadata(offset, f"{self.source.name}: blob at {offset}")
        return blob, raw

    def _metadata(self, offset: int, location: str) -> tuple[Blob, int, int, bytes]:
        if not HEADER <= offset <= self.source.size - METADATA:
            raise FormatError(
                "coreml.blob-offset",
                f"expected metadata within {self.source.size} bytes, found {offset}",
                where=location,
            )
        raw = read_bytes(self.source, offset, METADATA)
        sentinel, code, length, start, padding = _METADATA.unpack(raw[: _METADATA.size])
        if sentinel != SENTINEL:
            raise FormatError(
                "coreml.blob-sentinel", f"expected {SENTINEL:#x} before a blob, found {sentinel:#x}", where=location
            )
        if start < HEADER or start > self.source.size or length > self.source.size - start:
            raise FormatError(
                "coreml.blob-offset",
                f"expected data within {self.source.size} bytes, found {length} at {start}",
                where=location,
            )
        return Blob(start, length), code, padding, raw

    def _check_padding(self, blob: Blob, type: MilType, count: int, declared: int, location: str) -> None:
        """Check that the padding bits of the last byte are 0, because equal values must give equal files."""
        spare = -count * type.bits % 8
        # Other writers leave the field undefined for types of complete bytes
        if type.dtype is None and declared != spare:
            raise FormatError(
                "coreml.blob-padding",
                f"expected {spare} bits of padding for {count} elements, found {declared}",
                where=location,
            )
        if spare and blob.length:
            check_last_byte(self.last_byte(blob), spare, location)

    def last_byte(self, blob: Blob) -> int:
        """Return the last byte of a blob that is not empty."""
        return read_bytes(self.source, blob.offset + blob.length - 1, 1)[0]


def check_last_byte(last: int, spare: int, location: str) -> None:
    """Raise ``FormatError`` ``coreml.padding-bits`` if bits after the last element of a packed stream are set."""
    if spare and last >> (8 - spare):
        raise FormatError(
            "coreml.padding-bits",
            f"expected the last {spare} bits of the stream to be 0, found {last:#04x}",
            where=location,
        )


def align(offset: int) -> int:
    """Return the next offset at which a blob may begin."""
    return (offset + _ROUND) & ~_ROUND


def header(count: int) -> bytes:
    """Return the header of a file of ``count`` blobs."""
    return _HEADER.pack(count, VERSION).ljust(HEADER, b"\0")


def metadata(offset: int, type: MilType, count: int) -> bytes:
    """Return the metadata of a blob with ``count`` elements; the metadata begin at ``offset``."""
    padding = -count * type.bits % 8
    return _METADATA.pack(SENTINEL, type.blob, type.nbytes(count), offset + METADATA, padding).ljust(METADATA, b"\0")


def relocate_metadata(raw: bytes, offset: int) -> bytes:
    """Return a blob's metadata with a new ``offset`` at which they begin; other fields are unchanged."""
    sentinel, code, length, _, padding = _METADATA.unpack(raw[: _METADATA.size])
    return _METADATA.pack(sentinel, code, length, offset + METADATA, padding) + raw[_METADATA.size :]
