"""Transpose matrices of FP8 numbers without decoding; the blocks of scales are transposed too."""

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

COLUMN_BYTES = 1 << 26
"""Bytes of columns to read at once, because reading any column touches the entire matrix."""


def transpose_fp8(tensor: Tensor) -> Tensor | None:
    """Return a matrix of FP8 numbers transposed, computed by groups of columns.

    Returns None for another codec, and for a layout that must be decoded to be transposed, or is stored transposed.
    """
    if tensor.codec != ScaledCodebookLayout.codec or len(tensor.shape) != 2 or not tensor.size:
        return None
    layout = ScaledCodebookLayout.from_tensor(tensor)
    rows, cols = tensor.shape
    plain = layout.bits == 8 and not layout.nested and not layout.transposed and not isinstance(layout.grid, Run)
    if not plain or any(part.encoding != "raw" for part in tensor.parts.values()):
        return None
    CODECS[tensor.codec].check(tensor)
    window = Windows(tensor.parts[INDICES], rows, cols)

    def columns(first: int, last: int) -> Array:
        return np.ascontiguousarray(window.read(slice(0, rows), first, last).T)

    stored = tensor.parts[INDICES]
    scales = tensor.parts[SCALES]
    source = ComputedRows(stored.source, cols, rows, columns, COLUMN_BYTES)
    parts = {**tensor.parts, INDICES: Part("u8", source.size, source, where=stored.where)}
    grid = _transposed_grid(layout.grid, rows, cols)
    across = layout.groups(cols)
    if layout.scale_count(tensor.shape) > across > 1:
        word = np.dtype(f"u{DTYPES[layout.scales].bits // 8}")
        values = np.frombuffer(scales.view(), word).reshape(-1, across)
        parts[SCALES] = memory_part(np.ascontiguousarray(values.T).view(np.uint8), scales.dtype, scales.type)
    transposed_layout = replace(layout, grid=grid)
    return replace(tensor, shape=(cols, rows), parts=parts, params=transposed_layout.attributes(), origin=None)


def _transposed_grid(grid: Grid, rows: int, cols: int) -> Grid:
    """Return the grid of scales of the transposed matrix."""
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
