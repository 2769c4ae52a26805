"""Packing of windows into streams: bands of rows, the symbols of each column one after the other."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ingot.model.layouts.trellis import WORD, TrellisLayout
from ingot.model.tensor import Array


def bands_of(rows: int, inner: int, band: int) -> Iterator[tuple[int, int]]:
    """Yield the first row of each band and the row after its last.

    Each ``inner`` rows are a matrix with its own bands.
    """
    for first in range(0, rows, max(inner, 1)):
        for start in range(first, first + inner, band):
            yield start, min(start + band, first + inner)


def band_for(inner: int, max_rows: int = 256) -> int:
    """Return the height of the bands of a matrix of ``inner`` rows: at most ``max_rows``, and about equal."""
    count = max(1, -(-inner // max_rows))
    return WORD * max(1, -(-inner // (WORD * count)))


def pack_band(windows: Array, layout: TrellisLayout) -> Array:
    """Return the streams of a band, windows u16 [cols, rows], as bytes: words by position and then by column."""
    cols, rows = windows.shape
    bits, blocks = layout.bits, -(-rows // WORD)
    symbols = np.zeros((blocks * WORD, cols), np.uint64)
    symbols[:rows] = (windows & ((1 << bits) - 1)).T
    packed = np.zeros((blocks, cols), np.uint64)
    for row in range(WORD):
        packed |= symbols[row::WORD] << np.uint64(row * bits)
    # The number of words of sixteen symbols is the number of bits of a symbol.
    words = np.stack([packed >> np.uint64(WORD * index) for index in range(bits)], 1).astype("<u2")
    return words.reshape(-1, cols)[: layout.places(rows)].reshape(-1).view(np.uint8)
