"""A product of thin matrices added to quantized weights: the suite, and what only this codec promises."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ingot.codecs.wrap.with_low_rank import CorrectedCodec
from ingot.errors import CodecError, IngotError, UsageError
from ingot.model.part import memory_part
from ingot.testing.codecs import Case, CodecSuite, encode_tensor

CODEC = CorrectedCodec()
THREE = {"options": {"bits": 3, "group": 8, "symmetric": False}, "rank": 4}


class TestWithLowRank(CodecSuite):
    codec = CODEC
    cases = (
        *(Case((12, 32), dtype, THREE) for dtype in ("f32", "f16", "bf16")),
        *(Case((16, 24), "f32", {**THREE, "factors": kind}) for kind in ("f16", "bf16")),
        *(
            Case(shape, "f32", {"options": {"bits": 4, "group": 8}})
            for shape in ((1,), (7,), (0,), (0, 3), (3, 0), (2, 3, 10))
        ),
        Case((8, 16), "f32", {"inner": "scaled_codebook", "options": {"group": 8}, "rank": 2}),
        Case((8, 16), "f32", {"inner": "palette", "options": {"bits": 3}, "error": 0.5}),
    )
    min_snr_db = 12.0


def weights(rows: int = 32, cols: int = 64) -> np.ndarray:
    rng = np.random.default_rng(0)
    return (rng.normal(0, 1, (rows, 2)) @ rng.normal(0, 1, (2, cols)) + rng.normal(0, 0.05, (rows, cols))).astype("f4")


def test_values_are_those_of_the_inner_codec_plus_the_product() -> None:
    tensor = encode_tensor(CODEC, weights(), {**THREE, "factors": "f32"}, dtype="f32")
    parts = {role: part for role, part in tensor.parts.items() if role not in ("left", "right")}
    from ingot.codecs.table import CODECS

    inner = replace(tensor, codec="affine", params=tensor.params["inner_params"], parts=parts, decoder=CODECS["affine"])
    left = tensor.parts["left"].array().reshape(32, 4)
    right = tensor.parts["right"].array().reshape(4, 64)
    wanted = inner.numpy().astype("f8") + left.astype("f8") @ right
    assert np.allclose(tensor.numpy(), wanted, rtol=0, atol=1e-5)
    lost = [np.linalg.norm(made.numpy() - weights()) for made in (inner, tensor)]
    assert lost[1] < 0.9 * lost[0]


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"rank": 5}, "low_rank.size"),
        ({"rank": -1}, "with_low_rank.params"),
        ({"inner": "with_low_rank"}, "with_low_rank.params"),
        ({"inner_params": 3}, "with_low_rank.params"),
        ({"codec_version": 2}, "with_low_rank.params"),
    ],
)
def test_attributes_are_checked(change, rule) -> None:
    tensor = encode_tensor(CODEC, weights(), THREE, dtype="f32")
    with pytest.raises(IngotError) as caught:
        CODEC.check(replace(tensor, params={**tensor.params, **change}))
    assert caught.value.rule == rule


def test_options_are_checked() -> None:
    for options in ({"rank": -1}, {"error": 1}, {"factors": "f64"}, {"inner": "dense"}, {"ranks": 1}):
        with pytest.raises(UsageError) as caught:
            CODEC.encoder((4, 8), "f32", options)
        assert caught.value.rule == "with_low_rank.option"


def test_finite_numbers_never_become_infinite() -> None:
    tensor = encode_tensor(CODEC, weights(), THREE, dtype="f32")
    loud = replace(tensor, parts={**tensor.parts, "left": memory_part(np.full(32 * 4, 1e5, np.float32), "f32")})
    assert np.isfinite(loud.numpy("f32")).all()
    with pytest.raises(CodecError) as caught:
        loud.numpy("f16")
    assert caught.value.rule == "with_low_rank.overflow"
