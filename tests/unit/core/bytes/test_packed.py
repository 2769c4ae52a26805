"""The encoding ``ingot.packed/1``: round trips, the reference of its document, ranges, and damaged bytes."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest

from ingot.core.bytes import packed
from ingot.core.bytes.encodings import PackedReader
from ingot.core.bytes.record_layout import BYTE, NO_KEY, Field, RecordLayout, Stream, read_layout
from ingot.errors import FormatError
from ingot.model.layouts.affine import AffineLayout
from ingot.model.layouts.ggml import TYPES, GgmlBlocksLayout
from ingot.model.layouts.records import record_layout
from ingot.model.spec import PartSpec, TensorSpec
from tests.support.reference import packed as reference

Array = np.ndarray[Any, np.dtype[Any]]


def block_layout(name: str) -> RecordLayout:
    part = PartSpec("blocks", "u8", None)
    return record_layout(TensorSpec("w", (), "f32", GgmlBlocksLayout.codec, (part,), {"type": name}), part)


def code_layout(bits: int, dtype: str = "u8") -> RecordLayout:
    part = PartSpec("packed_weight", dtype, None)
    return record_layout(TensorSpec("w", (), "f32", AffineLayout.codec, (part,), {"bits": bits}), part)


def part_layout(dtype: str, type: str | None = None) -> RecordLayout:
    part = PartSpec("scales", dtype, None, type)
    return record_layout(TensorSpec("w", (), "f32", "other", (part,)), part)


def skewed(size: int, seed: int = 0) -> bytes:
    """Return bytes whose halves are numbers around 8, as codes of quantized weights are."""
    halves = np.clip(np.random.default_rng(seed).normal(8, 2.5, 2 * size).round(), 0, 15).astype(np.uint8)
    return bytes(halves[::2] | halves[1::2] << 4)


def encode(layout: RecordLayout, data: bytes) -> bytes:
    """Return a stored part."""
    size = packed.content_of(layout)
    contents = [data[start : start + size] for start in range(0, len(data), size)]
    frames = [packed.encode_frame(layout, content) for content in contents]
    table = [(len(frame), packed.checksum(content)) for frame, content in zip(frames, contents, strict=True)]
    return b"".join(frames) + packed.index_of(layout, table)


def reader(stored: bytes, size: int) -> PackedReader:
    return PackedReader(
        lambda offset, length: memoryview(stored)[offset : offset + length], len(stored), size, "part.packed", "w"
    )


def decode(stored: bytes, size: int) -> bytes:
    out = bytearray(size)
    source = reader(stored, size)
    source.readinto(memoryview(out))
    source.finish()
    return bytes(out)


LAYOUTS = {
    **{name: block_layout(name) for name in TYPES},
    **{f"int{bits}": code_layout(bits) for bits in range(1, 9)},
    **{f"int{bits} in words": code_layout(bits, "i32") for bits in (2, 3, 4, 8)},
    **{dtype: part_layout(dtype) for dtype in ("f16", "bf16", "f32", "i32", "u8", "i64")},
    "f8_e4m3fn": part_layout("u8", "f8_e4m3fn"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_keeps_every_byte(name: str) -> None:
    layout = LAYOUTS[name]
    assert read_layout(layout.to_bytes(), "w") == layout
    for records, tail in ((400, 0), (3, layout.record - 1), (0, layout.record - 1), (0, 0)):
        size = records * layout.record + tail
        for data in (Random(1).randbytes(size), skewed(size), bytes(size)):
            stored = encode(layout, data)
            assert decode(stored, size) == data
            assert len(stored) <= packed.bound(size)


@pytest.mark.parametrize("name", ["q4_0", "q4_k", "q5_0", "q6_k", "q8_0", "iq4_xs", "q3_k", "bf16", "int4"])
def test_reference_reads_what_is_written(name: str) -> None:
    layout = LAYOUTS[name]
    size = max(300, 8000 // layout.record) * layout.record + layout.record // 2
    data = skewed(size)
    stored = encode(layout, data)
    assert len(stored) < size + 100  # the index
    assert reference.decode(stored, size) == data


def test_contexts_are_used_and_reference_reads_them() -> None:
    """Codes of blocks with a large scale are small: a table for each kind of block is smaller."""
    layout = LAYOUTS["q4_0"]
    rng = np.random.default_rng(3)
    outlier = rng.random(3000) < 0.5
    codes = np.where(outlier[:, None], rng.integers(7, 10, (3000, 32)), rng.integers(0, 16, (3000, 32))).astype(
        np.uint8
    )
    blocks = np.zeros((3000, 18), np.uint8)
    blocks[:, 1] = np.where(outlier, 40, 30)
    blocks[:, 0] = rng.integers(0, 256, 3000)
    blocks[:, 2:] = codes[:, :16] | codes[:, 16:] << 4
    data = blocks.tobytes()
    stored = encode(layout, data)
    single = encode(replace(layout, streams=tuple(Stream(s.length, s.unit, s.pairs) for s in layout.streams)), data)
    assert len(stored) < 0.95 * len(single)
    assert decode(stored, len(data)) == data == decode(single, len(data))
    assert reference.decode(stored, len(data)) == data


def test_ranges_decode_their_frames_only() -> None:
    layout = LAYOUTS["q4_0"]
    content = packed.content_of(layout)
    data = skewed(3 * content + 100)
    stored = encode(layout, data)
    read: list[tuple[int, int]] = []

    def source(offset: int, length: int) -> memoryview:
        read.append((offset, length))
        return memoryview(stored)[offset : offset + length]

    frames = PackedReader(source, len(stored), len(data), "part.packed", "w")
    read.clear()
    frames.skip(content + 7)
    out = bytearray(1000)
    frames.readinto(memoryview(out))
    frames.readinto(memoryview(out))
    assert out == data[content + 1007 : content + 2007]
    assert len(read) == 1
    frames.skip(content)
    tail = bytearray(len(data) - 2 * content - 2007)
    frames.readinto(memoryview(tail))
    frames.finish()
    assert tail == data[2 * content + 2007 :]


def test_every_flipped_bit_is_noticed() -> None:
    layout = LAYOUTS["q4_1"]
    data = skewed(60 * layout.record)
    stored = encode(layout, data)
    for position in range(len(stored)):
        damaged = bytearray(stored)
        damaged[position] ^= 1 << position % 8
        with pytest.raises(FormatError) as error:
            decode(bytes(damaged), len(data))
        assert error.value.rule == "part.packed"


def test_cut_parts_and_other_sizes_are_refused() -> None:
    layout = LAYOUTS["q8_0"]
    data = skewed(200 * layout.record)
    stored = encode(layout, data)
    for length in (0, 1, 23, 24, 30, len(stored) // 2, len(stored) - 1):
        with pytest.raises(FormatError, match=r"ingot\.packed/1"):
            decode(stored[:length], len(data))
    for size in (0, len(data) - 1, len(data) + 1, 1 << 45):
        with pytest.raises(FormatError, match=r"ingot\.packed/1"):
            reader(stored, size).readinto(memoryview(bytearray(min(size, len(data)))))


@pytest.mark.parametrize(
    ("column", "change"), [(0, 1), (0, -1), (0, 1 << 20), (1, 1)], ids=["more", "less", "large", "checksum"]
)
def test_frames_must_fill_the_part(column: int, change: int) -> None:
    """An index whose own checksum is right, but whose frames are others."""
    layout = LAYOUTS["q4_0"]
    data = skewed(100 * layout.record)
    frame = packed.encode_frame(layout, data)
    entry = [len(frame), packed.checksum(data)]
    assert decode(frame + packed.index_of(layout, [(entry[0], entry[1])]), len(data)) == data
    entry[column] += change
    with pytest.raises(FormatError, match="frame"):
        decode(frame + packed.index_of(layout, [(entry[0], entry[1])]), len(data))


def test_limits_of_contexts_must_ascend() -> None:
    """Contexts of a key are the same for limits in another order, but a content has one form."""
    rng = np.random.default_rng(0)
    low = rng.integers(0, 16, 20_000)
    data = np.stack([low, rng.normal(0, 1 + low * low, 20_000).astype(np.int8)], 1).astype(np.uint8).tobytes()
    frame = bytearray(packed.encode_frame(GOOD, data))
    out = np.empty(len(data), np.uint8)
    packed.decode_frame(GOOD, frame, out, "w")
    assert out.tobytes() == data
    length = int.from_bytes(frame[3:7], "little")  # of the first stream, behind two modes and a number of contexts
    start = 7 + length + 2
    assert frame[start - 1] >= 3
    assert frame[start : start + 2] != frame[start + 2 : start + 4]
    frame[start : start + 4] = frame[start + 2 : start + 4] + frame[start : start + 2]
    with pytest.raises(FormatError, match="ascend"):
        packed.decode_frame(GOOD, frame, out, "w")


GOOD = RecordLayout(2, (Stream(1, 1), Stream(1, 1, False, BYTE, 0)), (Field(0, 1, 1), Field(1, 0, 1)))


@pytest.mark.parametrize(
    "layout",
    [
        replace(GOOD, fields=GOOD.fields[:1]),  # a byte of the record has no position
        replace(GOOD, fields=(Field(0, 1, 1), Field(1, 1, 1))),  # two bytes have the same position
        replace(GOOD, fields=(Field(0, 0, 2), Field(0, 0, 2))),  # every bit twice
        replace(GOOD, fields=(Field(0, 0, 2),)),  # a field in two streams
        replace(GOOD, fields=(Field(0, 1, 1), Field(1, 0, 2))),  # past the record
        replace(GOOD, fields=(Field(0, 9, 1), Field(1, 0, 1))),  # past the streams
        replace(GOOD, fields=(Field(0, 1, 1, 1, 0, 8), Field(1, 0, 1))),  # past a byte
        replace(GOOD, fields=(Field(0, 1, 8, bits=2, side=1), Field(1, 0, 1))),
        replace(GOOD, streams=(Stream(1, 1, False, BYTE, 0), Stream(1, 1))),  # a key of itself
        replace(GOOD, streams=(Stream(1, 1), Stream(1, 1, False, BYTE, 1))),
        replace(GOOD, streams=(Stream(1, 1), Stream(1, 1, False, 6, 0))),  # an unknown key
        replace(GOOD, streams=(Stream(1, 1), Stream(1, 1, False, NO_KEY, 1))),
        replace(GOOD, streams=(Stream(1, 2), Stream(1, 1))),  # half a unit
        replace(GOOD, streams=(Stream(1, 1), Stream(1, 0))),
        replace(GOOD, streams=(Stream(1, 1), Stream(0, 1))),
        replace(GOOD, record=5000),
        RecordLayout(2, (), ()),
    ],
)
def test_hostile_layouts_are_refused(layout: RecordLayout) -> None:
    assert read_layout(GOOD.to_bytes(), "w") == GOOD
    with pytest.raises(FormatError) as error:
        read_layout(layout.to_bytes(), "w")
    assert error.value.rule == "part.packed"
    for cut in range(len(GOOD.to_bytes())):
        with pytest.raises(FormatError, match="layout"):
            read_layout(GOOD.to_bytes()[:cut], "w")


def test_mutants_of_frames_never_pass_or_crash() -> None:
    """Frames without their checksum: each mutant is refused, or fills exactly the content."""
    random = Random(5)
    for name in ("q4_0", "q4_k", "q8_0", "f16", "int4"):
        layout = LAYOUTS[name]
        data = skewed(40 * layout.record + 1)
        frame = packed.encode_frame(layout, data)
        for _ in range(150):
            mutant = bytearray(frame)
            for _ in range(random.randint(1, 4)):
                mutant[random.randrange(min(len(mutant), random.choice((40, len(mutant)))))] = random.randrange(256)
            del mutant[random.choice((len(mutant), len(mutant), random.randrange(len(mutant)))) :]
            out = np.zeros(len(data), np.uint8)
            with suppress(FormatError):
                packed.decode_frame(layout, bytes(mutant), out, "w")


GOLDEN = {
    "q4_0": "3992db15a81ca7a5",
    "q4_k": "e447ca554f248fef",
    "q6_k": "fa78ca6b540da460",
    "q8_0": "fb5c0d64f5da3019",
    "int4": "ecd3c9922043e75f",
    "bf16": "bd2d9fbcbff3b33e",
}


@pytest.mark.parametrize("name", GOLDEN)
def test_written_bytes_stay_the_same(name: str) -> None:
    """Archives are compared by their bytes, so that the encoder's choices may not change unnoticed."""
    layout = LAYOUTS[name]
    random = Random(name)
    size = 5000 // layout.record * layout.record + 3
    data = bytes(sum(random.randrange(4) << 4 * half for half in (0, 1) for _ in range(4)) for _ in range(size))
    assert hashlib.sha256(encode(layout, data)).hexdigest()[:16] == GOLDEN[name]
