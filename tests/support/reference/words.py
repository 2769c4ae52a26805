"""NumPy references of words of 32 bits turned (``spec/affine_words.md``)."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def turn(words: Array) -> Array:
    """Return words [rows, columns] as [columns, rows]."""
    return np.ascontiguousarray(words.T)


def from_awq(words: Array) -> Array:
    """Return AWQ's words [inputs, outputs / 8] as rows of outputs, [outputs, inputs / 8], low bits first."""
    inputs, across = words.shape
    codes = np.empty((inputs, across, 8), np.uint32)
    for lane, output in enumerate(AWQ_ORDER):
        codes[:, :, output] = words >> 4 * lane & 15
    return _joined(codes.reshape(inputs, 8 * across).T)


def to_awq(words: Array) -> Array:
    """Undo ``from_awq``."""
    outputs, across = words.shape
    shifts = 4 * np.arange(8, dtype=np.uint32)
    codes = (words[:, :, None] >> shifts & 15).reshape(outputs, 8 * across).T
    blocks = codes.reshape(8 * across, outputs // 8, 8)[:, :, list(AWQ_ORDER)]
    return _joined(blocks.reshape(8 * across, outputs))


def _joined(codes: Array) -> Array:
    shifts = 4 * np.arange(8, dtype=np.uint32)
    lanes = codes.reshape(len(codes), codes.shape[1] // 8, 8).astype(np.uint32) << shifts
    joined: Array = np.bitwise_or.reduce(lanes, axis=2)
    return joined
