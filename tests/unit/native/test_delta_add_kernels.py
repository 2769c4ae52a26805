"""The kernels that add .wdelta's differences to a base: bit-equal to the reference with every instruction set."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.core.numeric.dtypes import numpy_dtype
from ingot.core.numeric.floats import as_bits
from ingot.core.runtime import native
from tests.support.reference import delta_add as reference

K = native.kernels
Array = np.ndarray[Any, np.dtype[Any]]
FLOATS = ("f32", "f16", "bf16")
SIZES = (0, 1, 15, 33, 1023, 1024, 1025, 5000)
BLOCKS = (2047, 2048, 2176, 2177, 4096, 4300, 9001)  # more than what is spread by masks, or too few codes for it
ODD = (np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 3e38, -3e38, 1e-40, 65504.0, 65520.0)


def base_of(rng: np.random.Generator, count: int, dtype: str) -> Array:
    with np.errstate(over="ignore", invalid="ignore"):
        values = rng.normal(0, 0.02, count)
        values[rng.random(count) < 0.05] = rng.choice(ODD)
        return values.astype(np.float32).astype(numpy_dtype(dtype))


def places(rng: np.random.Generator, count: int, share: float) -> tuple[Array, Array]:
    positions = np.flatnonzero(rng.random(count) < share).astype(np.int64)
    values = rng.normal(0, 0.01, positions.size).astype(np.float32)
    values[rng.random(values.size) < 0.05] = rng.choice(ODD)
    return positions, values


def check(kernel: str, arguments: tuple[Any, ...], base: Array, difference: Array, dtype: str) -> None:
    """Sum, sum in place, sum with its way back, and difference."""
    run, word = getattr(K, kernel), f"u{base.itemsize}"
    total, less = reference.add(base, difference), reference.add(base, difference, less=True)
    back = reference.add(total, difference, less=True)
    out, way = np.empty_like(base), np.empty_like(base)
    run(*arguments, as_bits(base), as_bits(out), as_bits(way), False, dtype)
    assert np.array_equal(out.view(word), total.view(word))
    assert np.array_equal(way.view(word), back.view(word))
    run(*arguments, as_bits(base), as_bits(out), None, True, dtype)
    assert np.array_equal(out.view(word), less.view(word))
    out[...] = base
    run(*arguments, as_bits(out), as_bits(out), None, False, dtype)
    assert np.array_equal(out.view(word), total.view(word))


def bits(array: Array) -> Array:
    return array.view(f"u{array.itemsize}")


def int4_case(seed: int, count: int, share: float, gaps: bool, first: int, dtype: str) -> None:
    rng = np.random.default_rng(seed)
    positions, values = places(rng, count, share)
    table = rng.normal(0, 0.01, 16).astype(np.float32)
    packed = rng.integers(0, 256, (first + count - (positions.size if gaps else 0) + 1) // 2, np.uint8)
    difference = reference.int4(packed, first, table, positions, values, gaps=gaps, count=count)
    arguments = (packed, first, table, positions, values, gaps)
    check("int4_add", arguments, base_of(rng, count, dtype), difference, dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("count", SIZES)
def test_int4_add(count: int, gaps: bool, dtype: str) -> None:
    for first, share in ((0, 0.01), (1, 0.3), (0, 1.0), (1, 0.0)):
        int4_case(count, count, share, gaps, first, dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("count", BLOCKS)
def test_int4_add_of_blocks(count: int, gaps: bool, dtype: str) -> None:
    for first, share in ((0, 0.01), (1, 0.1), (1, 0.0), (0, 0.9)):
        int4_case(count, count, share, gaps, first, dtype)


def test_int4_add_of_a_table_that_is_not_finite() -> None:
    """Sums of codes that are NaNs, or whose way back is one."""
    rng = np.random.default_rng(0)
    table = np.array([np.nan, -np.nan, np.inf, -np.inf, *range(12)], np.float32)
    packed, nowhere = rng.integers(0, 256, 4500, np.uint8), np.empty(0, np.int64)
    values = np.empty(0, np.float32)
    difference = reference.int4(packed, 1, table, nowhere, values, gaps=True, count=8000)
    for dtype in FLOATS:
        check("int4_add", (packed, 1, table, nowhere, values, True), base_of(rng, 8000, dtype), difference, dtype)


@given(st.integers(0, 2**32), st.integers(0, 9000), st.floats(0, 1), st.booleans(), st.integers(0, 1))
def test_int4_add_of_anything(seed: int, count: int, share: float, gaps: bool, first: int) -> None:
    int4_case(seed, count, share, gaps, first, FLOATS[seed % 3])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(1, 1), (1, 3000), (5, 7), (3, 129), (300, 1), (2, 2048), (7, 1025)])
def test_sign_add(shape: tuple[int, int], dtype: str) -> None:
    rng = np.random.default_rng(shape[1])
    count = shape[0] * shape[1]
    for first in range(8):
        packed = rng.integers(0, 256, (first + count + 7) // 8, np.uint8)
        scales = np.abs(rng.normal(0, 0.01, shape[0])).astype(np.float32)
        scales[rng.random(shape[0]) < 0.2] = rng.choice([np.inf, np.nan, 0])
        difference = reference.sign(packed, first, scales, count=count)
        check("sign_add", (packed, first, scales), base_of(rng, count, dtype), difference, dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("count", SIZES)
def test_placed_add(count: int, dtype: str) -> None:
    rng = np.random.default_rng(count)
    for share in (0.0, 0.1, 1.0):
        positions, values = places(rng, count, share)
        difference = reference.placed(positions, values, count=count)
        base = base_of(rng, count, dtype)
        check("placed_add", (positions, 0, values), base, difference, dtype)
        check("placed_add", (positions + 2**40, 2**40, values), base, difference, dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("count", SIZES)
def test_differences(count: int, dtype: str) -> None:
    rng = np.random.default_rng(count)
    base, tuned, out = base_of(rng, count, dtype), base_of(rng, count, dtype), np.empty(count, np.float32)
    K.differences(as_bits(tuned), as_bits(base), out, dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = tuned.astype(np.float32) - base.astype(np.float32)
    assert np.array_equal(bits(out), bits(expected))


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("count", [0, 1, 31, 32, 33, 1000, 4097])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 1.0])
def test_changed_words(count: int, width: int, share: float) -> None:
    rng = np.random.default_rng(count)
    old = rng.integers(0, 256, count * width, np.uint8).view(f"u{width}")
    new = old.copy()
    new[rng.random(count) < share] ^= np.array(1 << 8 * width - 1 | 1, old.dtype)
    gaps, steps = reference.changes(old, new)
    for room in {gaps.size, gaps.size + 7, max(gaps.size - 1, 0), 0}:
        found, by = np.full(room, -7, np.int64), np.empty(room, old.dtype)
        count_found = K.changed_words(old, new, found, by)
        assert count_found == gaps.size if gaps.size <= room else count_found > room
        if gaps.size <= room:
            assert np.array_equal(found[: gaps.size], gaps)
            assert np.array_equal(by[: gaps.size], steps)
            assert (found[gaps.size :] == -7).all()


def test_arguments_that_do_not_fit_are_refused() -> None:
    table, at, apart = np.zeros(16, np.float32), np.empty(0, np.int64), np.empty(0, np.float32)
    base, codes, one = np.zeros(4, np.float32), np.zeros(2, np.uint8), np.zeros(1, np.float32)
    good: dict[str, Any] = {
        "packed": codes, "first": 0, "table": table, "positions": at, "values": apart, "gaps": False,
        "base": base, "out": base, "back": None, "less": False, "dtype": "f32",
    }  # fmt: skip
    K.int4_add(**good)
    both = np.zeros(8, np.float32)
    for wrong in (
        {"packed": codes[:1]},
        {"first": 1},
        {"first": 2},
        {"table": table[:15]},
        {"positions": np.array([4]), "values": one},
        {"positions": np.array([0])},
        {"dtype": "bf16"},
        {"dtype": "f64"},
        {"base": np.zeros(3, np.float32)},
        {"base": both[:4], "out": both[1:5]},
        {"back": base},
        {"back": np.zeros(3, np.float32)},
        {"back": np.zeros(4, np.float32), "less": True},
        {"back": np.zeros(4, np.uint16)},
    ):
        with pytest.raises(ValueError, match="expected"):
            K.int4_add(**{**good, **wrong})
    with pytest.raises(ValueError, match="expected"):
        K.sign_add(codes[:1], 5, one, base, base, None, False, "f32")
    with pytest.raises(ValueError, match="expected"):
        K.sign_add(codes, 0, np.zeros(3, np.float32), base, base, None, False, "f32")
    with pytest.raises(ValueError, match="expected"):
        K.placed_add(np.array([3, 2]), 0, np.zeros(2, np.float32), base, base, None, False, "f32")
    least = np.iinfo(np.int64).min
    for position, origin in ((base.size, 0), (4, 5), (base.size + 5, 5), (least, 1), (0, 1)):
        with pytest.raises(ValueError, match="expected"):
            K.placed_add(np.array([position]), origin, np.zeros(1, np.float32), base, base, None, False, "f32")
    with pytest.raises(ValueError, match="expected"):
        K.differences(base, base, base, "f32")
    for gaps, steps in ((np.zeros(2, np.int64), one), (np.zeros(1, np.int64), np.zeros(1, np.uint16))):
        with pytest.raises(ValueError, match="expected"):
            K.changed_words(base, base, gaps, steps)
