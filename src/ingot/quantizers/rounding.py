"""Rounding a matrix to a grid: by weighted search, with feedback, and by descent under two factors.

The error that counts is ``tr(G D A D')``, D = rounded - weights, with A the second moments of what the columns multiply
and G those of the gradients of what the rows give (``spec/quantizers.md``). Sums have one order: results do not depend
on threads or machine.
"""

from __future__ import annotations

import numpy as np

from ingot.core import native
from ingot.errors import CodecError, UsageError
from ingot.model.tensor import Array
from ingot.quantizers.grid import Grid, Quantized

DAMPING = 0.01
PASSES = 3
_BLOCK = 64  # rows that descend together, and columns that take feedback at once where a group is a whole row


def damped(factor: Array, size: int, damping: float = DAMPING) -> Array:
    """Return a symmetric factor (f32), its mean diagonal 1, with ``damping`` added to the diagonal.

    What is singular becomes positive definite so; one of nothing but zeros becomes the identity.

    Raises
    ------
    UsageError
        ``quantizer.factor``: not ``size x size`` finite numbers, or a negative one on the diagonal.
    """
    if factor.shape != (size, size) or not np.isfinite(factor).all() or (np.diagonal(factor) < 0).any():
        raise UsageError(
            f"expected a factor of {size} x {size} finite numbers, not negative on the diagonal, found one of shape "
            f"{list(factor.shape)} that is not so",
            rule="quantizer.factor",
        )
    wide = factor.astype(np.float64)
    mean = float(np.diagonal(wide).mean()) if size else 0.0
    wide = wide / mean if mean > 0 else np.zeros_like(wide)
    wide[np.diag_indices(size)] += damping if mean > 0 else 1.0
    return wide.astype(np.float32)


def importance(weights: Array, grid: Grid, diagonal: Array | None = None) -> Quantized:
    """Round each weight to the nearest value, scales searched by squared error times ``diagonal``, one per column.

    Raises ``CodecError`` ``quantizer.scale-overflow``.
    """
    wide = np.ascontiguousarray(weights, np.float32)
    rounded = _blank(wide, grid)
    count = np.ones(wide.shape[1], np.float32) if diagonal is None else _positive(diagonal)
    _search(wide, rounded, count, range(rounded.scales.shape[1]))
    native.kernels.rounding_nearest(grid.native(), wide, *_stored(rounded))
    return rounded


