"""Encoding into the grid types of ggml, and into those of two to four levels.

For the scales that a block has, its entries and signs must be the best of all: the tests try every one.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from ingot.codecs.blocks.codec import BlocksCodec
from ingot.codecs.blocks.grids import OF_TYPE, grid, grid_of
from ingot.core.runtime import native
from ingot.model.layouts.ggml import TYPES
from ingot.model.tensor import Array
from ingot.testing.encoding import encode_tensor

ROWS = 6
# For each type: values that share a scale, and what a scale is besides d and 2 * step + 1.
SCALES: Mapping[str, tuple[int, float]] = {
    "iq1_s": (32, 1), "iq1_m": (16, 1), "iq2_xxs": (32, 1 / 8), "iq2_xs": (16, 1 / 8), "iq2_s": (16, 1 / 8),
    "iq3_xxs": (32, 1 / 4), "iq3_s": (32, 1),
}  # fmt: skip
EVEN = ("iq2_xxs", "iq2_xs", "iq3_xxs")


def weights(seed: int = 5) -> Array:
    """Blocks of ordinary values, with outliers, zeros, values of one sign, and small ones."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((ROWS, 256)).astype(np.float32) * np.float32(0.02)
    x[0, rng.random(256) < 0.05] *= 10
    x[1, 40:90] = 0
    x[2] = np.abs(x[2])
    x[3] *= np.float32(1e-3)
    return x


