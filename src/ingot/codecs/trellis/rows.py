"""Decoding of trellises: rows of a band, and a sequential reader."""

from __future__ import annotations

import numpy as np

from ingot.codecs.base import Rows
from ingot.codecs.palette.rows import require_padding
from ingot.codecs.trellis.streams import bands_of, values_of
from ingot.core.numeric.dtypes import LARGEST, cast, float_name, from_file, numpy_dtype, written
from ingot.core.runtime import native
from ingot.errors import CodecError
from ingot.model.layouts.trellis import SCALES, STREAMS, WORD, TrellisLayout, inner_rows
from ingot.model.tensor import Array, Tensor


def decode_rows(layout: TrellisLayout, words: Array, height: int, scales: Array, first: int, out: Array) -> None:
    """Decode rows of a band of ``height`` rows, from row ``first`` on, into ``out`` [rows, cols], rounded once.

    Parameters
    ----------
    layout : TrellisLayout
    words : u8
        The streams of the band.
    height : int
    scales : [rows of ``out``, groups]
        f32, f16 or bf16.
    first : int
    out : f32, f16 or bf16

    Raises
    ------
    CodecError
        ``trellis.overflow``: a finite scale gives a value beyond the range of ``out.dtype``.
    """
    values = values_of(layout.bits)
    dtype = float_name(out)
    wide = np.require(scales, requirements=("C", "A")) if scales.dtype == np.float32 else cast(scales, "f32")
    native.kernels.trellis_decode(words, layout.bits, height, layout.group, values, wide, first, written(out), dtype)
    if float(np.abs(wide).max(initial=0)) * float(values.max()) <= LARGEST[dtype]:
        return
    spread = np.repeat(np.isfinite(wide), layout.group, axis=1)
    if (spread & ~np.isfinite(cast(out, "f32"))).any():
        raise CodecError("trellis.overflow", f"expected products of scale and value in the range of {dtype}")


def check_padding(layout: TrellisLayout, words: Array, height: int, location: str) -> None:
    """Raise ``CodecError`` ``trellis.padding`` if bits after the last symbol of a stream are set."""
    used = height * layout.bits % WORD
    if used:
        last = words[-(words.size // layout.stream_words(height)) :].view("<u2")
        require_padding(int(last.max(initial=0)), used, "trellis.padding", location)


class TrellisReader(Rows):
    """A sequential reader that buffers the streams of one band."""

    def __init__(self, tensor: Tensor, layout: TrellisLayout) -> None:
        self._layout = layout
        self._name = tensor.name
        self._rows, self._cols = tensor.matrix_shape
        self._streams = tensor.parts[STREAMS].reader()
        self._scales = tensor.parts[SCALES].reader()
        self._bands = bands_of(self._rows if self._cols else 0, inner_rows(tensor.shape), layout.band)
        self._row = self._first = self._stop = 0  # the next row; the current band
        self._band_words: Array | None = None

    def fill(self, out: Array) -> None:
        rows_read = 0
        while out.size and rows_read < len(out):
            if self._row == self._stop:
                self._next()
            count = min(self._stop - self._row, len(out) - rows_read)
            words = self._words()
            scales = self._take(count)
            try:
                decode_rows(
                    self._layout, words, self._stop - self._first, scales, self._row - self._first,
                    out[rows_read : rows_read + count],
                )  # fmt: skip
            except CodecError as error:
                raise error.add_location(self._name) from None
            self._row += count
            rows_read += count

    def skip(self, count: int) -> None:
        """Skip ``count`` values, which must be full rows; bands that are skipped completely are not read."""
        rows = count // max(self._cols, 1)
        self._scales.skip(rows * self._per_row)
        while rows:
            if self._row == self._stop:
                self._next()
            passed = min(self._stop - self._row, rows)
            self._row += passed
            rows -= passed

    def finish(self) -> None:
        if self._stop and self._band_words is None:
            self._words()
        self._streams.finish()
        self._scales.finish()

    @property
    def _per_row(self) -> int:
        return self._cols // self._layout.group * numpy_dtype(self._layout.scales).itemsize

    def _next(self) -> None:
        if self._stop and self._band_words is None:
            self._streams.skip(self._nbytes)
        self._band_words = None
        self._first, self._stop = next(self._bands)

    @property
    def _nbytes(self) -> int:
        return 2 * self._cols * self._layout.stream_words(self._stop - self._first)

    def _words(self) -> Array:
        if self._band_words is None:
            self._band_words = np.empty(self._nbytes, np.uint8)
            self._streams.readinto(self._band_words.data)
            check_padding(self._layout, self._band_words, self._stop - self._first, self._name)
        return self._band_words

    def _take(self, rows: int) -> Array:
        raw = np.empty(rows * self._per_row, np.uint8)
        self._scales.readinto(raw.data)
        return from_file(raw, self._layout.scales).reshape(rows, -1)
