"""A table of values times scales: the suite, and what only this codec promises."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ingot.codecs.scaled_codebook.codec import TABLES, ScaledCodebookCodec
from ingot.errors import CodecError, IngotError, UnsupportedError, UsageError
from ingot.model.part import memory_part
from ingot.testing.codecs import Case, CodecSuite, encode_tensor

CODEC = ScaledCodebookCodec()
NF4 = TABLES["nf4"]


class TestScaledCodebook(CodecSuite):
    codec = CODEC
    cases = (
        *(Case((12, 64), dtype, {"group": 16}) for dtype in ("f32", "f16", "bf16")),
        *(Case((6, 96), "f32", {"group": 32, "scales": kind}) for kind in ("f16", "bf16")),
        *(Case(shape, "f32", {"group": "row"}) for shape in ((), (1,), (7,), (0,), (0, 3), (3, 0), (5, 3), (2, 3, 10))),
    )
    min_snr_db = 12.0


def test_values_are_entries_times_scales() -> None:
    rng = np.random.default_rng(0)
    array = rng.normal(0, 0.1, (6, 64)).astype(np.float32)
    tensor = encode_tensor(CODEC, array, {"group": 32}, dtype="f32")
    scales = tensor.parts["scales"].array().reshape(6, 2)
    assert np.array_equal(scales, np.abs(array.reshape(6, 2, 32)).max(-1))
    packed = np.frombuffer(tensor.parts["indices"].view(), np.uint8)
    indices = np.stack([packed & 15, packed >> 4], -1).reshape(6, 2, 32)
    assert np.array_equal(tensor.numpy(), (NF4[indices] * scales[..., None]).reshape(6, 64))
    nearest = np.abs((array.reshape(6, 2, 32) / scales[..., None])[..., None] - NF4).argmin(-1)
    assert np.array_equal(indices, nearest)


def test_zeros_stay_zeros() -> None:
    tensor = encode_tensor(CODEC, np.zeros((2, 64), np.float32), {}, dtype="f32")
    assert not tensor.numpy().any()
    assert (tensor.parts["scales"].array() == 1).all()


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"table": "nf5"}, "scaled_codebook.option"),
        ({"group": 0}, "scaled_codebook.option"),
        ({"scales": "f64"}, "scaled_codebook.option"),
        ({"rows": 1}, "scaled_codebook.option"),
        ({"group": 48}, "scaled_codebook.group"),
    ],
)
def test_options_are_checked(options, rule) -> None:
    with pytest.raises((UsageError, UnsupportedError)) as caught:
        CODEC.encoder((4, 64), "f32", options)
    assert caught.value.rule == rule


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"bits": 5}, "scaled_codebook.params"),
        ({"granularity": "row"}, "scaled_codebook.params"),
        ({"group_size": 7}, "scaled_codebook.group"),
        ({"group_size": 64}, "scaled_codebook.size"),
        ({"dtype": "f16"}, "scaled_codebook.params"),
    ],
)
def test_attributes_are_checked(change, rule) -> None:
    tensor = encode_tensor(CODEC, np.ones((2, 64), np.float32), {"group": 16}, dtype="f32")
    with pytest.raises(IngotError) as caught:
        CODEC.check(replace(tensor, params={**tensor.params, **change}))
    assert caught.value.rule == rule


def test_finite_numbers_never_become_infinite() -> None:
    tensor = encode_tensor(CODEC, np.full((1, 64), 60000, np.float32), {}, dtype="f32")
    loud = replace(tensor, parts={**tensor.parts, "scales": memory_part(np.array([70000], np.float32), "f32")})
    assert loud.numpy("f32").max() == 70000
    with pytest.raises(CodecError) as caught:
        loud.numpy("f16")
    assert caught.value.rule == "scaled_codebook.overflow"
