"""Matrices of FP8 with their rows and columns in each other's place: blocks turn with them, so any scale stays."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ingot.codecs.affine.windows import ComputedRows, Windows
from ingot.codecs.table import CODECS
from ingot.core.numeric.dtypes import DTYPES
from ingot.model.layouts.affine import ROW, Group, PerTensor, Row
from ingot.model.layouts.scaled_codebook import INDICES, SCALES, Grid, Run, ScaledCodebookLayout, Tiles
from ingot.model.part import Part, memory_part
from ingot.model.tensor import Array, Tensor

HELD = 1 << 26  # bytes of columns that are read at a time: each column is a journey through the whole matrix


def turned_bytes(tensor: Tensor) -> Tensor | None:
    """Return a matrix of FP8 turned, some columns at a time; None for others, and for those stored turned already."""
    if tensor.codec != ScaledCodebookLayout.codec or len(tensor.shape) != 2 or not tensor.size:
        return None
    layout, (rows, cols) = ScaledCodebookLayout.from_tensor(tensor), tensor.shape
    plain = layout.bits == 8 and not layout.nested and not layout.transposed and not isinstance(layout.grid, Run)
    if not plain or any(part.encoding != "raw" for part in tensor.parts.values()):
        return None
    CODECS[tensor.codec].check(tensor)
    window = Windows(tensor.parts[INDICES], rows, cols)

    def columns(first: int, last: int) -> Array:
        return np.ascontiguousarray(window.read(slice(0, rows), first, last).T)

    stored = tensor.parts[INDICES]
    scales = tensor.parts[SCALES]
    source = ComputedRows(stored.source, cols, rows, columns, HELD)
    parts = {**tensor.parts, INDICES: Part("u8", source.size, source, where=stored.where)}
    grid = _turned(layout.grid, rows, cols)
    across = layout.groups(cols)
    if layout.scale_count(tensor.shape) > across > 1:
        kind = np.dtype(f"u{DTYPES[layout.scales].bits // 8}")
        held = np.frombuffer(scales.view(), kind).reshape(-1, across)
        parts[SCALES] = memory_part(np.ascontiguousarray(held.T).view(np.uint8), scales.dtype, scales.type)
    made = replace(layout, grid=grid)
    return replace(tensor, shape=(cols, rows), parts=parts, params=made.attributes(), origin=None)


def _turned(grid: Grid, rows: int, cols: int) -> Grid:
    """Return what shares a scale in the turned matrix."""
    match grid:
        case PerTensor():
            return grid
        case Row():
            return Tiles(cols, 1)
        case Group(columns):
            return Tiles(columns, 1)
    assert isinstance(grid, Tiles)
    if grid.columns == 1 and rows % min(grid.rows, rows) == 0:
        return ROW if grid.rows >= rows else Group(grid.rows)
    return Tiles(grid.columns, grid.rows)
