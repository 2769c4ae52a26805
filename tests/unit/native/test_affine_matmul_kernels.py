"""Products with packed weights: bit-equal to the reference on every instruction set, and for any number of threads."""

from __future__ import annotations

import os
import threading
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.codecs.affine.matmul import PackedMatrix, in_blocks, multiplies
from ingot.core.numeric.dtypes import numpy_dtype
from ingot.core.runtime import native
from ingot.model.layouts.affine import OFFSETS, PER_TENSOR, POINTS, ROW, AffineLayout, Constant, Group
from ingot.model.tensor import Array
from tests.support.packed import PLAIN, matrix, weights_of
from tests.support.reference.affine_matmul import gemm, matmul

TYPES = ("f32", "f16", "bf16")
KINDS = (
    PLAIN,
    replace(PLAIN, signed=False, zero=POINTS),
    replace(PLAIN, signed=False, zero=OFFSETS, grid=Group(64)),
    replace(PLAIN, signed=False, zero=Constant(7), grid=Group(128)),
    replace(PLAIN, grid=Group(40), zero=POINTS),
    replace(PLAIN, grid=ROW, zero=Constant(-3)),
    replace(PLAIN, grid=PER_TENSOR, zero=POINTS),
    replace(PLAIN, packing="8_per_i32", signed=False),
    replace(PLAIN, bits=8, grid=ROW),
    replace(PLAIN, bits=8, grid=ROW, signed=False, zero=POINTS),
    replace(PLAIN, bits=8, signed=False, zero=OFFSETS),
    replace(PLAIN, bits=8, grid=Group(4), zero=Constant(5)),
    replace(PLAIN, bits=8, grid=Group(1000)),
)

MANY = (
    *(params for params in KINDS if in_blocks(params, 2311)),
    replace(PLAIN, bits=2, signed=False, zero=POINTS),
    replace(PLAIN, bits=3, grid=Group(96), zero=OFFSETS, signed=False),
    replace(PLAIN, bits=3, grid=ROW, zero=Constant(2)),
    replace(PLAIN, bits=8, grid=Group(256), zero=Constant(5000)),  # numbers that bf16 does not hold
)


def product(held: PackedMatrix, x: Array, bias: Array | None = None, workers: int = 1) -> Array:
    out = np.full((len(x), held.shape[0]), 77, x.dtype)
    held.matmul(x, out, bias, workers)
    return out


@pytest.mark.parametrize("params", KINDS, ids=str)
@pytest.mark.parametrize("cols", [1, 8, 63, 128, 200, 2311])
def test_equals_the_reference(params: AffineLayout, cols: int) -> None:
    for number, (count, rows) in enumerate(((1, 5), (4, 1), (7, 67))):
        held = matrix(params, rows, cols, TYPES[number], cols)
        rng = np.random.default_rng(number)
        x = rng.normal(0, 1, (count, cols)).astype(numpy_dtype(TYPES[(number + cols) % 3]))
        bias = rng.normal(0, 1, rows).astype(numpy_dtype(TYPES[number])) if number else None
        wanted = matmul(x, weights_of(held), bias).astype(x.dtype)
        assert product(held, x, bias).tobytes() == wanted.tobytes()


def product_of_many(held: PackedMatrix, x: Array, bias: Array | None = None, workers: int = 1) -> Array:
    out = np.full((len(x), held.shape[0]), 77, x.dtype)
    held.gemm(x, out, bias, workers)
    return out


@pytest.mark.parametrize("params", MANY, ids=str)
def test_many_rows_equal_the_reference(params: AffineLayout) -> None:
    shapes = ((1, 5, 1), (9, 67, 63), (34, 3, 257), (7, 65, 300), (13, 131, 560))
    for number, (count, rows, cols) in enumerate(shapes):
        for types in (("bf16", "f16"), ("f16", "f32"), ("f32", "bf16"))[number % 2 :: 2]:
            held = matrix(params, rows, cols, types[1], cols)
            held.packed = np.frombuffer(b" " + held.packed.tobytes(), np.uint8)[1:]  # where no word is aligned
            held._native = held._open()
            rng = np.random.default_rng(number)
            x = rng.normal(0, 1, (count, cols)).astype(numpy_dtype(types[0]))
            bias = rng.normal(0, 1, rows).astype(numpy_dtype(types[1])) if number else None
            wanted = gemm(x, weights_of(held), bias).astype(x.dtype)
            assert product_of_many(held, x, bias, 1 + number % 3).tobytes() == wanted.tobytes()


