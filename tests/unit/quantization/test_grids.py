"""Grids with zeros, of ggml's blocks, and the order of activations: what is chosen can be stored, and only descends."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.codecs.blocks.compose import Numbers, compose_blocks, numbers_of
from ingot.codecs.table import CODECS
from ingot.core.runtime import native
from ingot.errors import UnsupportedError, UsageError
from ingot.model.layouts.ggml import TYPES
from ingot.model.part import memory_part
from ingot.model.tensor import Tensor
from ingot.quantization.choice import parse_quantizer, round_with
from ingot.quantization.descent import Descent
from ingot.quantization.factors import feedback_factor, no_factors
from ingot.quantization.grid import GRIDS, OFFSETS, POINTS, Grid, Rounded
from ingot.quantization.rounding import QUANTIZERS, error_under, round_matrix, values_of
from ingot.quantization.tensor import parts_of
from tests.unit.quantization.test_rounding import factors, matrix

NESTED = tuple(kind for kind, grid in GRIDS.items() if grid.nested is not None)
ZEROS = (POINTS, OFFSETS)


@pytest.fixture
def each_isa() -> Iterator[tuple[str, ...]]:
    before = native.isa()
    yield tuple(native.available_isas())
    native.set_isa(before)


def decoded(found: Rounded, quantizer: str, codec: str, options: dict[str, object]) -> np.ndarray:
    """What stands in a container: the parts as the codec's own decoder reads them."""
    wanted = parse_quantizer(quantizer, codec, options)
    layout = wanted.layout(found.codes.shape, "f32")
    parts = parts_of([found], wanted)
    made = {
        spec.role: memory_part(np.ascontiguousarray(parts[spec.role]).reshape(-1).view(np.uint8), spec.dtype)
        for spec in layout.part_specs(found.codes.shape)
    }
    tensor = Tensor.from_parts(layout, made, found.codes.shape, "w")
    out: np.ndarray = CODECS[layout.codec].decode(tensor, "f32")
    return out


