"""``sparse_csr`` and ``sparse_coo`` as of zTensor 1.2 section 3. Spec page: ``spec/sparse.md``.

A value counts as zero, and is left out, only if its bits are those of +0: NaN, -0.0 and subnormal numbers survive bit
for bit. Positions may come in any order; a position that comes twice is refused: readers disagree on what it means.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, ClassVar

import numpy as np

from ingot.codecs.base import empty
from ingot.codecs.cast import cast_into, flat, require_cast
from ingot.codecs.dense import (
    check_values,
    decodable,
    encodable,
    read_values,
    require_bool,
    require_part,
)
from ingot.core.dtypes import DTYPES, DType, dtype, numpy_dtype
from ingot.errors import CodecError, UnsupportedError, UsageError
from ingot.model.part import Part
from ingot.model.spec import PartSpec
from ingot.model.tensor import Array, Tensor

Indices = np.ndarray[Any, np.dtype[np.uint64]]
_U64 = DTYPES["u64"]
# Elements that a reader scatters at a time when it has to cast them afterwards, and stored values it takes at a time
# (a whole row's at least).
_SCRATCH = 1 << 20
_PIECE = 1 << 18


def _bits(values: Array) -> Array:
    """View values as unsigned integers of their size; complex128 as two."""
    size = values.dtype.itemsize
    return values.view(np.uint64).reshape(-1, 2) if size == 16 else values.view(f"u{size}")


def _stored(values: Array) -> Array:
    """Return the flat positions of all values whose bits are not zero, ascending."""
    bits = _bits(values)
    return np.flatnonzero(bits.any(axis=1) if bits.ndim == 2 else bits)


def _scatter(positions: Array, values: Array, out: Array) -> None:
    """Set the flat ``out`` to zero bits, then ``values`` at ``positions``."""
    out.view(np.uint8)[...] = 0
    out[positions] = values


def _require_unique(positions: Array, codec: str, where: str) -> None:
    if positions.size < 2 or bool((positions[1:] > positions[:-1]).all()):
        return
    ordered = np.sort(positions)
    if bool((ordered[1:] == ordered[:-1]).any()):
        raise CodecError(f"{codec}.duplicate", "expected every position once, found one twice", where=where)


def _require_below(indices: Indices, limit: int, codec: str, where: str) -> None:
    if indices.size and int(indices.max()) >= limit:
        raise CodecError(f"{codec}.index", f"expected indices below {limit}, found {int(indices.max())}", where=where)


def _index_part(tensor: Tensor, role: str) -> Part:
    part = require_part(tensor, role)
    if part.dtype != "u64" or part.type not in (None, "u64") or part.nbytes % 8:
        raise CodecError(
            f"{tensor.codec}.index-dtype",
            f"expected whole u64 elements in part {role!r}, found {part.nbytes} bytes of {part.type or part.dtype}",
            where=tensor.name,
        )
    return part


def _refuse_options(codec: str, options: Mapping[str, Any]) -> None:
    if options:
        raise UsageError(f"codec {codec} knows no options, found {min(options)!r}", rule=f"{codec}.option")


def _values_spec(row: DType, size: int) -> PartSpec:
    return PartSpec("values", row.storage, None, None if row.is_storage else row.name, limit=row.nbytes(size))


def _require_whole(rows: Array, expected: int, codec: str) -> None:
    if len(rows) != expected:
        raise CodecError(f"{codec}.whole", f"expected all {expected} rows in one slab, found {len(rows)}")


@dataclass(frozen=True, slots=True)
class CsrEncoder:
    """Encodes a whole matrix; how many values are stored is known only then."""

    parts: tuple[PartSpec, ...]
    rows: int
    codec: str = "sparse_csr"
    params: Mapping[str, Any] = field(default_factory=dict)
    scans: int = 0
    whole: bool = True
    lossless: bool = True

    def scan(self, rows: Array) -> None:
        """Nothing to learn beforehand."""

    def encode(self, rows: Array, start: int = 0) -> dict[str, Array]:
        _require_whole(rows, self.rows, self.codec)
        cols = rows.shape[1]
        values = np.ascontiguousarray(rows).reshape(-1)
        positions = _stored(values)
        bounds = np.arange(self.rows + 1, dtype=np.int64) * cols
        indptr = np.searchsorted(positions, bounds).astype(np.uint64)
        stored = values[positions]
        positions %= max(cols, 1)  # in place: these arrays may be larger than the matrix
        return {"values": stored, "indices": positions.view(np.uint64), "indptr": indptr}

    def decode(self, parts: Mapping[str, Array], out: Array) -> None:
        indptr = parts["indptr"].astype(np.int64)
        counts = indptr[1:] - indptr[:-1]
        positions = np.repeat(np.arange(len(counts)), counts) * out.shape[1] + parts["indices"].astype(np.int64)
        dense = np.empty(out.size, parts["values"].dtype)
        _scatter(positions, parts["values"], dense)
        cast_into(dense, out)


class CsrReader:
    """Sequential decoding by rows: all three parts are read in step, so that only a slab's share is in memory."""

    def __init__(self, tensor: Tensor) -> None:
        self._name, self._row = tensor.name, decodable(tensor)
        self._rows, self._cols = tensor.shape
        self._stored = tensor.parts["indices"].nbytes // 8
        self._values = tensor.parts["values"].reader()
        self._indices = tensor.parts["indices"].reader()
        self._indptr = tensor.parts["indptr"].reader()
        self._done, self._last = 0, -1

    def read_into(self, out: Array) -> None:
        own = numpy_dtype(self._row.name)
        if out.dtype == own:
            self._read(flat(out), len(out))
            return
        require_cast(self._row.name, dtype(out.dtype).name, self._name)
        step = max(1, _SCRATCH // max(self._cols, 1))
        for start in range(0, len(out), step):
            piece = out[start : start + step]
            dense = np.empty(piece.size, own)
            self._read(dense, len(piece))
            cast_into(dense, piece, self._name)

    def finish(self) -> None:
        self._start()
        if self._done == self._rows and self._last != self._stored:
            raise self._bad_indptr(f"to end at the {self._stored} stored values, found {self._last}")
        for reader in (self._values, self._indices, self._indptr):
            reader.finish()

    def _read(self, out: Array, rows: int) -> None:
        """Fill the flat ``out`` with the next rows, a piece at a time: many stored values take more than the rows."""
        self._start()
        counts = self._counts(rows)
        out.view(np.uint8)[...] = 0
        ends = np.cumsum(counts)
        start, done = 0, 0
        while done < (int(ends[-1]) if rows else 0):
            stop = max(start + 1, int(np.searchsorted(ends, done + _PIECE, "right")))
            self._read_piece(out[start * self._cols : stop * self._cols], counts[start:stop])
            start, done = stop, int(ends[stop - 1])
        self._done += rows

    def _read_piece(self, out: Array, counts: Array) -> None:
        total = int(counts.sum())
        indices = np.empty(total, np.uint64)
        read_values(self._indices, indices, _U64, self._name)
        _require_below(indices, self._cols, "sparse_csr", self._name)
        positions = indices.view(np.int64)
        if len(counts) > 1:
            positions += np.repeat(np.arange(len(counts), dtype=np.int64) * self._cols, counts)
        _require_unique(positions, "sparse_csr", self._name)
        values = np.empty(total, out.dtype)
        read_values(self._values, values, self._row, self._name)
        out[positions] = values

    def _start(self) -> None:
        if self._last >= 0:
            return
        first = np.empty(1, np.uint64)
        read_values(self._indptr, first, _U64, self._name)
        if first[0]:
            raise self._bad_indptr(f"to begin with 0, found {int(first[0])}")
        self._last = 0

    def _counts(self, rows: int) -> Array:
        """Read the next row pointers and return how many values each row stores, checked before more is allocated."""
        ends = np.empty(rows, np.uint64)
        read_values(self._indptr, ends, _U64, self._name)
        if not rows:
            return np.zeros(0, np.int64)
        begins = np.concatenate([np.array([self._last], np.uint64), ends[:-1]])
        if bool((ends < begins).any()):
            raise self._bad_indptr("never to fall, found one that does")
        if int(ends[-1]) > self._stored:
            raise self._bad_indptr(f"at most {self._stored}, found {int(ends[-1])}")
        counts: Array = (ends - begins).astype(np.int64)
        if int(counts.max()) > self._cols:
            raise CodecError(
                "sparse_csr.duplicate",
                f"expected at most {self._cols} values in a row, found {int(counts.max())}",
                where=self._name,
            )
        self._last = int(ends[-1])
        return counts

    def _bad_indptr(self, what: str) -> CodecError:
        return CodecError("sparse_csr.indptr", f"expected indptr {what}", where=self._name)


class CsrCodec:
    """Compressed sparse rows of a matrix; other ranks are refused."""

    id: ClassVar[str] = "sparse_csr"
    lossless: ClassVar[bool] = True
    elementwise: ClassVar[bool] = False
    streams: ClassVar[bool] = True

    def check(self, tensor: Tensor) -> None:
        """Rules ``sparse_csr.shape``, ``.part-missing``, ``.index-dtype``, ``.size``, ``.dtype``."""
        if len(tensor.shape) != 2:
            raise CodecError(
                "sparse_csr.shape", f"expected two dimensions, found shape {list(tensor.shape)}", where=tensor.name
            )
        values = require_part(tensor, "values")
        indices, indptr = _index_part(tensor, "indices"), _index_part(tensor, "indptr")
        wanted = 8 * (tensor.shape[0] + 1)
        if indptr.nbytes != wanted:
            raise CodecError(
                "sparse_csr.size", f"expected {wanted} bytes of indptr, found {indptr.nbytes}", where=tensor.name
            )
        check_values(tensor, values, indices.nbytes // 8)

    def decode(self, tensor: Tensor, dtype: str) -> Array:
        """Return the dense matrix. Index values are checked: ``sparse_csr.indptr``, ``.index``, ``.duplicate``."""
        reader = self.reader(tensor)
        require_cast(tensor.dtype, dtype, tensor.name)
        out = empty(tensor.shape, dtype, tensor.name)
        reader.read_into(out)
        reader.finish()
        return out

    def reader(self, tensor: Tensor) -> CsrReader:
        self.check(tensor)
        return CsrReader(tensor)

    def encoder(self, shape: tuple[int, ...], dtype: str, options: Mapping[str, Any]) -> CsrEncoder:
        """Prepare to encode a matrix; there are no options."""
        _refuse_options(self.id, options)
        row = encodable(dtype)
        if len(shape) != 2:
            raise UnsupportedError(f"sparse_csr takes matrices, found shape {list(shape)}", rule="sparse_csr.shape")
        parts = (
            _values_spec(row, prod(shape)),
            PartSpec("indices", "u64", None, limit=8 * prod(shape)),
            PartSpec("indptr", "u64", 8 * (shape[0] + 1)),
        )
        return CsrEncoder(parts, shape[0])


@dataclass(frozen=True, slots=True)
class CooEncoder:
    """Encodes a whole tensor; how many values are stored is known only then. Positions ascend in row-major order."""

    parts: tuple[PartSpec, ...]
    shape: tuple[int, ...]
    codec: str = "sparse_coo"
    params: Mapping[str, Any] = field(default_factory=dict)
    scans: int = 0
    whole: bool = True
    lossless: bool = True

    def scan(self, rows: Array) -> None:
        """Nothing to learn beforehand."""

    def encode(self, rows: Array, start: int = 0) -> dict[str, Array]:
        _require_whole(rows, prod(self.shape[:-1]) if self.shape else 1, self.codec)
        values = np.ascontiguousarray(rows).reshape(-1)
        positions = _stored(values)
        stored = values[positions]
        coords = np.empty((len(self.shape), positions.size), np.int64)
        for axis, size in zip(coords[::-1], reversed(self.shape), strict=True):
            np.remainder(positions, max(size, 1), out=axis)
            positions //= max(size, 1)
        return {"values": stored, "coords": coords.reshape(-1).view(np.uint64)}

    def decode(self, parts: Mapping[str, Array], out: Array) -> None:
        dense = np.empty(out.size, parts["values"].dtype)
        positions = _positions(parts["coords"], self.shape, parts["values"].size, "<memory>")
        _scatter(positions, parts["values"], dense)
        cast_into(dense, out)


def _positions(coords: Indices, shape: tuple[int, ...], count: int, where: str) -> Array:
    """Return the flat positions of ``count`` structure-of-arrays coordinates, range checked."""
    axes = coords.reshape(len(shape), count)  # a view of what is cut along its second axis already
    positions = np.zeros(count, np.int64)
    for axis, size in zip(axes, shape, strict=True):
        _require_below(axis, size, "sparse_coo", where)
        positions *= size
        positions += axis.view(np.int64)
    return positions


class CooReader:
    """Decodes the whole tensor at the first call, since positions may come in any order, then hands out rows."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._row = tensor, decodable(tensor)
        self._dense: Array | None = None
        self._next = 0

    def read_into(self, out: Array) -> None:
        stop = self._next + out.size
        cast_into(self._whole()[self._next : stop], out, self._tensor.name)
        self._next = stop

    def finish(self) -> None:
        self._whole()
        self._dense = None

    def _whole(self) -> Array:
        if self._dense is None:
            self._dense = _dense_coo(self._tensor, self._row)
        return self._dense


def _dense_coo(tensor: Tensor, row: DType) -> Array:
    out = empty((tensor.size,), row.name, tensor.name)
    values = tensor.parts["values"].array()
    require_bool(values, row, tensor.name)
    values = values.view(numpy_dtype(row.name))
    coords = tensor.parts["coords"].array().reshape(len(tensor.shape), values.size)
    out.view(np.uint8)[...] = 0
    last, ascending = -1, True
    for start in range(0, values.size, _PIECE):
        piece = slice(start, start + _PIECE)
        positions = _positions(coords[:, piece], tensor.shape, values[piece].size, tensor.name)
        ascending = ascending and positions[0] > last and bool((positions[1:] > positions[:-1]).all())
        last = positions[-1]
        out[positions] = values[piece]
    if not ascending:
        _require_distinct(coords, tensor)
    return out


def _require_distinct(coords: Indices, tensor: Tensor) -> None:
    """Refuse a position that comes twice, at the price of one byte per element of the tensor."""
    seen = empty((tensor.size,), "bool", tensor.name)
    seen[...] = False
    for start in range(0, coords.shape[1], _PIECE):
        piece = coords[:, start : start + _PIECE]
        positions = _positions(piece, tensor.shape, piece.shape[1], tensor.name)
        _require_unique(positions, "sparse_coo", tensor.name)
        if bool(seen[positions].any()):
            raise CodecError("sparse_coo.duplicate", "expected every position once, found one twice", where=tensor.name)
        seen[positions] = True


class CooCodec:
    """A list of coordinates and values, of any rank."""

    id: ClassVar[str] = "sparse_coo"
    lossless: ClassVar[bool] = True
    elementwise: ClassVar[bool] = False
    streams: ClassVar[bool] = False

    def check(self, tensor: Tensor) -> None:
        """Rules ``sparse_coo.part-missing``, ``.index-dtype``, ``.size``, ``.dtype``, ``.duplicate``."""
        values, coords = require_part(tensor, "values"), _index_part(tensor, "coords")
        rank = len(tensor.shape)
        row = DTYPES.get(tensor.dtype)
        if row is None or row.bits < 8:
            return
        stored = values.nbytes * 8 // row.bits
        check_values(tensor, values, stored)
        if coords.nbytes != 8 * rank * stored:
            raise CodecError(
                "sparse_coo.size",
                f"expected {rank} x {stored} coordinates of 8 bytes, found {coords.nbytes} bytes",
                where=tensor.name,
            )
        if stored > tensor.size:
            raise CodecError(
                "sparse_coo.duplicate", f"expected at most {tensor.size} values, found {stored}", where=tensor.name
            )

    def decode(self, tensor: Tensor, dtype: str) -> Array:
        """Return the dense tensor. Index values are checked: ``sparse_coo.index``, ``sparse_coo.duplicate``."""
        self.check(tensor)
        row = decodable(tensor)
        require_cast(row.name, dtype, tensor.name)
        dense = _dense_coo(tensor, row)
        if dtype != row.name:
            out = empty((tensor.size,), dtype, tensor.name)
            cast_into(dense, out, tensor.name)
            dense = out
        return dense.reshape(tensor.shape)

    def reader(self, tensor: Tensor) -> CooReader:
        self.check(tensor)
        return CooReader(tensor)

    def encoder(self, shape: tuple[int, ...], dtype: str, options: Mapping[str, Any]) -> CooEncoder:
        """Prepare to encode a tensor of any rank; there are no options."""
        _refuse_options(self.id, options)
        row = encodable(dtype)
        size = prod(shape)
        coords = PartSpec("coords", "u64", None if shape else 0, limit=8 * len(shape) * size)
        return CooEncoder((_values_spec(row, size), coords), shape)
