"""Casts: rounded once, exhaustively where the source is small, and never silently wrong."""

from __future__ import annotations

import numpy as np
import pytest

from ingot.codecs.cast import cast, cast_into, exact_cast, require_cast
from ingot.core.numeric.dtypes import DTYPES, numpy_dtype
from ingot.errors import CodecError, UnsupportedError
from ingot.testing.codecs import bits, round_once
from ingot.testing.values import random_bits

FLOATS = ("f64", "f32", "f16", "bf16", "f8_e4m3fn", "f8_e5m2", "f8_e4m3fnuz", "f8_e5m2fnuz")
SMALL = ("f16", "bf16", "f8_e4m3fn", "f8_e5m2", "f8_e4m3fnuz", "f8_e5m2fnuz", "f8_e8m0fnu")


def every_value(dtype: str) -> np.ndarray:
    width = numpy_dtype(dtype).itemsize
    return np.arange(1 << (8 * width), dtype=f"u{width}").view(numpy_dtype(dtype))


def finite_values(dtype: str) -> np.ndarray:
    """All finite values of a small type, ascending, as float64."""
    with np.errstate(invalid="ignore"):  # signalling NaNs are among the bit patterns
        values = every_value(dtype).astype(np.float64)
    return np.unique(values[np.isfinite(values)])


def quarter_steps(dtype: str) -> np.ndarray:
    """Float64 values at, between and just beside all values of a small type: every rounding decision there is."""
    values = finite_values(dtype)
    middle = (values[1:] + values[:-1]) / 2
    return np.concatenate([values, middle, np.nextafter(middle, -np.inf), np.nextafter(middle, np.inf)])


@pytest.mark.parametrize("target", ["f16", "bf16", "f8_e4m3fn", "f8_e5m2", "f8_e4m3fnuz", "f8_e5m2fnuz"])
def test_every_rounding_decision_from_f64(target: str) -> None:
    values = quarter_steps(target)
    np.testing.assert_array_equal(cast(values, target), round_once(values, target))


@pytest.mark.parametrize("target", ["f16", "bf16", "f8_e4m3fn", "f8_e5m2", "f8_e4m3fnuz", "f8_e5m2fnuz"])
def test_every_rounding_decision_from_f32(target: str) -> None:
    values = quarter_steps(target).astype(np.float32)
    np.testing.assert_array_equal(cast(values, target), round_once(values.astype(np.float64), target))


@pytest.mark.parametrize("source", SMALL)
@pytest.mark.parametrize("target", FLOATS)
def test_a_cast_is_called_exact_just_where_every_value_survives(source: str, target: str) -> None:
    values = every_value(source)
    with np.errstate(all="ignore"):
        wide = values.astype(np.float64)
        plain = values.astype(np.float32).astype(numpy_dtype(target)).astype(np.float64)
    survives = (plain == wide) | (np.isnan(plain) & np.isnan(wide))
    assert exact_cast(source, target) == survives.all()
    if survives.all():
        with np.errstate(all="ignore"):
            np.testing.assert_array_equal(cast(values, target).astype(np.float64), wide)


@pytest.mark.parametrize("target", ["f32", "f16", "bf16", "f8_e4m3fn", "f8_e5m2", "f8_e5m2fnuz"])
@pytest.mark.parametrize("sign", [1, -1])
def test_overflow_is_refused_just_past_the_last_value(target: str, sign: int) -> None:
    limit = float(np.finfo(np.float32).max) if target == "f32" else float(finite_values(target)[-1])
    digits = {"f32": 24, "f16": 11, "bf16": 8, "f8_e4m3fn": 4, "f8_e5m2": 3, "f8_e5m2fnuz": 3}[target]
    half_step = 2.0 ** (np.frexp(limit)[1] - digits - 1)
    inside = np.array([sign * limit, sign * np.nextafter(limit + half_step, 0)])
    assert (cast(inside, target).astype(np.float64) == sign * limit).all()
    with pytest.raises(CodecError) as caught:
        cast(np.array([0.0, sign * (limit + 2 * half_step)]), target)
    assert caught.value.rule == "dense.overflow"


def test_infinity_survives_where_the_type_has_one() -> None:
    values = np.array([np.inf, -np.inf, np.nan], np.float32)
    for target in ("f64", "f16", "bf16", "f8_e5m2"):
        np.testing.assert_array_equal(cast(values, target).astype(np.float64), values.astype(np.float64))


