"""Codes times scales: every instruction set gives the bits of the reference, and wrong sizes are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ingot.codecs.scaled_codebook.tables import numbers
from ingot.core.numeric.dtypes import numpy_dtype
from ingot.core.runtime import native
from tests.support.reference import scaled as reference

DTYPES = ("f32", "f16", "bf16")
NUMBERS = ("f8_e4m3fn", "f8_e5m2", "i8")
GRIDS = ((37, 5, 0), (96, 16, 0), (64, 32, 0), (128, 128, 0), (5000, 64, 40), (10, 4, 7), (1, 1, 0), (300, 128, 0))


def decode(codes: Any, bits: int, values: Any, scales: Any, grid: Any, dtype: str, **more: Any) -> np.ndarray:
    count = codes.size * 8 // bits if "count" not in more else more["count"]
    out = np.full(count + 8, 1, numpy_dtype(dtype))
    target = out[:count].view(np.uint16) if dtype != "f32" else out[:count]
    named = isinstance(values, str)
    native.kernels.scaled_decode(
        *(codes, bits, more.get("high_first", False), values if named else "table", None if named else values),
        *(scales, more.get("scale_table"), *grid, target, dtype),
    )
    assert (out[count:] == 1).all()
    return out[:count]


def same(found: np.ndarray, wanted: np.ndarray) -> bool:
    numbers_of = [item.astype(np.float32) for item in (found, wanted)]
    bits = found.view(f"u{found.itemsize}") == wanted.view(f"u{wanted.itemsize}")
    return bool((bits | (np.isnan(numbers_of[0]) & np.isnan(numbers_of[1]))).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 6, 8])
def test_tables_are_looked_up_as_the_reference_does(bits: int, dtype: str) -> None:
    rng = np.random.default_rng(bits)
    table = rng.normal(0, 1, 1 << bits).astype(np.float32)
    table[0], table[-1] = np.nan, -0.0
    for grid in GRIDS:
        count = 3001 // 8 * 8 + (0 if bits != 8 else 3)
        packed = rng.integers(0, 256, count * bits // 8, dtype=np.uint8)
        codes = reference.codes_of(packed, bits, count, high_first=False)
        scales = rng.normal(0, 1e-3, count + 64).astype(np.float32)
        scales[3] = np.inf
        assert same(
            decode(packed, bits, table, scales, grid, dtype), reference.decode(codes, table, scales, grid, dtype)
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 15, 16, 2047, 2048])
def test_high_bits_first(count: int, dtype: str) -> None:
    rng = np.random.default_rng(count)
    packed, table = rng.integers(0, 256, -(-count // 2), dtype=np.uint8), rng.normal(0, 1, 16).astype(np.float32)
    scales, grid = rng.normal(0, 1, 200).astype(np.float32), (4096, 64, 9)
    codes = reference.codes_of(packed, 4, count, high_first=True)
    found = decode(packed, 4, table, scales, grid, dtype, high_first=True, count=count)
    assert same(found, reference.decode(codes, table, scales, grid, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_eight_bits(name: str, dtype: str) -> None:
    codes = np.concatenate([np.arange(256, dtype=np.uint8)] * 2)
    small, odd = (2.0**-9, 1e-36, 1e-38, 2.0**-130, 1e-45), (0.0, -0.0, np.inf, -np.inf, np.nan)
    for scale in (1.0, -0.37, 3.3e-5, 448.0, 1e5, 1e30, 3e38, *small, *odd):
        scales, grid = np.full(9, scale, np.float32), (100, 100, 0)
        wanted = reference.decode(codes, numbers(name), scales, grid, dtype)
        assert same(decode(codes, 8, name, scales, grid, dtype), wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NUMBERS)
def test_scales_that_rows_share_or_not(name: str, dtype: str) -> None:
    """In blocks of some rows; zeros of both signs, NaN and infinity among them, a row that is not like that above."""
    rng, cols, group = np.random.default_rng(5), 64 * 66 + 13, 64
    places = -(-cols // group)
    rows = rng.normal(0, 1e-3, (4, places)).astype(np.float32)[[0, 0, 0, 1, 2, 2, 2, 3, 3, 3, 3]]
    rows[:, 1] = [0.0, -0.0, -0.0, 0.0, 0.0, np.nan, np.nan, np.nan, np.inf, np.inf, -np.inf]
    codes = rng.integers(0, 256, len(rows) * cols, dtype=np.uint8)
    for phase in (0, 200):
        some, scales = codes[phase:], rows.reshape(-1)
        wanted = reference.decode(some, numbers(name), scales, (cols, group, phase), dtype)
        assert same(decode(some, 8, name, scales, (cols, group, phase), dtype), wanted)


@pytest.mark.parametrize("name", ["f8_e8m0fnu", "f8_e4m3fn", "f8_e5m2"])
def test_scales_of_eight_bits(name: str) -> None:
    codes, table = np.full(256 * 4, 0x51, np.uint8), np.arange(16, dtype=np.float32)
    scales, grid = np.arange(256, dtype=np.uint8), (2048, 8, 0)
    wanted = reference.decode(
        reference.codes_of(codes, 4, 2048, high_first=False), table, numbers(name)[scales], grid, "f32"
    )
    assert same(decode(codes, 4, table, scales, grid, "f32", scale_table=numbers(name)), wanted)


@pytest.mark.parametrize(
    "wrong",
    [
        {"packed": np.zeros(15, np.uint8)},
        {"bits": 9},
        {"bits": 8, "high_first": True},
        {"values": "f8_e4m3fn"},
        {"values": "f4"},
        {"table": None},
        {"table": np.zeros(8, np.float32)},
        {"scales": np.zeros(1, np.float32)},
        {"scales": np.zeros(2, np.uint8)},
        {"scale_table": np.zeros(256, np.float32)},
        {"cols": 0},
        {"group": 0},
        {"phase": 32},
        {"cols": 2**64 - 1, "phase": 2**64 - 2},
        {"out": np.zeros(32, np.uint16)},
        {"dtype": "f64"},
    ],
)
def test_wrong_sizes(wrong: dict[str, Any]) -> None:
    given: dict[str, Any] = {
        "packed": np.zeros(16, np.uint8),
        "bits": 4,
        "high_first": False,
        "values": "table",
        "table": np.zeros(16, np.float32),
        "scales": np.zeros(2, np.float32),
        "scale_table": None,
        "cols": 32,
        "group": 16,
        "phase": 0,
        "out": np.zeros(32, np.float32),
        "dtype": "f32",
    }
    native.kernels.scaled_decode(*given.values())
    with pytest.raises((ValueError, TypeError)):
        native.kernels.scaled_decode(*{**given, **wrong}.values())
