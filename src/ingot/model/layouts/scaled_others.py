"""The layouts that the same indices and scales can have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from ingot.model.layouts.affine import ROW, Group, Row, Whole
from ingot.model.layouts.base import Described, Shape, matrix_shape
from ingot.model.layouts.scaled_codebook import (
    DIVIDE,
    MULTIPLY,
    ORDERS,
    TABLES,
    Grid,
    Run,
    ScaledCodebookLayout,
    Tiles,
)

_WORTH = 64  # elements of a block whose one scale is worth repeating for its rows or columns


def alternatives(layout: ScaledCodebookLayout, tensor: Described) -> Iterator[ScaledCodebookLayout]:
    """Yield the layouts that the same indices can have, that nearest to as stored first.

    The other order of the two indices of a byte; scales that are the same ones on a grid of another name, or repeated;
    a second scale by which they are divided instead of multiplied, or of 1; scales in f32; a table by its name. Which
    of them keeps every value, the codec's ``repack`` tells.
    """
    seconds = dict.fromkeys((layout.second, None, MULTIPLY, DIVIDE))
    scales = dict.fromkeys((layout.scales, "f32"))
    names = (None, *(name for name in TABLES if layout.values is None and layout.bits == 4))
    orders = (layout.order, *(order for order in ORDERS if order != layout.order and layout.bits == 4))
    grids = _grids(layout, layout.stored_shape(tensor.shape))
    for second, kind, name, order, grid in product(seconds, scales, names, orders, grids):
        if kind != layout.scales and second:  # of scales in f32 nobody has a second one
            continue
        nested = layout.nested if kind == layout.scales else None
        made = replace(layout, second=second, scales=kind, nested=nested, order=order, grid=grid)
        made = made if name is None else replace(made, values=name, codebook="f32")
        if made != layout:
            yield made


def _grids(layout: ScaledCodebookLayout, shape: Shape) -> Iterator[Grid]:
    """Yield the grids on which scales are the same ones, or the same repeated; ``shape`` is as stored."""
    cols = matrix_shape(shape)[1]
    yield layout.grid
    match layout.grid:
        case Group(columns) if columns == cols:
            yield ROW
            yield Run(columns)
        case Group(columns):
            yield Run(columns)
            yield Tiles(1, columns)
            yield from (Group(size) for size in (16, 32) if size < columns and columns % size == 0)
        case Run(elements) if cols and cols % elements == 0:
            yield Group(elements)
        case Tiles(1, columns) if cols and cols % columns == 0:
            yield Group(columns)
        case Tiles(tall, wide) if len(shape) == 2 and cols and tall * wide >= _WORTH:
            yield ROW if wide >= cols else Group(wide) if cols % wide == 0 else Tiles(1, wide)
            yield Tiles(tall, 1)
        case Row() if cols:
            yield Group(cols)
        case Whole() if cols:
            yield ROW


def same_scales(one: Grid, other: Grid, cols: int) -> bool:
    """Whether two grids have the same scales in the same order."""
    return _plain(one, cols) == _plain(other, cols)


def _plain(grid: Grid, cols: int) -> Grid:
    if isinstance(grid, Row):
        return Group(cols)
    if isinstance(grid, Tiles) and grid.rows == 1 and cols and cols % grid.columns == 0:
        return Group(grid.columns)
    return Group(grid.elements) if isinstance(grid, Run) and cols % grid.elements == 0 else grid
