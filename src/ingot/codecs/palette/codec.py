"""``palette``: weights as indices into codebooks, ``w = codebook[group][index]`` (``spec/palette.md``)."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd, prod
from typing import Any, ClassVar

import numpy as np

from ingot.codecs.base import Codec, Rows, result
from ingot.codecs.palette.encode import PaletteEncoder, prepare
from ingot.codecs.palette.params import layout_of
from ingot.codecs.palette.rows import BitReader, Lookup, expand_vectors, read_tables, require_padding
from ingot.core.numeric.dtypes import FLOATS, float_name
from ingot.errors import UnsupportedError
from ingot.model.layouts.palette import INDICES, PaletteLayout
from ingot.model.reading.slices import RunLayout
from ingot.model.tensor import Array, Tensor

_SCRATCH = 1 << 18  # elements in the buffer of a reader of vectors; at least one band


class PaletteReader(Rows):
    """A sequential reader of a palette whose entries are single values or vectors along the rows."""

    def __init__(self, tensor: Tensor, params: PaletteLayout) -> None:
        self._tensor = tensor
        self._params = params
        self._indices = BitReader(tensor.parts[INDICES], params.bits, "palette.padding", tensor.name)
        self._lookup: Lookup | None = None
        self._done = 0

    def fill(self, out: Array) -> None:
        if not out.size:
            return
        if self._lookup is None or self._lookup.dtype != out.dtype:
            self._lookup = lookup_of(self._tensor, self._params, float_name(out))
        count = out.size // self._params.vector_size
        self._lookup(self._indices.next(count), self._done, out.reshape(-1))
        self._done += count

    def skip(self, count: int) -> None:
        """Skip ``count`` values, which must be full rows."""
        self._indices.skip(count // self._params.vector_size)
        self._done += count // self._params.vector_size

    def finish(self) -> None:
        self._indices.finish()
        _finish_small(self._tensor)


class BandReader(Rows):
    """A sequential reader of vectors that span several rows; it reads bands of the first dimension.

    A band is one index of the first dimension, or ``vector_size`` indices if vectors lie along that dimension.
    """

    def __init__(self, tensor: Tensor, params: PaletteLayout) -> None:
        self._inner = PaletteReader(tensor, params)
        self._size = params.vector_size
        self._axis = params.vector_axis
        self._index = params.index_shape(tensor.shape)
        self._bands = self._index[0]
        self._band = 0
        self._per_band = max(1, prod(self._index[1:]) * self._size)
        self._cols = tensor.matrix_shape[1]
        self._band_rows = max(1, self._per_band // max(self._cols, 1))
        self._step = max(1, _SCRATCH // self._per_band)
        self._rows: Array = np.empty((0, self._cols), np.float32)
        self._passed = 0  # rows of the next band to skip

    def fill(self, out: Array) -> None:
        rows_read = 0
        while out.size and rows_read < len(out):
            if not len(self._rows):
                needed = self._passed + len(out) - rows_read
                self._rows = self._next(needed, out.dtype)[self._passed :]
                self._passed = 0
            count = min(len(self._rows), len(out) - rows_read)
            if self._rows.dtype != out.dtype:
                raise ValueError(f"expected outputs of one type, found {self._rows.dtype} and {out.dtype}")
            out[rows_read : rows_read + count] = self._rows[:count]
            self._rows = self._rows[count:]
            rows_read += count

    def skip(self, count: int) -> None:
        """Skip ``count`` values, which must be full rows."""
        rows = count // max(self._cols, 1)
        buffered = min(rows, len(self._rows))
        self._rows = self._rows[buffered:]
        bands, self._passed = divmod(self._passed + rows - buffered, self._band_rows)
        self._inner.skip(bands * self._per_band)
        self._band += bands

    def finish(self) -> None:
        self._inner.finish()

    def _next(self, rows: int, dtype: np.dtype[Any]) -> Array:
        """Return the values of the next bands: the bands that ``rows`` rows need, but at most ``_step`` bands."""
        bands = min(self._step, self._bands - self._band, -(-rows // self._band_rows))
        if bands < 1:
            raise ValueError("more rows were requested than the tensor has")
        self._band += bands
        entries = np.empty((bands, *self._index[1:], self._size), dtype)
        self._inner.read_into(entries.reshape(1, -1))
        return expand_vectors(entries, self._axis).reshape(-1, self._cols)


def lookup_of(tensor: Tensor, params: PaletteLayout, dtype: str) -> Lookup:
    """Return the lookup of a checked tensor in ``dtype``; the codebook is read."""
    return Lookup(params, tensor.shape, read_tables(tensor, params, dtype))


class PaletteCodec(Codec):
    """Lookup tables of 2 to 256 entries, per tensor or group of channels; Core ML's ``constexpr_lut_to_dense``."""

    id: ClassVar[str] = PaletteLayout.codec
    lossless: ClassVar[bool] = False
    elementwise: ClassVar[bool] = False
    streams: ClassVar[bool] = True

    def check(self, tensor: Tensor) -> None:
        """Check parameters, parts and shape of ``tensor``; rules ``palette.params``, ``.vector-size``, ``.groups``,
        ``.parts``, ``.dtype``, ``.size``.

        Readers check ``palette.padding``, ``palette.scale`` and ``palette.overflow``.
        """
        layout_of(tensor)

    def decode(self, tensor: Tensor, dtype: str, out: Array | None = None) -> Array:
        """Return the values in f32, f16 or bf16, rounded once from f32, or in f64; threads decode large tensors."""
        params = layout_of(tensor)
        if dtype not in FLOATS:
            raise UnsupportedError(
                f"expected a target dtype {', '.join(FLOATS)}, found {dtype}", rule="palette.dtype", where=tensor.name
            )
        out = result(tensor, dtype, out)
        lookup = lookup_of(tensor, params, dtype)
        packed = np.frombuffer(tensor.parts[INDICES].view(), np.uint8)
        used = prod(params.index_shape(tensor.shape)) * params.bits % 8
        if used:
            require_padding(int(packed[-1]), used, "palette.padding", tensor.name)
        if params.vector_size == 1 or params.vector_axis == len(tensor.shape) - 1:
            lookup.all(packed, out.reshape(-1), workers=None)
            return out
        entries = np.empty((*params.index_shape(tensor.shape), params.vector_size), out.dtype)
        lookup.all(packed, entries.reshape(-1), workers=None)
        out[...] = expand_vectors(entries, params.vector_axis)
        return out

    def reader(self, tensor: Tensor) -> PaletteReader | BandReader:
        params = layout_of(tensor)
        along_rows = params.vector_size == 1 or params.vector_axis == len(tensor.shape) - 1
        return PaletteReader(tensor, params) if along_rows else BandReader(tensor, params)

    def runs(self, tensor: Tensor, shape: tuple[int, ...]) -> RunLayout | None:
        """Return the positions of runs of indices that fill complete bytes.

        Return None if the tensor has several codebooks, or if vectors are not along the last dimension.
        """
        params = layout_of(tensor)
        rank = len(tensor.shape)
        if (
            params.codebooks != 1
            or len(shape) != rank
            or not (params.vector_size == 1 or params.vector_axis == rank - 1)
        ):
            return None
        if params.vector_size > 1 and shape[-1] % params.vector_size:
            return None
        indices = 8 // gcd(8, params.bits)
        return RunLayout(
            indices * params.vector_size, {**dict.fromkeys(tensor.parts, 0), INDICES: indices * params.bits // 8}
        )

    def encoder(self, shape: tuple[int, ...], dtype: str, options: Mapping[str, Any]) -> PaletteEncoder:
        """Return the encoder. Options, all with defaults (``spec/palette.md``, "Options"):

        ``bits`` 1, 2, 3, 4, 6 or 8 (4); ``group``, the number of channels that share a codebook, or ``"tensor"``
        (``"tensor"``); ``axis`` of the channels (0); ``vector`` values per entry, 1, 2 or 4 (1); ``vector_axis`` (0);
        ``entries`` auto, f16, bf16, f32 or i8 (auto: f16, or f32 for small values); ``scales`` of i8 entries, auto, f16
        or f32 (auto); ``importance``, a weight per column (none).
        """
        return prepare(shape, dtype, options)


def _finish_small(tensor: Tensor) -> None:
    """Check the digests of the parts that are read in full, even if no value was read."""
    for role, part in tensor.parts.items():
        if role != INDICES:
            part.view()
