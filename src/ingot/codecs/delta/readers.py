"""Readers of a delta's parts, piece by piece: values, packed codes, and values at positions (``spec/wdelta.md``)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ingot.codecs.cast import cast
from ingot.codecs.delta.flat import PIECE
from ingot.core import native
from ingot.core.dtypes import from_file, numpy_dtype
from ingot.core.floats import as_bits, float_name, written
from ingot.core.parallel import go_on
from ingot.errors import CodecError
from ingot.model.bytesource import MemorySource
from ingot.model.part import Part
from ingot.model.tensor import Array, Tensor

# Positions that a reader takes at a time.
_POSITIONS = PIECE // 4
# Bytes of positions up to which they are held, and read once.
_HELD = 1 << 20
# Bytes of positions that are looked at together, whether they ascend.
_LOOKED_AT = 1 << 18


class Values:
    """Sequential reading of a part's elements."""

    def __init__(self, part: Part) -> None:
        self._reader, self._dtype = part.reader(), part.dtype
        self.left = part.count

    def next(self, count: int) -> Array:
        """Return the next ``count`` elements."""
        raw = np.empty(count * numpy_dtype(self._dtype).itemsize, np.uint8)
        self.read_into(raw)
        return from_file(raw, self._dtype)

    def read_into(self, out: Array) -> None:
        """Read the bytes of the next elements, as many as ``out`` holds."""
        self._reader.readinto(out.data)
        self.left -= out.nbytes // numpy_dtype(self._dtype).itemsize

    def skip(self, count: int) -> None:
        """Pass over the next ``count`` elements."""
        self._reader.skip(count * numpy_dtype(self._dtype).itemsize)
        self.left -= count

    def finish(self) -> None:
        """Read what is left, then check length and digest."""
        while self.left:
            self.next(min(self.left, PIECE))
        self._reader.finish()


class Held:
    """``Values`` of an array in memory."""

    def __init__(self, array: Array) -> None:
        self._array = array

    @property
    def left(self) -> int:
        return self._array.size

    def next(self, count: int) -> Array:
        go_on()
        values, self._array = self._array[:count], self._array[count:]
        return values

    def skip(self, count: int) -> None:
        self._array = self._array[count:]

    def finish(self) -> None:
        """Length and digest were checked when the array was read."""


def values_of(part: Part) -> Values | Held:
    """Return a reader of a part's elements, which may be read only."""
    lying = _lying(part)
    return Values(part) if lying is None else Held(lying)


def _lying(part: Part) -> Array | None:
    """Return a part's elements where they lie in memory and no digest is to be checked: they need no copy.

    Another thread may write there meanwhile, so nothing may rest on what was found before.
    """
    if part.encoding != "raw" or not isinstance(part.source, MemorySource) or (part.verify and part.digest is not None):
        return None
    array: Array = part.array()
    return array if array.flags.aligned else None


