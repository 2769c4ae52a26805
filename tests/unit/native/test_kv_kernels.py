"""Attention over packed blocks: every instruction set gives the bits of the reference."""

from __future__ import annotations

import numpy as np
import pytest

from ingot.codecs.affine.blocks import PackedBlocks
from ingot.core.runtime import native
from ingot.errors import CodecError
from tests.support.reference import affine, kv_cache


def unpacked(blocks: PackedBlocks) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, scales and zeros of the blocks that are there, f16 as such."""
    rows, cols = blocks.shape
    packed, scales, zeros = (held[:, : blocks.count] for held in (blocks._packed, blocks._scales, blocks._zeros))
    codes = affine.unpack(np.ascontiguousarray(packed).reshape(-1, packed.shape[-1]), cols, blocks.bits, msb=False)
    return codes.reshape(blocks.heads, blocks.count, rows, cols), *(
        np.ascontiguousarray(held).view(np.float16) for held in (scales, zeros)
    )


def made(heads: int, count: int, shape: tuple[int, int], bits: int, group: int) -> PackedBlocks:
    """Random blocks, appended in two steps, so that there is room for more."""
    rng = np.random.default_rng(bits + shape[0])
    values = (rng.normal(size=(heads, count, *shape)) * rng.exponential(size=(heads, count, shape[0], 1)) + 1).astype(
        "f4"
    )
    blocks = PackedBlocks(heads, shape, bits, group)
    blocks.put(blocks.pack(values[:, : count - 1]))
    blocks.put(blocks.pack(values[:, count - 1 :]))
    return blocks


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(("heads", "count", "rows", "channels", "tokens"), [(3, 9, 1, 48, 64), (2, 3, 7, 20, 32)])
def test_scores(bits: int, heads: int, count: int, rows: int, channels: int, tokens: int) -> None:
    blocks = made(heads, count, (channels, tokens), bits, tokens)
    queries = np.random.default_rng(1).normal(size=(heads, rows, channels)).astype("f4")
    codes, scales, zeros = unpacked(blocks)
    wanted = kv_cache.scores(queries, codes, scales[..., 0], zeros[..., 0])
    for threads in (1, 3):
        out = np.full((heads, rows, 5 + count * tokens + 2), 7, np.float32)
        blocks.scores(queries, out, 5, threads)
        assert out[:, :, 5:-2].tobytes() == wanted.tobytes()
        assert (out[:, :, :5] == 7).all()
        assert (out[:, :, -2:] == 7).all()
    dense = blocks.decode("f32").astype("f8")
    exact = np.einsum("hrc,hbct->hrbt", queries.astype("f8"), dense).reshape(wanted.shape)
    np.testing.assert_allclose(wanted, exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(
    ("heads", "count", "rows", "width", "tokens", "group"),
    [(3, 5, 1, 48, 64, 32), (2, 3, 6, 144, 32, 64), (1, 2, 2, 16, 48, 16)],
)
def test_weighted(bits: int, heads: int, count: int, rows: int, width: int, tokens: int, group: int) -> None:
    blocks = made(heads, count, (tokens, width), bits, group)
    weights = np.random.default_rng(2).random((heads, rows, count * tokens + 3), np.float32)
    codes, scales, zeros = unpacked(blocks)
    wanted = kv_cache.weighted(np.ascontiguousarray(weights[:, :, 1:-2]), codes, scales, zeros, group)
    for threads in (1, 3):
        out = np.full((heads, rows, width), 7, np.float32)
        blocks.weighted_sums(weights, 1, out, threads)
        assert out.tobytes() == wanted.tobytes()
    dense = blocks.decode("f32").astype("f8").reshape(heads, count * tokens, width)
    exact = np.einsum("hrt,htc->hrc", weights[:, :, 1:-2].astype("f8"), dense)
    np.testing.assert_allclose(wanted, exact, rtol=1e-4, atol=1e-3)


def test_blocks_are_affine_codes() -> None:
    """What lies in a block is what the affine codec's reference makes of it, with offsets in f16."""
    values = np.random.default_rng(3).normal(size=(2, 3, 5, 32)).astype("f4")
    blocks = PackedBlocks(2, (5, 32), 4, 16)
    blocks.put(blocks.pack(values))
    grid = affine.Grid(4, 16, False, "f16", offset=True)
    codes, scales, zeros = affine.quantize(values.reshape(-1, 32), grid)
    assert affine.pack(codes, 4, msb=False).tobytes() == blocks._packed.tobytes()
    assert scales.astype("f2").tobytes() == blocks._scales.tobytes()
    assert zeros.astype("f2").tobytes() == blocks._zeros.tobytes()
    decoded = affine.dequantize(codes, grid, scales, zeros, "f32")
    assert blocks.decode("f32").tobytes() == decoded.tobytes()


