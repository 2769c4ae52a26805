"""NumPy reference of codes times scales: one step after another, as ``spec/scaled_codebook.md`` puts it."""

from __future__ import annotations

from typing import Any

import numpy as np

from ingot.core.numeric.floats import cast
from tests.support.reference.palette import unpack

Array = np.ndarray[Any, np.dtype[Any]]


def decode(codes: Array, table: Array, scales: Array, grid: tuple[int, int, int], dtype: str) -> Array:
    """Return ``scale * table[code]`` rounded once; ``grid`` is columns of a row, of a group, and before the first."""
    cols, group, phase = grid
    row, col = np.divmod(np.arange(codes.size) + phase, cols)
    index = row * -(-cols // group) + col // group
    with np.errstate(all="ignore"):
        return cast(scales[index] * table[codes], dtype)


def codes_of(packed: Array, bits: int, count: int, *, high_first: bool) -> Array:
    """Return ``count`` codes of a stream as u8."""
    return unpack(packed >> 4 | packed << 4 if high_first else packed, bits, count)
