"""Tensor infos, decoded and checked together with NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ingot.core.numeric.dtypes import DTYPES
from ingot.core.parsing.columns import Array, Rows
from ingot.formats.gguf.carry import MAX_RANK
from ingot.formats.gguf.cursor import Cursor, Records
from ingot.formats.gguf.types import BLOCKED, DENSE
from ingot.model.layouts.ggml import TYPES

_MAX_EXACT = 1 << 55
_TYPES = {**DENSE, **BLOCKED}
# Elements and bytes of a block by the type's number; a dense element counts as a block of one element.
_BLOCKS = np.zeros((max(_TYPES) + 1, 2), np.int64)
for _number, _name in DENSE.items():
    _BLOCKS[_number] = 1, DTYPES[_name].bits // 8
for _number, _name in BLOCKED.items():
    _BLOCKS[_number] = TYPES[_name].elements, TYPES[_name].nbytes


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor's entry: ``type`` is a dense element type or a block type, ``offset`` counts from the start of the
    data."""

    shape: tuple[int, ...]
    type: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Infos:
    """Valid tensor infos, the alignment of the tensors, and the start and end of their data.

    ``sizes`` has for each tensor a row of ``MAX_RANK`` sizes, the fastest first; only the first ``ranks`` of them
    count.
    """

    rows: dict[str, int]
    ranks: Array
    sizes: Array
    types: Array
    offsets: Array
    nbytes: Array
    alignment: int
    start: int
    end: int

    def entries(self) -> Rows[Entry]:
        """Return the entries, which are built on access."""

        def build(row: int) -> Entry:
            shape = tuple(self.sizes[row, : self.ranks[row]][::-1].tolist())
            return Entry(shape, _TYPES[int(self.types[row])], int(self.offsets[row]), int(self.nbytes[row]))

        return Rows(self.rows, build)


def read_infos(cursor: Cursor, count: int, alignments: Sequence[int]) -> Infos | None:
    """Read the infos of ``count`` tensors; their alignment is the first of ``alignments`` that fits.

    Return None if a rule may be broken. The cursor then does not move, and the caller runs the checks that name the
    rule.
    """
    before = cursor.position
    records = cursor.records(count, MAX_RANK)
    infos = None if records is None else _check(records, cursor, alignments)
    if infos is None:
        cursor.position = before
    return infos


def _check(records: Records, cursor: Cursor, alignments: Sequence[int]) -> Infos | None:
    ranks = np.array(records.ranks, np.int64)
    sizes, types, offsets = _fields(np.array(records.starts, np.int64), ranks, cursor)
    rows = _rows(records.names)
    nbytes = _nbytes(ranks, sizes, types)
    if rows is None or nbytes is None or (offsets > _MAX_EXACT).any():
        return None
    for alignment in alignments:
        start = -(-cursor.position // alignment) * alignment
        end = _end(nbytes, offsets.astype(np.int64), alignment, cursor.size - start)
        if end is not None:
            return Infos(rows, ranks, sizes, types, offsets, nbytes, alignment, start, start + end)
    return None


def _fields(starts: Array, ranks: Array, cursor: Cursor) -> tuple[Any, Any, Any]:
    """Return the sizes (1 beyond a tensor's rank), type and offset of each tensor; the infos begin at ``starts``."""
    sizes = np.ones((starts.size, MAX_RANK), np.uint64)
    types, offsets = np.empty(starts.size, np.int64), np.empty(starts.size, np.uint64)
    data = np.frombuffer(cursor.consumed(), np.uint8)
    for rank in np.unique(ranks).tolist():
        order = cursor.order
        dtype = np.dtype([("sizes", f"{order}u8", (rank,)), ("type", f"{order}u4"), ("offset", f"{order}u8")])
        rows = np.flatnonzero(ranks == rank)
        fields = data[starts[rows, None] + np.arange(dtype.itemsize)].view(dtype)[:, 0]
        sizes[rows, :rank] = fields["sizes"]
        types[rows], offsets[rows] = fields["type"], fields["offset"]
    return sizes, types, offsets


def _rows(names: Sequence[str]) -> dict[str, int] | None:
    """Return the index of each tensor by its name; None if a name is repeated, contains NUL, or is not ASCII."""
    rows = dict(zip(names, range(len(names)), strict=True))
    joined = "".join(names)
    return rows if len(rows) == len(names) and joined.isascii() and "\0" not in joined else None


def _nbytes(ranks: Array, sizes: Any, types: Array) -> Array | None:
    """Return the bytes of each tensor; None if a rule is broken or an overflow is possible."""
    if (
        (types >= len(_BLOCKS)).any()
        or (sizes > _MAX_EXACT).any()
        or (sizes.prod(1, dtype=np.float64) > _MAX_EXACT).any()
    ):
        return None
    elements, size = _BLOCKS[types].T
    counts, fastest = sizes.prod(1).astype(np.int64), sizes[:, 0].astype(np.int64)
    if not elements.all() or (fastest % np.maximum(elements, 1)).any():
        return None
    nbytes: Array = counts // elements * size
    return nbytes


def _end(nbytes: Array, offsets: Array, alignment: int, room: int) -> int | None:
    """Return the end of the last tensor; None unless the tensors follow each other, padded to the alignment."""
    if not nbytes.size:
        return 0
    if nbytes.sum(dtype=np.float64) > room:  # so that the sums below fit in 63 bits
        return None
    ends = np.cumsum(-(-nbytes // alignment) * alignment)
    end = int(offsets[-1] + nbytes[-1])
    return end if offsets[0] == 0 and (offsets[1:] == ends[:-1]).all() and end <= room else None
