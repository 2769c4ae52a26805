"""NumPy reference of the triple-bitmap encoding (``spec/tca_tbe.md``), tile by tile."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

SIDE = 64


def window(counts: Array) -> int:
    """Return the published ``start_exp`` of the window of 7 exponents with the largest mass, the lowest on ties."""
    masses = [int(counts[first : first + 7].sum()) for first in range(250)]
    return masses.index(max(masses)) - 1


def scan_order() -> tuple[Array, Array]:
    """Return row and column, in their 64 x 64 tile, of the elements in storage order: [64 words, 64 positions] each."""
    rows, cols = [], []
    for median in range(4):  # 16 x 64
        for group in range(4):  # 16 x 16, along the columns
            for down, right in ((0, 0), (8, 0), (0, 8), (8, 8)):  # 8 x 8, by columns of the group
                rows.append([median * 16 + down + position // 8 for position in range(64)])
                cols.append([group * 16 + right + position % 8 for position in range(64)])
    return np.array(rows), np.array(cols)


def encode(values: Array, start: int) -> dict[str, Array]:
    """Return the parts of a matrix of bf16 bits (u16) with codes 1..7 = exponent - start."""
    tall, wide = (-(-size // SIDE) * SIDE for size in values.shape)
    padded = np.full((tall, wide), (start + 1) << 7, np.uint16)
    padded[: values.shape[0], : values.shape[1]] = values
    rows, cols = scan_order()
    counts: list[tuple[int, int]] = []
    pieces: dict[str, list[Array]] = {role: [] for role in ("bitmap1", "bitmap2", "bitmap3", "high", "fallback")}
    for top in range(0, tall if values.size else 0, SIDE):
        for left in range(0, wide, SIDE):
            tile = padded[top + rows, left + cols]
            code = (tile >> 7 & 0xFF).astype(np.int64) - start
            code[(code < 1) | (code > 7)] = 0
            for plane in range(3):
                bits = (code >> plane & 1).astype(np.uint64)
                pieces[f"bitmap{plane + 1}"].append((bits << np.arange(64, dtype=np.uint64)).sum(1, dtype=np.uint64))
            high = (tile >> 8 & 0x80 | tile & 0x7F).astype(np.uint8)[code > 0]
            fallback = tile[code == 0]
            high, fallback = (np.append(a, np.zeros(-len(a) % n, a.dtype)) for a, n in ((high, 16), (fallback, 8)))
            counts.append((len(high), len(fallback)))
            pieces["high"].append(high)
            pieces["fallback"].append(fallback)
    dtypes = {"high": np.uint8, "fallback": np.uint16}
    parts = {
        role: np.concatenate([np.empty(0, dtypes.get(role, np.uint64)), *pieces_of_role])
        for role, pieces_of_role in pieces.items()
    }
    return {"counts": np.array(counts, np.uint16).reshape(-1, 2), **parts}


def decode(parts: dict[str, Array], start: int, shape: tuple[int, int]) -> Array:
    """Return the matrix of bf16 bits."""
    tall, wide = (-(-size // SIDE) * SIDE for size in shape)
    padded = np.zeros((tall, wide), np.uint16)
    rows, cols = scan_order()
    high_at, fallback_at = 0, 0
    places = np.arange(64, dtype=np.uint64)
    for tile in range(tall * wide // SIDE**2):
        words = slice(tile * 64, tile * 64 + 64)
        code = np.zeros((64, 64), np.int64)
        for plane in range(3):
            bits = parts[f"bitmap{plane + 1}"][words, None] >> places & np.uint64(1)
            code |= (bits << np.uint64(plane)).astype(np.int64)
        high = parts["high"][high_at : high_at + int((code > 0).sum())].astype(np.int64)
        values = np.empty((64, 64), np.uint16)
        values[code > 0] = (high & 0x80) << 8 | high & 0x7F | ((code[code > 0] + start) & 0xFF) << 7
        values[code == 0] = parts["fallback"][fallback_at : fallback_at + int((code == 0).sum())]
        top, left = divmod(tile, wide // SIDE)
        padded[top * SIDE + rows, left * SIDE + cols] = values
        high_at, fallback_at = high_at + int(parts["counts"][tile][0]), fallback_at + int(parts["counts"][tile][1])
    return padded[: shape[0], : shape[1]].copy()
