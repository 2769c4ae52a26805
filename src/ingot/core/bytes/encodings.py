"""Encodings: bytes to bytes on one part (zTensor 1.2 section 1, component ``encoding``).

``zstd`` parts are written as independent frames of ``FRAME`` input bytes each, one after the other. RFC 8878 section
3.1 makes such a sequence one valid zstd stream, so all readers decode it. Frames can be written and read in parallel,
and the output does not depend on the sizes of the input buffers.

``zt.zstd-seekable/1`` is the encoding of zTensor's container version 2: frames of equal content size, each with a
checksum, followed by a seek table (zTensor's profile of zstd's seekable format 0.1.0, ``contrib/seekable_format``).

``ingot.packed/1`` is Ingot's entropy coding of packed integers and blocks, in frames too (``core.bytes.packed``).
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from struct import pack, unpack
from typing import Any, Protocol

import numpy as np

from ingot.core.bytes import packed
from ingot.core.bytes.packed import PACKED
from ingot.errors import FormatError, UnsupportedError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

FRAME = 4 << 20
LEVEL = 3
# A frame that claims a larger window would make the decoder allocate it; zstd itself writes at most 2**27 without
# --ultra.
_MAX_WINDOW_LOG = 27
ENCODINGS = ("raw", "zstd", PACKED)
"""Encodings of parts in a ``.zt``."""
SEEKABLE = "zt.zstd-seekable/1"
ENCODED = ("zstd", SEEKABLE, PACKED)
"""Encodings that can be decoded."""
IN_FRAMES = (SEEKABLE, PACKED)
"""Encodings of which a range can be decoded alone; every frame has a checksum."""
SEEKABLE_LEAST = 17
"""Bytes of a seek table without a frame: a skippable frame's header and the table's end."""
MAX_FRAME = 16 << 20
_SKIPPABLE = 0x184D2A5E
_SEEKABLE = 0x8F92EAB1
_WITH_CHECKSUMS = 0x80  # flag of the seek table's descriptor: the table has a column of checksums
_FRAME_HAS_CHECKSUM = 4  # flag of the byte after a frame's magic number (RFC 8878, section 3.1.1.1.1)
_READ_SIZE = 128 << 10
_CONTENT_SIZE = 1 << 20
# Starting a frame costs microseconds: a hostile stream of tiny frames would keep a reader busy for hours.
_MAX_TINY_FRAMES = 4096
_TINY_FRAME = 64

Buffer = bytes | bytearray | memoryview


ZstdError = zstd.ZstdError


def zstd_decompressor() -> zstd.ZstdDecompressor:
    """Return a decompressor of one frame, which refuses frames with a larger window than zstd writes by default."""
    return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: _MAX_WINDOW_LOG})


def compress_frame(data: Buffer, level: int = LEVEL) -> bytes:
    """Compress at most ``FRAME`` bytes into one zstd frame, whose header contains the content size."""
    return zstd.compress(data, options={zstd.CompressionParameter.compression_level: level})


def seekable_frame(data: Buffer, level: int = LEVEL) -> bytes:
    """Compress the content of one frame of a seekable stream."""
    parameter = zstd.CompressionParameter
    return zstd.compress(data, options={parameter.compression_level: level, parameter.checksum_flag: 1})


def seek_table(frames: Sequence[tuple[int, int]]) -> bytes:
    """Return the seek table for frames, given as pairs of compressed and decompressed size."""
    table = np.array(frames, "<u4").reshape(-1, 2).tobytes()
    return pack("<II", _SKIPPABLE, len(table) + 9) + table + pack("<IBI", len(frames), 0, _SEEKABLE)


def bound(size: int, encoding: str = "zstd") -> int:
    """Return the largest possible size of ``size`` bytes after compression in frames of ``FRAME`` bytes.

    The result includes the seek table of ``zt.zstd-seekable/1``, or the index of ``ingot.packed/1``.

    Source: RFC 8878 section 3.1.1. A frame's header has at most 18 bytes with its magic number. An incompressible block
    is stored raw after 3 bytes. zstd writes blocks of up to 128 KiB.
    """
    if encoding == PACKED:
        return packed.bound(size)
    # empty input is one empty frame
    frames = max(1, -(-size // FRAME))
    blocks = -(-size // (128 << 10))
    table = SEEKABLE_LEAST + (8 + 4) * frames if encoding == SEEKABLE else 0  # sizes, and a checksum in each frame
    return size + 18 * frames + 3 * (blocks + frames) + table


class ReadsAt(Protocol):
    """A function that returns stored bytes at an offset."""

    def __call__(self, offset: int, length: int, /) -> Buffer: ...


class FramesReader(ABC):
    """Decodes a stream of frames of equal content size; skipped frames are not decoded.

    A table in the stream lists the sizes of the frames. The reader needs memory for one frame and for the table, whose
    size is bounded by the size of the stream.

    Parameters
    ----------
    read : ReadsAt
        Returns stored bytes.
    length : int
        The stored bytes of the stream.
    expected : int
        The decoded bytes; another number is an error.
    rule, location : str
        The rule and location of the ``FormatError`` for an invalid stream.
    """

    def __init__(self, read: ReadsAt, length: int, expected: int, rule: str, location: str) -> None:
        self._read = read
        self._rule = rule
        self._location = location
        self._expected = expected
        self._position = 0
        self._cached: tuple[int, memoryview] | None = None
        sizes = self._open(length)
        self._starts = np.concatenate([[0], np.cumsum(sizes[:, 0])])
        self._content = max(1, int(sizes[0, 1])) if len(sizes) else 1

    @abstractmethod
    def _open(self, length: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Read the table; return the numbers of stored and decoded bytes of every frame.

        All frames have the same number of decoded bytes, except that the last one may have fewer.
        """

    @abstractmethod
    def _decode(self, index: int, data: Buffer, out: memoryview) -> None:
        """Decode a frame into ``out`` and check it."""

    def _refuse(self, message: str) -> FormatError:
        return FormatError(self._rule, message, where=self._location)

    def readinto(self, out: memoryview) -> None:
        """Fill ``out`` completely with the next decoded bytes."""
        if self._position + out.nbytes > self._expected:
            raise self._refuse(f"expected {self._expected} decoded bytes, found a read past them")
        while out.nbytes:
            index, within = divmod(self._position, self._content)
            size = min(self._content, self._expected - index * self._content)
            if not within and out.nbytes >= size:
                self._decode(index, self._stored(index), out[:size])
                count = size
            else:
                frame = self._frame(index, size)[within : within + out.nbytes]
                count = frame.nbytes
                out[:count] = frame
            self._position += count
            out = out[count:]

    def skip(self, count: int) -> None:
        """Skip the next ``count`` decoded bytes."""
        self._position += count

    def finish(self) -> None:
        """Raise ``FormatError`` unless all expected bytes were decoded."""
        if self._position != self._expected:
            raise self._refuse(f"expected {self._expected} decoded bytes, found {self._position}")

    def _stored(self, index: int) -> Buffer:
        start = int(self._starts[index])
        return self._read(start, int(self._starts[index + 1]) - start)

    def _frame(self, index: int, size: int) -> memoryview:
        if self._cached is None or self._cached[0] != index:
            out = np.empty(size, np.uint8).data
            self._decode(index, self._stored(index), out)
            self._cached = index, out
        return self._cached[1]


