"""One-bit codes: the suite, and what the two magnitudes promise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ingot.codecs.affine.codec import AffineCodec
from ingot.codecs.affine.sign import sign_scales, unbiased_scales
from ingot.core.numeric.dtypes import float_name
from ingot.errors import CodecError, UsageError
from ingot.model.tensor import Array, Tensor
from ingot.testing.codecs import Case, CodecSuite, encode_tensor

CODEC = AffineCodec()


class TestSigns(CodecSuite):
    codec = AffineCodec()
    cases = (
        *(Case((5, 77), dtype, {"bits": 1, "quantizer": "sign"}) for dtype in ("f16", "bf16", "f32", "f64")),
        *(Case((5, 77), "f32", {"bits": 1, "quantizer": "sign-rms", "group": group}) for group in ("row", 1, 10, 500)),
        *(Case(shape, "f32", {"bits": 1, "quantizer": "sign", "group": "row"}) for shape in ((), (0, 3), (3, 0), (4,))),
        Case((2, 3, 40), "bf16", {"bits": 1, "quantizer": "sign-rms", "bit_order": "msb", "scales": "bf16"}),
        Case((5, 77), "f32", {"bits": 2, "quantizer": "mse", "symmetric": False, "unbiased": True, "group": 10}),
        Case((5, 77), "bf16", {"bits": 3, "unbiased": True, "group": "row"}),
    )
    min_snr_db = 0.5


def signs(array: Array, **options: Any) -> Tensor:
    return encode_tensor(CODEC, array, {"bits": 1, **options}, dtype=float_name(array))


def values(*shape: int) -> Array:
    return np.random.default_rng(5).normal(0, 0.02, shape).astype(np.float32)


def test_magnitudes_are_the_mean_and_the_root_mean_square_of_each_group() -> None:
    array = values(6, 50)
    for quantizer, magnitude in (
        ("sign", lambda group: np.abs(group).mean(axis=1)),
        ("sign-rms", lambda group: np.sqrt(np.square(group).mean(axis=1))),
    ):
        decoded = signs(array, quantizer=quantizer, group=20, scales="f32").numpy()
        for start in (0, 20, 40):
            group, found = array[:, start : start + 20], decoded[:, start : start + 20]
            wanted = np.where(group >= 0, 1, -1) * magnitude(group.astype(np.float64))[:, None]
            assert np.allclose(found, wanted, rtol=1e-6, atol=0)


def test_no_other_magnitude_has_a_smaller_squared_error_than_the_mean() -> None:
    array = values(1, 400)
    best = signs(array, quantizer="sign", group="row").numpy()
    error = np.square(best - array).sum()
    for factor in (0.98, 1.02):
        assert np.square(best * np.float32(factor) - array).sum() > error


def test_the_root_mean_square_keeps_the_norm_of_every_row() -> None:
    array = values(7, 300)
    decoded = signs(array, quantizer="sign-rms", group="row").numpy("f64")
    assert np.allclose(np.linalg.norm(decoded, axis=1), np.linalg.norm(array, axis=1), rtol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"bits": 2, "quantizer": "sign"},
        {"quantizer": "sign", "group": "tensor"},
        {"quantizer": "sign", "signed": True},
        {"quantizer": "sign-rms", "symmetric": True},
    ],
    ids=str,
)
def test_signs_are_one_unsigned_bit_per_value_and_a_scale_per_group(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        CODEC.encoder((4, 4), "f32", {"bits": 1, **options})
    assert caught.value.rule == "affine.option"


@pytest.mark.parametrize(("value", "rule"), [(np.nan, "affine.non-finite"), (1e6, "affine.scale-overflow")])
def test_what_a_magnitude_cannot_be_made_of_is_refused(value: float, rule: str) -> None:
    array = values(3, 40)
    array[1, 25] = value
    with pytest.raises(CodecError) as caught:
        signs(array, quantizer="sign-rms", group=20, scales="f16")
    assert caught.value.rule == rule
    assert "row 1" in str(caught.value)


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("symmetric", [True, False])
def test_unbiased_scales_keep_the_projection_of_every_group(width: int, symmetric: bool) -> None:
    array = values(9, 100)
    options = {"bits": width, "quantizer": "mse", "symmetric": symmetric, "group": 50, "scales": "f32"}
    plain, whole = (encode_tensor(CODEC, array, {**options, "unbiased": way}, dtype="f32") for way in (False, True))
    assert bytes(plain.parts["packed_weight"].view()) == bytes(whole.parts["packed_weight"].view())
    decoded, short = whole.numpy("f64"), plain.numpy("f64")
    for start in (0, 50):
        group = array[:, start : start + 50].astype(np.float64)
        own = np.square(group).sum(axis=1)
        assert np.allclose((group * decoded[:, start : start + 50]).sum(axis=1), own, rtol=1e-5)
        assert ((group * short[:, start : start + 50]).sum(axis=1)).sum() < own.sum()


def test_unbiased_scales_of_a_group_of_zeros_and_of_the_largest_values_stay() -> None:
    array = np.array([[0, 0, 0, 0], [65000, -65000, 1, 2]], np.float32)
    options = {"bits": 8, "quantizer": "mse", "group": 4, "scales": "f16"}
    plain, whole = (encode_tensor(CODEC, array, {**options, "unbiased": way}, dtype="f32") for way in (False, True))
    assert np.allclose(plain.numpy(), whole.numpy(), rtol=1e-2)
    assert np.isfinite(whole.numpy()).all()


def test_unbiased_is_for_groups_and_rows_of_integers() -> None:
    for options in ({"bits": 4, "group": "tensor"}, {"quantizer": "sign"}, {"bits": 4, "unbiased": 1}):
        with pytest.raises(UsageError) as caught:
            CODEC.encoder((4, 4), "f32", {"bits": 1, "unbiased": True, **options})
        assert caught.value.rule == "affine.option"


def test_unbiased_factors_end_at_two() -> None:
    rows, scales = np.full((1, 8), 6, np.float32), np.array([[1.0, 1.0]], np.float32)
    decoded = np.array([[4, 4, 4, 4, 2, 2, 2, 2]], np.float32)
    assert unbiased_scales(rows, decoded, 4, scales).tolist() == [[1.5, 2.0]]


def test_a_magnitude_is_infinite_where_its_type_has_no_room_and_never_rounded_into_it() -> None:
    rows = np.full((1, 4), 32756, np.float32)  # twice that is 65512, which rounds to 65504
    assert np.isinf(sign_scales(rows, 4, "sign", "f16")).all()
    assert sign_scales(rows - 4, 4, "sign", "f16").tolist() == [[65504]]
