"""The affine kernels against their NumPy reference, bit for bit, for every instruction set."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest

from ingot.core.numeric.dtypes import numpy_dtype
from ingot.core.numeric.floats import as_bits
from ingot.core.runtime import native
from tests.support.reference import affine as reference
from tests.support.reference.affine import Grid

Array = np.ndarray[Any, np.dtype[Any]]

kernels = native.kernels
SOURCES = ("f32", "f16", "bf16", "f64")
SCALES = ("f32", "f16", "bf16")
TARGETS = ("f32", "f16", "bf16")
# Columns and group sizes: one and several chunks of 1024, ragged ends, groups across bytes, chunks and the whole row.
LAYOUTS = (
    (1, 1),
    (7, 3),
    (64, 16),
    (100, 33),
    (130, 64),
    (257, 257),
    (1024, 128),
    (1100, 1000),
    (2600, 1300),
    (2500, 40),
    (2500, 2500),
)


def layout(
    cols: int,
    group: int,
    bits: int,
    *,
    signed: bool = True,
    msb: bool = False,
    pad: int = 0,
    tensor: bool = False,
    offset: bool = False,
):
    return kernels.AffineLayout(
        cols=cols,
        group=group,
        bits=bits,
        signed=signed,
        msb=msb,
        per_tensor=tensor,
        row_bytes=-(-cols * bits // 8) + pad,
        offset=offset,
    )


def blocks(rng: np.random.Generator, rows: int, cols: int, dtype: str) -> Array:
    """Rows of noise, weights, zeros, one outlier, tiny, huge, constant, and one sign."""
    values = rng.normal(0, 1, (rows, cols)) * rng.choice([1e-3, 0.05, 1.0, 100.0], (rows, 1))
    kinds = [
        lambda row: row * 0,
        lambda row: np.where(rng.random(cols) < 0.05, row * 1000, row),
        lambda row: row * 2.0**-20,
        lambda row: row * (2.0**-140 if dtype != "f16" else 2.0**-23),
        lambda row: row * (2.0**12 if dtype == "f16" else 2.0**100),
        lambda row: row * 0 + 0.37,
        np.abs,
        lambda row: -np.abs(row),
        lambda row: np.rint(row * 4) / 2,  # ties
        lambda row: np.where(rng.random(cols) < 0.5, -0.0, row),
    ]
    for index, kind in enumerate(kinds[: rows - 1]):
        values[index + 1] = kind(values[index + 1])
    return (
        np.clip(values, -60000, 60000).astype(numpy_dtype(dtype))
        if dtype == "f16"
        else values.astype(numpy_dtype(dtype))
    )


def stored(rng: np.random.Generator, shape: tuple[int, ...], dtype: str, *, zeros: bool) -> Array:
    """Scales, or zero points that need not be integers; infinities, NaN, zero and subnormal numbers among them."""
    values = rng.uniform(-300, 300, shape) if zeros else rng.normal(0, 0.1, shape)
    odd = rng.random(shape) < 0.1
    values[odd] = rng.choice([np.inf, -np.inf, np.nan, 0.0, -0.0, 2.0**-24, 2.0**-130, 60000.0], int(odd.sum()))
    with np.errstate(over="ignore"):
        return values.astype(numpy_dtype(dtype))


def same_numbers(one: Array, other: Array) -> None:
    """Equal bits, where any NaN equals any other: its payload is the processor's choice."""
    nan = np.isnan(one.astype(np.float32))
    assert np.array_equal(nan, np.isnan(other.astype(np.float32)))
    assert np.where(nan, 0, as_bits(one).view(f"u{one.itemsize}")).tobytes() == (
        np.where(nan, 0, as_bits(other).view(f"u{one.itemsize}")).tobytes()
    )


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize(("cols", "group"), LAYOUTS)
def test_dequantize(bits: int, cols: int, group: int) -> None:
    rng = np.random.default_rng(bits * 10000 + cols + group)
    rows, groups = 3, -(-cols // group)
    for msb in (False, True):
        codes = rng.integers(0, 2**bits, (rows, cols), np.uint8)
        packed = reference.pack(codes, bits, msb=msb)
        assert np.array_equal(reference.unpack(packed, cols, bits, msb=msb), codes)
        for scale_dtype, target in product(SCALES, TARGETS):
            scales = stored(rng, (rows, groups), scale_dtype, zeros=False)
            zeros = stored(rng, (rows, groups), scale_dtype, zeros=True)
            for signed, zero in ((True, None), (False, zeros), (False, None), (True, zeros)):
                check_dequantize(packed, codes, Grid(bits, group, signed, scale_dtype), scales, zero, target, msb)
            for signed in (False, True):
                grid = Grid(bits, group, signed, scale_dtype, offset=True)
                check_dequantize(packed, codes, grid, scales, zeros, target, msb)


def check_dequantize(
    packed: Array, codes: Array, grid: Grid, scales: Array, zeros: Array | None, target: str, msb: bool
) -> None:
    out = np.empty(codes.size + 1, numpy_dtype(target))[1:].reshape(codes.shape)  # no line of a cache begins there
    kernels.affine_dequantize(
        packed.reshape(-1),
        as_bits(scales),
        None if zeros is None else as_bits(zeros),
        as_bits(out),
        layout(codes.shape[1], grid.group, grid.bits, signed=grid.symmetric, msb=msb, offset=grid.offset),
        grid.scale_dtype,
        target,
    )
    same_numbers(out, reference.dequantize(codes, grid, scales, zeros, target))


def test_ties_between_bf16_go_to_even() -> None:
    codes = np.ones((2, 8), np.int8).view(np.uint8)
    scales = np.array([[1 + 2**-8], [1 + 3 * 2**-8]], np.float32)
    out = np.empty(codes.shape, numpy_dtype("bf16"))
    kernels.affine_dequantize(
        codes.reshape(-1), as_bits(scales), None, as_bits(out), layout(8, 8, 8, signed=True), "f32", "bf16"
    )
    assert np.array_equal(as_bits(out), np.repeat(np.array([[0x3F80], [0x3F82]], np.uint16), 8, axis=1))


@pytest.mark.parametrize("target", TARGETS)
def test_one_scale_for_all_and_padded_rows(target: str) -> None:
    rng = np.random.default_rng(3)
    codes = rng.integers(0, 16, (4, 37), np.uint8)
    packed = np.pad(reference.pack(codes, 4, msb=False), ((0, 0), (0, 5)), constant_values=0xFF)
    scales, zeros = np.array([0.3], np.float32), np.array([7.5], np.float32)
    out = np.empty(codes.shape, numpy_dtype(target))
    how = layout(37, 37, 4, signed=False, pad=5, tensor=True)
    kernels.affine_dequantize(packed.reshape(-1), scales, zeros, as_bits(out), how, "f32", target)
    same_numbers(out, reference.dequantize(codes, Grid(4, 37, False, "f32", per_tensor=True), scales, zeros, target))


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("search", [False, True], ids=["range", "mse"])
def test_quantize(bits: int, source: str, search: bool) -> None:
    rng = np.random.default_rng(bits + 100 * len(source))
    for index, (cols, group) in enumerate(LAYOUTS):
        values = blocks(rng, 11, cols, source)
        # Every scale type meets every layout in some of the tests.
        for scale_dtype in SCALES if cols < 200 and not search else (SCALES[(index + bits) % 3],):
            for symmetric in (True, False) if bits > 1 else (False,):
                grid = Grid(bits, group, symmetric, scale_dtype, search)
                check_quantize(values, source, grid, signed=symmetric, msb=bool(cols % 2))
                if not symmetric and cols < 200:
                    check_quantize(values, source, grid, signed=True, msb=bool(cols % 2))
            grid = Grid(bits, group, False, scale_dtype, search, offset=True)
            check_quantize(values, source, grid, signed=False, msb=bool(cols % 2))
            if bits > 1:
                grid = Grid(
                    bits, group, True, scale_dtype, search, zero_point=2 ** (bits - 1) - (index % 2 and bits > 2)
                )
                check_quantize(values, source, grid, signed=False, msb=bool(cols % 2))


@lru_cache(maxsize=256)
def quantized(data: bytes, shape: tuple[int, int], dtype: str, grid: Grid) -> tuple[Array, Array, Array]:
    """The reference's answer: kept for the other instruction sets, because it takes most of a test's time."""
    return reference.quantize(np.frombuffer(data, np.dtype(dtype)).reshape(shape), grid)


def check_quantize(values: Array, source: str, grid: Grid, *, signed: bool, msb: bool) -> None:
    codes, scales, zeros = quantized(values.tobytes(), values.shape, str(values.dtype), grid)
    if signed and not grid.symmetric:
        codes, zeros = reference.to_signed(codes, zeros, grid.bits)
    packed = np.full((len(values), -(-values.shape[1] * grid.bits // 8)), 0xAA, np.uint8)
    found = [np.empty(scales.shape, numpy_dtype(grid.scale_dtype)) for _ in range(2)]
    overflows = ~np.isfinite(scales.astype(np.float32))
    status, index = kernels.affine_quantize(
        as_bits(values),
        source,
        packed.reshape(-1),
        as_bits(found[0]),
        None if grid.symmetric else as_bits(found[1]),
        layout(values.shape[1], grid.group, grid.bits, signed=signed, msb=msb, offset=grid.offset),
        grid.scale_dtype,
        "mse" if grid.search else "range",
        -1 if grid.zero_point is None else grid.zero_point,
    )
    if overflows.any():
        row, group = np.argwhere(overflows)[0]
        assert (status, index) == (2, row * values.shape[1] + group * grid.group)
        return
    assert (status, index) == (0, 0)
    assert as_bits(found[0]).tobytes() == as_bits(scales).tobytes()
    if not grid.symmetric:
        assert as_bits(found[1]).tobytes() == as_bits(zeros).tobytes()
    assert packed.tobytes() == reference.pack(codes, grid.bits, msb=msb).tobytes()


@pytest.mark.parametrize("cols", [16, 40, 257, 1100])
@pytest.mark.parametrize("symmetric", [True, False])
def test_quotients_next_to_the_middle_of_two_codes(symmetric: bool, cols: int) -> None:
    """Where 1 / s is not to be multiplied by: ties, and neighbours of ties, under scales of few and of many bits."""
    rng = np.random.default_rng(cols)
    for step in (2.0**-5, 0.01, 1 / 3):
        middles = (rng.integers(-14, 15, (6, cols)) / 2 * step).astype(np.float32)
        values = np.nextafter(middles, middles + rng.integers(-1, 2, middles.shape).astype(np.float32))
        values[:, 0] = np.float32(7 * step)
        for group in (cols, 20):
            for scale_dtype in ("f32", "f16", "bf16"):
                grid = Grid(4, group, symmetric, scale_dtype, search=True)
                check_quantize(values, "f32", grid, signed=symmetric, msb=False)


@pytest.mark.parametrize("kind", ["levels", "signs", "one", "far", "outlier"])
@pytest.mark.parametrize("power", [-120, -39, -12, 0, 39, 110])
def test_candidates_that_are_nearly_as_good(kind: str, power: int) -> None:
    """Errors that are equal, 0, or a few units apart, and scales and offsets of which a rough look says nothing."""
    rng = np.random.default_rng(power + 200)
    for cols, group in ((7, 3), (64, 64), (1000, 300)):
        shape = (4, cols)
        values = {
            "levels": rng.integers(-8, 9, shape) / 8,
            "signs": rng.choice([-1.0, 1.0], shape) * (1 + rng.integers(0, 2, shape) * 2.0**-20),
            "one": np.where(np.arange(cols) % group == 1, 1.0, 0.0) * np.ones(shape),
            "far": 1000 + rng.normal(0, 0.01, shape),
            "outlier": rng.normal(0, 1, shape) * np.where(rng.random(shape) < 0.02, 40, 1),
        }[kind]
        values = np.ldexp(values, power).astype(np.float32)
        for bits in (2, 4, 8):
            for grid in (
                Grid(bits, group, True, "f32", search=True),
                Grid(bits, group, False, "bf16", search=True),
                Grid(bits, group, False, "f32", search=True, offset=True),
            ):
                check_quantize(values, "f32", grid, signed=grid.symmetric, msb=False)


def test_a_group_of_more_values_than_a_rough_look_is_for() -> None:
    values = np.random.default_rng(3).normal(0, 1, (1, (1 << 16) + 5)).astype(np.float32)
    for cols in ((1 << 16) + 5, 1 << 16):
        for symmetric in (True, False):
            grid = Grid(4, cols, symmetric, "f16", search=True)
            check_quantize(np.ascontiguousarray(values[:, :cols]), "f32", grid, signed=symmetric, msb=False)


@pytest.mark.parametrize("source", SOURCES)
def test_the_first_value_that_is_not_finite_is_found(source: str) -> None:
    for cols, group in LAYOUTS:
        for place in {0, cols // 2, cols - 1, 2 * cols - 1}:
            for bad in (np.nan, np.inf, -np.inf):
                values = np.full((3, cols), 0.5).astype(numpy_dtype(source))
                values.reshape(-1)[place] = bad
                values.reshape(-1)[-1] = np.nan
                packed, scales = np.empty(3 * -(-cols // 2), np.uint8), np.empty((3, -(-cols // group)), np.float32)
                how = layout(cols, group, 4)
                arguments = (as_bits(values), source, packed, scales, None, how, "f32")
                assert kernels.affine_quantize(*arguments, "range") == (1, place)
                assert kernels.affine_quantize(*arguments, "given") == (1, place)
                assert kernels.affine_range(as_bits(values), source)[2] == place


def test_a_double_past_float32_is_not_finite() -> None:
    assert kernels.affine_range(np.array([1.0, 1e39]), "f64")[2] == 1


@pytest.mark.parametrize("source", SOURCES)
def test_range_of_values_and_zero(source: str) -> None:
    rng = np.random.default_rng(8)
    for values in blocks(rng, 11, 700, source):
        wide = values.astype(np.float32)
        found = kernels.affine_range(as_bits(values), source)
        assert found == (min(wide.min(), 0), max(wide.max(), 0), 700)
    assert kernels.affine_range(np.empty(0, np.float32), "f32") == (0.0, 0.0, 0)


@pytest.mark.parametrize(("symmetric", "signed"), [(True, True), (False, False), (False, True)])
def test_one_scale_for_a_tensor_does_not_depend_on_chunks(symmetric: bool, signed: bool) -> None:
    rng = np.random.default_rng(9)
    values = rng.normal(0, 1, (50, 700)).astype(np.float32)
    low, high, _ = kernels.affine_range(values, "f32")
    grid = Grid(3, 700, symmetric, "f16", search=True, per_tensor=True)
    scales, zeros = (np.empty(kernels.AFFINE_CANDIDATES, np.float32) for _ in range(2))
    kernels.affine_candidates(low, high, 3, signed, symmetric, "f16", scales, zeros)
    wanted = reference.candidates(np.array([low], np.float32), np.array([high], np.float32), grid)
    assert scales.tobytes() == wanted[0][:, 0].tobytes()
    shift = 4 if signed and not symmetric else 0
    assert zeros.tobytes() == (wanted[1][:, 0] - np.float32(shift)).tobytes()
    totals = []
    for cuts in ([0, 50], [0, 1, 17, 50]):
        total = np.zeros(kernels.AFFINE_CANDIDATES)
        for start, stop in pairwise(cuts):
            kernels.affine_errors(values[start:stop], "f32", 3, signed, symmetric, scales, zeros, total)
        totals.append(total.tobytes())
    assert totals[0] == totals[1]


@pytest.mark.parametrize(
    "change",
    [
        {"packed": np.zeros(7, np.uint8)},
        {"scales": np.zeros((2, 1), np.float32)},
        {"scales": np.zeros((2, 2), np.float64)},
        {"scales": np.zeros((2, 2), np.uint16)},
        {"zeros": np.zeros((2, 3), np.float32)},
        {"out": np.zeros((2, 5), np.float32)},
        {"out": np.zeros((1, 4), np.float32)},
        {"out": np.zeros((2, 4), np.uint16)},
        {"out": np.zeros(8, np.float32)},
        {"scales": np.zeros(17, np.uint8)[1:].view(np.float32).reshape(2, 2)},
        {"dtype": "f64"},
        {"dtype": "i8"},
        {"scale_dtype": "f64"},
    ],
    ids=str,
)
def test_wrong_sizes_and_types_are_refused(change: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {
        "packed": np.zeros(4, np.uint8),
        "scales": np.zeros((2, 2), np.float32),
        "zeros": None,
        "out": np.zeros((2, 4), np.float32),
        "layout": layout(4, 2, 4),
        "scale_dtype": "f32",
        "dtype": "f32",
    }
    kernels.affine_dequantize(**arguments)
    with pytest.raises((ValueError, TypeError)):
        kernels.affine_dequantize(**{**arguments, **change})


@pytest.mark.parametrize(
    "change",
    [{"bits": 0}, {"bits": 9}, {"group": 0}, {"row_bytes": 1}, {"per_tensor": True}, {"cols": 2**60}, {"cols": -1}],
    ids=str,
)
def test_impossible_layouts_are_refused(change: dict[str, Any]) -> None:
    possible = {"cols": 4, "group": 2, "bits": 4, "signed": True, "msb": False, "per_tensor": False, "row_bytes": 2}
    kernels.AffineLayout(**possible)
    with pytest.raises((ValueError, TypeError)):
        kernels.AffineLayout(**{**possible, **change})


def test_errors_of_many_rows_are_added_in_doubles() -> None:
    values = np.random.default_rng(1).normal(0, 1, (5000, 33)).astype(np.float32)
    low, high, _ = kernels.affine_range(values, "f32")
    grid = Grid(4, 33, True, "f32", search=True, per_tensor=True)
    scales, zeros = (np.empty(kernels.AFFINE_CANDIDATES, np.float32) for _ in range(2))
    kernels.affine_candidates(low, high, 4, True, True, "f32", scales, zeros)
    totals = np.zeros(kernels.AFFINE_CANDIDATES)
    kernels.affine_errors(values, "f32", 4, True, True, scales, zeros, totals)
    for scale, zero, total in zip(scales, zeros, totals, strict=True):
        every = (np.full(len(values), value, np.float32) for value in (scale, zero))
        assert total == np.cumsum(reference.squared_errors(values, *every, grid).astype(np.float64))[-1]
