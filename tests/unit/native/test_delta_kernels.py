"""The kernels of delta_exact against the reference, on every instruction set; damaged bytes end in an answer."""

from __future__ import annotations

import hashlib
from functools import cache
from typing import Any

import numpy as np
import pytest

from ingot.core.numeric.dtypes import numpy_dtype
from ingot.core.runtime import native
from ingot.testing.values import random_bits
from tests.support.reference import delta_exact as reference

Array = np.ndarray[Any, np.dtype[Any]]
Pair = tuple[Array, Array]

ELEMENTS = {
    "f64": (True, 52),
    "f32": (True, 23),
    "f16": (True, 10),
    "bf16": (True, 7),
    "f8_e4m3fn": (True, 3),
    "i64": (False, 56),
    "i32": (False, 24),
    "i16": (False, 8),
    "i8": (False, 0),
}


def encode(name: str, base: Array, tuned: Array, chunk: int) -> tuple[Array, Array]:
    sizes = np.empty(-(-base.size // chunk), np.uint32)
    out = np.full(base.nbytes + sizes.size + 64, 0xA5, np.uint8)
    room = out[:-64]
    total = native.kernels.delta_encode(base, tuned, chunk, *ELEMENTS[name], room, sizes)
    assert total <= room.size
    assert (out[-64:] == 0xA5).all()
    return sizes, room[:total]


def apply(
    name: str, planes: Array, sizes: Array, chunk: int, base: Array, last: int | None = None
) -> tuple[Array, tuple[int, int]]:
    """Apply into the middle of a larger buffer: what lies around must stay."""
    guarded = np.full(base.nbytes + 256, 0x5A, np.uint8)
    inner = guarded[128 : 128 + base.nbytes].view(base.dtype)
    rest = (base.size - 1) % chunk + 1 if last is None else last
    answer = native.kernels.delta_apply(planes, sizes, chunk, rest, *ELEMENTS[name], base, inner)
    assert (guarded[:128] == 0x5A).all()
    assert (guarded[128 + base.nbytes :] == 0x5A).all()
    return inner, answer


def words(values: Array) -> Array:
    return values.view(f"u{values.dtype.itemsize}")


def weights(name: str, count: int, scale: float) -> Pair:
    """A float's weights with noise on them, or an integer's with a few steps."""
    rng = np.random.default_rng(count)
    if not ELEMENTS[name][0]:
        width = numpy_dtype(name).itemsize
        base = rng.integers(-100, 100, count)
        return words(base.astype(f"i{width}")), words((base + rng.integers(-3, 4, count)).astype(f"i{width}"))
    values = rng.standard_normal(count) * 0.02
    return words(values.astype(numpy_dtype(name))), words(
        (values + rng.standard_normal(count) * scale).astype(numpy_dtype(name))
    )


def some(pair: Pair, share: float) -> Pair:
    """The same where only a share of the elements changes."""
    base, tuned = pair
    return base, np.where(np.random.default_rng(9).random(base.size) < share, tuned, base)


def sources(name: str, count: int) -> dict[str, Pair]:
    rng = np.random.default_rng(count)
    bits = [words(random_bits(rng, (count,), name)) for _ in range(2)]
    near = weights(name, count, 1e-4)
    return {
        "near": near,
        "far": weights(name, count, 0.05),
        "few near": some(near, 0.02),
        "a tenth near": some(near, 0.1),
        "few any": some((near[0], bits[1]), 0.02),
        "half any": some((near[0], bits[1]), 0.5),
        "any bits": (bits[0], bits[1]),
        "noise": (near[0], np.frombuffer(rng.bytes(near[0].nbytes), near[0].dtype)),
        "equal": (near[0], near[0]),
        "one": (near[0], np.where(np.arange(count) == count - 1, bits[1], near[0])),
        "all by one": (near[0], near[0] + near[0].dtype.type(1)),
        "from zero": (np.zeros_like(near[0]), near[1]),
    }


@cache  # it takes its time, and is the same for every instruction set
def of_reference(name: str, count: int, label: str) -> tuple[list[int], str]:
    """What the reference writes, in short, once it has read that again."""
    floats, shift = ELEMENTS[name]
    base, tuned = sources(name, count)[label]
    sizes, planes = reference.encode(base, tuned, 2048, floats=floats, shift=shift)
    again = reference.apply(sizes, planes, 2048, base, floats=floats, shift=shift)
    assert again.tobytes() == tuned.tobytes(), label
    return sizes, hashlib.sha256(planes).hexdigest()


@pytest.mark.parametrize("count", [1, 2, 3, 5, 255, 1023, 1025, 3001])
@pytest.mark.parametrize("name", ELEMENTS)
def test_bytes_are_those_of_the_reference(name: str, count: int) -> None:
    for label, (base, tuned) in sources(name, count).items():
        sizes, planes = encode(name, base, tuned, 2048)
        assert (sizes.tolist(), hashlib.sha256(planes.tobytes()).hexdigest()) == of_reference(name, count, label), label
        out, answer = apply(name, planes, sizes, 2048, base)
        assert answer == (0, len(sizes))
        assert out.tobytes() == tuned.tobytes(), label


def modes_of(sizes: Array, planes: Array) -> set[str]:
    return {reference.MODES[int(mode)] for mode in planes[np.cumsum(sizes, dtype=np.int64) - sizes]}


@pytest.mark.parametrize("name", ["bf16", "f32", "i16"])
def test_every_mode_is_tried(name: str) -> None:
    found: set[str] = set()
    for base, tuned in sources(name, 3000).values():
        found |= modes_of(*encode(name, base, tuned, 2048))
    assert found | modes_of(*encode(name, *weights(name, 65536, 1e-3), 65536)) == set(reference.MODES)


@cache
def large_of_reference(name: str, count: int) -> tuple[list[int], bytes]:
    (base, tuned), (floats, shift) = weights(name, count, 1e-3), ELEMENTS[name]
    written = reference.encode(base, tuned, 1 << 17, floats=floats, shift=shift)
    assert reference.apply(*written, 1 << 17, base, floats=floats, shift=shift).tobytes() == tuned.tobytes()
    return written


@pytest.mark.parametrize("name", ["bf16", "i16", "f32"])
def test_large_chunks_are_by_rans_and_as_the_reference_writes_them(name: str) -> None:
    for count in (65535, 65536 + 77):
        sizes, planes = encode(name, *weights(name, count, 1e-3), 1 << 17)
        assert (sizes.tolist(), planes.tobytes()) == large_of_reference(name, count)
        assert modes_of(sizes, planes) == {"dense by rANS" if count >= 65536 else "dense"}


def test_large_chunks_in_the_earlier_mode_are_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "RANS_LEAST", 1 << 30)
    base, tuned = weights("bf16", 70_001, 1e-3)
    sizes, written = reference.encode(base, tuned, 1 << 17, floats=True, shift=7)
    planes = np.frombuffer(written, np.uint8)
    assert modes_of(np.array(sizes), planes) == {"dense"}
    out, answer = apply("bf16", planes, np.array(sizes, np.uint32), 1 << 17, base)
    assert answer == (0, 1)
    assert out.tobytes() == tuned.tobytes()


@pytest.mark.parametrize("name", ["bf16", "f16", "i16", "f32", "i8"])
def test_rans_applies_alike_everywhere_whole_and_in_part(name: str) -> None:
    """Contexts near each other and far apart, ends of bits and words, parts of the last chunk."""
    count, rng = 65536 + 45, np.random.default_rng(2)
    near = weights(name, count, 1e-3)
    far = [np.where(rng.random(count) < 0.1, words >> 9, words).astype(words.dtype) for words in near]
    before = native.isa()
    try:
        for base, tuned in (near, far, sources(name, count)["any bits"], sources(name, count)["half any"]):
            sizes, planes = encode(name, base, tuned, 1 << 17)
            for isa in native.available_isas():
                native.set_isa(isa)
                assert encode(name, base, tuned, 1 << 17)[1].tobytes() == planes.tobytes()
                for have in (count, count - 1, count - 45, 31, 33, 40_000):
                    out, answer = apply(name, planes, sizes, 1 << 17, base[:have], count)
                    assert answer == (0, 1)
                    assert out.tobytes() == tuned[:have].tobytes()
    finally:
        native.set_isa(before)


@pytest.mark.parametrize("name", ["bf16", "f16", "i16"])
def test_every_class_is_applied_alike_everywhere(name: str) -> None:
    """Large chunks of two bytes are applied from registers: all classes, directions and changes of sign."""
    rng, element = np.random.default_rng(8), reference.Element(16, *ELEMENTS[name])
    base, tuned = (values.copy() for values in weights(name, 1 << 16, 1e-3))
    symbols = np.resize(np.arange(2 * element.classes * element.low), 6000)
    for at, symbol in zip(rng.choice(base.size, symbols.size, replace=False), symbols.tolist(), strict=True):
        rest = int(rng.integers(0, 1 << element.open_bits(symbol)))
        tuned[at] = element.applied(int(base[at]), element.of_symbol(symbol, rest))
    sizes, planes = encode(name, base, tuned, 1 << 17)
    assert modes_of(sizes, planes) == {"dense by rANS"}
    before = native.isa()
    try:
        for isa in native.available_isas():
            native.set_isa(isa)
            out, answer = apply(name, planes, sizes, 1 << 17, base)
            assert answer == (0, 1)
            assert out.tobytes() == tuned.tobytes()
    finally:
        native.set_isa(before)


@pytest.mark.parametrize("name", ["bf16", "i16", "f32"])
def test_damaged_words_end_in_the_same_answer_everywhere(name: str) -> None:
    rng, (base, tuned) = np.random.default_rng(6), weights(name, 65_600, 1e-3)
    sizes, planes = encode(name, base, tuned, 1 << 17)
    refused, before = 0, native.isa()
    try:
        for _ in range(45):
            damaged, lengths = mutate(rng, planes.copy(), sizes.copy())
            found = set()
            for isa in native.available_isas():
                native.set_isa(isa)
                out, answer = apply(name, damaged, lengths, 1 << 17, base)
                found.add((answer, out.tobytes() if answer[0] == 0 else b""))
            assert len(found) == 1
            refused += answer[0] != 0
    finally:
        native.set_isa(before)
    assert refused > 15


@pytest.mark.parametrize("name", ["bf16", "f16", "i16", "f32", "f64", "i8"])
def test_large_chunks_have_these_bytes_on_every_instruction_set(name: str) -> None:
    """The reference is too slow for these: the lowest instruction set stands in for it."""
    for base, tuned in (weights(name, 1 << 18, 1e-3), some(weights(name, 1 << 18, 1e-3), 0.02)):
        sizes, planes = encode(name, base, tuned, 1 << 17)
        before = native.isa()
        try:
            for isa in native.available_isas():
                native.set_isa(isa)
                other = encode(name, base, tuned, 1 << 17)
                assert (sizes.tolist(), planes.tobytes()) == (other[0].tolist(), other[1].tobytes())
                out, answer = apply(name, planes, sizes, 1 << 17, base)
                assert answer == (0, 2)
                assert out.tobytes() == tuned.tobytes()
        finally:
            native.set_isa(before)


@pytest.mark.parametrize("label", ["near", "few near", "any bits", "equal"])
def test_a_part_of_the_last_chunk_may_be_applied(label: str) -> None:
    base, tuned = sources("bf16", 5000)[label]
    sizes, planes = encode("bf16", base, tuned, 4096)
    for count in (4097, 4099, 4999, 5000):
        out, answer = apply("bf16", planes, sizes, 4096, base[:count], 904)
        assert answer == (0, 2)
        assert out.tobytes() == tuned[:count].tobytes()


@pytest.mark.parametrize("name", ELEMENTS)
def test_every_class_of_difference_survives(name: str) -> None:
    """Differences around every power of two, both ways, densely and sparsely."""
    width = numpy_dtype(name).itemsize
    steps = [sign * (2**k + near) for k in range(8 * width) for near in (-1, 0, 1) for sign in (1, -1)]
    base = np.random.default_rng(4).integers(0, 1 << 63, 6000, np.uint64)
    moves = np.resize(np.array([step % 2**64 for step in steps], np.uint64), base.size)
    for every in (1, 40):
        tuned = np.where(np.arange(base.size) % every == 0, base + moves, base)
        old, new = (words(values.astype(f"u{width}")) for values in (base, tuned))
        sizes, planes = encode(name, old, new, 4096)
        assert apply(name, planes, sizes, 4096, old)[0].tobytes() == new.tobytes()


@pytest.mark.parametrize("name", ["bf16", "i16", "f32", "f64", "i8"])
def test_damaged_bytes_end_in_an_answer(name: str) -> None:
    """Thousands of flipped, overwritten, cut and inserted bytes: an error or some values, never a stray write."""
    rng = np.random.default_rng(7)
    refused = 0
    for base, tuned in (weights(name, 6000, 1e-3), some(weights(name, 6000, 1e-3), 0.05)):
        sizes, planes = encode(name, base, tuned, 4096)
        for _ in range(1000):
            damaged, lengths = mutate(rng, planes.copy(), sizes.copy())
            _, (status, chunk) = apply(name, damaged, lengths, 4096, base)
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
        sizes[0] = min(int(sizes[0]), planes.size)
        sizes[1:] = planes.size - int(sizes[0])
    return np.ascontiguousarray(planes), sizes


def test_random_bytes_end_in_an_answer() -> None:
    rng = np.random.default_rng(3)
    names = list(ELEMENTS)
    for _ in range(4000):
        name = names[int(rng.integers(0, len(names)))]
        width = numpy_dtype(name).itemsize
        base = np.frombuffer(rng.bytes(width * int(rng.integers(1, 700))), f"u{width}")
        planes = np.frombuffer(rng.bytes(int(rng.integers(0, 900))), np.uint8).copy()
        planes[:1] = rng.integers(0, 5)
        planes[1:9] = rng.integers(0, 3, planes[1:9].size)
        _, (status, _) = apply(name, planes, np.array([planes.size], np.uint32), 1024, base)
        assert status in (0, 1, 2, 3)


def hand(planes: bytes, count: int, have: int | None = None) -> int:
    data = np.frombuffer(planes, np.uint8)
    base = np.zeros(count if have is None else have, np.uint8)
    return apply("i8", data, np.array([data.size], np.uint32), 512, base, count)[1][0]


def u24(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(3, "little") for number in numbers)


ONE_TABLE = b"\x00\x00\x00\x00\x88\x00"  # symbol 0 with frequency 2048: no bits, no change
ONE_CONTEXT = b"\x03\x00" + ONE_TABLE
HEADS = bytes(20)
RANGES = bytes(3) + b"\0\0\1\0" * 32  # no words, and the smallest states


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x00", 0),
        (b"\x01" + bytes(8), 0),
        (b"\x02" + u24(1, 1) + b"\x01\x07\x01\x02", 0),  # element 7 by +1
        (b"\x02" + u24(8, 8) + b"\x01\x00\x01\x02", 0),  # all of them
        (ONE_CONTEXT + HEADS, 0),
        (b"\x03\x01\x80" + 2 * ONE_TABLE + HEADS, 0),
        (b"", 1),  # no mode
        (b"\x05", 1),  # an unknown mode
        (b"\x04\x00" + ONE_TABLE + RANGES, 0),
        (b"\x04\x00" + ONE_TABLE + RANGES[:-1], 3),  # states that are cut off
        (b"\x04\x00" + ONE_TABLE + bytes(131), 3),  # that are too small
        (b"\x04\x00" + ONE_TABLE + b"\x01" + RANGES[1:], 3),  # no word
        (b"\x04\x00" + ONE_TABLE + b"\x01" + RANGES[1:] + bytes(2), 3),  # a word that nobody takes
        (b"\x04\x00" + ONE_TABLE + RANGES + b"\x00", 3),  # open bits that nobody asked for
        (b"\x04\x00\x08\x00\x08\x00\x88\x00" + RANGES + b"\xff", 0),  # eight open bits
        (b"\x04\x00\x08\x00\x08\x00\x88\x00" + RANGES, 3),  # and none of them
        (b"\x04\x00" + ONE_TABLE + RANGES.replace(b"\0\0\1\0", b"\1\0\1\0", 1), 3),  # a state that does not end at 0
        (b"\x00\x00", 1),  # bytes after it
        (b"\x01" + bytes(7), 1),
        (b"\x01" + bytes(9), 1),
        (b"\x02" + u24(1), 1),  # cut off
        (b"\x02" + u24(0, 0), 1),  # no change
        (b"\x02" + u24(9, 9) + b"\x01\x00\x01\x02", 1),  # more changes than elements
        (b"\x02" + u24(2, 1) + b"\x01\x00\x01\x02", 1),  # fewer gaps than changes
        (b"\x02" + u24(1, 2) + b"\x01\x00\x01\x02", 1),  # more gaps than there may be
        (b"\x02" + u24(1, 1) + b"\x03\x00\x01\x02", 1),  # an unknown mode of a plane
        (b"\x02" + u24(1, 1) + b"\x01", 1),  # no constant
        (b"\x02" + u24(2, 2) + b"\x00\x00", 1),  # a raw plane that is cut off
        (b"\x02" + u24(1, 1) + b"\x01\x07", 1),  # no differences
        (b"\x02" + u24(1, 1) + b"\x01\x07\x01\x02\x00", 1),  # bytes after them
        (b"\x02" + u24(1, 1) + b"\x02\x00\x00\x01\x02", 2),  # no table
        (b"\x02" + u24(1, 1) + b"\x01\x08\x01\x02", 3),  # an element past the last
        (b"\x02" + u24(2, 2) + b"\x01\x05\x01\x02", 3),
        (b"\x03", 2),  # no contexts
        (b"\x03\x10" + bytes(range(1, 17)), 2),  # too many
        (b"\x03\x01", 2),  # where do they begin
        (b"\x03\x01\x00" + 2 * ONE_TABLE + HEADS, 2),  # the first begins at 0
        (b"\x03\x02\x09\x09" + 3 * ONE_TABLE + HEADS, 2),  # one that is empty
        (b"\x03\x01\x80" + ONE_TABLE, 2),  # one that has no table
        (b"\x03\x00\x1c\x00\x1c\x00\x88\x00" + HEADS, 2),  # a symbol that 8 bits do not have
        (b"\x03\x00\x00\x00\x00\x00\x87\xff" + HEADS, 2),  # too few
        (ONE_CONTEXT, 3),  # no streams
        (ONE_CONTEXT + b"\x00\x08" + bytes(18), 3),  # a state past the last
        (ONE_CONTEXT + b"\x01\x00" + bytes(18), 3),  # a state that does not end at 0
        (ONE_CONTEXT + HEADS + b"\x00", 3),  # open bits that nobody asked for
        (b"\x03\x00\x08\x00\x08\x00\x88\x00" + HEADS, 3),  # a symbol that leaves a bit open, and no bit
        (b"\x03\x00\x08\x00\x08\x00\x88\x00" + HEADS + b"\xff\xff", 3),  # too many of them
    ],
)
def test_chunks_by_hand(data: bytes, status: int) -> None:
    assert hand(data, 8) == status


