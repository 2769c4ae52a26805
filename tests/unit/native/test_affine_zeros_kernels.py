"""Zero points and offsets: every instruction set gives the numbers of the reference, and refuses what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ingot.core.numeric.dtypes import numpy_dtype
from ingot.core.numeric.floats import as_bits, float_name, written
from ingot.core.runtime import native
from tests.support.reference import affine_zeros as reference

Array = np.ndarray[Any, np.dtype[Any]]
SCALES = ("f32", "f16", "bf16")
# What one number of many may be; most of them are refused by one function or another.
ODD = (0.0, -0.0, 0.5, -1.0, 3.0, 255.0, 256.0, -129.0, 2.0**-24, 1e-30, 2.0**41, 3e38, np.inf, -np.inf, np.nan)


def numbers(dtype: str, seed: int = 0, count: int = 700) -> Array:
    """Scales with few bits, so that every type has them and their products."""
    rng = np.random.default_rng(seed)
    return np.ldexp(rng.integers(1, 16, count), rng.integers(-9, 3, count)).astype(numpy_dtype(dtype))


def check(found: tuple[bool, Array], wanted: Array | None) -> None:
    fits, out = found
    assert fits == (wanted is not None)
    if wanted is not None:
        assert out.tobytes() == wanted.tobytes()


def offsets(scales: Array, points: Array) -> tuple[bool, Array]:
    out = np.empty_like(scales)
    return native.kernels.affine_offsets(as_bits(scales), as_bits(points), written(out), float_name(scales)), out


def points(scales: Array, shifts: Array, low: int, high: int) -> tuple[bool, Array]:
    out = np.empty_like(scales)
    kernel = native.kernels.affine_points
    return kernel(as_bits(scales), as_bits(shifts), low, high, written(out), float_name(scales)), out


def shift(zeros: Array, delta: float, target: str) -> tuple[bool, Array]:
    out = np.empty(zeros.shape, numpy_dtype(target))
    return native.kernels.affine_shift(as_bits(zeros), float_name(zeros), delta, written(out), target), out


def integers(values: Array, low: int, high: int) -> tuple[bool, Array]:
    out = np.empty(values.shape, np.uint8)
    return native.kernels.affine_integers(as_bits(values), float_name(values), low, high, out), out


def same(values: Array, target: str) -> tuple[bool, Array]:
    out = np.empty(values.shape, numpy_dtype(target))
    return native.kernels.affine_same(as_bits(values), float_name(values), written(out), target), out


def with_odd(values: Array, odd: float, at: int) -> Array:
    changed = values.copy()
    with np.errstate(over="ignore"):
        changed[at] = odd
    return changed


@pytest.mark.parametrize("dtype", SCALES)
def test_offsets_and_back(dtype: str) -> None:
    scales = numbers(dtype)
    scales[5] = 0
    zeros = np.random.default_rng(1).integers(0, 16, scales.size).astype(scales.dtype)
    zeros[5] = 0
    made = reference.offsets(scales, zeros)
    assert made is not None
    check(offsets(scales, zeros), made)
    check(points(scales, made, 0, 15), reference.points(scales, made, 0, 15))
    assert points(scales, made, 0, 15)[0]
    check(points(scales, made, 0, 7), None)
    for place, odd in enumerate(ODD):
        at = 41 * place
        check(offsets(scales, with_odd(zeros, odd, at)), reference.offsets(scales, with_odd(zeros, odd, at)))
        check(offsets(with_odd(scales, odd, at), zeros), reference.offsets(with_odd(scales, odd, at), zeros))
        for some in ((with_odd(scales, odd, at), made), (scales, with_odd(made, odd, at))):
            check(points(*some, 0, 15), reference.points(*some, 0, 15))


@pytest.mark.parametrize("target", SCALES)
@pytest.mark.parametrize("dtype", SCALES)
def test_points_shifted_or_in_another_type(dtype: str, target: str) -> None:
    zeros = np.arange(-128, 128).astype(numpy_dtype(dtype))
    for odd in ODD:
        some = with_odd(zeros, odd, 200)
        for delta in (8.0, -128.0):
            check(shift(some, delta, target), reference.shift(some, delta, numpy_dtype(target)))
        for low, high in ((0, 255), (-128, 127), (1, 16)):
            check(integers(some, low, high), reference.integers(some, low, high))
            check(integers(np.abs(some), low, high), reference.integers(np.abs(some), low, high))
        found, wanted = same(some, target), reference.same(some, numpy_dtype(target))
        assert found[0] == (wanted is not None)
        if wanted is not None:
            assert np.array_equal(found[1].astype(np.float32), wanted.astype(np.float32), equal_nan=True)


@pytest.mark.parametrize("dtype", SCALES)
def test_equal_numbers_and_bytes(dtype: str) -> None:
    eights = np.full(600, 8, numpy_dtype(dtype))
    assert native.kernels.affine_equal(as_bits(eights), dtype, 8.0)
    assert native.kernels.affine_equal(as_bits(eights[:0]), dtype, 8.0)
    for at in (0, 255, 256, 599):
        assert not native.kernels.affine_equal(as_bits(with_odd(eights, np.nan, at)), dtype, 8.0)
    every = np.arange(256, dtype=np.uint8)
    for kind in (np.uint8, np.int8):
        out = np.empty(256, numpy_dtype(dtype))
        native.kernels.affine_numbers(every, kind is np.int8, written(out), dtype)
        assert np.array_equal(out.astype(np.float32), every.view(kind).astype(np.float32))


def test_what_does_not_fit() -> None:
    some, out = np.zeros(4, np.uint16), np.zeros(4, np.uint8)
    calls: list[Any] = [
        lambda: native.kernels.affine_offsets(some, some[1:], some, "f16"),
        lambda: native.kernels.affine_points(some[1:], some, 0, 1, some, "f16"),
        lambda: native.kernels.affine_offsets(some, some, some, "f32"),
        lambda: native.kernels.affine_shift(some, "f64", 8.0, some, "f16"),
        lambda: native.kernels.affine_integers(some[1:], "f16", 0, 255, out),
        lambda: native.kernels.affine_integers(some, "f16", 0, 256, out),
        lambda: native.kernels.affine_integers(some, "f16", -129, 0, out),
        lambda: native.kernels.affine_numbers(out[1:], False, some, "f16"),
        lambda: native.kernels.affine_same(some, "f16", some[1:], "f16"),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="expected"):
            call()
