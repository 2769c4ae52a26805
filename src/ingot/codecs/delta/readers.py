"""Sequential readers of a delta's parts: elements, packed codes, and values at positions (``spec/wdelta.md``)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ingot.codecs.cast import cast
from ingot.codecs.delta.flat import BATCH
from ingot.core.numeric.dtypes import as_bits, float_name, from_file, numpy_dtype, written
from ingot.core.runtime import native
from ingot.core.runtime.parallel import check_cancelled
from ingot.errors import CodecError
from ingot.model.bytesource import MemorySource
from ingot.model.part import Part
from ingot.model.tensor import Array, Tensor

_POSITIONS = BATCH // 4  # positions that are read at a time
_CACHED = 1 << 20  # positions of at most this many bytes are read once and cached
_CHECKED = 1 << 18  # bytes of positions that are read at a time to check whether they ascend


class ElementReader:
    """A sequential reader of a part's elements."""

    def __init__(self, part: Part) -> None:
        self._reader = part.reader()
        self._dtype = part.dtype
        self.remaining = part.count

    def next(self, count: int) -> Array:
        """Return the next ``count`` elements."""
        raw = np.empty(count * numpy_dtype(self._dtype).itemsize, np.uint8)
        self.read_into(raw)
        return from_file(raw, self._dtype)

    def read_into(self, out: Array) -> None:
        """Read the bytes of the next elements into ``out``."""
        self._reader.readinto(out.data)
        self.remaining -= out.nbytes // numpy_dtype(self._dtype).itemsize

    def skip(self, count: int) -> None:
        """Skip the next ``count`` elements."""
        self._reader.skip(count * numpy_dtype(self._dtype).itemsize)
        self.remaining -= count

    def finish(self) -> None:
        """Read the remaining elements, then check length and digest."""
        while self.remaining:
            self.next(min(self.remaining, BATCH))
        self._reader.finish()


class ArrayReader:
    """An ``ElementReader`` of an array in memory."""

    def __init__(self, array: Array) -> None:
        self._array = array

    @property
    def remaining(self) -> int:
        return self._array.size

    def next(self, count: int) -> Array:
        check_cancelled()
        values = self._array[:count]
        self._array = self._array[count:]
        return values

    def skip(self, count: int) -> None:
        self._array = self._array[count:]

    def finish(self) -> None:
        """Do nothing: length and digest were checked when the array was read."""


def values_of(part: Part) -> ElementReader | ArrayReader:
    """Return a sequential reader of a part's elements; its arrays may be read-only."""
    array = _in_memory(part)
    return ElementReader(part) if array is None else ArrayReader(array)


def _in_memory(part: Part) -> Array | None:
    """Return a part's elements without a copy if they are in memory and have no digest to check; else None.

    Another thread may write to the memory, so callers must check the values that they use.
    """
    if part.encoding != "raw" or not isinstance(part.source, MemorySource) or (part.verify and part.digest is not None):
        return None
    array: Array = part.array()
    return array if array.flags.aligned else None


