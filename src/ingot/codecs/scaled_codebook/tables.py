"""f32 values of indices and of one-byte scales, and the nearest index of a value (``spec/scaled_codebook.md``)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import numpy as np

from ingot.core.numeric.dtypes import DTYPES, numpy_dtype
from ingot.model.layouts import scaled_codebook as layouts
from ingot.model.layouts.scaled_codebook import NUMBERS
from ingot.model.tensor import Array

TABLES: Mapping[str, Array] = {name: np.array(table, np.float32) for name, table in layouts.TABLES.items()}
"""The tables that options can name, in f32."""


@cache
def numbers(name: str) -> Array:
    """Return the value of each code of a type of 4, 6 or 8 bits, or of a table: f32, read-only."""
    if name in TABLES:
        return TABLES[name]
    codes = np.arange(1 << DTYPES[name].bits, dtype=np.uint8)
    if name == "f8_e8m0fnu":  # 2^(code - 127); 255 is NaN
        values: Array = np.ldexp(1.0, np.minimum(codes, 254).astype(np.int32) - 127).astype(np.float32)
        values[255] = np.nan
    else:
        values = codes.view(numpy_dtype(name)).astype(np.float32)
    values.flags.writeable = False
    return values


@cache
def largest(name: str) -> float:
    """Return the largest finite number of a type, or the largest magnitude of a table."""
    values = numbers(name)
    return float(np.abs(values).max()) if name in TABLES else float(values[np.isfinite(values)].max())


def codes_of(values: Array, name: str) -> Array:
    """Return f32 values as codes (u8) of a small type: rounded to nearest, ties to even, and clipped to its range."""
    limit = np.float32(largest(name))
    clipped = np.clip(values, -limit, limit)
    if name == "i8":
        clipped = np.rint(clipped)
    rounded: Array = clipped.astype(numpy_dtype(name)).view(np.uint8)
    return rounded


class Nearest:
    """A search for the nearest entry of a table, with ties to the lower entry, or the nearest number of a type."""

    def __init__(self, values: str | None, table: Array) -> None:
        self._type = values if values in NUMBERS else None
        self._order = np.argsort(table, kind="stable").astype(np.uint8)
        entries = table[self._order]
        self._middle = (entries[1:] + entries[:-1]) / 2

    def __call__(self, values: Array) -> Array:
        """Return the indices (u8, flat) of f32 values."""
        if self._type:
            return codes_of(values.reshape(-1), self._type)
        indices: Array = self._order[np.searchsorted(self._middle, values.reshape(-1), side="left")]
        return indices
