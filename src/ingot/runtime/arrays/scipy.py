"""Conversion between sparse tensors and ``scipy.sparse`` arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from ingot.core.border import require
from ingot.core.numeric.dtypes import dtype as resolve_dtype
from ingot.errors import UnsupportedError
from ingot.model.layouts.sparse import CooLayout, CsrLayout
from ingot.model.sparse import SparseArrays

_WIDE = {"f16": "f32", "bf16": "f32"}


def from_arrays(arrays: SparseArrays) -> Any:
    """Return a ``csr_array`` or ``coo_array`` of the same values, in canonical form.

    Raises
    ------
    UnsupportedError
        ``adapter.dtype``: SciPy has no sparse arrays of the element type; ``adapter.layout``: the tensor is a scalar.
    """
    sparse = require("scipy.sparse", "scipy")

    dtype = arrays.values.dtype
    if dtype.kind not in "biufc" or dtype == np.float16:
        name = resolve_dtype(dtype).name
        raise UnsupportedError(
            f"SciPy has no sparse arrays of {name}: ask for dtype={_WIDE.get(name, 'f32')!r}", rule="adapter.dtype"
        )
    if isinstance(arrays.layout, CsrLayout):
        indptr, indices = arrays.positions
        return sparse.csr_array((arrays.values, indices, indptr), shape=arrays.shape)
    if not arrays.shape:
        raise UnsupportedError("SciPy has no sparse arrays without dimensions", rule="adapter.layout")
    array = sparse.coo_array((arrays.values, arrays.positions), shape=arrays.shape)
    array.has_canonical_format = True
    return array


def to_arrays(value: Any) -> SparseArrays | None:
    """Return the stored values of a ``scipy.sparse`` array or matrix; None for any other value.

    COO arrays, and all arrays that do not have exactly two dimensions, become ``sparse_coo``. All other arrays become
    ``sparse_csr``. Duplicate positions are summed, as SciPy defines them. Stored zeros stay.
    """
    sparse = require("scipy.sparse", "scipy")

    if not sparse.issparse(value):
        return None
    is_coo = value.format == "coo" or value.ndim != 2
    array = value.tocoo(copy=False) if is_coo else value.tocsr(copy=False)
    if not array.has_canonical_format:
        array = array.copy()
        array.sum_duplicates()
    name = resolve_dtype(array.dtype).name
    positions = array.coords if is_coo else (array.indptr, array.indices)
    layout = CooLayout(name) if is_coo else CsrLayout(name)
    return SparseArrays(layout, array.shape, array.data, tuple(np.asarray(item, np.int64) for item in positions))
