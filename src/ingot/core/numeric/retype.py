"""Floats kept exactly in a wider type, for containers that have no name for their own: there and back, bit for bit.

bf16 is the upper half of f32 and f8_e5m2 the upper half of f16, so these need no arithmetic at all, and a NaN keeps its
payload. Every other pair is proven value by value.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ingot.core.numeric.dtypes import numpy_dtype

Array = np.ndarray[Any, np.dtype[Any]]

HOLDERS: dict[str, tuple[str, ...]] = {
    "bf16": ("f16", "f32"),
    "f8_e4m3fn": ("f16",),
    "f8_e5m2": ("f16",),
    "f8_e4m3fnuz": ("f16",),
    "f8_e5m2fnuz": ("f16",),
    "f8_e8m0fnu": ("f32",),
}
"""Types that may hold a type's values, smallest first. Only bf16 in f16 depends on the values."""


def always_held(source: str, holder: str) -> bool:
    """Whether ``holder``, one of ``HOLDERS[source]``, holds every value of ``source``."""
    return (source, holder) != ("bf16", "f16")


def widen(values: Array, source: str, holder: str) -> Array | None:
    """Return values of type ``source`` (1-D, native) in ``holder``; None unless each comes back bit for bit."""
    if (source, holder) == ("bf16", "f32"):
        return (values.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if (source, holder) == ("f8_e5m2", "f16"):
        return (values.view(np.uint8).astype(np.uint16) << 8).view(np.float16)
    with np.errstate(all="ignore"):  # overflow is seen on the way back
        wide = values.astype(np.float32).astype(numpy_dtype(holder))
    back = narrow(wide, source)
    return wide if back is not None and np.array_equal(_bits(back), _bits(values)) else None


def narrow(values: Array, source: str) -> Array | None:
    """Undo ``widen``: return the values in type ``source``; None where one is no value of that type."""
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
