"""Scales of the tensor's own rank, one per block of ``size / scales`` elements along each dimension, as grids.

Core ML writes scales so, and ONNX and others too. The affine family counts runs of consecutive elements where it can,
which more containers know.
"""

from __future__ import annotations

from math import prod

from ingot.model.layouts.affine import (
    FLAT_LSB,
    ROW,
    ROWS_LSB,
    WHOLE,
    AffineLayout,
    Blocks,
    Grid,
    Group,
    Row,
    Whole,
    Zero,
)
from ingot.model.layouts.base import Shape, matrix_shape


def on_grid(shape: Shape, scales: Shape, codes: tuple[int, bool], zero: Zero, dtype: str) -> AffineLayout:
    """Return the layout of codes that are one bit stream, with such scales.

    Parameters
    ----------
    shape : tuple of int
        Of the tensor.
    scales : tuple of int
        As many sizes, each a divisor of the tensor's.
    codes : (int, bool)
        Bits of a code, and whether codes are signed.
    zero : Zero
    dtype : str
        Of the values and of the scales.
    """
    grid, matrix = _grid(shape, scales)
    bits, signed = codes
    cols = (matrix or matrix_shape(shape))[1]
    packing = ROWS_LSB if cols * bits % 8 == 0 else FLAT_LSB
    return AffineLayout(bits, grid, packing, signed, zero, dtype, dtype, matrix)


def _grid(shape: Shape, scales: Shape) -> tuple[Grid, tuple[int, int] | None]:
    """Return what shares a scale, and how the row-major order is cut, if not as the tensor itself is."""
    size = prod(shape)
    count = prod(scales)
    if count == 1:
        return WHOLE, None
    axis = run_axis(shape, scales)
    if axis is None or not size:
        return Blocks(tuple(length // own for length, own in zip(shape, scales, strict=True))), None
    run = size // count
    own = shape[-1]
    if run == own:
        return ROW, None
    if own % run == 0:
        return Group(run), None
    cols = prod(shape[axis:]) if run != prod(shape[axis:]) and axis else run
    return (ROW if run == cols else Group(run)), (size // cols, cols)


def run_axis(shape: Shape, scales: Shape) -> int | None:
    """Return the dimension along which runs of elements share scales; None where they do not lie one after the other.

    Before it each index has scales of its own, behind it none has.
    """
    axis = next((index for index, (size, own) in enumerate(zip(shape, scales, strict=True)) if size != own), len(shape))
    behind = all(own == 1 for own in scales[axis + 1 :])
    if not behind:
        return None
    # Trailing dimensions of size 1 that have "scales of their own" belong to the run as well.
    return min(axis, len(shape) - 1)


def scale_dims(layout: AffineLayout, shape: Shape) -> Shape | None:
    """Return the shape of such scales of a tensor of this layout; None where they do not lie on a grid so."""
    if isinstance(layout.grid, Whole):
        return (1,) * len(shape)
    if isinstance(layout.grid, Blocks):
        return tuple(size // step for size, step in zip(shape, layout.grid.shape, strict=True))
    cols = layout.matrix_of(shape)[1]
    run = cols if isinstance(layout.grid, Row) else layout.grid.columns
    return _dims_of_run(shape, run) if run and cols % run == 0 else None


def _dims_of_run(shape: Shape, run: int) -> Shape | None:
    """Return the scale shape in which every ``run`` consecutive elements share one."""
    dims = [1] * len(shape)
    left = run
    for axis in range(len(shape) - 1, -1, -1):
        size = shape[axis]
        if left == 1:
            dims[axis] = size
        elif left >= size and left % size == 0:
            left //= size
        elif size % left == 0:
            dims[axis], left = size // left, 1
        else:
            return None
    return tuple(dims) if left == 1 else None
