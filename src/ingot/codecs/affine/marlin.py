"""The order of codes with 2:4 sparsity in compressed-tensors' ``marlin-24``.

Rows of the matrix come in blocks of 64, and each block has its own words, positions and scales. Sources:
compressed-tensors 0.12.2, ``utils/permutations_24.py``, ``utils/semi_structured_conversions.py`` (CUTLASS
``reorder_meta``).
"""

from __future__ import annotations

from functools import cache

import numpy as np

from ingot.errors import CodecError
from ingot.model.tensor import Array

BLOCK = 64
_TILE = 16  # words cover tiles of 16 inputs and 16 outputs
_INTERLEAVE = {4: (0, 2, 4, 6, 1, 3, 5, 7), 8: (0, 2, 1, 3)}
_PAIRS = np.array([low | high << 2 for low in range(4) for high in range(low + 1, 4)], np.uint8)
_SCALES = np.array([8 * row + offset for row in range(8) for offset in (0, 4, 1, 5, 2, 6, 3, 7)])


@cache
def _code_positions(bits: int) -> Array:
    """Return the stored position of each code of 16 inputs of 64 outputs, in order of tiles of 16 x 16."""
    order = []
    for lane in range(32):
        column = lane // 4
        inputs = [2 * (lane % 4) + step for step in (0, 1, 8, 9)]
        first = [16 * row + column // 2 * 256 + 8 * (column % 2) + 4 * half for half in (0, 1) for row in inputs]
        for more in range(4):
            order += [position + more for position in first]
    stored = np.array(order).reshape(-1, len(_INTERLEAVE[bits]))[:, _INTERLEAVE[bits]].reshape(-1)
    positions: Array = np.argsort(stored)
    return positions


@cache
def _meta_positions() -> Array:
    """Return the positions of the metadata of 64 rows and two columns among 128 entries; [rows, 2]."""
    row, column = np.meshgrid(np.arange(BLOCK), np.arange(2), indexing="ij")
    to = row % 2 * 2 + row % 8 // 4 + row % 4 // 2 * 32 + row // 8 * 4
    swap = ((to % 2 == 0) & (column == 1)).astype(np.int64) - ((to % 2 == 1) & (column == 0))
    positions: Array = (to + swap) * 2 + (column - swap)
    return positions


def marlin_codes(stored: Array, meta: Array, bits: int, location: str) -> Array:
    """Return codes u8 [rows, columns] of blocks of 64 rows; pruned codes are the middle code, whose value is 0.

    ``stored`` are codes in the order of the words, u8 [columns / 32, 16 * rows], ``meta`` u16 [columns / 32, 2 * rows].
    Raises ``CodecError`` ``affine_words.meta`` unless each four has two positions in ascending order.
    """
    lines, rows = len(stored), meta.shape[1] // 2
    tiles = stored.reshape(lines, rows // BLOCK, -1)[:, :, _code_positions(bits)].reshape(
        lines, rows // _TILE, _TILE, _TILE
    )
    selected = tiles.transpose(1, 3, 0, 2).reshape(rows, -1, 2)
    entries = meta.reshape(lines, rows // BLOCK, 2 * BLOCK)[:, :, _meta_positions()]
    positions = entries.transpose(1, 2, 0, 3).reshape(rows, -1)
    fours = (positions[:, :, None] >> np.arange(0, 16, 4, dtype=np.uint16) & np.uint16(15)).astype(np.uint8)
    fours = fours.reshape(rows, -1)
    if not np.isin(fours, _PAIRS).all():
        raise CodecError("affine_words.meta", "expected two positions of four in order, found others", where=location)
    codes = np.full((rows, fours.shape[1], 4), 1 << (bits - 1), np.uint8)
    np.put_along_axis(codes, np.stack([fours & 3, fours >> 2], axis=2).astype(np.intp), selected, axis=2)
    return codes.reshape(rows, -1)


def marlin_scales(stored: Array, *, grouped: bool) -> Array:
    """Return stored scales in order of rows, [rows, groups] of blocks of rows; only ``grouped`` scales are permuted."""
    if not grouped:
        return stored
    out = np.empty_like(stored).reshape(-1, BLOCK, stored.shape[1])
    out[:, _SCALES] = stored.reshape(out.shape)
    return out.reshape(stored.shape)
