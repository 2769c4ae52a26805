"""NumPy arrays, which need no conversion, because codecs decode to NumPy arrays."""

from __future__ import annotations

from typing import Any

from ingot.errors import UsageError
from ingot.model.tensor import Array


def from_numpy(array: Array, device: Any = None) -> Array:
    """Return the array itself; raise ``UsageError`` for a device other than the CPU."""
    if device not in (None, "cpu"):
        raise UsageError(f"NumPy arrays are on the CPU; found device {device!r}", rule="adapter.device")
    return array
