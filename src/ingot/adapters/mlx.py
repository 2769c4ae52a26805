"""MLX: NumPy arrays to ``mlx.core.array``."""

from __future__ import annotations

from typing import Any

import numpy as np

from ingot.core.dtypes import dtype as resolve_dtype
from ingot.core.extras import require
from ingot.errors import UnsupportedError, UsageError
from ingot.model.tensor import Array


def from_numpy(array: Array, device: Any = None) -> Any:
    """Return an ``mlx.core.array`` of the same values and element type.

    MLX arrays live in unified memory and belong to no device: ``device`` may be None, ``"cpu"`` or ``"gpu"``.

    Raises
    ------
    UnsupportedError
        ``adapter.dtype``: MLX has no such element type (8-bit floats, complex128).
    """
    mx = require("mlx.core", "mlx")

    if device not in (None, "cpu", "gpu"):
        raise UsageError(f"expected device 'cpu' or 'gpu' for MLX, found {device!r}", rule="adapter.device")
    row = resolve_dtype(array.dtype)
    if row.name == "bf16":
        return mx.array(array.view(np.uint16)).view(mx.bfloat16)
    target = getattr(mx, "bool_" if row.kind == "b" else row.numpy, None)
    if target is None:
        raise UnsupportedError(f"MLX has no element type for {row.name}", rule="adapter.dtype")
    return mx.array(array, dtype=target)
