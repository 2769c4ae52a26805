"""NumPy reference of trellises: one step after another, as ``spec/trellis.md`` puts it."""

from __future__ import annotations

from typing import Any

import numpy as np

from ingot.core.numeric.floats import cast

Array = np.ndarray[Any, np.dtype[Any]]


def windows(words: Array, bits: int, rows: int, cols: int) -> Array:
    """Return the windows of a band, u16 [rows, cols], from its words (bytes)."""
    places = words.view("<u2").reshape(-1, cols).astype(np.int64)
    total = rows * bits
    stream = np.stack([places[bit // 16] >> bit % 16 & 1 for bit in range(total)])
    found = np.zeros((rows, cols), np.int64)
    for row in range(rows):
        for bit in range(12):
            found[row] |= stream[(row * bits + bit) % total] << bit
    return found.astype(np.uint16)


def decode(words: Array, bits: int, rows: int, values: Array, scales: Array, dtype: str) -> Array:
    """Return ``scale * value`` of a band, rounded once; ``scales`` is f32 [rows, cols], one for each weight."""
    with np.errstate(all="ignore"):
        return cast(scales * values[windows(words, bits, rows, scales.shape[1])], dtype)


def best(bits: int, values: Array, wanted: Array, weights: Array, kept: tuple[int, int] | None = None) -> float:
    """Return the least error of any stream for one column: every stream is tried.

    ``kept``: a row, and what its window holds but for the row's own symbol, in all streams that count.
    """
    total = len(wanted) * bits
    streams = np.arange(1 << total, dtype=np.int64)
    errors = np.zeros(len(streams))
    for row, value in enumerate(wanted):
        window = sum(((streams >> (row * bits + bit) % total) & 1) << bit for bit in range(12))
        errors += weights[row] * np.square(value - values[window], dtype=np.float64)
        if kept is not None and kept[0] == row:
            errors[window >> bits != kept[1]] = np.inf
    return float(errors.min())
