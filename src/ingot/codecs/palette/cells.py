"""Lloyd's steps on points grouped in cells, most of which are processed at once (``spec/palette.md``, "Vectors")."""

from __future__ import annotations

import numpy as np

from ingot.core.runtime import native
from ingot.core.runtime.parallel import default_workers, for_ranges
from ingot.model.tensor import Array

MIN_POINTS = 2048  # from this number of points on, cells are worth their cost
# as in native/core/palette_cells.h
_PART = 64
_PARTS = 16
_MAX_CELLS = 1 << 16
_PADDING = 16
# minimum number of points per cell; minimum number of cells per centroid
_POINTS = 24
_CELLS_PER_CENTROID = 512
_NO_OWNER = 257
THREADED_POINTS = 1 << 18  # from this number of points on, steps use threads


class Cells:
    """Points grouped in cells, with each point's code, and exact sums of points.

    Parameters
    ----------
    points : f32, [n, 2] or [n, 4], below 1; their f64 sums must be exact in any order
    clusters : int
        The number of centroids, which determines the number of cells.
    workers : int, optional
        The number of threads; it does not affect results.
    """

    def __init__(self, points: Array, clusters: int, workers: int | None = 1) -> None:
        count, size = points.shape
        target = max(min(count // _POINTS, clusters * _CELLS_PER_CENTROID), _PART)
        cells = min(1 << (target.bit_length() - 1), _MAX_CELLS)
        self._cells = cells
        self._count = count
        self._workers = 1 if count < THREADED_POINTS else default_workers() if workers is None else workers
        self._columns = np.empty(size * (count + _PADDING), np.float32)
        self._starts = np.empty(cells + 1, np.uint32)
        self._boxes = np.empty(2 * size * (cells + max(cells // _PART, _PARTS)), np.float32)
        self._order = np.empty(count, np.uint16)
        self._squares = native.kernels.palette_cells(points, self._columns, self._starts, self._boxes, self._order)
        self._codes = np.zeros(count, np.uint8)
        self._owners = np.full(cells, _NO_OWNER, np.uint16)
        self._totals: Array | None = None

    def nearest(self, centroids: Array) -> tuple[float, float, Array]:
        """Assign each point to its nearest centroid; return bounds of the squared error, and the mean of each cluster.

        The two bounds enclose the squared error that ``Cloud`` computes. ``Cloud`` adds f32 distances in f64; each
        distance has an error below 5e-7. For centroids with points, the means equal those of ``Cloud``.
        """
        count, size = centroids.shape
        parts = self._cells // _PART
        step = parts if self._workers == 1 else max(_PARTS, parts // 8)
        if self._totals is None:
            self._totals = np.zeros((-(-parts // step), count * (size + 1)))
        totals = self._totals

        def run(start: int, stop: int) -> None:
            part_totals = totals[start // step]
            native.kernels.palette_step(
                self._columns,
                self._starts,
                self._boxes,
                start,
                stop,
                centroids,
                self._codes,
                self._owners,
                part_totals[: count * size],
                part_totals[count * size :],
            )

        for_ranges(parts, step, run, self._workers)
        after = np.empty_like(centroids)
        low, high = native.kernels.palette_means(
            totals.reshape(-1), centroids, self._squares, self._count, after.reshape(-1)
        )
        return low, high, after

    def codes(self) -> Array:
        """Return the codes of the latest call of ``nearest``, in the order of the points."""
        out = np.empty(self._count, np.uint8)
        native.kernels.palette_codes(self._order, self._starts, self._codes, out)
        return out
