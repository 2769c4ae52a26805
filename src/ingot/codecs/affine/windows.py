"""Pieces of parts that are not runs of bytes, and parts whose bytes are made when they are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from ingot.model.bytesource import DerivedSource
from ingot.model.part import Part
from ingot.model.tensor import Array

_HELD = 1 << 23  # bytes of whole rows that are made at a time
_FIRST = 1 << 20  # at first
_READ = 1 << 20  # bytes that are read at a time where only some bytes of each row are asked for
_FAR = 16  # times the bytes asked for, for which a row is read whole
_STEP = 32  # rows at whose multiples they begin: so many codes fill whole words, whatever their bits


class Windows:
    """A part as ``rows`` rows of ``width`` bytes, of which some bytes of some rows are asked for.

    A mapped part is looked into where it lies, and its digest checked once; of another one only what is asked for is
    read. A compressed part is held whole.
    """

    def __init__(self, part: Part, rows: int, width: int) -> None:
        self._part, self.rows, self.width = part, rows, width
        self._whole: Array | None = None

    def whole(self) -> Array | None:
        """Return all bytes, in one dimension, where that is free or they are held anyway; else None."""
        part = self._part
        if self._whole is None and (part.encoding != "raw" or part.source.mapped):
            self._whole = np.frombuffer(part.view(), np.uint8)
        return self._whole

    def read(self, rows: slice, start: int, stop: int) -> Array:
        """Return bytes ``start`` to ``stop`` of some rows, [rows, bytes]."""
        whole = self.whole()
        count = rows.stop - rows.start
        if not count or stop == start:
            return np.empty((count, stop - start), np.uint8)
        if whole is not None:
            return whole.reshape(self.rows, self.width)[rows, start:stop]
        out = np.empty((count, stop - start), np.uint8)
        if stop - start == self.width:
            self._part.readinto(rows.start * self.width, out.reshape(-1).data)
        elif self.width > _FAR * (stop - start):
            for index in range(count):
                self._part.readinto((rows.start + index) * self.width + start, out[index].data)
        else:  # what lies between is sooner read than passed over
            lines = max(1, _READ // self.width)
            held = np.empty((min(lines, count), self.width), np.uint8)
            for first in range(0, count, lines):
                some = held[: count - first]
                self._part.readinto((rows.start + first) * self.width, some.reshape(-1).data)
                out[first : first + len(some)] = some[:, start:stop]
        return out


class Watched(Protocol):
    """What bytes are made of, as far as it can be told whether that has changed."""

    @property
    def name(self) -> str:
        """For messages."""
        ...

    def changed(self) -> bool:
        """As ``ByteSource.changed``."""
        ...


class MadeSource(DerivedSource):
    """Rows of bytes that ``make(first, last)`` makes when they are read; at most ``most`` bytes of them are held, and
    ``beside`` that ``make`` holds itself.

    Who reads on gets more at a time, who only looks at the beginning leaves little behind. ``again`` tells whether
    ``make`` goes through all of the source each time.
    """

    mapped, again = False, False

    def __init__(
        self,
        source: Watched,
        rows: int,
        width: int,
        make: Callable[[int, int], Array],
        most: int = _HELD,
        beside: int = 0,
    ) -> None:
        self._source, self._rows, self._width, self._make = source, rows, width, make
        self.name, self.size = source.name, rows * width
        self._most = max(1, most // max(1, width) // _STEP) * _STEP
        self._step = self._least = min(self._most, max(1, _FIRST // max(1, width) // _STEP) * _STEP)
        self._first, self._held, self._beside = 0, np.empty(0, np.uint8), beside

    def working_bytes(self) -> int:
        """Return twice the bytes of a chunk, which is computed from as many other bytes."""
        return 2 * min(self.size, self._most * self._width) + self._beside

    def view(self, offset: int, length: int) -> memoryview:
        out = np.empty(length, np.uint8).data
        self.readinto(offset, out)
        return out

    @property
    def by_pieces(self) -> bool:
        """Whether some rows cost no more than their share of all: what they are made of lies in memory."""
        return bool(getattr(self._source, "mapped", False))

    def whole_rows(self, offset: int, length: int) -> Array | None:
        """Return so many bytes, which are nobody's to write to.

        None unless they are whole rows, not held, and no more than may be held where fewer at a time cost no more.
        """
        (row, before), (count, after) = divmod(offset, max(self._width, 1)), divmod(length, max(self._width, 1))
        if before or after or not count or row < self._first + self._held.size // max(self._width, 1):
            return None
        if count > self._most and not self.again:
            return None
        return self._make(row, row + count).reshape(-1).view(np.uint8)

    def readinto(self, offset: int, out: memoryview) -> None:
        if not out.nbytes:
            return
        target, done = np.frombuffer(out, np.uint8), 0
        while done < target.size:
            position = offset + done - self._first * self._width
            if not 0 <= position < self._held.size:
                row = (offset + done) // self._width // _STEP * _STEP
                goes_on = self._held.size and position == self._held.size
                self._step = min(4 * self._step, self._most) if goes_on else self._least
                last = min(row + self._step, self._rows)
                self._first, self._held = row, self._make(row, last).reshape(-1).view(np.uint8)
                continue
            piece = self._held[position : position + target.size - done]
            target[done : done + piece.size] = piece
            done += piece.size
        if offset + target.size == self.size:  # whoever reads in order has all
            self._first, self._held = 0, np.empty(0, np.uint8)

    def changed(self) -> bool:
        return self._source.changed()

    def close(self) -> None:
        """Nothing to do: the source belongs to somebody else."""


def made_part(
    part: Part, dtype: str, rows: int, width: int, make: Callable[[int, int], Array], *, again: bool = False
) -> Part:
    """Return a part of ``rows`` rows of ``width`` bytes that are made of ``part`` as they are read."""
    source = MadeSource(part.source, rows, width, make)
    source.again = again
    return Part(dtype, source.size, source, where=part.where)
