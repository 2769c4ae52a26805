"""Conversion between sparse tensors and ``torch.sparse_csr`` or ``torch.sparse_coo`` tensors."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ingot.core.border import require
from ingot.core.numeric.dtypes import dtype as resolve_dtype
from ingot.errors import UnsupportedError
from ingot.model.layouts.sparse import CooLayout, CsrLayout
from ingot.model.sparse import SparseArrays
from ingot.runtime.arrays.torch import from_numpy, to_numpy


@contextmanager
def _compressed() -> Iterator[None]:
    """Suppress torch's warning that support for compressed sparse tensors is in beta."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta", category=UserWarning)
        yield


def from_arrays(arrays: SparseArrays) -> Any:
    """Return a sparse torch tensor on the CPU with the same values and layout; COO tensors are coalesced.

    Raises
    ------
    UnsupportedError
        ``adapter.dtype``: torch has no such element type.
    """
    torch = require("torch", "torch")

    values = from_numpy(arrays.values)
    shape = arrays.shape
    # The codec has checked the positions, so torch does not read them again to validate them.
    if isinstance(arrays.layout, CsrLayout):
        indptr, indices = map(from_numpy, arrays.positions)
        with _compressed():
            return torch.sparse_csr_tensor(indptr, indices, values, shape, check_invariants=False)
    stacked = np.array(arrays.positions, np.int64).reshape(len(shape), -1)
    return torch.sparse_coo_tensor(from_numpy(stacked), values, shape, is_coalesced=True, check_invariants=False)


def to_arrays(value: Any) -> SparseArrays | None:
    """Return the stored values of a sparse ``torch.Tensor``; None for any other value.

    ``sparse_coo`` tensors keep their layout; values at duplicate positions are added, as torch defines it. Compressed
    layouts become ``sparse_csr``.

    Raises
    ------
    UnsupportedError
        ``adapter.layout``: the tensor has dense or batch dimensions; ``adapter.dtype``: Ingot has no such element type.
    """
    torch = require("torch", "torch")

    if not isinstance(value, torch.Tensor) or value.layout not in (
        torch.sparse_coo,
        torch.sparse_csr,
        torch.sparse_csc,
        torch.sparse_bsr,
        torch.sparse_bsc,
    ):
        return None
    plain = value.detach().cpu()
    shape = tuple(value.shape)
    is_coo = plain.layout == torch.sparse_coo
    if plain.dense_dim() or not (is_coo or len(shape) == 2):
        raise UnsupportedError(
            "expected a sparse tensor without dense or batch dimensions; make one with to_dense().to_sparse()",
            rule="adapter.layout",
        )
    if is_coo:
        plain = plain.coalesce()
        positions = tuple(to_numpy(plain.indices()))
    else:
        if plain.layout != torch.sparse_csr:
            with _compressed():
                plain = plain.to_sparse_coo().coalesce().to_sparse_csr()
        positions = to_numpy(plain.crow_indices()), to_numpy(plain.col_indices())
    name = resolve_dtype(value.dtype).name
    layout = CooLayout(name) if is_coo else CsrLayout(name)
    return SparseArrays(
        layout, shape, to_numpy(plain.values()), tuple(np.asarray(item, np.int64) for item in positions)
    )
