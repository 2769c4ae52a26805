"""Invertible linear maps of what flows between a model's matrices, applied to the rows of arrays.

Where ``x`` becomes ``T x``, a matrix that multiplied it becomes ``W T^-1``: its rows go through ``back``. One that puts
``x`` out becomes ``T W``: its columns go through ``forward``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ingot.model.tensor import Array
from ingot.quantization.hadamard import Order, transformed


class Turning(Protocol):
    """A map T of vectors of ``size`` numbers."""

    @property
    def size(self) -> int: ...

    def forward(self, rows: Array) -> Array:
        """Return ``T x`` for each row ``x``: f32 [rows, size]."""
        ...

    def back(self, rows: Array) -> Array:
        """Return ``w T^-1`` for each row ``w``: f32 [rows, size]."""
        ...


class Map(Turning, Protocol):
    """A map of what one matrix hands to others."""

    def repeated(self, block: int, times: int) -> Map:
        """Return the map of vectors in which each ``block`` numbers stand ``times`` times, one copy behind the other.

        Where blocks are shared among heads. Only a map that leaves blocks apart has it.
        """
        ...


@dataclass(frozen=True, slots=True)
class Scale:
    """A diagonal map: ``by`` forward, ``over`` back, each other's reciprocals where neither is 0; f32 [size]."""

    by: Array
    over: Array

    @property
    def size(self) -> int:
        return len(self.by)

    def forward(self, rows: Array) -> Array:
        found: Array = rows * self.by
        return found

    def back(self, rows: Array) -> Array:
        found: Array = rows * self.over
        return found

    def repeated(self, block: int, times: int) -> Scale:
        return Scale(_repeated(self.by, block, times), _repeated(self.over, block, times))


@dataclass(frozen=True, slots=True)
class Rotation:
    """``blocks`` times one behind the other: numbers get signs, then an orthogonal matrix of an order multiplies them.

    ``signs``: f32 [order's size].
    """

    order: Order
    signs: Array
    blocks: int = 1

    @property
    def size(self) -> int:
        return len(self.signs) * self.blocks

    def forward(self, rows: Array) -> Array:
        each = np.ascontiguousarray(rows, np.float32).reshape(-1, len(self.signs)) * self.signs
        return transformed(each, self.order).reshape(rows.shape)

    def back(self, rows: Array) -> Array:
        return self.forward(rows)  # orthogonal: the transposed inverse is the matrix itself

    def repeated(self, block: int, times: int) -> Rotation:
        assert block == len(self.signs)  # all blocks have the same matrix
        return Rotation(self.order, self.signs, self.blocks * times)


@dataclass(frozen=True, slots=True)
class Chain:
    """Maps one after the other."""

    maps: Sequence[Map]

    @property
    def size(self) -> int:
        return self.maps[0].size

    def forward(self, rows: Array) -> Array:
        for each in self.maps:
            rows = each.forward(rows)
        return rows

    def back(self, rows: Array) -> Array:
        for each in self.maps:
            rows = each.back(rows)
        return rows

    def repeated(self, block: int, times: int) -> Chain:
        return Chain([each.repeated(block, times) for each in self.maps])


@dataclass(frozen=True, slots=True)
class Parts:
    """Maps of pieces of a vector, in order; a number stands for so many numbers that stay as they are."""

    pieces: Sequence[Map | int]

    @property
    def size(self) -> int:
        return sum(piece if isinstance(piece, int) else piece.size for piece in self.pieces)

    def forward(self, rows: Array) -> Array:
        return self._each(rows, forward=True)

    def back(self, rows: Array) -> Array:
        return self._each(rows, forward=False)

    def _each(self, rows: Array, *, forward: bool) -> Array:
        found, start = [], 0
        for piece in self.pieces:
            size = piece if isinstance(piece, int) else piece.size
            own = rows[:, start : start + size]
            if not isinstance(piece, int):
                own = piece.forward(own) if forward else piece.back(own)
            found.append(own)
            start += size
        return np.concatenate(found, 1)


def both_sides(moment: Array, change: Turning) -> Array:
    """Return ``T M T^T`` of a second moment: f32 [size, size], symmetric."""
    once = change.forward(moment)
    twice = change.forward(np.ascontiguousarray(once.T))
    return _symmetric(twice)


def both_backs(moment: Array, change: Turning) -> Array:
    """Return ``T^-T M T^-1`` of a second moment of gradients: f32 [size, size], symmetric."""
    once = change.back(moment)
    twice = change.back(np.ascontiguousarray(once.T))
    return _symmetric(twice)


def _symmetric(found: Array) -> Array:
    out: Array = (found + found.T) * np.float32(0.5)
    return out


def _repeated(values: Array, block: int, times: int) -> Array:
    return np.repeat(values.reshape(-1, block), times, 0).reshape(-1)
