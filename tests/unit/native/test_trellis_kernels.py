"""Trellises: every instruction set decodes to the bits of the reference and searches alike; wrong sizes are refused."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from ingot.codecs.trellis.streams import pack_band, values_of
from ingot.core.numeric.dtypes import numpy_dtype
from ingot.core.runtime import native
from ingot.model.layouts.trellis import TrellisLayout
from tests.support.reference import trellis as reference

kernels = native.kernels
SHAPES = ((1, 1, 1), (3, 5, 5), (5, 7, 7), (6, 40, 8), (16, 33, 11), (37, 64, 16), (256, 20, 4))


def some(rng: np.random.Generator, bits: int, rows: int, cols: int) -> tuple[Any, Any]:
    layout = TrellisLayout(bits, cols, 4096, "f32")
    windows = rng.integers(0, 1 << 12, (cols, rows)).astype(np.uint16)
    return pack_band(windows, layout), windows


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_windows_are_looked_up_as_the_reference_does(bits: int, dtype: str) -> None:
    rng, values = np.random.default_rng(bits), values_of(bits)
    for rows, cols, group in SHAPES:
        words, _ = some(rng, bits, rows, cols)
        odd = np.zeros(words.size + 1, np.uint8)
        odd[1:] = words  # words may lie anywhere
        scales = rng.normal(0, 1e-3, (rows, cols // group)).astype(np.float32)
        scales[0, 0], scales[-1, -1] = np.inf, -1e30
        wanted = reference.decode(words, bits, rows, values, np.repeat(scales, group, 1), dtype)
        for first in {0, rows // 2, rows - 1}:
            out = np.full((rows - first + 1, cols), 1, numpy_dtype(dtype))
            target = out[:-1] if dtype == "f32" else out[:-1].view(np.uint16)
            kernels.trellis_decode(odd[1:], bits, rows, group, values, scales[first:], first, target, dtype)
            assert out[:-1].tobytes() == wanted[first:].tobytes(), (rows, cols, first)
            assert (out[-1] == 1).all()


def search(bits: int, wanted: Any, weights: Any, *, open_ends: bool = False) -> Any:
    windows, scales = np.zeros(wanted.shape, np.uint16), np.ones((1, wanted.shape[1]), np.float32)
    kernels.trellis_search(bits, len(wanted), values_of(bits), weights, scales, windows, wanted, open_ends)
    return windows


@pytest.mark.parametrize(("bits", "rows"), [(2, 1), (2, 5), (2, 7), (3, 2), (3, 4), (4, 1), (4, 3)])
def test_short_streams_are_the_best_there_are(bits: int, rows: int) -> None:
    rng, values = np.random.default_rng(rows), values_of(bits)
    wanted, weights = rng.normal(size=(3, rows)).astype(np.float32), rng.uniform(0.5, 2, rows).astype(np.float32)
    windows = search(bits, wanted, weights)
    for column, found in zip(wanted, windows, strict=True):
        error = float((weights * np.square(column - values[found], dtype=np.float64)).sum())
        assert error == pytest.approx(reference.best(bits, values, column, weights), rel=1e-5)


@pytest.mark.parametrize(("bits", "rows"), [(2, 8), (3, 5), (4, 4)])
def test_longer_streams_are_the_best_that_go_round_there(bits: int, rows: int) -> None:
    rng, values, span = np.random.default_rng(rows), values_of(bits), 12 // bits
    wanted, weights = rng.normal(size=(2, rows)).astype(np.float32), rng.uniform(0.5, 2, rows).astype(np.float32)
    row = (span - 1) * rows // span - 1  # before the row at which the last search began
    for column, found in zip(wanted, search(bits, wanted, weights), strict=True):
        error = float((weights * np.square(column - values[found], dtype=np.float64)).sum())
        kept = (row, int(found[row]) >> bits)
        assert error == pytest.approx(reference.best(bits, values, column, weights, kept), rel=1e-5)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_open_streams_are_the_best_there_are(bits: int) -> None:
    rng, values, rows = np.random.default_rng(bits), values_of(bits), 5
    wanted, weights = rng.normal(size=(1, rows)).astype(np.float32), rng.uniform(0.5, 2, rows).astype(np.float32)
    windows = search(bits, wanted, weights, open_ends=True)[0]
    # All windows that may come first, then every symbol: costs by the last window, from the first row on.
    states = np.arange(1 << 12)
    costs = weights[0] * np.square(wanted[0, 0] - values, dtype=np.float64)
    for row in range(1, rows):
        following = np.full(1 << 12, np.inf)
        for symbol in range(1 << bits):
            np.minimum.at(following, states >> bits | symbol << 12 - bits, costs)
        costs = following + weights[row] * np.square(wanted[0, row] - values, dtype=np.float64)
    error = float((weights * np.square(wanted[0] - values[windows], dtype=np.float64)).sum())
    assert error == pytest.approx(costs.min(), rel=1e-5)
    assert (windows[1:] & (1 << 12 - bits) - 1 == windows[:-1] >> bits).all()


@cache
def first_found() -> dict[str, bytes]:
    return {}


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_searches_find_the_same_everywhere(bits: int) -> None:
    rng, rows, cols, group = np.random.default_rng(bits), 37, 24, 10
    wanted = rng.normal(size=(cols, rows)).astype(np.float32)
    weights = rng.uniform(0.5, 2, rows).astype(np.float32)
    scales = rng.uniform(-1.5, 1.5, (3, rows)).astype(np.float32)
    scales[0, 3] = 0
    inputs = rng.normal(size=(cols, 2 * cols)).astype(np.float32)
    inputs = inputs @ inputs.T
    windows, targets, errors = np.zeros(wanted.shape, np.uint16), wanted.copy(), np.zeros_like(wanted)
    to = (bits, group, values_of(bits), weights, scales, windows)
    factor = np.triu(inputs / 50, 1)
    kernels.trellis_feedback(*to, 0, cols, wanted, targets, factor, errors)
    spread = np.repeat(scales, group, 0)[:cols]
    np.testing.assert_array_equal(errors, wanted - spread * values_of(bits)[windows])
    np.testing.assert_allclose(targets, wanted + factor.T @ errors, atol=1e-4)
    packed = pack_band(windows, TrellisLayout(bits, group, 4096, "f32"))
    assert (reference.windows(packed, bits, rows, cols) == windows.T).all()  # what is found is one stream a column
    found = windows.tobytes() + scales.tobytes() + targets.tobytes()
    assert found == first_found().setdefault(str(bits), found), native.isa()


@pytest.mark.parametrize(("bits", "rows"), [(2, 37), (3, 50), (4, 60)])
def test_linked_rows_are_searched_by_all_of_their_error(bits: int, rows: int) -> None:
    rng, cols = np.random.default_rng(bits), 6
    wanted, shift = rng.normal(size=(2, cols, rows)).astype(np.float32)
    weights, scales = np.ones(rows, np.float32), rng.uniform(0.5, 1.5, (1, rows)).astype(np.float32)
    mixed = rng.normal(size=(rows, 2 * rows))
    outputs = mixed @ mixed.T / rows + 0.1 * np.eye(rows)
    lower = np.linalg.cholesky(outputs)
    own = lower.diagonal()
    below = np.ascontiguousarray(np.tril(lower / own, -1), np.float32)
    links = (below, np.square(own).astype(np.float32))

    def found(*more: Any) -> tuple[Any, Any]:
        windows, targets = np.zeros(wanted.shape, np.uint16), wanted.copy()
        kernels.trellis_feedback(
            bits, cols, values_of(bits), weights, scales, windows, 0, cols, wanted, targets,
            np.zeros((cols, cols), np.float32), np.zeros_like(wanted), *more,
        )  # fmt: skip
        return windows, scales * values_of(bits)[windows] - wanted

    def error(errors: Any) -> float:
        return float(np.vdot(errors, errors.astype(np.float64) @ outputs))

    (_, apart), (windows, linked) = found(), found(*links)
    assert error(linked) < 0.97 * error(apart)
    packed = pack_band(windows, TrellisLayout(bits, cols, 4096, "f32"))
    assert (reference.windows(packed, bits, rows, cols) == windows.T).all()
    # A shift is what rows of other bands add to (L + I)' e.
    _, moved = found(*links, shift)
    added = [float((links[1] * np.square((each @ (below + np.eye(rows))) - shift)).sum()) for each in (moved, linked)]
    assert added[0] < 0.9 * added[1]
    seen = windows.tobytes()
    assert seen == first_found().setdefault(f"linked {bits}", seen), native.isa()


@pytest.mark.parametrize(
    "wrong",
    [
        {"words": np.zeros(63, np.uint8)},
        {"bits": 1},
        {"bits": 5},
        {"rows": 0},
        {"rows": 2**63},
        {"group": 0},
        {"group": 3},
        {"values": np.zeros(4095, np.float32)},
        {"scales": np.zeros((16, 1), np.float32)},
        {"first": 1},
        {"first": 2**64 - 1},
        {"out": np.zeros((16, 8), np.uint16)},
        {"dtype": "f64"},
    ],
)
def test_wrong_sizes(wrong: dict[str, Any]) -> None:
    given: dict[str, Any] = {
        "words": np.zeros(64, np.uint8),
        "bits": 4,
        "rows": 16,
        "group": 4,
        "values": values_of(4),
        "scales": np.zeros((16, 2), np.float32),
        "first": 0,
        "out": np.zeros((16, 8), np.float32),
        "dtype": "f32",
    }
    kernels.trellis_decode(*given.values())
    with pytest.raises((ValueError, TypeError)):
        kernels.trellis_decode(*{**given, **wrong}.values())


def test_shapes_that_do_not_fit_are_refused() -> None:
    wanted, windows = np.zeros((4, 6), np.float32), np.zeros((4, 6), np.uint16)
    weights, scales, square = np.ones(6, np.float32), np.ones((2, 6), np.float32), np.eye(4, dtype=np.float32)
    to = (2, 2, values_of(2), weights, scales, windows)
    with pytest.raises(ValueError, match="shape"):
        kernels.trellis_search(*to, wanted[:3], False)
    with pytest.raises(ValueError, match="scale"):
        kernels.trellis_search(2, 1, *to[2:], wanted, False)
    with pytest.raises(ValueError, match="columns"):
        kernels.trellis_feedback(*to, 3, 5, wanted, wanted.copy(), square, wanted.copy())
    given = (*to, 0, 4, wanted, wanted.copy(), square, wanted.copy())
    with pytest.raises(ValueError, match="links"):
        kernels.trellis_feedback(*given, square, weights)
    with pytest.raises(ValueError, match="shift"):
        kernels.trellis_feedback(*given, np.eye(6, dtype=np.float32), weights, wanted[:3])