class SeekableReader(FramesReader):
    """A reader of the encoding ``zt.zstd-seekable/1``."""

    def _open(self, length: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        if length < SEEKABLE_LEAST:
            raise self._refuse(f"expected a seek table of at least {SEEKABLE_LEAST} bytes, found {length}")
        count, descriptor, magic = unpack("<IBI", self._read(length - 9, 9))
        if magic != _SEEKABLE or descriptor & ~_WITH_CHECKSUMS:
            raise self._refuse("the stream does not end with a seek table")
        width = 12 if descriptor & _WITH_CHECKSUMS else 8
        start = length - SEEKABLE_LEAST - count * width
        if start < 0 or unpack("<II", self._read(start, 8)) != (_SKIPPABLE, count * width + 9):
            raise self._refuse(f"the seek table of {count} frames has no valid header")
        columns = np.frombuffer(self._read(start + 8, count * width), "<u4").reshape(count, width // 4)
        sizes = columns[:, :2].astype(np.int64)
        if int(sizes[:, 0].sum()) != start or int(sizes[:, 1].sum()) != self._expected:
            raise self._refuse(
                f"the sizes in the seek table do not add up to {start} bytes with {self._expected} decoded"
            )
        if count and (int(sizes[:, 1].max()) > MAX_FRAME or bool((sizes[:-1, 1] != sizes[0, 1]).any())):
            raise self._refuse(f"expected frames with equal content sizes of at most {MAX_FRAME} bytes")
        if count > 1 and not 0 < int(sizes[-1, 1]) <= int(sizes[0, 1]):
            raise self._refuse("expected a last frame that is not empty, and not larger than the others")
        return sizes

    def _decode(self, index: int, data: Buffer, out: memoryview) -> None:
        data = bytes(data)
        size = out.nbytes
        try:
            declared = zstd.get_frame_info(data).decompressed_size
            if not data[4] & _FRAME_HAS_CHECKSUM or declared not in (size, None):
                raise self._refuse(f"expected a frame of {size} bytes with a checksum")
            decoder = zstd_decompressor()
            content = decoder.decompress(data, size + 1)  # a byte more than expected shows a frame that is too long
        except zstd.ZstdError as error:
            raise self._refuse(f"not a valid zstd frame: {error}") from error
        if len(content) != size or not decoder.eof or decoder.unused_data:
            raise self._refuse(f"expected one frame of {size} bytes, found {len(content)} or more bytes around its end")
        out[:] = content


class PackedReader(FramesReader):
    """A reader of the encoding ``ingot.packed/1``; every frame is compared with its checksum."""

    def _open(self, length: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        self._index = packed.read_index(self._read, length, self._expected, self._location)
        sizes = np.full((len(self._index.sizes), 2), self._index.content, np.int64)
        sizes[:, 0] = self._index.sizes
        return sizes

    def _decode(self, index: int, data: Buffer, out: memoryview) -> None:
        packed.decode_checked(self._index, index, data, np.frombuffer(out, np.uint8), self._location)


class _FrameDecoder:
    """Decodes a stream of frames whose stored bytes arrive in chunks.

    Raises ``FormatError`` with ``rule`` if the stream is invalid, or consists of tiny frames.
    """

    def __init__(self, rule: str, location: str) -> None:
        self._rule = rule
        self._location = location
        self._frame: zstd.ZstdDecompressor | None = None
        self._frames = 0
        self._produced = 0

    @property
    def is_complete(self) -> bool:
        """Whether the stored bytes so far end at the end of a frame."""
        return self._frame is None or self._frame.eof

    def decode(self, data: Buffer, max_bytes: int) -> bytes:
        """Return at most ``max_bytes`` of decompressed content; empty if more stored bytes are needed.

        ``data`` are the next stored bytes. The caller passes them once, and then empty bytes until the result is empty.
        """
        while True:
            if self._frame is None or self._frame.eof:
                data = data or (self._frame.unused_data if self._frame else b"")
                if not data:
                    return b""
                self._frame = self._next_frame()
            elif not data and self._frame.needs_input:
                return b""
            try:
                content = self._frame.decompress(data, max_bytes)
            except zstd.ZstdError as error:
                raise FormatError(self._rule, f"not a valid zstd stream: {error}", where=self._location) from error
            data = b""
            if content:
                self._produced += len(content)
                return content

    def _next_frame(self) -> zstd.ZstdDecompressor:
        self._frames += 1
        if self._frames > _MAX_TINY_FRAMES and self._produced < self._frames * _TINY_FRAME:
            raise FormatError(
                self._rule,
                f"expected frames of at least {_TINY_FRAME} bytes on average, found {self._frames} frames of "
                f"{self._produced} bytes in all",
                where=self._location,
            )
        return zstd_decompressor()


class Decoding:
    """Decodes a stream of frames while its bytes arrive."""

    def __init__(self, rule: str, location: str) -> None:
        self._frames = _FrameDecoder(rule, location)

    def decode(self, data: memoryview) -> Iterator[bytes]:
        """Yield the content of the next stored bytes; raise ``FormatError`` if they are not a valid stream."""
        content = self._frames.decode(data, _CONTENT_SIZE)
        while content:
            yield content
            content = self._frames.decode(b"", _CONTENT_SIZE)


class ReadsBytes(Protocol):
    """A source of stored bytes in order: ``read(size)`` returns at most ``size`` bytes, and no bytes at the end."""

    def read(self, size: int = -1, /) -> bytes: ...


class ZstdReader:
    """Decompresses a zstd stream of one or more frames, in order, into buffers of the caller.

    Memory is bounded by zstd's window (at most 128 MiB), whatever the stream declares, because output is written only
    into the caller's buffers.

    Parameters
    ----------
    source : ReadsBytes
        The stored bytes in order.
    expected : int
        The decoded bytes (``uncompressed_length``); another number is an error.
    rule, location : str
        The rule and location of the ``FormatError`` for an invalid stream, a window past 128 MiB, or a wrong length.
    """

    def __init__(self, source: ReadsBytes, expected: int, rule: str, location: str) -> None:
        self._source = source
        self._frames = _FrameDecoder(rule, location)
        self._expected = expected
        self._produced = 0
        self._rule = rule
        self._location = location

    def readinto(self, out: memoryview) -> None:
        """Fill ``out`` completely with the next decompressed bytes."""
        filled = 0
        while filled < out.nbytes:
            content = self._next(min(out.nbytes - filled, _READ_SIZE))
            if not content:
                raise FormatError(
                    self._rule,
                    f"expected {self._expected} decompressed bytes, found {self._produced + filled}",
                    where=self._location,
                )
            out[filled : filled + len(content)] = content
            filled += len(content)
        self._produced += filled

    def finish(self) -> None:
        """Raise ``FormatError`` unless exactly the expected bytes were decompressed, no bytes follow, and the last
        frame is complete.
        """
        if self._produced != self._expected or self._next(1):
            raise FormatError(
                self._rule,
                f"expected {self._expected} decompressed bytes, found a different number",
                where=self._location,
            )
        if not self._frames.is_complete:
            raise FormatError(
                self._rule, "expected a complete zstd frame, found one that is cut off", where=self._location
            )

    def _next(self, max_bytes: int) -> bytes:
        content = self._frames.decode(b"", max_bytes)
        while not content and (data := self._source.read(_READ_SIZE)):
            content = self._frames.decode(data, max_bytes)
        return content


def require(encoding: str, location: str) -> None:
    """Raise ``UnsupportedError`` ``encoding.unknown`` if Ingot cannot decode an encoding."""
    if encoding not in ENCODED:
        raise UnsupportedError(
            f"expected encoding {', '.join(('raw', *ENCODED))}, found {encoding[:80]!r}",
            rule="encoding.unknown",
            where=location,
        )
