"""Rounding with feedback and descent: every instruction set gives the codes of the reference, and each other's bits."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from ingot.core import isa, native
from ingot.testing.reference import rounding as reference

kernels = native.kernels
WIDTH, ROWS, COLS = 8, 5, 24
TABLE = np.array([-3.5, -1.25, 0.5, 2.75], np.float32)
LEVELS = {"integers": np.arange(-8, 8, dtype=np.float32), "table": TABLE}


def eighths(rng: np.random.Generator, shape: tuple[int, ...], most: int) -> Any:
    """Small multiples of 1/8: sums and products of them are exact in any order."""
    return (rng.integers(-most, most + 1, shape) / 8).astype(np.float32)


def grid(levels: Any) -> Any:
    return kernels.RoundingGrid(levels, len(levels) == 16, "none", True, "f32")


def stored(codes: Any, scales: Any) -> tuple[Any, ...]:
    return codes, np.repeat(np.arange(COLS // WIDTH, dtype=np.int32), WIDTH), scales, None


@pytest.mark.parametrize("name", LEVELS)
def test_errors_are_made_up_for_by_later_columns(name: str) -> None:
    rng = np.random.default_rng(3)
    wanted, factor = eighths(rng, (ROWS, COLS), 40), np.triu(eighths(rng, (COLS, COLS), 3), 1)
    scales = np.full((ROWS, COLS // WIDTH), -0.5, np.float32)
    codes, targets, errors = np.zeros(wanted.shape, np.uint8), wanted.copy(), np.zeros_like(wanted)
    kernels.rounding_feedback(grid(LEVELS[name]), (0, COLS), wanted, targets, factor, errors, *stored(codes, scales))
    assert (codes == reference.feedback(LEVELS[name], scales, WIDTH, wanted, factor)).all()
    assert (errors == wanted - scales[0, 0] * LEVELS[name][codes]).all()


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
        grid(LEVELS[name]), inputs, outputs, gradient, product, False, *stored(codes, scales.copy())
    )
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
    found = moments.T @ moments
    lower = found.copy()
    assert kernels.matrix_cholesky(lower)
    np.testing.assert_allclose(lower, np.linalg.cholesky(found), rtol=0, atol=1e-9)
    assert not kernels.matrix_cholesky(-np.eye(3))
    seen = first_products().setdefault("bytes", out.tobytes() + lower.tobytes())
    assert out.tobytes() + lower.tobytes() == seen, isa.isa()


def test_shapes_that_do_not_fit_are_refused() -> None:
    one = np.ones((2, 2), np.float32)
    with pytest.raises(ValueError, match="shapes"):
        kernels.matrix_multiply(one, np.ones((3, 2), np.float32), one.copy())
    with pytest.raises(ValueError, match="levels"):
        kernels.RoundingGrid(np.arange(3, dtype=np.float32), True, "none", True, "f16")
    codes, scales = np.full((2, 2), 200, np.uint8), np.ones((2, 1), np.float32)
    table = kernels.RoundingGrid(TABLE, False, "none", True, "f16")
    groups = np.zeros(2, np.int32)
    with pytest.raises(ValueError, match="codes"):
        kernels.rounding_descend(table, one, one, one, one.copy(), True, codes, groups, scales, None)
    with pytest.raises(ValueError, match="groups"):
        kernels.rounding_nearest(table, one, codes, groups + 1, scales, None)
