"""Calls of the affine kernels on full rows, for decoders and encoders."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import numpy as np

from ingot.core.numeric.buffers import HUGE_PAGE, prefault
from ingot.core.numeric.dtypes import LARGEST, as_bits, cast_into, float_name, written
from ingot.core.runtime import native
from ingot.core.runtime.parallel import default_workers, for_ranges
from ingot.errors import CodecError
from ingot.model.layouts.affine import AffineLayout
from ingot.model.part import PartReader
from ingot.model.tensor import Array

# Elements per call: enough that the call's cost is negligible, few enough to use all threads.
STEP = 1 << 20
_FRESH = 1 << 22  # in memory whose pages the system clears just before the call, which puts them into a cache
_ALONE = 1 << 24  # on one thread: a few milliseconds, so that an interrupt takes effect soon


def layout(params: AffineLayout, cols: int) -> native.kernels.AffineLayout:
    """Return the kernels' description of packed rows of ``cols`` columns."""
    return native.kernels.AffineLayout(
        cols=cols,
        group=params.group_columns(cols),
        bits=params.bits,
        signed=params.signed,
        msb=params.msb,
        per_tensor=params.per_tensor,
        row_bytes=params.row_bytes(cols),
        offset=params.offset,
    )


@dataclass(frozen=True, slots=True)
class _Rows:
    """Packed codes, scales and zero points of consecutive rows, each as a 1-d array."""

    params: AffineLayout
    packed: Array
    scales: Array
    zeros: Array | None

    def cut(self, start: int, stop: int, rows: int) -> _Rows:
        """Return rows ``start`` to ``stop``; ``rows`` is the number of rows of this object."""
        packed = self.packed[start * self.packed.size // rows : stop * self.packed.size // rows]
        if self.params.per_tensor:
            return _Rows(self.params, packed, self.scales, self.zeros)
        per_row = self.scales.size // rows
        span = slice(start * per_row, stop * per_row)
        return _Rows(self.params, packed, self.scales[span], None if self.zeros is None else self.zeros[span])

    def decode(self, out: Array) -> None:
        """Decode the rows into ``out``: f32, f16 or bf16."""
        native.kernels.affine_dequantize(
            self.packed,
            as_bits(self.scales),
            None if self.zeros is None else as_bits(self.zeros),
            written(out),
            layout(self.params, out.shape[1]),
            float_name(self.scales),
            float_name(out),
        )

    def add(self, base: Array, out: Array) -> None:
        """Decode the rows, add ``base``, and round into ``out``; both are f32, f16 or bf16 and may be one array."""
        native.kernels.affine_add(
            self.packed,
            as_bits(self.scales),
            None if self.zeros is None else as_bits(self.zeros),
            as_bits(base),
            written(out),
            layout(self.params, out.shape[1]),
            float_name(self.scales),
            float_name(out),
        )

    def may_overflow(self, dtype: str) -> bool:
        """Return whether the largest scale and zero point allow a value beyond the range of ``dtype``."""
        levels = 2.0**self.params.bits
        zero = 0.0 if self.zeros is None else _largest(self.zeros)
        scale = _largest(self.scales)
        return not (scale * levels + zero if self.params.offset else scale * (levels + zero)) <= LARGEST[dtype]

    def refuse_overflow(self, out: Array) -> None:
        """Raise ``CodecError`` if a value of ``out`` is not finite although its scale and zero point are finite."""
        row, column = np.nonzero(~np.isfinite(out))
        group = column // self.params.group_columns(out.shape[1])
        index = 0 * row if self.params.per_tensor else row if self.params.per_row else None
        if index is None:
            index = row * (self.scales.size // len(out)) + group
        with np.errstate(invalid="ignore"):  # a signalling NaN counts as NaN
            sound = np.isfinite(self.scales[index])
            if self.zeros is not None:
                sound &= np.isfinite(self.zeros[index])
        if sound.any():
            raise CodecError(
                "affine.overflow",
                f"expected values in the range of {float_name(out)}, found one beyond {LARGEST[float_name(out)]:g}; "
                "decode to f32 or bf16",
            )


def _rows_of(params: AffineLayout, packed: Array, scales: Array, zeros: Array | None) -> _Rows:
    """Return flat views of full rows; a constant zero point becomes an array in the type of the scales."""
    if zeros is None and params.zero_point is not None:
        zeros = np.full(scales.size, params.zero_point, scales.dtype)
    flat = None if zeros is None else zeros.reshape(-1)
    return _Rows(params, packed.reshape(-1).view(np.uint8), scales.reshape(-1), flat)


def skip_bits(reader: PartReader, bit: int, last: int, count: int) -> tuple[int, int]:
    """Skip ``count`` bits of a stream; return the position after them as (bit, byte).

    The next bit of the stream is bit ``bit`` of the byte ``last``, which was already read unless ``bit`` is 0.
    """
    carry = bit > 0
    end = bit + count
    if carry and end < 8:
        return end, last
    reader.skip(end // 8 - carry)
    byte = np.zeros(1, np.uint8)
    if end % 8:
        reader.readinto(byte.data)
    return end % 8, int(byte[0])


def align_rows(stream: Array, first: int, shape: tuple[int, int]) -> Array:
    """Cut a bit stream, lowest bit of a byte first, into rows that begin at bytes; unused bits are 0.

    Parameters
    ----------
    stream : u8, ceil((first + rows * bits) / 8)
    first : int
        Number of bits before the first row, below 8.
    shape : rows, bits of a row (at least 1)
    """
    rows, row_bits = shape
    size = -(-row_bits // 8)
    out = np.empty((rows, size), np.uint8)
    padded = np.append(stream, np.zeros(2, np.uint8))
    period = 8 // gcd(8, row_bits)  # distance of rows that begin at the same bit of a byte
    for row in range(min(period, rows)):
        byte, bit = divmod(first + row * row_bits, 8)
        count = len(range(row, rows, period))
        pairs = np.lib.stride_tricks.as_strided(
            padded[byte:], (count, size + 1), (period * row_bits // 8, 1), writeable=False
        )
        out[row::period] = pairs[:, :-1] >> bit
        if bit:
            out[row::period] |= pairs[:, 1:] << (8 - bit)
    out[:, -1] &= 0xFF >> (-row_bits % 8)
    return out.reshape(-1)


def join_rows(rows: Array, row_bits: int) -> Array:
    """Undo ``align_rows`` with ``first`` 0: return one bit stream of rows, whose unused bits must be 0."""
    count = len(rows)
    out = np.zeros(-(-count * row_bits // 8) + 2, np.uint8)
    period = 8 // gcd(8, row_bits)
    for row in range(min(period, count)):
        byte, bit = divmod(row * row_bits, 8)
        lines = rows[row::period]
        # Windows of one iteration do not overlap: each is as long as a row, and rows are at least as far apart.
        for start, part in ((byte, lines << bit), (byte + 1, lines >> (8 - bit))) if bit else ((byte, lines),):
            window = np.lib.stride_tricks.as_strided(out[start:], lines.shape, (period * row_bits // 8, 1))
            window |= part
    return out[:-2]


def decode_rows(
    params: AffineLayout,
    packed: Array,
    scales: Array,
    zeros: Array | None,
    out: Array,
    workers: int | None = 1,
    new: bool = False,
) -> None:
    """Decode rows into ``out``: ``w = s * (q - z)`` or ``s * q + z`` in f32, rounded once to ``out.dtype``.

    Parameters
    ----------
    params : AffineLayout
        ``matrix`` is ignored. For a grid of blocks, scales must be repeated for each row: [rows, columns / block].
    packed : u8, rows * row_bytes
    scales, zeros : arrays of ``scale_shape(rows, cols)``, in any number of dimensions; f32, f16 or bf16
    out : rows x cols, C order; f32, f16, bf16 or f64
    workers : int, optional
        The number of threads; None for ``default_workers()``. Small matrices use one.
    new : bool
        Whether the memory of ``out`` is new, that is, not yet written to.

    Raises
    ------
    CodecError
        ``affine.overflow``: a finite scale and zero point give a value beyond the range of ``out.dtype``.
    """
    rows, cols = out.shape
    if not out.size:
        return
    everything = _rows_of(params, packed, scales, zeros)
    wide = out.dtype == np.float64
    risky = everything.may_overflow("f32" if wide else float_name(out))

    def run(start: int, stop: int) -> None:
        batch = everything.cut(start, stop, rows)
        target = out[start:stop]
        if new:  # a single thread goes on in the last page: clear all of it
            prefault(out[start:], target.nbytes + (HUGE_PAGE if workers == 1 else 0))
        narrow = np.empty(target.shape, np.float32) if wide else target
        batch.decode(narrow)
        if risky:
            batch.refuse_overflow(narrow)
        if wide:
            cast_into(narrow, target)

    workers = 1 if out.size < 4 * STEP else default_workers() if workers is None else workers
    # Scratch memory and a second pass over the values need chunks that stay in a cache.
    step = STEP if workers > 1 or wide or risky else _FRESH if new else _ALONE
    for_ranges(rows, max(1, step // cols), run, workers)


def add_rows(params: AffineLayout, packed: Array, scales: Array, zeros: Array | None, base: Array, out: Array) -> None:
    """Write ``base + s * (q - z)`` to ``out``, with the same bits as decoding to f32, adding, and rounding once.

    ``base`` and ``out`` are rows x cols, both f32, f16 or bf16, and may be one array. ``decode_rows`` describes the
    other parameters.

    Raises
    ------
    CodecError
        ``affine.overflow``: a finite scale and zero point give a difference beyond the range of f32.
    """
    if not out.size:
        return
    rows = _rows_of(params, packed, scales, zeros)
    if not rows.may_overflow("f32"):
        rows.add(base, out)
        return
    total = np.empty(out.shape, np.float32)
    rows.decode(total)
    rows.refuse_overflow(total)
    wide = np.empty(out.shape, np.float32)
    cast_into(base, wide)
    total += wide
    cast_into(total, out)


def _largest(values: Array) -> float:
    """Return the largest magnitude; NaN if a value is not finite."""
    low, high, bad = native.kernels.affine_range(as_bits(values), float_name(values))
    return max(-low, high) if bad == values.size else float("nan")
