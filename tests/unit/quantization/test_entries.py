"""Rounding to the grid types of ggml: blocks hold the values, and the error falls from quantizer to quantizer."""

from __future__ import annotations

import numpy as np
import pytest

from ingot.codecs.blocks.codec import BlockDecoder
from ingot.codecs.blocks.entries import ENTRY_TYPES
from ingot.errors import CodecError, UsageError
from ingot.model.layouts.ggml import TYPES, GgmlBlocksLayout
from ingot.model.statistics import MatrixStatistics
from ingot.model.tensor import Array
from ingot.quantization import entries
from ingot.quantization.choice import parse_quantizer
from ingot.quantization.entries import round_entries
from ingot.quantization.factors import Factors
from ingot.quantization.rounding import QUANTIZERS, error_under
from ingot.quantization.tensor import round_tensor

ROWS, COLS = 24, 512


def weights() -> Array:
    return np.random.default_rng(3).standard_normal((ROWS, COLS)).astype(np.float32) * np.float32(0.03)


def moment(size: int, seed: int) -> Array:
    """A damped second moment of correlated values of different sizes, with a mean of 1 on its diagonal."""
    random = np.random.default_rng(seed)
    mix = np.eye(size) + random.standard_normal((size, size)) * 0.6 / np.sqrt(size)
    values = random.standard_normal((2 * size, size)) @ mix * random.gamma(1, 1, size)
    result = values.T @ values
    result /= result.diagonal().mean()
    return (result + 0.01 * np.eye(size)).astype(np.float32)


def factors(*, outputs: bool) -> Factors:
    inputs = moment(COLS, 1)
    return Factors(inputs, moment(ROWS, 2) if outputs else None, np.ascontiguousarray(inputs.diagonal()))


def decode(block_type: str, blocks: Array) -> Array:
    out = np.empty(ROWS * COLS, np.float32)
    BlockDecoder(GgmlBlocksLayout(block_type), "x").decode(blocks, out)
    return out.reshape(ROWS, COLS)


@pytest.mark.parametrize("outputs", [False, True])
@pytest.mark.parametrize("block_type", ENTRY_TYPES)
def test_errors_fall_from_quantizer_to_quantizer(block_type: str, outputs: bool) -> None:
    known = factors(outputs=outputs)
    errors = []
    for quantizer in QUANTIZERS:
        rounded = round_entries(weights(), block_type, known, quantizer)
        blocks = rounded.blocks()
        assert blocks.size == ROWS * COLS // 256 * TYPES[block_type].nbytes
        assert np.array_equal(decode(block_type, blocks), rounded.values())
        errors.append(error_under(weights(), rounded.values(), known))
    assert errors[1] < 0.9 * errors[0]
    assert errors[2] < 0.95 * errors[1]


def test_descent_never_raises_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    known = factors(outputs=True)
    errors = []
    for passes in range(4):
        monkeypatch.setattr(entries, "PASSES", passes)
        errors.append(error_under(weights(), round_entries(weights(), "iq2_xs", known).values(), known))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < errors[0]


def test_importance_equals_the_encoder() -> None:
    """Without feedback the result has the codes that the block encoder chooses."""
    from ingot.codecs.blocks.codec import BlocksCodec

    known = factors(outputs=False)
    rounded = round_entries(weights(), "iq3_s", known, "importance")
    options = {"type": "iq3_s", "importance": known.weights.tolist()}
    encoder = BlocksCodec().encoder((ROWS, COLS), "f32", options)
    theirs = decode("iq3_s", encoder.encode(weights(), 0)["blocks"])
    ours = ((rounded.values() - weights()) ** 2 * known.weights).sum()
    assert ours == pytest.approx(((theirs - weights()) ** 2 * known.weights).sum(), rel=1e-3)


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_matrices_of_zeros_and_of_large_values(quantizer: str) -> None:
    known = factors(outputs=True)
    zeros = np.zeros((ROWS, COLS), np.float32)
    assert not round_entries(zeros, "iq2_s", known, quantizer).values().any()
    with pytest.raises(CodecError) as caught:
        round_entries(np.full((ROWS, COLS), 3e38, np.float32), "iq2_s", known, "importance")
    assert caught.value.rule == "quantizer.scale-overflow"


def test_the_spec_of_a_rule() -> None:
    spec = parse_quantizer("two-sided", "ggml_blocks", {"type": "iq1_m"})
    assert spec.entries
    assert spec.layout((ROWS, COLS), "f32") == GgmlBlocksLayout("iq1_m")
    assert not parse_quantizer("two-sided", "ggml_blocks", {"type": "q4_k"}).entries
    for quantizer, options in (
        ("awq+two-sided", {"type": "iq3_s"}),
        ("gptq", {"type": "iq3_s", "act_order": True}),
        ("two-sided", {"type": "iq1_s"}),
    ):
        with pytest.raises(UsageError) as caught:
            parse_quantizer(quantizer, "ggml_blocks", options)
        assert caught.value.rule == "quantizer.option"


def test_stacked_matrices_become_blocks_one_after_the_other() -> None:
    class Nothing:
        def for_matrix(self, name: str) -> MatrixStatistics | None:
            return None

    spec = parse_quantizer("two-sided", "ggml_blocks", {"type": "iq3_xxs"})
    stack = [("a", weights()), ("b", weights() * 2)]
    parts, outcomes = round_tensor(spec, stack, Nothing())
    assert parts["blocks"].size == 2 * ROWS * COLS // 256 * TYPES["iq3_xxs"].nbytes
    assert [outcome.matrix for outcome in outcomes] == ["a", "b"]
    assert all(0 < outcome.error < 0.05 for outcome in outcomes)
