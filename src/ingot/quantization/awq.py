"""Scales of input channels that reduce the rounding error of matrices (AWQ, arXiv 2306.00978).

Each channel of the input of a group of matrices is divided by a scale, and the matrices' columns are multiplied by it.
Before rounding, this changes no result. AWQ runs a layer for each exponent that it tries. Ingot computes the error as
``tr(D A D^T)`` instead, because A predicts the result of running the layer. If G's diagonal is known, it weights the
rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ingot.model.tensor import Array
from ingot.quantization.factors import DAMPING, Factors
from ingot.quantization.grid import Grid
from ingot.quantization.products import multiply
from ingot.quantization.rounding import IMPORTANCE, round_matrix
from ingot.quantization.table import learn_levels

EXPONENTS = tuple(step / 20 for step in range(20))
MAX_ROWS = 512
_FLOOR = np.float32(1e-3)  # the smallest root over the mean, for dead channels


@dataclass(frozen=True, slots=True)
class Reader:
    """A matrix that multiplies the scaled channels: a sample of its rows, and the weights of its errors.

    Parameters
    ----------
    weights : f32 [rows, cols]
    grid : Grid
    inputs : f32 [cols, cols] or None
        A; None if only the diagonal of A was collected.
    squares : f32 [cols]
        A's diagonal, or mean squares of the inputs.
    heavy : f64 [rows]
        The weight of each row's errors.
    block, times : int
        Each block of ``block`` channels belongs to ``times`` consecutive blocks of columns.
    """

    weights: Array
    grid: Grid
    inputs: Array | None
    squares: Array
    heavy: Array
    block: int = 1
    times: int = 1

    def expand(self, scales: Array) -> Array:
        """Return one scale per column, from one scale per channel."""
        if self.times == 1:
            return scales
        return np.repeat(scales.reshape(-1, self.block), self.times, 0).reshape(-1)


def candidates(squares: Array) -> list[Array]:
    """Return scales to try, from mean squares of the channels: f32 [channels] each, of geometric mean 1.

    The scales are powers of the root mean square, where AWQ uses the mean magnitude. The first power is 0, so that the
    first candidate changes no weight.
    """
    roots = np.sqrt(squares.astype(np.float64))
    mean = roots.mean()
    if mean <= 0:
        return [np.ones(len(roots), np.float32)]
    logs = np.log(np.maximum(roots / mean, _FLOOR))
    logs -= logs.mean()
    return [np.exp(exponent * logs).astype(np.float32) for exponent in EXPONENTS]


def losses(reader: Reader, tried: Sequence[Array]) -> Array:
    """Return the rounding error of ``reader``'s matrix under each of the scales in ``tried``: f64 [scales].

    Each error is that of rounding to the nearest level of the grid.
    """
    grid = reader.grid
    levels = None
    if grid.learnt and grid.scaled:  # a palette's values are learnt for each of the scales
        levels = learn_levels(reader.weights, grid, damp(reader.squares))
    return np.array([_loss(reader, reader.expand(scales), levels) for scales in tried])


def _loss(reader: Reader, scales: Array, levels: Array | None) -> float:
    # Nearest rounding uses only A's diagonal.
    factors = Factors(np.zeros((0, 0), np.float32), None, damp(reader.squares / np.square(scales)))
    scaled = np.ascontiguousarray(reader.weights * scales)
    change = round_matrix(scaled, reader.grid, factors, IMPORTANCE, levels).values() / scales - reader.weights
    weighted = change * reader.squares if reader.inputs is None else multiply(change, reader.inputs)
    return float(np.dot(reader.heavy, np.einsum("rc,rc->r", change.astype(np.float64), weighted)))


def damp(squares: Array) -> Array:
    """Return the weights of squared errors for mean squares of the channels: the mean of 1, damped."""
    mean = squares.mean(dtype=np.float64)
    damped: Array = (squares / mean if mean > 0 else np.zeros_like(squares)) + DAMPING
    return np.ascontiguousarray(damped, np.float32)
