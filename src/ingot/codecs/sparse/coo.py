"""``sparse_coo``: a list of coordinates (zTensor 1.2, section 3; ``spec/sparse.md``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import numpy as np

from ingot.codecs.base import Codec, Repacked, Rows, cannot, empty, result
from ingot.codecs.cast import cast_into, require_cast
from ingot.codecs.dense.codec import check_values, decodable, encodable, require_bool, require_part
from ingot.codecs.sparse.elements import (
    BATCH,
    Indices,
    SingleChunkEncoder,
    in_order,
    index_part,
    refuse_options,
    repack_in_one_call,
    require_all_rows,
    require_below,
    require_unique,
    scatter,
    stored_positions,
    stored_values,
    values_spec,
)
from ingot.core.numeric.dtypes import DTYPES, DType, numpy_dtype
from ingot.errors import CodecError
from ingot.model.layouts.base import Layout
from ingot.model.layouts.sparse import CooLayout
from ingot.model.sparse import SparseArrays
from ingot.model.spec import PartSpec
from ingot.model.tensor import Array, Tensor


@dataclass(frozen=True, kw_only=True)
class CooEncoder(SingleChunkEncoder):
    """An encoder of a tensor in one chunk; positions ascend in row-major order."""

    shape: tuple[int, ...]
    codec: str = "sparse_coo"

    def encode(self, rows: Array, start: int = 0) -> dict[str, Array]:
        require_all_rows(rows, prod(self.shape[:-1]) if self.shape else 1, self.codec)
        values = np.ascontiguousarray(rows).reshape(-1)
        positions = stored_positions(values)
        stored = values[positions]
        coords = np.empty((len(self.shape), positions.size), np.int64)
        for axis, size in zip(coords[::-1], reversed(self.shape), strict=True):
            np.remainder(positions, max(size, 1), out=axis)
            positions //= max(size, 1)
        return {"values": stored, "coords": coords.reshape(-1).view(np.uint64)}

    def decode(self, parts: Mapping[str, Array], out: Array) -> None:
        dense = np.empty(out.size, parts["values"].dtype)
        positions = _positions(parts["coords"], self.shape, parts["values"].size, "<memory>")
        scatter(positions, parts["values"], dense)
        cast_into(dense, out)


def _positions(coords: Indices, shape: tuple[int, ...], count: int, location: str) -> Array:
    """Return the flat positions of ``count`` coordinates, given as one array per dimension; their range is checked."""
    axes = coords.reshape(len(shape), count)  # a view if ``coords`` is a slice along the second axis
    positions = np.zeros(count, np.int64)
    for stored, size in zip(axes, shape, strict=True):
        axis = stored.astype(np.uint64, copy=False)
        require_below(axis, size, "sparse_coo", location)
        positions *= size
        positions += axis.view(np.int64)
    return positions


class CooReader(Rows):
    """A reader that decodes the full tensor in the first call, because positions may be stored in any order."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._row = decodable(tensor)
        self._dense: Array | None = None
        self._next = 0

    def fill(self, out: Array) -> None:
        stop = self._next + out.size
        cast_into(self._decoded()[self._next : stop], out, self._tensor.name)
        self._next = stop

    def skip(self, count: int) -> None:
        """Skip ``count`` values; the full tensor is decoded nevertheless, because positions may have any order."""
        self._next += count

    def finish(self) -> None:
        self._decoded()
        self._dense = None

    def _decoded(self) -> Array:
        if self._dense is None:
            self._dense = _dense_coo(self._tensor, self._row)
        return self._dense


def _dense_coo(tensor: Tensor, row: DType) -> Array:
    out = empty((tensor.size,), row.name, tensor.name)
    values = tensor.parts["values"].array()
    require_bool(values, row, tensor.name)
    values = values.view(numpy_dtype(row.name))
    coords = tensor.parts["coords"].array().reshape(len(tensor.shape), values.size)  # u32 is widened in batches
    out.view(np.uint8)[...] = 0
    last = -1
    ascending = True
    for start in range(0, values.size, BATCH):
        batch = slice(start, start + BATCH)
        positions = _positions(coords[:, batch], tensor.shape, values[batch].size, tensor.name)
        ascending = ascending and positions[0] > last and bool((positions[1:] > positions[:-1]).all())
        last = positions[-1]
        out[positions] = values[batch]
    if not ascending:
        _require_distinct(coords, tensor)
    return out


