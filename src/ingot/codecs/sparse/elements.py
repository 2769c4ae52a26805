"""Functions for ``sparse_csr`` and ``sparse_coo`` (zTensor 1.2, section 3; ``spec/sparse.md``).

A value is omitted only if its bits are those of +0: NaN, -0.0 and subnormal numbers are stored bit for bit. Positions
may have any order. A position that occurs twice is refused, because readers interpret it differently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ingot.codecs.base import Encoder, Repacked, cannot
from ingot.codecs.cast import cast_into, require_cast
from ingot.codecs.dense.codec import decodable, read_values, require_bool, require_part
from ingot.core.numeric.dtypes import DTYPES, DType, numpy_dtype
from ingot.errors import CodecError, UsageError
from ingot.model.layouts.base import Layout
from ingot.model.part import Part, PartReader
from ingot.model.spec import PartSpec
from ingot.model.tensor import Array, Tensor

Indices = np.ndarray[Any, np.dtype[np.uint64]]
INDEX_BYTES = {"u64": 8, "u32": 4}
BATCH = 1 << 18
"""Stored values that a reader processes at a time, but at least those of a row."""


def _bits(values: Array) -> Array:
    """Return values as unsigned integers of their size; a complex128 as two."""
    size = values.dtype.itemsize
    return values.view(np.uint64).reshape(-1, 2) if size == 16 else values.view(f"u{size}")


def stored_positions(values: Array) -> Array:
    """Return the ascending flat positions of all values whose bits are not zero."""
    bits = _bits(values)
    return np.flatnonzero(bits.any(axis=1) if bits.ndim == 2 else bits)


def scatter(positions: Array, values: Array, out: Array) -> None:
    """Fill the flat ``out`` with zeros, then set ``values`` at ``positions``."""
    out.view(np.uint8)[...] = 0
    out[positions] = values


def require_unique(positions: Array, codec: str, location: str) -> None:
    """Raise ``CodecError`` ``<codec>.duplicate`` if a flat position occurs twice."""
    if positions.size < 2 or bool((positions[1:] > positions[:-1]).all()):
        return
    ordered = np.sort(positions)
    if bool((ordered[1:] == ordered[:-1]).any()):
        raise CodecError(f"{codec}.duplicate", "expected every position once, found one twice", where=location)


def in_order(positions: Array, codec: str, location: str) -> Array | None:
    """Return the permutation that sorts flat positions, None if they ascend; raise ``<codec>.duplicate``."""
    if positions.size < 2 or bool((positions[1:] > positions[:-1]).all()):
        return None
    order: Array = np.argsort(positions, kind="stable")
    require_unique(positions[order], codec, location)
    return order


def stored_values(tensor: Tensor, dtype: str) -> Array:
    """Return the stored values as a new array, cast to ``dtype``."""
    row = decodable(tensor)
    require_cast(row.name, dtype, tensor.name)
    raw = tensor.parts["values"].array()
    require_bool(raw, row, tensor.name)
    stored = raw.view(numpy_dtype(row.name))
    values = np.empty(stored.size, numpy_dtype(dtype))
    cast_into(stored, values, tensor.name)
    return values


def require_below(indices: Indices, limit: int, codec: str, location: str) -> None:
    """Raise ``CodecError`` ``<codec>.index`` if an index is ``limit`` or more."""
    if indices.size and int(indices.max()) >= limit:
        raise CodecError(
            f"{codec}.index", f"expected indices below {limit}, found {int(indices.max())}", where=location
        )


def index_part(tensor: Tensor, role: str) -> Part:
    """Return a part of indices, after checking that its type is u64 (zTensor 1.2, section 3) or u32."""
    part = require_part(tensor, role)
    width = INDEX_BYTES.get(part.dtype)
    if width is None or part.type not in (None, part.dtype) or part.nbytes % width:
        raise CodecError(
            f"{tensor.codec}.index-dtype",
            f"expected full u64 or u32 elements in part {role!r}, found {part.nbytes} bytes of "
            f"{part.type or part.dtype}",
            where=tensor.name,
        )
    return part


def read_indices(reader: PartReader, count: int, stored: DType, location: str) -> Indices:
    """Return the next indices of a part as u64."""
    indices = np.empty(count, numpy_dtype(stored.name))
    read_values(reader, indices, stored, location)
    return indices.astype(np.uint64, copy=False)


def all_indices(part: Part) -> Indices:
    """Return all indices of a part as u64."""
    indices: Indices = part.array().astype(np.uint64, copy=False)
    return indices


class _Once:
    """A repack reader whose only row returns all parts."""

    def __init__(self, make: Callable[[], dict[str, Array]]) -> None:
        self._make = make

    def read(self, rows: int) -> dict[str, Array]:
        return self._make() if rows else {}

    def finish(self) -> None:
        """Do nothing: the parts were read to their end, where digests are checked."""


def repack_in_one_call(
    tensor: Tensor, layout: Layout, parts: tuple[PartSpec, ...], make: Callable[[], dict[str, Array]]
) -> Repacked:
    """Return the repacking of a sparse tensor; ``make`` reads it, checks positions and returns the parts."""
    row = DTYPES.get(tensor.dtype)
    if row is None or row.bits < 8:
        return cannot(layout, f"values of {tensor.dtype} can be copied, but not converted")
    return Repacked(layout, parts, 1, 1, 4 * tensor.nbytes, None, lambda: _Once(make))


def refuse_options(codec: str, options: Mapping[str, Any]) -> None:
    """Raise ``UsageError`` ``<codec>.option`` if there are options."""
    if options:
        raise UsageError(f"codec {codec} has no options, found {min(options)!r}", rule=f"{codec}.option")


def values_spec(row: DType, size: int) -> PartSpec:
    """Return the spec of the part ``values`` of a tensor of ``size`` elements of type ``row``."""
    return PartSpec("values", row.storage, None, None if row.is_storage else row.name, limit=row.nbytes(size))


@dataclass(frozen=True, kw_only=True)
class SingleChunkEncoder(Encoder):
    """The base class of the encoders of ``sparse_csr`` and ``sparse_coo``.

    They need the tensor in one chunk, because the number of stored values is unknown in advance.
    """

    parts: tuple[PartSpec, ...]
    params: Mapping[str, Any] = field(default_factory=dict)
    fit_passes: int = 0
    step: int = 1
    single_chunk: bool = True
    lossless: bool = True

    def fit_pass(self, rows: Array) -> None:
        """Do nothing: there is no fit pass."""


def require_all_rows(rows: Array, expected: int, codec: str) -> None:
    """Raise ``CodecError`` ``<codec>.whole`` if a chunk lacks rows of the tensor."""
    if len(rows) != expected:
        raise CodecError(f"{codec}.whole", f"expected all {expected} rows in one chunk, found {len(rows)}")