def test_nothing_moves_when_blocks_are_appended() -> None:
    values = np.random.default_rng(4).normal(size=(2, 40, 4, 16)).astype("f4")
    whole, pieces = PackedBlocks(2, (4, 16), 2, 16), PackedBlocks(2, (4, 16), 2, 16)
    whole.put(whole.pack(values))
    early = None
    for start in range(40):
        pieces.put(pieces.pack(values[:, start : start + 1]))
        early = pieces.snapshot() if start == 4 else early
    assert early is not None
    assert pieces.decode("f16").tobytes() == whole.decode("f16").tobytes()
    assert early.decode("f16").tobytes() == np.ascontiguousarray(whole.decode("f16")[:, :5]).tobytes()
    assert whole.nbytes <= pieces.nbytes <= whole.nbytes * 1.125
    pieces.take(np.array([1, 0, 1]))
    pieces.drop(38)
    assert pieces.decode("f32").tobytes() == np.ascontiguousarray(whole.decode("f32")[[1, 0, 1], 38:]).tobytes()


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e5])
def test_what_f16_cannot_hold(bad: float) -> None:
    values = np.zeros((1, 2, 4, 16), np.float32)
    values[0, 1, 2, 3] = bad
    values[0, 1, 2, 4] = -bad
    blocks = PackedBlocks(1, (4, 16), 4, 16)
    with pytest.raises(CodecError) as caught:
        blocks.put(blocks.pack(values))
    assert caught.value.rule == "kv.range"
    assert blocks.count == 0


def test_wrong_calls() -> None:
    """Sizes that do not fit are refused before anything is read."""
    kernels = native.kernels
    packed, scales = np.zeros((2, 3, 48, 32), np.uint8), np.zeros((2, 3, 48, 1), np.uint16)
    queries, out = np.zeros((2, 1, 48), np.float32), np.zeros((2, 1, 192), np.float32)
    kernels.kv_scores(queries, packed, scales, scales, 3, 4, out, 0, 1)
    for blocks, bits, first in ((4, 4, 0), (3, 4, 1), (3, 3, 0), (3, 0, 0), (3, -4, 0), (3, 2, 0), (3, 4, 2**63)):
        with pytest.raises(ValueError, match="expected"):
            kernels.kv_scores(queries, packed, scales, scales, blocks, bits, out, first, 1)
    with pytest.raises(ValueError, match="expected"):
        kernels.kv_scores(queries[:1], packed, scales, scales, 3, 4, out, 0, 1)
    with pytest.raises(ValueError, match="expected"):
        kernels.kv_scores(queries, packed, scales[:1], scales, 3, 4, out, 0, 1)
    weights, mixed = np.zeros((2, 1, 144), np.float32), np.zeros((2, 1, 64), np.float32)
    wide = np.zeros((2, 3, 48, 2), np.uint16)
    kernels.kv_values(weights, 0, packed, wide, wide, 3, 4, 32, mixed, 1)
    for first, blocks, bits, group in (
        (1, 3, 4, 32),
        (0, 4, 4, 32),
        (0, 3, 8, 32),
        (0, 3, 4, 64),
        (0, 3, 4, 0),
        (0, 3, 4, 8),
    ):
        with pytest.raises(ValueError, match="expected"):
            kernels.kv_values(weights, first, packed, wide, wide, blocks, bits, group, mixed, 1)
    with pytest.raises(ValueError, match="expected"):
        kernels.kv_values(weights[:, :, :-1].copy(), 0, packed, wide, wide, 3, 4, 32, mixed, 1)
