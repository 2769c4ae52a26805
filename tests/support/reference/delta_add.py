"""NumPy reference of the kernels that add differences to a base (``spec/wdelta.md``, "Strategies")."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


def int4(packed: Array, first: int, table: Array, positions: Array, values: Array, *, gaps: bool, count: int) -> Array:
    """Return ``count`` differences in f32: of codes, the first in the high bits, that begin at code ``first``."""
    codes = np.stack([packed >> 4, packed & 15], axis=1).reshape(-1)[first:]
    out = np.empty(count, np.float32)
    coded = np.setdiff1d(np.arange(count), positions) if gaps else np.arange(count)
    out[coded] = table[codes[: coded.size]]
    out[positions] = values
    return out


def sign(bits: Array, first: int, scales: Array, *, count: int) -> Array:
    """Return ``count`` differences in f32: the scale of the row, negated where the bit is 0."""
    positive = np.unpackbits(bits)[first : first + count].astype(bool).reshape(scales.size, -1)
    return np.where(positive, scales[:, None], -scales[:, None]).reshape(-1)


def placed(positions: Array, values: Array, *, count: int) -> Array:
    """Return ``count`` differences in f32: values at positions, 0 elsewhere."""
    out = np.zeros(count, np.float32)
    out[positions] = values
    return out


def add(base: Array, difference: Array, *, less: bool = False) -> Array:
    """Return ``base`` plus, or less, ``difference``: computed in f32, rounded once to the base's type.

    Of two NaNs the first operand's goes on, which is the difference of a sum.
    """
    wide = base.astype(np.float32)
    first, second = (wide, difference) if less else (difference, wide)
    with np.errstate(over="ignore", invalid="ignore"):
        total = first - second if less else first + second
        quiet = (first.view(np.uint32) | np.uint32(0x00400000)).view(np.float32)
        return np.where(np.isnan(first), quiet, total).astype(base.dtype)


def changes(old: Array, new: Array) -> tuple[Array, Array]:
    """Return gaps between the positions at which unsigned integers differ, the first from -1, and ``new - old``."""
    positions = np.flatnonzero(old != new)
    return np.diff(positions, prepend=-1), new[positions] - old[positions]
