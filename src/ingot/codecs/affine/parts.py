"""Sequential reading of the parts of the affine family by runs of rows."""

from __future__ import annotations

from math import prod

import numpy as np

from ingot.codecs.affine.rows import align_rows, skip_bits
from ingot.codecs.affine.windows import ComputedRows
from ingot.core.numeric.buffers import scratch
from ingot.core.numeric.dtypes import from_file, numpy_dtype
from ingot.model.bytesource import MemorySource
from ingot.model.layouts.affine import AffineLayout, Blocks
from ingot.model.part import CHUNK, Part
from ingot.model.tensor import Array


class PackedReader:
    """A sequential reader of ``packed_weight`` whose rows begin at bytes."""

    def __init__(self, part: Part, params: AffineLayout, cols: int) -> None:
        self._params = params
        self._cols = cols
        # in the source, which may contain more rows
        self._reader = part.reader()
        self._position = part.offset
        self._computed = part.source if isinstance(part.source, ComputedRows) else None
        plain = isinstance(part.source, MemorySource) and part.encoding == "raw" and part.digest is None
        self._memory = part if plain else None
        self._buffer = np.empty(0, np.uint8)
        self._row_bits = params.row_bytes(cols) * 8 if params.in_rows(cols) else cols * params.bits
        # if not 0, the next row begins at this bit of the last byte that was read
        self._bit = 0
        self._last = 0

    def next(self, rows: int) -> Array:
        """Return the packed bytes of the next ``rows`` rows, valid until the next call."""
        carry = self._bit > 0
        end = self._bit + rows * self._row_bits
        size = -(-end // 8)
        if self._buffer.size < size:
            self._buffer = scratch((size,), np.uint8)
        packed = self._buffer[:size]
        packed[:carry] = self._last
        self._reader.readinto(packed[carry:].data)
        self._position += size - carry
        if self._params.in_rows(self._cols):
            return packed
        first, self._bit, self._last = self._bit, end % 8, int(packed[-1])
        return align_rows(packed, first, (rows, self._row_bits))

    def borrow(self, rows: int) -> Array:
        """Return the packed bytes of the next ``rows`` rows, which are valid until the next call.

        If a computed source supports it (``ComputedRows.by_chunks``), the bytes are not copied.
        """
        size = rows * self._row_bits // 8
        in_chunks = self._computed is not None and self._computed.by_chunks and self._params.in_rows(self._cols)
        packed = self._without_copy(size) if in_chunks else None
        if packed is None:
            return self.next(rows)
        self._reader.skip(size)
        self._position += size
        return packed

    def take(self, rows: int, *, reused: bool) -> tuple[Array, bool]:
        """Return the packed bytes of the next ``rows`` rows, and whether the caller may overwrite them.

        Unless ``reused`` is set, the bytes stay valid after later calls.
        """
        size = rows * self._row_bits // 8
        packed = self._without_copy(size) if self._params.in_rows(self._cols) else None
        if packed is not None:
            self._reader.skip(size)
            self._position += size
            return packed, False
        if reused:
            return self.next(rows), True
        self._buffer = np.empty(0, np.uint8)
        packed = self.next(rows)
        self._buffer = np.empty(0, np.uint8)
        return packed, True

    def _without_copy(self, size: int) -> Array | None:
        """Return the next bytes of a source in memory, or of a computed source; None if a read is necessary."""
        packed = None if self._computed is None else self._computed.whole_rows(self._position, size)
        if packed is None and self._memory is not None:
            packed = np.frombuffer(self._memory.source.view(self._position, size), np.uint8)
        return packed

    def skip(self, rows: int) -> None:
        """Skip the packed bytes of the next ``rows`` rows."""
        self._position += (self._bit + rows * self._row_bits + 7) // 8 - (self._bit > 0)
        self._bit, self._last = skip_bits(self._reader, self._bit, self._last, rows * self._row_bits)

    def finish(self) -> None:
        self._reader.finish()


class ScalesReader:
    """A sequential reader of ``scales`` or ``zeros``."""

    def __init__(self, part: Part, params: AffineLayout) -> None:
        self._params = params
        self._dtype = part.dtype
        self._reader = part.reader()
        self._remaining = part.nbytes
        self._shared: Array | None = None

    def next(self, rows: int, cols: int) -> Array:
        """Return the scales of the next ``rows`` rows in native byte order."""
        if self._shared is None or not self._params.per_tensor:
            raw = self._read_bytes(prod(self._params.scale_shape(rows, cols)) * numpy_dtype(self._dtype).itemsize)
            self._shared = from_file(raw, self._dtype)
        return self._shared

    def skip(self, rows: int, cols: int) -> None:
        """Skip the scales of the next ``rows`` rows; do nothing if the full tensor has a single scale."""
        if not self._params.per_tensor:
            nbytes = prod(self._params.scale_shape(rows, cols)) * numpy_dtype(self._dtype).itemsize
            self._reader.skip(nbytes)
            self._remaining -= nbytes

    def finish(self) -> None:
        """Read the remaining bytes (rows without columns have scales too), and check the digest."""
        while self._remaining:
            self._read_bytes(min(self._remaining, CHUNK))
        self._reader.finish()

    def _read_bytes(self, nbytes: int) -> Array:
        raw = np.empty(nbytes, np.uint8)
        self._reader.readinto(raw.data)
        self._remaining -= nbytes
        return raw


class BlockScales:
    """A reader of scales or zero points of blocks, which repeats the numbers of a block for each of its rows.

    The constructor reads the entire part.
    """

    def __init__(self, part: Part, params: AffineLayout, shape: tuple[int, ...]) -> None:
        assert isinstance(params.grid, Blocks)
        self._lead = tuple(zip(shape[:-1], params.grid.shape[:-1], strict=True))
        self._scales = part.array().reshape(prod(size // step for size, step in self._lead), -1)
        self._row = 0

    def next(self, rows: int, cols: int) -> Array:
        """Return the scales of the next ``rows`` rows, [rows, cols / block], in native byte order."""
        index = np.arange(self._row, self._row + rows)
        self._row += rows
        block = np.zeros(rows, np.int64)
        stride = 1
        for size, step in reversed(self._lead):
            block += index % size // step * stride
            index //= size
            stride *= size // step
        return self._scales[block]

    def skip(self, rows: int, cols: int) -> None:
        """Skip the scales of the next ``rows`` rows."""
        self._row += rows

    def finish(self) -> None:
        """Do nothing: the constructor checked the digest."""