def _require_distinct(coords: Indices, tensor: Tensor) -> None:
    """Raise ``CodecError`` if a position occurs twice; needs one byte per element of the tensor."""
    seen = empty((tensor.size,), "bool", tensor.name)
    seen[...] = False
    for start in range(0, coords.shape[1], BATCH):
        batch = coords[:, start : start + BATCH]
        positions = _positions(batch, tensor.shape, batch.shape[1], tensor.name)
        require_unique(positions, "sparse_coo", tensor.name)
        if bool(seen[positions].any()):
            raise CodecError("sparse_coo.duplicate", "expected every position once, found one twice", where=tensor.name)
        seen[positions] = True


class CooCodec(Codec):
    """A list of coordinates and values, of any rank."""

    id: ClassVar[str] = "sparse_coo"
    lossless: ClassVar[bool] = True
    elementwise: ClassVar[bool] = False
    streams: ClassVar[bool] = False

    def check(self, tensor: Tensor) -> None:
        """Check parameters, parts and shape of ``tensor``; reads no bytes of the parts.

        Rules ``sparse_coo.part-missing``, ``.index-dtype``, ``.size``, ``.dtype``, ``.duplicate``.
        """
        values = require_part(tensor, "values")
        coords = index_part(tensor, "coords")
        rank = len(tensor.shape)
        row = DTYPES.get(tensor.dtype)
        if row is None or row.bits < 8:
            return
        stored = values.nbytes * 8 // row.bits
        check_values(tensor, values, stored)
        if coords.count != rank * stored:
            raise CodecError(
                "sparse_coo.size",
                f"expected {rank} x {stored} coordinates of {coords.dtype}, found {coords.nbytes} bytes",
                where=tensor.name,
            )
        if stored > tensor.size:
            raise CodecError(
                "sparse_coo.duplicate", f"expected at most {tensor.size} values, found {stored}", where=tensor.name
            )

    def decode(self, tensor: Tensor, dtype: str, out: Array | None = None) -> Array:
        """Return the dense tensor. Index values are checked: ``sparse_coo.index``, ``sparse_coo.duplicate``."""
        self.check(tensor)
        row = decodable(tensor)
        require_cast(row.name, dtype, tensor.name)
        dense = _dense_coo(tensor, row)
        if out is None and dtype == row.name:
            return dense.reshape(tensor.shape)
        out = result(tensor, dtype, out)
        cast_into(dense, out, tensor.name)
        return out

    def sparse(self, tensor: Tensor, dtype: str) -> SparseArrays:
        """Return values and coordinates in row-major order, checked as in ``decode``."""
        self.check(tensor)
        values = stored_values(tensor, dtype)
        coords = tensor.parts["coords"].array().reshape(len(tensor.shape), values.size)
        order = in_order(_positions(coords, tensor.shape, values.size, tensor.name), "sparse_coo", tensor.name)
        axes = tuple(axis.astype(np.int64) for axis in coords)
        if order is not None:
            axes, values = tuple(axis[order] for axis in axes), values[order]
        return SparseArrays(CooLayout(dtype), tensor.shape, values, axes)

    def repack(self, tensor: Tensor, layout: Layout) -> Repacked:
        """Return the repacking with coordinates of another width, in unchanged order."""
        if not isinstance(layout, CooLayout):
            return cannot(layout, f"coordinates cannot be stored in {layout.codec}")
        self.check(tensor)
        return repack_in_one_call(tensor, layout, layout.part_specs(tensor.shape), lambda: self._parts(tensor, layout))

    def _parts(self, tensor: Tensor, layout: CooLayout) -> dict[str, Array]:
        values = stored_values(tensor, tensor.dtype)
        coords = tensor.parts["coords"].array()
        _require_distinct(coords.reshape(len(tensor.shape), values.size), tensor)
        return {"values": values, "coords": coords.astype(numpy_dtype(layout.indices))}

    def reader(self, tensor: Tensor) -> CooReader:
        self.check(tensor)
        return CooReader(tensor)

    def encoder(self, shape: tuple[int, ...], dtype: str, options: Mapping[str, Any]) -> CooEncoder:
        """Return the encoder of a tensor of any rank, which has no options."""
        refuse_options(self.id, options)
        row = encodable(dtype)
        size = prod(shape)
        coords = PartSpec("coords", "u64", None if shape else 0, limit=8 * len(shape) * size)
        return CooEncoder(parts=(values_spec(row, size), coords), shape=shape)
