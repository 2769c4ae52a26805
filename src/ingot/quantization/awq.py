"""Scales of input channels that reduce the rounding error of matrices (AWQ, arXiv 2306.00978).

Each channel of the input of a group of matrices is divided by a scale, and the matching column of each matrix is
multiplied by it. Before rounding, this does not change the outputs. AWQ runs a layer for each exponent that it tries.
Ingot computes the output error as ``tr(D A D^T)`` instead: D is the rounding error, and A the second moment of the
inputs. If the diagonal of G, the second moment of the output gradients, was collected, it weights the rows.
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
        The sampled rows.
    grid : Grid
    inputs : f32 [cols, cols] or None
        A, the second moment of the inputs; None if only its diagonal was collected.
    squares : f32 [cols]
        A's diagonal: mean squares of the inputs.
    heavy : f64 [rows]
        The weight of each row's errors.
    block, times : int
        Each block of ``block`` channels feeds ``times`` consecutive blocks of columns.
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
    """Return the scales to try: f32 [channels] each, with the geometric mean 1.

    ``squares`` are the mean squares of the channels. The scales are powers of their roots, where AWQ uses powers of the
    mean magnitude. The first power is 0, so the first candidate changes no weight.
    """
    roots = np.sqrt(squares.astype(np.float64))
    mean = roots.mean()
    if mean <= 0:
        return [np.ones(len(roots), np.float32)]
    logs = np.log(np.maximum(roots / mean, _FLOOR))
    logs -= logs.mean()
    return [np.exp(exponent * logs).astype(np.float32) for exponent in EXPONENTS]


def losses(reader: Reader, tried: Sequence[Array]) -> Array:
    """Return the rounding error of ``reader``'s matrix for each candidate of ``tried``: f64 [candidates].

    The matrix is rounded to the nearest level of the grid.
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
    """Return the weight of each channel's squared error: mean squares scaled to the mean 1, damped."""
    mean = squares.mean(dtype=np.float64)
    damped: Array = (squares / mean if mean > 0 else np.zeros_like(squares)) + DAMPING
    return np.ascontiguousarray(damped, np.float32)
