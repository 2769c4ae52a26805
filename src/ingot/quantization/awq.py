"""Scales of input channels under which a matrix is rounded with less error (AWQ, arXiv 2306.00978).

What the matrices of a group multiply is divided by a scale for each channel and their columns are multiplied by it,
which changes nothing until they are rounded. Where AWQ runs a layer for each exponent that it tries, the error here is
``tr(D A D^T)``, rows weighed by G's diagonal where it is known: A says what running the layer would tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ingot.model.tensor import Array
from ingot.quantization.factors import DAMPING, Factors
from ingot.quantization.grid import Grid
from ingot.quantization.rounding import IMPORTANCE, multiplied, round_matrix
from ingot.quantization.table import learn_levels

EXPONENTS = tuple(step / 20 for step in range(20))
MOST_ROWS = 512
_FLOOR = np.float32(1e-3)  # of the mean, for channels that are dead


@dataclass(frozen=True, slots=True)
class Reader:
    """One matrix of a group: some of its rows, and what errors of it weigh.

    Parameters
    ----------
    weights : f32 [rows, cols]
    grid : Grid
    inputs : f32 [cols, cols] or None
        A; None where only its diagonal is known.
    squares : f32 [cols]
        A's diagonal, or mean squares of the inputs.
    heavy : f64 [rows]
        What errors of each row weigh.
    block, times : int
        The channel's scales stand ``times`` times in the columns, each ``block`` of them.
    """

    weights: Array
    grid: Grid
    inputs: Array | None
    squares: Array
    heavy: Array
    block: int = 1
    times: int = 1

    def spread(self, scales: Array) -> Array:
        """Return scales of channels as those of the columns."""
        if self.times == 1:
            return scales
        return np.repeat(scales.reshape(-1, self.block), self.times, 0).reshape(-1)


def candidates(squares: Array) -> list[Array]:
    """Return scales to try, from mean squares of the channels: f32 [channels] each, of geometric mean 1.

    The root of the mean square, which stands for AWQ's mean magnitude, to each of the exponents; the first one leaves
    everything as it is.
    """
    roots = np.sqrt(squares.astype(np.float64))
    mean = roots.mean()
    if mean <= 0:
        return [np.ones(len(roots), np.float32)]
    logs = np.log(np.maximum(roots / mean, _FLOOR))
    logs -= logs.mean()
    return [np.exp(exponent * logs).astype(np.float32) for exponent in EXPONENTS]


def losses(reader: Reader, tried: Sequence[Array]) -> Array:
    """Return the error of one matrix under each of the scales, rounded to the nearest of its grid: f64."""
    grid, levels = reader.grid, None
    if grid.learnt and grid.scaled:  # values of a palette are learnt anew, as weights under each of the scales differ
        levels = learn_levels(reader.weights, grid, _damped(reader.squares))
    return np.array([_loss(reader, reader.spread(scales), levels) for scales in tried])


def _loss(reader: Reader, spread: Array, levels: Array | None) -> float:
    # Nearest rounding looks at A's diagonal alone.
    factors = Factors(np.zeros((0, 0), np.float32), None, _damped(reader.squares / np.square(spread)))
    scaled = np.ascontiguousarray(reader.weights * spread)
    change = round_matrix(scaled, reader.grid, factors, IMPORTANCE, levels).values() / spread - reader.weights
    weighed = change * reader.squares if reader.inputs is None else multiplied(change, reader.inputs)
    return float(np.dot(reader.heavy, np.einsum("rc,rc->r", change.astype(np.float64), weighed)))


def _damped(squares: Array) -> Array:
    mean = squares.mean(dtype=np.float64)
    found: Array = (squares / mean if mean > 0 else np.zeros_like(squares)) + DAMPING
    return np.ascontiguousarray(found, np.float32)
