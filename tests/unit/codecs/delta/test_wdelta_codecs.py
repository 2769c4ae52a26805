"""The three codecs of .wdelta: the suite, the layouts byte by byte, the peer's arithmetic, hostile positions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ingot.codecs.delta.base import delta_codec, round_sum
from ingot.codecs.delta.flat import BATCH
from ingot.codecs.delta.int4 import DeltaInt4
from ingot.codecs.delta.sign import DeltaSign
from ingot.codecs.delta.sparse import DeltaSparse
from ingot.codecs.table import CODECS
from ingot.errors import CodecError, UnsupportedError, UsageError
from ingot.model.part import memory_part
from ingot.model.tensor import Tensor
from ingot.testing.codecs import Case, CodecSuite, bits, encode_tensor, read_rows

SHAPES = [(), (0,), (1,), (9,), (0, 3), (3, 0), (1, 1), (7, 5), (16, 8), (3, 2, 5), (2, 4, 3, 3), (2, 0, 4), (5, 1)]
IDS = ("delta_sparse", "delta_sign", "delta_int4")


class TestDeltaSparse(CodecSuite):
    codec = DeltaSparse()
    cases = (
        *(Case(shape) for shape in SHAPES),
        *(Case((20, 33), options={"sparsity": share}) for share in (0, 0.5, 0.999)),
    )


class TestDeltaSign(CodecSuite):
    codec = DeltaSign()
    cases = tuple(Case(shape) for shape in [*SHAPES, (40, 24), (3, 4, 8), (1000,)])


class TestDeltaInt4(CodecSuite):
    codec = DeltaInt4()
    min_snr_db = 10
    cases = (
        *(Case(shape, options={"layout": layout}) for shape in SHAPES for layout in (1, 2)),
        *(
            Case((20, 33), options={"layout": layout, "outlier_fraction": share})
            for share in (0, 0.05, 0.5, 1)
            for layout in (1, 2)
        ),
    )


def delta(shape: tuple[int, ...], seed: int = 0, scale: float = 0.01) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).normal(0, scale, shape).astype(np.float32)


def arrays(tensor: Tensor) -> dict[str, Any]:
    return {role: part.array() for role, part in tensor.parts.items()}


def test_sparse_layout() -> None:
    source = np.array([[0, -5, 0.5], [6, 0, 1]], np.float32)
    tensor = encode_tensor(CODECS["delta_sparse"], source, {"sparsity": 0.5}, dtype="f32")
    assert arrays(tensor)["indices"].tolist() == [1, 3, 5]
    assert arrays(tensor)["values"].tolist() == [-5, 6, 1]
    assert [part.dtype for part in tensor.parts.values()] == ["i64", "f32"]
    assert tensor.params == {"sparsity": 0.5}


def test_of_equal_magnitudes_the_first_are_kept() -> None:
    source = np.array([1, -1, 1, 2, 1, -1], np.float32)
    tensor = encode_tensor(CODECS["delta_sparse"], source, {"sparsity": 0.5}, dtype="f32")
    assert arrays(tensor)["indices"].tolist() == [0, 1, 3]


def test_sign_layout() -> None:
    source = np.array([[1, -2, 3], [-1, 0, -0.0], [0, 0, 0]], np.float32)
    tensor = encode_tensor(CODECS["delta_sign"], source, dtype="f32")
    assert arrays(tensor)["scales"].tolist() == [2, float(np.float16(1 / 3)), 0]
    assert arrays(tensor)["packed_signs"].tolist() == [0b10101111, 0b10000000]


def test_int4_layouts() -> None:
    source = np.array([100, 0, 1, 15, 7.5, 8.5, 3], np.float32)  # the rest but for 100 lies on the grid 0..15
    first = arrays(encode_tensor(CODECS["delta_int4"], source, {"layout": 1}, dtype="f32"))
    second = arrays(encode_tensor(CODECS["delta_int4"], source, {"layout": 2}, dtype="f32"))
    assert first["packed"].tolist() == [0x01, 0xF8, 0x83]
    assert second["packed"].tolist() == [0xF0, 0x1F, 0x88, 0x30]
    assert (first["outlier_idx"].dtype, second["outlier_idx"].dtype) == (np.int64, np.int32)
    for parts in (first, second):
        assert parts["outlier_idx"].tolist() == [0]
        assert parts["outlier_vals"].tolist() == [100]
        assert (parts["scale"].tolist(), parts["zero_point"].tolist()) == ([1], [0])


@pytest.mark.parametrize("layout", [1, 2])
def test_int4_of_equal_values(layout: int) -> None:
    tensor = encode_tensor(CODECS["delta_int4"], np.full((4, 4), 0.25, np.float32), {"layout": layout}, dtype="f32")
    assert tensor.numpy().tolist() == np.full((4, 4), 0.25).tolist()
    assert arrays(tensor)["scale"].tolist() == [1]


def test_int4_of_a_range_below_float16() -> None:
    source = np.linspace(0, 2e-7, 64, dtype=np.float32)
    tensor = encode_tensor(CODECS["delta_int4"], source, {"layout": 2}, dtype="f32")
    assert arrays(tensor)["scale"].tolist() == [1]
    assert np.abs(tensor.numpy() - source).max() <= 2e-7


@pytest.mark.parametrize("shape", [(257,), (1000, 3), (3, 1000), (64, 1024), (2, 3, 700), (40, 129), (5, 40_000)])
def test_scales_are_numpys_means(shape: tuple[int, ...]) -> None:
    source = delta(shape, seed=len(shape))
    matrix = source.reshape(shape[0] if len(shape) > 1 else 1, -1)
    tensor = encode_tensor(CODECS["delta_sign"], source, dtype="f32")
    expected = np.mean(np.abs(matrix), axis=1).astype(np.float16)
    assert arrays(tensor)["scales"].tolist() == expected.tolist()


@pytest.mark.parametrize("id", IDS)
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_readers_cross_their_pieces(id: str, dtype: str) -> None:
    source = delta((3, BATCH // 2 + 13))
    options = {} if id == "delta_sign" else {"sparsity": 0.2} if id == "delta_sparse" else {"outlier_fraction": 0.3}
    tensor = encode_tensor(CODECS[id], source, options, dtype="f32")
    whole = tensor.numpy(dtype)
    assert bits(read_rows(CODECS[id], tensor, dtype, (1, 2))) == bits(whole)
    if id == "delta_sparse":
        kept = arrays(tensor)
        expected = np.zeros(source.size, np.float32)
        expected[kept["indices"]] = kept["values"]
        assert bits(tensor.numpy()) == bits(expected)
        assert np.array_equal(source.reshape(-1)[kept["indices"]], kept["values"])


@pytest.mark.parametrize("id", IDS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused(id: str, value: float) -> None:
    source = delta((6, 50))
    source[4, 3] = value
    with pytest.raises(CodecError) as caught:
        encode_tensor(CODECS[id], source, dtype="f32")
    assert caught.value.rule == f"{id}.non-finite"
    assert "element 203" in caught.value.message


@pytest.mark.parametrize("id", ["delta_sign", "delta_int4"])
def test_what_float16_cannot_hold_is_refused(id: str) -> None:
    with pytest.raises(CodecError) as caught:
        encode_tensor(CODECS[id], np.full((4, 4), 1e5, np.float32), dtype="f32")
    assert caught.value.rule == f"{id}.overflow"


@pytest.mark.parametrize("id", IDS)
def test_only_float32_is_encoded(id: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        CODECS[id].encoder((4, 4), "bf16", {})
    assert caught.value.rule == f"{id}.dtype"


@pytest.mark.parametrize(
    ("id", "options"),
    [
        ("delta_sparse", {"sparsity": 1}),
        ("delta_sparse", {"sparsity": -0.1}),
        ("delta_sparse", {"sparsity": True}),
        ("delta_sparse", {"sparsity": float("nan")}),
        ("delta_sparse", {"sparsity": "0.5"}),
        ("delta_int4", {"outlier_fraction": 1.1}),
        ("delta_int4", {"layout": 3}),
        ("delta_int4", {"layout": True}),
    ],
)
def test_wrong_options_are_refused(id: str, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        CODECS[id].encoder((4, 4), "f32", options)
    assert caught.value.rule == f"{id}.option"


@pytest.mark.parametrize("id", ["delta_sparse", "delta_int4"])
@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({0: -1}, "index"),
        ({-1: 400}, "index"),
        ({-1: 2**62}, "index"),
        ({3: -(2**63)}, "index"),
        ({2: 399}, "duplicate"),
    ],
)
def test_hostile_positions_are_refused(id: str, change: dict[int, int], rule: str) -> None:
    tensor = encode_tensor(
        CODECS[id], delta((20, 20)), {} if id == "delta_sparse" else {"outlier_fraction": 0.1}, dtype="f32"
    )
    role = next(iter(tensor.parts))
    positions = tensor.parts[role].array().copy()
    positions[-1] = 399
    for index, value in change.items():
        positions[index] = value
    wrong = replace(tensor, parts={**tensor.parts, role: memory_part(positions, "i64")})
    for read in (wrong.numpy, lambda: read_rows(CODECS[id], wrong, "f32", (1, 7))):
        with pytest.raises(CodecError) as caught:
            read()
        assert caught.value.rule == f"{id}.{rule}"


def test_a_position_twice_is_refused() -> None:
    parts = {
        "indices": memory_part(np.array([3, 3], np.int64), "i64"),
        "values": memory_part(np.array([1, 2], np.float32), "f32"),
    }
    tensor = Tensor("t", (4, 4), "f32", "delta_sparse", parts, decoder=CODECS["delta_sparse"])
    with pytest.raises(CodecError) as caught:
        tensor.numpy()
    assert caught.value.rule == "delta_sparse.duplicate"


@pytest.mark.parametrize("id", ["delta_sparse", "delta_int4"])
@pytest.mark.parametrize("shape", [(20, 20), (500, 600)])
def test_positions_in_any_order_give_the_same_values(id: str, shape: tuple[int, int]) -> None:
    """Few ones, and more than a reader takes at a time; whole, from a row on, and added to a base."""
    options = {"sparsity": 0.5} if id == "delta_sparse" else {"outlier_fraction": 0.5}
    tensor = encode_tensor(CODECS[id], delta(shape), options, dtype="f32")
    at, what = list(tensor.parts)[:2]
    order = np.random.default_rng(1).permutation(tensor.parts[at].count)
    parts = {role: memory_part(tensor.parts[role].array()[order], tensor.parts[role].dtype) for role in (at, what)}
    shuffled = replace(tensor, parts={**tensor.parts, **parts})
    expected = tensor.numpy()
    assert np.array_equal(shuffled.numpy(), expected)
    assert np.array_equal(shuffled[13:, 1:], expected[13:, 1:])
    base, out = np.ones(shape, np.float32), np.empty(shape, np.float32)
    reader = CODECS[id].reader(shuffled)
    reader.add_into(base, out)
    reader.finish()
    assert np.array_equal(out, base + expected)


def test_a_scale_that_is_not_finite_is_refused() -> None:
    tensor = encode_tensor(CODECS["delta_int4"], delta((4, 4)), dtype="f32")
    scale = memory_part(np.array([np.inf], np.float16), "f16")
    with pytest.raises(CodecError) as caught:
        replace(tensor, parts={**tensor.parts, "scale": scale}).numpy()
    assert caught.value.rule == "delta_int4.scale"


def test_positions_of_32_bits_are_read() -> None:
    tensor = encode_tensor(CODECS["delta_int4"], delta((20, 20)), {"layout": 2}, dtype="f32")
    wide = memory_part(tensor.parts["outlier_idx"].array().astype(np.int64), "i64")
    assert tensor.parts["outlier_idx"].dtype == "i32"
    assert bits(replace(tensor, parts={**tensor.parts, "outlier_idx": wide}).numpy()) == bits(tensor.numpy())


@pytest.mark.parametrize("params", [{}, {"layout": 0}, {"layout": "1"}, {"layout": True}])
def test_a_layout_that_is_not_known_is_refused(params: dict[str, Any]) -> None:
    tensor = encode_tensor(CODECS["delta_int4"], delta((4, 4)), dtype="f32")
    with pytest.raises(CodecError) as caught:
        CODECS["delta_int4"].check(replace(tensor, params=params))
    assert caught.value.rule == "delta_int4.layout"


@pytest.mark.parametrize("id", IDS)
@pytest.mark.parametrize("shift", [1, 8])
def test_arrays_that_overlap_in_part_are_not_mixed_up(id: str, shift: int) -> None:
    tensor = encode_tensor(CODECS[id], delta((6, 40)), dtype="f32")
    for base_at, out_at in ((0, shift), (shift, 0)):
        room = np.random.default_rng(2).normal(0, 0.02, 240 + shift).astype(np.float32)
        base, out = (room[at : at + 240].reshape(6, 40) for at in (base_at, out_at))
        wanted = base + tensor.numpy()
        applier = delta_codec(id).applier(tensor, "f32")
        applier.apply(base, out)
        applier.finish()
        assert bits(out) == bits(wanted)


def test_sums_are_made_in_place() -> None:
    total, base, out = np.ones(5, np.float32), np.arange(5, dtype=np.float16), np.empty(5, np.float16)
    round_sum(total, base, out)
    assert np.array_equal(total, np.arange(1, 6, dtype=np.float32))
    assert np.array_equal(out, np.arange(1, 6, dtype=np.float16))


def test_sums_of_signs_are_float32_as_numpy_adds_them() -> None:
    """Rows whose mean is, but for the rounding of sums, the middle between two float16."""
    rng = np.random.default_rng(11)
    matrix = np.abs(rng.normal(1, 0.2, (200, 3000)))
    matrix *= (1 + 2.0**-11) / matrix.astype(np.float32).mean(axis=1, dtype=np.float64)[:, None]
    source = matrix.astype(np.float32)
    exact = source.mean(axis=1, dtype=np.float64).astype(np.float16)
    wanted = source.mean(axis=1).astype(np.float16)
    assert np.count_nonzero(exact != wanted) > 20
    assert arrays(encode_tensor(CODECS["delta_sign"], source, dtype="f32"))["scales"].tolist() == wanted.tolist()


@pytest.mark.parametrize("layout", [1, 2])
def test_a_spread_of_1e_7_has_codes(layout: int) -> None:
    """Values are equal up to 1e-8 (deltatensors 0.2.0), not up to 1e-6."""
    encoder = CODECS["delta_int4"].encoder((1, 17), "f32", {"layout": layout, "outlier_fraction": 0})
    source = np.append(np.linspace(-9e-7, 0, 16), 1).astype(np.float32)[None]
    codes = encoder.encode(source)["packed"]
    assert codes[:8].tolist() == [0x01, 0x23, 0x45, 0x67, 0x89, 0xAB, 0xCD, 0xEF]
