"""Encodings: bytes to bytes on one part (zTensor 1.2 section 1, component ``encoding``).

``zstd`` parts are written as independent frames of ``FRAME`` input bytes each, one after the other. RFC 8878 section
3.1 makes such a sequence one valid zstd stream, so every reader decodes it, while frames can be made and read in
parallel and the output does not depend on how the input arrived.

``zt.zstd-seekable/1`` is the encoding of zTensor's container version 2: frames of equal content with a checksum each,
and a seek table behind them (zstd's seekable format 0.1.0, ``contrib/seekable_format``; zTensor's profile of it).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from struct import pack, unpack
from typing import IO, Any, Protocol, cast

import numpy as np
import zstandard

from ingot.errors import FormatError, UnsupportedError

FRAME = 4 << 20
LEVEL = 3
# A frame that claims a larger window would make the decoder allocate it; zstd itself writes at most 2**27 without
# --ultra.
MAX_WINDOW = 1 << 27
ENCODINGS = ("raw", "zstd")
SEEKABLE = "zt.zstd-seekable/1"
ENCODED = ("zstd", SEEKABLE)
"""Encodings that can be decoded."""
SEEKABLE_LEAST = 17
"""Bytes of a seek table without a frame: a skippable frame's header and the table's end."""
MAX_FRAME = 16 << 20
_SKIPPABLE, _SEEKABLE = 0x184D2A5E, 0x8F92EAB1
_WITH_CHECKSUMS = 0x80  # of the descriptor: a column of checksums beside sizes

Buffer = bytes | bytearray | memoryview


def compress_frame(data: Buffer, level: int = LEVEL) -> bytes:
    """Compress at most ``FRAME`` bytes into one zstd frame that states its content size."""
    return zstandard.ZstdCompressor(level=level, write_content_size=True).compress(data)


def seekable_frame(data: Buffer, level: int = LEVEL) -> bytes:
    """Compress the content of one frame of a seekable stream."""
    return zstandard.ZstdCompressor(level=level, write_content_size=True, write_checksum=True).compress(data)


def seek_table(frames: Sequence[tuple[int, int]]) -> bytes:
    """Return what stands behind frames of these sizes, compressed and not."""
    table = np.array(frames, "<u4").reshape(-1, 2).tobytes()
    return pack("<II", _SKIPPABLE, len(table) + 9) + table + pack("<IBI", len(frames), 0, _SEEKABLE)


def bound(size: int, encoding: str = "zstd") -> int:
    """Return the most bytes that ``size`` bytes take, cut into frames of ``FRAME``, and with their seek table.

    RFC 8878 section 3.1.1: a frame's header takes at most 18 bytes with its magic number, and a block that does not
    shrink is stored raw behind 3 bytes; zstd makes blocks of up to 128 KiB.
    """
    frames, blocks = max(1, -(-size // FRAME)), -(-size // (128 << 10))  # nothing is one empty frame
    table = SEEKABLE_LEAST + (8 + 4) * frames if encoding == SEEKABLE else 0  # sizes, and a checksum in each frame
    return size + 18 * frames + 3 * (blocks + frames) + table


class ReadsAt(Protocol):
    """What a seekable stream is read from: stored bytes by their position."""

    def __call__(self, offset: int, length: int, /) -> Buffer: ...


class SeekableReader:
    """Reading of a seekable stream, frame by frame; a frame that is passed over is not decoded.

    Memory is that of one frame and the seek table, whose size is bounded by that of the stream.

    Parameters
    ----------
    read : ReadsAt
        Gives stored bytes.
    length, expected : int
        Of the stream, and of what it decodes to: another number is refused.
    rule, where : str
        For the ``FormatError`` of a stream that is not what the profile asks for.
    """

    def __init__(self, read: ReadsAt, length: int, expected: int, rule: str, where: str) -> None:
        self._read, self._rule, self._where = read, rule, where
        self._sizes = self._table(length, expected)
        self._starts = np.cumsum(self._sizes[:, 0]) - self._sizes[:, 0]
        self._content = max(1, int(self._sizes[0, 1])) if len(self._sizes) else 1
        self._expected, self._position = expected, 0
        self._held: tuple[int, memoryview] | None = None
        self._context = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW)

    def _refuse(self, message: str) -> FormatError:
        return FormatError(self._rule, message, where=self._where)

    def _table(self, length: int, expected: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        if length < SEEKABLE_LEAST:
            raise self._refuse(f"expected a seek table of at least {SEEKABLE_LEAST} bytes, found {length}")
        count, descriptor, magic = unpack("<IBI", self._read(length - 9, 9))
        if magic != _SEEKABLE or descriptor & ~_WITH_CHECKSUMS:
            raise self._refuse("expected the end of a seek table, found other bytes")
        width = 12 if descriptor & _WITH_CHECKSUMS else 8
        start = length - SEEKABLE_LEAST - count * width
        if start < 0 or unpack("<II", self._read(start, 8)) != (_SKIPPABLE, count * width + 9):
            raise self._refuse(f"expected a seek table of {count} frames, found other bytes where it begins")
        columns = np.frombuffer(self._read(start + 8, count * width), "<u4").reshape(count, width // 4)
        sizes = columns[:, :2].astype(np.int64)
        if int(sizes[:, 0].sum()) != start or int(sizes[:, 1].sum()) != expected:
            raise self._refuse(f"expected frames of {start} bytes that hold {expected}, found others in the seek table")
        if count and (int(sizes[:, 1].max()) > MAX_FRAME or bool((sizes[:-1, 1] != sizes[0, 1]).any())):
            raise self._refuse(f"expected frames of equal content, of at most {MAX_FRAME} bytes; found others")
        if count > 1 and not 0 < int(sizes[-1, 1]) <= int(sizes[0, 1]):
            raise self._refuse("expected a last frame of no more content than the others, and of some")
        return sizes

    def readinto(self, out: memoryview) -> None:
        """Fill ``out`` completely with the next decoded bytes."""
        if self._position + out.nbytes > self._expected:
            raise self._refuse(f"expected {self._expected} decoded bytes, found a read past them")
        while out.nbytes:
            index, within = divmod(self._position, self._content)
            frame = self._frame(index)[within : within + out.nbytes]
            out[: frame.nbytes] = frame
            self._position += frame.nbytes
            out = out[frame.nbytes :]

    def skip(self, count: int) -> None:
        """Pass over the next decoded bytes."""
        self._position += count

    def finish(self) -> None:
        """Check that everything expected was read."""
        if self._position != self._expected:
            raise self._refuse(f"expected {self._expected} decoded bytes, found {self._position}")

    def _frame(self, index: int) -> memoryview:
        if self._held is None or self._held[0] != index:
            data = self._read(int(self._starts[index]), int(self._sizes[index, 0]))
            self._held = index, memoryview(self._decoded(bytes(data), int(self._sizes[index, 1])))
        return self._held[1]

    def _decoded(self, data: bytes, size: int) -> bytes:
        try:
            about = zstandard.get_frame_parameters(data)
            # zstandard allocates what a frame says of itself, whatever it is allowed.
            if not about.has_checksum or about.content_size not in (size, zstandard.CONTENTSIZE_UNKNOWN):
                raise self._refuse(f"expected a frame of {size} bytes with a checksum, found another")
            content = self._context.decompress(data, max_output_size=size, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise self._refuse(f"not a valid zstd frame: {error}") from error
        if len(content) != size:
            raise self._refuse(f"expected {size} bytes in a frame, found {len(content)}")
        return content


class Decoding:
    """Decodes a stream of frames as its bytes come."""

    _PIECE = 2048  # of stored bytes: 64 MiB at most when decoded

    def __init__(self, rule: str, where: str) -> None:
        context = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW)
        self._running = context.decompressobj(read_across_frames=True)
        self._rule, self._where = rule, where

    def pieces(self, data: memoryview) -> Iterator[bytes]:
        """Yield what the next stored bytes decode to; raises ``FormatError`` where they are no such stream."""
        try:
            for start in range(0, data.nbytes, self._PIECE):
                yield self._running.decompress(data[start : start + self._PIECE])
        except zstandard.ZstdError as error:
            raise FormatError(self._rule, f"not a valid zstd stream: {error}", where=self._where) from error


class ReadsBytes(Protocol):
    """What zstandard needs of a source: ``read(size)``, empty at the end."""

    def read(self, size: int = -1, /) -> bytes: ...


class ZstdReader:
    """Sequential decompression of a zstd stream of one or more frames into buffers of the caller.

    Memory is bounded by the window (at most ``MAX_WINDOW``), whatever the stream claims: output goes only where the
    caller made room for it, and the caller sized that by a checked ``uncompressed_length``.

    Parameters
    ----------
    source : ReadsBytes
        The stored bytes in order.
    expected : int
        ``uncompressed_length``; more or fewer decoded bytes are refused.
    rule, where : str
        For the ``FormatError`` of a bad stream, a window past ``MAX_WINDOW``, or a wrong length.
    """

    def __init__(self, source: ReadsBytes, expected: int, rule: str, where: str) -> None:
        context = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW)
        self._reader = context.stream_reader(
            cast("IO[bytes]", source), read_size=1 << 18, read_across_frames=True, closefd=False
        )
        self._expected, self._produced = expected, 0
        self._rule, self._where = rule, where

    def readinto(self, out: memoryview) -> None:
        """Fill ``out`` completely with the next decompressed bytes."""
        filled = 0
        while filled < out.nbytes:
            count = self._fill(out[filled:])
            if count == 0:
                raise FormatError(
                    self._rule,
                    f"expected {self._expected} decompressed bytes, found {self._produced + filled}",
                    where=self._where,
                )
            filled += count
        self._produced += filled

    def finish(self) -> None:
        """Check that everything expected was read and nothing follows."""
        if self._produced != self._expected or self._fill(memoryview(bytearray(1))):
            raise FormatError(
                self._rule,
                f"expected exactly {self._expected} decompressed bytes, found another number",
                where=self._where,
            )

    def _fill(self, out: memoryview) -> int:
        try:
            return int(self._reader.readinto(out))
        except zstandard.ZstdError as error:
            raise FormatError(self._rule, f"not a valid zstd stream: {error}", where=self._where) from error


def require(encoding: str, where: str) -> None:
    """Refuse an encoding that Ingot does not know."""
    if encoding not in ENCODED:
        raise UnsupportedError(
            f"expected encoding {', '.join(('raw', *ENCODED))}, found {encoding[:80]!r}",
            rule="encoding.unknown",
            where=where,
        )
