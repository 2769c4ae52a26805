"""Invertible linear maps T of the vectors between a model's matrices, applied to rows of arrays.

If ``x`` becomes ``T x``, a matrix that multiplies ``x`` becomes ``W T^-1``: ``back`` maps its rows. A matrix whose
output is ``x`` becomes ``T W``: ``forward`` maps its columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ingot.model.tensor import Array
from ingot.quantization.hadamard import HadamardOrder, transform


class LinearMap(Protocol):
    """A linear map T of vectors of ``size`` numbers."""

    @property
    def size(self) -> int: ...

    def forward(self, rows: Array) -> Array:
        """Return ``T x`` for each row ``x``: f32 [rows, size]."""
        ...

    def back(self, rows: Array) -> Array:
        """Return ``w T^-1`` for each row ``w``: f32 [rows, size]."""
        ...


class RepeatableMap(LinearMap, Protocol):
    """A linear map that can be repeated block by block."""

    def repeat(self, block: int, times: int) -> RepeatableMap:
        """Return the map for vectors in which each block of ``block`` numbers occurs ``times`` times in succession.

        An example is a key head that several query heads share. A map that mixes blocks does not support it.
        """
        ...


@dataclass(frozen=True, slots=True)
class Scale:
    """A diagonal map: ``forward`` multiplies by ``by``, ``back`` by ``over``; both f32 [size].

    Corresponding elements are reciprocals of each other unless one is 0.
    """

    by: Array
    over: Array

    @property
    def size(self) -> int:
        return len(self.by)

    def forward(self, rows: Array) -> Array:
        mapped: Array = rows * self.by
        return mapped

    def back(self, rows: Array) -> Array:
        mapped: Array = rows * self.over
        return mapped

    def repeat(self, block: int, times: int) -> Scale:
        return Scale(_repeat_blocks(self.by, block, times), _repeat_blocks(self.over, block, times))


@dataclass(frozen=True, slots=True)
class Rotation:
    """A rotation of each of ``blocks`` blocks of a vector.

    Each block is multiplied by ``signs``, f32 [block size], and then by the orthogonal matrix of ``order``.
    """

    order: HadamardOrder
    signs: Array
    blocks: int = 1

    @property
    def size(self) -> int:
        return len(self.signs) * self.blocks

    def forward(self, rows: Array) -> Array:
        blocks = np.ascontiguousarray(rows, np.float32).reshape(-1, len(self.signs)) * self.signs
        return transform(blocks, self.order).reshape(rows.shape)

    def back(self, rows: Array) -> Array:
        return self.forward(rows)  # orthogonal: the transposed inverse is the matrix itself

    def repeat(self, block: int, times: int) -> Rotation:
        assert block == len(self.signs)  # all blocks have the same matrix
        return Rotation(self.order, self.signs, self.blocks * times)


@dataclass(frozen=True, slots=True)
class Chain:
    """Several maps in sequence: ``forward`` applies the first one first."""

    maps: Sequence[RepeatableMap]

    @property
    def size(self) -> int:
        return self.maps[0].size

    def forward(self, rows: Array) -> Array:
        for link in self.maps:
            rows = link.forward(rows)
        return rows

    def back(self, rows: Array) -> Array:
        for link in self.maps:
            rows = link.back(rows)
        return rows

    def repeat(self, block: int, times: int) -> Chain:
        return Chain([link.repeat(block, times) for link in self.maps])


@dataclass(frozen=True, slots=True)
class Parts:
    """A map of a vector in consecutive segments.

    Each segment has a map; an integer in place of a map is the length of a segment that does not change.
    """

    segments: Sequence[RepeatableMap | int]

    @property
    def size(self) -> int:
        return sum(segment if isinstance(segment, int) else segment.size for segment in self.segments)

    def forward(self, rows: Array) -> Array:
        return self._apply(rows, forward=True)

    def back(self, rows: Array) -> Array:
        return self._apply(rows, forward=False)

    def _apply(self, rows: Array, *, forward: bool) -> Array:
        results = []
        start = 0
        for segment in self.segments:
            size = segment if isinstance(segment, int) else segment.size
            columns = rows[:, start : start + size]
            if not isinstance(segment, int):
                columns = segment.forward(columns) if forward else segment.back(columns)
            results.append(columns)
            start += size
        return np.concatenate(results, 1)


def both_sides(moment: Array, change: LinearMap) -> Array:
    """Return ``T M T^T`` for the second moment ``moment`` of vectors that the map T changes: f32 [size, size],
    symmetric.
    """
    once = change.forward(moment)
    twice = change.forward(np.ascontiguousarray(once.T))
    return _symmetric(twice)


def both_backs(moment: Array, change: LinearMap) -> Array:
    """Return ``T^-T M T^-1`` for the second moment ``moment`` of gradients: f32 [size, size], symmetric."""
    once = change.back(moment)
    twice = change.back(np.ascontiguousarray(once.T))
    return _symmetric(twice)


def _symmetric(moment: Array) -> Array:
    out: Array = (moment + moment.T) * np.float32(0.5)
    return out


def _repeat_blocks(values: Array, block: int, times: int) -> Array:
    return np.repeat(values.reshape(-1, block), times, 0).reshape(-1)
