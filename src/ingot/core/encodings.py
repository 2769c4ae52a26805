"""Encodings: bytes to bytes on one part (zTensor 1.2 section 1, component ``encoding``).

``zstd`` parts are written as independent frames of ``FRAME`` input bytes each, one after the other. RFC 8878 section
3.1
makes such a sequence one valid zstd stream, so every reader decodes it, while frames can be made and read in parallel
and the output does not depend on how the input arrived.
"""

from __future__ import annotations

from typing import IO, Protocol, cast

import zstandard

from ingot.errors import FormatError, UnsupportedError

FRAME = 4 << 20
LEVEL = 3
# A frame that claims a larger window would make the decoder allocate it; zstd itself writes at most 2**27 without
# --ultra.
MAX_WINDOW = 1 << 27
ENCODINGS = ("raw", "zstd")

Buffer = bytes | bytearray | memoryview


def compress_frame(data: Buffer, level: int = LEVEL) -> bytes:
    """Compress at most ``FRAME`` bytes into one zstd frame that states its content size."""
    return zstandard.ZstdCompressor(level=level, write_content_size=True).compress(data)


def bound(size: int) -> int:
    """Return the most bytes that ``size`` bytes take, cut into frames of ``FRAME``.

    RFC 8878 section 3.1.1: a frame's header takes at most 18 bytes with its magic number, and a block that does not
    shrink is stored raw behind 3 bytes; zstd makes blocks of up to 128 KiB.
    """
    frames, blocks = max(1, -(-size // FRAME)), -(-size // (128 << 10))  # nothing is one empty frame
    return size + 18 * frames + 3 * (blocks + frames)


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
    if encoding not in ENCODINGS:
        raise UnsupportedError(
            f"expected encoding {' or '.join(ENCODINGS)}, found {encoding[:80]!r}", rule="encoding.unknown", where=where
        )