@pytest.mark.parametrize("target", ["f8_e4m3fn", "f8_e4m3fnuz", "f8_e5m2fnuz"])
def test_infinity_is_refused_where_the_type_has_none(target: str) -> None:
    assert np.isnan(cast(np.array([np.nan], np.float32), target).astype(np.float32)).all()
    with pytest.raises(CodecError) as caught:
        cast(np.array([np.inf], np.float32), target)
    assert caught.value.rule == "dense.overflow"


@pytest.mark.parametrize("dtype", ["i64", "u64"])
def test_integers_that_a_double_may_not_hold_are_refused(dtype: str) -> None:
    last = np.array([2**53], numpy_dtype(dtype))
    assert cast(last, "f64")[0] == 2.0**53
    with pytest.raises(CodecError) as caught:
        cast(last + 1, "f64")
    assert caught.value.rule == "dense.inexact"
    if dtype == "i64":
        assert cast(-last, "f64")[0] == -(2.0**53)
        with pytest.raises(CodecError) as caught:
            cast(-last - 1, "f64")
        assert caught.value.rule == "dense.inexact"


def test_integers_round_once() -> None:
    values = np.array([2**24 + 1, 2**25 + 3, -(2**24) - 1, 2**53 - 1], np.int64)
    assert bits(cast(values, "f32")) == bits(values.astype(np.float32))
    # 2**40 + 2**32 lies between bf16 neighbours, a hair above: two roundings would go to even
    assert float(cast(np.array([2**40 + 2**32 + 1], np.int64), "bf16")[0]) == 2.0**40 + 2.0**33
    with pytest.raises(CodecError):
        cast(np.array([70_000], np.int32), "f16")


@pytest.mark.parametrize(
    ("source", "target"),
    [("f32", "i32"), ("i32", "i16"), ("i8", "u8"), ("f32", "complex64"), ("complex64", "f32"), ("u8", "bool")],
)
def test_forbidden(source: str, target: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        require_cast(source, target)
    assert caught.value.rule == "dense.cast"


def test_complex_casts_both_parts() -> None:
    values = np.array([1 + 2j, complex(np.inf, -0.0)], np.complex64)
    assert bits(cast(values, "complex128")) == bits(values.astype(np.complex128))
    with pytest.raises(CodecError):
        cast(np.array([complex(0, 1e300)]), "complex64")


def test_same_dtype_is_no_copy() -> None:
    values = random_bits(np.random.default_rng(0), (3, 4), "f32")
    assert cast(values, "f32") is values or np.shares_memory(cast(values, "f32"), values)


def test_long_arrays_go_by_pieces() -> None:
    values = np.random.default_rng(0).normal(size=200_001)
    out = np.empty(200_001, numpy_dtype("bf16"))
    cast_into(values, out)
    np.testing.assert_array_equal(out, round_once(values, "bf16"))
    values[150_000] = 1e300
    with pytest.raises(CodecError):
        cast_into(values, out)


def test_every_dtype_is_sorted_into_allowed_or_refused() -> None:
    for source in DTYPES:
        for target in DTYPES:
            try:
                require_cast(source, target)
            except UnsupportedError:
                assert not exact_cast(source, target)


@pytest.mark.parametrize("source", ["f64", "f32", "f16", "bf16"])
@pytest.mark.parametrize("target", ["f64", "f32", "f16", "bf16"])
def test_the_kernel_agrees_with_numpy_bit_for_bit(source: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(3).normal(size=5000).astype(np.float32)
    values[:6] = [0.0, -0.0, 1e-45, -1e-40, 6e-8, 60000.0]
    with np.errstate(all="ignore"):
        values = values.astype(numpy_dtype(source))
    fast = cast(values, target)
    monkeypatch.setattr("ingot.core.numeric.floats.FLOATS", ())
    assert bits(cast(values, target)) == bits(fast)


def test_unaligned_values_are_cast_too() -> None:
    data = np.frombuffer(b"\0" + np.arange(9, dtype=np.float32).tobytes(), np.float32, 9, 1)
    assert not data.flags.aligned
    assert cast(data, "bf16").astype(np.float32).tolist() == list(range(9))
