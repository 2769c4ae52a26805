"""The kernels of float_entropy against the reference, on every instruction set; damaged bytes end in an answer."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest

from ingot.core.numeric.dtypes import numpy_dtype
from ingot.core.runtime import native
from ingot.testing.values import random_bits
from tests.support.reference import float_entropy as reference

Array = np.ndarray[Any, np.dtype[Any]]
LEVELS = (False, True)


def encode(words: Array, chunk: int, *, max: bool, joint: bool = False) -> tuple[Array, Array]:
    sizes = np.empty(-(-words.size // chunk), np.uint32)
    out = np.full(words.dtype.itemsize * (words.size + sizes.size) + 64, 0xA5, np.uint8)
    room = out[:-64]
    total = native.kernels.entropy_encode(words, chunk, max, joint, room, sizes)
    assert total <= room.size
    assert (out[-64:] == 0xA5).all()
    return sizes, room[:total]


def decode(planes: Array, sizes: Array, chunk: int, out: Array) -> tuple[int, int]:
    """Decode into the middle of a larger buffer: what lies around must stay."""
    guarded = np.full(out.nbytes + 256, 0x5A, np.uint8)
    inner = guarded[128 : 128 + out.nbytes].view(out.dtype)
    answer = native.kernels.entropy_decode(planes, sizes, chunk, inner)
    assert (guarded[:128] == 0x5A).all()
    assert (guarded[128 + out.nbytes :] == 0x5A).all()
    out[...] = inner
    return answer


def weights(name: str, count: int, scale: float = 0.02) -> Array:
    rng = np.random.default_rng(count)
    values = (rng.standard_normal(count) * scale).astype(np.float32).astype(numpy_dtype(name))
    return values.view(f"u{values.dtype.itemsize}")


def sources(count: int) -> dict[str, Array]:
    rng = np.random.default_rng(count)
    return {
        **{f"gauss {name}": weights(name, count) for name in ("bf16", "f16", "f32", "f64", "f8_e4m3fn", "f8_e5m2")},
        "f32 from bf16": weights("bf16", count).astype(np.uint32) << np.uint32(16),
        "any bits": random_bits(rng, (count,), "f32").view(np.uint32),
        "half zeros": random_bits(rng, (count,), "bf16", zeros=0.5).view(np.uint16),
        "constant": np.full(count, 0xBF80, np.uint16),
        "two values": rng.choice(np.array([0x3F80, 0xBF80], np.uint16), count),
        "skewed": np.minimum(rng.geometric(0.5, count) - 1, 255).astype(np.uint8),
        "fibonacci": fibonacci(count),
    }


def fibonacci(count: int) -> Array:
    """Counts that make unlimited Huffman codes as long as they get."""
    values, one, two = [], 1, 1
    for value in range(24):
        values += [value] * one
        one, two = two, one + two
    out = np.resize(np.array(values, np.uint8), count)
    np.random.default_rng(0).shuffle(out)
    return out


@pytest.mark.parametrize("max", LEVELS)
@pytest.mark.parametrize("count", [1, 2, 3, 5, 255, 1023, 1025, 4097, 9001])
def test_bytes_are_those_of_the_reference(count: int, max: bool) -> None:
    chunk = 4096 if count < 9000 else 16384
    for name, words in sources(count).items():
        joint = "bf16" in name or "f32" in name
        sizes, planes = encode(words, chunk, max=max, joint=joint)
        wanted = reference.encode(words, chunk, max=max, joint=joint)
        assert (sizes.tolist(), planes.tobytes()) == wanted, name
        out = np.empty_like(words)
        assert decode(planes, sizes, chunk, out) == (0, len(sizes))
        assert out.tobytes() == words.tobytes(), name
        decoded = reference.decode(sizes.tolist(), planes.tobytes(), chunk, count, words.dtype.itemsize)
        assert decoded.tobytes() == words.tobytes(), name


def as_plane(values: Array) -> Array:
    """Words of a byte whose plane, which is rotated left by one bit, has these values."""
    return (values >> 1 | values << 7).astype(np.uint8)


def spans(count: int) -> dict[str, Array]:
    """Values around the widest span that is counted in pairs, with zeros and without, low and high."""
    rng = np.random.default_rng(count)
    out = {}
    for low, high in ((1, 63), (1, 64), (90, 152), (90, 153), (193, 255), (194, 255), (0, 255), (0, 0), (7, 7)):
        steps = np.minimum(rng.geometric(0.4, count) - 1, high - low) + low
        steps[rng.integers(0, count, 40)] = high
        out[f"{low} to {high}"] = as_plane(steps)
        out[f"{low} to {high} and zeros"] = as_plane(np.where(rng.random(count) < 0.3, 0, steps))
    return out


@pytest.mark.parametrize("count", [16383, 16384, 16387, 17000])
def test_planes_counted_in_pairs_have_the_bytes_of_the_reference(count: int) -> None:
    for name, words in spans(count).items():
        sizes, planes = encode(words, 1 << 15, max=False)
        assert (sizes.tolist(), planes.tobytes()) == reference.encode(words, 1 << 15, max=False, joint=False), name


@pytest.mark.parametrize("bits", [18, 19, 20])
def test_chunks_of_nearly_one_value_are_counted_whole(bits: int) -> None:
    """A counter of 16 bits would pass its end."""
    values = np.full(1 << bits, 100)
    values[[5, -1]] = 0, 101
    words = as_plane(values)
    sizes, planes = encode(words, 1 << bits, max=False)
    assert planes[0] == reference.HUFFMAN
    assert planes.size == 1 + 2 + 51 + 12 + sum(-(-(words.size // 4 + more) // 8) for more in (1, 0, 0, 1))
    out = np.empty_like(words)
    assert decode(planes, sizes, 1 << bits, out)[0] == 0
    assert out.tobytes() == words.tobytes()


def test_eight_codes_of_57_bits_have_the_bytes_of_the_reference() -> None:
    """One bit more than what fits behind 7 that are held over, as eights among short codes."""
    rng = np.random.default_rng(5)
    counts = {100 + bits: 1 << (15 - bits) for bits in range(1, 11)}  # codes of so many bits
    counts[99] = counts[110]
    eight = [107, 107, 107, 108, 107, 107, 107, 107]
    eights = 32
    counts[107] -= 7 * eights
    counts[108] -= eights
    short = np.concatenate([np.full(count, value) for value, count in counts.items()])
    for _ in range(4):
        rows = np.concatenate([rng.permutation(short).reshape(-1, 8), np.tile(eight, (eights, 1))])
        words = as_plane(rng.permutation(rows).reshape(-1))
        sizes, planes = encode(words, 1 << 15, max=False)
        assert planes[0] == reference.HUFFMAN
        assert (sizes.tolist(), planes.tobytes()) == reference.encode(words, 1 << 15, max=False, joint=False)


def test_every_mode_is_tried() -> None:
    modes = {
        int(mode)
        for max in LEVELS
        for name, words in sources(9000).items()
        for mode in encode(words, 16384, max=max, joint="bf16" in name)[1][: words.dtype.itemsize]
    }
    assert modes == {reference.RAW, reference.CONSTANT, reference.HUFFMAN, reference.ANS, reference.JOINT}


def test_codes_as_long_as_they_may_be_survive() -> None:
    words = fibonacci(40000)
    sizes, planes = encode(words, 65536, max=False)
    first, last = int(planes[1]), int(planes[2])
    lengths = [int(planes[3 + i // 2]) >> i % 2 * 4 & 15 for i in range(last - first + 1)]
    assert len(lengths) > 20
    assert max(lengths) == reference.LIMIT
    out = np.empty_like(words)
    assert decode(planes, sizes, 65536, out)[0] == 0
    assert out.tobytes() == words.tobytes()


@pytest.mark.parametrize("max", LEVELS)
def test_large_chunks_have_these_bytes_on_every_instruction_set(max: bool) -> None:
    """The reference is too slow for these: the lowest instruction set stands in for it."""
    words = weights("bf16", 1 << 20)
    sizes, planes = encode(words, 1 << 17, max=max, joint=True)
    before = native.isa()
    native.set_isa("baseline")
    other = encode(words, 1 << 17, max=max, joint=True)
    native.set_isa(before)
    digest = hashlib.sha256(planes.tobytes()).hexdigest()
    assert digest == hashlib.sha256(other[1].tobytes()).hexdigest()
    assert sizes.tolist() == other[0].tolist()
    out = np.empty_like(words)
    assert decode(planes, sizes, 1 << 17, out)[0] == 0
    assert out.tobytes() == words.tobytes()


def uneven(count: int) -> dict[str, Array]:
    """Values that make streams end at different times, codes longer than a look-up, and runs that take many bits."""
    rng = np.random.default_rng(count)
    quarter = -(-count // 4)
    bursts = np.zeros(count, np.uint8)
    for start in rng.integers(0, count - 64, count // 2000):
        bursts[start : start + 64] = rng.integers(0, 256, 64)
    dear = np.concatenate([np.zeros(3 * quarter, np.uint8), rng.integers(0, 64, count, np.uint8)])[:count]
    long = np.minimum(rng.geometric(0.5, count) - 1, 20).astype(np.uint8)
    return {
        "one dear quarter": dear,
        "one cheap quarter": np.where(dear, 0, rng.integers(0, 64, count, np.uint8)).astype(np.uint8),
        "bursts": bursts,
        "long codes": long,
        "long codes in pairs": (long.astype(np.uint16) << np.uint16(8)) | rng.integers(0, 256, count, np.uint16),
        "bursts in pairs": (bursts.astype(np.uint16) << np.uint16(7)) | rng.integers(0, 64, count, np.uint16),
        "few values": rng.choice(np.array([0, 1, 255], np.uint8), count, p=(0.9, 0.09, 0.01)),
    }


@pytest.mark.parametrize("max", LEVELS)
@pytest.mark.parametrize("count", [70_000, 8191, 8193])
def test_uneven_streams_come_back_and_are_the_same_everywhere(count: int, max: bool) -> None:
    for name, words in uneven(count).items():
        before = native.isa()
        sizes, planes = encode(words, 1 << 17, max=max, joint=words.itemsize == 2)
        native.set_isa("baseline")
        other = encode(words, 1 << 17, max=max, joint=words.itemsize == 2)
        native.set_isa(before)
        assert planes.tobytes() == other[1].tobytes(), name
        out = np.empty_like(words)
        assert decode(planes, sizes, 1 << 17, out) == (0, 1)
        assert out.tobytes() == words.tobytes(), name


@pytest.mark.parametrize("count", [1, 31, 63, 64, 65, 127, 128, 129, 200, 4099])
@pytest.mark.parametrize("name", ["gauss bf16", "any bits"])
def test_two_planes_are_joined_wherever_results_lie(name: str, count: int) -> None:
    """Results begin at any element of a line; planes are raw or coded; beside results nothing is written."""
    words = sources(count)[name].view(np.uint16)
    sizes, planes = encode(words, 1 << 13, max=False)
    for offset in range(32):
        room = np.full(words.size + 128, 0x5A5A, np.uint16)
        start = -(room.ctypes.data // 2) % 32 + offset
        out = room[start : start + words.size]
        assert native.kernels.entropy_decode(planes, sizes, 1 << 13, out) == (0, sizes.size)
        assert (out == words).all()
        assert (room[:start] == 0x5A5A).all()
        assert (room[start + words.size :] == 0x5A5A).all()


@pytest.mark.parametrize("max", LEVELS)
@pytest.mark.parametrize("name", ["bf16", "f32", "f8_e4m3fn"])
def test_results_that_go_past_the_caches_are_whole_wherever_they_lie(name: str, max: bool) -> None:
    """Those of a megabyte and more; lines of memory begin anywhere in them."""
    words = np.tile(weights(name, 70_001), 16)[: (1 << 20) // numpy_dtype(name).itemsize + 77]
    sizes, planes = encode(words, 1 << 17, max=max, joint=name != "f8_e4m3fn")
    for shift in (0, 1, 7):
        room = np.full(words.nbytes + 256, 0x5A, np.uint8)
        start = 64 + shift * words.itemsize
        out = room[start : start + words.nbytes].view(words.dtype)
        assert native.kernels.entropy_decode(planes, sizes, 1 << 17, out) == (0, len(sizes))
        assert out.tobytes() == words.tobytes()
        assert (room[:start] == 0x5A).all()
        assert (room[start + words.nbytes :] == 0x5A).all()


@pytest.mark.parametrize("max", LEVELS)
def test_damaged_long_streams_end_in_an_answer(max: bool) -> None:
    """Of the loops without checks, which short planes hardly enter; each damage lies in the streams themselves."""
    rng = np.random.default_rng(11)
    for name, words in uneven(20_000).items():
        sizes, planes = encode(words, 1 << 17, max=max, joint=words.itemsize == 2)
        for _ in range(40):
            damaged = planes.copy()
            at = int(rng.integers(0, planes.size - 8))
            damaged[at : at + 8] = rng.integers(0, 256, 8)
            status, chunk = decode(damaged, sizes, 1 << 17, np.empty_like(words))
            assert status in (0, 1, 2, 3), name
            assert chunk <= 1


@pytest.mark.parametrize(("max", "most"), [(False, 10.60), (True, 10.50)])
def test_gaussian_weights_take_so_many_bits(max: bool, most: float) -> None:
    words = weights("bf16", 1 << 20)
    sizes, planes = encode(words, 1 << 17, max=max, joint=True)
    assert 8 * (planes.size + sizes.nbytes) / words.size <= most


@pytest.mark.parametrize("max", LEVELS)
def test_nothing_grows_by_more_than_its_modes(max: bool) -> None:
    rng = np.random.default_rng(1)
    for width in (1, 2, 4, 8):
        words = np.frombuffer(rng.bytes(width * 5000), f"u{width}")
        sizes, planes = encode(words, 1024, max=max, joint=width in (2, 4))
        assert planes.size <= width * (words.size + sizes.size)


@pytest.mark.parametrize("max", LEVELS)
@pytest.mark.parametrize("name", ["bf16", "f8_e4m3fn", "f32"])
def test_damaged_bytes_end_in_an_answer(name: str, max: bool) -> None:
    """Thousands of flipped, overwritten, cut and inserted bytes: an error or some values, never a stray write."""
    rng = np.random.default_rng(7)
    words = weights(name, 12000)
    sizes, planes = encode(words, 8192, max=max, joint=name != "f8_e4m3fn")
    refused = 0
    for _ in range(1500):
        damaged, lengths = mutate(rng, planes.copy(), sizes.copy())
        status, chunk = decode(damaged, lengths, 8192, np.empty_like(words))
        assert status in (0, 1, 2, 3)
        assert chunk <= len(sizes)
        refused += status != 0
    assert refused > 100


def mutate(rng: np.random.Generator, planes: Array, sizes: Array) -> tuple[Array, Array]:
    kind = int(rng.integers(0, 6))
    at = int(rng.integers(0, planes.size)) if rng.random() < 0.5 else int(rng.integers(0, 80))
    if kind == 0:
        planes[at] ^= 1 << int(rng.integers(0, 8))
    elif kind == 1:
        planes[at : at + 8] = rng.integers(0, 256, planes[at : at + 8].size)
    elif kind == 2:
        planes = planes[:at]
    elif kind == 3:
        planes = np.delete(planes, at)
    elif kind == 4:
        planes = np.insert(planes, at, int(rng.integers(0, 256)))
    else:
        sizes[int(rng.integers(0, len(sizes)))] += int(rng.integers(0, 2**32))
        return planes, sizes
    if kind in (2, 3, 4) and rng.random() < 0.7:  # sizes that agree, so that the chunk itself is looked at
        sizes = sizes[:1].repeat(len(sizes))
        sizes[0] = min(int(sizes[0]), planes.size)
        sizes[1:] = planes.size - int(sizes[0])
    return np.ascontiguousarray(planes), sizes


def test_random_bytes_end_in_an_answer() -> None:
    rng = np.random.default_rng(3)
    for turn in range(3000):
        width = int(rng.choice((1, 2, 4, 8)))
        out = np.empty(int(rng.integers(1, 700)), f"u{width}")
        planes = np.frombuffer(rng.bytes(int(rng.integers(0, 900))), np.uint8).copy()
        planes[:width] = rng.integers(0, 7, planes[:width].size) if turn % 4 else reference.JOINT + 2 * (turn // 4 % 2)
        sizes = np.array([planes.size], np.uint32)
        status, _ = decode(planes, sizes, 1024, out)
        assert status in (0, 1, 2, 3)


def hand(planes: bytes, count: int, width: int = 1) -> int:
    data = np.frombuffer(planes, np.uint8)
    out = np.empty(count, f"u{width}")
    return decode(data, np.array([data.size], np.uint32), 256, out)[0]


HUFFMAN = bytes((reference.HUFFMAN, 0, 1, 0x11))  # values 0 and 1, one bit each


def streams(*parts: bytes) -> bytes:
    return b"".join(len(part).to_bytes(3, "little") for part in parts) + b"".join(parts)


def test_huffman_by_hand() -> None:
    good = HUFFMAN + streams(b"\x02", b"\x01", b"\x00", b"\x03")
    out = np.empty(8, np.uint8)
    assert decode(np.frombuffer(good, np.uint8), np.array([len(good)], np.uint32), 256, out) == (0, 1)
    assert out.tolist() == [reference.join([np.array([bit], np.uint8)])[0] for bit in (0, 1, 1, 0, 0, 0, 1, 1)]


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"", 1),  # no modes
        (b"\x07" + bytes(8), 1),  # an unknown mode
        (b"\x04" + bytes(99), 1),  # joint planes of one byte
        (b"\x06" + bytes(299), 1),  # the same by rANS
        (b"\x00" + bytes(7), 1),  # a raw plane that is cut off
        (b"\x00" + bytes(9), 1),  # bytes after it
        (b"\x01", 1),  # no constant
        (b"\x02\x00", 2),  # no table
        (b"\x02\x01\x00" + bytes(99), 2),  # from last to first
        (b"\x02\x00\x01\x11", 2),  # no sizes
        (b"\x02\x00\x01\x01" + streams(b"\0", b"\0", b"\0", b"\0"), 2),  # the last value has no code
        (b"\x02\x00\x01\x10" + streams(b"\0", b"\0", b"\0", b"\0"), 2),  # nor has the first
        (b"\x02\x00\x01\x21" + streams(b"\0", b"\0", b"\0", b"\0"), 2),  # incomplete
        (b"\x02\x00\x02\x11\x01" + streams(b"\0", b"\0", b"\0", b"\0"), 2),  # over-subscribed
        (b"\x02\x00\x02\x21\x12" + streams(b"\0", b"\0", b"\0", b"\0"), 2),  # spare bits set
        (b"\x02\x00\x01\xdd" + streams(b"\0", b"\0", b"\0", b"\0"), 2),  # 13 bits
        (HUFFMAN + streams(b"\0", b"\0", b"\0", b""), 3),  # a stream that is empty
        (HUFFMAN + streams(b"\0", b"\0", b"\0\0", b"\0"), 3),  # a stream that is too long
        (HUFFMAN + streams(b"\0", b"\0", b"\0", b"\4"), 3),  # spare bits set
        (HUFFMAN + streams(b"\0", b"\0", b"\0", b"\0")[:-1], 3),  # cut off
        (HUFFMAN + streams(b"\0", b"\0", b"\0", b"\0") + b"\0", 1),  # bytes after it
        (b"\x03\x00", 2),  # no table
        (b"\x03\x01\x00\x00\x00" + bytes(99), 2),  # from last to first
        (b"\x03\x00\x00\x00\x01" + bytes(99), 2),  # symbols past 255
        (b"\x03\x00\x00\x01\x00\x9f\xff" + bytes(99), 2),  # too few
        (b"\x03\x00\x00\x01\x00\xa0\x00\x01" + bytes(99), 2),  # too many
        (b"\x03\x00\x00\x02\x00\xa0\x00\x00\x00\x00", 2),  # the last symbol is absent
        (b"\x03\x00\x00\x01\x00\x00\x00\xa0\x00" + bytes(99), 2),  # the first symbol is absent
        (b"\x03\x00\x00\x01\x00\x90\x00\x90\x00", 3),  # no streams
        (b"\x03\x00\x00\x00\x00\xa0\x00" + bytes(20) + b"\0", 1),  # bytes after it
        (b"\x03\x00\x00\x00\x00\xa0\x00" + b"\x00\x20\0\0\0" + bytes(15), 3),  # padding where there is no byte
        (b"\x03\x00\x00\x00\x00\xa0\x00" + b"\x01\x00\0\0\0" + bytes(15), 3),  # a state that does not end at 0
        (b"\x03\x00\x00\x00\x00\xa0\x00" + b"\x00\x20\1\0\0" + bytes(15) + b"\1", 3),  # padding that is not zero
        (b"\x03\x00\x00\x00\x00\xa0\x00" + b"\x00\x00\1\0\0" + bytes(15) + b"\0", 3),  # a stream that is too long
        (b"\x03\x00\x00\x00\x00\xa0\x00" + b"\x00\x00\1\0\0" + bytes(15), 3),  # cut off
    ],
)
def test_wrong_bytes_are_refused(data: bytes, status: int) -> None:
    assert hand(data, 8) == status


def test_one_symbol_takes_no_bits() -> None:
    assert hand(b"\x03\x07\x00\x07\x00\xa0\x00" + bytes(20), 8) == 0


def test_joint_planes_come_in_pairs() -> None:
    words = weights("bf16", 9000)
    sizes, planes = encode(words, 16384, max=True, joint=True)
    assert planes[:2].tolist() == [reference.JOINT] * 2
    planes[1] = reference.RAW
    assert decode(planes, sizes, 16384, np.empty_like(words))[0] == 1


def test_arguments_are_checked() -> None:
    words, sizes, out = np.zeros(8, np.uint16), np.zeros(1, np.uint32), np.zeros(64, np.uint8)
    kernels = native.kernels
    for arguments in (
        (words.view(np.int16), 8, False, False, out, sizes),
        (words, 0, False, False, out, sizes),
        (words, (1 << 20) + 1, False, False, out, sizes),
        (words, 4, False, False, out, sizes),
        (words, 8, False, False, out[:17], sizes),
        (words.view(np.uint8), 16, False, True, out, sizes),
    ):
        with pytest.raises(ValueError, match="expected"):
            kernels.entropy_encode(*arguments)
    with pytest.raises(ValueError, match="expected"):
        kernels.entropy_decode(out, sizes, 4, words)


@pytest.mark.parametrize("symbols", [256, 257, 300, 512, 513])
def test_joint_planes_have_at_most_256_symbols(symbols: int) -> None:
    """Of ten bits of each value, whose last two follow from the others here; readers refuse more."""
    rng = np.random.default_rng(symbols)
    common = rng.integers(0, 64, 20_000)
    joint = np.concatenate([np.arange(symbols), common << 2 | common & 3])
    turned = (rng.permutation(joint).astype(np.uint16) << np.uint16(6)) | rng.integers(0, 64, joint.size, np.uint16)
    words = (turned >> np.uint16(1)) | (turned << np.uint16(15))
    sizes, planes = encode(words, 1 << 17, max=True, joint=True)
    assert (planes[0] == planes[1] == reference.JOINT) == (symbols <= 256)
    assert (sizes.tolist(), planes.tobytes()) == reference.encode(words, 1 << 17, max=True, joint=True)
