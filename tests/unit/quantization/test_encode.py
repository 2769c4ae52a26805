"""Whole matrices encoded by what they multiply: signs, lengths, and products of thin matrices."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.codecs.table import CODECS
from ingot.errors import CodecError, FormatError, UnsupportedError, UsageError
from ingot.model.statistics import Statistics
from ingot.quantization.choice import parse_quantizer, round_with
from ingot.quantization.encode import RoundingEncoder, along, encoder_under, factors_under, stretch, whiten
from ingot.quantization.factors import DAMPING, Factors, factors_of, no_factors
from ingot.quantization.grid import Rounded
from ingot.quantization.rounding import error_under, values_of
from ingot.quantization.tensor import Outcome, damping_for


def statistics(rows: int, cols: int, seed: int = 0) -> Statistics:
    random = np.random.default_rng(seed)
    inputs = random.normal(size=(cols, 3 * cols)) * np.linspace(0.2, 3, cols)[:, None]
    outputs = random.normal(size=(rows, 3 * rows)) * np.linspace(3, 0.2, rows)[:, None]
    arrays = {
        "w:inputs": (inputs @ inputs.T).astype(np.float32),
        "w:outputs": (outputs @ outputs.T).astype(np.float32),
        "w:in_sum2": np.square(inputs).sum(1).astype(np.float32),
        "w:count": np.array([9]),
    }
    return Statistics.in_memory(arrays)


def known(rows: int, cols: int, seed: int = 0, damping: float = DAMPING) -> Factors:
    found = statistics(rows, cols, seed).for_matrix("w")
    assert found is not None
    return factors_of(found, damping)


def matrix(rows: int, cols: int, seed: int = 1, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=(rows, cols)) * scale).astype(np.float32)


SIGNS = ("two-sided", "affine", {"bits": 1, "group": "row"})
STREAMS = ("two-sided", "trellis", {"bits": 2, "group": 32})


def encoded(
    values: np.ndarray, how: tuple[str, str, dict[str, object]], seed: int = 0
) -> tuple[np.ndarray, RoundingEncoder, list[Outcome]]:
    outcomes: list[Outcome] = []
    encoder = encoder_under("w", values.shape, how, statistics(*values.shape[-2:], seed), outcomes.extend)
    assert isinstance(encoder, RoundingEncoder)
    parts = encoder.encode(values.reshape(-1, values.shape[-1]))
    for spec in encoder.parts:
        assert parts[spec.role].nbytes == spec.length
    out = np.empty(values.shape, np.float32)
    encoder.decode(parts, out.reshape(-1, values.shape[-1]))
    return out, encoder, outcomes


def test_signs_are_stored_as_signs_always_were() -> None:
    encoder = encoded(matrix(24, 40), SIGNS)[1]
    options = {"bits": 1, "group": "row", "scales": "f16", "quantizer": "sign-rms"}
    plain = CODECS["affine"].encoder((24, 40), "f32", options)
    assert dict(encoder.params) == dict(plain.params)
    assert [(part.role, part.dtype, part.length) for part in encoder.parts] == [
        (part.role, part.dtype, part.length) for part in plain.parts
    ]


def test_signs_stand_for_one_magnitude_a_row() -> None:
    # With nothing known, a row's magnitude of least squares is its mean one; stretched, it is sum w^2 / sum |w|.
    values = np.array([[1, -3, 2, -2], [0.5, 0.5, 0.5, -0.5]], np.float32)
    made = round_with(parse_quantizer("importance", "affine", {"bits": 1, "group": "row"}), values, no_factors(4))
    assert np.allclose(values_of(made), [[2, -2, 2, -2], [0.5, 0.5, 0.5, -0.5]], atol=2e-3)
    length = along(values, values_of(made), no_factors(4))
    assert length == pytest.approx((16 + 1) / (18 + 1), abs=1e-3)
    stretch(made, values, no_factors(4))
    assert along(values, values_of(made), no_factors(4)) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("how", [SIGNS, STREAMS, ("two-sided", "scaled_codebook", {"bits": 2, "group": 32})])
def test_nothing_is_missing_along_the_matrix(how: tuple[str, str, dict[str, object]]) -> None:
    wanted = parse_quantizer(*how)
    values, factors = matrix(48, 64), known(48, 64, damping=damping_for(wanted))
    found, _, outcomes = encoded(values, how)
    assert along(values, found, factors) == pytest.approx(1, abs=2e-3)
    assert outcomes[0].error == pytest.approx(error_under(values, found, factors), rel=1e-4)
    nearest = round_with(parse_quantizer("importance", *how[1:]), values, factors)
    stretch(nearest, values, factors)
    assert error_under(values, found, factors) < 0.9 * error_under(values, values_of(nearest), factors)
    assert wanted.layout(values.shape, "f32").codec == how[1]


def test_what_falls_short_by_more_than_half_is_left_and_so_is_what_has_no_scales() -> None:
    values, none = matrix(8, 16), no_factors(16)
    (short,) = round_with(parse_quantizer("importance", "affine", {"bits": 4, "group": 16}), values, none)
    assert isinstance(short, Rounded)
    short.scales = short.scales * np.float32(0.25)
    kept = short.scales.copy()
    stretch([short], values, none)
    assert (short.scales == kept).all()
    palette = round_with(parse_quantizer("importance", "palette", {"bits": 2}), values, none)
    before = values_of(palette)
    stretch(palette, values, none)
    assert (values_of(palette) == before).all()


def test_scales_of_small_values_get_a_type_that_reaches_them() -> None:
    small = matrix(16, 32, scale=1e-7)
    encoder = encoder_under("w", (16, 32), SIGNS, statistics(16, 32), lambda _: None)
    assert isinstance(encoder, RoundingEncoder)
    encoder.observe(small, 0)
    assert encoder.wider_options() == {"scales": "bf16"}
    encoder.observe(small * np.float32(1e6), 0)
    assert encoder.wider_options() == {}
    named = encoder_under("w", (16, 32), ("gptq", "affine", {"bits": 4, "scales": "f16"}), statistics(16, 32), print)
    assert isinstance(named, RoundingEncoder)
    named.observe(small * np.float32(1e-3), 0)
    assert named.wider_options() == {}
    assert named.underflow()


def test_stacked_matrices_are_rounded_each_by_its_own() -> None:
    values = np.stack([matrix(16, 32, seed) for seed in (1, 2)])
    found, _, outcomes = encoded(values, STREAMS)
    assert [outcome.matrix for outcome in outcomes] == ["w:expert.0", "w:expert.1"]
    assert [outcome.tokens for outcome in outcomes] == [None, None]
    alone = encoder_under("other", (16, 32), STREAMS, Statistics.in_memory({}), lambda _: None)
    one = np.empty((16, 32), np.float32)
    alone.decode(alone.encode(values[1]), one)
    assert (found[1] == one).all()


def test_bad_values_and_wrong_statistics_are_refused() -> None:
    bad = matrix(16, 32)
    bad[3, 4] = np.nan
    with pytest.raises(CodecError) as found:
        encoded(bad, STREAMS)
    assert found.value.rule == "quantizer.non-finite"
    other = encoder_under("w", (16, 32), STREAMS, statistics(16, 48), lambda _: None)
    with pytest.raises(FormatError) as wrong:
        other.encode(matrix(16, 32))
    assert wrong.value.rule == "statistics.shape"
    with pytest.raises(UnsupportedError) as columns:
        encoder_under("w", (16, 40), STREAMS, statistics(16, 40), lambda _: None)
    assert columns.value.rule == "trellis.group"
    for how in (("gptq", "low_rank", {}), ("two-sided", "affine", {"bits": 1, "symmetric": False})):
        with pytest.raises(UsageError) as option:
            encoder_under("w", (16, 32), how, statistics(16, 32), lambda _: None)
        assert option.value.rule == "quantizer.option"


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 24), st.integers(2, 24), st.integers(1, 6), st.integers(0, 99))
def test_thin_products_are_the_best_of_their_rank(rows: int, cols: int, rank: int, seed: int) -> None:
    values, factors = matrix(rows, cols, seed), known(rows, cols, seed)
    rank = min(rank, rows, cols)
    left, right = factors_under(values, rank, None, factors)
    values_left = np.linalg.svd(whiten(values, factors), compute_uv=False)[rank:]
    whole = np.square(whiten(values, factors)).sum()
    error = np.square(whiten((left @ right - values).astype(np.float64), factors)).sum() / whole
    assert error == pytest.approx(np.square(values_left).sum() / whole, abs=1e-6)
    assert np.allclose(np.linalg.norm(left, axis=0), np.linalg.norm(right, axis=1))
    plain = np.linalg.svd(values.astype(np.float64), full_matrices=False)
    product = (plain[0][:, :rank] * plain[1][:rank]) @ plain[2][:rank]
    assert error <= np.square(whiten(product - values, factors)).sum() / whole + 1e-6


def test_two_by_two_by_hand() -> None:
    # Inputs of 3 and 1: the column that is multiplied by 3 weighs more, and rank 1 keeps it. Plain SVD keeps the other.
    values = np.diag([1, 2]).astype(np.float32)
    heavy = Factors(np.diag([9, 1]).astype(np.float32), None, np.array([9, 1], np.float32))
    left, right = factors_under(values, 1, None, heavy)
    assert np.allclose(left @ right, np.diag([1, 0]), atol=1e-12)
    both = Factors(np.diag([9, 1]).astype(np.float32), np.diag([1, 4]).astype(np.float32), np.array([9, 1], np.float32))
    left, right = factors_under(values, 1, None, both)
    assert np.allclose(left @ right, np.diag([0, 2]), atol=1e-12)  # 2 * 1 * 2 = 4 against 1 * 3 * 1
