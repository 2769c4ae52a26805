"""Decoding of scaled codebooks: stored scales, runs of rows, sequential readers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from ingot.codecs.base import Rows
from ingot.codecs.palette.rows import BitReader
from ingot.codecs.scaled_codebook.tables import numbers
from ingot.core.numeric.dtypes import LARGEST, cast, cast_into, float_name, from_file, numpy_dtype, written
from ingot.core.runtime import native
from ingot.errors import CodecError, UsageError
from ingot.model.layouts.affine import Group, Row
from ingot.model.layouts.base import Shape, matrix_shape
from ingot.model.layouts.scaled_codebook import (
    CODEBOOK,
    DIVIDE,
    HIGH_FIRST,
    INDICES,
    LOW_FIRST,
    SCALE_CODEBOOK,
    SCALE_SCALES,
    SCALES,
    SECOND,
    SMALL_SCALES,
    Run,
    ScaledCodebookLayout,
    Tiles,
)
from ingot.model.part import Part
from ingot.model.tensor import Array, Tensor

ID = ScaledCodebookLayout.codec
_SCRATCH = 1 << 16  # elements that stay in cache


class Window(Protocol):
    """A reader of ranges of a part's elements; the starts of ranges must ascend."""

    def take(self, first: int, last: int) -> Array:
        """Return elements ``first`` to ``last``."""
        ...


@dataclass(frozen=True, slots=True)
class ArrayWindow:
    """A window over an array of all elements."""

    array: Array

    def take(self, first: int, last: int) -> Array:
        return self.array[first:last]


class ReaderWindow:
    """A window over a part that is read in order.

    It buffers the previous range, because the next one may overlap it.
    """

    def __init__(self, part: Part) -> None:
        self._reader = part.reader()
        self._dtype = part.dtype
        self._width = numpy_dtype(part.dtype).itemsize
        self._first = 0
        self._buffer = np.empty(0, numpy_dtype(part.dtype))

    def take(self, first: int, last: int) -> Array:
        end = self._first + self._buffer.size
        if first > end:
            self._reader.skip((first - end) * self._width)
            end = first
        overlap = self._buffer[first - self._first :]
        raw = np.empty(max(0, last - end) * self._width, np.uint8)
        self._reader.readinto(raw.data)
        fresh = from_file(raw, self._dtype)
        self._first, self._buffer = first, np.concatenate([overlap, fresh]) if overlap.size else fresh
        return self._buffer[: last - first]

    def finish(self) -> None:
        self._reader.finish()