def encode(block_type: str, x: Array, importance: Array | None = None) -> Array:
    blocks = np.empty((x.size // TYPES[block_type].elements, TYPES[block_type].nbytes), np.uint8)
    status = native.kernels.ggml_encode(block_type, x, "f32", importance, True, grid_of(block_type), blocks.reshape(-1))
    assert status == (0, 0)
    return blocks


def decode(block_type: str, blocks: Array) -> Array:
    out = np.empty((len(blocks), TYPES[block_type].elements), np.float32)
    native.kernels.ggml_decode(block_type, blocks.reshape(-1), grid_of(block_type), out.reshape(-1), "f32")
    return out


def nibbles(packed: Array) -> Array:
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)


def scales_of(block_type: str, blocks: Array) -> Array:
    """Return the scale of each group: f64 [blocks, groups]."""

    def words(first: int, last: int, dtype: str) -> Array:
        return np.ascontiguousarray(blocks[:, first:last]).view(dtype)

    d = words(0, 2, "<f2").astype(np.float64)
    if block_type == "iq1_m":
        tail = words(48, 56, "<u2")
        bits = sum((tail[:, k].astype(np.uint32) >> 12 << 4 * k for k in range(4)), np.uint32(0))
        d = np.asarray(bits, np.uint16).view(np.float16)[:, None].astype(np.float64)
        steps = np.stack([tail >> 3 * k & 7 for k in range(4)], axis=-1).reshape(len(blocks), 16)
    elif block_type == "iq1_s":
        steps = words(34, 50, "<u2") >> 12 & 7
    elif block_type in ("iq2_xxs", "iq3_xxs"):
        tail = words(2, 66, "<u4")[:, 1::2] if block_type == "iq2_xxs" else words(66, 98, "<u4")
        steps = tail >> 28
    else:
        first = {"iq2_xs": 66, "iq2_s": 74, "iq3_s": 106}[block_type]
        steps = nibbles(blocks[:, first : TYPES[block_type].nbytes])
    return d * (2 * steps.astype(np.float64) + 1) * SCALES[block_type][1]


def signs() -> Array:
    """Return all 256 combinations of eight signs."""
    bits = np.arange(256)[:, None] >> np.arange(8) & 1
    return 1 - 2 * bits


def least_errors(block_type: str, x: Array, w: Array, scales: Array) -> Array:
    """Return the least error of eight values for each scale, over all entries and all signs that the type allows."""
    table = grid(OF_TYPE[block_type]).astype(np.float64)
    if block_type.startswith("iq1"):
        candidates = [table + 0.125, table - 0.125]
        errors = [((x[:, None] - scales[:, None, None] * q) ** 2 * w[:, None]).sum(-1) for q in candidates]
        if block_type == "iq1_s":  # four vectors have one shift
            errors = [one.min(1).reshape(-1, 4).sum(1, keepdims=True) for one in errors]
        up, down = (one.min(1) for one in errors)
        return np.asarray(np.minimum(up, down))
    allowed = [s for s in signs() if block_type not in EVEN or (s < 0).sum() % 2 == 0]
    best = np.full(len(x), np.inf)
    halves = [slice(0, 8)] if table.shape[1] == 8 else [slice(0, 4), slice(4, 8)]
    for sign in allowed:
        flipped = x * sign
        error = np.zeros(len(x))
        for half in halves:
            cross = (w[:, half] * flipped[:, half]) @ table.T
            squares = w[:, half] @ (table**2).T
            terms = scales[:, None] ** 2 * squares - 2 * scales[:, None] * cross
            error += terms.min(1) + (w[:, half] * x[:, half] ** 2).sum(1)
        best = np.minimum(best, error)
    return best


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("block_type", SCALES)
def test_no_entry_leaves_less_error_for_the_scales_of_a_block(block_type: str, weighted: bool) -> None:
    x = weights()
    importance = np.random.default_rng(6).gamma(0.5, size=256).astype(np.float32) + np.float32(0.01)
    blocks = encode(block_type, x, importance if weighted else None)
    decoded = decode(block_type, blocks).astype(np.float64)
    w = np.tile(importance if weighted else np.ones(256), (ROWS, 1)).astype(np.float64)
    group = SCALES[block_type][0]
    scales = np.repeat(scales_of(block_type, blocks), group // 8, axis=1).reshape(-1)
    wide = x.astype(np.float64)
    expected = least_errors(block_type, wide.reshape(-1, 8), w.reshape(-1, 8), scales)
    actual = (w * (decoded - wide) ** 2).reshape(len(expected), -1).sum(1)
    floor = 1e-6 * (w * wide**2).reshape(len(expected), -1).sum(1)
    assert (actual <= expected * (1 + 1e-4) + floor).all()


@pytest.mark.parametrize("block_type", [*SCALES, "tq1_0", "tq2_0"])
def test_the_package_gguf_decodes_the_same_values(block_type: str) -> None:
    quants = pytest.importorskip("gguf.quants")
    constants = pytest.importorskip("gguf.constants")
    blocks = encode(block_type, weights())
    other = quants.dequantize(blocks, constants.GGMLQuantizationType[block_type.upper()])
    assert np.array_equal(decode(block_type, blocks).reshape(-1), other.reshape(-1).astype(np.float32))


@pytest.mark.parametrize("block_type", ["tq1_0", "tq2_0"])
def test_ternary_scales_are_the_best_of_all(block_type: str) -> None:
    x = weights()
    w = np.random.default_rng(7).gamma(0.5, size=256).astype(np.float32)
    wide = x.astype(np.float64)
    actual = (w * (decode(block_type, encode(block_type, x, w)) - wide) ** 2).sum(1)
    for row, error in zip(wide, actual, strict=True):
        size = np.abs(row)
        scales = np.linspace(0, size.max(), 4000)[1:, None]
        least = (w * np.minimum(size**2, (size - scales) ** 2)).sum(1).min()
        assert error <= least * (1 + 2e-3)  # the scale is rounded to f16


def test_ternary_weights_are_exact() -> None:
    x = np.random.default_rng(8).integers(-1, 2, (4, 256)).astype(np.float32) * np.float32(0.125)
    for block_type in ("tq1_0", "tq2_0", "q2_0"):
        assert np.array_equal(decode(block_type, encode(block_type, x)).reshape(x.shape), x)


def test_signs_are_exact() -> None:
    x = np.random.default_rng(8).choice([-0.5, 0.5], (4, 256)).astype(np.float32)
    assert np.array_equal(decode("q1_0", encode("q1_0", x)).reshape(x.shape), x)


@pytest.mark.parametrize("block_type", [*SCALES, "tq1_0", "tq2_0", "q1_0", "q2_0"])
def test_extreme_blocks(block_type: str) -> None:
    """Values of any size in f32 give finite values, or the error for a scale that f16 cannot hold."""
    rng = np.random.default_rng(9)
    x = rng.standard_normal((8, 256)).astype(np.float32)
    x[0], x[1] = 0, -0.0
    x[2] = np.float32(1e-41)
    x[3] *= np.float32(1e-7)
    x[4] *= np.float32(1e4)
    x[5], x[6] = 1, -1
    x[7, 1:] = 0
    importance = rng.random(256).astype(np.float32)
    importance[:40] = 0
    for weighted in (None, importance, np.zeros(256, np.float32)):
        assert np.isfinite(decode(block_type, encode(block_type, x, weighted))).all()
    blocks = np.empty(TYPES[block_type].nbytes * 3 * 256 // TYPES[block_type].elements, np.uint8)
    wide = np.ones((3, 256), np.float32)
    wide[2] = 3e38
    status, index = native.kernels.ggml_encode(block_type, wide, "f32", None, True, grid_of(block_type), blocks)
    assert (status, index) == (2, 512)
    wide[1, 7] = np.nan
    assert native.kernels.ggml_encode(block_type, wide, "f32", None, True, grid_of(block_type), blocks) == (1, 263)


@pytest.mark.parametrize("block_type", SCALES)
def test_importance_belongs_to_columns(block_type: str) -> None:
    x = weights().reshape(3, 512)
    importance = np.random.default_rng(10).random(512).astype(np.float32)
    together = encode(block_type, x, importance)
    apart = [encode(block_type, part, weight) for row in x for part, weight in zip(
        row.reshape(2, 1, 256), importance.reshape(2, 256), strict=True
    )]  # fmt: skip
    assert np.array_equal(together, np.concatenate(apart))


FIRST: dict[str, Array] = {}


@pytest.mark.parametrize("block_type", [*SCALES, "tq1_0", "q1_0", "q2_0"])
def test_every_instruction_set_gives_the_same_blocks(block_type: str) -> None:
    """The folder's hook calls this test once for each instruction set."""
    importance = np.random.default_rng(11).gamma(0.5, size=256).astype(np.float32)
    blocks = encode(block_type, weights(12), importance)
    assert np.array_equal(blocks, FIRST.setdefault(block_type, blocks))


def test_a_grid_type_needs_its_grid() -> None:
    blocks = np.empty(110, np.uint8)
    for entries in (None, grid_of("iq3_xxs"), grid_of("iq2_s")):
        with pytest.raises(ValueError, match="expected the grid"):
            native.kernels.ggml_encode("iq3_s", np.zeros((1, 256), np.float32), "f32", None, True, entries, blocks)


def test_chunks_of_rows_give_the_same_blocks() -> None:
    x = weights()
    for block_type in SCALES:
        tensor = encode_tensor(BlocksCodec(), x, {"type": block_type}, dtype="f32", cuts=(2, 3))
        assert bytes(tensor.parts["blocks"].view()) == encode(block_type, x).tobytes()
