"""Choice of codebooks: exact 1-D k-means, and k-means of short vectors (``spec/palette.md``, "Codebooks")."""

from __future__ import annotations

from math import frexp

import numpy as np

from ingot.codecs.palette import cells, near
from ingot.core.numeric.dtypes import as_bits, cast, float_name
from ingot.core.runtime import native
from ingot.core.runtime.parallel import for_ranges
from ingot.errors import CodecError
from ingot.model.tensor import Array

BINS = 1 << 16
SEED = 20260522
# Number of points from which k-means++ chooses, and on which the first Lloyd's steps run.
SAMPLE = 1 << 16
# Points per call: fixed, so that sums are added in the same order for any number of threads.
BLOCK = 1 << 16
ROUNDS_SAMPLE = 50
ROUNDS_ALL = 20
UNKNOWN = 64  # digits of points without known bounds
_EXACT = 1 << 53
_STILL = 1e-4  # relative gain of a round below which Lloyd's steps stop


def require_finite(values: Array, start: int, cols: int) -> float:
    """Return the largest magnitude of ``values`` (any shape, C order); raise ``palette.non-finite`` for NaN or
    infinity.

    For the message, ``start`` is the number of earlier rows of ``cols`` columns.
    """
    if not values.size:
        return 0.0
    low, high, bad = native.kernels.affine_range(as_bits(values), float_name(values))
    if bad < values.size:
        raise non_finite(values, int(bad), start, cols)
    return float(max(-low, high))


def non_finite(values: Array, bad: int, start: int, cols: int) -> CodecError:
    """Return the error ``palette.non-finite`` for the value at flat index ``bad``."""
    row, column = divmod(bad, max(cols, 1))
    value = float(values.reshape(-1)[bad])
    return CodecError(
        "palette.non-finite",
        f"expected finite weights, found {value:g} at row {start + row}, column {column}; keep this tensor dense",
    )


class Histogram:
    """Weighted values in 65536 bins: the input of exact k-means.

    Each f16 or bf16 value has its own bin. Values of f32 and f64 share a bin if they round to the same f16 after
    scaling by ``2**exponent``. Each bin stores the sum of its values, so clusters consist of full bins, but centroids
    are exact means of values.
    """

    def __init__(self, dtype: str, amax: float = 0.0) -> None:
        self._dtype = dtype
        self._weights = np.zeros(BINS)
        wide = dtype in ("f32", "f64")
        self._sums = np.zeros(BINS) if wide else None
        self._exponent = 0
        self.reset(amax)

    def reset(self, amax: float = 0.0) -> None:
        """Clear the histogram for values of at most ``amax``, without a new allocation."""
        self._weights.fill(0)
        if self._sums is not None:
            self._sums.fill(0)
            self._exponent = 15 - frexp(amax)[1] if amax else 0  # scales the largest value to between 2^14 and 2^15

    def add(self, values: Array, importance: Array | None = None) -> int:
        """Add values; return the index of the first NaN or infinity, or the number of values.

        ``importance`` has one f64 per column; ``values`` are then rows of columns.
        """
        cols = importance.size if importance is not None else values.size
        if not values.size:
            return 0
        return native.kernels.palette_count(
            as_bits(values), self._dtype, cols, importance, self._exponent, self._weights, self._sums
        )

    def centroids(self, count: int) -> Array:
        """Return ``count`` ascending f64 centroids of least squared error; the last is repeated if values are few."""
        values_of_code = np.zeros(count)
        filled = native.kernels.palette_solve(self._weights, self._sums, self._dtype, values_of_code)
        values_of_code[filled:] = values_of_code[filled - 1] if filled else 0.0
        return values_of_code


