"""The triple-bitmap kernels against their NumPy reference, bit for bit, for every instruction set."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ingot.codecs.lossless import tca_tbe_bands as bands
from ingot.core.runtime import native
from ingot.testing.values import random_bits
from tests.support.reference import tca_tbe as reference

Array = np.ndarray[Any, np.dtype[Any]]

SHAPES = ((1, 1), (64, 64), (65, 63), (15, 200), (130, 129), (1, 300), (300, 1))
STARTS = (-1, 0, 1, 61, 115, 247, 248)


def values_of(kind: str, shape: tuple[int, int]) -> Array:
    rng = np.random.default_rng(shape[0])
    if kind == "weights":
        return rng.normal(0, 0.02, shape).astype(ml_dtypes.bfloat16)
    if kind == "constant":
        return np.full(shape, 0.02).astype(ml_dtypes.bfloat16)
    return random_bits(rng, shape, "bf16", zeros=0.2)


@pytest.mark.parametrize("kind", ["weights", "bits", "constant"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_parts_equal_the_reference_and_come_back(kind: str, shape: tuple[int, int]) -> None:
    values = values_of(kind, shape)
    for start in STARTS:
        wanted = reference.encode(values.view(np.uint16), start)
        found = bands.encode_rows(values, start)
        assert list(found) == list(wanted)
        for role, array in wanted.items():
            assert found[role].tobytes() == array.tobytes(), (start, role)
        out = np.full(shape, 7).astype(ml_dtypes.bfloat16)
        bands.decode_rows(found, start, out)
        assert out.tobytes() == values.tobytes(), start


def test_every_pattern_in_every_window() -> None:
    values = np.random.default_rng(3).permutation(np.arange(65536, dtype=np.uint16)).view(ml_dtypes.bfloat16)
    out = np.empty((256, 256), ml_dtypes.bfloat16)
    for start in range(-1, 249):
        bands.decode_rows(bands.encode_rows(values.reshape(256, 256), start), start, out)
        assert out.tobytes() == values.tobytes(), start


def test_nothing_is_read_past_the_parts() -> None:
    """Parts whose arrays end at the end of their tile, with other bytes behind: these never show."""
    values = values_of("weights", (64, 64))
    parts = bands.encode_rows(values, 115)
    for filler in (0, 255):
        padded = {role: np.append(array, np.full(64, filler).astype(array.dtype)) for role, array in parts.items()}
        cut = {role: padded[role][: parts[role].size] for role in parts}
        out = np.empty((64, 64), ml_dtypes.bfloat16)
        bands.decode_rows(cut, 115, out)
        assert out.tobytes() == values.tobytes()


def test_the_first_tile_that_lies_is_told() -> None:
    parts = {role: array.copy() for role, array in bands.encode_rows(values_of("weights", (64, 200)), 115).items()}
    out = np.empty((64, 200), np.uint16)
    assert native.kernels.tca_tbe_decode(*parts.values(), 115, out) == 4
    parts["bitmap3"][2 * 64 + 5] ^= np.uint64(2**64 - 1)
    assert native.kernels.tca_tbe_decode(*parts.values(), 115, out) == 2
    parts["counts"][0] = 4096
    assert native.kernels.tca_tbe_decode(*parts.values(), 115, out) == 0
    short = {**parts, "high": parts["high"][:16], "fallback": parts["fallback"][:8]}
    assert native.kernels.tca_tbe_decode(*short.values(), 115, out) == 0


@pytest.mark.parametrize("size", [0, 1, 3, 4, 1000, 65536])
def test_exponents(size: int) -> None:
    values = random_bits(np.random.default_rng(size), (size,), "bf16").view(np.uint16)
    counts = np.ones(256, np.uint64)
    native.kernels.bf16_exponents(values, counts)
    assert np.array_equal(counts, 1 + np.bincount(values >> 7 & 0xFF, minlength=256).astype(np.uint64))


@pytest.mark.parametrize(
    "change",
    [
        {"counts": np.zeros(3, np.uint16)},
        {"counts": np.zeros(2, np.int16)},
        {"bitmap2": np.zeros(63, np.uint64)},
        {"bitmap3": np.zeros(513, np.uint8)[1:].view(np.uint64)},
        {"fallback": np.zeros(9, np.uint8)[1:].view(np.uint16)},
        {"start": -2},
        {"start": 249},
        {"out": np.zeros((65, 64), np.uint16)},
        {"out": np.zeros(64, np.uint16)},
        {"out": np.zeros((64, 64), np.float32)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_wrong_sizes_and_types_are_refused(change: dict[str, Any]) -> None:
    parts = {role: array.reshape(-1) for role, array in bands.encode_rows(values_of("weights", (64, 64)), 115).items()}
    arguments: dict[str, Any] = {**parts, "start": 115, "out": np.zeros((64, 64), np.uint16)}
    native.kernels.tca_tbe_decode(**arguments)
    with pytest.raises((ValueError, TypeError)):
        native.kernels.tca_tbe_decode(**{**arguments, **change})


@pytest.mark.parametrize("role", ["high", "fallback"])
def test_the_encoder_asks_for_room(role: str) -> None:
    room: dict[str, Any] = {
        "counts": np.zeros(2, np.uint16),
        **{name: np.zeros(64, np.uint64) for name in bands.BITMAPS},
        "high": np.zeros(4096 + 64, np.uint8),
        "fallback": np.zeros(4096 + 32, np.uint16),
    }
    values = np.zeros((64, 64), np.uint16)
    assert native.kernels.tca_tbe_encode(values, 115, **room) == (0, 4096)
    with pytest.raises(ValueError, match="room"):
        native.kernels.tca_tbe_encode(values, 115, **{**room, role: room[role][:-1]})
