"""Find the blocks of channels of a matrix that contain nonzero values, to verify masks of a file without a
directory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ingot.core.numeric.dtypes import DTYPES, from_file, numpy_dtype
from ingot.ext.squizd.layout import SCALE_ENTRY
from ingot.ext.squizd.scales import Array, read_array, read_entries
from ingot.ext.squizd.tensors import Located
from ingot.model.bytesource import ByteSource
from ingot.model.layouts.affine import AffineLayout
from ingot.model.layouts.dense import DenseLayout
from ingot.model.layouts.sparse import WORD, MaskLayout
from ingot.model.layouts.table import layout_of

_ELEMENTS = 1 << 20  # elements that are decoded in one chunk
Chunk = tuple[int, int, int, int]
"""A chunk of a matrix: first row, first column, rows, columns."""


def filled_blocks(source: ByteSource, located: Located, axis: int, block: int, selected: Array) -> Array | None:
    """Return which blocks of channels along ``axis`` contain a value other than zero.

    Parameters
    ----------
    source : ByteSource
        The file. At most about a million elements of it are in memory at a time.
    located : Located
        A matrix without a mask.
    axis : {0, 1}
        Whether channels are rows (0) or columns (1).
    block : int
        Channels in a block.
    selected : array of bool
        The blocks to examine. For axis 0, the result is false for all others.

    Returns
    -------
    array of bool, or None
        None if the values of the matrix are not checked, as for ASTC textures and TCA blocks with three bitmaps.
    """
    rows, cols = located.spec.shape
    decode = _decoder(source, located)
    if decode is None:
        return None
    filled = np.zeros(selected.size, np.bool_)
    spans = [(0, rows)] if axis else _spans(selected, block, rows)
    for chunk in _chunks(spans, cols):
        nonzero = decode(chunk)
        channels = chunk[axis] + np.flatnonzero(nonzero.any(axis=1 - axis))
        filled[channels // block] = True
    return filled


def _spans(selected: Array, block: int, rows: int) -> Sequence[tuple[int, int]]:
    """Return the ranges of rows that the selected blocks of ``block`` rows cover; adjacent blocks are joined."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], selected.astype(np.int8), [0]]))).reshape(-1, 2)
    return [(int(first) * block, min(int(last) * block, rows)) for first, last in edges]


def _chunks(spans: Sequence[tuple[int, int]], cols: int) -> Iterator[Chunk]:
    """Yield chunks that cover the ranges of rows ``spans``: complete rows, or parts of a row if it exceeds a chunk."""
    step = max(1, _ELEMENTS // max(cols, 1))
    for first, last in spans:
        for row in range(first, last, step) if cols else ():
            for col in range(0, cols, _ELEMENTS):
                yield row, col, min(step, last - row), min(_ELEMENTS, cols - col)


class _Dense:
    def __init__(self, source: ByteSource, located: Located) -> None:
        self._source = source
        self._cols = located.spec.shape[1]
        self._start = located.offset + (located.storage.block.parts[0].start or 0)
        self._storage = DTYPES[located.spec.dtype].storage
        self._dtype = numpy_dtype(located.spec.dtype)

    def __call__(self, chunk: Chunk) -> Array:
        row, col, rows, cols = chunk
        size = self._dtype.itemsize
        raw = read_array(self._source, self._start + (row * self._cols + col) * size, rows * cols * size)
        values = from_file(raw, self._storage).view(self._dtype)
        nonzero: Array = (values != 0).reshape(rows, cols)
        return nonzero


class _Integers:
    def __init__(self, source: ByteSource, located: Located, layout: AffineLayout) -> None:
        assert located.run is not None
        self._source = source
        self._layout = layout
        self._run = located.run
        self._cols = located.spec.shape[1]
        self._start = located.offset + (located.storage.block.parts[0].start or 0)
        self._per_row = -(-self._cols // layout.group_columns(self._cols))

    def __call__(self, chunk: Chunk) -> Array:
        row, col, rows, cols = chunk
        entries = self._entries(row, rows)
        scales, zeros = (self._spread(entries[field], chunk) for field in ("scale", "zero"))
        codes = self._codes(row * self._cols + col, rows * cols).reshape(rows, cols)
        with np.errstate(all="ignore"):
            nonzero: Array = scales * (codes - zeros) != 0
        return nonzero

    def _entries(self, row: int, rows: int) -> Array:
        if self._layout.per_tensor:
            return read_entries(self._source, self._run.offset, 1)
        first = row * self._per_row
        count = rows * self._per_row
        return read_entries(self._source, self._run.offset + first * SCALE_ENTRY, count)

    def _spread(self, values: Array, chunk: Chunk) -> Array:
        """Return scales or zero points, ``values`` of a chunk's rows, repeated for each column of the chunk.

        If the tensor has a single scale, ``values`` is returned unchanged.
        """
        _, col, rows, cols = chunk
        if self._layout.per_tensor:
            return values
        group = self._layout.group_columns(self._cols)
        columns = np.arange(col, col + cols) // group
        return values.reshape(rows, self._per_row)[:, columns]

    def _codes(self, first: int, count: int) -> Array:
        """Return ``count`` codes from index ``first`` of the complete matrix on, as f32."""
        bits = self._layout.bits
        codes_per_byte = 8 // bits
        begin = first // codes_per_byte
        end = -(-(first + count) // codes_per_byte)
        raw = read_array(self._source, self._start + begin, end - begin)
        shifts = np.arange(codes_per_byte, dtype=np.uint8) * bits
        codes = (raw[:, None] >> shifts & ((1 << bits) - 1)).reshape(-1)[first - begin * codes_per_byte :][:count]
        half = 1 << bits - 1
        signed: Array = (codes.astype(np.int8) ^ half) - half
        return signed.astype(np.float32)


class _Bitmap:
    def __init__(self, source: ByteSource, located: Located) -> None:
        self._source = source
        self._cols = located.spec.shape[1]
        self._start = located.offset + (located.storage.block.parts[0].start or 0)

    def __call__(self, chunk: Chunk) -> Array:
        row, col, rows, cols = chunk
        width = -(-self._cols // WORD) * WORD // 8
        raw = read_array(self._source, self._start + row * width, rows * width).reshape(rows, width)
        bits: Array = np.unpackbits(raw, axis=1, bitorder="little")[:, col : col + cols]
        return bits


def _decoder(source: ByteSource, located: Located) -> _Dense | _Integers | _Bitmap | None:
    """Return a callable that returns which values of a chunk are not zero.

    Returns None if the values of the layout are not checked.
    """
    layout = layout_of(located.spec)
    if isinstance(layout, DenseLayout):
        return _Dense(source, located) if DTYPES[located.spec.dtype].bits % 8 == 0 else None
    if isinstance(layout, AffineLayout):
        return _Integers(source, located, layout)
    return _Bitmap(source, located) if isinstance(layout, MaskLayout) else None
