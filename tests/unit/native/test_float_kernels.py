"""Casts and pair statistics against their NumPy reference, for every instruction set."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ingot.core.numeric.dtypes import numpy_dtype
from ingot.core.numeric.floats import as_bits, cast, cast_into
from ingot.core.numeric.stats import measure
from ingot.core.runtime import native
from ingot.errors import UnsupportedError
from ingot.testing.values import random_bits
from tests.support.reference import floats as reference

Array = np.ndarray[Any, np.dtype[Any]]

FLOATS = ("f32", "f16", "bf16", "f64")


def all_halves(dtype: str) -> Array:
    return np.arange(65536, dtype=np.uint16).view(numpy_dtype(dtype))


def around(dtype: str) -> Array:
    """Every number of a 16-bit type, the middle between it and the next, and the neighbours of both in f64."""
    with np.errstate(invalid="ignore"):
        numbers = all_halves(dtype).astype(np.float64)
    numbers = np.unique(numbers[np.isfinite(numbers)])
    middles = (numbers[1:] + numbers[:-1]) / 2
    points = np.concatenate([numbers, middles, [1e300, -1e300, 65520.0, 65519.99, 3.3961775e38, 3.4e38]])
    return np.concatenate([points, np.nextafter(points, np.inf), np.nextafter(points, -np.inf)])


@pytest.mark.parametrize("target", FLOATS)
@pytest.mark.parametrize("source", FLOATS)
def test_casts_of_random_bits(source: str, target: str) -> None:
    values = random_bits(np.random.default_rng(5), (20011,), source)
    check_cast(values, target)
    check_cast(values[3:], target)


@pytest.mark.parametrize("target", FLOATS)
@pytest.mark.parametrize("source", ["f16", "bf16"])
def test_casts_of_every_16_bit_pattern(source: str, target: str) -> None:
    check_cast(all_halves(source), target)


@pytest.mark.parametrize("target", ["f16", "bf16"])
@pytest.mark.parametrize("source", ["f32", "f64"])
def test_casts_round_once_at_every_tie(source: str, target: str) -> None:
    with np.errstate(over="ignore"):
        check_cast(around(target).astype(numpy_dtype(source)), target)


def check_cast(values: Array, target: str) -> None:
    found, wanted = cast(values, target), reference.cast(values, target)
    with np.errstate(invalid="ignore"):  # ml_dtypes looks at signalling NaN by way of float32
        nan = np.isnan(values)
        assert np.array_equal(np.isnan(found), nan)
    assert found[~nan].tobytes() == wanted[~nan].tobytes()
    if values.dtype == found.dtype:
        assert found.tobytes() == values.tobytes()


def test_casts_are_the_same_for_every_instruction_set() -> None:
    before = native.kernels.isa()
    results = set()
    for name in native.kernels.available_isas():
        native.kernels.set_isa(name)
        casts = [
            cast(random_bits(np.random.default_rng(6), (5000,), source), target).tobytes()
            for source in FLOATS
            for target in FLOATS
        ]
        results.add(b"".join(casts))
    native.kernels.set_isa(before)
    assert len(results) == 1  # NaN payloads included


def test_casts_refuse_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="as many"):
        cast_into(np.zeros(3, np.float32), np.zeros(4, np.float32))
    with pytest.raises(ValueError, match="C order"):
        cast_into(np.zeros((4, 4), np.float32), np.zeros((4, 4), np.float16).T)
    with pytest.raises(UnsupportedError):
        cast(np.zeros(3, np.int32), "f32")


@pytest.mark.parametrize("size", [0, 1, 7, 8, 255, 256, 257, 5003])
def test_pair_stats_of_any_bits(size: int) -> None:
    rng = np.random.default_rng(size)
    for one in FLOATS:
        for two in FLOATS:
            check_stats(random_bits(rng, (size,), one), random_bits(rng, (size,), two))
            values = rng.normal(0, 1, size)
            reference_values = values.astype(numpy_dtype(one))
            check_stats(reference_values, values.astype(numpy_dtype(two)))
            check_stats(reference_values, reference_values)


def check_stats(one: Array, two: Array) -> None:
    names = [str(array.dtype).replace("bfloat", "bf").replace("float", "f") for array in (one, two)]
    found = native.kernels.pair_stats(as_bits(one), names[0], as_bits(two), names[1])
    wanted = reference.pair_stats(one, two)
    assert found[0] == wanted[0]
    assert found[6:] == wanted[6:]
    np.testing.assert_array_equal(np.array(found[1:6]), np.array(wanted[1:6]))
    assert native.kernels.pair_error(as_bits(one), names[0], as_bits(two), names[1]) == found[1]


def test_measure_by_hand() -> None:
    stats = measure(np.array([1.0, 2.0, np.nan, np.inf, -0.0]), np.array([1.5, 2.0, np.nan, -np.inf, 0.0], np.float32))
    assert (stats.count, stats.odd, stats.max_abs) == (3, 1, 0.5)
    assert (stats.squared_error, stats.squared_reference, stats.squared_other, stats.dot) == (0.25, 5.0, 6.25, 5.5)
