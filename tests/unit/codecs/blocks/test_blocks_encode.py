"""Encoding into ggml's blocks: the suite of all codecs, how near the values come, options, and what is refused."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest

from ingot.codecs.blocks.codec import LEVELS, BlocksCodec
from ingot.core.numeric.dtypes import cast
from ingot.errors import CodecError, UnsupportedError, UsageError
from ingot.model.layouts.ggml import TYPES
from ingot.model.tensor import Array
from ingot.testing.codecs import Case, CodecSuite
from ingot.testing.encoding import encode_tensor

CODEC = BlocksCodec()

# Relative RMS error of ggml's own quantizers (d99724f2) on the weights of `gaussian`: with no importance or, where that
# is less, with an importance of 1 for every column. Those from IQ1_S on are of xllamacpp 2026.10.11549.
GGML = {
    "q4_0": 0.081942,
    "q4_1": 0.070022,
    "q5_0": 0.040538,
    "q5_1": 0.033960,
    "q8_0": 0.005367,
    "q2_k": 0.268394,
    "q3_k": 0.145160,
    "q4_k": 0.070903,
    "q5_k": 0.035490,
    "q6_k": 0.017364,
    "iq4_nl": 0.075217,
    "iq4_xs": 0.075905,
    "mxfp4": 0.116340,
    "iq1_s": 0.487010,
    "iq1_m": 0.453710,
    "iq2_xxs": 0.344580,
    "iq2_xs": 0.300950,
    "iq2_s": 0.249490,
    "iq3_xxs": 0.182110,
    "iq3_s": 0.137300,
    "tq1_0": 0.808830,
    "tq2_0": 0.808830,
    "q1_0": 0.600090,
    "q2_0": 0.719531,
}


class TestBlocks(CodecSuite):
    codec = CODEC
    min_snr_db: ClassVar[float] = 8.0
    cases = (
        Case((5, 256)),
        Case((3, 512), "bf16", {"type": "q4_k", "importance": [1.0, 0.5] * 256}),
        Case((2, 3, 256), "f16", {"type": "q6_k"}),
        Case((256,), "f32", {"type": "q2_k"}),
        Case((2, 256), "f32", {"type": "q3_k"}),
        Case((2, 256), "f64", {"type": "q5_k"}),
        Case((2, 256), "f32", {"type": "iq4_xs"}),
        Case((7, 96), "bf16", {"type": "q4_0"}),
        Case((7, 96), "f32", {"type": "q4_0", "search": "reference"}),
        Case((4, 32), "f32", {"type": "q4_1"}),
        Case((4, 32), "f32", {"type": "q5_0"}),
        Case((4, 32), "f32", {"type": "q5_1", "search": "reference"}),
        Case((40, 64), "f16", {"type": "q8_0"}),
        Case((4, 64), "f32", {"type": "iq4_nl"}),
        Case((4, 64), "f32", {"type": "mxfp4"}),
        Case((3, 512), "bf16", {"type": "iq3_s", "importance": [1.0, 0.5] * 256}),
        Case((2, 256), "f16", {"type": "iq3_xxs"}),
        Case((2, 256), "f64", {"type": "iq2_s"}),
        Case((0, 32), "f32", {"type": "mxfp4", "search": "reference"}),
        Case((3, 0), "f32", {"type": "q8_0"}),
    )


def gaussian() -> Array:
    return np.random.default_rng(0).standard_normal((64, 1024)).astype(np.float32) * np.float32(0.03)


def left(x: Array, *, weights: Array | float = 1.0, **options: object) -> float:
    """The relative root mean square error that is left."""
    decoded = encode_tensor(CODEC, x, options, dtype="f32").numpy("f32")
    wide = x.astype(np.float64)
    return float(np.sqrt((weights * (decoded - wide) ** 2).sum() / (weights * wide**2).sum()))


@pytest.mark.parametrize("type", LEVELS)
def test_no_more_error_than_llama_cpp(type: str) -> None:
    assert left(gaussian(), type=type) <= GGML[type]


@pytest.mark.parametrize("type", LEVELS)
def test_importance_lowers_the_error_that_it_weighs(type: str) -> None:
    x = gaussian()[:16]
    weights = np.random.default_rng(1).gamma(0.5, size=x.shape[1])
    assert left(x, weights=weights, type=type, importance=weights) < left(x, weights=weights, type=type)


@pytest.mark.parametrize("type", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "mxfp4"])
def test_a_search_leaves_less_than_the_reference(type: str) -> None:
    x = gaussian()
    assert left(x, type=type) < left(x, type=type, search="reference")


@pytest.mark.parametrize("type", [type for type in LEVELS if TYPES[type].elements == 32])
def test_values_of_a_type_stay(type: str) -> None:
    """Most blocks of one group use all of their range, and are found again."""
    block = TYPES[type]
    x = encode_tensor(CODEC, gaussian()[:8], {"type": type}, dtype="f32").numpy("f32")
    again = encode_tensor(CODEC, x, {"type": type}, dtype="f32").numpy("f32")
    kept = (again == x).reshape(-1, block.elements).all(axis=1)
    assert kept.mean() > 0.5


@pytest.mark.parametrize("type", LEVELS)
def test_zeros_stay_zeros(type: str) -> None:
    tensor = encode_tensor(CODEC, np.zeros((2, 256), np.float32), {"type": type}, dtype="f32")
    assert not tensor.numpy("f32").any()


def test_source_types_are_widened_first() -> None:
    x = gaussian()[:4]
    for dtype in ("f16", "bf16"):
        narrow = cast(x, dtype)
        stored = [
            encode_tensor(CODEC, one, {}, dtype=name) for one, name in ((narrow, dtype), (cast(narrow, "f32"), "f32"))
        ]
        assert bytes(stored[0].parts["blocks"].view()) == bytes(stored[1].parts["blocks"].view())


@pytest.mark.parametrize(
    "options",
    [
        {"type": "nvfp4"},
        {"type": 4},
        {"search": False},
        {"search": "none"},
        {"type": "q4_k", "search": "reference"},
        {"type": "q4_0", "search": "reference", "importance": [1.0] * 256},
        {"importance": [1.0] * 255},
        {"importance": [0.0] * 256},
        {"importance": "all"},
    ],
    ids=str,
)
def test_wrong_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(UsageError) as caught:
        CODEC.encoder((2, 256), "f32", options)
    assert caught.value.rule == "ggml_blocks.option"


def test_rows_of_other_lengths_and_other_types_are_not_for_it() -> None:
    for shape, dtype, rule in (((2, 288), "f32", "columns"), ((2, 256), "i32", "dtype"), ((), "f32", "columns")):
        with pytest.raises(UnsupportedError) as caught:
            CODEC.encoder(shape, dtype, {})
        assert caught.value.rule == f"ggml_blocks.{rule}"


@pytest.mark.parametrize("search", [True, "reference"])
def test_what_no_block_holds_is_refused(search: object) -> None:
    x = np.ones((4, 64), np.float32)
    for value, rule in ((np.nan, "non-finite"), (-np.inf, "non-finite"), (1e30, "scale-overflow")):
        x[2, 40] = value
        with pytest.raises(CodecError) as caught:
            CODEC.encoder(x.shape, "f32", {"type": "q4_0", "search": search}).encode(x, 10)
        assert caught.value.rule == f"ggml_blocks.{rule}"
        assert "row 12" in caught.value.message


def test_values_below_the_reach_of_scales_are_told() -> None:
    encoder = CODEC.encoder((2, 256), "f32", {"type": "q6_k"})
    assert encoder.observe(np.full((2, 256), 1e-6, np.float32), 0) is False
    assert encoder.underflow()
    assert encoder.observe(gaussian()[:2, :256], 0)
    assert encoder.underflow() is None
