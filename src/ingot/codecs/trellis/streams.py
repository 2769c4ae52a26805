"""Packing of windows into streams.

Rows are divided into bands. A stream consists of the symbols of one column of a band, from its first row to its last.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from statistics import NormalDist

import numpy as np

from ingot.model.layouts.trellis import WORD, TrellisLayout
from ingot.model.tensor import Array

WINDOWS = 1 << 12
STEPS = {2: 3043, 3: 1543, 4: 263}
"""For each number of bits, the odd factor that maps a window to the rank of its value."""


@cache
def values_of(bits: int) -> Array:
    """Return the values of the 4096 windows: f32 values that f16 can represent, read-only.

    The value of window w is the quantile ``(r + 1/2) / 4096`` of the normal distribution; ``r = STEPS[bits] * w mod
    4096``.
    """
    normal = NormalDist()
    half = np.array([normal.inv_cdf((rank + 0.5) / WINDOWS) for rank in range(WINDOWS // 2, WINDOWS)])
    ranked = np.concatenate([-half[::-1], half]).astype(np.float16).astype(np.float32)
    values: Array = ranked[np.arange(WINDOWS) * STEPS[bits] % WINDOWS]
    values.flags.writeable = False
    return values


def bands_of(rows: int, inner: int, band: int) -> Iterator[tuple[int, int]]:
    """Yield the first row and the row after the last of each band.

    Each ``inner`` consecutive rows are a matrix with separate bands.
    """
    for first in range(0, rows, max(inner, 1)):
        for start in range(first, first + inner, band):
            yield start, min(start + band, first + inner)


def band_for(inner: int, max_rows: int = 256) -> int:
    """Return the height of the bands for a matrix of ``inner`` rows: about equal, at most ``max_rows``."""
    count = max(1, -(-inner // max_rows))
    return WORD * max(1, -(-inner // (WORD * count)))


def pack_band(windows: Array, layout: TrellisLayout) -> Array:
    """Pack the windows of a band, u16 [cols, rows], into streams of bytes.

    The first words of all columns come first, in the order of the columns, then the second words, and so on.
    """
    cols, rows = windows.shape
    bits, blocks = layout.bits, -(-rows // WORD)
    symbols = np.zeros((blocks * WORD, cols), np.uint64)
    symbols[:rows] = (windows & ((1 << bits) - 1)).T
    packed = np.zeros((blocks, cols), np.uint64)
    for row in range(WORD):
        packed |= symbols[row::WORD] << np.uint64(row * bits)
    # Sixteen symbols fill as many words as a symbol has bits.
    words = np.stack([packed >> np.uint64(WORD * index) for index in range(bits)], 1).astype("<u2")
    return words.reshape(-1, cols)[: layout.stream_words(rows)].reshape(-1).view(np.uint8)
