"""Byte sources that concatenate ranges of other parts or of decoded tensors, read or decoded on access.

The tensors of views have parts with such sources. Readers see an ordinary byte source.
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
from ingot.model.reading.slices import Reader, SkippingReader, skip_elements
from ingot.model.tensor import Array, Decoder, Tensor

R = TypeVar("R")

SCATTERED = 64
"""The largest number of backward runs (``count_backward_runs``) for which ranges are read one by one. If there are more
and reading a range is expensive, all bytes of the origin are read once."""


class RandomAccess(Protocol):
    """Random access to bytes that do not change, for several threads."""

    def readinto(self, start: int, out: memoryview) -> None:
        """Fill ``out`` with the bytes from offset ``start`` on."""
        ...

    def changed(self) -> bool:
        """Return whether the bytes were written to since they were opened."""
        ...

    def verify_sources(self) -> None:
        """Compare the digests that ranged reads do not check. Raises ``IntegrityError``."""
        ...

    def release(self) -> None:
        """Release cached bytes; later reads compute or read them again."""
        ...


class _ForwardReader(Generic[R]):
    """A sequential reader that serves ranges by offset.

    It reads on from the previous range, or starts a new pass if a range begins before that.
    """

    def __init__(self, begin: Callable[[], R], skip: Callable[[R, int], None]) -> None:
        self._begin = begin
        self._skip = skip
        self._reader: R | None = None
        self.position = 0

    def seek(self, start: int) -> R:
        """Return a reader whose next byte is at ``start``."""
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


class PartRange:
    """Random access to the decoded bytes of a part, for several threads.

    If ``scattered`` is false, ranges should be read in ascending order, and are checked by chunks. If it is true,
    ranges may be read in any order. The full part is then checked first, and a compressed part is decoded and cached.
    """

    def __init__(self, part: Part, *, scattered: bool) -> None:
        self.part = part
        self._scattered = scattered
        self._lock = threading.Lock()
        self._forward = _ForwardReader(lambda: part.by_ranges().reader(), PartReader.skip)
        self._decoded: memoryview | None = None
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
                if self._decoded is None:
                    self._decoded = part.view()
                out[:] = self._decoded[start : start + out.nbytes]
                return
            self._forward.seek(start).readinto(out)
            self._forward.position += out.nbytes

    def changed(self) -> bool:
        return self.part.source.changed()

    def verify_sources(self) -> None:
        if not self._proven and self.part.provable() is None:
            self._check()
        verify_sources(self.part)

    def release(self) -> None:
        with self._lock:
            self._decoded = None
            self._forward.release()

    def _check(self) -> None:
        StoredReader(self.part).finish()
        self._proven = True


class DecodedRange:
    """Random access to the decoded values of a tensor, as bytes in row-major order.

    Parameters
    ----------
    tensor : Tensor
    scattered : bool
        Whether ranges come in any order; if so, the full tensor is decoded and cached until ``release``.
    columns : sequence of (start, stop), optional
        Ascending ranges of columns; the other columns of the matrix are left out.
    """

    def __init__(self, tensor: Tensor, *, scattered: bool, columns: Sequence[tuple[int, int]] | None = None) -> None:
        decoder = _decoder(tensor)
        self._tensor = tensor
        self._scattered = scattered
        self._columns = columns
        self._dtype = numpy_dtype(tensor.dtype)
        by_element = decoder.elementwise and columns is None
        self._rows, self._cols = (tensor.size, 1) if by_element else tensor.matrix_shape
        self._width = self._cols if columns is None else sum(stop - start for start, stop in columns)
        self._lock = threading.Lock()
        parts = {role: part.by_ranges() for role, part in tensor.parts.items()}
        ranged = replace(tensor, parts=parts)
        self._forward: _ForwardReader[Reader] = _ForwardReader(lambda: decoder.reader(ranged), self._skip)
        self._last: tuple[int, Array] | None = None
        self._decoded: Array | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _value_bytes, (self._tensor, self._scattered, self._columns)

    def readinto(self, start: int, out: memoryview) -> None:
        width = self._width * self._dtype.itemsize
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

    def verify_sources(self) -> None:
        for part in self._tensor.parts.values():
            verify_part(part)

    def release(self) -> None:
        with self._lock:
            self._decoded = self._last = None
            self._forward.release()

    def _read(self, first: int, last: int) -> Array:
        """Return the rows ``first`` to ``last``, only their selected columns."""
        if self._decoded is None and self._scattered:
            self._decoded = self._tensor.numpy().reshape(self._rows, self._cols)
        if self._decoded is not None:
            return self._select_columns(self._decoded[first:last])
        out = np.empty((last - first, self._cols), self._dtype)
        begin = first
        if self._last is not None and self._last[0] == first:  # the previous request ended within this row
            out[0] = self._last[1]
            begin += 1
        if begin < last:
            self._forward.seek(begin).read_into(out[begin - first :])
            self._forward.position = last
        self._last = (last - 1, out[-1].copy())
        return self._select_columns(out)

    def _select_columns(self, rows: Array) -> Array:
        if self._columns is None:
            return rows
        selected = [rows[:, start:stop] for start, stop in self._columns]
        return np.concatenate(selected, axis=1) if selected else rows[:, :0]

    def _skip(self, reader: Reader, count: int) -> None:
        skip_elements(reader, count * self._cols, self._cols, self._dtype)


class ConcatSource(DerivedSource):
    """A byte source that concatenates runs of bytes of other sources.

    Parameters
    ----------
    name : str
        The name for error messages.
    origins : sequence of RandomAccess
    runs : i64 array [3, n]
        For each run the index of its origin, its offset in the origin and its length, in bytes.
    """

    mapped = False

    def __init__(self, name: str, origins: Sequence[RandomAccess], runs: Array) -> None:
        self.name = name
        self._origins = origins
        self._runs = runs
        self._ends = np.cumsum(runs[2])
        self.size = int(self._ends[-1]) if len(self._ends) else 0

    def __reduce__(self) -> tuple[Any, ...]:
        return ConcatSource, (self.name, self._origins, self._runs)

    def view(self, offset: int, length: int) -> memoryview:
        out = np.empty(max(length, 0), np.uint8).data
        self.readinto(offset, out)
        return out

    def readinto(self, offset: int, out: memoryview) -> None:
        require_inside(offset, out.nbytes, self.size, self.name)
        target = out.cast("B") if out.nbytes else out
        filled = 0
        index = int(np.searchsorted(self._ends, offset, "right"))
        while filled < out.nbytes:
            origin_index, start, length = (int(value) for value in self._runs[:, index])
            skipped = offset + filled - (int(self._ends[index]) - length)
            count = min(length - skipped, out.nbytes - filled)
            self._origins[origin_index].readinto(start + skipped, target[filled : filled + count])
            filled += count
            index += 1
        if offset + out.nbytes == self.size:
            for origin in self._origins:
                origin.release()

    def changed(self) -> bool:
        return any(origin.changed() for origin in self._origins)

    def close(self) -> None:
        """Do nothing: the checkpoint closes the files."""

    def verify_sources(self) -> None:
        """Compare the digests of all origins, except digests that ranged reads compare."""
        for origin in self._origins:
            origin.verify_sources()


def _decoder(tensor: Tensor) -> Decoder:
    if tensor.decoder is None:
        raise UnsupportedError(f"no decoder for codec {tensor.codec!r}", rule="codec.unknown", where=tensor.name)
    return tensor.decoder


def verify_sources(part: Part) -> None:
    """Compare the digests of the parts from which a part is computed, except digests that ranged reads compare."""
    if isinstance(part.source, DerivedSource):
        part.source.verify_sources()


def verify_part(part: Part) -> None:
    """Check the digest of a part if reads of ranges do not check it.

    If the part is computed from other parts, ``verify_sources`` checks them.
    """
    if part.verify and part.digest is not None and part.provable() is None:
        StoredReader(part).finish()
    verify_sources(part)


def can_skip(tensor: Tensor) -> bool:
    """Return whether runs of a tensor can be read without reading the elements before them."""
    return tensor.decoder is not None and isinstance(tensor.decoder.reader(tensor), SkippingReader)


def count_backward_runs(runs: Array) -> int:
    """Return the number of runs that begin before the end of the previous run of the same origin."""
    order = np.argsort(runs[0], kind="stable")
    origin, start, length = runs[:, order]
    return int(np.count_nonzero((origin[1:] == origin[:-1]) & (start[1:] < start[:-1] + length[:-1])))


def join_runs(runs: Array) -> Array:
    """Merge consecutive runs that are also adjacent in their origin, and remove empty runs."""
    runs = runs[:, runs[2] > 0]
    if runs.shape[1] < 2:
        return runs
    origin, start, length = runs
    new = np.append(True, (origin[1:] != origin[:-1]) | (start[1:] != start[:-1] + length[:-1]))
    first = np.flatnonzero(new)
    return np.stack([origin[first], start[first], np.add.reduceat(length, first)])


def _part_bytes(part: Part, scattered: bool) -> PartRange:
    return PartRange(part, scattered=scattered)


def _value_bytes(tensor: Tensor, scattered: bool, columns: Sequence[tuple[int, int]] | None) -> DecodedRange:
    return DecodedRange(tensor, scattered=scattered, columns=columns)
