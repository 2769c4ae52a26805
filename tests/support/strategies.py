"""Hypothesis strategies for everything that a checkpoint is made of."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from ingot.core.numeric.dtypes import DTYPES, STORAGE_DTYPES
from ingot.testing.values import random_bits

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


def names() -> st.SearchStrategy[str]:
    """Tensor names: usual ones, any unicode text without surrogates, and the awkward ones."""
    usual = st.builds(
        "model.layers.{}.{}.weight".format, st.integers(0, 99), st.sampled_from(("mlp.up_proj", "self_attn.q_proj"))
    )
    text = st.text(st.characters(codec="utf-8"), max_size=40)
    return st.one_of(usual, st.sampled_from(_AWKWARD), text)
