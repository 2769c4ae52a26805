"""Rounding of matrices by what they multiply: known answers, a plain reference, and that descent only descends."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.core.runtime import native
from ingot.errors import CodecError, UsageError
from ingot.model.statistics import Statistics
from ingot.quantization import tensor as tensor_module
from ingot.quantization.choice import parse_quantizer, round_with
from ingot.quantization.factors import Factors, factors_of, feedback_factor, no_factors
from ingot.quantization.grid import Grid, Rounded
from ingot.quantization.rounding import error_under, round_matrix, values_of
from ingot.quantization.tensor import round_tensor, rounding_memory


def factors(rows: int, cols: int, seed: int, rank: int | None = None) -> Factors:
    random = np.random.default_rng(seed)
    inputs = random.normal(size=(cols, rank or 2 * cols)).astype(np.float32)
    outputs = random.normal(size=(rows, 2 * rows)).astype(np.float32)
    arrays = {
        "w:inputs": inputs @ inputs.T,
        "w:outputs": outputs @ outputs.T,
        "w:in_sum2": np.square(inputs).sum(1),
        "w:count": np.array([9]),
    }
    found = Statistics.in_memory(arrays).for_matrix("w")
    assert found is not None
    return factors_of(found)


def matrix(rows: int, cols: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, cols)).astype(np.float32)


@pytest.fixture
def each_isa() -> Iterator[tuple[str, ...]]:
    before = native.isa()
    yield tuple(native.available_isas())
    native.set_isa(before)


def test_two_by_two_by_hand() -> None:
    # A = [[1, .5], [.5, 1]] = (U + I) D (U + I)^T, U = [[0, .5], [0, 0]]: the second target moves by half the error.
    inputs = np.array([[1, 0.5], [0.5, 1]], np.float32)
    upper, left, more = feedback_factor(inputs.copy)
    assert more == 0
    assert upper.tolist() == [[0, 0.5], [0, 0]]
    assert left.tolist() == [0.75, 1]

    cols = 10
    wide = np.eye(cols, dtype=np.float32)
    wide[:2, :2] = inputs
    weights = np.array([[0.6, 0.74, *np.arange(-4, 4) / 2]], np.float32)
    found = round_matrix(weights, Grid(4, cols), Factors(wide, None, np.ones(cols, np.float32)), "gptq")
    plain = round_matrix(weights, Grid(4, cols), no_factors(cols), "gptq")
    assert np.allclose(found.scales, plain.scales, rtol=0.2)
    first, second = found.values()[0, :2]
    target = np.float32(0.74) + np.float32(0.5) * (np.float32(0.6) - first)
    choices = found.levels * found.scales[0, 0]
    assert second == choices[np.abs(choices - target).argmin()]


def test_feedback_is_that_of_a_plain_loop() -> None:
    weights, known = matrix(6, 40, 1), factors(6, 40, 2)
    grid = Grid(3, 16)
    found = round_matrix(weights, grid, known, "gptq")
    upper = feedback_factor(known.inputs.copy)[0].astype(np.float64)
    targets, codes = weights.astype(np.float64), np.zeros(weights.shape, int)
    for column in range(40):
        scale = found.scales[:, column // 16].astype(np.float64)
        levels = np.divide(targets[:, column], scale, out=np.zeros(6), where=scale != 0)
        codes[:, column] = np.clip(np.rint(levels), -4, 3) + 4
        error = weights[:, column] - found.levels[codes[:, column]] * scale
        targets += error[:, None] * upper[column]
    assert (codes == found.codes).mean() > 0.99  # sums in f64 move a tie here and there


@settings(max_examples=12)
@given(
    rows=st.integers(1, 70), cols=st.integers(1, 90), bits=st.integers(2, 5), group=st.sampled_from((7, 32, 1000)),
    learnt=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_each_quantizer_is_better_than_the_one_before(
    rows: int, cols: int, bits: int, group: int, learnt: bool, seed: int
) -> None:
    weights, known, grid = matrix(rows, cols, seed), factors(rows, cols, seed + 1), Grid(bits, group, learnt=learnt)
    errors = [
        error_under(weights, round_matrix(weights, grid, known, name).values(), known) for name in ("gptq", "two-sided")
    ]
    assert errors[1] <= errors[0] * 1.0001
    found = round_matrix(weights, grid, known, "two-sided")
    assert found.codes.max() < 1 << bits
    assert np.isfinite(found.values()).all()
    assert (found.scales == found.scales.astype(np.float16)).all()


@pytest.mark.parametrize("learnt", [False, True])
def test_any_instruction_set_gives_the_same_bits(each_isa: tuple[str, ...], learnt: bool) -> None:
    weights, known, grid = matrix(67, 131, 5), factors(67, 131, 6), Grid(4, 32, learnt=learnt)
    seen = set()
    for name in each_isa:
        native.set_isa(name)
        found = round_matrix(weights, grid, known)
        seen.add((found.codes.tobytes(), found.scales.tobytes(), found.levels.tobytes()))
    assert len(seen) == 1


def test_what_was_never_seen_does_no_harm() -> None:
    known = factors(5, 24, 7, rank=3)  # singular but for the damping
    known.inputs[:, 4] = known.inputs[4] = 0  # an input that was always 0
    known.inputs[4, 4] = 0.01
    weights = matrix(5, 24, 8)
    weights[2] = 0
    found = round_matrix(weights, Grid(4, 8), known)
    assert np.isfinite(found.values()).all()
    assert not found.values()[2].any()
    nothing = Statistics.in_memory({"w:in_sum2": np.zeros(24, np.float32), "w:count": np.array([0])}).for_matrix("w")
    assert nothing is not None
    assert (factors_of(nothing).inputs == np.eye(24)).all()


def test_a_moment_that_is_no_moment_is_damped_more_and_says_so() -> None:
    inputs = np.eye(6, dtype=np.float32)
    inputs[0, 1] = inputs[1, 0] = 1.045  # eigenvalues 1 and, twice, 1 +- 1.045
    found = feedback_factor(inputs.copy)
    assert 0.045 < found.more <= 0.1 + 1e-6
    known = Factors(inputs, None, np.ones(6, np.float32), damping=0.01)
    assert round_matrix(matrix(3, 6, 1), Grid(4, 3), known, "gptq").more_damping == found.more
    assert round_matrix(matrix(3, 6, 1), Grid(4, 3), known, "two-sided", act_order=True).more_damping == found.more


def test_scales_past_their_type_are_refused() -> None:
    weights = np.full((2, 8), 1e30, np.float32)
    with pytest.raises(CodecError) as refused:
        round_matrix(weights, Grid(4, 8), no_factors(8), "importance")
    assert refused.value.rule == "quantizer.scale-overflow"
    assert np.isfinite(round_matrix(weights, Grid(4, 8, "f32"), no_factors(8), "importance").values()).all()


@pytest.mark.parametrize(
    ("quantizer", "codec", "options"),
    [
        ("best", "affine", {}),
        ("gptq", "dense", {}),
        ("gptq", "affine", {"bits": 1, "symmetric": False}),
        ("gptq", "affine", {"group": "rows"}),
        ("gptq", "affine", {"symmetric": 1}),
        ("gptq", "affine", {"symmetric": True, "zero_kind": "offset"}),
        ("gptq", "affine", {"zero_kind": "offsets"}),
        ("importance", "affine", {"act_order": True}),
        ("gptq", "scaled_codebook", {"symmetric": False}),
        ("gptq", "scaled_codebook", {"bits": 8}),
        ("gptq", "ggml_blocks", {"type": "mxfp4"}),
        ("gptq", "affine", {"scales": "f8"}),
    ],
)
def test_what_no_quantizer_makes_is_refused(quantizer: str, codec: str, options: dict[str, object]) -> None:
    with pytest.raises(UsageError) as refused:
        parse_quantizer(quantizer, codec, options)
    assert refused.value.rule == "quantizer.option"


@pytest.mark.parametrize(("bits", "act_order"), [(4, False), (3, True)])
@pytest.mark.parametrize("codec", ["affine", "palette"])
def test_the_error_that_feedback_tells_is_that_of_what_it_gave(bits: int, act_order: bool, codec: str) -> None:
    known = replace(factors(40, 96, 5), outputs=None)
    weights = matrix(40, 96, 6)
    options = {"bits": bits, "group": 32, "act_order": act_order}
    made = round_with(parse_quantizer("gptq", codec, options), weights, known)
    told = [each.error_sums for each in made if isinstance(each, Rounded) and each.error_sums is not None]
    assert len(told) == len(made)
    error, whole = (sum(each[part] for each in told) for part in (0, 1))
    assert error / whole == pytest.approx(error_under(weights, values_of(made), known), rel=1e-4)
    assert whole == pytest.approx(np.vdot(weights.astype(np.float64), weights @ known.inputs), rel=1e-5)
    both = round_with(parse_quantizer("gptq", codec, options), weights, factors(40, 96, 5))
    assert all(each.error_sums is None for each in both if isinstance(each, Rounded))  # G is no part of it


@pytest.mark.parametrize("outputs", [True, False])
@pytest.mark.parametrize(
    ("quantizer", "codec", "options"),
    [
        ("importance", "affine", {"bits": 4}),
        ("gptq", "affine", {"bits": 4}),
        ("gptq", "affine", {"bits": 4, "act_order": True}),
        ("two-sided", "affine", {"bits": 4, "symmetric": False}),
        ("two-sided", "scaled_codebook", {"bits": 3}),
        ("two-sided", "ggml_blocks", {"type": "q4_k"}),
        ("two-sided", "palette", {"bits": 4, "group": 16}),
        ("gptq", "trellis", {"bits": 2}),
        ("two-sided", "trellis", {"bits": 2}),
    ],
)
@pytest.mark.parametrize("shape", [(32, 512), (512, 256)])
def test_no_more_memory_is_taken_than_is_said(
    quantizer: str, codec: str, options: dict[str, object], outputs: bool, shape: tuple[int, int]
) -> None:
    wanted, (rows, cols) = parse_quantizer(quantizer, codec, options), shape
    random = np.random.default_rng(3)
    arrays = {f"w:{field}": random.normal(size=(size, size)).astype(np.float32) for field, size in
              (("inputs", cols), ("outputs", rows))}  # fmt: skip
    arrays = {key: values @ values.T for key, values in arrays.items() if outputs or key != "w:outputs"}
    arrays |= {"w:in_sum2": arrays["w:inputs"].diagonal().copy(), "w:count": np.array([9])}
    known, weights = Statistics.in_memory(arrays), matrix(rows, cols, 4)
    tracemalloc.start()
    try:
        round_tensor(wanted, [("w", weights)], known)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= rounding_memory(wanted, shape, known.for_matrix("w")) + (1 << 18)


@pytest.mark.parametrize("quantizer", ["gptq", "importance"])
@pytest.mark.parametrize(
    ("codec", "options"),
    [
        ("affine", {"bits": 4, "group": 64, "zero_kind": "offset"}),
        ("ggml_blocks", {"type": "q4_k"}),
        ("ggml_blocks", {"type": "iq3_s"}),
    ],
)
def test_rows_rounded_in_bands_are_those_of_the_full_matrix(
    quantizer: str, codec: str, options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(8)
    inputs = random.normal(size=(256, 300)).astype(np.float32)
    entries = {"w:inputs": inputs @ inputs.T, "w:in_sum2": np.square(inputs).sum(1), "w:count": np.array([300])}
    statistics = Statistics.in_memory(entries)
    spec = parse_quantizer(quantizer, codec, options)
    weights = matrix(13, 256, 9)
    expected, full = round_tensor(spec, [("w", weights)], statistics)
    needed = rounding_memory(spec, weights.shape, statistics.for_matrix("w"))
    monkeypatch.setattr(tensor_module, "_BAND", 5)
    monkeypatch.setattr(tensor_module, "_BAND_COLUMNS", 0)
    calls = []
    monkeypatch.setattr(tensor_module, "round_with", lambda *args: calls.append(args) or round_with(*args))
    parts, outcomes = round_tensor(spec, [("w", weights)], statistics)
    assert [len(rows) for _, rows, *_ in calls] == [5, 5, 3]
    assert parts.keys() == expected.keys()
    assert all(np.array_equal(parts[role], expected[role]) for role in parts)
    assert outcomes[0].error == pytest.approx(full[0].error, rel=1e-5)
    assert outcomes[0].squared_error == pytest.approx(full[0].squared_error, rel=1e-5)
    assert rounding_memory(spec, weights.shape, statistics.for_matrix("w")) < needed
