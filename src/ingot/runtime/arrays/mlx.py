"""Conversion between NumPy arrays and ``mlx.core.array``."""

from __future__ import annotations

from typing import Any

import numpy as np

from ingot.core.border import require
from ingot.core.numeric.dtypes import dtype as resolve_dtype
from ingot.core.numeric.dtypes import native_order, numpy_dtype
from ingot.errors import UnsupportedError, UsageError
from ingot.model.tensor import Array


def from_numpy(array: Array, device: Any = None) -> Any:
    """Return an ``mlx.core.array`` of the same values and element type.

    MLX arrays are in unified memory and belong to no device: ``device`` may be None, ``"cpu"`` or ``"gpu"``.

    Raises
    ------
    UnsupportedError
        ``adapter.dtype``: MLX has no such element type (8-bit floats, complex128).
    """
    mx = require("mlx.core", "mlx")

    if device not in (None, "cpu", "gpu"):
        raise UsageError(f"expected device 'cpu' or 'gpu' for MLX, found {device!r}", rule="adapter.device")
    row = resolve_dtype(array.dtype)
    array = native_order(array)
    if row.name == "bf16":
        return mx.array(array.view(np.uint16)).view(mx.bfloat16)
    target = getattr(mx, "bool_" if row.category == "b" else row.numpy, None)
    if target is None:
        raise UnsupportedError(f"MLX has no element type for {row.name}", rule="adapter.dtype")
    return mx.array(array, dtype=target)


def to_numpy(array: Any) -> Array:
    """Return an ``mlx.core.array`` as a NumPy array of the same values and element type. This evaluates the array.

    Raises ``MissingExtraError`` if MLX is not installed.
    """
    mx = require("mlx.core", "mlx")
    if array.dtype == mx.bfloat16:
        return np.array(array.view(mx.uint16)).view(numpy_dtype("bf16"))
    return np.array(array)
