"""Products with trellises and palettes as they are stored: those of the decoded matrix in the order of "Many rows"."""

from __future__ import annotations

import numpy as np
import pytest

from ingot.codecs.palette.matmul import PaletteMatrix
from ingot.codecs.tiles import TileMatrix
from ingot.codecs.trellis.matmul import TrellisMatrix
from ingot.core.numeric.dtypes import numpy_dtype
from ingot.core.runtime import native
from ingot.errors import CodecError
from ingot.model.layouts.palette import PaletteLayout
from ingot.model.layouts.trellis import TrellisLayout
from ingot.model.tensor import Array
from tests.support.reference.affine_matmul import Weights, gemm

TYPES = ("bf16", "f16", "f32")


def trellis(bits: int, shape: tuple[int, int] = (70, 360), scale: float = 0.02, group: int = 40) -> TrellisMatrix:
    """Random streams in bands of 32 rows."""
    rng = np.random.default_rng(bits)
    layout = TrellisLayout(bits, group, 32, "bf16")
    scales = rng.normal(0, scale, (shape[0], shape[1] // group)).astype(np.float16)
    return TrellisMatrix(layout, shape, rng.integers(0, 256, 2 * layout.words(shape), np.uint8), scales)


def palette(bits: int, shape: tuple[int, int] = (66, 280), books: int = 1) -> PaletteMatrix:
    rng = np.random.default_rng(bits)
    layout = PaletteLayout(bits, (books, 1), 1, 0, "f32", "f32")
    table = rng.normal(0, 0.02, (books, 1 << bits)).astype(np.float32)
    return PaletteMatrix(layout, shape, rng.integers(0, 256, layout.index_bytes(shape), np.uint8), table)


def wanted(held: TileMatrix, x: Array, dtype: str, bias: Array | None = None) -> bytes:
    with np.errstate(all="ignore"):
        values = held.decode(0, held.shape[0], dtype).astype(np.float32)
        found = gemm(x, Weights(values, 8, None, np.ones(1, np.float32), None, False), bias).astype(x.dtype)
    return found.tobytes()


def product(held: TileMatrix, x: Array, bias: Array | None = None, workers: int = 1) -> bytes:
    out = np.full((len(x), held.shape[0]), 77, x.dtype)
    held.gemm(x, out, bias, workers)
    return out.tobytes()


HELD = {
    "trellis 2": lambda: trellis(2),
    "trellis 3": lambda: trellis(3),
    "trellis 4": lambda: trellis(4, (33, 96), group=8),
    "palette 4": lambda: palette(4),
    "palette 3": lambda: palette(3, (64, 264), 4),
    "palette 8": lambda: palette(8, (5, 33)),
}


@pytest.mark.parametrize("name", HELD)
@pytest.mark.parametrize("dtype", TYPES)
def test_equals_the_product_with_the_decoded_matrix(name: str, dtype: str) -> None:
    held = HELD[name]()
    rng = np.random.default_rng(5)
    for count, workers in ((1, 1), (7, 2)):
        x = rng.normal(0, 1, (count, held.shape[1])).astype(numpy_dtype(dtype))
        bias = rng.normal(0, 1, held.shape[0]).astype(np.float32)
        assert product(held, x, bias, workers) == wanted(held, x, dtype, bias)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_a_row_among_many_is_what_it_is_alone(dtype: str) -> None:
    held = trellis(3, (70, 80))
    x = np.random.default_rng(8).normal(0, 1, (300, 80)).astype(numpy_dtype(dtype))
    every = product(held, x, None, 2)
    for count in (1, 2, 3, 4, 5, 6, 8, 17, 257):
        assert product(held, x[:count]) == every[: count * 70 * 2]


@pytest.mark.parametrize(
    ("x_value", "scale"), [(2.0**-100, 0.02), (2.0**100, 0.02), (1.0, 2.0**-24), (2.0**-60, 2.0**-20)]
)
def test_values_near_the_ends_of_the_range(x_value: float, scale: float) -> None:
    held = trellis(4, (40, 80), scale)
    x = np.random.default_rng(3).normal(0, 1, (9, 80)).astype(numpy_dtype("bf16"))
    x[3, 5:9] = x_value
    x[4] = x_value
    assert product(held, x) == wanted(held, x, "bf16")


def test_weights_of_tiny_scales_in_f32_are_not_flushed() -> None:
    held = trellis(2, (16, 40))
    held = TrellisMatrix(held.params, held.shape, held.packed, held.scales.astype(np.float32) * np.float32(2.0**-120))
    x = np.full((3, 40), 2.0**-10, numpy_dtype("bf16"))
    found = product(held, x)
    assert found == wanted(held, x, "bf16")
    assert np.frombuffer(found, np.uint16).any()


def test_what_is_left_to_decoding() -> None:
    held = trellis(2)
    assert held.choose_product("f32", 33) is None
    assert held.choose_product("f32", 32) is not None
    large = TrellisMatrix(held.params, held.shape, held.packed, np.full(held.scales.size, 60000, np.float16))
    assert large.choose_product("f16", 1) is None
    with pytest.raises(CodecError, match="overflow"):
        large.decode(0, 3, "f16")
    assert large.choose_product("bf16", 1) is not None


def test_rows_are_decoded_from_anywhere() -> None:
    for make in HELD.values():
        held = make()
        every = held.decode(0, held.shape[0], "f32")
        for start, stop in ((0, 1), (3, 5), (30, 33) if held.shape[0] > 32 else (1, 4)):
            assert held.decode(start, stop, "f32").tobytes() == every[start:stop].tobytes()


def test_sizes_are_checked_before_anything_is_read() -> None:
    held = trellis(3)
    with pytest.raises(CodecError, match="size"):
        TrellisMatrix(held.params, held.shape, held.packed[:-1], held.scales)
    with pytest.raises(CodecError, match="size"):
        PaletteMatrix(palette(4).params, (66, 280), palette(4).packed[:-1], palette(4).scales)
    sizes = {"rows": 16, "cols": 40, "bits": 2, "group": 40, "band": 16, "scale_dtype": "f32", "within": True}
    words, values, scales = np.zeros(160, np.uint8), np.zeros(4096, np.float32), np.zeros(16, np.float32)
    native.kernels.TrellisMatrix(words, values, scales, **sizes)
    for change in (
        {"rows": 17}, {"cols": 41}, {"bits": 5}, {"group": 7}, {"group": 0}, {"band": 8}, {"band": 17}, {"rows": 2**63},
        {"cols": 0}, {"scale_dtype": "f16"},
    ):  # fmt: skip
        with pytest.raises(ValueError, match="expected"):
            native.kernels.TrellisMatrix(words, values, scales, **{**sizes, **change})
    indices, table = np.zeros(64, np.uint8), np.zeros(16, np.float32)
    known = {"rows": 8, "cols": 16, "bits": 4, "dtype": "f32", "within": True}
    native.kernels.PaletteMatrix(indices, table, **known)
    for change in ({"rows": 9}, {"cols": 15}, {"bits": 5}, {"bits": 8}, {"dtype": "bf16"}, {"cols": 2**62}):
        with pytest.raises(ValueError, match="expected"):
            native.kernels.PaletteMatrix(indices, table, **{**known, **change})
    with pytest.raises(ValueError, match="expected"):
        held.gemm(np.ones((2, 359), np.float32), np.empty((2, 70), np.float32))
