"""Conversion between grids of affine layouts and scales that have as many dimensions as the weights.

Core ML and ONNX have such scales. Along each dimension, a scale applies to ``size / scales`` consecutive elements. If
possible, affine layouts use groups of consecutive elements, because more containers support them.
"""

from __future__ import annotations

from math import prod

from ingot.model.layouts.affine import (
    FLAT_LSB,
    PER_TENSOR,
    ROW,
    ROWS_LSB,
    AffineLayout,
    Blocks,
    Grid,
    Group,
    PerTensor,
    Row,
    Zero,
)
from ingot.model.layouts.base import Shape, matrix_shape


def on_grid(shape: Shape, scales: Shape, codes: tuple[int, bool], zero: Zero, dtype: str) -> AffineLayout:
    """Return the layout of codes in one bit stream, whose scales have as many dimensions as the tensor.

    Parameters
    ----------
    shape : tuple of int
        The shape of the tensor.
    scales : tuple of int
        The shape of the scales; each of its sizes divides that of the tensor.
    codes : (int, bool)
        Bits of a code, and whether codes are signed.
    zero : Zero
    dtype : str
        The element type of the values and of the scales.
    """
    grid, matrix = _grid(shape, scales)
    bits, signed = codes
    cols = (matrix or matrix_shape(shape))[1]
    packing = ROWS_LSB if cols * bits % 8 == 0 else FLAT_LSB
    return AffineLayout(bits, grid, packing, signed, zero, dtype, dtype, matrix)


def _grid(shape: Shape, scales: Shape) -> tuple[Grid, tuple[int, int] | None]:
    """Return the grid, and the layout's matrix shape if it differs from the tensor's, else None."""
    size = prod(shape)
    count = prod(scales)
    if count == 1:
        return PER_TENSOR, None
    axis = run_axis(shape, scales)
    if axis is None or not size:
        return Blocks(tuple(length // scale_size for length, scale_size in zip(shape, scales, strict=True))), None
    run = size // count
    cols = shape[-1]
    if run == cols:
        return ROW, None
    if cols % run == 0:
        return Group(run), None
    matrix_cols = prod(shape[axis:]) if run != prod(shape[axis:]) and axis else run
    return (ROW if run == matrix_cols else Group(run)), (size // matrix_cols, matrix_cols)


def run_axis(shape: Shape, scales: Shape) -> int | None:
    """Return the dimension along which consecutive elements share a scale; None if scales have another arrangement.

    Indices of earlier dimensions have separate scales; elements of later dimensions share them.
    """
    axis = next(
        (index for index, (size, scale_size) in enumerate(zip(shape, scales, strict=True)) if size != scale_size),
        len(shape),
    )
    single_after = all(scale_size == 1 for scale_size in scales[axis + 1 :])
    if not single_after:
        return None
    # Trailing dimensions of size 1 belong to the run too, although each has as many scales as elements.
    return min(axis, len(shape) - 1)


def scale_dims(layout: AffineLayout, shape: Shape) -> Shape | None:
    """Return the shape of the scales of ``layout`` with as many dimensions as ``shape``; None if there is none."""
    if isinstance(layout.grid, PerTensor):
        return (1,) * len(shape)
    if isinstance(layout.grid, Blocks):
        return tuple(size // step for size, step in zip(shape, layout.grid.shape, strict=True))
    cols = layout.matrix_of(shape)[1]
    run = cols if isinstance(layout.grid, Row) else layout.grid.columns
    return _dims_of_run(shape, run) if run and cols % run == 0 else None


def _dims_of_run(shape: Shape, run: int) -> Shape | None:
    """Return the shape of scales that apply to ``run`` consecutive elements each; None if no shape has this meaning."""
    dims = [1] * len(shape)
    remaining = run
    for axis in range(len(shape) - 1, -1, -1):
        size = shape[axis]
        if remaining == 1:
            dims[axis] = size
        elif remaining >= size and remaining % size == 0:
            remaining //= size
        elif size % remaining == 0:
            dims[axis] = size // remaining
            remaining = 1
        else:
            return None
    return tuple(dims) if remaining == 1 else None
