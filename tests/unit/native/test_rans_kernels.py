"""rANS of float_entropy, in which large chunks of level max are: against the reference, by hand, damaged."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest

from ingot.core.numeric.dtypes import numpy_dtype
from ingot.core.runtime import native
from tests.support.reference import float_entropy as reference

Array = np.ndarray[Any, np.dtype[Any]]
CHUNK = 1 << 17


def encode(words: Array, *, joint: bool) -> Array:
    """Return the bytes of one chunk of level max."""
    sizes = np.empty(1, np.uint32)
    out = np.full(words.dtype.itemsize * (words.size + 1) + 64, 0xA5, np.uint8)
    total = native.kernels.entropy_encode(words, CHUNK, True, joint, out[:-64], sizes)
    assert total == sizes[0]
    assert (out[-64:] == 0xA5).all()
    return out[:total]


def decode(planes: Array, out: Array) -> int:
    """Decode into the middle of a larger buffer: what lies around must stay."""
    guarded = np.full(out.nbytes + 256, 0x5A, np.uint8)
    inner = guarded[128 : 128 + out.nbytes].view(out.dtype)
    status, _ = native.kernels.entropy_decode(planes, np.array([planes.size], np.uint32), CHUNK, inner)
    assert (guarded[:128] == 0x5A).all()
    assert (guarded[128 + out.nbytes :] == 0x5A).all()
    out[...] = inner
    return int(status)


def everywhere() -> Iterator[str]:
    """Every instruction set in turn."""
    before = native.isa()
    try:
        for isa in native.available_isas():
            native.set_isa(isa)
            yield isa
    finally:
        native.set_isa(before)


def weights(name: str, count: int, scale: float = 0.02) -> Array:
    rng = np.random.default_rng(count)
    values = (rng.standard_normal(count) * scale).astype(np.float32).astype(numpy_dtype(name))
    return values.view(f"u{values.dtype.itemsize}")


ONE_RANGE = b"\x05\x07\x00\x07\x00\x90\x00"  # rANS of symbol 7 alone
TWO_RANGES = b"\x05\x00\x00\x01\x00\x88\x00\x88\x00"  # of 0 and 1, one bit each


def states(*numbers: int, words: int = 0, rest: int = 0x10000) -> bytes:
    """Head of a rANS payload: ``numbers`` are the first states, ``rest`` all others."""
    all_states = [*numbers, *[rest] * (32 - len(numbers))]
    return words.to_bytes(3, "little") + b"".join(number.to_bytes(4, "little") for number in all_states)


@pytest.mark.parametrize(
    ("data", "count", "status"),
    [
        (ONE_RANGE + states(), 8, 0),
        (ONE_RANGE + states(), 300, 0),
        (TWO_RANGES + states(), 8, 0),
        (TWO_RANGES + states(0x10800), 8, 0),  # the first is 1
        (TWO_RANGES + states(0x10001), 8, 3),  # a state that does not end at 0
        (TWO_RANGES + states(rest=0x10001), 100, 3),
        (ONE_RANGE + states(*[0x10000] * 8, 0x10001), 8, 3),  # one that nothing is of
        (ONE_RANGE + states(0xFFFF), 8, 3),  # a state that is too small
        (ONE_RANGE + states()[:-1], 8, 3),  # cut off
        (ONE_RANGE + states(words=1), 8, 3),  # no word
        (ONE_RANGE + states(words=1) + b"\0\0", 8, 3),  # a word that nobody takes
        (ONE_RANGE + states() + b"\0", 8, 1),  # bytes behind
        (TWO_RANGES + states(), 65, 3),  # words that are missing
        (TWO_RANGES + states(words=1) + b"\0\0", 1000, 3),  # most of them
        (TWO_RANGES + states(words=40) + bytes(80), 1000, 3),
        (b"\x05", 8, 2),  # no table
        (b"\x05\x00\x00\x00\x01" + bytes(299), 8, 2),  # symbols past 255
        (b"\x05\x00\x00\x00\x00\x8f\xff" + states(), 8, 2),  # too few
        (b"\x05\x00\x00\x00\x00\xa0\x00" + states(), 8, 2),  # too many
    ],
)
def test_ranges_by_hand(data: bytes, count: int, status: int) -> None:
    for isa in everywhere():
        assert decode(np.frombuffer(data, np.uint8), np.empty(count, np.uint8)) == status, isa


def test_joint_ranges_have_at_most_256_symbols() -> None:
    table = b"\x00\x00\x00\x01" + b"\x0f" * 256 + b"\x81\x00"  # 257 of them
    data = np.frombuffer(b"\x06\x06" + bytes(6) + table + states(), np.uint8)
    assert decode(data, np.empty(8, np.uint16)) == 2


def ranged(count: int) -> dict[str, Array]:
    """Words that rANS takes: joint planes, single planes, one symbol nearly alone, few bits, and up to 128 symbols."""
    rng = np.random.default_rng(count)
    return {
        "bf16": weights("bf16", count),
        "f32": weights("f32", count),
        "f8": weights("f8_e4m3fn", count),
        "nearly one": (rng.random(count) < 1e-4).astype(np.uint8) * np.uint8(9),
        "128 symbols": np.where(rng.random(count) < 0.8, 5, rng.integers(0, 128, count)).astype(np.uint8),
        "129 symbols": np.where(rng.random(count) < 0.8, 5, rng.integers(0, 129, count)).astype(np.uint8),
        "bf16 and zeros": np.where(rng.random(count) < 0.1, 0, weights("bf16", count)),
    }


RANGED = ("bf16", "f32", "f8", "nearly one", "128 symbols", "129 symbols", "bf16 and zeros")


@cache  # it takes its time, and is the same for every instruction set
def of_reference(name: str, count: int) -> bytes:
    """What the reference writes, once it has read that again."""
    words = ranged(count)[name]
    sizes, planes = reference.encode(words, CHUNK, max=True, joint=words.itemsize in (2, 4))
    back = reference.decode(sizes, planes, CHUNK, count, words.itemsize)
    assert back.tobytes() == words.tobytes()
    return planes


@pytest.mark.parametrize("name", RANGED)
def test_large_chunks_are_by_rans_and_as_the_reference_writes_them(name: str) -> None:
    for count in (65535, 65536 + 77):
        words = ranged(count)[name]
        joint = words.itemsize in (2, 4)
        planes = encode(words, joint=joint)
        assert planes.tobytes() == of_reference(name, count)
        assert (planes[0] in (reference.RANS, reference.JOINT_RANS)) == (count >= 65536 and name != "129 symbols")
        for isa in everywhere():
            assert encode(words, joint=joint).tobytes() == planes.tobytes(), isa
            out = np.empty_like(words)
            assert decode(planes, out) == 0
            assert out.tobytes() == words.tobytes(), isa


def test_large_chunks_in_the_earlier_modes_are_read() -> None:
    """Those that were written before there was rANS."""
    for name in ("bf16", "f8"):
        words = ranged(70_001)[name]
        planes = reference.split(words)
        if name == "bf16":
            symbols = planes[0].astype(np.uint16) << 2 | planes[1] >> 6
            data = bytes((reference.JOINT, reference.JOINT)) + reference.pack_six(planes[1])
        else:
            symbols, data = planes[0].astype(np.uint16), bytes((reference.ANS,))
        data += reference.encode_ans(symbols, reference.counts_of(symbols, 1024))
        for isa in everywhere():
            out = np.empty_like(words)
            assert decode(np.frombuffer(data, np.uint8), out) == 0, isa
            assert out.tobytes() == words.tobytes(), isa


@pytest.mark.parametrize("name", ["bf16", "f8", "nearly one"])
def test_damaged_words_end_in_the_same_answer_everywhere(name: str) -> None:
    """Bytes that are flipped, cut off or put in, in table, states and words; half of them near the end."""
    rng = np.random.default_rng(5)
    words = ranged(65_600)[name]
    planes = encode(words, joint=words.itemsize == 2)
    refused = 0
    for turn in range(60):
        at = int(rng.integers(0 if turn % 2 else max(planes.size - 900, 0), planes.size))
        damaged = damage(rng, turn % 3, planes, at)
        found = set()
        for _ in everywhere():
            out = np.zeros_like(words)
            status = decode(damaged, out)
            found.add((status, hashlib.sha256(out.tobytes()).hexdigest() if status == 0 else ""))
        assert len(found) == 1
        refused += status != 0
    assert refused > 20


def damage(rng: np.random.Generator, kind: int, planes: Array, at: int) -> Array:
    if kind == 0:
        return np.delete(planes, slice(at, at + 2))
    if kind == 1:
        damaged = planes.copy()
        damaged[at] ^= 1 << int(rng.integers(0, 8))
        return damaged
    return np.insert(planes, at, rng.integers(0, 256, 2).astype(np.uint8))
