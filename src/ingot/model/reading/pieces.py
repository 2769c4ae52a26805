"""Bytes that are pieces of other parts, or what other tensors decode to: read, or decoded, when they are asked for.

A view's tensor is an ordinary tensor whose parts lie in a ``Pieces`` source. Whoever reads it does not notice.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from ingot.core.numeric.dtypes import DTYPES, numpy_dtype, require_inside
from ingot.errors import UnsupportedError
from ingot.model.bytesource import DerivedSource
from ingot.model.part import Part, PartReader, StoredReader, memory_part
from ingot.model.reading.slices import Reader, Skipping, pass_over
from ingot.model.tensor import Array, Decoder, Tensor

R = TypeVar("R")

SCATTERED = 64
"""Runs that go back before one is ahead of them: of more, everything is read once where ranges are dear."""


class Origin(Protocol):
    """Random access to bytes that do not change, by several threads."""

    def readinto(self, start: int, out: memoryview) -> None:
        """Fill ``out`` from byte ``start``."""
        ...

    def changed(self) -> bool:
        """As ``ByteSource.changed``."""
        ...

    def prove(self) -> None:
        """Compare the digests by which ranges cannot be checked; raises ``IntegrityError``."""
        ...

    def release(self) -> None:
        """Let go of what is held to answer the next request sooner."""
        ...


class _Forward(Generic[R]):
    """A sequential reader that is asked for ranges: it goes on where the last one ended, or begins again."""

    def __init__(self, begin: Callable[[], R], skip: Callable[[R, int], None]) -> None:
        self._begin = begin
        self._skip = skip
        self._reader: R | None = None
        self.position = 0

    def at(self, start: int) -> R:
        """Return the reader where ``start`` is next."""
        if self._reader is None or start < self.position:
            self._reader = self._begin()
            self.position = 0
        if start > self.position:
            self._skip(self._reader, start - self.position)
            self.position = start
        return self._reader

    def release(self) -> None:
        self._reader = None
        self.position = 0


class PartBytes:
    """The decoded bytes of a part.

    Ranges in order are checked by the chunks that they lie in. Where they are ``scattered``, the part is checked whole
    before the first one, and a compressed one is held.
    """

    def __init__(self, part: Part, *, scattered: bool) -> None:
        self.part = part
        self._scattered = scattered
        self._lock = threading.Lock()
        self._forward = _Forward(lambda: part.by_ranges().reader(), PartReader.skip)
        self._held: memoryview | None = None
        self._proven = part.digest is None or not part.verify

    def __reduce__(self) -> tuple[Any, ...]:
        return _part_bytes, (self.part, self._scattered)

    def readinto(self, start: int, out: memoryview) -> None:
        part = self.part
        if part.encoding == "raw":
            if self._scattered and not self._proven:
                self._check()
            if self._proven:
                part.source.readinto(part.offset + start, out)
                return
        with self._lock:
            if part.encoding != "raw" and self._scattered:
                if self._held is None:
                    self._held = part.view()
                out[:] = self._held[start : start + out.nbytes]
                return
            self._forward.at(start).readinto(out)
            self._forward.position += out.nbytes

    def changed(self) -> bool:
        return self.part.source.changed()

    def prove(self) -> None:
        if not self._proven and self.part.provable() is None:
            self._check()
        prove(self.part)

    def release(self) -> None:
        with self._lock:
            self._held = None
            self._forward.release()

    def _check(self) -> None:
        StoredReader(self.part).finish()
        self._proven = True


class ValueBytes:
    """What a tensor decodes to, in row-major order.

    Parameters
    ----------
    tensor : Tensor
    scattered : bool
        Whether runs come in no order: then all of it is decoded and held, as long as it is being read.
    columns : sequence of (start, stop), optional
        Only these, ascending, of a matrix.
    """

    def __init__(self, tensor: Tensor, *, scattered: bool, columns: Sequence[tuple[int, int]] | None = None) -> None:
        decoder = _decoder(tensor)
        self._tensor = tensor
        self._scattered = scattered
        self._columns = columns
        self._dtype = numpy_dtype(tensor.dtype)
        by_element = decoder.elementwise and columns is None
        self._rows, self._cols = (tensor.size, 1) if by_element else tensor.matrix_shape
        self._kept = self._cols if columns is None else sum(stop - start for start, stop in columns)
        self._lock = threading.Lock()
        parts = {role: part.by_ranges() for role, part in tensor.parts.items()}
        ranged = replace(tensor, parts=parts)
        self._forward: _Forward[Reader] = _Forward(lambda: decoder.reader(ranged), self._skip)
        self._last: tuple[int, Array] | None = None
        self._held: Array | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _value_bytes, (self._tensor, self._scattered, self._columns)

    def readinto(self, start: int, out: memoryview) -> None:
        width = self._kept * self._dtype.itemsize
        if not out.nbytes:
            return
        first = start // width
        last = -(-(start + out.nbytes) // width)
        with self._lock:
            rows = self._read(first, last)
        data = memory_part(rows, DTYPES[self._tensor.dtype].storage).view()
        out[:] = data[start - first * width : start - first * width + out.nbytes]

    def changed(self) -> bool:
        return any(part.source.changed() for part in self._tensor.parts.values())

    def prove(self) -> None:
        for part in self._tensor.parts.values():
            prove_whole(part)

    def release(self) -> None:
        with self._lock:
            self._held = self._last = None
            self._forward.release()

    def _read(self, first: int, last: int) -> Array:
        """Return rows, those columns of them that are kept."""
        if self._held is None and self._scattered:
            self._held = self._tensor.numpy().reshape(self._rows, self._cols)
        if self._held is not None:
            return self._picked(self._held[first:last])
        out = np.empty((last - first, self._cols), self._dtype)
        begin = first
        if self._last is not None and self._last[0] == first:  # of which the last request took only a piece
            out[0] = self._last[1]
            begin += 1
        if begin < last:
            self._forward.at(begin).read_into(out[begin - first :])
            self._forward.position = last
        self._last = (last - 1, out[-1].copy())
        return self._picked(out)

    def _picked(self, rows: Array) -> Array:
        if self._columns is None:
            return rows
        pieces = [rows[:, start:stop] for start, stop in self._columns]
        return np.concatenate(pieces, axis=1) if pieces else rows[:, :0]

    def _skip(self, reader: Reader, count: int) -> None:
        pass_over(reader, count * self._cols, self._cols, self._dtype)


class Pieces(DerivedSource):
    """Runs of other bytes, one behind the other: a ``ByteSource``.

    Parameters
    ----------
    name : str
        For messages.
    origins : sequence of Origin
    runs : [3, n] of i64
        For each run the origin, the byte in it at which the run begins, and its bytes.
    """

    mapped = False

    def __init__(self, name: str, origins: Sequence[Origin], runs: Array) -> None:
        self.name = name
        self._origins = origins
        self._runs = runs
        self._ends = np.cumsum(runs[2])
        self.size = int(self._ends[-1]) if len(self._ends) else 0

    def __reduce__(self) -> tuple[Any, ...]:
        return Pieces, (self.name, self._origins, self._runs)

    def view(self, offset: int, length: int) -> memoryview:
        out = np.empty(max(length, 0), np.uint8).data
        self.readinto(offset, out)
        return out

    def readinto(self, offset: int, out: memoryview) -> None:
        require_inside(offset, out.nbytes, self.size, self.name)
        target = out.cast("B") if out.nbytes else out
        done = 0
        index = int(np.searchsorted(self._ends, offset, "right"))
        while done < out.nbytes:
            which, start, length = (int(value) for value in self._runs[:, index])
            within = offset + done - (int(self._ends[index]) - length)
            count = min(length - within, out.nbytes - done)
            self._origins[which].readinto(start + within, target[done : done + count])
            done += count
            index += 1
        if offset + out.nbytes == self.size:
            for origin in self._origins:
                origin.release()

    def changed(self) -> bool:
        return any(origin.changed() for origin in self._origins)

    def close(self) -> None:
        """Nothing to do: the files belong to somebody else."""

    def prove(self) -> None:
        """Compare the digests of all that the pieces are of, as far as reading a piece does not."""
        for origin in self._origins:
            origin.prove()


def _decoder(tensor: Tensor) -> Decoder:
    if tensor.decoder is None:
        raise UnsupportedError(f"no decoder for codec {tensor.codec!r}", rule="codec.unknown", where=tensor.name)
    return tensor.decoder


def prove(part: Part) -> None:
    """Compare the digests by which pieces of a part cannot be checked; nothing where the part is no piece."""
    if isinstance(part.source, DerivedSource):
        part.source.prove()


def prove_whole(part: Part) -> None:
    """Compare a part's digest where pieces of it cannot be checked, and what it is made of itself."""
    if part.verify and part.digest is not None and part.provable() is None:
        StoredReader(part).finish()
    prove(part)


