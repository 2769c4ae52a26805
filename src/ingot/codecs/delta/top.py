"""A streaming search for the largest differences of a tensor (``delta_int4``, ``delta_sparse``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ingot.codecs.delta.flat import BATCH, Differences, PairEncoder, non_finite
from ingot.core.numeric.buffers import scratch
from ingot.core.runtime import native
from ingot.errors import CodecError
from ingot.model.spec import PartSpec
from ingot.model.tensor import Array

MAX_SINGLE_CHUNK = 1 << 24
"""Tensors of at most this many elements are encoded in one chunk: read once, with up to 24 bytes per element."""
_GRID = 1 << 16
_LONG = 1 << 20
_MAGNITUDE = np.int32(0x7FFFFFFF)


def streams(size: int) -> bool:
    """Return whether a tensor of ``size`` elements is encoded in chunks."""
    return size > MAX_SINGLE_CHUNK


def grid_of(rows: int, cols: int) -> int:
    """Return the number of elements at whose multiples chunks begin: that of full rows, about ``_GRID``.

    Chunks of rows and chunks of elements begin at the same multiples. Exception: a single row of more than ``_LONG``
    elements is divided at multiples of ``_GRID``.
    """
    return _GRID if rows == 1 and cols > _LONG else max(1, _GRID // max(cols, 1)) * max(cols, 1)


class PassedValues(NamedTuple):
    """A batch of differences, after candidates for the largest differences were removed from it.

    ``low`` and ``high`` are the smallest and the largest remaining difference. ``value`` is the last remaining
    difference and ``last`` its index, -1 if none remains.
    """

    differences: Differences
    low: float
    high: float
    last: int
    value: float


class RestObserver:
    """An observer of the differences that are not among the largest; the base class does nothing.

    If ``ranges`` is true, the search also reports candidates that it drops, so that the observer gets the exact range
    of the remaining differences.
    """

    ranges: ClassVar[bool] = False

    def observe_passed(self, passed: PassedValues, stop: int) -> None:
        """Observe a batch of differences, which ends before element ``stop`` of the tensor."""

    def observe_evicted(self, positions: Array, values: Array, kept_places: Array, gone: tuple[float, float]) -> None:
        """Observe the candidates when the search drops at least one of them.

        ``positions`` and ``values`` are all candidates. ``kept_places`` are the indices of those that remain, and
        ``gone`` is the range of the dropped values.
        """


@dataclass(eq=False)
class RestRange(RestObserver):
    """Records the range of the differences that are not among the largest, and a difference before each multiple of
    ``grid``.

    If ``gaps`` is set, this is the last difference before the multiple that is not among the largest. Otherwise it is
    the difference directly before the multiple.
    """

    ranges: ClassVar[bool] = True
    size: int
    grid: int
    gaps: bool
    low: float = float("inf")
    high: float = float("-inf")
    _now: tuple[int, float] = (-1, 0.0)
    _reached: int = 1
    _indices: Array = field(default_factory=lambda: np.empty(0, np.int64))
    _values: Array = field(default_factory=lambda: np.empty(0, np.float32))

    def __post_init__(self) -> None:
        count = self.size // self.grid + 1
        self._indices, self._values = np.full(count, -1, np.int64), np.zeros(count, np.float32)

    def last_before(self, start: int) -> float:
        """Return the difference that was recorded for ``start``, a multiple of ``grid``."""
        return float(self._values[start // self.grid])

    def observe_passed(self, passed: PassedValues, stop: int) -> None:
        self.low, self.high = min(self.low, passed.low), max(self.high, passed.high)
        if self.gaps and passed.last >= 0:
            self._now = (stop - passed.differences.size + passed.last, passed.value)
        if stop % self.grid == 0:
            index = stop // self.grid
            if not self.gaps:
                self._now = (stop - 1, passed.differences.value_at(passed.differences.size - 1))
            self._indices[index], self._values[index] = self._now
            self._reached = index + 1

    def observe_evicted(self, positions: Array, values: Array, kept_places: Array, gone: tuple[float, float]) -> None:
        self.low, self.high = min(self.low, gone[0]), max(self.high, gone[1])
        if not self.gaps:
            return
        is_dropped = np.ones(values.size, np.bool_)
        is_dropped[kept_places] = False
        dropped = np.flatnonzero(is_dropped)
        dropped_positions = positions[dropped]
        if dropped_positions[-1] > self._now[0]:
            self._now = (int(dropped_positions[-1]), float(values[dropped[-1]]))
        before = np.searchsorted(dropped_positions, np.arange(self._reached) * self.grid) - 1
        candidates = np.where(before >= 0, dropped_positions[before], -1)
        later = np.flatnonzero(candidates > self._indices[: self._reached])
        self._indices[later], self._values[later] = candidates[later], values[dropped[before[later]]]


class LargestSearch:
    """A search for the ``count`` largest magnitudes in a tensor of ``size`` elements.

    Among equal magnitudes, lower positions are preferred. The search collects up to ``spare`` candidates more than
    ``count``, then drops all but the largest ``count``. Later candidates must exceed the smallest remaining candidate.
    """

    def __init__(self, codec: str, size: int, count: int, grid: int, observer: RestObserver) -> None:
        self._codec = codec
        self._size = size
        self._count = count
        self._grid = grid
        self._observer = observer
        capacity = min(size, count + self.spare(count))
        self._positions = scratch((capacity,), np.int64)
        self._values = scratch((capacity,), np.float32)
        self._filled = self.taken = 0
        self._bound = -1  # bits of the magnitude that a candidate must exceed

    @staticmethod
    def spare(count: int) -> int:
        """Return the number of candidates that a search collects in addition to ``count``."""
        return max(count, BATCH)

    @classmethod
    def memory(cls, size: int, count: int, grid: int) -> int:
        """Return the number of bytes that a search needs: candidates, temporary arrays, and records for multiples of
        ``grid``.
        """
        capacity = min(size, count + cls.spare(count))
        return (12 + 26) * capacity + 12 * BATCH + 64 * (size // grid + 1)

    def add(self, differences: Differences) -> None:
        """Process the next differences.

        Raises ``CodecError`` ``<codec>.whole`` for more than ``size`` values, or ``<codec>.non-finite``.
        """
        if self.taken + differences.size > self._size:
            raise CodecError(
                f"{self._codec}.whole", f"expected {self._size} values, found {self.taken + differences.size} or more"
            )
        start = 0
        while start < differences.size:
            stop = min(differences.size, start + min(BATCH, self._grid - self.taken % self._grid))
            self._add_batch(differences.part(start, stop))
            start = stop

    def result(self) -> tuple[Array, Array]:
        """Return the positions and values of the largest differences, ordered by position; called once, after the last
        value.

        The arrays are views of the search's memory, which ``memory`` includes.
        """
        self._prune()
        return self._positions[: self._count], self._values[: self._count]

    def _add_batch(self, batch: Differences) -> None:
        collected = self._collect(batch)
        if collected[0] > self._positions.size - self._filled:
            self._prune()
            collected = self._collect(batch)
        count, bad, low, high, last, value = collected
        if bad < batch.size:
            raise non_finite(self._codec, batch.value_at(bad), self.taken + bad)
        stop = self._filled + count
        if self._observer.ranges:
            low, high = batch.range_without(self._positions[self._filled : stop] - self.taken, low, high)
        self._filled, self.taken = stop, self.taken + batch.size
        self._observer.observe_passed(PassedValues(batch, low, high, last, value), self.taken)

    def _collect(self, batch: Differences) -> tuple[int, int, float, float, int, float]:
        """Append the values above the bound to the candidates.

        Return the results of the kernel ``top_collect``.
        """
        free = slice(self._filled, None)
        candidates = self._positions[free], self._values[free]
        return native.kernels.top_collect(*batch, self._bound, self.taken, *candidates)

    def _prune(self) -> None:
        """Drop all candidates except the largest ``count``."""
        positions = self._positions[: self._filled]
        values = self._values[: self._filled]
        count = self._count
        if values.size <= count:
            return
        if not self._observer.ranges:
            self._bound = native.kernels.top_prune(positions, values, count)
            self._filled = count
            return
        indices = scratch((count,), np.int64)
        largest = scratch((count,), np.float32)
        _, low, high = native.kernels.top_of(values, None, "f32", indices, largest)
        gone = Differences.from_rows(values).range_without(indices, low, high)
        self._observer.observe_evicted(positions, values, indices, gone)
        values[:count] = largest
        for start in range(0, count, BATCH):  # an index is never below its destination, so nothing is overwritten early
            stop = min(start + BATCH, count)
            positions[start:stop] = positions[indices[start:stop]]
        self._filled, self._bound = count, int((largest.view(np.int32) & _MAGNITUDE).min())


class Cut(NamedTuple):
    """The largest differences within a chunk that begins at element ``first``.

    ``before`` is the number of largest differences before the chunk. ``positions``, counted from ``first``, and
    ``largest`` are the positions and values within the chunk.
    """

    first: int
    before: int
    positions: Array
    largest: Array


@dataclass(kw_only=True, eq=False)
class StreamedEncoder(PairEncoder):
    """An encoder that finds the largest differences in a fit pass, and then encodes chunks."""

    codec: str
    size: int
    count: int
    step: int
    parts: tuple[PartSpec, ...]
    params: Mapping[str, Any] = field(default_factory=dict)
    fit_passes: int = 1
    single_chunk: bool = False
    lossless: bool = False
    _search: LargestSearch | None = None
    _largest: tuple[Array, Array] | None = None

    def retained_bytes(self) -> int:
        return LargestSearch.memory(self.size, self.count, self.step)

    def forget(self) -> None:
        """Release the results of the fit pass."""
        self._search = self._largest = None

    def make_observer(self) -> RestObserver:
        """Return the observer of the differences that are not among the largest."""
        return RestObserver()

    def fit_differences(self, differences: Differences) -> None:
        """Find the largest differences in the fit pass; ``differences`` are those of the next rows.

        Raises ``CodecError`` ``<codec>.non-finite`` for NaN or infinity, ``<codec>.whole`` for too many values.
        """
        if self._search is None:
            self._search = LargestSearch(self.codec, self.size, self.count, self.step, self.make_observer())
        self._search.add(differences)
        if self._search.taken == self.size:
            positions, values = self._search.result()
            self._search = None
            self._largest = positions, self.finish_fit(values)

    def finish_fit(self, values: Array) -> Array:
        """Return the largest values in their stored type; called after the fit pass."""
        return values

    def cut(self, size: int, rows: int, start: int) -> Cut:
        """Return the position of a chunk of ``size`` elements, and the largest differences within it.

        Raises ``CodecError`` ``<codec>.whole`` if the fit pass is incomplete.
        """
        if self._largest is None:
            raise CodecError(f"{self.codec}.whole", f"expected a fit pass of all {self.size} values first")
        first = start * (size // max(rows, 1))
        if first % self.step:
            raise ValueError(f"expected a chunk that begins at a multiple of {self.step} elements, found {first}")
        before, stop = np.searchsorted(self._largest[0], (first, first + size)).tolist()
        return Cut(first, before, self._largest[0][before:stop] - first, self._largest[1][before:stop])