def entries_of(centroids: Array, entries: str, scale_dtype: str) -> tuple[Array, Array | None, Array]:
    """Round one codebook's centroids to the type of its entries.

    Returns
    -------
    codebook : of type ``entries``, an element for each centroid
    scales : one element of ``scale_dtype``, or None for float entries
    values : f32, the decoded entries

    Raises
    ------
    CodecError
        ``palette.entry-overflow``: a value exceeds the range of ``entries`` or of the scale's type.
    """
    if entries != "i8":
        codebook = cast(centroids.astype(np.float64), entries)
        values = codebook.astype(np.float32)
        if not np.isfinite(values).all():
            raise CodecError(
                "palette.entry-overflow", f"{entries} cannot store a codebook entry; use entries=bf16 or entries=f32"
            )
        return codebook, None, values
    amax = float(np.abs(centroids).max()) if centroids.size else 0.0
    scale = cast(np.array([amax / 127 if amax else 1.0]), scale_dtype)
    if amax and not scale[0]:
        scale = np.nextafter(scale, np.ones_like(scale))
    if not np.isfinite(scale[0]):
        raise CodecError("palette.entry-overflow", f"{scale_dtype} cannot represent a codebook scale; use scales=f32")
    codebook = np.clip(np.rint(centroids / float(scale[0])), -127, 127).astype(np.int8)
    return codebook, scale, codebook.astype(np.float32) * scale.astype(np.float32)


def assign(values: Array, entries: Array) -> Array:
    """Return the index of the nearest of ascending f32 ``entries`` for each value, u8, flat; ties go to the lower."""
    wide = entries.astype(np.float64)
    codes = np.empty(values.size, np.uint8)
    native.kernels.palette_assign(as_bits(values).reshape(-1), float_name(values), (wide[:-1] + wide[1:]) / 2, codes)
    return codes


