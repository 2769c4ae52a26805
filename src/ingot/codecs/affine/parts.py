"""Sequential reading of the affine family's parts, run of rows by run of rows."""

from __future__ import annotations

from math import prod

import numpy as np

from ingot.codecs.affine.rows import align_rows, skip_bits
from ingot.codecs.affine.windows import MadeSource
from ingot.core.numeric.buffers import scratch
from ingot.core.numeric.dtypes import from_file, numpy_dtype
from ingot.model.bytesource import MemorySource
from ingot.model.layouts.affine import AffineLayout, Blocks
from ingot.model.part import CHUNK, Part
from ingot.model.tensor import Array


class PackedReader:
    """Sequential reading of ``packed_weight``, as rows that begin at a byte."""

    def __init__(self, part: Part, params: AffineLayout, cols: int) -> None:
        self._params, self._cols = params, cols
        self._reader, self._at = part.reader(), part.offset  # within the source: a part may be some of its rows
        self._made = part.source if isinstance(part.source, MadeSource) else None
        plain = isinstance(part.source, MemorySource) and part.encoding == "raw" and part.digest is None
        self._memory = part if plain else None
        self._buffer = np.empty(0, np.uint8)
        self._row_bits = params.row_bytes(cols) * 8 if params.in_rows(cols) else cols * params.bits
        self._bit, self._last = 0, 0  # where the next row begins in the byte that was read last, if it is not 0

    def next(self, rows: int) -> Array:
        """Return the packed bytes of the next ``rows`` rows, until the next call."""
        held, end = self._bit > 0, self._bit + rows * self._row_bits
        size = -(-end // 8)
        if self._buffer.size < size:
            self._buffer = scratch((size,), np.uint8)
        packed = self._buffer[:size]
        packed[:held] = self._last
        self._reader.readinto(packed[held:].data)
        self._at += size - held
        if self._params.in_rows(self._cols):
            return packed
        first, self._bit, self._last = self._bit, end % 8, int(packed[-1])
        return align_rows(packed, first, (rows, self._row_bits))

    def look(self, rows: int) -> Array:
        """Return the same, where that costs no more without a copy of what is made as it is read."""
        size = rows * self._row_bits // 8
        pieces = self._made is not None and self._made.by_pieces and self._params.in_rows(self._cols)
        made = self._whole(size) if pieces else None
        if made is None:
            return self.next(rows)
        self._reader.skip(size)
        self._at += size
        return made

    def take(self, rows: int, *, reused: bool) -> tuple[Array, bool]:
        """Return the same, and whether it may be written to; unless ``reused`` in memory that is not used again."""
        size = rows * self._row_bits // 8
        made = self._whole(size) if self._params.in_rows(self._cols) else None
        if made is not None:
            self._reader.skip(size)
            self._at += size
            return made, False
        if reused:
            return self.next(rows), True
        self._buffer = np.empty(0, np.uint8)
        found = self.next(rows)
        self._buffer = np.empty(0, np.uint8)
        return found, True

    def _whole(self, size: int) -> Array | None:
        """Return the next bytes where they lie in memory, or are made for whoever asks; None if they are to be read."""
        made = None if self._made is None else self._made.whole_rows(self._at, size)
        if made is None and self._memory is not None:
            made = np.frombuffer(self._memory.source.view(self._at, size), np.uint8)
        return made

    def skip(self, rows: int) -> None:
        """Pass over the next rows."""
        self._at += (self._bit + rows * self._row_bits + 7) // 8 - (self._bit > 0)
        self._bit, self._last = skip_bits(self._reader, self._bit, self._last, rows * self._row_bits)

    def finish(self) -> None:
        self._reader.finish()


class ScalesReader:
    """Sequential reading of ``scales`` or ``zeros``."""

    def __init__(self, part: Part, params: AffineLayout) -> None:
        self._params, self._dtype = params, part.dtype
        self._reader, self._left = part.reader(), part.nbytes
        self._shared: Array | None = None

    def next(self, rows: int, cols: int) -> Array:
        """Return the scales of the next ``rows`` rows, in native byte order."""
        if self._shared is None or not self._params.per_tensor:
            raw = self._read(prod(self._params.scale_shape(rows, cols)) * numpy_dtype(self._dtype).itemsize)
            self._shared = from_file(raw, self._dtype)
        return self._shared

    def skip(self, rows: int, cols: int) -> None:
        """Pass over the scales of the next rows, unless all rows share one."""
        if not self._params.per_tensor:
            nbytes = prod(self._params.scale_shape(rows, cols)) * numpy_dtype(self._dtype).itemsize
            self._reader.skip(nbytes)
            self._left -= nbytes

    def finish(self) -> None:
        """Read what was not asked for (rows without columns have scales too), and check the digest."""
        while self._left:
            self._read(min(self._left, CHUNK))
        self._reader.finish()

    def _read(self, nbytes: int) -> Array:
        raw = np.empty(nbytes, np.uint8)
        self._reader.readinto(raw.data)
        self._left -= nbytes
        return raw


class BlockScales:
    """Scales or zero points of a grid of blocks, spread out row by row; holds the part, which is read at once."""

    def __init__(self, part: Part, params: AffineLayout, shape: tuple[int, ...]) -> None:
        assert isinstance(params.grid, Blocks)
        self._lead = tuple(zip(shape[:-1], params.grid.shape[:-1], strict=True))
        self._scales = part.array().reshape(prod(size // step for size, step in self._lead), -1)
        self._row = 0

    def next(self, rows: int, cols: int) -> Array:
        """Return the scales of the next ``rows`` rows, [rows, cols / block], in native byte order."""
        left = np.arange(self._row, self._row + rows)
        self._row += rows
        block, stride = np.zeros(rows, np.int64), 1
        for size, step in reversed(self._lead):
            block += left % size // step * stride
            left //= size
            stride *= size // step
        return self._scales[block]

    def skip(self, rows: int, cols: int) -> None:
        """Pass over the next rows."""
        self._row += rows

    def finish(self) -> None:
        """The digest was checked when the part was read."""
