"""Infos of tensors as writers make them, decoded in native code and checked together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ingot.core.columns import Array, Column, Rows, numbers
from ingot.core.dtypes import DTYPES
from ingot.formats.gguf.carry import MAX_RANK
from ingot.formats.gguf.cursor import Cursor
from ingot.formats.gguf.types import BLOCKED, DENSE
from ingot.model.layouts.ggml import TYPES

# A name, sizes, a type, an offset.
_INFO = "NdIQ"
_MANY = 1 << 55
_TYPES = {**DENSE, **BLOCKED}
# Elements and bytes of a block by the type's number; a dense element is one of its own.
_BLOCKS = np.zeros((max(_TYPES) + 1, 2), np.int64)
for _number, _name in DENSE.items():
    _BLOCKS[_number] = 1, DTYPES[_name].bits // 8
for _number, _name in BLOCKED.items():
    _BLOCKS[_number] = TYPES[_name].elements, TYPES[_name].nbytes


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor: ``type`` is a dense element type or a type of block, ``offset`` counts from the data's start."""

    shape: tuple[int, ...]
    type: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Infos:
    """Infos that break no rule, with the alignment that the tensors lie by, and where their data begin and end."""

    rows: dict[str, int]
    shapes: Column
    types: Column
    offsets: Column
    nbytes: Array
    alignment: int
    start: int
    end: int

    def entries(self) -> Rows[Entry]:
        """Return the entries, which are made when they are asked for."""
        nbytes = self.nbytes.data

        def make(row: int) -> Entry:
            shape = self.shapes.sizes(row)[::-1]
            return Entry(shape, _TYPES[self.types.first[row]], self.offsets.first[row], nbytes[row])

        return Rows(self.rows, make)


def infos_of(cursor: Cursor, count: int, alignments: Sequence[int]) -> Infos | None:
    """Take the infos of ``count`` tensors, which lie by the first of the alignments by which they can.

    None where they deserve a closer look: then the cursor stays where it was.
    """
    before = cursor.position
    columns = cursor.heads(_INFO, count)
    found = None if columns is None else _checked(columns, cursor, alignments)
    if found is None:
        cursor.position = before
    return found


def _checked(columns: Sequence[Column], cursor: Cursor, alignments: Sequence[int]) -> Infos | None:
    names, shapes, types, offsets = columns
    rows = dict(zip(names.texts, range(len(names.texts)), strict=True))
    nbytes = _nbytes(shapes, types)
    if len(rows) < len(names.texts) or not _are_names(names.texts) or nbytes is None:
        return None
    for alignment in alignments:
        start = -(-cursor.position // alignment) * alignment
        end = _end(nbytes, numbers(offsets.first), alignment, cursor.size - start)
        if end is not None:
            return Infos(rows, shapes, types, offsets, nbytes, alignment, start, start + end)
    return None


def _are_names(names: Sequence[str]) -> bool:
    together = "".join(names)
    return together.isascii() and "\0" not in together


def _nbytes(shapes: Column, types: Column) -> Array | None:
    """Return the bytes of each tensor; None where a rule is broken."""
    counts, starts, kinds = numbers(shapes.third), numbers(shapes.second), numbers(types.first)
    if (np.diff(starts) > MAX_RANK).any() or (counts > _MANY).any() or (kinds >= len(_BLOCKS)).any():
        return None
    elements, size = _BLOCKS[kinds].T
    fastest = np.where(np.diff(starts) > 0, np.append(numbers(shapes.first), 1)[starts[:-1]], 1)
    if not elements.all() or (fastest % np.maximum(elements, 1)).any():
        return None
    nbytes: Array = counts // elements * size
    return nbytes


def _end(nbytes: Array, offsets: Array, alignment: int, room: int) -> int | None:
    """Return where the last tensor ends; None unless each lies where the ones before it and their padding end."""
    if not nbytes.size:
        return 0
    if nbytes.sum(dtype=np.float64) > room:  # no sum of theirs passes 63 bits
        return None
    ends = np.cumsum(-(-nbytes // alignment) * alignment)
    end = int(offsets[-1] + nbytes[-1])
    return end if offsets[0] == 0 and (offsets[1:] == ends[:-1]).all() and end <= room else None
