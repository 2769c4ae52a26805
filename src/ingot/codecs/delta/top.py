"""The largest of a tensor's differences, found while it streams by (``delta_int4``, ``delta_sparse``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ingot.codecs.delta.flat import PIECE, flat_values, non_finite
from ingot.core import native
from ingot.errors import CodecError
from ingot.model.spec import PartSpec
from ingot.model.tensor import Array

WHOLE = 1 << 24
"""Tensors of up to so many elements are encoded in one piece: read once, with 24 bytes an element at most."""
_GRID = 1 << 16
_LONG = 1 << 20
_MAGNITUDE, _INFINITY = np.int32(0x7FFFFFFF), np.int32(0x7F800000)


def streams(size: int) -> bool:
    """Whether a tensor of ``size`` elements is encoded in chunks."""
    return size > WHOLE


def grid_of(rows: int, cols: int) -> int:
    """Return the number of elements at whose multiples chunks of a matrix may begin: whole rows, about ``_GRID``.

    So chunks of rows and, where a source may be cut anywhere, of elements fit one grid. One long row is cut within.
    """
    return _GRID if rows == 1 and cols > _LONG else max(1, _GRID // max(cols, 1)) * max(cols, 1)


class Rest:
    """Learns of what is not among the largest; here nothing."""

    def passed(self, values: Array, admitted: Array, stop: int) -> None:
        """Take in the next ``values``, which end before element ``stop``, but for those at the places ``admitted``."""

    def evicted(self, positions: Array, values: Array, kept: Array) -> None:
        """Take in values that were admitted before, of which only those at the places ``kept`` stay (never all)."""


@dataclass(eq=False)
class RangeOfRest(Rest):
    """The range of what is not among the largest; and the last of it before every multiple of ``grid``.

    Where ``gaps`` is not set, the element itself before every such multiple.
    """

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

    def last_before(self, start: int) -> Array:
        """Return the value, as an array of one, that comes last before element ``start``, a multiple of ``grid``."""
        return self._what[start // self.grid : start // self.grid + 1]

    def passed(self, values: Array, admitted: Array, stop: int) -> None:
        self._widen(values, admitted)
        # Places counted from the end: where they run 0, 1, 2, ... all are admitted.
        run = 0
        if self.gaps:
            ends = values.size - 1 - admitted[::-1]
            apart = ends != np.arange(ends.size)
            run = int(np.argmax(apart)) if apart.any() else ends.size
        if run < values.size:
            self._now = (stop - 1 - run, float(values[values.size - 1 - run]))
        if stop % self.grid == 0:
            index = stop // self.grid
            self._where[index], self._what[index] = self._now
            self._reached = index + 1

    def evicted(self, positions: Array, values: Array, kept: Array) -> None:
        self._widen(values, kept)
        if not self.gaps:
            return
        others = np.ones(values.size, np.bool_)
        others[kept] = False
        places = np.flatnonzero(others)
        gone = positions[places]
        if gone[-1] > self._now[0]:
            self._now = (int(gone[-1]), float(values[places[-1]]))
        before = np.searchsorted(gone, np.arange(self._reached) * self.grid) - 1
        at = np.where(before >= 0, gone[before], -1)
        later = np.flatnonzero(at > self._where[: self._reached])
        self._where[later], self._what[later] = at[later], values[places[before[later]]]

    def _widen(self, values: Array, skipped: Array) -> None:
        low, high = native.kernels.range_between(values, skipped)
        self.low, self.high = min(self.low, low), max(self.high, high)


class Largest:
    """The ``count`` values of the largest magnitudes of a tensor of ``size``, of equal ones the first.

    Beside them it holds as many again, or ``PIECE``: candidates wait until so many came together, then the least go.
    What is not larger than the least one kept does not even wait.
    """

    def __init__(self, codec: str, size: int, count: int, grid: int, rest: Rest) -> None:
        self._codec, self._size, self._count, self._grid, self._rest = codec, size, count, grid, rest
        room = min(size, count + self.spare(count))
        self._positions, self._values = np.empty(room, np.int64), np.empty(room, np.float32)
        self._filled = self.taken = 0
        self._bound = np.int32(-1)  # the magnitude, as bits, that is to be exceeded

    @staticmethod
    def spare(count: int) -> int:
        """Return how many candidates wait beside ``count`` values."""
        return max(count, PIECE)

    @classmethod
    def memory(cls, size: int, count: int, grid: int) -> int:
        """Return the bytes that a search takes: candidates, what pruning makes of them, records per ``grid``."""
        room = min(size, count + cls.spare(count))
        return (12 + 26) * room + 12 * PIECE + 64 * (size // grid + 1)

    def take(self, values: Array) -> None:
        """Take in the next values, flat.

        Raises ``CodecError``: ``<codec>.whole`` (more than ``size``), ``<codec>.non-finite``.
        """
        if self.taken + values.size > self._size:
            raise CodecError(
                f"{self._codec}.whole", f"expected {self._size} values, found {self.taken + values.size} or more"
            )
        start = 0
        while start < values.size:
            stop = min(values.size, start + min(PIECE, self._grid - self.taken % self._grid))
            self._piece(values[start:stop])
            start = stop

    def result(self) -> tuple[Array, Array]:
        """Return positions and values, ascending, after the last value; not for a second time."""
        self._prune()
        return self._positions[: self._count].copy(), self._values[: self._count].copy()

    def _piece(self, values: Array) -> None:
        bits = values.view(np.int32) & _MAGNITUDE
        places = np.flatnonzero(bits > self._bound)
        chosen = bits[places]
        if places.size and chosen.max() >= _INFINITY:
            bad = int(places[int(np.argmax(chosen >= _INFINITY))])
            raise non_finite(self._codec, float(values[bad]), self.taken + bad)
        if self._filled + places.size > self._positions.size:
            self._prune()
            places = places[chosen > self._bound]
        self._rest.passed(values, places, self.taken + values.size)
        stop = self._filled + places.size
        np.add(places, self.taken, out=self._positions[self._filled : stop])
        self._values[self._filled : stop] = values[places]
        self._filled, self.taken = stop, self.taken + values.size

    def _prune(self) -> None:
        """Let go of all but the largest ``count``."""
        positions, values, count = self._positions[: self._filled], self._values[: self._filled], self._count
        if values.size <= count:
            return
        bits = values.view(np.int32) & _MAGNITUDE
        least = np.partition(bits, values.size - count)[values.size - count]
        keep = bits >= least
        ties = np.flatnonzero(bits == least)
        keep[ties[ties.size - (int(np.count_nonzero(keep)) - count) :]] = False  # of equal ones the last
        places = np.flatnonzero(keep)
        self._rest.evicted(positions, values, places)
        for start in range(0, count, PIECE):  # places are never before where they go, so nothing is lost on the way
            piece, stop = places[start : start + PIECE], min(start + PIECE, count)
            positions[start:stop], values[start:stop] = positions[piece], values[piece]
        self._filled, self._bound = count, least


class Cut(NamedTuple):
    """A chunk of ``values`` from element ``first`` on: ``before`` of the largest lie before it, ``at`` those within."""

    values: Array
    first: int
    before: int
    at: Array
    largest: Array


@dataclass(kw_only=True, eq=False)
class StreamedEncoder:
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

    @property
    def held(self) -> int:
        """Bytes that are held from the fit pass until ``forget``."""
        return Largest.memory(self.size, self.count, self.step)

    def forget(self) -> None:
        """Let go of what the fit pass found."""
        self._search = self._found = None

    def rest(self) -> Rest:
        """Return what a fit pass tells of all but the largest."""
        return Rest()

    def fit_pass(self, rows: Array) -> None:
        """Take in the next rows.

        Raises ``CodecError``: ``<codec>.non-finite``, a difference is NaN or infinite; ``<codec>.whole``, too many.
        """
        if self._search is None:
            self._search = Largest(self.codec, self.size, self.count, self.step, self.rest())
        self._search.take(flat_values(rows))
        if self._search.taken == self.size:
            positions, values = self._search.result()
            self._search = None
            self._found = positions, self.learnt(values)

    def learnt(self, values: Array) -> Array:
        """Take note that the fit pass is over; return the largest values as they are stored."""
        return values

    def cut(self, rows: Array, start: int) -> Cut:
        """Return what a chunk of rows is; rule ``<codec>.whole`` before the fit pass has seen all."""
        values = flat_values(rows)
        if self._found is None:
            raise CodecError(f"{self.codec}.whole", f"expected a fit pass of all {self.size} values before")
        first = start * (values.size // max(len(rows), 1))
        if first % self.step:
            raise ValueError(f"expected a chunk that begins at a multiple of {self.step} elements, found {first}")
        before, stop = np.searchsorted(self._found[0], (first, first + values.size)).tolist()
        return Cut(values, first, before, self._found[0][before:stop] - first, self._found[1][before:stop])
