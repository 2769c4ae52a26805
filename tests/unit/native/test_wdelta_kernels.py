"""Kernels of .wdelta against NumPy, bit for bit, with every instruction set; arguments that do not fit are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ingot.core.numeric.dtypes import as_bits, numpy_dtype
from ingot.core.runtime import native

K = native.kernels
Array = np.ndarray[Any, np.dtype[Any]]
NOWHERE = np.empty(0, np.int64)
SIZES = [1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 100, 1000, 4095, 4097, 70_001]


def normal(size: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(0, 0.01, size).astype(np.float32)


def some(size: int, share: float, seed: int = 1) -> Array:
    return np.flatnonzero(np.random.default_rng(seed).random(size) < share).astype(np.int64)


def codes_of(packed: Array, first: int, count: int) -> Array:
    return np.stack([packed >> 4, packed & 15], axis=1).reshape(-1)[first : first + count]


@pytest.mark.parametrize("size", [*SIZES, 400_000])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 1.0])
def test_select(size: int, share: float) -> None:
    values = normal(size)
    values[::3] = np.round(values[::3], 2)  # equal magnitudes of both signs
    count = max(1, int(size * share))
    positions, kept = np.empty(count, np.int64), np.empty(count, np.float32)
    assert K.top_of(values, None, "f32", positions, kept)[0] == size
    expected = largest_of(values, count)
    assert np.array_equal(positions, expected)
    assert np.array_equal(kept.view(np.uint32), values[expected].view(np.uint32))
    assert_pruned(values, count)


@pytest.mark.parametrize("levels", [1, 3, 40])
@pytest.mark.parametrize("share", [0.001, 0.01, 0.1, 0.999])
@pytest.mark.parametrize("top", [0, 1, 500])
def test_select_of_many_equal_magnitudes(levels: int, share: float, top: int) -> None:
    """As of differences of bf16, which are few steps: the first of the equals, and all that are larger, wherever."""
    rng = np.random.default_rng(levels)
    values = (rng.integers(-levels, levels + 1, 300_000) / 64).astype(np.float32)
    values[rng.permutation(values.size)[:top]] = 7.5
    values[-1] = -8
    count = int(values.size * share)
    positions, kept = np.empty(count, np.int64), np.empty(count, np.float32)
    assert K.top_of(values, None, "f32", positions, kept)[0] == values.size
    expected = largest_of(values, count)
    assert np.array_equal(positions, expected)
    assert np.array_equal(kept.view(np.uint32), values[expected].view(np.uint32))
    assert_pruned(values, count)


def test_a_sample_that_misleads() -> None:
    """The largest lie where no sample looks, or hardly any: what a bracket says is counted again."""
    values = np.zeros(1 << 20, np.float32)
    step = values.size // (1 << 15) | 1
    seen = np.arange(1 << 15) * step % values.size
    values[:] = normal(values.size)
    values[seen] /= 64
    for count in (1, 5000, values.size // 2, values.size - 1):
        positions, kept = np.empty(count, np.int64), np.empty(count, np.float32)
        assert K.top_of(values, None, "f32", positions, kept)[0] == values.size
        assert np.array_equal(positions, largest_of(values, count))
        assert np.array_equal(kept, values[positions])
        assert_pruned(values, count)


def largest_of(values: Array, count: int) -> Array:
    return np.sort(np.argsort(-np.abs(values), kind="stable")[:count])


def assert_pruned(values: Array, count: int) -> None:
    """Among candidates whose positions are no ramp."""
    positions, expected = 3 * np.arange(values.size, dtype=np.int64) + 5, largest_of(values, count)
    at, what = positions.copy(), values.copy()
    bound = K.top_prune(at, what, count)
    assert np.array_equal(at[:count], positions[expected])
    assert np.array_equal(what[:count].view(np.uint32), values[expected].view(np.uint32))
    assert bound == np.abs(values[expected]).view(np.int32).min()


@pytest.mark.parametrize("size", [1, 40, 400_000])
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_select_finds_what_is_not_finite(size: int, value: float) -> None:
    values = normal(size)
    values[size // 2 :: 7] = value
    positions, kept = np.empty(1, np.int64), np.empty(1, np.float32)
    assert K.top_of(values, None, "f32", positions, kept)[0] == size // 2


def pair(differences: Array, dtype: str, seed: int = 7) -> tuple[Array, Array, Array]:
    """Base and fine-tune of a type as kernels take them, and their differences in f32."""
    kind = numpy_dtype(dtype)
    base = normal(differences.size, seed).astype(kind)
    tuned = (base.astype(np.float32) + differences).astype(kind)
    return as_bits(base), as_bits(tuned), tuned.astype(np.float32) - base.astype(np.float32)


def most_of(values: Array, count: int) -> tuple[Array, Array]:
    """The places of the largest magnitudes, of equal ones the first; all other values."""
    places = np.sort(np.argsort(-np.abs(values), kind="stable")[:count])
    return places, np.delete(values, places)


def range_of(rest: Array) -> tuple[float, float]:
    return (float(rest.min()), float(rest.max())) if rest.size else (np.inf, -np.inf)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("levels", [0, 1, 3, 40])
@pytest.mark.parametrize("size", [1, 15, 17, 2047, 2049, 5000, 300_000])
def test_top_of(size: int, levels: int, dtype: str) -> None:
    """Of noise, and of few magnitudes, so that many equal the bound; the rest that equals it counts in the range."""
    change = normal(size, 3) / 8
    if levels:
        change = (np.random.default_rng(levels).integers(-levels, levels + 1, size) / 64).astype(np.float32)
    base, tuned, values = pair(change, dtype)
    for share in (0.0, 0.01, 0.1, 0.5, 0.98, 1.0):
        count = max(1, int(size * share))
        places, rest = most_of(values, count)
        for of in ((tuned, base, dtype), (values, None, "f32")):
            positions, kept = np.full(count, -1, np.int64), np.empty(count, np.float32)
            assert K.top_of(*of, positions, kept) == (size, *range_of(rest))
            assert np.array_equal(positions, places)
            assert np.array_equal(kept.view(np.uint32), values[places].view(np.uint32))


@pytest.mark.parametrize("share", [0.01, 0.2])
def test_top_of_where_a_sample_misleads(share: float) -> None:
    """Where a few places in a row, which the sample passes over or sees nothing else of, are all that is large."""
    size = 1 << 18
    values = normal(size)
    values[1::9] *= 1000  # the step of the sample is 9
    values[9::9] = 0
    count = int(size * share)
    places, rest = most_of(values, count)
    positions, kept = np.empty(count, np.int64), np.empty(count, np.float32)
    assert K.top_of(values, None, "f32", positions, kept) == (size, *range_of(rest))
    assert np.array_equal(positions, places)


@pytest.mark.parametrize("size", [1, 40, 400_000])
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_top_of_finds_what_is_not_finite(size: int, value: float) -> None:
    values = normal(size)
    values[size // 2 :: 7] = value
    assert (
        K.top_of(values, np.zeros_like(values), "f32", np.empty(1, np.int64), np.empty(1, np.float32))[0] == size // 2
    )


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("size", [0, *SIZES])
def test_top_collect(size: int, dtype: str) -> None:
    base, tuned, values = pair(normal(size, 5), dtype)
    bits = values.view(np.int32) & 0x7FFFFFFF
    for bound in {-1, 0, *np.sort(bits)[[size // 2, -1] if size else []].tolist()}:
        places, others = np.flatnonzero(bits > bound), np.flatnonzero(bits <= bound)
        positions, kept = np.empty(places.size, np.int64), np.empty(places.size, np.float32)
        last = (int(others[-1]), float(values[others[-1]])) if others.size else (-1, K.top_collect(
            tuned, base, dtype, bound, 0, positions, kept)[5])  # fmt: skip
        found = K.top_collect(tuned, base, dtype, bound, 10**12, positions, kept)
        assert found == (places.size, size, *range_of(values[others]), *last)
        assert np.array_equal(positions, places + 10**12)
        assert np.array_equal(kept, values[places])
        if places.size:
            less = positions[1:], kept[1:]
            assert K.top_collect(tuned, base, dtype, bound, 0, *less)[0] > places.size - 1


def test_top_collect_finds_what_is_not_finite() -> None:
    values = normal(100)
    values[[37, 80]] = np.nan, np.inf
    positions, kept = np.empty(100, np.int64), np.empty(100, np.float32)
    assert K.top_collect(values, None, "f32", -1, 5, positions, kept)[:2] == (100, 37)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("before", [None, 0.03])
@pytest.mark.parametrize("share", [0.0, 0.01, 1.0])
def test_int4_encode_of_pairs(share: float, before: float | None, dtype: str) -> None:
    for size in SIZES:
        base, tuned, values = pair(normal(size), dtype)
        skipped = some(size, share)
        rest = np.delete(values, skipped)
        rest = rest if before is None else np.concatenate([[np.float32(before)], rest])
        codes = np.clip(np.round((rest - np.float32(-0.02)) / np.float32(0.041) * np.float32(15)), 0, 15)
        packed = np.full((rest.size + 1) // 2, 0xEE, np.uint8)
        K.int4_encode(tuned, base, dtype, before, skipped, -0.02, 0.041, 15.0, packed)
        assert np.array_equal(codes_of(packed, 0, rest.size), codes.astype(np.uint8))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 1.0])
def test_range(size: int, share: float) -> None:
    values, skipped = normal(size), some(size, share)
    rest = np.delete(values, skipped)
    expected = (float(rest.min()), float(rest.max())) if rest.size else (np.inf, -np.inf)
    assert K.range_between(values, skipped) == expected


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 1.0])
def test_int4_encode(size: int, share: float) -> None:
    values, skipped = normal(size), some(size, share)
    low, divisor, factor = np.float32(-0.02), np.float32(0.041), np.float32(15)
    rest = np.delete(values, skipped)
    expected = np.clip(np.round((rest - low) / divisor * factor), 0, 15).astype(np.uint8)
    packed = np.full((rest.size + 1) // 2, 0xEE, np.uint8)
    K.int4_encode(values, None, "f32", None, skipped, float(low), float(divisor), float(factor), packed)
    assert np.array_equal(codes_of(packed, 0, rest.size), expected)
    if rest.size % 2:
        assert packed[-1] & 15 == 0


def test_int4_encode_rounds_ties_to_even() -> None:
    values = np.array([0.5, 1.5, 2.5, 14.5, 15.5, -0.5, -1e30, 1e30], np.float32)
    packed = np.empty(4, np.uint8)
    K.int4_encode(values, None, "f32", None, np.empty(0, np.int64), 0.0, 1.0, 1.0, packed)
    assert codes_of(packed, 0, 8).tolist() == [0, 2, 2, 14, 15, 0, 0, 15]


@pytest.mark.parametrize("dtype", [np.uint16, np.float32])
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("size", [0, *SIZES])
def test_int4_decode(size: int, gaps: bool, first: int, dtype: Any) -> None:
    rng = np.random.default_rng(size)
    table, positions = rng.integers(1, 60_000, 16).astype(dtype), some(size, 0.2)
    values = rng.integers(1, 60_000, positions.size).astype(dtype)
    count = size - (positions.size if gaps else 0)
    packed = rng.integers(0, 256, (first + count + 1) // 2).astype(np.uint8)
    expected = np.empty(size, dtype)
    looked_up = table[codes_of(packed, first, count)]
    if gaps:
        expected[np.setdiff1d(np.arange(size), positions)] = looked_up
    else:
        expected[:] = looked_up
    expected[positions] = values
    out = np.full(size, 7, dtype)
    K.int4_decode(packed, first, table, positions, values, gaps, out)
    assert np.array_equal(out, expected)


@pytest.mark.parametrize("shape", [(1, 1), (1, 1000), (5, 7), (7, 8), (3, 129), (300, 1), (2, 4096), (1, 70_001)])
def test_sign_encode(shape: tuple[int, int]) -> None:
    values = normal(shape[0] * shape[1])
    values[::5], values[1::5] = 0.0, -0.0
    sums, bits = np.empty(shape[0], np.float32), np.empty((values.size + 7) // 8, np.uint8)
    assert K.sign_encode(values, None, "f32", sums, bits) == values.size
    assert np.array_equal(bits, np.packbits(values >= 0))
    assert np.array_equal(sums, np.add.reduce(np.abs(values.reshape(shape)), axis=1))


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("shape", [(1, 8), (3, 64), (5, 72), (2, 136), (7, 248), (1, 1000), (3, 11008), (64, 4096)])
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_signs_of_two_arrays_are_those_of_their_difference(shape: tuple[int, int], offset: int, dtype: str) -> None:
    size = shape[0] * shape[1]
    base, tuned = (np.zeros(size + offset, numpy_dtype(dtype))[offset:] for _ in range(2))
    base[:] = normal(size).astype(base.dtype)
    tuned[:] = (base.astype(np.float32) + normal(size, 1)).astype(base.dtype)
    tuned[::7] = base[::7]
    difference = tuned.astype(np.float32) - base.astype(np.float32)
    found, wanted = ((np.empty(shape[0], np.float32), np.full(size // 8 + 8, 9, np.uint8)) for _ in range(2))
    assert K.sign_encode(as_bits(tuned), as_bits(base), dtype, found[0], found[1][: size // 8]) == size
    assert K.sign_encode(difference, None, "f32", wanted[0], wanted[1][: size // 8]) == size
    assert np.array_equal(found[0].view(np.uint32), wanted[0].view(np.uint32))
    assert np.array_equal(found[1], wanted[1])
    assert np.array_equal(found[1][: size // 8], np.packbits(difference >= 0))


def test_sign_encode_finds_what_is_not_finite() -> None:
    values = normal(100)
    values[[37, 80]] = np.nan, np.inf
    assert K.sign_encode(values, None, "f32", np.empty(4, np.float32), np.empty(13, np.uint8)) == 37
    for odd in (np.nan, np.inf, -np.inf):
        tuned = normal(3 * 200)
        tuned[[317, 430]] = odd, np.nan
        out = np.empty(3, np.float32), np.empty(75, np.uint8)
        assert K.sign_encode(tuned, normal(600, 1), "f32", *out) == 317


def test_a_sum_past_f32_is_of_finite_values() -> None:
    values = np.full(64, 3e38, np.float32)
    for base in (None, np.zeros(64, np.float32)):
        sums = np.zeros(2, np.float32)
        assert K.sign_encode(values, base, "f32", sums, np.empty(8, np.uint8)) == 64
        assert np.isinf(sums).all()


@pytest.mark.parametrize("dtype", [np.uint16, np.float32])
@pytest.mark.parametrize("first", range(8))
@pytest.mark.parametrize("shape", [(1, 1), (1, 1000), (5, 7), (7, 8), (3, 129), (300, 1), (2, 64)])
def test_sign_decode(shape: tuple[int, int], first: int, dtype: Any) -> None:
    rng = np.random.default_rng(first)
    bits = rng.integers(0, 256, (first + shape[0] * shape[1] + 7) // 8).astype(np.uint8)
    word = np.uint16 if dtype is np.uint16 else np.uint32
    scales = rng.integers(1, 2**15, shape[0]).astype(word)
    positive = np.unpackbits(bits)[first : first + shape[0] * shape[1]].reshape(shape).astype(bool)
    expected = np.where(positive, scales[:, None], scales[:, None] ^ word(1 << (8 * word().itemsize - 1)))
    out = np.empty(shape[0] * shape[1], dtype)
    K.sign_decode(bits, first, scales.view(dtype), out)
    assert np.array_equal(out.view(word), expected.astype(word).reshape(-1))


@pytest.mark.parametrize("size", [0, 1, 255, 256, 257, 1000])
def test_first_unordered(size: int) -> None:
    positions = np.arange(size, dtype=np.int64) * 3
    assert K.first_unordered(positions, -1, 3 * size) == size
    for at in {0, size // 2, size - 1} & set(range(size)):
        for wrong in (-1, 3 * at - 3, 3 * size, 2**63 - 1, -(2**63)):
            changed = positions.copy()
            changed[at] = wrong
            expected = next(
                index for index in range(size) if not (changed[index - 1] if index else -1) < changed[index] < 3 * size
            )
            assert K.first_unordered(changed, -1, 3 * size) == expected
    if size:
        assert K.first_unordered(positions, 0, 3 * size) == 0


@pytest.mark.parametrize(
    ("kernel", "arguments"),
    [
        ("top_prune", (np.arange(3), normal(4), 2)),
        ("top_prune", (np.arange(3), normal(3), 0)),
        ("top_prune", (np.arange(3), normal(3), 4)),
        ("range_between", (normal(3), np.array([3]))),
        ("range_between", (normal(3), np.array([1, 1]))),
        ("int4_encode", (normal(3), None, "f32", None, np.array([-1]), 0.0, 1.0, 1.0, np.empty(1, np.uint8))),
        ("int4_encode", (normal(3), None, "f32", None, np.array([1]), 0.0, 1.0, 1.0, np.empty(2, np.uint8))),
        ("int4_encode", (normal(3), None, "f32", 1.0, NOWHERE, 0.0, 1.0, 1.0, np.empty(1, np.uint8))),
        ("int4_encode", (normal(3), normal(2), "f32", None, NOWHERE, 0.0, 1.0, 1.0, np.empty(2, np.uint8))),
        ("top_of", (normal(3), None, "f32", np.empty(4, np.int64), np.empty(4, np.float32))),
        ("top_of", (normal(3), None, "f32", np.empty(0, np.int64), np.empty(0, np.float32))),
        ("top_of", (normal(3), None, "f32", np.empty(2, np.int64), np.empty(1, np.float32))),
        ("top_of", (normal(3), normal(4), "f32", np.empty(1, np.int64), np.empty(1, np.float32))),
        ("top_of", (normal(3), normal(3), "bf16", np.empty(1, np.int64), np.empty(1, np.float32))),
        ("top_of", (np.zeros(3), np.zeros(3), "f64", np.empty(1, np.int64), np.empty(1, np.float32))),
        ("top_of", (np.zeros(3, np.uint16), None, "bf16", np.empty(1, np.int64), np.empty(1, np.float32))),
        ("top_collect", (normal(3), normal(4), "f32", -1, 0, np.empty(1, np.int64), np.empty(1, np.float32))),
        ("top_collect", (normal(3), None, "f32", -1, 0, np.empty(1, np.int64), np.empty(2, np.float32))),
        ("place_values", (np.array([2]), normal(1), np.empty(2, np.float32))),
        ("place_values", (np.array([1]), normal(2), np.empty(2, np.float32))),
        ("place_values", (np.array([1]), np.zeros(1, np.uint16), np.empty(2, np.float32))),
        ("place_values", (np.array([1]), np.zeros(1), np.empty(2))),
        ("sign_encode", (normal(5), None, "f32", np.empty(2, np.float32), np.empty(1, np.uint8))),
        ("sign_encode", (normal(9), None, "f32", np.empty(3, np.float32), np.empty(1, np.uint8))),
        ("sign_encode", (normal(12), normal(12), "f32", np.empty(1, np.float32), np.empty(2, np.uint8))),
        ("sign_encode", (normal(16), normal(8), "f32", np.empty(1, np.float32), np.empty(2, np.uint8))),
        ("sign_decode", (np.empty(1, np.uint8), 1, normal(1), np.empty(8, np.float32))),
        ("sign_decode", (np.empty(2, np.uint8), 8, normal(1), np.empty(8, np.float32))),
        ("sign_decode", (np.empty(2, np.uint8), 0, normal(3), np.empty(8, np.float32))),
    ],
)
def test_arguments_that_do_not_fit_are_refused(kernel: str, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match="expected"):
        getattr(K, kernel)(*arguments)


def test_codes_that_do_not_suffice_are_refused() -> None:
    table, nothing, none = normal(16), np.empty(0, np.int64), np.empty(0, np.float32)
    out = np.empty(4, np.float32)
    for packed, first, positions, values, size in (
        (1, 0, nothing, none, 16),
        (2, 1, nothing, none, 16),
        (2, 2, nothing, none, 16),
        (2, 0, np.array([4]), normal(1), 16),
        (2, 0, nothing, none, 15),
    ):
        with pytest.raises(ValueError, match="expected"):
            K.int4_decode(np.empty(packed, np.uint8), first, table[:size], positions, values, False, out)


def test_sums_are_numpys_for_every_length() -> None:
    """NumPy halves at multiples of 8 from 129 on; where it does shows in the last bit."""
    values = normal(2000) * 3
    bits = np.empty(250, np.uint8)
    for count in range(1, 2001):
        total = np.empty(1, np.float32)
        assert K.sign_encode(values[:count], None, "f32", total, bits[: (count + 7) // 8]) == count
        assert total[0] == np.add.reduce(np.abs(values[:count])), count
