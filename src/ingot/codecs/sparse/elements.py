"""What ``sparse_csr`` and ``sparse_coo`` (zTensor 1.2 section 3) share. Spec page: ``spec/sparse.md``.

A value counts as zero, and is left out, only if its bits are those of +0: NaN, -0.0 and subnormal numbers survive bit
for bit. Positions may come in any order; a position that comes twice is refused: readers disagree on what it means.
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
# Stored values that a reader takes at a time (a whole row's at least).
PIECE = 1 << 18


def _bits(values: Array) -> Array:
    """View values as unsigned integers of their size; complex128 as two."""
    size = values.dtype.itemsize
    return values.view(np.uint64).reshape(-1, 2) if size == 16 else values.view(f"u{size}")


def stored_positions(values: Array) -> Array:
    """Return the flat positions of all values whose bits are not zero, ascending."""
    bits = _bits(values)
    return np.flatnonzero(bits.any(axis=1) if bits.ndim == 2 else bits)


def scatter(positions: Array, values: Array, out: Array) -> None:
    """Set the flat ``out`` to zero bits, then ``values`` at ``positions``."""
    out.view(np.uint8)[...] = 0
    out[positions] = values


def require_unique(positions: Array, codec: str, where: str) -> None:
    """Refuse flat positions of which one comes twice."""
    if positions.size < 2 or bool((positions[1:] > positions[:-1]).all()):
        return
    ordered = np.sort(positions)
    if bool((ordered[1:] == ordered[:-1]).any()):
        raise CodecError(f"{codec}.duplicate", "expected every position once, found one twice", where=where)


def in_order(positions: Array, codec: str, where: str) -> Array | None:
    """Return what puts flat positions into ascending order, None for those that ascend; refuse one that comes twice."""
    if positions.size < 2 or bool((positions[1:] > positions[:-1]).all()):
        return None
    order: Array = np.argsort(positions, kind="stable")
    require_unique(positions[order], codec, where)
    return order


def stored_values(tensor: Tensor, dtype: str) -> Array:
    """Return the part of values in memory of its own, in an element type that they may be cast to."""
    row = decodable(tensor)
    require_cast(row.name, dtype, tensor.name)
    raw = tensor.parts["values"].array()
    require_bool(raw, row, tensor.name)
    stored = raw.view(numpy_dtype(row.name))
    values = np.empty(stored.size, numpy_dtype(dtype))
    cast_into(stored, values, tensor.name)
    return values


def require_below(indices: Indices, limit: int, codec: str, where: str) -> None:
    """Refuse indices of ``limit`` or more."""
    if indices.size and int(indices.max()) >= limit:
        raise CodecError(f"{codec}.index", f"expected indices below {limit}, found {int(indices.max())}", where=where)


def index_part(tensor: Tensor, role: str) -> Part:
    """Return a part of indices: u64, as zTensor 1.2 section 3 has them, or u32."""
    part = require_part(tensor, role)
    width = INDEX_BYTES.get(part.dtype)
    if width is None or part.type not in (None, part.dtype) or part.nbytes % width:
        raise CodecError(
            f"{tensor.codec}.index-dtype",
            f"expected whole u64 or u32 elements in part {role!r}, found {part.nbytes} bytes of "
            f"{part.type or part.dtype}",
            where=tensor.name,
        )
    return part


def read_indices(reader: PartReader, count: int, stored: DType, where: str) -> Indices:
    """Return the next indices of a part, as u64."""
    found = np.empty(count, numpy_dtype(stored.name))
    read_values(reader, found, stored, where)
    return found.astype(np.uint64, copy=False)


def all_indices(part: Part) -> Indices:
    """Return the indices of a part, as u64."""
    found: Indices = part.array().astype(np.uint64, copy=False)
    return found


class _Once:
    """Hands out parts that are made whole, as the bytes of one row."""

    def __init__(self, make: Callable[[], dict[str, Array]]) -> None:
        self._make = make

    def read(self, rows: int) -> dict[str, Array]:
        return self._make() if rows else {}

    def finish(self) -> None:
        """Every part was read whole, its digest checked."""


def laid_out(
    tensor: Tensor, layout: Layout, parts: tuple[PartSpec, ...], make: Callable[[], dict[str, Array]]
) -> Repacked:
    """Return a sparse tensor in another layout; ``make`` reads it whole, checks its positions and returns the parts."""
    row = DTYPES.get(tensor.dtype)
    if row is None or row.bits < 8:
        return cannot(layout, f"values of {tensor.dtype} are moved only")
    return Repacked(layout, parts, 1, 1, 4 * tensor.nbytes, None, lambda: _Once(make))


def refuse_options(codec: str, options: Mapping[str, Any]) -> None:
    """Refuse any option."""
    if options:
        raise UsageError(f"codec {codec} knows no options, found {min(options)!r}", rule=f"{codec}.option")


def values_spec(row: DType, size: int) -> PartSpec:
    """Describe the part of stored values of a tensor of ``size`` elements."""
    return PartSpec("values", row.storage, None, None if row.is_storage else row.name, limit=row.nbytes(size))


@dataclass(frozen=True, kw_only=True)
class WholeEncoder(Encoder):
    """What both encoders share: they take a tensor whole, since how many values are stored is known only then."""

    parts: tuple[PartSpec, ...]
    params: Mapping[str, Any] = field(default_factory=dict)
    fit_passes: int = 0
    step: int = 1
    single_chunk: bool = True
    lossless: bool = True

    def fit_pass(self, rows: Array) -> None:
        """Nothing to learn beforehand."""


def require_whole(rows: Array, expected: int, codec: str) -> None:
    """Refuse a chunk that is not the whole tensor."""
    if len(rows) != expected:
        raise CodecError(f"{codec}.whole", f"expected all {expected} rows in one chunk, found {len(rows)}")
