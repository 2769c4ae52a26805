"""NumPy reference of casts between float types and of pair statistics."""

from __future__ import annotations

from typing import Any

import numpy as np

from ingot.core.numeric.dtypes import numpy_dtype

Array = np.ndarray[Any, np.dtype[Any]]


def cast(values: Array, target: str) -> Array:
    """Round to a float type, once, ties to even.

    ml_dtypes takes float64 to bfloat16 by way of float32, which rounds twice; here the nearest of both neighbours of
    the truncated value is chosen in float64 instead.
    """
    with np.errstate(all="ignore"):
        if target != "bf16" or values.dtype != np.float64:
            return values.astype(numpy_dtype(target))
        return _f64_to_bf16(values)


def _f64_to_bf16(values: Array) -> Array:
    magnitude = np.abs(values)
    _, exponent = np.frexp(magnitude)
    unit = np.ldexp(1.0, np.maximum(exponent - 1, -126) - 7)
    rounded = np.rint(magnitude / unit) * unit
    finite = np.isfinite(values)
    # All of bfloat16's numbers are float32's: this astype is exact, or goes to infinity as it should.
    exact = np.where(finite, rounded, 0).astype(np.float32)
    bits = (exact.view(np.uint32) >> 16).astype(np.uint16)
    bits = np.where(np.isinf(values), np.uint16(0x7F80), bits)
    bits = np.where(np.isnan(values), np.uint16(0x7FC0), bits)
    return (bits | (np.signbit(values).astype(np.uint16) << 15)).astype(np.uint16).view(numpy_dtype("bf16"))


def pair_stats(reference: Array, other: Array) -> tuple[int, float, float, float, float, float, int, int]:
    """Return what the kernel ``pair_stats`` returns: sums in double, eight partial sums, then added in halves."""
    with np.errstate(all="ignore"):
        first, two = reference.reshape(-1).astype(np.float64), other.reshape(-1).astype(np.float64)
    finite = np.isfinite(first) & np.isfinite(two)
    nans = np.isnan(first) & np.isnan(two)
    different = (first.view(np.uint64) != two.view(np.uint64)) & ~nans
    r, x = np.where(finite, first, 0.0), np.where(finite, two, 0.0)
    with np.errstate(all="ignore"):
        error = r - x
        products = (_sum(error * error), _sum(r * r), _sum(x * x), _sum(r * x))
    largest = float(np.abs(error).max(initial=0.0))
    return int(finite.sum()), *products, largest, int((different & ~finite).sum()), int(different.sum())


def _sum(terms: Array) -> float:
    padded = np.zeros(-(-terms.size // 8) * 8)
    padded[: terms.size] = terms
    sums = np.zeros(8)
    for block in padded.reshape(-1, 8):
        sums = sums + block
    for width in (4, 2, 1):
        sums = sums[:width] + sums[width : 2 * width]
    return float(sums[0])
