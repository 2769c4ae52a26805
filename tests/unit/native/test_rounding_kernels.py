"""Rounding with feedback and descent: every instruction set gives the codes of the reference, and each other's bits."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from ingot.core.runtime import native
from ingot.quantization.products import Pairs
from tests.support.reference import rounding as reference

kernels = native.kernels
WIDTH, ROWS, COLS = 8, 5, 24
TABLE = np.array([-3.5, -1.25, 0.5, 2.75], np.float32)
LEVELS = {"integers": np.arange(-8, 8, dtype=np.float32), "table": TABLE}


def eighths(rng: np.random.Generator, shape: tuple[int, ...], most: int) -> Any:
    """Small multiples of 1/8: sums and products of them are exact in any order."""
    return (rng.integers(-most, most + 1, shape) / 8).astype(np.float32)


def grid(levels: Any, zeros: str = "none", steps: tuple[float, float, float] = (0, 0, 0)) -> Any:
    return kernels.RoundingGrid(levels, len(levels) == 16, zeros, zeros == "none", "f32", steps)


def stored(codes: Any, scales: Any, zeros: Any = None) -> tuple[Any, ...]:
    return codes, np.repeat(np.arange(COLS // WIDTH, dtype=np.int32), WIDTH), scales, zeros


def words(matrix: Any) -> Any:
    """The matrix in bf16, as products take it."""
    return Pairs.pack(matrix).words


def half(matrix: Any) -> Any:
    """What bf16 keeps of a matrix: f64."""
    return torch.from_numpy(matrix).bfloat16().double().numpy()


@pytest.mark.parametrize("name", LEVELS)
def test_errors_are_made_up_for_by_later_columns(name: str) -> None:
    rng = np.random.default_rng(3)
    wanted, factor = eighths(rng, (ROWS, COLS), 40), np.triu(eighths(rng, (COLS, COLS), 3), 1)
    scales = np.full((ROWS, COLS // WIDTH), -0.5, np.float32)
    codes, targets, errors = np.zeros(wanted.shape, np.uint8), wanted.copy(), np.zeros_like(wanted)
    columns = (0, COLS, COLS)
    kernels.rounding_feedback(grid(LEVELS[name]), columns, wanted, targets, factor, errors, *stored(codes, scales))
    assert (codes == reference.feedback(LEVELS[name], scales, None, WIDTH, wanted, factor)).all()
    assert (errors == wanted - scales[0, 0] * LEVELS[name][codes]).all()


@pytest.mark.parametrize("zeros", ["offsets", "points"])
def test_errors_of_values_with_zeros_are_fed_on(zeros: str) -> None:
    rng = np.random.default_rng(4)
    wanted, factor = eighths(rng, (ROWS, COLS), 40), np.triu(eighths(rng, (COLS, COLS), 3), 1)
    levels, scales = np.arange(16, dtype=np.float32), np.full((ROWS, COLS // WIDTH), 0.5, np.float32)
    points = rng.integers(0, 16, scales.shape).astype(np.float32)
    offsets = -scales * points  # multiples of 1/2, so that both say the same
    codes, targets, errors = np.zeros(wanted.shape, np.uint8), wanted.copy(), np.zeros_like(wanted)
    held = stored(codes, scales, offsets if zeros == "offsets" else points)
    kernels.rounding_feedback(grid(levels, zeros), (0, COLS, COLS), wanted, targets, factor, errors, *held)
    assert (codes == reference.feedback(levels, scales, offsets, WIDTH, wanted, factor)).all()
    again = np.zeros_like(codes)
    kernels.rounding_nearest(grid(levels, zeros), wanted, again, *held[1:])
    assert (again == reference.nearest(levels, (wanted - np.repeat(offsets, WIDTH, axis=1)) / 0.5)).all()


@pytest.mark.parametrize("zeros", ["none", "offsets", "points"])
@pytest.mark.parametrize("nested", [False, True])
def test_scales_and_zeros_are_fitted_to_the_codes(zeros: str, nested: bool) -> None:
    """One row, one group: as near to the least error that any scale and base have as what is stored lets it come."""
    if nested and zeros == "points":
        return
    rng = np.random.default_rng(6)
    inputs = rng.normal(size=(WIDTH, 2 * WIDTH)).astype(np.float32)
    inputs, outputs = inputs @ inputs.T, np.full((1, 1), 2, np.float32)
    first = -8 if zeros == "none" else 0
    levels = np.arange(first, first + 16, dtype=np.float32)
    codes = rng.integers(3, 13, (1, WIDTH)).astype(np.uint8)  # nowhere near the ends
    truth, base = 0.5, {"none": 0.0, "offsets": -2.75, "points": -3.5}[zeros]
    wanted = truth * levels[codes] + base + rng.normal(size=(1, WIDTH)).astype(np.float32) * np.float32(0.01)
    scales, units = np.full((1, 1), 0.53125, np.float32), np.full((1, 1), 2**-7, np.float32)
    held = None if zeros == "none" else np.full((1, 1), 6 if zeros == "points" else -2.5, np.float32)
    more = (units, units.copy() if zeros == "offsets" else None) if nested else (None, None)
    groups, taken = np.zeros(WIDTH, np.int32), grid(levels, zeros, (-127, 127, 1023) if nested else (0, 0, 0))

    def values() -> Any:
        zero = 0 if held is None else held[0, 0]
        found = levels[codes] - zero if zeros == "points" else levels[codes]
        return found * scales[0, 0] + (zero if zeros == "offsets" else 0)

    for _ in range(12):
        product = (values() - wanted).astype(np.float32) @ inputs
        before = codes.copy()
        kernels.rounding_descend(
            taken, inputs, words(inputs), outputs, 2 * product, product.copy(), np.empty_like(product), 1.0, True,
            codes, groups, scales, held, *more
        )  # fmt: skip
        if (codes == before).all() and _ > 2:
            break
    best, square = reference.refit(levels[codes[0]], wanted[0], inputs)
    if zeros == "none":
        best = np.array([float(levels[codes[0]] @ inputs @ wanted[0]) / square[0, 0], 0.0])
    found = np.array([scales[0, 0], 0.0 if held is None else held[0, 0] * (1 if zeros == "offsets" else -scales[0, 0])])
    if not nested and zeros != "points":
        np.testing.assert_allclose(found, best, rtol=2e-3)
    elif zeros == "points":
        assert held is not None
        assert held[0, 0] == round(-best[1] / best[0])
    else:
        assert scales[0, 0] / units[0, 0] == round(scales[0, 0] / units[0, 0])
        assert np.abs(found - best)[0] <= units[0, 0]


@pytest.mark.parametrize("name", LEVELS)
def test_each_code_takes_the_least_error_under_both_factors(name: str) -> None:
    rng = np.random.default_rng(5)
    wanted, scales = eighths(rng, (ROWS, COLS), 30), np.full((ROWS, COLS // WIDTH), 0.5, np.float32)
    inputs, outputs = (eighths(rng, (size, size), 2) for size in (COLS, ROWS))
    inputs, outputs = inputs + inputs.T, outputs + outputs.T
    inputs[np.diag_indices(COLS)], outputs[np.diag_indices(ROWS)] = 4, 2  # a quotient by 8 is exact
    begun = rng.integers(0, len(LEVELS[name]), wanted.shape, dtype=np.uint8)
    product = (0.5 * LEVELS[name][begun] - wanted) @ inputs
    codes, gradient = begun.copy(), outputs @ product
    kernels.rounding_descend(
        grid(LEVELS[name]), inputs, words(inputs), outputs, gradient, product, np.empty_like(product), 0.5, False,
        *stored(codes, scales.copy()),
    )  # fmt: skip
    assert (codes == reference.descend(LEVELS[name], scales, WIDTH, wanted, begun, (inputs, outputs))).all()
    assert (codes != begun).any()
    assert (product == (0.5 * LEVELS[name][codes] - wanted) @ inputs).all()


@cache
def first_products() -> dict[str, Any]:
    return {}


def test_products_and_factors_have_the_same_bits_everywhere() -> None:
    rng = np.random.default_rng(7)
    a, b = rng.normal(size=(19, 300)).astype(np.float32), rng.normal(size=(300, 141)).astype(np.float32)
    out, moments = np.empty((19, 141), np.float32), rng.normal(size=(150, 130))
    kernels.matrix_multiply(a, b, out)
    np.testing.assert_allclose(out, a.astype(np.float64) @ b, rtol=0, atol=1e-4)
    found = (moments.T @ moments).astype(np.float32)
    upper, own = found.copy(), np.empty(130)
    assert kernels.matrix_factor(upper, own)
    wanted, wanted_own = reference.triangular(found)
    np.testing.assert_allclose(upper, wanted, rtol=0, atol=2e-6)
    np.testing.assert_allclose(own, wanted_own, rtol=2e-6)
    assert not kernels.matrix_factor(-np.eye(3, dtype=np.float32), own[:3])
    seen = first_products().setdefault("bytes", out.tobytes() + upper.tobytes() + own.tobytes())
    assert out.tobytes() + upper.tobytes() + own.tobytes() == seen, native.isa()


@pytest.mark.parametrize("size", [1, 7, 64, 65, 200, 391])
def test_a_moment_is_the_product_of_its_factor(size: int) -> None:
    """At sizes around those of its blocks, to what f32 holds: what it is built of is far from well conditioned."""
    rng = np.random.default_rng(size)
    vectors = rng.normal(size=(size, size)) * np.geomspace(1, 1e-2, size)[:, None]
    found = (vectors.T @ vectors + 1e-6 * np.eye(size)).astype(np.float32)
    upper, own = found.copy(), np.empty(size)
    assert kernels.matrix_factor(upper, own)
    assert not np.tril(upper).any()
    whole = upper.astype(np.float64) + np.eye(size)
    np.testing.assert_allclose((whole * own) @ whole.T, found, rtol=0, atol=3e-7 * float(found.diagonal().max()))


def test_shapes_that_do_not_fit_are_refused() -> None:
    one = np.ones((2, 2), np.float32)
    with pytest.raises(ValueError, match="shapes"):
        kernels.matrix_multiply(one, np.ones((3, 2), np.float32), one.copy())
    with pytest.raises(ValueError, match="square"):
        kernels.matrix_factor(one.copy(), np.empty(3))
    with pytest.raises(ValueError, match="levels"):
        kernels.RoundingGrid(np.arange(3, dtype=np.float32), True, "none", True, "f16")
    codes, scales = np.full((2, 2), 200, np.uint8), np.ones((2, 1), np.float32)
    table = kernels.RoundingGrid(TABLE, False, "none", True, "f16")
    groups = np.zeros(2, np.int32)

    def descend(*more: Any, unit: float = 1.0, packed: Any = None) -> None:
        packed = words(one) if packed is None else packed
        kernels.rounding_descend(
            table, one, packed, one, one, one.copy(), one.copy(), unit, True, codes, groups, scales, None, *more
        )

    with pytest.raises(ValueError, match="codes"):
        descend()
    with pytest.raises(ValueError, match="unit"):
        descend(np.ones((1, 1), np.float32))
    with pytest.raises(ValueError, match="zeros"):
        descend(None, scales)
    with pytest.raises(ValueError, match="power of two"):
        descend(unit=3.0)
    held = codes, groups, scales, None
    with pytest.raises(ValueError, match="links"):
        kernels.rounding_feedback(
            table, (0, 1, 2), one, one.copy(), one, one.copy(), *held, one[:1], one.copy(), one.copy()
        )
    codes[:] = 0
    with pytest.raises(ValueError, match="word"):
        descend(packed=np.zeros(63, np.uint32))
    with pytest.raises(ValueError, match="even row"):
        Pairs.pack(one).add(one, (1, 2), (0, 2), one.copy())
    with pytest.raises(ValueError, match="panels"):
        Pairs.pack(one).add(one, (0, 2), (1, 2), one.copy())
    with pytest.raises(ValueError, match="groups"):
        kernels.rounding_nearest(table, one, codes, groups + 1, scales, None)


@pytest.mark.parametrize("name", LEVELS)
def test_what_later_rows_leave_moves_the_targets_of_earlier_rows(name: str) -> None:
    """Element by element: the target that makes its term of the error small, given all elements before it."""
    rng = np.random.default_rng(8)
    wanted, factor = eighths(rng, (ROWS, COLS), 40), np.triu(eighths(rng, (COLS, COLS), 3), 1)
    below = np.tril(eighths(rng, (ROWS, ROWS), 3), -1)
    scales = np.full((ROWS, COLS // WIDTH), 0.5, np.float32)
    codes, targets, errors = np.zeros(wanted.shape, np.uint8), wanted.copy(), np.zeros_like(wanted)
    shifts, left = np.zeros_like(wanted), np.zeros_like(wanted)
    for start in range(0, COLS, WIDTH):
        kernels.rounding_feedback(
            grid(LEVELS[name]), (start, start + WIDTH, COLS), wanted, targets, factor, errors, *stored(codes, scales),
            below, shifts, left, 0,
        )  # fmt: skip
    values = 0.5 * LEVELS[name].astype(np.float64)
    change, expected = np.zeros(wanted.shape), np.zeros_like(codes)
    upper, lower = factor + np.eye(COLS), below.astype(np.float64) + np.eye(ROWS)
    for col in range(COLS):
        for row in reversed(range(ROWS)):
            term = (lower.T @ change @ upper)[row, col]  # of all elements before this one
            code = np.abs(values - (wanted[row, col] - term)).argmin()
            expected[row, col] = code
            change[row, col] = values[code] - wanted[row, col]
    assert (codes == expected).mean() > 0.95  # halves may go to either side
    np.testing.assert_allclose(lower.T @ -left, lower.T @ ((0.5 * LEVELS[name][codes] - wanted) @ upper), atol=1e-3)


@pytest.mark.parametrize(
    ("rows", "depth", "cols"), [(1, 1, 1), (2, 3, 65), (19, 300, 141), (7, 514, 64), (390, 12, 200)]
)
def test_products_in_bf16_have_the_same_bits_everywhere(rows: int, depth: int, cols: int) -> None:
    rng = np.random.default_rng(rows)
    a, b = rng.normal(size=(rows, depth)).astype(np.float32), rng.normal(size=(depth, cols)).astype(np.float32)
    a[0, 0], b[0, 0] = 2.0**-60, 2.0**-70  # too small for a term
    b *= np.float32(2.0**-60)
    found = Pairs.pack(b, 2.0**-60).multiply(a)
    wanted = half(a) @ half(b)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4 * 2.0**-60)
    if depth >= 12:
        part = np.zeros((rows, cols), np.float32)
        Pairs.pack(b, 2.0**-60).add(a, (2, 9), (0, cols), part, first=3)
        np.testing.assert_allclose(part, half(a)[:, 3:10] @ half(b)[2:9], rtol=0, atol=1e-4 * 2.0**-60)
    seen = first_products().setdefault(f"pairs {rows}", found.tobytes())
    assert found.tobytes() == seen, native.isa()


def test_rows_of_a_packed_matrix_are_replaced() -> None:
    rng = np.random.default_rng(2)
    old, new = rng.normal(size=(2, 9, 70)).astype(np.float32)
    for first, last in [(0, 9), (1, 2), (3, 8), (4, 9), (2, 5)]:
        pairs, mixed = Pairs.pack(old), old.copy()
        pairs.put(new[first:last], first)
        mixed[first:last] = new[first:last]
        assert (pairs.words == words(mixed)).all()