@pytest.mark.parametrize("value", [1e-40, 2.0**-120, 2.0**120, 3e38])
def test_many_rows_with_values_at_the_ends_of_the_range(value: float) -> None:
    held = matrix(KINDS[8], 40, 96, "f32", 2)
    x = np.random.default_rng(3).normal(0, 1, (20, 96)).astype(numpy_dtype("bf16"))
    x[3, 5:9] = value
    found, wanted = (every.astype(np.float32) for every in (product_of_many(held, x), gemm(x, weights_of(held))))
    np.testing.assert_array_equal(found, wanted.astype(x.dtype).astype(np.float32))


@pytest.mark.parametrize("name", ["bf16", "f16"])
def test_a_row_among_many_is_what_it_is_alone(name: str) -> None:
    held = matrix(PLAIN, 70, 200, "f16", 7)
    x = np.random.default_rng(8).normal(0, 1, (600, 200)).astype(numpy_dtype(name))
    every = product_of_many(held, x, None, 2)
    for count in (0, 1, 2, 3, 5, 6, 7, 16, 17, 31, 33, 64, 255, 256, 257, 513):
        assert product_of_many(held, x[:count]).tobytes() == every[:count].tobytes()


@pytest.mark.parametrize("params", KINDS, ids=str)
def test_is_the_product_with_the_decoded_matrix(params: AffineLayout) -> None:
    held = matrix(params, 33, 417, "f16", 3)
    x = np.random.default_rng(4).normal(0, 1, (3, 417)).astype(np.float32)
    dense = held.decode(0, 33, "f32").astype(np.float64)
    error = np.abs(product(held, x) - x @ dense.T)
    assert (error <= 4e-6 * np.abs(x) @ np.abs(dense).T + 1e-6).all()


