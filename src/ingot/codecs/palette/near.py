"""Lloyd's steps on points with a bound of the distance to other centroids (``spec/palette.md``, "Vectors")."""

from __future__ import annotations

import numpy as np

from ingot.codecs.palette.cells import THREADED_POINTS
from ingot.core.runtime import native
from ingot.core.runtime.parallel import default_workers, for_ranges
from ingot.model.tensor import Array

MIN_CENTROIDS = 64  # with more centroids of vectors of 4, this search is faster than cells


class Near:
    """Points with codes, exact sums of points, and for each point a slack.

    The slack is a lower bound of how much farther all other centroids are. A point is searched again when moves of
    centroids have used up its slack.

    Parameters
    ----------
    points : f32, [n, 2] or [n, 4], below 1; their f64 sums must be exact in any order
    workers : int, optional
        The number of threads; it does not affect results.
    """

    def __init__(self, points: Array, workers: int | None = 1) -> None:
        count = len(points)
        self._points = points
        workers = 1 if count < THREADED_POINTS else default_workers() if workers is None else workers
        self._workers = workers
        self._step = max(count, 1) if workers == 1 else max(-(-count // (8 * workers)), 1)
        self._codes = np.zeros(count, np.uint8)
        self._slacks = np.zeros(count, np.float32)
        self._before: Array | None = None

    def _begin(self, centroids: Array) -> None:
        count, size = centroids.shape
        self._totals = np.zeros((-(-len(self._points) // self._step), count * (size + 1)))
        self._reach, self._shrink = np.zeros(count, np.float32), np.zeros(count, np.float32)
        sums = self._totals[0, : count * size]
        counts = self._totals[0, count * size :]
        self._squares = native.kernels.palette_guess(self._points, centroids, self._codes, self._slacks, sums, counts)

    def nearest(self, centroids: Array) -> tuple[float, float, Array]:
        """Assign each point to its nearest centroid; see ``Cells.nearest``."""
        count, size = centroids.shape
        if self._before is None:
            self._begin(centroids)
        native.kernels.palette_reach(self._before, centroids, self._reach, self._shrink)
        self._before = centroids
        totals = self._totals

        def run(start: int, stop: int) -> None:
            part_totals = totals[start // self._step]
            native.kernels.palette_near(
                self._points[start:stop],
                centroids,
                self._reach,
                self._shrink,
                self._codes[start:stop],
                self._slacks[start:stop],
                part_totals[: count * size],
                part_totals[count * size :],
            )

        for_ranges(len(self._points), self._step, run, self._workers)
        after = np.empty_like(centroids)
        low, high = native.kernels.palette_means(
            totals.reshape(-1), centroids, self._squares, len(self._points), after.reshape(-1)
        )
        return low, high, after

    def codes(self) -> Array:
        """Return the codes of the latest call of ``nearest``."""
        return self._codes
