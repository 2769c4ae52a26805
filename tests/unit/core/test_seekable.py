"""Seekable streams: frames are read where they are asked for, and a stream that is none is refused."""

from __future__ import annotations

from random import Random

import pytest

from ingot.core.bytes.encodings import SeekableReader, seek_table, seekable_frame
from ingot.errors import FormatError

CONTENT = Random(1).randbytes(2500)


def stream(*contents: bytes) -> bytes:
    frames = [seekable_frame(content) for content in contents]
    sizes = [(len(frame), len(content)) for frame, content in zip(frames, contents, strict=True)]
    return b"".join(frames) + seek_table(sizes)


def reader(data: bytes, expected: int) -> SeekableReader:
    return SeekableReader(lambda offset, length: data[offset : offset + length], len(data), expected, "rule", "here")


def taken(found: SeekableReader, count: int) -> bytes:
    out = bytearray(count)
    found.readinto(memoryview(out))
    return bytes(out)


def test_pieces_are_read_across_frames_and_skipped() -> None:
    found = reader(stream(CONTENT[:1000], CONTENT[1000:2000], CONTENT[2000:]), 2500)
    assert taken(found, 990) == CONTENT[:990]
    found.skip(20)
    assert taken(found, 1200) == CONTENT[1010:2210]
    found.skip(290)
    found.finish()


def test_a_frame_that_is_skipped_is_not_decoded() -> None:
    data = bytearray(stream(CONTENT[:1000], CONTENT[1000:2000]))
    data[100] ^= 1
    found = reader(bytes(data), 2000)
    found.skip(1000)
    assert taken(found, 1000) == CONTENT[1000:2000]
    with pytest.raises(FormatError):
        taken(reader(bytes(data), 2000), 1)


@pytest.mark.parametrize("contents", [(), (b"",), (CONTENT[:1000],)])
def test_a_read_past_the_end_is_refused(contents: tuple[bytes, ...]) -> None:
    found = reader(stream(*contents), sum(map(len, contents)))
    assert taken(found, sum(map(len, contents))) == b"".join(contents)
    with pytest.raises(FormatError):
        taken(found, 1)


@pytest.mark.parametrize(
    ("contents", "expected"),
    [
        pytest.param((CONTENT[:10], CONTENT[:20]), 30, id="a last frame that is larger"),
        pytest.param((CONTENT[:10], CONTENT[:9], CONTENT[:10]), 29, id="frames of different content"),
        pytest.param((CONTENT[:10], b""), 10, id="a last frame of none"),
        pytest.param((CONTENT[:10],), 11, id="another length"),
    ],
)
def test_tables_that_no_writer_makes_are_refused(contents: tuple[bytes, ...], expected: int) -> None:
    with pytest.raises(FormatError):
        reader(stream(*contents), expected)


@pytest.mark.parametrize("at", [-1, -5, -9, -17, -18])
def test_a_table_that_is_damaged_is_refused(at: int) -> None:
    data = bytearray(stream(CONTENT[:1000]))
    data[at] ^= 0x81
    with pytest.raises(FormatError):
        taken(reader(bytes(data), 1000), 1000)
