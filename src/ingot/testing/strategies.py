"""Hypothesis strategies for everything that a checkpoint is made of."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from ingot.core.numeric.dtypes import DTYPES, STORAGE_DTYPES, numpy_dtype

Array = np.ndarray[Any, np.dtype[Any]]

FLOATS = ("f64", "f32", "f16", "bf16")
WHOLE_BYTE_DTYPES = tuple(row.name for row in DTYPES.values() if row.bits >= 8)
"""Every element type that has NumPy values: all but the packed 4- and 6-bit floats."""

_AWKWARD = (
    "",
    ".",
    "..",
    "a.b",
    "a..b",
    "/",
    "\\",
    "a/b",
    "\n",
    "a\nb",
    "\t",
    "\x00",
    "ü",
    "重み",
    "\U0001f9ca",
    "__metadata__",
)


def shapes(*, min_dims: int = 0, max_dims: int = 4, max_side: int = 9) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes with zero sizes, 0-d included."""
    return st.lists(st.integers(0, max_side), min_size=min_dims, max_size=max_dims).map(tuple)


def matrices(*, max_side: int = 40) -> st.SearchStrategy[tuple[int, int]]:
    """Two-dimensional shapes, with zero sizes."""
    return st.tuples(st.integers(0, max_side), st.integers(0, max_side))


def dtypes(*, storage_only: bool = False) -> st.SearchStrategy[str]:
    """Canonical names of element types that have NumPy values."""
    return st.sampled_from(tuple(STORAGE_DTYPES) if storage_only else WHOLE_BYTE_DTYPES)


@st.composite
def arrays(draw: st.DrawFn, shape: tuple[int, ...], dtype: str, *, sparse: bool = False) -> Array:
    """Arrays of any bit pattern: NaN payloads, infinities, subnormal numbers, -0.0.

    Bits are drawn from a seed, with edge patterns and, for ``sparse``, many zeros mixed in; a bool is 0 or 1.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return random_bits(rng, shape, dtype, zeros=0.8 if sparse else draw(st.sampled_from((0.0, 0.3))))


def random_bits(rng: np.random.Generator, shape: tuple[int, ...], dtype: str, zeros: float = 0.0) -> Array:
    """Return an array of random bit patterns, a third of them edge values, a share of ``zeros`` all-zero bits."""
    values = numpy_dtype(dtype)
    count = int(np.prod(shape, dtype=object))
    if DTYPES[dtype].kind == "b":
        out = rng.integers(0, 2, count).astype(np.bool_)
    else:
        out = np.frombuffer(rng.bytes(count * values.itemsize), values).copy()
        edge = rng.random(count) < 1 / 3
        out[edge] = rng.choice(edge_values(dtype).view(f"V{values.itemsize}"), int(edge.sum())).view(values)
    out[rng.random(count) < zeros] = np.zeros(1, f"V{values.itemsize}").view(values)[0]
    return out.reshape(shape)


def edge_values(dtype: str) -> Array:
    """Return the edges of an element type by bits: zeros, smallest, largest, and (for floats) NaNs and infinities."""
    values = numpy_dtype(dtype)
    row = DTYPES[dtype]
    component = values.itemsize // 2 if row.kind == "c" else values.itemsize
    bits = component * 8
    patterns = {0, 1, 2, (1 << bits) - 1, 1 << (bits - 1), (1 << (bits - 1)) - 1, (1 << (bits - 1)) + 1}
    if row.kind in "fc" and component > 1:
        storage = DTYPES[row.storage]
        exponent = {"f64": 11, "f32": 8, "f16": 5, "bf16": 8}[storage.name]
        infinity = ((1 << exponent) - 1) << (bits - 1 - exponent)
        patterns |= {infinity, infinity | 1, infinity - 1, infinity | 1 << (bits - 2 - exponent)}
        patterns |= {pattern | 1 << (bits - 1) for pattern in patterns}
    flat = np.array(sorted(patterns), f"u{component}")
    return np.repeat(flat, values.itemsize // component).view(values)


def names() -> st.SearchStrategy[str]:
    """Tensor names: usual ones, any unicode text without surrogates, and the awkward ones."""
    usual = st.builds(
        "model.layers.{}.{}.weight".format, st.integers(0, 99), st.sampled_from(("mlp.up_proj", "self_attn.q_proj"))
    )
    text = st.text(st.characters(codec="utf-8"), max_size=40)
    return st.one_of(usual, st.sampled_from(_AWKWARD), text)


def indices(rng: np.random.Generator, shape: tuple[int, ...], count: int = 4) -> list[Any]:
    """Return some indices of a shape: integers, slices, steps, an ellipsis, everything."""

    def key(size: int) -> int | slice:
        first, stop = sorted(rng.integers(-size - 1, size + 2, 2).tolist())
        kinds = [slice(first, stop), slice(None), slice(None, None, -1), slice(first, None, 3)]
        return int(rng.integers(-size, size)) if size and rng.random() < 0.4 else kinds[int(rng.integers(4))]

    keys = [tuple(key(size) for size in shape[: rng.integers(0, len(shape) + 1)]) for _ in range(count)]
    return [..., *keys, *([(..., key(shape[-1]))] if shape else [])]
