"""Second scales that divide instead of multiplying: nearly every one has a reciprocal with which bf16 stays."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ingot.codecs.scaled_codebook.codec import ScaledCodebookCodec
from ingot.model.layouts.affine import Group
from ingot.model.layouts.alternatives import family_alternatives
from ingot.model.layouts.scaled_codebook import DIVIDE, MULTIPLY, ScaledCodebookLayout, Tiles
from ingot.model.part import memory_part
from ingot.model.tensor import Tensor
from ingot.testing.codecs import repacked

CODEC = ScaledCodebookCodec()
NVFP4 = ScaledCodebookLayout(4, Group(16), "bf16", scales="f8_e4m3fn", values="f4_e2m1fn", second=MULTIPLY)


def tensor(second: float, dtype: str = "bf16") -> Tensor:
    """Every code times every scale that is a number."""
    scales = np.arange(127, dtype=np.uint8)
    codes = np.tile([2 * pair | (2 * pair + 1) << 4 for pair in range(8)], (127, 1)).astype(np.uint8)
    parts = {
        "indices": codes,
        "scales": memory_part(scales, "u8", "f8_e4m3fn"),
        "second_scale": np.array([second], np.float32),
    }
    return Tensor.from_parts(replace(NVFP4, dtype=dtype), parts, (127, 16))


def test_reciprocals_keep_values_in_the_type_and_say_so() -> None:
    seen = {True: 0, False: 0}
    for second in np.random.default_rng(1).uniform(1e-5, 1e-2, 60).astype(np.float32):
        one = tensor(float(second))
        way = CODEC.repack(one, replace(NVFP4, second=DIVIDE))
        assert way.exact
        seen[way.rounded] += 1
        made = replace(repacked(way, one), decoder=CODEC)
        assert made.numpy("bf16").tobytes() == one.numpy("bf16").tobytes()
        assert (made.numpy("f32").tobytes() == one.numpy("f32").tobytes()) != way.rounded
    assert min(seen.values()) > 3


def test_powers_of_two_and_the_type_f32() -> None:
    way = CODEC.repack(tensor(2.0**-9), replace(NVFP4, second=DIVIDE))
    assert (way.exact, way.rounded) == (True, False)
    inexact = [second for second in (0.001, 0.0013, 0.0017, 0.0019) if _rounded(second)]
    assert inexact
    for second in inexact:
        assert not CODEC.repack(tensor(second, "f32"), replace(NVFP4, second=DIVIDE, dtype="f32")).exact


def _rounded(second: float) -> bool:
    return CODEC.repack(tensor(second), replace(NVFP4, second=DIVIDE)).rounded


def test_a_second_scale_of_one_may_go_and_come() -> None:
    way = CODEC.repack(tensor(1.0), replace(NVFP4, second=None))
    assert way.exact
    made = replace(repacked(way, tensor(1.0)), decoder=CODEC)
    assert set(made.parts) == {"indices", "scales"}
    back = CODEC.repack(made, NVFP4)
    assert back.exact
    assert not CODEC.repack(tensor(0.5), replace(NVFP4, second=None)).exact


@pytest.mark.parametrize("shape", [(64, 96), (70, 90), (1, 96), (200, 16)])
@pytest.mark.parametrize("tile", [(32, 16), (64, 3), (128, 128), (7, 90), (1, 48)])
@pytest.mark.parametrize("chunk", [1, 9, 10_000])
def test_scales_of_blocks_are_repeated_for_rows_or_columns(
    shape: tuple[int, int], tile: tuple[int, int], chunk: int
) -> None:
    """On every grid that is offered values stay, in chunks of any number of rows."""
    rng, (rows, cols) = np.random.default_rng(3), shape
    layout = ScaledCodebookLayout(8, Tiles(*tile), "f32", values="f8_e4m3fn")
    parts = {
        "indices": rng.integers(0, 120, shape, np.uint8),
        "scales": rng.uniform(0.1, 1, (-(-rows // tile[0]), -(-cols // tile[1]))).astype(np.float32),
    }
    one, finer = Tensor.from_parts(layout, parts, shape), 0
    for other in family_alternatives(layout, one):
        if other.second is not None:
            continue
        way = CODEC.repack(one, other)
        assert way.exact, way.why_not
        reader, pieces = way.reader(), list[dict[str, np.ndarray]]()
        for start in range(0, rows, chunk):
            pieces.append(reader.read(min(chunk, rows - start)))
        reader.finish()
        joined = {role: np.concatenate([piece[role].reshape(-1) for piece in pieces]) for role in parts}
        made = replace(Tensor.from_parts(other, joined, shape), decoder=CODEC)
        assert made.numpy("f32").tobytes() == replace(one, decoder=CODEC).numpy("f32").tobytes()
        finer += len(joined["scales"]) > parts["scales"].size
    assert finer >= (tile[0] * tile[1] >= 64 and tile[0] > 1 and rows > 1)