@pytest.mark.parametrize("kind", GRIDS)
def test_blocks_are_put_together_as_the_encoder_packs_them(kind: str) -> None:
    """Codes and numbers taken out of blocks that the encoder wrote give the same bytes."""
    weights, even = matrix(3, 512, 4), np.ones(512, np.float32)
    block, grid = TYPES[kind], GRIDS[kind]
    blocks = np.empty(weights.size // block.elements * block.nbytes, np.uint8)
    native.kernels.ggml_encode(kind, weights, "f32", even, True, None, blocks)
    values = np.empty(weights.size, np.float32)
    native.kernels.ggml_decode(kind, blocks, None, values, "f32")
    if grid.nested is not None:
        numbers = numbers_of(kind, weights, even)
        assert isinstance(numbers, Numbers)
    else:
        halves = blocks.reshape(-1, block.nbytes)[:, : 4 if grid.zeros == OFFSETS else 2].copy().view("<f2")
        scale, *more = (np.ascontiguousarray(each, np.float32).reshape(3, -1) for each in halves.T)
        numbers = Numbers(scale, *(more or [None]), scale, *(more or [None]))
    spread = np.repeat(numbers.scales, grid.group, axis=1)
    base = 0 if numbers.minima is None else np.repeat(numbers.minima, grid.group, axis=1)
    among = (values.reshape(weights.shape) - base) / np.where(spread != 0, spread, 1)
    codes = np.abs(grid.levels - among[..., None]).argmin(-1).astype(np.uint8)
    made = compose_blocks(kind, codes, numbers)
    again = np.empty_like(values)
    native.kernels.ggml_decode(kind, made, None, again, "f32")
    assert np.array_equal(again, values)
    assert (made == blocks).all()


@pytest.mark.parametrize("kind", GRIDS)
@pytest.mark.parametrize("quantizer", ["importance", "gptq", "two-sided"])
def test_blocks_hold_what_was_chosen_to_the_bit(kind: str, quantizer: str) -> None:
    weights, known = matrix(5, 256, 1), factors(5, 256, 2)
    found = round_matrix(weights, GRIDS[kind], known, quantizer)
    assert np.array_equal(decoded(found, quantizer, "ggml_blocks", {"type": kind}), found.values())
    assert error_under(weights, found.values(), known) < 0.5 ** (2 * GRIDS[kind].bits - 2)


@settings(max_examples=15)
@given(
    rows=st.integers(1, 40), cols=st.integers(1, 70), bits=st.integers(2, 8), group=st.sampled_from((7, 32, 1000)),
    zeros=st.sampled_from(ZEROS), shift=st.sampled_from((0.0, 2.0, -30.0)), seed=st.integers(0, 99),
)  # fmt: skip
def test_zeros_descend_and_can_be_stored(
    rows: int, cols: int, bits: int, group: int, zeros: str, shift: float, seed: int
) -> None:
    weights, known = matrix(rows, cols, seed) + np.float32(shift), factors(rows, cols, seed + 1)
    grid = Grid(bits, group, zeros=zeros)
    found = round_matrix(weights, grid, known, "gptq")
    errors = [error_under(weights, found.values(), known)]
    descent = Descent([found], weights, known)
    for number in range(3):
        descent.run(refit=number > 0)
        errors.append(error_under(weights, found.values(), known))
    assert all(after <= before * 1.0001 + 1e-9 for before, after in pairwise(errors))
    assert found.zeros is not None
    assert np.isfinite(found.values()).all()
    if zeros == POINTS:
        assert np.isin(found.zeros, np.arange(1 << bits)).all()
    else:
        assert (found.zeros == found.zeros.astype(np.float16)).all()
    options = {"bits": bits, "group": group, "symmetric": False, "zero_kind": zeros.removesuffix("s")}
    assert np.array_equal(decoded(found, "gptq", "affine", options), found.values())


@settings(max_examples=10)
@given(rows=st.integers(1, 20), blocks=st.integers(1, 2), kind=st.sampled_from(NESTED), seed=st.integers(0, 99))
def test_nested_scales_descend_in_steps_that_there_are(rows: int, blocks: int, kind: str, seed: int) -> None:
    weights, known = matrix(rows, 256 * blocks, seed), factors(rows, 256 * blocks, seed + 1)
    found = round_matrix(weights, GRIDS[kind], known, "gptq")
    begun, errors = found.scales.copy(), [error_under(weights, found.values(), known)]
    descent = Descent([found], weights, known)
    for number in range(3):
        descent.run(refit=number > 0)
        errors.append(error_under(weights, found.values(), known))
    assert all(after <= before * 1.0001 for before, after in pairwise(errors))
    assert np.array_equal(decoded(found, "gptq", "ggml_blocks", {"type": kind}), found.values())
    if rows * blocks > 20:  # few rows may have the best steps from the beginning
        assert (begun != found.scales).any()  # a step was taken


@pytest.mark.parametrize("zeros", ZEROS)
def test_zeros_serve_weights_that_lie_aside(zeros: str) -> None:
    weights, known = matrix(16, 64, 3) + np.float32(1.5), factors(16, 64, 4)
    for quantizer in ("importance", "gptq", "two-sided"):
        aside = error_under(weights, round_matrix(weights, Grid(4, 32, zeros=zeros), known, quantizer).values(), known)
        around = error_under(weights, round_matrix(weights, Grid(4, 32), known, quantizer).values(), known)
        assert aside < 0.75 * around, quantizer


@pytest.mark.parametrize("zeros", ZEROS)
def test_the_zero_of_a_group_that_is_one_number(zeros: str) -> None:
    weights = np.zeros((3, 16), np.float32)
    weights[1], weights[2, :8] = 0.75, -0.25
    found = round_matrix(weights, Grid(4, 8, zeros=zeros), no_factors(16), "two-sided")
    np.testing.assert_allclose(found.values(), weights, rtol=0.005)
    assert not found.values()[0].any()


@pytest.mark.parametrize(
    "grid", [Grid(4, 32, zeros=POINTS), Grid(3, 20, zeros=OFFSETS), GRIDS["q4_k"], GRIDS["q3_k"], GRIDS["iq4_xs"]]
)
def test_any_instruction_set_gives_the_same_bits(each_isa: tuple[str, ...], grid: Grid) -> None:
    weights, known = matrix(67, 256, 5), factors(67, 256, 6)
    seen = set()
    for name in each_isa:
        native.set_isa(name)
        found = round_matrix(weights, grid, known)
        zeros = b"" if found.zeros is None else found.zeros.tobytes()
        seen.add((found.codes.tobytes(), found.scales.tobytes(), zeros))
    assert len(seen) == 1


@pytest.mark.parametrize("grid", [Grid(3, 16), Grid(3, 16, zeros=POINTS), Grid(4, 8, learnt=True)])
def test_the_heaviest_columns_are_rounded_first(grid: Grid) -> None:
    """Feedback in the order of A's diagonal, by scales of the groups as they lie: a plain loop."""
    weights, known = matrix(6, 48, 1), factors(6, 48, 2)
    found = round_matrix(weights, grid, known, "gptq", act_order=True)
    plain = round_matrix(weights, grid, known, "importance", found.levels)
    assert np.array_equal(found.scales, plain.scales)
    order = np.argsort(-known.weights, kind="stable")
    upper = feedback_factor(lambda: known.inputs[np.ix_(order, order)])[0].astype(np.float64)
    targets = weights[:, order].astype(np.float64)
    values = found.values()
    for place, column in enumerate(order):
        group = found.groups[column]
        levels = found.levels if found.zeros is None else found.levels - found.zeros[:, group][:, None]
        choices = levels * found.scales[:, group][:, None]
        best = np.abs(choices - targets[:, place][:, None]).min(1)
        chosen = np.abs(values[:, column] - targets[:, place])
        assert (chosen <= best + 1e-5).all()
        targets += (weights[:, column] - values[:, column]).astype(np.float64)[:, None] * upper[place]
    known_first = round_matrix(weights, grid, known, "gptq")
    assert not np.array_equal(known_first.codes, found.codes)


def test_what_is_never_seen_is_no_reason_to_stop() -> None:
    known = factors(4, 256, 7, rank=3)
    found = round_matrix(matrix(4, 256, 8), GRIDS["q4_k"], known)
    assert np.isfinite(found.values()).all()


@settings(max_examples=8)
@given(
    tables=st.integers(1, 3), channels=st.integers(1, 24), cols=st.integers(1, 90), bits=st.sampled_from((1, 2, 4, 6)),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_palettes_descend_over_all_their_tables(tables: int, channels: int, cols: int, bits: int, seed: int) -> None:
    rows = tables * channels
    weights, known = matrix(rows, cols, seed), factors(rows, cols, seed + 1)
    weights[:channels] *= 3  # a table of its own is of use
    wanted = parse_quantizer("gptq", "palette", {"bits": bits, "group": channels})
    found = round_with(wanted, weights, known)
    assert len(found) == tables
    assert all((band.levels == band.levels.astype(np.float16)).all() for band in found)
    errors = [error_under(weights, values_of(found), known)]
    descent = Descent(found, weights, known)
    for _ in range(3):
        descent.run()
        errors.append(error_under(weights, values_of(found), known))
    assert all(after <= before * 1.0001 + 1e-9 for before, after in pairwise(errors))
    layout, parts = wanted.layout((rows, cols), "f32"), parts_of(found, wanted)
    made = {
        spec.role: memory_part(np.ascontiguousarray(parts[spec.role]).reshape(-1).view(np.uint8), spec.dtype)
        for spec in layout.part_specs((rows, cols))
    }
    tensor = Tensor.from_parts(layout, made, (rows, cols), "w")
    assert np.array_equal(CODECS[layout.codec].decode(tensor, "f32"), values_of(found))


def test_importance_gives_palettes_the_exact_values() -> None:
    """Without feedback a palette is what the codec makes under the same weights of columns."""
    weights, known = matrix(12, 40, 2), factors(12, 40, 3)
    found = round_with(parse_quantizer("importance", "palette", {"bits": 3}), weights, known)
    own = CODECS["palette"].encoder((12, 40), "f32", {"bits": 3, "importance": known.weights.astype(np.float64)})
    for _ in range(own.fit_passes):
        own.fit_pass(weights)
    parts = own.encode(weights)
    assert np.array_equal(parts["codebook"].reshape(-1).astype(np.float32), found[0].levels)
    out = np.empty_like(weights)
    own.decode(parts, out)
    assert np.array_equal(out, values_of(found))


MXFP4, NVFP4 = {"table": "f4_e2m1fn"}, {"table": "f4_e2m1fn", "scales": "f8_e4m3fn", "second": "multiply"}
NVFP4_OF_MLX = {"table": "f4_e2m1fn", "scales": "f8_e4m3fn"}


@pytest.mark.parametrize("options", [MXFP4, NVFP4, NVFP4_OF_MLX])
def test_four_bit_floats_hold_what_was_chosen_and_each_quantizer_is_better(options: dict[str, object]) -> None:
    weights, known = matrix(24, 64, 31), factors(24, 64, 32)
    weights[3, :32] = 0  # a group of nothing
    errors = []
    for name in QUANTIZERS:
        wanted = parse_quantizer(name, "scaled_codebook", options)
        made = round_with(wanted, weights, known)
        assert isinstance(made[0], Rounded)
        values = decoded(made[0], name, "scaled_codebook", options)
        np.testing.assert_array_equal(values, values_of(made))
        assert not values[3, :32].any() or name != "importance"
        errors.append(error_under(weights, values, known))
    assert errors[0] > errors[1] > errors[2]
    plain = CODECS["scaled_codebook"].encoder(weights.shape, "f32", {"group": 32, "scales": "f8_e8m0fnu", **options})
    if options is MXFP4:
        searched = np.empty_like(weights)
        plain.decode(plain.encode(weights), searched)
        assert np.square(values_of(made) - weights).sum() < 3 * np.square(searched - weights).sum()
        assert errors[2] < error_under(weights, searched, known)


@pytest.mark.parametrize(
    "options",
    [
        {**MXFP4, "scales": "f16"},
        {**MXFP4, "group": 16},
        {**NVFP4, "group": 32},
        {**NVFP4, "second": "add"},
        {"table": "nf4"},
        {**MXFP4, "bits": 4},
    ],
)
def test_four_bit_floats_have_the_scales_that_others_read(options: dict[str, object]) -> None:
    with pytest.raises(UsageError) as refused:
        parse_quantizer("gptq", "scaled_codebook", options)
    assert refused.value.rule == "quantizer.option"


def test_four_bit_floats_need_whole_groups_and_one_matrix_for_one_number() -> None:
    for options, shape, rule in (
        (MXFP4, (4, 40), "scaled_codebook.group"),
        (NVFP4, (2, 4, 32), "quantizer.matrix"),
    ):
        with pytest.raises(UnsupportedError) as caught:
            parse_quantizer("gptq", "scaled_codebook", options).require(shape, "w")
        assert caught.value.rule == rule