@given(st.data())
def test_any_shape(data: st.DataObject) -> None:
    params = data.draw(st.sampled_from(KINDS))
    rows, cols, count = (data.draw(st.integers(low, high)) for low, high in ((0, 70), (1, 300), (0, 6)))
    if params.granularity == "group":
        params = replace(params, grid=Group(32 // params.bits * data.draw(st.integers(1, 40))))
    held = matrix(params, rows, cols, data.draw(st.sampled_from(TYPES)), data.draw(st.integers(0, 99)))
    raw = data.draw(st.binary(min_size=4 * count, max_size=4 * count))
    x = np.resize(np.frombuffer(raw, np.uint8) % 32, (count, cols)).astype(np.float32)  # numbers without NaN
    workers = data.draw(st.integers(1, 3))
    if count and rows:
        assert product(held, x, None, workers).tobytes() == matmul(x, weights_of(held)).tobytes()
    else:
        assert product(held, x, None, workers).shape == (count, rows)


@pytest.mark.parametrize("params", [KINDS[0], KINDS[2], KINDS[8]], ids=str)
def test_threads_change_no_bit(params: AffineLayout) -> None:
    held = matrix(params, 1000, 513, "bf16", 5)
    x = np.random.default_rng(6).normal(0, 1, (5, 513)).astype(np.float32)
    alone = product(held, x)
    for workers in (2, 3, 9):
        for _ in range(20):
            assert product(held, x, None, workers).tobytes() == alone.tobytes()


@pytest.mark.parametrize("params", [MANY[1], MANY[5], MANY[-3]], ids=str)
def test_neither_threads_nor_the_number_of_rows_change_a_bit(params: AffineLayout) -> None:
    held = matrix(params, 1351, 70, "bf16", 5)  # 22 steps of a thread, the last of 7 rows
    x = np.random.default_rng(6).normal(0, 1, (600, 70)).astype(numpy_dtype("bf16"))
    alone = product_of_many(held, x)
    assert alone[:2].tobytes() == gemm(x[:2], weights_of(held)).astype(x.dtype).tobytes()
    for count, workers in ((1, 2), (6, 3), (33, 9), (257, 30), (600, 4)):
        assert product_of_many(held, x[:count], None, workers).tobytes() == alone[:count].tobytes()


def test_callers_at_once_do_not_mix() -> None:
    held = [matrix(KINDS[seed], 700, 256, "f32", seed) for seed in range(4)]
    x = np.random.default_rng(0).normal(0, 1, (2, 256)).astype(np.float32)
    wanted = [product(one, x).tobytes() for one in held]
    wrong: list[int] = []

    def call(index: int) -> None:
        wrong.extend(index for _ in range(30) if product(held[index], x, None, 3).tobytes() != wanted[index])

    threads = [threading.Thread(target=call, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_has_threads_of_its_own() -> None:
    held = matrix(KINDS[0], 1000, 512, "f32", 1)
    x = np.ones((1, 512), np.float32)
    wanted = product(held, x, None, 2).tobytes()
    child = os.fork()
    if child == 0:
        os._exit(0 if product(held, x, None, 2).tobytes() == wanted else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_values_that_are_not_finite_stay_in_their_rows() -> None:
    held = matrix(KINDS[0], 4, 64, "f32", 1)
    held.scales[2] = np.nan
    x = np.ones((2, 64), np.float32)
    out = product(held, x)
    assert np.isnan(out).tolist() == [[False, True, False, False]] * 2
    x[1, 3] = np.inf
    assert np.isfinite(product(held, x)[0, [0, 2, 3]]).all()
    assert not np.isfinite(product(held, x)[1]).any()


def test_what_the_kernels_do_not_take() -> None:
    assert not multiplies(replace(PLAIN, bits=3), 64)
    assert not multiplies(replace(PLAIN, packing="rows_msb"), 64)
    assert not multiplies(replace(PLAIN, grid=Group(12)), 64)
    assert not multiplies(PLAIN, 0)
    held = matrix(replace(PLAIN, bits=3), 3, 20, "f16", 0)
    assert (held.direct, held.takes_gemm) == (False, True)
    with pytest.raises(ValueError, match="expected"):
        product(held, np.ones((1, 20), np.float32))
    held = matrix(replace(PLAIN, grid=Group(40)), 3, 60, "f16", 0)
    assert (held.direct, held.takes_gemm) == (True, False)
    with pytest.raises(ValueError, match="expected"):
        product_of_many(held, np.ones((1, 60), np.float32))
    held = matrix(replace(PLAIN, bits=5), 3, 20, "f16", 0)
    assert (held.direct, held.takes_gemm) == (False, False)
    for call in (product, product_of_many):
        with pytest.raises(ValueError, match="decode"):
            call(held, np.ones((1, 20), np.float32))


def test_sizes_are_checked_before_anything_is_read() -> None:
    held = matrix(PLAIN, 3, 20, "f16", 0)
    x = np.ones((2, 20), np.float32)
    for bad, out, bias in (
        (x[:, :19], np.empty((2, 3), np.float32), None),
        (x, np.empty((2, 4), np.float32), None),
        (x, np.empty((1, 3), np.float32), None),
        (x, np.empty((2, 3), np.float16), None),
        (x, np.empty((2, 3), np.float32), np.ones(2, np.float32)),
        (np.ones((65, 20), np.float32), np.empty((65, 3), np.float32), None),
        (x.astype(np.float64), np.empty((2, 3), np.float64), None),
    ):
        with pytest.raises(ValueError, match="expected"):
            held.matmul(bad, out, bias)
    sizes = {"rows": 3, "cols": 20, "group": 32, "bits": 4, "signed": True, "per_tensor": False, "row_bytes": 10}
    packed, scales = np.zeros(30, np.uint8), np.zeros(3, np.float32)
    rest = {"offset": False, "zero_point": 0, "scale_dtype": "f32"}
    native.kernels.PackedMatrix(packed, scales, None, **sizes, **rest)
    for change in (
        {"rows": 4}, {"cols": 21}, {"cols": 0}, {"bits": 5}, {"row_bytes": 9}, {"group": 4}, {"group": 0},
        {"rows": 2**63}, {"per_tensor": True}, {"zero_point": 1 << 30}, {"scale_dtype": "f16"},
    ):  # fmt: skip
        with pytest.raises(ValueError, match="expected"):
            native.kernels.PackedMatrix(packed, scales, None, **{**sizes, **rest, **change})
    with pytest.raises(ValueError, match="one zero per scale"):
        native.kernels.PackedMatrix(packed, scales, np.zeros(2, np.float32), **sizes, **rest)
