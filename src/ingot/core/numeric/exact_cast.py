"""Exact storage of floats in a wider type, for containers that lack the original type.

bf16 is the upper half of f32 and f8_e5m2 the upper half of f16: these need no arithmetic, and a NaN keeps its payload.
For all other pairs each value is checked.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ingot.core.numeric.dtypes import numpy_dtype

Array = np.ndarray[Any, np.dtype[Any]]

EXACT_WIDER_DTYPES: dict[str, tuple[str, ...]] = {
    "bf16": ("f16", "f32"),
    "f8_e4m3fn": ("f16",),
    "f8_e5m2": ("f16",),
    "f8_e4m3fnuz": ("f16",),
    "f8_e5m2fnuz": ("f16",),
    "f8_e8m0fnu": ("f32",),
}
"""Types that can store a type's values, smallest first. Only for bf16 in f16 this depends on the values."""


def is_always_exact(source: str, wider: str) -> bool:
    """Return whether ``wider``, one of ``EXACT_WIDER_DTYPES[source]``, can store all values of ``source``."""
    return (source, wider) != ("bf16", "f16")


def widen(values: Array, source: str, wider: str) -> Array | None:
    """Return values of type ``source`` (1-D, native) in type ``wider``; None if ``narrow`` cannot restore all bits."""
    if (source, wider) == ("bf16", "f32"):
        return (values.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if (source, wider) == ("f8_e5m2", "f16"):
        return (values.view(np.uint8).astype(np.uint16) << 8).view(np.float16)
    with np.errstate(all="ignore"):  # narrow detects overflow
        widened = values.astype(np.float32).astype(numpy_dtype(wider))
    back = narrow(widened, source)
    return widened if back is not None and np.array_equal(_bits(back), _bits(values)) else None


def narrow(values: Array, source: str) -> Array | None:
    """Return the values of ``widen`` in the original type ``source``; None if one is not a value of that type."""
    with np.errstate(all="ignore"):  # signalling NaN
        if source == "bf16":
            bits = values.astype(np.float32).view(np.uint32)
            return None if (bits & 0xFFFF).any() else (bits >> 16).astype(np.uint16).view(numpy_dtype(source))
        if source == "f8_e5m2":
            half = values.view(np.uint16)
            return None if (half & 0xFF).any() else (half >> 8).astype(np.uint8).view(numpy_dtype(source))
        out = values.astype(numpy_dtype(source))
        back = out.astype(np.float32).astype(values.dtype)
    same = (_bits(back) == _bits(values)) | (np.isnan(back) & np.isnan(values))
    return out if bool(same.all()) else None


def _bits(values: Array) -> Array:
    return values.view(f"u{values.dtype.itemsize}")