class Scales:
    """The scales of a tensor, multiplied by the second scale.

    Scales of one byte are indices into ``table``, which contains the products. All other scales are returned in f32.

    Parameters
    ----------
    layout : ScaledCodebookLayout
    stored : Window
        Elements of the part ``scales``, in order.
    nested : (array, Window) or None
        ``scale_codebook``, and the elements of ``scale_scales``; None if scales are not quantized.
    second : float or None
        The number in the part ``second_scale``, or None.
    """

    def __init__(
        self,
        layout: ScaledCodebookLayout,
        stored: Window,
        nested: tuple[Array, Window] | None = None,
        second: np.float32 | None = None,
    ) -> None:
        self._layout = layout
        self._stored = stored
        self._nested = nested
        self._second = second
        self.table: Array | None = None
        if layout.scales in SMALL_SCALES:
            self.table = self._with_second(numbers(layout.scales))

    def take(self, first: int, last: int) -> Array:
        """Return scales ``first`` to ``last``: f32, or u8 indices into ``table``."""
        stored = self._stored.take(first, last)
        nested = self._layout.nested
        if self.table is not None:
            return stored
        if nested is None or self._nested is None:
            wide = np.require(stored, requirements=("C", "A")) if stored.dtype == np.float32 else cast(stored, "f32")
            return self._with_second(wide)
        table, runs = self._nested
        outer = runs.take(first // nested.run, -(-last // nested.run))
        outer_index = np.arange(first, last) // nested.run - first // nested.run
        with np.errstate(over="ignore", invalid="ignore"):
            return self._with_second(table[stored] * outer[outer_index] + np.float32(nested.offset))

    def magnitude(self, scales: Array) -> float:
        """Return an upper bound of the magnitude of scales from ``take``; NaN if a scale is not finite."""
        if self.table is None:
            return float(np.abs(scales).max(initial=0))
        if self._layout.scales == "f8_e8m0fnu":  # reaches the end of f32's range; values ascend with codes
            return float(np.abs(self.table[int(scales.max(initial=0))]))
        return float(np.nanmax(np.abs(self.table), where=np.isfinite(self.table), initial=0))

    def _with_second(self, scales: Array) -> Array:
        if self._second is None:
            return scales
        with np.errstate(all="ignore"):
            changed: Array = scales / self._second if self._layout.second == DIVIDE else scales * self._second
        return changed


class Decoder:
    """A decoder of rows of a tensor in its stored order.

    Parameters
    ----------
    layout : ScaledCodebookLayout
    shape : tuple of int
        The shape in stored order.
    table : array or None
        The stored codebook in f32; None if the layout refers to a known table by name.
    scales : Scales
    """

    def __init__(self, layout: ScaledCodebookLayout, shape: Shape, table: Array | None, scales: Scales) -> None:
        self._layout = layout
        self._scales = scales
        self._cols = matrix_shape(shape)[1]
        self._inner = shape[-2] if len(shape) > 1 else 1
        self._factor = None if layout.factor is None else np.float32(layout.factor)
        self._table = numbers(layout.values) if layout.values else table
        assert self._table is not None
        self._max_magnitude = float(np.abs(self._table[np.isfinite(self._table)]).max(initial=0))

    def decode(self, packed: Array, start: int, out: Array, order: str) -> None:
        """Decode the rows from ``start`` on into ``out`` [rows, cols], C order, f32, f16 or bf16, rounded once.

        ``packed`` is the part of the stream for these rows, beginning at a byte. Raises ``CodecError``
        ``scaled_codebook.overflow`` if finite numbers give a value beyond the range of ``out.dtype``.
        """
        if not out.size:
            return
        scales, run = self._row_scales(start, len(out))
        dtype = float_name(out)
        bound = self._max_magnitude * self._scales.magnitude(scales)
        if self._factor is not None:
            bound *= max(1.0, abs(float(self._factor)))
        sound = bound <= LARGEST[dtype]
        values = out if self._factor is None else np.empty(out.shape, np.float32)
        self._call(packed, scales, self._scales.table, run, values, order)
        if self._factor is not None:
            with np.errstate(over="ignore", invalid="ignore"):
                values *= self._factor
                cast_into(values, out)
        if not sound:
            self._require_range(packed, scales, run, out, order)

    def _call(
        self, packed: Array, scales: Array, table: Array | None, run: tuple[int, int, int], out: Array, order: str
    ) -> None:
        layout = self._layout
        values = self._layout.values
        named = values if values in ("f8_e4m3fn", "f8_e5m2", "i8") else None
        flat = out.reshape(-1)
        native.kernels.scaled_decode(
            packed,
            layout.bits,
            order == HIGH_FIRST,
            named or "table",
            None if named else self._table,
            scales,
            table,
            *run,
            written(flat),
            float_name(flat),
        )

    def _require_range(self, packed: Array, scales: Array, run: tuple[int, int, int], out: Array, order: str) -> None:
        """Raise ``CodecError`` if a value is not finite although its factors are."""
        past = ~np.isfinite(cast(out, "f32"))
        if not past.any():
            return
        assert self._table is not None
        sound = np.where(np.isfinite(self._table), np.float32(1), np.float32(np.nan))
        factors = self._scales.table if self._scales.table is not None else scales
        finite = np.where(np.isfinite(factors), np.float32(1), np.float32(np.nan))
        decoded = np.empty(out.shape, np.float32)
        indicator, indicator_table = (finite, None) if self._scales.table is None else (scales, finite)
        flat = decoded.reshape(-1)
        high = order == HIGH_FIRST
        native.kernels.scaled_decode(
            packed, self._layout.bits, high, "table", sound, indicator, indicator_table, *run, flat, "f32"
        )
        if bool((past & np.isfinite(decoded)).any()):
            raise CodecError(f"{ID}.overflow", f"expected scale * value in the range of {float_name(out)}")

    def _row_scales(self, start: int, rows: int) -> tuple[Array, tuple[int, int, int]]:
        """Return the scales of ``rows`` rows from row ``start`` on, and how they apply to elements.

        Scales apply along lines: a line is a row, or all rows if a scale may apply to several rows. The three integers
        are numbers of elements: the elements of a line, the consecutive elements that share a scale, and the elements
        of the line before the first requested element.
        """
        grid = self._layout.grid
        cols = self._cols
        match grid:
            case Group(columns):
                per = cols // columns
                return self._scales.take(start * per, (start + rows) * per), (cols, columns, 0)
            case Row():
                return self._scales.take(start, start + rows), (cols, cols, 0)
            case Run(elements):
                first = start * cols
                last = (start + rows) * cols
                scales = self._scales.take(first // elements, -(-last // elements))
                phase = first % elements
                return scales, (phase + rows * cols, elements, phase)
            case Tiles(tall, wide):
                per = -(-cols // wide)
                down = -(-self._inner // tall)
                lines = np.arange(start, start + rows)
                lines = lines // self._inner * down + lines % self._inner // tall
                scales = self._scales.take(int(lines[0]) * per, (int(lines[-1]) + 1) * per).reshape(-1, per)
                return scales[lines - lines[0]].reshape(-1), (cols, wide, 0)
        return self._scales.take(0, 1), (rows * cols, rows * cols, 0)


def second_of(tensor: Tensor, layout: ScaledCodebookLayout) -> np.float32 | None:
    """Return the second scale; raise ``scaled_codebook.second`` if it is not finite, or a divisor of 0."""
    if layout.second is None:
        return None
    second = np.float32(tensor.parts[SECOND].array()[0])
    if not np.isfinite(second) or (layout.second == DIVIDE and not second):
        raise CodecError(f"{ID}.second", f"expected a finite second scale, found {second}", where=tensor.name)
    return second


def codebook_of(tensor: Tensor, layout: ScaledCodebookLayout) -> Array | None:
    """Return the stored codebook in f32; None if the layout refers to a known table by name."""
    return None if layout.values else cast(tensor.parts[CODEBOOK].array(), "f32")


def decoder_of(tensor: Tensor, layout: ScaledCodebookLayout, windows: dict[str, Window]) -> Decoder:
    """Return the decoder of a checked tensor; ``windows`` contain its scales."""
    nested = None
    if layout.nested:
        nested = (tensor.parts[SCALE_CODEBOOK].array(), windows[SCALE_SCALES])
    scales = Scales(layout, windows[SCALES], nested, second_of(tensor, layout))
    return Decoder(layout, layout.stored_shape(tensor.shape), codebook_of(tensor, layout), scales)


class ScaledReader(Rows):
    """A sequential reader in stored order, a few rows at a time."""

    def __init__(self, tensor: Tensor, layout: ScaledCodebookLayout) -> None:
        self._tensor = tensor
        self._layout = layout
        self._tensor_name = tensor.name
        _, self._cols = matrix_shape(layout.stored_shape(tensor.shape))
        # If rows begin within a byte, the stream is cut between codes, which requires the low bits to come first.
        swapped = layout.order == HIGH_FIRST and self._cols % 2 == 1
        self._order = LOW_FIRST if swapped else layout.order
        self._indices = BitReader(
            tensor.parts[INDICES], layout.bits, "scaled_codebook.padding", tensor.name, high_first=swapped
        )
        self._windows = {
            role: ReaderWindow(tensor.parts[role]) for role in (SCALES, SCALE_SCALES) if role in tensor.parts
        }
        self._decoder: Decoder | None = None
        self._row = 0
        self._step = max(1, _SCRATCH // max(self._cols, 1))

    def fill(self, out: Array) -> None:
        if not out.size:
            return
        if self._decoder is None:
            self._decoder = decoder_of(self._tensor, self._layout, dict(self._windows))
        for start in range(0, len(out), self._step):
            target = out[start : start + self._step]
            packed = self._indices.next(target.size)
            try:
                self._decoder.decode(packed, self._row, target, self._order)
            except CodecError as error:
                raise error.add_location(self._tensor_name) from None
            self._row += len(target)

    def skip(self, count: int) -> None:
        """Skip ``count`` values, which must be full rows."""
        self._indices.skip(count)
        self._row += count // max(self._cols, 1)

    def finish(self) -> None:
        self._indices.finish()
        for window in self._windows.values():
            window.finish()
        for role in (CODEBOOK, SCALE_CODEBOOK, SECOND):
            if role in self._tensor.parts:
                self._tensor.parts[role].view()  # checks the digest, even if no value was read


class TransposedReader(Rows):
    """A sequential reader of matrices that are stored transposed; it buffers one matrix."""

    def __init__(self, tensor: Tensor, layout: ScaledCodebookLayout) -> None:
        self._shape = layout.stored_shape(tensor.shape)[-2:]  # shape of a stored matrix
        plain = replace(layout, transposed=False)
        stored = replace(tensor, shape=layout.stored_shape(tensor.shape), params=plain.attributes())
        self._stored = ScaledReader(stored, plain)
        self._row = self._next = 0
        self._buffer: Array | None = None

    def fill(self, out: Array) -> None:
        tall = self._shape[1]  # rows of a matrix in the result
        rows_read = 0
        while rows_read < len(out) and out.size:
            matrix, row = divmod(self._row, tall)
            count = min(tall - row, len(out) - rows_read)
            out[rows_read : rows_read + count] = self._matrix(matrix, out.dtype).T[row : row + count]
            rows_read += count
            self._row += count

    def skip(self, count: int) -> None:
        """Skip ``count`` values, which must be full rows."""
        self._row += count // max(self._shape[0], 1)

    def finish(self) -> None:
        self._stored.finish()

    def _matrix(self, index: int, dtype: np.dtype[np.generic]) -> Array:
        if self._buffer is not None and index == self._next - 1:
            if self._buffer.dtype != dtype:
                raise UsageError("expected one element type for all rows of a matrix", rule="tensor.out")
            return self._buffer
        if index > self._next:
            self._stored.skip((index - self._next) * self._shape[0] * self._shape[1])
        self._buffer = np.empty(self._shape, dtype)
        self._stored.fill(self._buffer)
        self._next = index + 1
        return self._buffer