def skips(tensor: Tensor) -> bool:
    """Whether any run of a tensor can be read without what comes before it."""
    return tensor.decoder is not None and isinstance(tensor.decoder.reader(tensor), Skipping)


def backwards(runs: Array) -> int:
    """Return how many runs of the same origin begin before the end of the one before them."""
    order = np.argsort(runs[0], kind="stable")
    which, start, length = runs[:, order]
    return int(np.count_nonzero((which[1:] == which[:-1]) & (start[1:] < start[:-1] + length[:-1])))


def joined(runs: Array) -> Array:
    """Join runs that follow each other in their origin too, and leave out empty ones."""
    runs = runs[:, runs[2] > 0]
    if runs.shape[1] < 2:
        return runs
    which, start, length = runs
    new = np.append(True, (which[1:] != which[:-1]) | (start[1:] != start[:-1] + length[:-1]))
    first = np.flatnonzero(new)
    return np.stack([which[first], start[first], np.add.reduceat(length, first)])


def _part_bytes(part: Part, scattered: bool) -> PartBytes:
    return PartBytes(part, scattered=scattered)


def _value_bytes(tensor: Tensor, scattered: bool, columns: Sequence[tuple[int, int]] | None) -> ValueBytes:
    return ValueBytes(tensor, scattered=scattered, columns=columns)
