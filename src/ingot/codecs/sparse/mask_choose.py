"""Choice of the elements that a mask selects: nonzero ones, or the largest (``spec/sparse_mask.md``, "What is
kept")."""

from __future__ import annotations

import numpy as np

from ingot.core.numeric.floats import cast
from ingot.model.tensor import Array

_LOW = 16  # low bits of a magnitude, which the second pass counts


def magnitudes(values: Array) -> Array:
    """Return magnitudes as unsigned integers in the order of the magnitudes, NaN above infinity; f64 rounded to f32."""
    plain = cast(values, "f32") if values.dtype == np.float64 else np.ascontiguousarray(values)
    width = 8 * plain.dtype.itemsize
    magnitude: Array = plain.view(f"u{plain.dtype.itemsize}") & np.array(
        (1 << (width - 1)) - 1, f"u{plain.dtype.itemsize}"
    )
    return magnitude


class Keep:
    """A selection that drops only zeros; if ``exact``, only those without any bit, so that -0 survives.

    ``kept_count`` is the number of selected elements, complete after ``fit_passes`` passes of ``fit_pass``.
    """

    fit_passes = 1

    def __init__(self, exact: bool = False) -> None:
        self.exact, self.kept_count = exact, 0

    def fit_pass(self, rows: Array, last: bool) -> None:
        """Process the next rows of a pass; ``last`` if they end it."""
        self.kept_count += int(np.count_nonzero(self(rows)))

    def __call__(self, rows: Array) -> Array:
        """Return which elements of these rows are selected."""
        selected: Array = rows.view(f"u{rows.dtype.itemsize}") != 0 if self.exact else rows != 0
        return selected


class Above(Keep):
    """A selection of magnitudes above a threshold, and NaN."""

    def __init__(self, threshold: float) -> None:
        super().__init__()
        self._threshold = threshold

    def __call__(self, rows: Array) -> Array:
        wide = rows if rows.dtype == np.float64 else cast(rows, "f32").astype(np.float64)
        selected: Array = super().__call__(rows) & ~(np.abs(wide) <= self._threshold)
        return selected


class Pattern(Keep):
    """A selection without the ``zeros`` smallest of every ``size`` consecutive elements of a row.

    Ties drop the first.
    """

    def __init__(self, zeros: int, size: int) -> None:
        super().__init__()
        self._zeros, self._size = zeros, size

    def __call__(self, rows: Array) -> Array:
        keep = super().__call__(rows).reshape(-1, self._size)
        order = np.argsort(magnitudes(rows).reshape(-1, self._size), axis=1, kind="stable")
        np.put_along_axis(keep, order[:, : self._zeros], False, axis=1)
        return keep.reshape(rows.shape)


class Largest(Keep):
    """A selection without the smallest elements: all up to the magnitude for which their fraction is nearest ``share``.

    Equal magnitudes are dropped together; if two limits are equally near, the lower one is taken. 16-bit types take one
    pass; others take one over the high bits of magnitudes, and one over the low bits of those that decide.
    """

    def __init__(self, share: float, size: int, dtype: str) -> None:
        super().__init__()
        self._wide = dtype in ("f32", "f64")
        self.fit_passes = 2 if self._wide else 1
        self._target_count = round(share * size)
        self._size, self._below, self._high = size, 0, -1
        self._counts = np.zeros(1 << 15, np.int64)
        self._limit = 0  # the largest magnitude that is dropped

    def fit_pass(self, rows: Array, last: bool) -> None:
        magnitude = magnitudes(rows).reshape(-1)
        if not self._wide:
            self._counts += np.bincount(magnitude, minlength=1 << 15)
        elif self._high < 0:
            self._counts += np.bincount(magnitude >> _LOW, minlength=1 << 15)
        else:
            low = magnitude[magnitude >> _LOW == self._high] & 0xFFFF
            self._counts += np.bincount(low, minlength=1 << 16)
        if last:
            self._end_of_pass()

    def _end_of_pass(self) -> None:
        sums = self._below + np.cumsum(self._counts)
        index = int(np.searchsorted(sums, self._target_count))
        if self._wide and self._high < 0:
            self._high = index
            self._below = int(sums[index - 1]) if index else 0
            self._counts = np.zeros(1 << 16, np.int64)
            return
        dropped, before = int(sums[index]), int(sums[index - 1]) if index else self._below
        self._limit = index | (self._high << _LOW if self._wide else 0)
        if self._limit and self._target_count - before <= dropped - self._target_count:
            self._limit, dropped = self._limit - 1, before
        self.kept_count = self._size - dropped

    def __call__(self, rows: Array) -> Array:
        selected: Array = magnitudes(rows) > self._limit
        return selected
