"""Lloyd's steps on points that lie in cells: most are passed by as a whole (``spec/palette.md``, "Vectors")."""

from __future__ import annotations

import numpy as np

from ingot.core.runtime import native
from ingot.core.runtime.parallel import default_workers, for_ranges
from ingot.model.tensor import Array

LEAST = 2048  # points for which cells are worth their making
_PART, _PARTS, _MOST, _BEHIND = 64, 16, 1 << 16, 16  # as in native/core/palette_cells.h
_POINTS, _EACH = 24, 512  # of a cell, at least; cells for each centroid, at most
_NOBODY = 257
MANY = 1 << 18  # points whose steps are worth threads


class Cells:
    """Points in cells, with the code of each, and what sums of them are exactly.

    Parameters
    ----------
    points : f32, [n, 2] or [n, 4], below 1; f64 sums of any of them are exact in any order
    clusters : int
        How many centroids there will be: that says how many cells are worth their making.
    workers : int, optional
        Threads; no result depends on them.
    """

    def __init__(self, points: Array, clusters: int, workers: int | None = 1) -> None:
        count, size = points.shape
        wanted = max(min(count // _POINTS, clusters * _EACH), _PART)
        cells = min(1 << (wanted.bit_length() - 1), _MOST)
        self._cells, self._count = cells, count
        self._workers = 1 if count < MANY else default_workers() if workers is None else workers
        self._columns = np.empty(size * (count + _BEHIND), np.float32)
        self._starts = np.empty(cells + 1, np.uint32)
        self._boxes = np.empty(2 * size * (cells + max(cells // _PART, _PARTS)), np.float32)
        self._places = np.empty(count, np.uint16)
        self._squares = native.kernels.palette_cells(points, self._columns, self._starts, self._boxes, self._places)
        self._codes, self._owners = np.zeros(count, np.uint8), np.full(cells, _NOBODY, np.uint16)
        self._totals: Array | None = None

    def nearest(self, centroids: Array) -> tuple[float, float, Array]:
        """Find each point's nearest centroid; return the squared error, and the means of the points of each centroid.

        The squared error comes as two numbers between which it lies as ``Cloud`` computes it: that is f32 distances,
        wrong by less than 5e-7, added in f64; means, where there are points, are the same.
        """
        count, size = centroids.shape
        parts = self._cells // _PART
        step = parts if self._workers == 1 else max(_PARTS, parts // 8)
        if self._totals is None:
            self._totals = np.zeros((-(-parts // step), count * (size + 1)))
        totals = self._totals

        def run(start: int, stop: int) -> None:
            some = totals[start // step]
            native.kernels.palette_step(
                self._columns,
                self._starts,
                self._boxes,
                start,
                stop,
                centroids,
                self._codes,
                self._owners,
                some[: count * size],
                some[count * size :],
            )

        for_ranges(parts, step, run, self._workers)
        after = np.empty_like(centroids)
        low, high = native.kernels.palette_means(
            totals.reshape(-1), centroids, self._squares, self._count, after.reshape(-1)
        )
        return low, high, after

    def codes(self) -> Array:
        """Return the codes that ``nearest`` found last, in the order of the points."""
        out = np.empty(self._count, np.uint8)
        native.kernels.palette_codes(self._places, self._starts, self._codes, out)
        return out
