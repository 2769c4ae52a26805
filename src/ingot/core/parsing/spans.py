"""Many short spans of bytes, looked at together in native code."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingot.core.runtime import native

Bytes = NDArray[np.uint8]
Places = NDArray[np.int64]


def same(data: Bytes, starts: Places, rows: NDArray[Any]) -> NDArray[np.bool_]:
    """Return which rows are, byte by byte, what lies at their places in ``data``; none that ends behind it is."""
    found = np.empty(starts.size, bool)
    native.kernels.same(
        data.data, np.ascontiguousarray(starts), np.ascontiguousarray(rows).reshape(-1).view(np.uint8), found
    )
    return found


def zeros(data: Bytes, starts: Places, lengths: Places) -> bool:
    """Whether these spans lie in ``data`` and hold nothing but zeros."""
    return native.kernels.zeros(data.data, np.ascontiguousarray(starts), np.ascontiguousarray(lengths))
