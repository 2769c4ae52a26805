"""A state dict seen as NumPy arrays that share its memory, to be changed in place."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from ingot.core.dtypes import dtype as resolve_dtype
from ingot.errors import UnsupportedError
from ingot.model.tensor import FRAMEWORKS, TO_NUMPY, Array


def shared_array(name: str, value: Any) -> Array:
    """Return ``value`` as an array of the same memory, in C order, that can be written.

    Raises ``UnsupportedError`` ``delta.layout`` for anything else: another framework, device or order, memory that is
    read-only.
    """
    if is_torch(value):
        if value.device.type != "cpu" or not value.is_contiguous():
            raise _layout(name, f"one on {value.device.type}" if value.device.type != "cpu" else "a strided one")
        array = TO_NUMPY["pt"](value)
    elif isinstance(value, np.ndarray):
        array = value
    else:
        raise _layout(name, type(value).__name__)
    if not (array.flags.c_contiguous and array.flags.writeable and array.flags.aligned and array.dtype.isnative):
        raise _layout(name, "a strided, unaligned, byte-swapped or read-only one")
    return array


def element_type(array: Array) -> str:
    """Return the canonical name of an array's element type."""
    return resolve_dtype(array.dtype).name


def is_torch(value: Any) -> bool:
    """Whether this is a torch tensor; torch is not imported to find out."""
    return "torch" in sys.modules and isinstance(value, sys.modules["torch"].Tensor)


def like(state: Mapping[str, Any], array: Array) -> Any:
    """Return an array of one's own as what the state dict holds: torch tensors or NumPy arrays."""
    torch = any(is_torch(value) for value in state.values())
    return FRAMEWORKS["pt" if torch else "np"](array, None)


def address(array: Array) -> tuple[int, int]:
    """Return where an array's bytes begin and end."""
    start = int(array.ctypes.data)
    return start, start + array.nbytes


def _layout(name: str, found: str) -> UnsupportedError:
    return UnsupportedError(
        f"expected a writable NumPy array or CPU torch tensor in C order to change in place, found {found}; "
        "ingot.numpy.load_file and ingot.torch.load_file give such ones",
        rule="delta.layout",
        where=name,
    )
