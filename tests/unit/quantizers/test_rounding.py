"""Quantizers: worked answers, less error by each step, and what they refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ingot.core.floats import cast
from ingot.errors import IngotError
from ingot.quantizers.grid import Grid, integers
from ingot.quantizers.rounding import gptq, importance, two_sided, weighted_error


def problem(seed: int = 0, rows: int = 70, cols: int = 96) -> tuple[Any, Any, Any]:
    """Weights, and factors of correlated inputs and gradients."""
    rng = np.random.default_rng(seed)
    sides = [rng.normal(size=(3 * n, n)) @ rng.normal(size=(n, n)) for n in (cols, rows)]
    inputs, outputs = (np.float32(side.T @ side) for side in sides)
    return np.float32(rng.normal(0, 0.05, (rows, cols))), inputs, outputs


def test_feedback_on_two_weights_worked_by_hand() -> None:
    """A = V V' with V = [[1, 1], [0, 1]]: 0.4 becomes 0, so 1.3 becomes 2, for 1.3 + 0.4 * 1 is nearer to 2 than to 1.

    The last two columns fix the scale at 1: they are independent, integers, and weigh much.
    """
    inputs = np.diag(np.float32([1, 1, 1000, 1000]))
    inputs[:2, :2] = [[2, 1], [1, 1]]
    weights = np.float32([[0.4, 1.3, -8, 7]])
    grid = integers(4, scales="f32")
    plain = importance(weights, grid, np.diagonal(inputs))
    made = gptq(weights, grid, inputs, damping=0)
    assert np.rint(plain.values()).tolist() == [[0, 1, -8, 7]]
    assert np.rint(made.values()).tolist() == [[0, 2, -8, 7]]
    assert weighted_error(made.values() - weights, inputs) < weighted_error(plain.values() - weights, inputs)


@pytest.mark.parametrize(
    "grid",
    [
        integers(4, 32, turned=True),
        integers(3, 32, zeros="points", signed=False),
        Grid(np.float32([-1.5, -0.45, 0.45, 1.5]), 48, "bf16"),
    ],
)
def test_each_quantizer_lowers_the_error_that_it_looks_at(grid: Grid) -> None:
    weights, inputs, outputs = problem()
    plain = importance(weights, grid, np.diagonal(inputs))
    one, two = gptq(weights, grid, inputs), two_sided(weights, grid, inputs, outputs)
    errors = [weighted_error(made.values() - weights, inputs) for made in (plain, one)]
    both = [weighted_error(made.values() - weights, inputs, outputs) for made in (one, two)]
    assert errors[1] < 0.9 * errors[0]
    assert both[1] < 0.9 * both[0]
    for made in (plain, one, two):
        assert (cast(cast(made.scales, grid.scales), "f32") == made.scales).all()
        assert made.codes.max() < len(grid.levels)
        assert grid.turned or made.scales.min() >= 0
    again = two_sided(weights, grid, inputs, outputs)
    assert again.codes.tobytes() + again.scales.tobytes() == two.codes.tobytes() + two.scales.tobytes()


def test_singular_factors_and_dead_channels_are_damped() -> None:
    weights, inputs, outputs = problem(1)
    inputs[:, :8] = inputs[:8] = 0
    weights[3] = 0
    flat = np.ones_like(outputs)
    grid = integers(4, 32, turned=True)
    for made in (two_sided(weights, grid, inputs, flat), gptq(weights, grid, np.zeros_like(inputs))):
        assert np.isfinite(made.values()).all()
        assert np.abs(made.values() - weights).max() < 0.1


def test_factors_that_are_none_and_scales_out_of_range_are_refused() -> None:
    weights, inputs, _ = problem(2)
    grid = integers(4, 32)
    for wrong in (inputs[:5], np.full_like(inputs, np.nan), -inputs):
        with pytest.raises(IngotError) as caught:
            gptq(weights, grid, wrong)
        assert caught.value.rule == "quantizer.factor"
    with pytest.raises(IngotError) as caught:
        importance(weights * np.float32(1e9), grid)
    assert caught.value.rule == "quantizer.scale-overflow"
    with pytest.raises(ValueError, match="divides"):
        importance(weights[:, :5], grid)
