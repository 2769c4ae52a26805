"""Products of activations in 8 bits: bit-equal to the reference on every instruction set, for any number of threads."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from ingot.codecs.affine.matmul import PackedMatrix
from ingot.core.numeric.dtypes import numpy_dtype
from ingot.model.layouts.affine import OFFSETS, PER_TENSOR, POINTS, ROW, AffineLayout, Constant, Group
from ingot.model.tensor import Array
from tests.support.packed import PLAIN, matrix, weights_of
from tests.support.reference.affine_matmul import fused, int8, rounded

KINDS = (
    PLAIN,
    replace(PLAIN, grid=Group(64), signed=False, zero=POINTS),
    replace(PLAIN, grid=Group(128), signed=False, zero=OFFSETS),
    replace(PLAIN, grid=Group(96), zero=Constant(-3)),
    replace(PLAIN, grid=ROW, signed=False, zero=Constant(7)),
    replace(PLAIN, grid=PER_TENSOR, zero=POINTS),
    replace(PLAIN, bits=8, grid=ROW),
    replace(PLAIN, bits=8, grid=Group(64)),
    replace(PLAIN, bits=8, signed=False, zero=OFFSETS),
    replace(PLAIN, bits=8, grid=Group(256), zero=Constant(5000)),
    replace(PLAIN, bits=2, signed=False, zero=POINTS),
    replace(PLAIN, bits=3, grid=Group(96), signed=False, zero=OFFSETS),
)
# Rows of x, rows and columns of weights: at and beside tiles, fours of blocks, spans; a few rows go another way.
SHAPES = ((1, 5, 1), (2, 9, 130), (4, 66, 1000), (5, 67, 63), (13, 70, 1100), (26, 3, 257))


def unaligned(params: AffineLayout, rows: int, cols: int, scale_dtype: str) -> PackedMatrix:
    """A matrix whose codes lie where no word is aligned."""
    held = matrix(params, rows, cols, scale_dtype, rows + cols)
    codes = np.empty(held.packed.size + 1, np.uint8)[1:]
    codes[:] = held.packed.reshape(-1)
    return PackedMatrix(params, held.shape, codes, held.scales, held.zeros)


def product(held: PackedMatrix, x: Array, bias: Array | None = None, workers: int = 1, *, dots: bool = True) -> Array:
    out = np.full((len(x), held.shape[0]), 77, x.dtype)
    held.int8(x, out, bias, workers, dots=dots)
    return out


@pytest.mark.parametrize("params", KINDS, ids=str)
def test_equals_the_reference(params: AffineLayout) -> None:
    for number, (count, rows, cols) in enumerate(SHAPES):
        x_type, scale_type = (("bf16", "f16"), ("f32", "bf16"), ("f16", "f32"))[number % 3]
        held = unaligned(params, rows, cols, scale_type)
        rng = np.random.default_rng(number)
        x = rng.normal(0, 1, (count, cols)).astype(numpy_dtype(x_type))
        bias = rng.normal(0, 1, rows).astype(numpy_dtype(scale_type)) if number % 2 else None
        wanted = int8(x, weights_of(held), bias).astype(x.dtype)
        for dots in (True, False):
            assert product(held, x, bias, 1 + number % 3, dots=dots).tobytes() == wanted.tobytes()


@pytest.mark.parametrize("params", [KINDS[0], KINDS[6]], ids=str)
def test_codes_and_x_at_the_ends_of_their_ranges(params: AffineLayout) -> None:
    held = unaligned(params, 20, 64, "f32")
    for byte in (0x00, 0x7F, 0x80, 0x88, 0xFF, 0x77):
        held.packed[:] = byte
        for sign in (1, -1):
            for count in (1, 6):
                x = np.full((count, 64), np.float32(sign))
                for dots in (True, False):
                    assert product(held, x, dots=dots).tobytes() == int8(x, weights_of(held)).tobytes()


@pytest.mark.parametrize("params", [KINDS[0], KINDS[2], KINDS[6]], ids=str)
def test_a_row_among_many_is_what_it_is_alone(params: AffineLayout) -> None:
    held = unaligned(params, 70, 160, "f16")
    x = np.random.default_rng(8).normal(0, 1, (600, 160)).astype(np.float32)
    every = product(held, x, None, 2)
    for count in (0, 1, 2, 3, 4, 5, 11, 12, 13, 24, 37, 253, 263, 264, 265, 529):
        assert product(held, x[:count]).tobytes() == every[:count].tobytes()


def test_threads_change_no_bit() -> None:
    held = unaligned(KINDS[1], 1000, 512, "bf16")
    x = np.random.default_rng(6).normal(0, 1, (30, 512)).astype(np.float32)
    for count in (1, 30):
        alone = product(held, x[:count])
        for workers in (2, 3, 9):
            for _ in range(5):
                assert product(held, x[:count], None, workers).tobytes() == alone.tobytes()


def test_blocks_that_are_nothing_tiny_or_not_finite() -> None:
    held = unaligned(KINDS[0], 20, 160, "f32")
    x = np.random.default_rng(3).normal(0, 1, (6, 160)).astype(np.float32)
    x[0] = 0
    x[1, :32] = 2.0**-120
    x[2, 64:96] *= np.float32(2.0**-110)
    x[3] = np.float32(3e38)
    x[4, 70], x[5, 3] = np.inf, np.nan
    found, wanted = product(held, x), int8(x, weights_of(held))
    assert np.isnan(found[4:]).all()
    assert not np.isnan(found[:3]).any()
    assert (found[0] == 0).all()
    np.testing.assert_array_equal(found, wanted)
    for row in range(6):
        np.testing.assert_array_equal(product(held, x[row : row + 1]), wanted[row : row + 1])


def test_the_error_is_half_a_step_of_each_activation() -> None:
    for params in KINDS:
        held = unaligned(params, 33, 416, "f16")
        x = np.random.default_rng(4).normal(0, 1, (3, 416)).astype(np.float32)
        dense = np.abs(held.decode(0, 33, "f32").astype(np.float64))
        steps = np.repeat(np.abs(x.reshape(3, -1, 32)).max(-1) / 127, 32, axis=1)
        error = np.abs(product(held, x) - x @ held.decode(0, 33, "f32").astype(np.float64).T)
        assert (error <= 0.51 * steps @ dense.T + 1e-5 * np.abs(x) @ dense.T + 1e-3).all()


def test_activations_are_rounded_to_the_nearest_number() -> None:
    x = np.float32([[127, 0.5, 1.5, 2.5, -0.5, -126.5, 3.49] + [0] * 25])
    numbers, steps = rounded(x)
    assert (steps[0, 0], numbers[0, 0, :7].tolist()) == (1, [127, 0, 2, 2, 0, -126, 3])


def test_the_reference_rounds_a_product_and_a_sum_once() -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.normal(0, 1, 300).astype(np.float32) for _ in range(2))
    c = (rng.normal(0, 1, 300) * 2.0 ** rng.integers(-30, 3, 300)).astype(np.float32)
    for found, one, two, three in zip(fused(a, b, c), a, b, c, strict=True):
        exact = Fraction(float(one)) * Fraction(float(two)) + Fraction(float(three))
        beside = [np.nextafter(found, np.float32(side)) for side in (-np.inf, np.inf)]
        assert all(abs(Fraction(float(found)) - exact) <= abs(Fraction(float(other)) - exact) for other in beside)


def test_what_the_kernels_do_not_take() -> None:
    for params in (
        replace(PLAIN, grid=Group(40)),
        replace(PLAIN, bits=8, zero=Constant(-(2**15) - 1)),
        replace(PLAIN, bits=5),
    ):
        held = unaligned(params, 3, 80, "f16")
        assert not held.rounds
        with pytest.raises(ValueError, match="expected"):
            product(held, np.ones((1, 80), np.float32))
    held = unaligned(PLAIN, 3, 20, "f16")
    x = np.ones((2, 20), np.float32)
    for bad, out, bias in (
        (x[:, :19], np.empty((2, 3), np.float32), None),
        (x, np.empty((2, 4), np.float32), None),
        (x, np.empty((2, 3), np.float16), None),
        (x, np.empty((2, 3), np.float32), np.ones(2, np.float32)),
        (x.astype(np.float64), np.empty((2, 3), np.float64), None),
    ):
        with pytest.raises(ValueError, match="expected"):
            held.int8(bad, out, bias)
