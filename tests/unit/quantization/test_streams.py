"""Rounding of matrices to a trellis: each quantizer is better than the one before."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ingot.core.runtime import native
from ingot.errors import CodecError, UnsupportedError, UsageError
from ingot.model.statistics import Statistics
from ingot.model.tensor import Tensor
from ingot.quantization.choice import parse_quantizer, round_with
from ingot.quantization.factors import Factors, factors_of, no_factors
from ingot.quantization.grid import Grid, TrellisGrid
from ingot.quantization.rounding import QUANTIZERS, error_under, round_matrix
from ingot.quantization.tensor import parts_of
from ingot.quantization.trellis import round_streams


def factors(rows: int, cols: int, seed: int) -> Factors:
    random = np.random.default_rng(seed)
    inputs = random.normal(size=(cols, 2 * cols)).astype(np.float32)
    outputs = random.normal(size=(rows, 4 * rows)).astype(np.float32)
    arrays = {"w:inputs": inputs @ inputs.T, "w:in_sum2": np.square(inputs).sum(1), "w:count": np.array([9])}
    arrays["w:outputs"] = outputs @ outputs.T
    found = Statistics.in_memory(arrays).for_matrix("w")
    assert found is not None
    return factors_of(found)


def matrix(rows: int, cols: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, cols)).astype(np.float32)


def test_two_sided_rounding_leaves_less_error_than_feedback_alone() -> None:
    """Both are searches, so that single matrices may be the other way round: the mean over matrices counts."""
    ratios = []
    for seed in range(8):
        rows, cols, bits = 64 + 8 * seed, 8 * (1 + seed % 3), 2 + seed % 3
        weights, known = matrix(rows, cols, seed), factors(rows, cols, seed + 1)
        streams = {name: round_streams(weights, TrellisGrid(bits, 8), known, name) for name in ("gptq", "two-sided")}
        errors = {name: error_under(weights, each.values(), known) for name, each in streams.items()}
        ratios.append(np.log(errors["two-sided"] / errors["gptq"]))
        scales = np.concatenate(streams["two-sided"].scales, 1)
        assert (scales == scales.astype(np.float16)).all()
    assert np.mean(ratios) < 0


@pytest.mark.parametrize("bits", [2, 4])
def test_each_quantizer_is_better_than_the_one_before_and_than_a_table(bits: int) -> None:
    weights, known = matrix(64, 64, 1), factors(64, 64, 2)
    grid, table = TrellisGrid(bits, 32), Grid(bits, 32, learnt=True)
    errors = [error_under(weights, round_streams(weights, grid, known, name).values(), known) for name in QUANTIZERS]
    assert errors[0] > errors[1] > errors[2]
    for name, error in zip(QUANTIZERS, errors, strict=True):
        assert error < error_under(weights, round_matrix(weights, table, known, name).values(), known)


def test_feedback_between_rows_goes_on_from_band_to_band() -> None:
    """A matrix of two bands, each of which depends on the other, as of one."""
    rows, cols = 272, 24
    weights, known = matrix(rows, cols, 11), factors(rows, cols, 12)
    mixed = np.random.default_rng(13).normal(size=(rows, rows // 4)).astype(np.float32)
    outputs = mixed @ mixed.T / np.float32(rows // 4) + 0.05 * np.eye(rows, dtype=np.float32)
    known = replace(known, outputs=outputs)
    apart = outputs.copy()
    apart[:144, 144:] = apart[144:, :144] = 0
    errors = [
        error_under(weights, round_streams(weights, TrellisGrid(3, 24), replace(known, outputs=each)).values(), known)
        for each in (outputs, apart)
    ]
    assert errors[0] < 0.9 * errors[1]


def test_bands_and_stacked_matrices_become_parts_that_decode_to_what_was_chosen() -> None:
    for wanted in (
        parse_quantizer("gptq", "trellis", {"bits": 3, "group": 4}),
        parse_quantizer("importance", "trellis", {"group": 4}),
    ):
        stack = [matrix(270, 8, seed) for seed in (3, 4)]
        made = [round_with(wanted, weights, no_factors(8))[0] for weights in stack]
        layout = wanted.layout((2, 270, 8), "f32")
        tensor = Tensor.from_parts(layout, parts_of(made, wanted), (2, 270, 8))
        assert tensor.numpy().tobytes() == np.stack([each.values() for each in made]).tobytes()
        assert all(error_under(one, each.values(), no_factors(8)) < 0.05 for one, each in zip(stack, made, strict=True))


def test_any_instruction_set_gives_the_same_bits() -> None:
    weights, known, before, seen = matrix(23, 24, 5), factors(23, 24, 6), native.isa(), set()
    for name in native.available_isas():
        native.set_isa(name)
        found = round_streams(weights, TrellisGrid(3, 12), known)
        seen.add(b"".join(each.tobytes() for each in (*found.windows, *found.scales)))
    native.set_isa(before)
    assert len(seen) == 1


def test_what_was_never_seen_does_no_harm() -> None:
    known = factors(20, 8, 7)
    known.inputs[:, 4] = known.inputs[4] = 0  # an input that was always 0
    known.inputs[4, 4] = 0.01
    assert known.outputs is not None
    known.outputs[3] = known.outputs[:, 3] = 0
    weights = matrix(20, 8, 8)
    weights[2] = 0
    found = round_streams(weights, TrellisGrid(2, 8), known).values()
    assert np.isfinite(found).all()
    assert not found[2].any()


def test_scales_past_their_type_are_refused() -> None:
    weights = np.full((4, 8), 1e30, np.float32)
    with pytest.raises(CodecError) as refused:
        round_streams(weights, TrellisGrid(4, 8), no_factors(8), "importance")
    assert refused.value.rule == "quantizer.scale-overflow"
    assert np.isfinite(round_streams(weights, TrellisGrid(4, 8, "f32"), no_factors(8)).values()).all()


@pytest.mark.parametrize(
    "options", [{"bits": 5}, {"group": "row"}, {"scales": "f8"}, {"act_order": True}, {"symmetric": True}]
)
def test_options_are_checked(options: dict[str, object]) -> None:
    with pytest.raises(UsageError) as refused:
        parse_quantizer("gptq", "trellis", options)
    assert refused.value.rule == "quantizer.option"
    with pytest.raises(UnsupportedError) as caught:
        parse_quantizer("gptq", "trellis", {"group": 96}).require((4, 100), "w")
    assert caught.value.rule == "trellis.group"
