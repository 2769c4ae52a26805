"""Sparse tensors as plain arrays, for conversion to and from the sparse objects of other libraries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ingot.core.registry import Registry
from ingot.model.layouts.sparse import CooLayout, CsrLayout

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class SparseArrays:
    """The stored values of a sparse tensor and their positions.

    Parameters
    ----------
    layout : CsrLayout or CooLayout
        The layout determines the meaning of ``positions`` and the element type.
    shape : tuple of int
    values : array
        The stored values in row-major order of their positions.
    positions : tuple of i64 arrays
        For ``CsrLayout`` the row pointers and the columns; for ``CooLayout`` one array per dimension.
    """

    layout: CsrLayout | CooLayout
    shape: tuple[int, ...]
    values: Array
    positions: tuple[Array, ...]


# Names only: the modules import this package, not the reverse.
TO_SPARSE: Registry[Callable[[SparseArrays], Any]] = Registry(
    "sparse framework",
    (
        ("scipy", "ingot.runtime.arrays.scipy:from_arrays"),
        ("torch", "ingot.runtime.arrays.torch_sparse:from_arrays"),
    ),
)
"""Functions that create a library's sparse object from arrays."""

FROM_SPARSE: Registry[Callable[[Any], SparseArrays | None]] = Registry(
    "sparse framework",
    (
        ("scipy.sparse", "ingot.runtime.arrays.scipy:to_arrays"),
        ("torch", "ingot.runtime.arrays.torch_sparse:to_arrays"),
    ),
)
"""Functions that return the arrays of a sparse object, or None for any other object. The key of a function is the
module that defines the sparse objects. The function is called only if this module is imported."""
