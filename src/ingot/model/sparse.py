"""Sparse tensors as the arrays that they store: what codecs hand to other libraries' sparse objects, and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ingot.core.registry import Registry
from ingot.model.layouts.sparse import CooLayout, CsrLayout

if TYPE_CHECKING:
    pass

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class SparseArrays:
    """The values that a sparse tensor stores, and where they belong.

    Parameters
    ----------
    layout : CsrLayout or CooLayout
        Tells what ``positions`` are, and the element type.
    shape : tuple of int
    values : array
        In row-major order of their positions.
    positions : tuple of i64 arrays
        Of ``CsrLayout`` row pointers and columns, of ``CooLayout`` one array per dimension.
    """

    layout: CsrLayout | CooLayout
    shape: tuple[int, ...]
    values: Array
    positions: tuple[Array, ...]


# Text only, as of the other frameworks: adapters import model, never the other way round.
TO_SPARSE: Registry[Callable[[SparseArrays], Any]] = Registry(
    "sparse framework",
    (
        ("scipy", "ingot.runtime.arrays.scipy:from_arrays"),
        ("torch", "ingot.runtime.arrays.torch_sparse:from_arrays"),
    ),
)
"""What makes a library's sparse object of arrays."""

FROM_SPARSE: Registry[Callable[[Any], SparseArrays | None]] = Registry(
    "sparse framework",
    (
        ("scipy.sparse", "ingot.runtime.arrays.scipy:to_arrays"),
        ("torch", "ingot.runtime.arrays.torch_sparse:to_arrays"),
    ),
)
"""What makes arrays of a sparse object, by the module that must have been imported where there is one; None for any
other object."""
