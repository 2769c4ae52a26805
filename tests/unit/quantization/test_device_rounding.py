"""Rounding as torch operations agrees with the native kernels, and mixes no devices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from ingot.errors import CodecError, ResourceError
from ingot.model.statistics import Statistics
from ingot.quantization import rounding
from ingot.quantization.awq import Reader, candidates, losses
from ingot.quantization.choice import parse_quantizer
from ingot.quantization.device import descent
from ingot.quantization.device import round as module
from ingot.quantization.device.awq import losses_on_device
from ingot.quantization.device.round import round_on_device, rounds_on_device
from ingot.quantization.factors import Factors, factors_of, no_factors
from ingot.quantization.grid import A_ROW, GRIDS, Grid
from ingot.quantization.rounding import How, error_under, round_matrix
from ingot.quantization.table import learn_levels
from ingot.quantization.tensor import round_tensor
from tests.support.fake_device import NAME, fake_device

CPU = torch.device("cpu")
GRID_CASES = {
    "q4_0": Grid(4, 32),
    "signs": Grid(1, 64),
    "wide group": Grid(3, 128, "bf16"),
    "a row": Grid(8, A_ROW, "f32"),
    "points": Grid(3, 64, zeros="points"),
    "offsets": Grid(4, 32, zeros="offsets"),
    "a table": Grid(4, 32, table="iq4_nl"),
    "learnt": Grid(3, 64, learnt=True),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def moments(rows: int, cols: int, seed: int, dead: int = 0) -> Statistics:
    random = np.random.default_rng(seed)
    arrays = {}
    for field, size in (("inputs", cols), ("outputs", rows)):
        mixed = np.eye(size) + 0.5 / np.sqrt(size) * random.normal(size=(size, size))
        samples = (random.normal(size=(2 * size, size)) @ mixed * np.exp(0.5 * random.normal(size=size))).astype("f4")
        if field == "inputs":
            samples[:, :dead] = 0
            arrays["w:in_sum2"] = np.square(samples).sum(0)
        arrays[f"w:{field}"] = samples.T @ samples
    return Statistics.in_memory({**arrays, "w:count": np.array([9])})


def factors(rows: int, cols: int, seed: int, dead: int = 0) -> Factors:
    entry = moments(rows, cols, seed, dead).for_matrix("w")
    assert entry is not None
    return factors_of(entry)


def weights_of(rows: int, cols: int, seed: int = 0) -> np.ndarray[Any, np.dtype[Any]]:
    values = np.random.default_rng(seed).standard_t(5, size=(rows, cols)).astype(np.float32)
    return np.ascontiguousarray(values * np.float32(0.02))


def assert_agree(weights: Any, grid: Grid, known: Factors, how: How, codes: float = 0.999) -> None:
    native = round_matrix(weights, grid, known, how.quantizer, act_order=how.act_order)
    result = round_on_device(weights, grid, known, how, CPU)
    assert (result.codes == native.codes).mean() >= codes
    errors = [error_under(weights, rounded.values(), known) for rounded in (native, result)]
    assert errors[1] == pytest.approx(errors[0], rel=2e-3, abs=1e-12)
    assert result.error_sums is not None
    assert result.error_sums[0] / max(result.error_sums[1], 1e-30) == pytest.approx(errors[1], rel=1e-3, abs=1e-9)
    np.testing.assert_array_equal(result.levels, native.levels)


@pytest.mark.parametrize("name", GRID_CASES)
@pytest.mark.parametrize("quantizer", ["importance", "gptq"])
def test_codes_and_errors_are_those_of_the_kernels(name: str, quantizer: str) -> None:
    assert_agree(weights_of(96, 200), GRID_CASES[name], factors(96, 200, 3), How(quantizer))


@pytest.mark.parametrize(("rows", "cols"), [(1, 64), (3, 7), (200, 33), (17, 300)])
@pytest.mark.parametrize("grid", [Grid(4, 32), Grid(3, 64, zeros="offsets"), Grid(2, 100, learnt=True)])
def test_shapes_with_one_row_and_short_groups_agree(rows: int, cols: int, grid: Grid) -> None:
    known = factors(rows, cols, 5)
    for how in (How("importance"), How("gptq"), How("gptq", act_order=True)):
        assert_agree(weights_of(rows, cols), grid, known, how)


@pytest.mark.parametrize("grid", [Grid(4, 32), Grid(3, 32, zeros="points"), Grid(4, 32, zeros="offsets")])
def test_degenerate_matrices_agree(grid: Grid) -> None:
    weights = weights_of(12, 128)
    weights[0] = 0
    weights[1] = 0.25
    weights[2] = -1e-30
    weights[3] = 6e4
    weights[:, 32:64] = 0
    for quantizer in ("importance", "gptq"):
        assert_agree(weights, grid, factors(12, 128, 1, dead=40), How(quantizer))
        assert_agree(weights, grid, no_factors(128), How(quantizer))
    assert_agree(np.zeros((4, 64), np.float32), grid, no_factors(64), How("gptq"))


def test_a_long_matrix_agrees_after_many_columns() -> None:
    assert_agree(weights_of(64, 1024), Grid(4, 64), factors(64, 1024, 2), How("gptq"))


@pytest.mark.parametrize(
    ("name", "rows", "cols", "act_order"),
    [
        ("q4_0", 64, 64, False),
        ("q4_0", 140, 64, False),  # two blocks of rows
        ("q4_0", 48, 160, True),  # two steps of columns, in an order
        ("points", 64, 96, False),
        ("offsets", 5, 200, False),
        ("a row", 40, 300, False),  # scales chosen before the steps
        ("learnt", 48, 64, False),
    ],
)
def test_feedback_along_rows_gives_the_codes_of_the_kernels(
    name: str, rows: int, cols: int, act_order: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place, field in ((rounding, "PASSES"), (rounding, "PASSES_LEARNT"), (module, "PASSES")):
        monkeypatch.setattr(place, field, 0)
    known = factors(rows, cols, 3)
    assert_agree(weights_of(rows, cols), GRID_CASES[name], known, How("two-sided", act_order))


@pytest.mark.parametrize("name", ["q4_0", "offsets"])
def test_descent_leaves_no_larger_error_than_the_kernel(name: str) -> None:
    weights, grid, known = weights_of(64, 64), GRID_CASES[name], factors(64, 64, 3)
    errors = [
        error_under(weights, rounded.values(), known)
        for rounded in (
            round_matrix(weights, grid, known, "gptq"),
            round_matrix(weights, grid, known, "two-sided"),
            round_on_device(weights, grid, known, How("two-sided"), CPU),
        )
    ]
    assert errors[2] < errors[1] * 1.01
    assert errors[2] < errors[0] * 0.8


def test_each_pass_of_descent_lowers_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, known = weights_of(70, 96), factors(70, 96, 8)
    errors = []
    for passes in range(4):
        monkeypatch.setattr(module, "PASSES", passes)
        rounded = round_on_device(weights, Grid(3, 32, zeros="offsets"), known, How("two-sided"), CPU)
        errors.append(error_under(weights, rounded.values(), known))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < errors[0]


def test_descent_without_gradients_agrees_with_the_kernel() -> None:
    known = factors(40, 96, 4)
    alone = Factors(known.moment, None, known.weights)
    assert_agree(weights_of(40, 96), Grid(4, 32), alone, How("two-sided"), codes=0.98)


@pytest.mark.parametrize("quantizer", ["importance", "gptq", "two-sided"])
def test_rounding_mixes_no_devices(quantizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, known = weights_of(5, 12), factors(5, 12, 6)
    monkeypatch.setattr(module, "PASSES", 2)
    monkeypatch.setattr(descent, "_CLASSES", 2)
    for grid in (Grid(4, 8), Grid(3, 8, learnt=True), Grid(3, 8, zeros="points")):
        expected = round_on_device(weights, grid, known, How(quantizer), CPU)
        with fake_device(monkeypatch) as mode:
            result = round_on_device(weights, grid, known, How(quantizer), torch.device(NAME, 0))
        assert mode.operations > 50
        assert (result.codes == expected.codes).mean() > 0.99
        assert result.error_sums == pytest.approx(expected.error_sums, rel=1e-2)


def test_a_search_for_channel_scales_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    known = factors(16, 48, 7)
    squares = np.ascontiguousarray(known.inputs.diagonal())
    tried = candidates(squares)[::6]
    for grid, inputs in ((Grid(4, 32), known.inputs), (Grid(3, 32, learnt=True), None)):
        reader = Reader(weights_of(16, 48), grid, inputs, squares, np.linspace(0.5, 2, 16))
        expected = losses(reader, tried)
        np.testing.assert_allclose(losses_on_device(reader, tried, CPU), expected, rtol=1e-3)
        with fake_device(monkeypatch):
            result = losses_on_device(reader, tried, torch.device(NAME, 0))
        np.testing.assert_allclose(result, expected, rtol=1e-3)


def test_a_scale_beyond_its_type_is_refused_as_by_the_kernels() -> None:
    weights = weights_of(4, 64)
    weights[2, 40] = 3e8
    messages = []
    for compute in (
        lambda: round_matrix(weights, Grid(4, 32), no_factors(64), "gptq"),
        lambda: round_on_device(weights, Grid(4, 32), no_factors(64), How("gptq"), CPU),
    ):
        with pytest.raises(CodecError) as caught:
            compute()
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_a_singular_moment_gets_more_damping_as_by_the_kernels() -> None:
    column = np.ones((64, 1), np.float32)
    known = Factors(column @ column.T, None, np.ones(64, np.float32))
    native = round_matrix(weights_of(8, 64), Grid(4, 32), known, "gptq")
    result = round_on_device(weights_of(8, 64), Grid(4, 32), known, How("gptq"), CPU)
    assert result.more_damping == pytest.approx(native.more_damping)
    assert result.more_damping > 0
    with pytest.raises(ResourceError) as caught:
        round_on_device(
            weights_of(8, 64), Grid(4, 32), Factors(np.full((64, 64), np.nan, np.float32), None, known.weights),
            How("gptq"), CPU,
        )  # fmt: skip
    assert caught.value.rule == "quantizer.singular"


def test_memory_that_runs_out_is_tried_again_with_less_and_then_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, known = weights_of(8, 64), factors(8, 64, 1)
    expected = round_on_device(weights, Grid(4, 32), known, How("gptq"), CPU)
    compute = module._round
    sizes: list[int] = []

    def limited(*arguments: Any) -> Any:
        sizes.append(arguments[-1])
        if len(sizes) == 1 or sizes[-1] < 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.\nmore")
        return compute(*arguments)

    monkeypatch.setattr(module, "_round", limited)
    result = round_on_device(weights, Grid(4, 32), known, How("gptq"), CPU)
    np.testing.assert_array_equal(result.codes, expected.codes)
    assert sizes[1] < sizes[0]
    monkeypatch.setattr(module, "_ELEMENTS", (-1, -2))
    with pytest.raises(ResourceError, match="--resume") as caught:
        round_on_device(weights, Grid(4, 32), known, How("gptq"), CPU)
    assert caught.value.rule == "device.memory"
    assert "\n" not in str(caught.value)


def test_grids_that_stay_on_the_cpu() -> None:
    assert {name for name, grid in GRIDS.items() if rounds_on_device(grid)} == {
        "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "iq4_nl",
    }  # fmt: skip
    for codec, options in (("palette", {"bits": 4}), ("trellis", {"bits": 2, "group": 64})):
        assert not parse_quantizer("gptq", codec, options).on_device


@pytest.mark.parametrize("block", ["q4_0", "q4_k", "iq2_xxs"])
def test_a_tensor_is_rounded_on_the_device_where_its_grid_allows(block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = parse_quantizer("gptq", "ggml_blocks", {"type": block})
    matrices = [("w", weights_of(3, 256))]
    statistics = moments(3, 256, 2)
    expected, (before,) = round_tensor(spec, matrices, statistics)
    with fake_device(monkeypatch) as mode:
        parts, (after,) = round_tensor(spec, matrices, statistics, device=torch.device(NAME, 0))
    assert (mode.operations > 0) == spec.on_device == (block == "q4_0")
    assert after.error == pytest.approx(before.error, rel=1e-3)
    assert parts.keys() == expected.keys()
    for role, part in parts.items():
        assert (part == expected[role]).mean() > 0.99


def test_a_learnt_table_is_that_of_the_cpu() -> None:
    from ingot.quantization.device.table import learn_on_device

    weights, importance = weights_of(64, 96), factors(64, 96, 5).weights
    for grid in (Grid(4, 32, learnt=True), Grid(2, 50, learnt=True)):
        expected = learn_levels(weights, grid, importance)
        result = learn_on_device(torch.from_numpy(weights), grid, torch.from_numpy(importance), 1 << 20)
        np.testing.assert_allclose(result, expected, atol=1e-3)
