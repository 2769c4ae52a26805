"""Which blocks of channels of a stored matrix hold values: what masks of a file without a directory are checked by."""

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

_ELEMENTS = 1 << 20  # of a piece: what is decoded at a time
Piece = tuple[int, int, int, int]
"""First row, first column, rows, columns."""


def filled_blocks(source: ByteSource, located: Located, axis: int, block: int, wanted: Array) -> Array | None:
    """Return which blocks of channels along ``axis`` hold a value other than zero.

    Parameters
    ----------
    source : ByteSource
        The file. At most about a million elements of it are in memory at a time.
    located : Located
        A matrix without a mask.
    axis : {0, 1}
        Channels are rows or columns.
    block : int
        Channels of a block.
    wanted : array of bool
        The blocks to look into. The result is false for all others of axis 0.

    Returns
    -------
    array of bool, or None
        None for blocks whose values are not checked: textures, and bitmaps of three planes.
    """
    rows, cols = located.spec.shape
    decode = _decoder(source, located)
    if decode is None:
        return None
    filled = np.zeros(wanted.size, np.bool_)
    spans = [(0, rows)] if axis else _spans(wanted, block, rows)
    for piece in _pieces(spans, cols):
        nonzero = decode(piece)
        channels = piece[axis] + np.flatnonzero(nonzero.any(axis=1 - axis))
        filled[channels // block] = True
    return filled


def _spans(wanted: Array, block: int, rows: int) -> Sequence[tuple[int, int]]:
    """Return the rows of the wanted blocks, neighbours joined."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], wanted.astype(np.int8), [0]]))).reshape(-1, 2)
    return [(int(first) * block, min(int(last) * block, rows)) for first, last in edges]


def _pieces(spans: Sequence[tuple[int, int]], cols: int) -> Iterator[Piece]:
    """Yield whole rows, or parts of one row where a row is longer than a piece."""
    step = max(1, _ELEMENTS // max(cols, 1))
    for first, last in spans:
        for row in range(first, last, step) if cols else ():
            for col in range(0, cols, _ELEMENTS):
                yield row, col, min(step, last - row), min(_ELEMENTS, cols - col)


class _Dense:
    def __init__(self, source: ByteSource, located: Located) -> None:
        self._source, self._cols = source, located.spec.shape[1]
        self._start = located.offset + (located.form.block.pieces[0].start or 0)
        self._storage, self._dtype = DTYPES[located.spec.dtype].storage, numpy_dtype(located.spec.dtype)

    def __call__(self, piece: Piece) -> Array:
        row, col, rows, cols = piece
        size = self._dtype.itemsize
        raw = read_array(self._source, self._start + (row * self._cols + col) * size, rows * cols * size)
        values = from_file(raw, self._storage).view(self._dtype)
        nonzero: Array = (values != 0).reshape(rows, cols)
        return nonzero


class _Integers:
    def __init__(self, source: ByteSource, located: Located, layout: AffineLayout) -> None:
        assert located.run is not None
        self._source, self._layout, self._run = source, layout, located.run
        self._cols = located.spec.shape[1]
        self._start = located.offset + (located.form.block.pieces[0].start or 0)
        self._per_row = -(-self._cols // layout.group_columns(self._cols))

    def __call__(self, piece: Piece) -> Array:
        row, col, rows, cols = piece
        entries = self._entries(row, rows)
        scales, zeros = (self._spread(entries[field], piece) for field in ("scale", "zero"))
        codes = self._codes(row * self._cols + col, rows * cols).reshape(rows, cols)
        with np.errstate(all="ignore"):
            nonzero: Array = scales * (codes - zeros) != 0
        return nonzero

    def _entries(self, row: int, rows: int) -> Array:
        if self._layout.per_tensor:
            return read_entries(self._source, self._run.offset, 1)
        first, count = row * self._per_row, rows * self._per_row
        return read_entries(self._source, self._run.offset + first * SCALE_ENTRY, count)

    def _spread(self, values: Array, piece: Piece) -> Array:
        """Return a scale or zero point for each column, or one for all."""
        _, col, rows, cols = piece
        if self._layout.per_tensor:
            return values
        group = self._layout.group_columns(self._cols)
        columns = np.arange(col, col + cols) // group
        return values.reshape(rows, self._per_row)[:, columns]

    def _codes(self, first: int, count: int) -> Array:
        """Return codes as f32, from the stream of codes of the whole matrix."""
        bits = self._layout.bits
        each = 8 // bits
        begin, end = first // each, -(-(first + count) // each)
        raw = read_array(self._source, self._start + begin, end - begin)
        shifts = np.arange(each, dtype=np.uint8) * bits
        codes = (raw[:, None] >> shifts & ((1 << bits) - 1)).reshape(-1)[first - begin * each :][:count]
        half = 1 << bits - 1
        signed: Array = (codes.astype(np.int8) ^ half) - half
        return signed.astype(np.float32)


class _Bitmap:
    def __init__(self, source: ByteSource, located: Located) -> None:
        self._source, self._cols = source, located.spec.shape[1]
        self._start = located.offset + (located.form.block.pieces[0].start or 0)

    def __call__(self, piece: Piece) -> Array:
        row, col, rows, cols = piece
        width = -(-self._cols // WORD) * WORD // 8
        raw = read_array(self._source, self._start + row * width, rows * width).reshape(rows, width)
        bits: Array = np.unpackbits(raw, axis=1, bitorder="little")[:, col : col + cols]
        return bits


def _decoder(source: ByteSource, located: Located) -> _Dense | _Integers | _Bitmap | None:
    """Return the decoder of pieces to "is not zero"; None for codecs without one here."""
    layout = layout_of(located.spec)
    if isinstance(layout, DenseLayout):
        return _Dense(source, located) if DTYPES[located.spec.dtype].bits % 8 == 0 else None
    if isinstance(layout, AffineLayout):
        return _Integers(source, located, layout)
    return _Bitmap(source, located) if isinstance(layout, MaskLayout) else None
