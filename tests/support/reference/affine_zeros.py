"""NumPy references of zero points, offsets and scales from one kind into another (``spec/affine.md``, "Repacking").

Each returns None where a number does not keep what it says.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

_MOST_SCALE = np.float32(2.0**118)
_MORE_BITS = np.uint32(0x1FFF)


def offsets(scales: Array, points: Array) -> Array | None:
    """Return ``-scales * points`` in their type: scales of 11 bits, integers up to 255, and products that fit."""
    with np.errstate(all="ignore"):
        wide, integers = scales.astype(np.float32), points.astype(np.float32)
        product = -wide * integers
        found = product.astype(scales.dtype)
        fits = ((wide.view(np.uint32) & _MORE_BITS) == 0) & (np.abs(wide) < _MOST_SCALE)
        fits &= (np.abs(integers) <= 255) & (integers == np.rint(integers)) & (found.astype(np.float32) == product)
    return found if bool(fits.all()) else None


def points(scales: Array, shifts: Array, low: int, high: int) -> Array | None:
    """Undo ``offsets``, in double precision; integers from ``low`` to ``high``."""
    with np.errstate(all="ignore"):
        wide = scales.astype(np.float64)
        found = np.where(wide == 0, 0, np.rint(-shifts.astype(np.float64) / wide))
        if not bool(((found >= low) & (found <= high)).all()):
            return None
        found = found.astype(scales.dtype)
    again = offsets(scales, found)
    return found if again is not None and bool((again == shifts).all()) else None


def shift(zeros: Array, delta: float, target: np.dtype[Any]) -> Array | None:
    """Return ``zeros + delta``, checked in double precision, where zero points are below 2^40."""
    with np.errstate(all="ignore"):
        wide = zeros.astype(np.float64)
        moved = wide + delta
        found = moved.astype(target)
        exact = (np.abs(wide) <= 2.0**40) & (moved - delta == wide) & (found.astype(np.float64) == moved)
    return found if bool(exact.all()) else None


def integers(values: Array, low: int, high: int) -> Array | None:
    """Return values as bytes, negative ones in two's complement."""
    with np.errstate(all="ignore"):
        wide = values.astype(np.float32)
        if not bool(((wide >= low) & (wide <= high) & (wide == np.rint(wide))).all()):
            return None
    return wide.astype(np.int16).astype(np.uint8)


def same(values: Array, target: np.dtype[Any]) -> Array | None:
    """Return values in another type; a NaN may be any."""
    with np.errstate(all="ignore"):
        found, wide = values.astype(target), values.astype(np.float32)
        fits = (found.astype(np.float32) == wide) | np.isnan(wide)
    return found if bool(fits.all()) else None