def test_gaps_that_lead_far_are_followed() -> None:
    far = b"\x02" + u24(1, 2) + b"\x00\xff\x2c\x01\x02"
    assert hand(far, 300) == 0
    assert hand(far, 299) == 3
    assert hand(b"\x02" + u24(1, 2) + b"\x00\x2c\xff\x01\x02", 300) == 3  # a far gap that no change follows
    assert hand(far, 300, 10) == 0


def test_what_is_missing_at_the_end_is_not_asked_for_before() -> None:
    cut = b"\x03\x00\x08\x00\x08\x00\x88\x00" + HEADS + b"\xff"  # eight open bits for nine elements
    assert hand(cut, 9) == 3
    assert hand(cut, 9, 8) == 0


def test_arguments_are_checked() -> None:
    base, sizes, out = np.zeros(8, np.uint16), np.zeros(1, np.uint32), np.zeros(64, np.uint8)
    kernels = native.kernels
    for arguments in (
        (base.view(np.int16), base.view(np.int16), 8, True, 7, out, sizes),
        (base, base.view(np.uint8)[:8], 8, True, 7, out, sizes),
        (base, base[:7], 8, True, 7, out, sizes),
        (base, base, 0, True, 7, out, sizes),
        (base, base, (1 << 20) + 1, True, 7, out, sizes),
        (base, base, 4, True, 7, out, sizes),
        (base, base, 8, True, 15, out, sizes),
        (base, base, 8, True, -1, out, sizes),
        (base, base, 8, True, 7, out[:16], sizes),
    ):
        with pytest.raises(ValueError, match="expected"):
            kernels.delta_encode(*arguments)
    twice = np.zeros(9, np.uint16)
    for last, old, new in ((9, base, base), (7, base, base), (8, twice[:8], twice[1:])):
        with pytest.raises(ValueError, match="expected"):
            kernels.delta_apply(out, sizes, 8, last, True, 7, old, new)