def gptq(weights: Array, grid: Grid, inputs: Array, damping: float = DAMPING) -> Quantized:
    """Round column by column; the error of each is made up for by those after it (GPTQ, arXiv 2210.17323).

    With ``A = V V'``, V upper triangular, the error of column j is least at ``w_j + sum_k<j e_k V_kj / V_jj``, e the
    errors of the columns before. Scales of a group are searched when it is reached, weighted by ``V_jj ** 2``.

    Raises ``CodecError`` ``quantizer.scale-overflow``; ``UsageError`` ``quantizer.factor``.
    """
    wide = np.ascontiguousarray(weights, np.float32)
    cols = wide.shape[1]
    rounded, kernel = _blank(wide, grid), grid.native()
    factor, own = _factor(damped(inputs, cols, damping))
    targets, errors = wide.copy(), np.zeros_like(wide)
    width = cols // rounded.scales.shape[1]
    for first in range(0, cols, width):
        native.kernels.matrix_multiply_add(errors, factor, targets, 0, first, first, width)
        _search(targets, rounded, own, [first // width])
        for start in range(first, first + width, _BLOCK):
            stop = min(start + _BLOCK, first + width)
            native.kernels.rounding_feedback(kernel, (start, stop), wide, targets, factor, errors, *_stored(rounded))
            native.kernels.matrix_multiply_add(errors, factor, targets, start, stop, stop, first + width - stop)
    return rounded


def two_sided(
    weights: Array, grid: Grid, inputs: Array, outputs: Array, passes: int = PASSES, damping: float = DAMPING
) -> Quantized:
    """Round as ``gptq``, then move codes and scales one after the other to the least of ``tr(G D A D')``.

    Memory: the matrix three times, both factors twice (f32; the first once more in f64). Raises as ``gptq``.
    """
    wide = np.ascontiguousarray(weights, np.float32)
    rows, cols = wide.shape
    rounded, kernel = gptq(wide, grid, inputs, damping), grid.native()
    down, up = damped(inputs, cols, damping), damped(outputs, rows, damping)
    product = _product(rounded.values() - wide, down)
    for _ in range(passes):
        for start in range(0, rows, _BLOCK):
            some = slice(start, start + _BLOCK)
            zeros = None if rounded.zeros is None else rounded.zeros[some]
            native.kernels.rounding_descend(
                kernel,
                down,
                np.ascontiguousarray(up[some, some]),
                _product(up[some], product),
                product[some],
                True,
                rounded.codes[some],
                _stored(rounded)[1],
                rounded.scales[some],
                zeros,
            )
    return rounded


def weighted_error(difference: Array, inputs: Array, outputs: Array | None = None) -> float:
    """Return ``tr(G D A D')`` in f64; G the identity where it is None."""
    wide = difference.astype(np.float64)
    left = wide if outputs is None else outputs.astype(np.float64) @ wide
    return float(((left @ inputs.astype(np.float64)) * wide).sum())


def _blank(wide: Array, grid: Grid) -> Quantized:
    shape = (len(wide), grid.groups(wide.shape[1]))
    zeros = None if grid.zeros == "none" else np.zeros(shape, np.float32)
    return Quantized(grid, np.zeros(wide.shape, np.uint8), np.zeros(shape, np.float32), zeros)


def _stored(rounded: Quantized) -> tuple[Array, Array, Array, Array | None]:
    cols, groups = rounded.codes.shape[1], rounded.scales.shape[1]
    numbers = np.repeat(np.arange(groups, dtype=np.int32), cols // groups)
    return rounded.codes, numbers, rounded.scales, rounded.zeros


def _search(values: Array, rounded: Quantized, weights: Array, groups: range | list[int]) -> None:
    kernel, width = rounded.grid.native(), values.shape[1] // rounded.scales.shape[1]
    for group in groups:
        first, last = group * width, (group + 1) * width
        row = native.kernels.rounding_scales(
            kernel, values, first, last, np.ascontiguousarray(weights[first:last]), rounded.scales, rounded.zeros, group
        )
        if row < len(values):
            raise CodecError(
                "quantizer.scale-overflow",
                f"expected a scale that {rounded.grid.scales} can hold, found a larger one for the group at row {row}, "
                f"column {first}; use scales=bf16 or scales=f32",
            )


def _positive(diagonal: Array) -> Array:
    """Return weights of columns with mean 1, none below ``DAMPING``: columns that saw nothing count a little."""
    mean = float(diagonal.mean()) or 1.0
    return np.maximum(diagonal / mean, DAMPING).astype(np.float32)


def _factor(inputs: Array) -> tuple[Array, Array]:
    """Return V over its diagonal, and the squares of that, of ``inputs = V V'``, V upper triangular."""
    turned = np.ascontiguousarray(inputs[::-1, ::-1], np.float64)
    if not native.kernels.matrix_cholesky(turned):
        raise UsageError(
            "expected second moments, a positive definite matrix once damped, found another", rule="quantizer.factor"
        )
    upper = turned[::-1, ::-1]
    own = np.diagonal(upper)
    return np.ascontiguousarray(upper / own, np.float32), np.square(own).astype(np.float32)


def _product(a: Array, b: Array) -> Array:
    out = np.empty((len(a), b.shape[1]), np.float32)
    native.kernels.matrix_multiply(np.ascontiguousarray(a), b, out)
    return out
