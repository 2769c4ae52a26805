"""The largest elements of every row beside another codec: the suite, and what only this codec promises."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ingot.codecs.delta.base import delta_codec
from ingot.codecs.wrap.with_outliers import OutlierCodec, largest
from ingot.core.numeric.dtypes import float_name, numpy_dtype
from ingot.core.numeric.stats import measure
from ingot.errors import CodecError, IngotError, UsageError
from ingot.model.part import memory_part
from ingot.model.tensor import Array, Tensor
from ingot.testing.codecs import Case, CodecSuite, bits, encode_tensor

CODEC = OutlierCodec()
INT4 = {"bits": 4, "group": 32, "quantizer": "mse"}


class TestWithOutliers(CodecSuite):
    codec = OutlierCodec()
    cases = (
        *(Case((6, 131), dtype, {"fraction": 0.02, "options": INT4}) for dtype in ("f32", "f16", "bf16")),
        *(
            Case((5, 77), "f32", {"count": count, "values": kind})
            for count, kind in ((0, "f16"), (3, "bf16"), (99, "f32"))
        ),
        *(Case(shape, "f32", {}) for shape in ((), (1,), (7,), (0,), (0, 3), (3, 0), (2, 3, 40))),
        Case((5, 77), "bf16", {"options": {"bits": 4, "group": "tensor"}}),
        Case((5, 77), "f32", {"options": {"bits": 1, "quantizer": "sign-rms", "group": "row"}}),
        Case((5, 77), "bf16", {"inner": "dense"}),
        Case((30, 40), "f32", {"inner": "low_rank", "options": {"rank": 30}}),
    )
    min_snr_db = 1.0


def rows_with_outliers(rows: int, cols: int, seed: int = 0) -> Array:
    rng = np.random.default_rng(seed)
    array = rng.normal(0, 0.01, (rows, cols)).astype(np.float32)
    array[rng.random(array.shape) < 0.01] *= 20
    return array


def encode(array: Array, **options: Any) -> Tensor:
    return encode_tensor(CODEC, array, options, dtype=float_name(array))


def refused(tensor: Tensor) -> str | None:
    with pytest.raises(IngotError) as caught:
        CODEC.decode(tensor, "f32")
    return caught.value.rule


def test_the_largest_of_every_row_are_found_and_ties_go_to_the_first() -> None:
    rows = np.array([[1, -5, 2, 5, 5], [0, 0, 0, 0, 0], [np.nan, 1, np.inf, 2, -3]], np.float32)
    assert largest(rows, 2).tolist() == [[1, 3], [0, 1], [0, 2]]
    rng = np.random.default_rng(0)
    many = rng.integers(-9, 9, (50, 60)).astype(np.float32)
    for row, found in zip(many, largest(many, 7), strict=True):
        wanted = np.lexsort((np.arange(60), -np.abs(row)))[:7]
        assert found.tolist() == sorted(wanted.tolist())


def test_outliers_come_back_and_the_rest_is_better_kept() -> None:
    array = rows_with_outliers(40, 256)
    plain = encode(array, count=0, options=INT4)
    better = encode(array, fraction=0.02, values="f32", options=INT4)
    columns = largest(array, 5)
    decoded = better.numpy("f32")
    assert bits(np.take_along_axis(decoded, columns, 1)) == bits(np.take_along_axis(array, columns, 1))
    assert measure(array, decoded).snr_db > measure(array, plain.numpy("f32")).snr_db + 6


def test_values_that_are_not_finite_are_kept_as_outliers_or_refused_and_never_spread() -> None:
    array = rows_with_outliers(4, 64)
    array[2, 9], array[2, 50] = np.nan, -np.inf
    decoded = encode(array, count=2, options=INT4).numpy("f32")
    assert np.isnan(decoded[2, 9])
    assert decoded[2, 50] == -np.inf
    assert np.isfinite(np.delete(decoded.reshape(-1), [2 * 64 + 9, 2 * 64 + 50])).all()
    array[2, 51] = np.nan
    with pytest.raises(CodecError) as caught:
        encode(array, count=2, options=INT4)
    assert caught.value.rule == "affine.non-finite"
    with pytest.raises(CodecError) as caught:
        encode(np.full((2, 8), 1e6, np.float32), values="f16")
    assert caught.value.rule == "with_outliers.overflow"


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("inner", ["affine", "low_rank"])
def test_a_delta_is_applied_in_place_as_decoded_and_added(dtype: str, inner: str) -> None:
    tensor = encode(rows_with_outliers(20, 70), inner=inner, fraction=0.05)
    base = np.random.default_rng(1).normal(0, 0.05, (20, 70)).astype(numpy_dtype(dtype))
    wanted = (tensor.numpy("f32") + base.astype(np.float32)).astype(base.dtype)
    applier = delta_codec("with_outliers").applier(tensor, dtype)
    for start, stop in ((0, 3), (3, 20)):
        applier.apply(base[start:stop], base[start:stop])
    applier.finish()
    assert bits(base) == bits(wanted)


@pytest.mark.parametrize("columns", [[[3, 3], [0, 1]], [[4, 2], [0, 1]], [[0, 64], [0, 1]]])
def test_positions_that_repeat_descend_or_lie_outside_are_refused(columns: list[list[int]]) -> None:
    tensor = encode(rows_with_outliers(2, 64), count=2)
    part = memory_part(np.array(columns, np.uint16), "u16")
    assert refused(replace(tensor, parts={**tensor.parts, "outlier_positions": part})) == "with_outliers.position"


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("per_row", 65, "with_outliers.params"),
        ("per_row", True, "with_outliers.params"),
        ("per_row", 1, "with_outliers.size"),
        ("codec_version", 2, "with_outliers.params"),
        ("dtype", "f16", "with_outliers.params"),
        ("inner", "with_outliers", "with_outliers.inner"),
        ("inner", "sparse", "with_outliers.inner"),
        ("inner_params", None, "with_outliers.params"),
    ],
)
def test_attributes_that_cannot_be_are_refused(key: str, value: object, rule: str) -> None:
    tensor = encode(rows_with_outliers(2, 64), count=2)
    assert refused(replace(tensor, params={**tensor.params, key: value})) == rule


@pytest.mark.parametrize(
    "options",
    [{"count": -1}, {"count": 1, "fraction": 0.1}, {"fraction": 2}, {"values": "f64"}, {"inner": "with_outliers"}],
    ids=str,
)
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        CODEC.encoder((4, 4), "f32", options)
    assert caught.value.rule == "with_outliers.option"


def test_columns_past_16_bits_take_32() -> None:
    array = np.zeros((1, (1 << 16) + 8), np.float32)
    array[0, -1] = 3
    tensor = encode(array, count=1)
    assert tensor.parts["outlier_positions"].dtype == "u32"
    assert tensor.numpy()[0, -1] == 3


@pytest.mark.filterwarnings("error")
def test_outliers_past_the_type_asked_for_are_refused_and_never_infinite() -> None:
    array = rows_with_outliers(3, 64)
    array[1, 7] = 1e6
    tensor = encode(array, count=1, values="f32")
    assert tensor.numpy("bf16")[1, 7] == 999424.0
    with pytest.raises(CodecError) as caught:
        tensor.numpy("f16")
    assert caught.value.rule == "dense.overflow"
    assert caught.value.where == tensor.name
    rounded_up = np.full((1, 64), 65504, np.float16)  # 65536 in bf16
    with pytest.raises(CodecError) as caught:
        encode(rounded_up, count=1, values="bf16")
    assert caught.value.rule == "with_outliers.overflow"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("inner", ["affine", "low_rank"])
def test_a_sum_past_the_range_is_infinite_as_any_sum_is(inner: str) -> None:
    """Outliers and all others alike, and without a warning."""
    array = np.full((2, 40), 1e38, np.float32)
    array[:, 3] = 3e38
    tensor = encode(
        array,
        count=1,
        values="f32",
        inner=inner,
        options={"rank": 2, "factors": "f32"} if inner == "low_rank" else {"scales": "f32"},
    )
    base = np.full((2, 40), 3e38, np.float32)
    applier = delta_codec("with_outliers").applier(tensor, "f32")
    applier.apply(base, base)
    applier.finish()
    assert np.isposinf(base).all()
