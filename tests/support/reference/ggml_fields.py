"""Numbers in blocks of bytes, as ggml lays them: shared by what decodes them."""

from __future__ import annotations

import numpy as np

from ingot.core.numeric.dtypes import from_file
from ingot.model.tensor import Array


def numbers(blocks: Array, start: int, stop: int, dtype: str) -> Array:
    """Return the little-endian numbers in bytes ``start`` to ``stop`` of each block: [blocks, numbers]."""
    return from_file(np.ascontiguousarray(blocks[:, start:stop]), dtype)


def f16(blocks: Array, start: int) -> Array:
    """Return the f16 at ``start`` of each block, in f32: [blocks, 1]."""
    return numbers(blocks, start, start + 2, "f16").astype(np.float32)
