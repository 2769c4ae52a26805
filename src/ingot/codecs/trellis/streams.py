"""Windows to streams: bands of rows, the symbols of each column one after the other."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ingot.model.layouts.trellis import WORD, TrellisLayout
from ingot.model.tensor import Array


def bands_of(rows: int, inner: int, band: int) -> Iterator[tuple[int, int]]:
    """Yield the first row of each band and the row behind its last; ``inner`` rows are a matrix with its own bands."""
    for first in range(0, rows, max(inner, 1)):
        for start in range(first, first + inner, band):
            yield start, min(start + band, first + inner)


def band_for(inner: int, most: int = 256) -> int:
    """Return the rows of a band of a matrix of ``inner`` rows: no more than ``most``, all bands about as high."""
    count = max(1, -(-inner // most))
    return WORD * max(1, -(-inner // (WORD * count)))


def pack_band(windows: Array, layout: TrellisLayout) -> Array:
    """Return the streams of a band, windows u16 [cols, rows], as bytes: words by place and then by column."""
    cols, rows = windows.shape
    bits, blocks = layout.bits, -(-rows // WORD)
    symbols = np.zeros((blocks * WORD, cols), np.uint64)
    symbols[:rows] = (windows & ((1 << bits) - 1)).T
    held = np.zeros((blocks, cols), np.uint64)
    for row in range(WORD):
        held |= symbols[row::WORD] << np.uint64(row * bits)
    # Sixteen symbols are as many words as a symbol has bits.
    words = np.stack([held >> np.uint64(WORD * place) for place in range(bits)], 1).astype("<u2")
    return words.reshape(-1, cols)[: layout.places(rows)].reshape(-1).view(np.uint8)