class Codes:
    """Sequential reading of codes of 1 or 4 bits that follow each other without regard to bytes, high bits first."""

    def __init__(self, part: Part, bits: int) -> None:
        self._bytes, self._lying, self._per_byte = Values(part), _lying(part), 8 // bits
        self._position = 0
        self._carried = 0  # the byte that was begun
        self._buffer = np.empty(0, np.uint8)

    def next(self, count: int) -> tuple[Array, int]:
        """Return bytes that hold the next ``count`` codes, and how many codes of their first byte come before them.

        They are these until the next call, and may be read only.
        """
        byte, first = divmod(self._position, self._per_byte)
        size = -(-(first + count) // self._per_byte)
        self._position += count
        if self._lying is not None:
            go_on()
            return self._lying[byte : byte + size], first
        if size > self._buffer.size:  # one for all: fresh pages cost more than reading
            self._buffer = np.empty(size + 1, np.uint8)
        packed, begun = self._buffer[:size], 1 if first else 0
        packed[:begun] = self._carried
        if size > begun:
            self._bytes.read_into(packed[begun:])
        if size:
            self._carried = int(packed[-1])
        return packed, first

    def skip(self, count: int) -> None:
        """Pass over the next ``count`` codes; the byte in which they end is read."""
        stop = self._position + count
        seen = -(-self._position // self._per_byte)  # bytes that were read
        self._position = stop
        if self._lying is not None:
            return
        if stop // self._per_byte >= seen:
            self._bytes.skip(stop // self._per_byte - seen)
            if stop % self._per_byte:
                self._carried = int(self._bytes.next(1)[0])

    def finish(self) -> None:
        if self._lying is None:
            self._bytes.finish()


class Placed:
    """Sequential reading of positions with their values, in ascending order.

    Memory is bounded by what is asked for where positions ascend as they are stored, which one pass over them tells
    beforehand. Others are sorted in memory with their values.
    """

    def __init__(self, tensor: Tensor, positions: str, values: str) -> None:
        self._tensor = tensor
        self._positions, self._values = _ascending(tensor.parts[positions], tensor.parts[values], tensor.size)
        self._at = np.empty(0, np.int64)  # positions whose values come next
        self._last = -1

    def until(self, stop: int) -> Iterator[tuple[Array, Array]]:
        """Yield positions below ``stop`` that were not taken yet, and their values, in runs."""
        while True:
            cut = int(np.searchsorted(self._at, stop))
            if cut:
                yield self._at[:cut], self._values.next(cut)
            self._at = self._at[cut:]
            if self._at.size or not self._positions.left:
                return
            self._fill()

    def all_until(self, stop: int) -> tuple[Array, Array]:
        """Return positions below ``stop`` that were not taken yet, and their values."""
        runs = list(self.until(stop))
        if len(runs) == 1:
            return runs[0]
        empty = (self._at[:0], self._values.next(0))
        at, what = zip(empty, *runs, strict=True)
        return np.concatenate(at), np.concatenate(what)

    def skip(self, stop: int) -> int:
        """Pass over what lies below ``stop``, of which positions alone are read; return how many there were."""
        passed = 0
        while True:
            cut = int(np.searchsorted(self._at, stop))
            self._at, passed = self._at[cut:], passed + cut
            if self._at.size or not self._positions.left:
                self._values.skip(passed)
                return passed
            self._fill()

    def finish(self) -> None:
        self._positions.finish()
        self._values.finish()

    def _fill(self) -> None:
        count = min(self._positions.left, _POSITIONS)
        at = self._positions.next(count).astype(np.int64, copy=False)
        bad = native.kernels.first_unordered(at, self._last, self._tensor.size)
        if bad < count:
            raise self._misplaced(int(at[bad]))
        self._at, self._last = at, int(at[-1])

    def _misplaced(self, found: int) -> CodecError:
        codec, size = self._tensor.codec, self._tensor.size
        if 0 <= found < size:
            return CodecError(
                f"{codec}.duplicate", f"expected every position once, found {found} twice", where=self._tensor.name
            )
        return CodecError(
            f"{codec}.index", f"expected positions from 0 to {size - 1}, found {found}", where=self._tensor.name
        )


def _ascending(positions: Part, values: Part, size: int) -> tuple[Values | Held, Values | Held]:
    """Return readers of positions, in ascending order, and of their values."""
    lying = _lying(positions)
    if lying is not None and lying.dtype == np.int64 and native.kernels.first_unordered(lying, -1, size) == lying.size:
        return Held(lying), values_of(values)
    if positions.nbytes > _HELD and _ascends(positions, size):
        return Values(positions), Values(values)
    at = _whole(positions)
    if positions.nbytes <= _HELD and bool((at[1:] > at[:-1]).all()):
        return Held(at), values_of(values)
    order = np.argsort(at, kind="stable")
    return Held(at[order]), Held(_whole(values)[order])


def _ascends(positions: Part, size: int) -> bool:
    """Return whether positions ascend, each below ``size``; the digest is checked by whoever reads them next."""
    reader, last = positions.reader(), -1
    buffer = np.empty(min(positions.nbytes, _LOOKED_AT), np.uint8)  # one for all: fresh pages cost more than reading
    for start in range(0, positions.nbytes, _LOOKED_AT):
        piece = buffer[: positions.nbytes - start]
        reader.readinto(piece.data)
        at = from_file(piece, positions.dtype).astype(np.int64, copy=False)
        if native.kernels.first_unordered(at, last, size) < at.size:
            return False
        last = int(at[-1])
    return True


def _whole(part: Part) -> Array:
    reader = Values(part)
    array = reader.next(reader.left)
    reader.finish()
    return array


def place(positions: Array, values: Array, out: Array, where: str | None = None) -> None:
    """Put values, rounded to the element type of the flat ``out``, at ascending positions."""
    native.kernels.place_values(positions, as_bits(rounded(values, out, where)), written(out))


def rounded(values: Array, out: Array, where: str | None = None) -> Array:
    """Return values in the element type of ``out``; ``dense.overflow`` where it cannot hold one."""
    return cast(values, float_name(out), where)
