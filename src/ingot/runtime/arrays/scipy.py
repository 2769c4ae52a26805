"""SciPy: sparse tensors to ``scipy.sparse`` arrays and back."""

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
        ``adapter.dtype``: SciPy has no sparse arrays of the element type; ``adapter.layout``: nor of no dimensions.
    """
    sparse = require("scipy.sparse", "scipy")

    kind = arrays.values.dtype
    if kind.kind not in "biufc" or kind == np.float16:
        name = resolve_dtype(kind).name
        raise UnsupportedError(
            f"SciPy has no sparse arrays of {name}: ask for dtype={_WIDE.get(name, 'f32')!r}", rule="adapter.dtype"
        )
    if isinstance(arrays.layout, CsrLayout):
        indptr, indices = arrays.positions
        return sparse.csr_array((arrays.values, indices, indptr), shape=arrays.shape)
    if not arrays.shape:
        raise UnsupportedError("SciPy has no sparse arrays without dimensions", rule="adapter.layout")
    made = sparse.coo_array((arrays.values, arrays.positions), shape=arrays.shape)
    made.has_canonical_format = True
    return made


def to_arrays(value: Any) -> SparseArrays | None:
    """Return the stored values of a ``scipy.sparse`` array or matrix, None for anything else.

    Lists of coordinates and what has other than two dimensions become ``sparse_coo``, all else ``sparse_csr``. Values
    of one position are added, as SciPy means them; zeros that are stored stay.
    """
    sparse = require("scipy.sparse", "scipy")

    if not sparse.issparse(value):
        return None
    listed = value.format == "coo" or value.ndim != 2
    made = value.tocoo(copy=False) if listed else value.tocsr(copy=False)
    if not made.has_canonical_format:
        made = made.copy()
        made.sum_duplicates()
    name = resolve_dtype(made.dtype).name
    positions = made.coords if listed else (made.indptr, made.indices)
    layout = CooLayout(name) if listed else CsrLayout(name)
    return SparseArrays(layout, made.shape, made.data, tuple(np.asarray(each, np.int64) for each in positions))
