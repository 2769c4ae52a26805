"""Integers for an entropy coder: steps of equal weight, the step of a model, and codes of the requested size."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from ingot.core.runtime import native
from ingot.errors import UsageError
from ingot.model.statistics import Statistics
from ingot.quantization.choice import parse_quantizer, round_with
from ingot.quantization.coded import CodeLengths, RowSteps, code_lengths, equal_steps, find_step
from ingot.quantization.factors import Factors, factors_of, feedback_factor, no_factors
from ingot.quantization.grid import A_ROW, Rounded
from ingot.quantization.rounding import error_under, values_of
from ingot.quantization.tensor import parts_of

ROWS, COLS = 192, 256
ALONE = RowSteps(np.ones(1), np.zeros(1), np.zeros(512), comparable=False)


def factors(seed: int, size: float = 1.0) -> Factors:
    """Return factors of rows and columns whose weights differ; ``size`` multiplies the gradients."""
    random = np.random.default_rng(seed)
    inputs = random.normal(size=(COLS, 2 * COLS)) * random.uniform(0.2, 3, (COLS, 1))
    outputs = size * random.normal(size=(ROWS, 2 * ROWS)) * random.uniform(0.2, 3, (ROWS, 1))
    arrays = {
        "w:inputs": (inputs @ inputs.T).astype(np.float32),
        "w:outputs": (outputs @ outputs.T).astype(np.float32),
        "w:in_sum2": np.square(inputs).sum(1).astype(np.float32),
        "w:count": np.array([9]),
    }
    entry = Statistics.in_memory(arrays).for_matrix("w")
    assert entry is not None
    return factors_of(entry)


def matrix(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(ROWS, COLS)).astype(np.float32)


def rounded(bits: float, weights: np.ndarray, under: Factors) -> Rounded:
    (result,) = round_with(parse_quantizer("two-sided", "affine", {"coded_bits": bits}), weights, under)
    assert isinstance(result, Rounded)
    return result


def entropy(codes: np.ndarray) -> float:
    counts = np.bincount(codes.reshape(-1))
    shares = counts[counts > 0] / codes.size
    return float(-(shares * np.log2(shares)).sum())


def coded_bits(codes: np.ndarray) -> float:
    """Return the bits of a code as the kernel of ``ingot.packed/1`` stores it."""
    out = np.empty(2 * codes.size + 4096, np.uint8)
    symbols = np.ascontiguousarray(codes).reshape(-1)
    return 8 * native.kernels.symbols_encode(symbols, 1, np.empty(0, np.uint8), 1, False, out) / codes.size


@pytest.mark.parametrize("bits", [2, 3, 3.5, 4, 6])
def test_codes_take_the_requested_bits(bits: float) -> None:
    codes = rounded(bits, matrix(1), factors(2)).codes
    assert entropy(codes) == pytest.approx(bits, abs=0.06)
    assert entropy(codes) < coded_bits(codes) < entropy(codes) + 0.06


def test_more_bits_leave_less_error() -> None:
    weights, under = matrix(1), factors(2)
    errors = [error_under(weights, rounded(bits, weights, under).values(), under) for bits in (2, 3, 4, 5)]
    assert all(0.2 < more / fewer < 0.32 for fewer, more in pairwise(errors))  # a quarter


def test_the_error_is_smaller_than_that_of_as_many_bits_in_groups() -> None:
    weights, under = matrix(1), factors(2)
    coded = rounded(4, weights, under)
    groups = round_with(parse_quantizer("two-sided", "affine", {"bits": 4, "group": 64}), weights, under)
    assert coded_bits(coded.codes) + 16 / COLS < 4.25
    assert error_under(weights, coded.values(), under) < 0.7 * error_under(weights, values_of(groups), under)


def test_rows_have_steps_by_the_weight_of_their_errors() -> None:
    under = factors(2)
    feedback = feedback_factor(under.new_inputs)
    steps = equal_steps(under, feedback)
    assert steps.comparable
    scales = rounded(4, matrix(1), under).scales[:, 0]
    assert np.allclose(scales / scales[0], steps.rows / steps.rows[0], rtol=2e-3)  # f16
    assert np.allclose(2 * equal_steps(factors(2, size=2), feedback).rows, steps.rows, rtol=1e-4)


def test_without_gradients_all_rows_have_one_step() -> None:
    under = no_factors(COLS)
    assert not equal_steps(under, feedback_factor(under.new_inputs)).comparable
    result = rounded(3, matrix(1), under)
    assert len(np.unique(result.scales)) == 1
    assert entropy(result.codes) == pytest.approx(3, abs=0.03)


def test_a_row_of_large_values_fits_its_codes() -> None:
    weights = matrix(1)
    weights[5] *= 1000
    result = rounded(2, weights, factors(2))
    assert np.abs(result.values() - weights)[5].max() <= 2 * result.scales[5, 0]
    assert np.abs(result.codes.astype(int) - 128)[5].max() >= 110


def test_rows_of_zeros_and_tiny_values_stay_finite() -> None:
    weights = np.zeros((ROWS, COLS), np.float32)
    assert not rounded(4, weights, factors(2)).values().any()
    weights[:] = 1e-9
    assert np.isfinite(rounded(4, weights, factors(2)).values()).all()


def test_lengths_of_normal_values_are_known() -> None:
    lengths = code_lengths(np.random.default_rng(0).normal(size=(512, 512)).astype(np.float32), ALONE)
    normal = np.log2(np.sqrt(2 * np.pi * np.e))
    for step in (-3.0, -2.0, -1.0):  # the entropy of fine codes is that of the density, less the logarithm of the step
        assert lengths.bits_for(step) == pytest.approx(normal - step, abs=0.02)
    assert lengths.bits_for(lengths.steps[0] - 2) == pytest.approx(lengths.bits[0] + 2)
    assert lengths.bits_for(50) < 0.2


def test_the_step_of_a_model_gives_its_matrices_their_bits_on_average() -> None:
    grid = np.array([-4.0, 4.0])
    flat, steep = CodeLengths(100, grid, np.array([8.0, 0.0])), CodeLengths(300, grid, np.array([12.0, 4.0]))
    step = np.log2(find_step([flat, steep], 4))
    assert step == pytest.approx(3.0, abs=1 / 256)
    assert 100 * flat.bits_for(step) + 300 * steep.bits_for(step) == pytest.approx(1600, abs=4)
    assert find_step([steep, flat], 4) == find_step([flat, steep], 4)


@pytest.mark.parametrize("isa", native.available_isas())
def test_bytes_do_not_depend_on_the_instruction_set(isa: str) -> None:
    spec = parse_quantizer("two-sided", "affine", {"coded_bits": 3})
    expected = parts_of([rounded(3, matrix(1), factors(2))], spec)
    before = native.isa()
    try:
        native.set_isa(isa)
        found = parts_of([rounded(3, matrix(1), factors(2))], spec)
    finally:
        native.set_isa(before)
    assert {role: part.tobytes() for role, part in found.items()} == {
        role: part.tobytes() for role, part in expected.items()
    }


def test_the_grid_is_integers_of_eight_bits_in_rows() -> None:
    spec = parse_quantizer("two-sided", "affine", {"coded_bits": 3, "scales": "bf16"})
    assert (spec.grid.bits, spec.grid.group, spec.grid.scales, spec.grid.coded) == (8, A_ROW, "bf16", 3.0)
    assert not spec.on_device


@pytest.mark.parametrize(
    ("quantizer", "codec", "options"),
    [
        ("gptq", "affine", {}),
        ("importance", "affine", {}),
        ("awq+two-sided", "affine", {}),
        ("two-sided", "palette", {}),
        ("two-sided", "trellis", {}),
        ("two-sided", "affine", {"act_order": True}),
        ("two-sided", "affine", {"bits": 4}),
        ("two-sided", "affine", {"group": 64}),
        ("two-sided", "affine", {"symmetric": False}),
        ("two-sided", "affine", {"coded_bits": 0.5}),
        ("two-sided", "affine", {"coded_bits": 8}),
        ("two-sided", "affine", {"coded_bits": True}),
        ("two-sided", "affine", {"coded_bits": "4"}),
    ],
)
def test_options_that_do_not_fit_are_refused(quantizer: str, codec: str, options: dict[str, object]) -> None:
    with pytest.raises(UsageError) as caught:
        parse_quantizer(quantizer, codec, {"coded_bits": 4, **options})
    assert caught.value.rule == "quantizer.option"