class Cloud:
    """Points to cluster, with bounds from earlier centroids by which ``palette_nearest`` skips impossible ones.

    Parameters
    ----------
    points : f32, [n, 2] or [n, 4], finite
    workers : int, optional
        The number of threads; it does not affect results.
    digits : int
        All points are below 1 and multiples of ``2**-digits``, which decides whether f64 sums are exact in any order.
        If sums of a block are exact, a point with a new code moves from one sum to another, and other points are not
        added again. If sums of all points are exact, Lloyd's steps process most cells at once.
    """

    def __init__(self, points: Array, workers: int | None = 1, *, digits: int = UNKNOWN) -> None:
        self._points = points
        self._workers = workers
        self._digits = digits
        self._exact = BLOCK << digits <= _EXACT if digits < UNKNOWN else False
        self.codes = np.zeros(len(points), np.uint8)
        self._bounds = np.zeros(len(points), np.float32)
        self._before: Array | None = None
        self._totals: tuple[Array, Array] | None = None
        self._searcher: cells.Cells | near.Near | None = None

    def assign(self, centroids: Array) -> Array:
        """Return the index of each point's nearest centroid, u8; ties go to the first centroid."""
        if self._searcher:
            self._searcher.nearest(centroids)
            return self._searcher.codes()
        self.nearest(centroids)
        return self.codes

    def nearest(self, centroids: Array) -> tuple[float, Array, Array]:
        """Assign each point to its nearest centroid; return the squared error, and sums and counts of points per
        centroid.

        Ties go to the first centroid. Sums of blocks are added in order, whatever thread computed them.
        """
        count, size = centroids.shape
        blocks = max(1, -(-len(self._points) // BLOCK))
        moves, errors = self._exact and self._totals is not None, np.zeros(blocks)
        if not moves or self._totals is None:
            self._totals = np.zeros((blocks, count * size)), np.zeros((blocks, count))
        sums, counts = self._totals
        moved = 0.0 if self._before is None else _moved(self._before, centroids)
        self._before = centroids

        def run(start: int, stop: int) -> None:
            block = start // BLOCK
            run_slice = slice(start, stop)
            errors[block] = native.kernels.palette_nearest(
                self._points[run_slice],
                centroids,
                self.codes[run_slice],
                sums[block],
                counts[block],
                self._bounds[run_slice],
                moved,
                moves,
            )

        for_ranges(len(self._points), BLOCK, run, self._workers)
        return float(np.cumsum(errors)[-1]), sums.sum(axis=0).reshape(count, size), counts.sum(axis=0)

    def centroids(self, count: int) -> Array:
        """Return up to 256 centroids, f32 [count, size], by k-means++ with a fixed seed and Lloyd's steps."""
        if not len(self._points):
            return np.zeros((count, self._points.shape[1]), np.float32)
        step = -(-len(self._points) // SAMPLE)
        if step == 1:
            return self._lloyd(_spread_out(self._points, count), ROUNDS_SAMPLE)
        sample = Cloud(np.ascontiguousarray(self._points[::step]), self._workers, digits=self._digits)
        return self._lloyd(sample.centroids(count), ROUNDS_ALL)

    def _lloyd(self, centroids: Array, rounds: int) -> Array:
        """Return the centroids after Lloyd's steps; a centroid without points stays where it is."""
        if len(self._points) >= cells.MIN_POINTS and len(self._points) << self._digits <= _EXACT:
            if self._points.shape[1] == 4 and len(centroids) > near.MIN_CENTROIDS:
                self._searcher = near.Near(self._points, self._workers)
            else:
                self._searcher = cells.Cells(self._points, len(centroids), self._workers)
        step: _BoundedStep | _ExactStep = _BoundedStep(self, self._searcher) if self._searcher else _ExactStep(self)
        for _ in range(rounds):
            gains, after = step(centroids)
            if not gains:
                break
            centroids = after
        return centroids


class _ExactStep:
    """A step of Lloyd's algorithm, which returns whether to continue, and the new centroids."""

    def __init__(self, cloud: Cloud) -> None:
        self._cloud = cloud
        self._before = np.inf

    def __call__(self, centroids: Array) -> tuple[bool, Array]:
        error, sums, counts = self._cloud.nearest(centroids)
        before = self._before
        self._before = error
        means = (sums / np.maximum(counts, 1)[:, None]).astype(np.float32)
        return error < before * (1 - _STILL), np.where(counts[:, None] > 0, means, centroids)


class _BoundedStep:
    """A step of Lloyd's algorithm with a search that returns bounds of the error.

    If the bounds do not decide whether to continue, all points are searched.
    """

    def __init__(self, cloud: Cloud, searcher: cells.Cells | near.Near) -> None:
        self._cloud = cloud
        self._searcher = searcher
        self._before: tuple[float, float] = (np.inf, np.inf)
        self._centroids: Array | None = None

    def __call__(self, centroids: Array) -> tuple[bool, Array]:
        low, high, after = self._searcher.nearest(centroids)
        (before_low, before_high), self._before = self._before, (low, high)
        before = self._centroids
        self._centroids = centroids
        if before is None or high < before_low * (1 - _STILL):
            return True, after
        if low > before_high * (1 - _STILL):
            return False, after
        errors = [self._cloud.nearest(candidate)[0] for candidate in (before, centroids)]
        return errors[1] < errors[0] * (1 - _STILL), after


def digits_of(points: Array, dtype: str, exponent: int) -> int:
    """Return the smallest d for which all ``points`` are multiples of ``2**-d``; ``UNKNOWN`` for types other than f16,
    bf16.

    The points are values of ``dtype`` divided by ``2**exponent``. Values of f16 are multiples of 2^-24. A value of bf16
    is a multiple of its magnitude, rounded down to a power of two, divided by 2^7.
    """
    if dtype == "f16":
        return max(24 + exponent, 0)
    if dtype != "bf16":
        return UNKNOWN
    magnitude = points.view(np.uint32) & np.uint32(0x7FFFFFFF)
    magnitude -= np.uint32(1)  # zeros wrap around; they are multiples of everything
    smallest = int(magnitude.min(initial=0xFFFFFFFF)) + 1
    return UNKNOWN if smallest < 0x800000 else max(127 + 7 - min(smallest >> 23, 134), 0)


def _moved(before: Array, after: Array) -> float:
    """Return an upper bound of the distance by which any centroid moved."""
    away = after.astype(np.float64) - before
    return float(np.sqrt((away * away).sum(axis=1).max()) * (1 + 1e-6))


def _spread_out(points: Array, count: int) -> Array:
    """Return centroids of k-means++ (Arthur, Vassilvitskii 2007): points drawn by their squared distance."""
    random = np.random.default_rng(SEED)
    chosen = np.zeros(count, np.uint64)
    chosen[0] = random.integers(len(points))
    native.kernels.palette_spread(points, random.random(count - 1), chosen)
    return np.ascontiguousarray(points[chosen])