class Codes:
    """A sequential reader of codes of 1 or 4 bits, packed as one stream, high bits first."""

    def __init__(self, part: Part, bits: int) -> None:
        self._bytes = ElementReader(part)
        self._array = _in_memory(part)
        self._per_byte = 8 // bits
        self._position = 0
        self._carried = 0  # the byte in which the previous codes ended
        self._buffer = np.empty(0, np.uint8)

    def next(self, count: int) -> tuple[Array, int]:
        """Return bytes with the next ``count`` codes, and the number of earlier codes in their first byte.

        The bytes are valid until the next call, and may be read-only.
        """
        byte, first = divmod(self._position, self._per_byte)
        size = -(-(first + count) // self._per_byte)
        self._position += count
        if self._array is not None:
            check_cancelled()
            return self._array[byte : byte + size], first
        if size > self._buffer.size:  # reused, because new pages cost more than reading
            self._buffer = np.empty(size + 1, np.uint8)
        packed = self._buffer[:size]
        carried = 1 if first else 0
        packed[:carried] = self._carried
        if size > carried:
            self._bytes.read_into(packed[carried:])
        if size:
            self._carried = int(packed[-1])
        return packed, first

    def skip(self, count: int) -> None:
        """Skip the next ``count`` codes.

        If the skipped codes end within a byte, that byte is read and buffered.
        """
        stop = self._position + count
        seen = -(-self._position // self._per_byte)  # bytes already read
        self._position = stop
        if self._array is not None:
            return
        if stop // self._per_byte >= seen:
            self._bytes.skip(stop // self._per_byte - seen)
            if stop % self._per_byte:
                self._carried = int(self._bytes.next(1)[0])

    def finish(self) -> None:
        if self._array is None:
            self._bytes.finish()


class PositionReader:
    """A sequential reader of positions and values, in ascending order of positions.

    A first pass checks whether stored positions ascend. If they do, the reader buffers no more than the caller
    requests; otherwise it sorts all positions and values in memory.
    """

    def __init__(self, tensor: Tensor, positions: str, values: str) -> None:
        self._tensor = tensor
        self._indices, self._values = _ascending_readers(tensor.parts[positions], tensor.parts[values], tensor.size)
        self._positions = np.empty(0, np.int64)  # read, but not yet returned
        self._last = -1

    def until(self, stop: int) -> Iterator[tuple[Array, Array]]:
        """Yield runs of the next positions below ``stop``, with their values."""
        while True:
            cut = int(np.searchsorted(self._positions, stop))
            if cut:
                yield self._positions[:cut], self._values.next(cut)
            self._positions = self._positions[cut:]
            if self._positions.size or not self._indices.remaining:
                return
            self._fill()

    def all_until(self, stop: int) -> tuple[Array, Array]:
        """Return the next positions below ``stop``, with their values."""
        runs = list(self.until(stop))
        if len(runs) == 1:
            return runs[0]
        empty = (self._positions[:0], self._values.next(0))
        positions, values = zip(empty, *runs, strict=True)
        return np.concatenate(positions), np.concatenate(values)

    def skip(self, stop: int) -> int:
        """Skip the positions below ``stop``, with their values; return their number."""
        passed = 0
        while True:
            cut = int(np.searchsorted(self._positions, stop))
            self._positions, passed = self._positions[cut:], passed + cut
            if self._positions.size or not self._indices.remaining:
                self._values.skip(passed)
                return passed
            self._fill()

    def finish(self) -> None:
        self._indices.finish()
        self._values.finish()

    def _fill(self) -> None:
        count = min(self._indices.remaining, _POSITIONS)
        positions = self._indices.next(count).astype(np.int64, copy=False)
        bad = native.kernels.first_unordered(positions, self._last, self._tensor.size)
        if bad < count:
            raise self._position_error(int(positions[bad]))
        self._positions, self._last = positions, int(positions[-1])

    def _position_error(self, position: int) -> CodecError:
        codec = self._tensor.codec
        size = self._tensor.size
        if 0 <= position < size:
            return CodecError(
                f"{codec}.duplicate", f"expected every position once, found {position} twice", where=self._tensor.name
            )
        return CodecError(
            f"{codec}.index", f"expected positions from 0 to {size - 1}, found {position}", where=self._tensor.name
        )


def _ascending_readers(
    positions: Part, values: Part, size: int
) -> tuple[ElementReader | ArrayReader, ElementReader | ArrayReader]:
    """Return a reader of ``positions`` in ascending order, and a reader of ``values`` in the same order."""
    array = _in_memory(positions)
    if array is not None and array.dtype == np.int64 and native.kernels.first_unordered(array, -1, size) == array.size:
        return ArrayReader(array), values_of(values)
    if positions.nbytes > _CACHED and _ascends(positions, size):
        return ElementReader(positions), ElementReader(values)
    loaded = _load(positions)
    if positions.nbytes <= _CACHED and bool((loaded[1:] > loaded[:-1]).all()):
        return ArrayReader(loaded), values_of(values)
    order = np.argsort(loaded, kind="stable")
    return ArrayReader(loaded[order]), ArrayReader(_load(values)[order])


def _ascends(positions: Part, size: int) -> bool:
    """Return whether positions ascend and are below ``size``; a later reader checks the digest."""
    reader = positions.reader()
    last = -1
    buffer = np.empty(min(positions.nbytes, _CHECKED), np.uint8)  # reused, because new pages cost more than reading
    for start in range(0, positions.nbytes, _CHECKED):
        chunk = buffer[: positions.nbytes - start]
        reader.readinto(chunk.data)
        batch = from_file(chunk, positions.dtype).astype(np.int64, copy=False)
        if native.kernels.first_unordered(batch, last, size) < batch.size:
            return False
        last = int(batch[-1])
    return True


def _load(part: Part) -> Array:
    reader = ElementReader(part)
    array = reader.next(reader.remaining)
    reader.finish()
    return array


def place_values(positions: Array, values: Array, out: Array, location: str | None = None) -> None:
    """Set elements of the flat ``out`` at ascending ``positions`` to ``values``, rounded to its dtype."""
    native.kernels.place_values(positions, as_bits(cast_like(values, out, location)), written(out))


def cast_like(values: Array, out: Array, location: str | None = None) -> Array:
    """Return ``values`` in the dtype of ``out``; raise ``dense.overflow`` if a value is too large."""
    return cast(values, float_name(out), location)
