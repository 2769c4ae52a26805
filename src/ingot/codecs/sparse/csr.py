"""``sparse_csr``: compressed sparse rows (zTensor 1.2, section 3; ``spec/sparse.md``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import numpy as np

from ingot.codecs.base import Codec, Repacked, Rows, cannot, result
from ingot.codecs.cast import cast_into, flat, require_cast
from ingot.codecs.dense.codec import check_values, decodable, encodable, read_values, require_part
from ingot.codecs.sparse.elements import (
    BATCH,
    INDEX_BYTES,
    SingleChunkEncoder,
    all_indices,
    in_order,
    index_part,
    read_indices,
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
from ingot.core.numeric.dtypes import DTYPES, dtype, numpy_dtype
from ingot.errors import CodecError, UnsupportedError, UsageError
from ingot.model.layouts.base import Layout
from ingot.model.layouts.sparse import CsrLayout
from ingot.model.sparse import SparseArrays
from ingot.model.spec import PartSpec
from ingot.model.tensor import Array, Tensor

_SCRATCH = 1 << 20  # elements in the buffer of a reader that casts


@dataclass(frozen=True, kw_only=True)
class CsrEncoder(SingleChunkEncoder):
    """An encoder of a matrix in one chunk."""

    rows: int
    codec: str = "sparse_csr"

    def encode(self, rows: Array, start: int = 0) -> dict[str, Array]:
        require_all_rows(rows, self.rows, self.codec)
        cols = rows.shape[1]
        values = np.ascontiguousarray(rows).reshape(-1)
        positions = stored_positions(values)
        bounds = np.arange(self.rows + 1, dtype=np.int64) * cols
        indptr = np.searchsorted(positions, bounds).astype(np.uint64)
        stored = values[positions]
        positions %= max(cols, 1)  # in place, because these arrays may be larger than the matrix
        return {"values": stored, "indices": positions.view(np.uint64), "indptr": indptr}

    def decode(self, parts: Mapping[str, Array], out: Array) -> None:
        indptr = parts["indptr"].astype(np.int64)
        counts = indptr[1:] - indptr[:-1]
        positions = np.repeat(np.arange(len(counts)), counts) * out.shape[1] + parts["indices"].astype(np.int64)
        dense = np.empty(out.size, parts["values"].dtype)
        scatter(positions, parts["values"], dense)
        cast_into(dense, out)


class CsrReader(Rows):
    """A sequential reader that reads all three parts in step, so that only a chunk is in memory."""

    def __init__(self, tensor: Tensor) -> None:
        self._name = tensor.name
        self._row = decodable(tensor)
        self._rows, self._cols = tensor.shape
        self._index = DTYPES[tensor.parts["indices"].dtype]
        self._ascending = CsrLayout.from_tensor(tensor).ascending
        self._stored = tensor.parts["indices"].count
        self._values = tensor.parts["values"].reader()
        self._indices = tensor.parts["indices"].reader()
        self._indptr = tensor.parts["indptr"].reader()
        self._done = 0
        self._last = -1

    def fill(self, out: Array) -> None:
        stored_dtype = numpy_dtype(self._row.name)
        if out.dtype == stored_dtype:
            self._read_rows(flat(out), len(out))
            return
        require_cast(self._row.name, dtype(out.dtype).name, self._name)
        step = max(1, _SCRATCH // max(self._cols, 1))
        for start in range(0, len(out), step):
            batch = out[start : start + step]
            dense = np.empty(batch.size, stored_dtype)
            self._read_rows(dense, len(batch))
            cast_into(dense, batch, self._name)

    def skip(self, count: int) -> None:
        """Skip ``count`` elements, which must be full rows; the pointer to the next row is read."""
        rows = count // max(self._cols, 1)
        if not rows:
            return
        self._start()
        self._indptr.skip(self._index.nbytes(rows - 1))
        end = read_indices(self._indptr, 1, self._index, self._name)
        if not self._last <= int(end[0]) <= self._stored:
            raise self._indptr_error(f"from {self._last} to {self._stored}, found {int(end[0])}")
        stored = int(end[0]) - self._last
        self._indices.skip(self._index.nbytes(stored))
        self._values.skip(self._row.nbytes(stored))
        self._last, self._done = int(end[0]), self._done + rows

    def finish(self) -> None:
        self._start()
        if self._done == self._rows and self._last != self._stored:
            raise self._indptr_error(f"to end at the {self._stored} stored values, found {self._last}")
        for reader in (self._values, self._indices, self._indptr):
            reader.finish()

    def _read_rows(self, out: Array, rows: int) -> None:
        """Fill the flat ``out`` with the next rows, in batches.

        Batches limit memory, because the stored values may need more memory than the rows.
        """
        self._start()
        counts = self._counts(rows)
        out.view(np.uint8)[...] = 0
        ends = np.cumsum(counts)
        start = 0
        values_read = 0
        while values_read < (int(ends[-1]) if rows else 0):
            stop = max(start + 1, int(np.searchsorted(ends, values_read + BATCH, "right")))
            self._read_batch(out[start * self._cols : stop * self._cols], counts[start:stop])
            start = stop
            values_read = int(ends[stop - 1])
        self._done += rows

    def _read_batch(self, out: Array, counts: Array) -> None:
        total = int(counts.sum())
        indices = read_indices(self._indices, total, self._index, self._name)
        require_below(indices, self._cols, "sparse_csr", self._name)
        positions = indices.view(np.int64)
        if len(counts) > 1:
            positions += np.repeat(np.arange(len(counts), dtype=np.int64) * self._cols, counts)
        if self._ascending:
            require_ascending(positions, self._name)
        else:
            require_unique(positions, "sparse_csr", self._name)
        values = np.empty(total, out.dtype)
        read_values(self._values, values, self._row, self._name)
        out[positions] = values

    def _start(self) -> None:
        if self._last >= 0:
            return
        first = read_indices(self._indptr, 1, self._index, self._name)
        if first[0]:
            raise self._indptr_error(f"to begin with 0, found {int(first[0])}")
        self._last = 0

    def _counts(self, rows: int) -> Array:
        """Return the number of values of each of the next rows; row pointers are checked before allocation."""
        ends = read_indices(self._indptr, rows, self._index, self._name)
        if not rows:
            return np.zeros(0, np.int64)
        begins = np.concatenate([np.array([self._last], np.uint64), ends[:-1]])
        if bool((ends < begins).any()):
            raise self._indptr_error("never to decrease")
        if int(ends[-1]) > self._stored:
            raise self._indptr_error(f"at most {self._stored}, found {int(ends[-1])}")
        counts: Array = (ends - begins).astype(np.int64)
        if int(counts.max()) > self._cols:
            raise CodecError(
                "sparse_csr.duplicate",
                f"expected at most {self._cols} values in a row, found {int(counts.max())}",
                where=self._name,
            )
        self._last = int(ends[-1])
        return counts

    def _indptr_error(self, expected: str) -> CodecError:
        return _indptr_error(expected, self._name)


def require_ascending(positions: Array, location: str) -> None:
    """Raise ``CodecError`` ``sparse_csr.order`` if columns do not ascend in each row, as the tensor declares."""
    if not bool((positions[1:] > positions[:-1]).all()):
        raise CodecError("sparse_csr.order", "expected columns that ascend in every row, found others", where=location)


def _indptr_error(expected: str, location: str) -> CodecError:
    return CodecError("sparse_csr.indptr", f"expected indptr {expected}", where=location)


class CsrCodec(Codec):
    """Compressed sparse rows of a matrix; tensors of other ranks are refused."""

    id: ClassVar[str] = "sparse_csr"
    lossless: ClassVar[bool] = True
    elementwise: ClassVar[bool] = False
    streams: ClassVar[bool] = True

    def check(self, tensor: Tensor) -> None:
        """Check parameters, parts and shape of ``tensor``; reads no bytes of the parts.

        Rules ``sparse_csr.shape``, ``.params``, ``.part-missing``, ``.index-dtype``, ``.size``, ``.dtype``.
        """
        if len(tensor.shape) != 2:
            raise CodecError(
                "sparse_csr.shape", f"expected two dimensions, found shape {list(tensor.shape)}", where=tensor.name
            )
        values = require_part(tensor, "values")
        CsrLayout.from_tensor(tensor)
        indices = index_part(tensor, "indices")
        indptr = index_part(tensor, "indptr")
        if indices.dtype != indptr.dtype:
            raise CodecError(
                "sparse_csr.index-dtype",
                f"expected indices and indptr of one type, found {indices.dtype} and {indptr.dtype}",
                where=tensor.name,
            )
        nbytes = INDEX_BYTES[indices.dtype] * (tensor.shape[0] + 1)
        if indptr.nbytes != nbytes:
            raise CodecError(
                "sparse_csr.size", f"expected {nbytes} bytes of indptr, found {indptr.nbytes}", where=tensor.name
            )
        check_values(tensor, values, indices.count)

    def decode(self, tensor: Tensor, dtype: str, out: Array | None = None) -> Array:
        """Return the dense matrix. Index values are checked: ``sparse_csr.indptr``, ``.index``, ``.duplicate``."""
        reader = self.reader(tensor)
        require_cast(tensor.dtype, dtype, tensor.name)
        out = result(tensor, dtype, out)
        reader.read_into(out)
        reader.finish()
        return out

    def sparse(self, tensor: Tensor, dtype: str) -> SparseArrays:
        """Return values, row pointers and ascending columns, checked as in ``decode``."""
        self.check(tensor)
        cols = tensor.shape[1]
        name = tensor.name
        indptr = all_indices(tensor.parts["indptr"])
        indices = all_indices(tensor.parts["indices"])
        if indptr[0] or int(indptr[-1]) != indices.size or bool((indptr[1:] < indptr[:-1]).any()):
            raise _indptr_error(f"to begin with 0, never to decrease, and to end at {indices.size}", name)
        require_below(indices, cols, "sparse_csr", name)
        counts: Array = np.diff(indptr.astype(np.int64))
        rows = np.repeat(np.arange(len(counts), dtype=np.int64) * cols, counts)
        positions = rows + indices.view(np.int64)
        if CsrLayout.from_tensor(tensor).ascending:
            require_ascending(positions, name)
        order = in_order(positions, "sparse_csr", name)
        columns = indices.astype(np.int64)
        values = stored_values(tensor, dtype)
        if order is not None:
            columns = columns[order]
            values = values[order]
        return SparseArrays(CsrLayout(dtype), tensor.shape, values, (indptr.astype(np.int64), columns))

    def repack(self, tensor: Tensor, layout: Layout) -> Repacked:
        """Return the repacking with ascending columns, or with indices of another width."""
        if not isinstance(layout, CsrLayout):
            return cannot(layout, f"compressed rows cannot be stored in {layout.codec}")
        self.check(tensor)
        return repack_in_one_call(tensor, layout, layout.part_specs(tensor.shape), lambda: self._parts(tensor, layout))

    def _parts(self, tensor: Tensor, layout: CsrLayout) -> dict[str, Array]:
        arrays = self.sparse(tensor, tensor.dtype)
        indptr, columns = (part.astype(numpy_dtype(layout.indices)) for part in arrays.positions)
        return {"values": arrays.values, "indices": columns, "indptr": indptr}

    def reader(self, tensor: Tensor) -> CsrReader:
        self.check(tensor)
        return CsrReader(tensor)

    def encoder(self, shape: tuple[int, ...], dtype: str, options: Mapping[str, Any]) -> CsrEncoder:
        """Return the encoder of a matrix.

        Columns ascend in every row. The attributes declare this if option ``ascending`` is true.
        """
        ascending = options.get("ascending", False)
        if not isinstance(ascending, bool):
            raise UsageError(f"expected ascending true or false, found {ascending!r}", rule="sparse_csr.option")
        refuse_options(self.id, {key: value for key, value in options.items() if key != "ascending"})
        row = encodable(dtype)
        if len(shape) != 2:
            raise UnsupportedError(
                f"sparse_csr stores matrices, found shape {list(shape)}; use sparse_coo", rule="sparse_csr.shape"
            )
        parts = (
            values_spec(row, prod(shape)),
            PartSpec("indices", "u64", None, limit=8 * prod(shape)),
            PartSpec("indptr", "u64", 8 * (shape[0] + 1)),
        )
        return CsrEncoder(parts=parts, rows=shape[0], params=CsrLayout(row.name, ascending).attributes())
