"""Arrays of the four float types on their way into native kernels, and casts between them."""

from __future__ import annotations

from typing import Any

import numpy as np

from ingot.core.numeric.dtypes import dtype, numpy_dtype
from ingot.core.runtime import native
from ingot.errors import UnsupportedError

Array = np.ndarray[Any, np.dtype[Any]]

FLOATS = ("f32", "f16", "bf16", "f64")

LARGEST = {"f16": 65504.0, "bf16": float.fromhex("0x1.fep127"), "f32": float.fromhex("0x1.fffffep127")}
"""The largest finite number of each type that decoders write."""

TINY = {"f16": 2.0**-14, "bf16": 2.0**-126, "f32": 2.0**-126}
"""The smallest number of each type that has all its bits."""

SMALLEST = {
    "f16": 2.0**-24,
    "bf16": 2.0**-133,
    "f32": 2.0**-149,
    "f8_e4m3fn": 2.0**-9,
    "f8_e5m2": 2.0**-16,
    "f8_e8m0fnu": 2.0**-127,
}
"""The smallest positive number of each type."""


def float_name(array: Array) -> str:
    """Return the canonical name of an array's element type; ``UnsupportedError`` unless it is one of ``FLOATS``."""
    name = dtype(array.dtype).name
    if name not in FLOATS:
        raise UnsupportedError(f"expected element type {', '.join(FLOATS)}, found {name}", rule="float.dtype")
    return name


def as_bits(array: Array) -> Array:
    """Return ``array`` as kernels take it: C order, aligned, f16 and bf16 as uint16; a view where it is so already."""
    flags = array.flags
    plain = array if flags.c_contiguous and flags.aligned else np.require(array, requirements=("C", "A"))
    return plain.view(np.uint16) if plain.dtype.itemsize == 2 else plain


def written(out: Array) -> Array:
    """Return ``out`` as kernels write to it: always a view. ``ValueError`` where that would take a copy."""
    if not out.flags.carray:
        raise ValueError("expected a writable, aligned output in C order")
    return out.view(np.uint16) if out.dtype.itemsize == 2 else out


def cast_into(array: Array, out: Array) -> None:
    """Round ``array`` to the element type of ``out`` (C order, as many elements), once, to nearest even.

    Too large values become infinite, a NaN stays one: callers that mind look before.
    """
    target = written(out)
    native.kernels.cast(as_bits(array), float_name(array), target, float_name(out))


def cast(array: Array, target: str) -> Array:
    """Return ``array`` rounded to the float type ``target``, in a new array; see ``cast_into``."""
    out = np.empty(array.shape, numpy_dtype(target))
    cast_into(array, out)
    return out
