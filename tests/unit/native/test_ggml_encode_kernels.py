"""Encoding into ggml's blocks: every instruction set gives the bits of the reference, and wrong sizes are refused."""

from __future__ import annotations

import numpy as np
import pytest

from ingot.codecs.blocks.codec import LEVELS
from ingot.core.numeric.dtypes import as_bits, cast
from ingot.core.runtime import native
from ingot.model.layouts.ggml import TYPES
from tests.support.reference.ggml_encode import KINDS, encoded
from tests.unit.native.test_ggml_grid_kernels import SCALES

BLOCKS = 37  # the last sixteen groups are not full


def weights(type: str, seed: int = 3) -> np.ndarray:
    """Blocks of many sizes: ordinary ones, outliers, one-sided, flat, zeros, tiny and subnormal ones, ends alike."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((BLOCKS, TYPES[type].elements)).astype(np.float32)
    x *= np.exp2(rng.integers(-12, 4, (BLOCKS, 1))).astype(np.float32)
    x[rng.random(x.shape) < 0.02] *= 20
    x[1], x[2], x[3] = 0, -0.0, 0.75
    x[4, :32] = 0
    x[5], x[6] = np.abs(x[5]), -np.abs(x[6]) - 1
    x[7] *= np.float32(1e-6)
    x[8] = np.float32(1e-41)
    x[9, ::2] = 0
    x[10, 32:] *= np.float32(1e-30)
    x[11] = np.round(x[11] * 4)
    x[13] = 1 + rng.integers(0, 4, x.shape[1]) * 2.0**-23  # a range of a few last bits
    x[14] = rng.integers(-16, 17, x.shape[1]) / 32  # values between levels, just in the middle
    x[14, :2] = x[15, 3:5] = 0.5, -0.5
    return x


def encode(type: str, x: np.ndarray, dtype: str = "f32", importance: np.ndarray | None = None) -> np.ndarray:
    blocks = np.empty((len(x), TYPES[type].nbytes), np.uint8)
    status = native.kernels.ggml_encode(type, as_bits(x), dtype, importance, True, None, blocks.reshape(-1))
    assert status == (0, 0)
    return blocks


def test_every_encoded_type_has_a_reference() -> None:
    assert set(LEVELS) == {*KINDS, *SCALES, "tq1_0", "tq2_0", "q1_0", "q2_0"}


@pytest.mark.parametrize("type", KINDS)
def test_searches_give_the_bits_of_the_reference(type: str) -> None:
    x = weights(type)
    assert np.array_equal(encode(type, x), encoded(type, x))
    importance = np.random.default_rng(4).random(x.shape[1]).astype(np.float32)
    importance[:3] = 0
    assert np.array_equal(encode(type, x, "f32", importance), encoded(type, x, importance))


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f64"])
def test_types_of_weights(dtype: str) -> None:
    x = weights("q4_k")
    narrow = cast(x, dtype)
    assert np.array_equal(encode("q4_k", narrow, dtype), encoded("q4_k", cast(narrow, "f32")))


def test_importance_belongs_to_columns() -> None:
    x = weights("q4_0")[:36].reshape(12, 96)
    importance = np.random.default_rng(4).random(96).astype(np.float32)
    blocks = np.empty(36 * 18, np.uint8)
    native.kernels.ggml_encode("q4_0", x, "f32", importance, True, None, blocks)
    for row, stored in zip(x, blocks.reshape(12, 3, 18), strict=True):
        assert np.array_equal(stored, encoded("q4_0", row.reshape(3, 32), importance.reshape(3, 32)))


@pytest.mark.parametrize("type", KINDS)
def test_no_blocks_and_one(type: str) -> None:
    x = weights(type)
    assert encode(type, x[:0]).size == 0
    assert np.array_equal(encode(type, x[12:13]), encoded(type, x[12:13]))


@pytest.mark.parametrize("search", [True, False])
@pytest.mark.parametrize("type", ["q4_0", "q8_0", "mxfp4", "q4_1"])
def test_values_that_are_not_finite_are_found(type: str, search: bool) -> None:
    x, blocks = np.ones((40, 32), np.float32), np.empty(40 * TYPES[type].nbytes, np.uint8)
    x[17, 5], x[18, 0] = np.nan, np.inf
    assert native.kernels.ggml_encode(type, x, "f32", None, search, None, blocks) == (1, 17 * 32 + 5)
    x[17, 5] = x[18, 0] = 0
    x[19] = [3e38, -3e38] * 16
    assert native.kernels.ggml_encode(type, x, "f32", None, search, None, blocks) == (
        (0, 0) if type == "mxfp4" else (2, 608)
    )


@pytest.mark.parametrize("type", [type for type in KINDS if TYPES[type].elements == 256])
def test_scales_without_room(type: str) -> None:
    x, blocks = np.ones((3, 256), np.float32), np.empty(3 * TYPES[type].nbytes, np.uint8)
    x[2, 7] = -3e38
    assert native.kernels.ggml_encode(type, x, "f32", None, True, None, blocks) == (2, 512)


@pytest.mark.parametrize(
    ("type", "shape", "nbytes", "importance", "search"),
    [
        ("q4_0", (1, 32), 17, None, True),
        ("q4_0", (1, 32), 36, None, True),
        ("q4_0", (2, 16), 18, None, True),
        ("q4_0", (1, 32), 18, 31, True),
        ("q4_0", (1, 32), 18, 32, False),
        ("q4_k", (1, 256), 144, None, False),
        ("iq3_s", (1, 256), 110, None, True),
        ("q9", (1, 32), 18, None, True),
    ],
)
def test_wrong_sizes(type: str, shape: tuple[int, ...], nbytes: int, importance: int | None, search: bool) -> None:
    weigh = None if importance is None else np.ones(importance, np.float32)
    with pytest.raises(ValueError, match="expected"):
        native.kernels.ggml_encode(
            type, np.zeros(shape, np.float32), "f32", weigh, search, None, np.zeros(nbytes, np.uint8)
        )
