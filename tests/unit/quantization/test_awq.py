"""The search for scales of channels: known answers and a plain loop."""

from __future__ import annotations

import numpy as np
import pytest

from ingot.errors import UsageError
from ingot.quantization.awq import EXPONENTS, Reader, candidates, losses
from ingot.quantization.choice import parse_quantizer
from ingot.quantization.grid import Grid


def moment(seed: int, size: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    x = random.normal(size=(size, 3 * size)) * np.exp(random.normal(size=(size, 1)) * 2)
    return (x @ x.T).astype(np.float32)


def test_exponents_go_from_nothing_to_nearly_the_magnitudes() -> None:
    found = candidates(np.array([1, 4, 16], np.float32))
    assert found[0].tolist() == [1, 1, 1]
    np.testing.assert_allclose(found[10], [2**-0.5, 1, 2**0.5], rtol=1e-6)
    np.testing.assert_allclose(found[-1], np.array([0.5, 1, 2]) ** EXPONENTS[-1], rtol=1e-6)
    assert len(found) == 20
    dead = candidates(np.array([0, 4], np.float32))
    assert all(np.isfinite(each).all() and (each > 0).all() for each in dead)
    assert [each.tolist() for each in candidates(np.zeros(2, np.float32))] == [[1, 1]]


def test_losses_are_those_of_a_plain_computation() -> None:
    weights = np.random.default_rng(1).normal(size=(6, 16)).astype(np.float32)
    inputs, heavy = moment(2, 8), np.arange(1, 7, dtype=np.float64)
    wide = np.kron(np.eye(2), inputs).astype(np.float32)  # the channels of one head, for two
    reader = Reader(weights, Grid(4, 16), wide, wide.diagonal(), heavy, 8, 2)
    tried = candidates(inputs.diagonal())
    found = losses(reader, tried)
    assert found.shape == (20,)
    spread = np.tile(tried[10], 2)
    assert (reader.expand(tried[10]) == spread).all()
    again = losses(
        Reader(weights * spread, Grid(4, 16), wide / np.outer(spread, spread), wide.diagonal() / spread**2, heavy),
        [np.ones(16, np.float32)],
    )
    np.testing.assert_allclose(found[10], again[0], rtol=1e-3)


def test_scales_serve_a_channel_that_is_much_larger() -> None:
    random = np.random.default_rng(3)
    weights = random.normal(size=(32, 64)).astype(np.float32)
    squares = np.ones(64, np.float32)
    squares[5] = 400
    for grid in (Grid(3, 64), Grid(3, 64, learnt=True)):
        found = losses(Reader(weights, grid, None, squares, np.ones(32)), candidates(squares))
        assert found.min() < 0.96 * found[0]
        assert found.argmin() > 0


@pytest.mark.parametrize(
    ("text", "rounding"), [("awq", "importance"), ("awq+gptq", "gptq"), ("awq+two-sided", "two-sided")]
)
def test_what_rounds_after_is_named(text: str, rounding: str) -> None:
    found = parse_quantizer(text, "affine", {})
    assert found.scaled
    assert found.quantizer == rounding
    assert not parse_quantizer("gptq", "affine", {}).scaled


@pytest.mark.parametrize("text", ["awq+", "awq+awq", "gptq+awq", "awq+rtn", "+gptq"])
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_quantizer(text, "affine", {})
    assert refused.value.rule == "quantizer.option"
