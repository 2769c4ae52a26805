"""Random values, edge values and random indices, made with NumPy and without Hypothesis."""

from __future__ import annotations

from typing import Any

import numpy as np

from ingot.core.numeric.dtypes import DTYPES, numpy_dtype

Array = np.ndarray[Any, np.dtype[Any]]


def random_bits(rng: np.random.Generator, shape: tuple[int, ...], dtype: str, zeros: float = 0.0) -> Array:
    """Return an array of random bit patterns: a third are edge values, and a share of ``zeros`` is zero."""
    values = numpy_dtype(dtype)
    count = int(np.prod(shape, dtype=object))
    if DTYPES[dtype].category == "b":
        out = rng.integers(0, 2, count).astype(np.bool_)
    else:
        out = np.frombuffer(rng.bytes(count * values.itemsize), values).copy()
        edge = rng.random(count) < 1 / 3
        out[edge] = rng.choice(edge_values(dtype).view(f"V{values.itemsize}"), int(edge.sum())).view(values)
    out[rng.random(count) < zeros] = np.zeros(1, f"V{values.itemsize}").view(values)[0]
    return out.reshape(shape)


def edge_values(dtype: str) -> Array:
    """Return the edge values of an element type: zeros, smallest, largest, and for floats NaNs and infinities."""
    values = numpy_dtype(dtype)
    row = DTYPES[dtype]
    component = values.itemsize // 2 if row.category == "c" else values.itemsize
    bits = component * 8
    patterns = {0, 1, 2, (1 << bits) - 1, 1 << (bits - 1), (1 << (bits - 1)) - 1, (1 << (bits - 1)) + 1}
    if row.category in "fc" and component > 1:
        storage = DTYPES[row.storage]
        exponent = {"f64": 11, "f32": 8, "f16": 5, "bf16": 8}[storage.name]
        infinity = ((1 << exponent) - 1) << (bits - 1 - exponent)
        patterns |= {infinity, infinity | 1, infinity - 1, infinity | 1 << (bits - 2 - exponent)}
        patterns |= {pattern | 1 << (bits - 1) for pattern in patterns}
    flat = np.array(sorted(patterns), f"u{component}")
    return np.repeat(flat, values.itemsize // component).view(values)


def indices(rng: np.random.Generator, shape: tuple[int, ...], count: int = 4) -> list[Any]:
    """Return indices for arrays of a shape: an ellipsis, and ``count`` random tuples of integers and slices."""

    def key(size: int) -> int | slice:
        first, stop = sorted(rng.integers(-size - 1, size + 2, 2).tolist())
        slices = [slice(first, stop), slice(None), slice(None, None, -1), slice(first, None, 3)]
        return int(rng.integers(-size, size)) if size and rng.random() < 0.4 else slices[int(rng.integers(4))]

    keys = [tuple(key(size) for size in shape[: rng.integers(0, len(shape) + 1)]) for _ in range(count)]
    return [..., *keys, *([(..., key(shape[-1]))] if shape else [])]
