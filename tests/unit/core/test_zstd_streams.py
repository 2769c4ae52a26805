"""Streams of zstd frames: frames of other writers are read, damaged and hostile streams are refused."""

from __future__ import annotations

import io
from random import Random

import pytest
import zstandard

from ingot.core.bytes import encodings
from ingot.errors import FormatError

CONTENT = Random(2).randbytes(1000) + bytes(300_000) + Random(3).randbytes(5000)
SKIPPABLE = b"\x50\x2a\x4d\x18\x04\0\0\0abcd"


def frame(content: bytes, **options: bool) -> bytes:
    return zstandard.ZstdCompressor(level=1, **options).compress(content)


def read(data: bytes, expected: int) -> bytes:
    reader = encodings.ZstdReader(io.BytesIO(data), expected, "part.zstd", "w")
    out = bytearray(expected)
    for start in range(0, expected, 70_001):
        reader.readinto(memoryview(out)[start : start + 70_001])
    reader.finish()
    return bytes(out)


@pytest.mark.parametrize(
    "stored",
    [
        frame(CONTENT),
        frame(CONTENT, write_checksum=True),
        frame(CONTENT, write_content_size=False),
        zstandard.ZstdCompressor(threads=2).compress(CONTENT),
        frame(CONTENT[:1000], write_checksum=True) + frame(b"") + SKIPPABLE + frame(CONTENT[1000:]) + SKIPPABLE,
        b"".join(frame(CONTENT[start : start + 100]) for start in range(0, len(CONTENT), 100)),
    ],
    ids=["one frame", "checksum", "unknown size", "threads", "many kinds of frames", "small frames"],
)
def test_streams_of_other_writers_are_read(stored: bytes) -> None:
    assert read(stored, len(CONTENT)) == CONTENT
    running = encodings.Decoding("part.zstd", "w")
    for size in (1, 4096):
        running = encodings.Decoding("part.zstd", "w")
        chunks = (memoryview(stored)[start : start + size] for start in range(0, len(stored), size))
        assert b"".join(content for chunk in chunks for content in running.decode(chunk)) == CONTENT


def test_frames_have_the_bytes_that_the_package_zstandard_writes() -> None:
    """Written files stay what they were with the former library."""
    for content in (b"", b"a", CONTENT, Random(4).randbytes(encodings.FRAME)):
        former = zstandard.ZstdCompressor(level=encodings.LEVEL, write_content_size=True)
        assert encodings.compress_frame(content) == former.compress(content)
        former = zstandard.ZstdCompressor(level=encodings.LEVEL, write_content_size=True, write_checksum=True)
        assert encodings.seekable_frame(memoryview(content)) == former.compress(content)


def window_of(log: int) -> bytes:
    """A frame whose header asks for a window of 2**log bytes: magic number, descriptor, window, an empty last block."""
    return b"\x28\xb5\x2f\xfd" + bytes((0, (log - 10) << 3)) + b"\x01\x00\x00"


def test_a_window_of_128_mib_is_the_largest() -> None:
    assert read(window_of(27), 0) == b""
    with pytest.raises(FormatError, match="zstd stream") as caught:
        read(window_of(28), 0)
    assert caught.value.rule == "part.zstd"


@pytest.mark.parametrize(
    "stored",
    [
        frame(CONTENT)[:-1],
        frame(CONTENT, write_checksum=True)[:-4],
        frame(CONTENT, write_checksum=True)[:-4] + b"\0\0\0\0",
        frame(CONTENT) + b"\x28\xb5\x2f",
        frame(CONTENT) + b"trailing",
        frame(CONTENT) + frame(b"x"),
        frame(CONTENT[:-1]),
        b"",
        frame(b"")[:-1] + CONTENT,
    ],
)
def test_other_streams_are_refused(stored: bytes) -> None:
    with pytest.raises(FormatError) as caught:
        read(stored, len(CONTENT))
    assert caught.value.rule == "part.zstd"


@pytest.mark.parametrize(("content", "expected"), [(b"", 0), (b"x", 1 << 20)])
def test_a_stream_of_tiny_frames_is_refused(content: bytes, expected: int) -> None:
    with pytest.raises(FormatError, match="on average"):
        read(frame(content) * 100_000, expected)
