"""The largest of a tensor's differences, found while it streams by (``delta_int4``, ``delta_sparse``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ingot.codecs.delta.flat import PIECE, Differences, PairEncoder, non_finite
from ingot.core import native
from ingot.core.buffers import scratch
from ingot.errors import CodecError
from ingot.model.spec import PartSpec
from ingot.model.tensor import Array

WHOLE = 1 << 24
"""Tensors of up to so many elements are encoded in one piece: read once, with 24 bytes an element at most."""
_GRID = 1 << 16
_LONG = 1 << 20
_MAGNITUDE = np.int32(0x7FFFFFFF)


def streams(size: int) -> bool:
    """Return whether a tensor of ``size`` elements is encoded in chunks."""
    return size > WHOLE


def grid_of(rows: int, cols: int) -> int:
    """Return the number of elements at whose multiples chunks of a matrix may begin: whole rows, about ``_GRID``.

    So chunks of rows and, where a source may be cut anywhere, of elements fit one grid. One long row is cut within.
    """
    return _GRID if rows == 1 and cols > _LONG else max(1, _GRID // max(cols, 1)) * max(cols, 1)


class Passed(NamedTuple):
    """Differences of which some were admitted among the largest: ``low`` to ``high`` is the range of the others.

    The last of the others is ``value`` at the place ``last``, -1 where there is none.
    """

    of: Differences
    low: float
    high: float
    last: int
    value: float


class Rest:
    """Learns of what is not among the largest; here nothing.

    ``ranges`` tells whether ranges must be exact, and what is let go of is told.
    """

    ranges: ClassVar[bool] = False

    def passed(self, piece: Passed, stop: int) -> None:
        """Take in the next differences, which end before element ``stop``."""

    def evicted(self, positions: Array, values: Array, kept: Array, gone: tuple[float, float]) -> None:
        """Take in values that were admitted before, of which only those at the places ``kept`` stay (never all).

        ``gone`` is the range of the others.
        """


@dataclass(eq=False)
class RangeOfRest(Rest):
    """The range of what is not among the largest; and the last of it before every multiple of ``grid``.

    Where ``gaps`` is not set, the element itself before every such multiple.
    """

    ranges: ClassVar[bool] = True
    size: int
    grid: int
    gaps: bool
    low: float = float("inf")
    high: float = float("-inf")
    _now: tuple[int, float] = (-1, 0.0)
    _reached: int = 1
    _where: Array = field(default_factory=lambda: np.empty(0, np.int64))
    _what: Array = field(default_factory=lambda: np.empty(0, np.float32))

    def __post_init__(self) -> None:
        count = self.size // self.grid + 1
        self._where, self._what = np.full(count, -1, np.int64), np.zeros(count, np.float32)

    def last_before(self, start: int) -> float:
        """Return the value that comes last before element ``start``, a multiple of ``grid``."""
        return float(self._what[start // self.grid])

    def passed(self, piece: Passed, stop: int) -> None:
        self.low, self.high = min(self.low, piece.low), max(self.high, piece.high)
        if self.gaps and piece.last >= 0:
            self._now = (stop - piece.of.size + piece.last, piece.value)
        if stop % self.grid == 0:
            index = stop // self.grid
            if not self.gaps:
                self._now = (stop - 1, piece.of.at(piece.of.size - 1))
            self._where[index], self._what[index] = self._now
            self._reached = index + 1

    def evicted(self, positions: Array, values: Array, kept: Array, gone: tuple[float, float]) -> None:
        self.low, self.high = min(self.low, gone[0]), max(self.high, gone[1])
        if not self.gaps:
            return
        others = np.ones(values.size, np.bool_)
        others[kept] = False
        places = np.flatnonzero(others)
        left = positions[places]
        if left[-1] > self._now[0]:
            self._now = (int(left[-1]), float(values[places[-1]]))
        before = np.searchsorted(left, np.arange(self._reached) * self.grid) - 1
        at = np.where(before >= 0, left[before], -1)
        later = np.flatnonzero(at > self._where[: self._reached])
        self._where[later], self._what[later] = at[later], values[places[before[later]]]


class Largest:
    """The ``count`` values of the largest magnitudes of a tensor of ``size``, of equal ones the first.

    Beside them it holds as many again, or ``PIECE``: candidates wait until so many came together, then the least go.
    What is not larger than the least one kept does not even wait.
    """

    def __init__(self, codec: str, size: int, count: int, grid: int, rest: Rest) -> None:
        self._codec, self._size, self._count, self._grid, self._rest = codec, size, count, grid, rest
        room = min(size, count + self.spare(count))
        self._positions, self._values = scratch((room,), np.int64), scratch((room,), np.float32)
        self._filled = self.taken = 0
        self._bound = -1  # the magnitude, as bits, that is to be exceeded

    @staticmethod
    def spare(count: int) -> int:
        """Return how many candidates wait beside ``count`` values."""
        return max(count, PIECE)

    @classmethod
    def memory(cls, size: int, count: int, grid: int) -> int:
        """Return the bytes that a search takes: candidates, what pruning makes of them, records per ``grid``."""
        room = min(size, count + cls.spare(count))
        return (12 + 26) * room + 12 * PIECE + 64 * (size // grid + 1)

    def take(self, of: Differences) -> None:
        """Take in the next differences.

        Raises ``CodecError``: ``<codec>.whole`` (more than ``size``), ``<codec>.non-finite``.
        """
        if self.taken + of.size > self._size:
            raise CodecError(
                f"{self._codec}.whole", f"expected {self._size} values, found {self.taken + of.size} or more"
            )
        start = 0
        while start < of.size:
            stop = min(of.size, start + min(PIECE, self._grid - self.taken % self._grid))
            self._piece(of.part(start, stop))
            start = stop

    def result(self) -> tuple[Array, Array]:
        """Return positions and values, ascending, after the last value; not for a second time.

        They hold the memory of all candidates, which ``memory`` counts: fresh pages would cost more than they free.
        """
        self._prune()
        return self._positions[: self._count], self._values[: self._count]

    def _piece(self, of: Differences) -> None:
        found = self._collected(of)
        if found[0] > self._positions.size - self._filled:
            self._prune()
            found = self._collected(of)
        count, bad, low, high, last, value = found
        if bad < of.size:
            raise non_finite(self._codec, of.at(bad), self.taken + bad)
        stop = self._filled + count
        if self._rest.ranges:
            low, high = of.range_without(self._positions[self._filled : stop] - self.taken, low, high)
        self._filled, self.taken = stop, self.taken + of.size
        self._rest.passed(Passed(of, low, high, last, value), self.taken)

    def _collected(self, of: Differences) -> tuple[int, int, float, float, int, float]:
        """Put those that exceed the bound behind the candidates, as the kernel ``top_collect`` tells of them."""
        free = slice(self._filled, None)
        places = self._positions[free], self._values[free]
        return native.kernels.top_collect(*of, self._bound, self.taken, *places)

    def _prune(self) -> None:
        """Let go of all but the largest ``count``."""
        positions, values, count = self._positions[: self._filled], self._values[: self._filled], self._count
        if values.size <= count:
            return
        if not self._rest.ranges:
            self._bound = native.kernels.top_prune(positions, values, count)
            self._filled = count
            return
        places, kept = scratch((count,), np.int64), scratch((count,), np.float32)
        _, low, high = native.kernels.top_of(values, None, "f32", places, kept)
        gone = Differences.given(values).range_without(places, low, high)
        self._rest.evicted(positions, values, places, gone)
        values[:count] = kept
        for start in range(0, count, PIECE):  # places are never before where they go, so nothing is lost on the way
            stop = min(start + PIECE, count)
            positions[start:stop] = positions[places[start:stop]]
        self._filled, self._bound = count, int((kept.view(np.int32) & _MAGNITUDE).min())


class Cut(NamedTuple):
    """A chunk from element ``first`` on: ``before`` of the largest lie before it, ``at`` those within."""

    first: int
    before: int
    at: Array
    largest: Array


@dataclass(kw_only=True, eq=False)
class StreamedEncoder(PairEncoder):
    """An encoder that finds the largest differences in one pass and then takes chunks that begin at its grid."""

    codec: str
    size: int
    count: int
    step: int
    parts: tuple[PartSpec, ...]
    params: Mapping[str, Any] = field(default_factory=dict)
    fit_passes: int = 1
    single_chunk: bool = False
    lossless: bool = False
    _search: Largest | None = None
    _found: tuple[Array, Array] | None = None

    def retained_bytes(self) -> int:
        return Largest.memory(self.size, self.count, self.step)

    def forget(self) -> None:
        """Let go of what the fit pass found."""
        self._search = self._found = None

    def rest(self) -> Rest:
        """Return what a fit pass tells of all but the largest."""
        return Rest()

    def fit_of(self, of: Differences) -> None:
        """Take in the next differences.

        Raises ``CodecError``: ``<codec>.non-finite``, a difference is NaN or infinite; ``<codec>.whole``, too many.
        """
        if self._search is None:
            self._search = Largest(self.codec, self.size, self.count, self.step, self.rest())
        self._search.take(of)
        if self._search.taken == self.size:
            positions, values = self._search.result()
            self._search = None
            self._found = positions, self.learnt(values)

    def learnt(self, values: Array) -> Array:
        """Take note that the fit pass is over; return the largest values as they are stored."""
        return values

    def cut(self, size: int, rows: int, start: int) -> Cut:
        """Return what a chunk of ``size`` elements is; rule ``<codec>.whole`` before the fit pass has seen all."""
        if self._found is None:
            raise CodecError(f"{self.codec}.whole", f"expected a fit pass of all {self.size} values before")
        first = start * (size // max(rows, 1))
        if first % self.step:
            raise ValueError(f"expected a chunk that begins at a multiple of {self.step} elements, found {first}")
        before, stop = np.searchsorted(self._found[0], (first, first + size)).tolist()
        return Cut(first, before, self._found[0][before:stop] - first, self._found[1][before:stop])
