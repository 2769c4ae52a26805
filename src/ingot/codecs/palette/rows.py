"""Lookups in codebooks, for decoders and encoders (``spec/palette.md``)."""

from __future__ import annotations

from math import gcd, lcm

import numpy as np

from ingot.codecs.affine.rows import align_rows, skip_bits
from ingot.codecs.palette.params import run_ids, run_length
from ingot.core.numeric.dtypes import cast, numpy_dtype
from ingot.core.runtime import native
from ingot.core.runtime.parallel import for_ranges
from ingot.errors import CodecError
from ingot.model.layouts.palette import CODEBOOK, SCALES, PaletteLayout
from ingot.model.part import Part, PartReader
from ingot.model.tensor import Array, Tensor

# Indices per call: enough that the call's cost is negligible, few enough to use all threads.
STEP = 1 << 20


def entry_values(codebook: Array, scales: Array | None) -> Array:
    """Return the decoded entries ``scale * entry`` in f32, rounded once: [codebooks, entries, values].

    Raises ``CodecError`` ``palette.scale`` if a scale is not finite, ``palette.overflow`` if a product exceeds f32.
    """
    with np.errstate(invalid="ignore"):  # arm64 raises the flag for signalling NaNs
        wide, factors = codebook.astype(np.float32), None if scales is None else scales.astype(np.float32)
    if factors is None:
        return wide
    if not np.isfinite(factors).all():
        raise CodecError("palette.scale", "expected finite codebook scales, found NaN or infinity")
    with np.errstate(over="ignore"):
        values = wide * factors.reshape(-1, 1, 1)
    if not np.isfinite(values[np.isfinite(wide)]).all():
        raise CodecError("palette.overflow", "expected products of scale and entry in the range of f32")
    return values


def tables(values: Array, dtype: str) -> Array:
    """Return entry values rounded to ``dtype``: f32, f16, bf16 or f64.

    Raises ``CodecError`` ``palette.overflow`` if a finite entry exceeds the range of ``dtype``.
    """
    if dtype in ("f32", "f64"):
        return values.astype(numpy_dtype(dtype))
    entries = cast(values, dtype)
    if (np.isinf(entries.astype(np.float32)) & np.isfinite(values)).any():
        raise CodecError(
            "palette.overflow", f"expected entries in the range of {dtype}, found a larger one; decode to f32 or bf16"
        )
    return entries


def read_tables(tensor: Tensor, params: PaletteLayout, dtype: str) -> Array:
    """Return the entry values of a checked tensor in ``dtype``; codebook and scales are read."""
    codebook = tensor.parts[CODEBOOK].array().reshape(params.codebook_shape())
    scales = tensor.parts[SCALES].array() if SCALES in tensor.parts else None
    try:
        return tables(entry_values(codebook, scales), dtype)
    except CodecError as error:
        raise error.add_location(tensor.name) from None


class Lookup:
    """A lookup of runs of a tensor's indices.

    Parameters
    ----------
    params : PaletteLayout
    shape : shape of the tensor
    table : [codebooks, entries, values per entry], of the output's type
    """

    def __init__(self, params: PaletteLayout, shape: tuple[int, ...], table: Array) -> None:
        self._params = params
        self._shape = shape
        self._run = run_length(params, shape)
        self.dtype = table.dtype
        words = np.ascontiguousarray(table).reshape(params.codebooks, -1)
        width = params.vector_size * table.dtype.itemsize
        self._split = 1  # vectors of 4 f64 are too wide for the kernel, so they are looked up as pairs
        if width <= 8:
            self._words: Array = words.view(f"u{width}")
        elif width == 16:
            self._words = words.view(np.uint64).reshape(params.codebooks, params.entries, 2)
        else:
            self._words = words.view(np.uint64).reshape(params.codebooks, params.entries, 4)
            self._split = 2

    def __call__(self, packed: Array, first: int, out: Array) -> None:
        """Fill the flat ``out`` [n * values per entry] with the entries of n indices from index ``first`` on.

        ``packed`` is the bit stream of these indices, beginning at a byte.
        """
        if not out.size:
            return
        count = out.size // self._params.vector_size
        start, phase = divmod(first, self._run)
        ids = run_ids(self._params, self._shape, start, start + -(-(phase + count) // self._run))
        if self._split == 1:
            words = out.view(self._words.dtype)
            target = words.reshape(-1, 2) if self._words.ndim == 3 else words
            native.kernels.palette_decode(packed, self._params.bits, self._words, ids, self._run, phase, target)
            return
        halves = np.empty((count, 2, 2), np.uint64)
        for half in range(2):
            words = np.ascontiguousarray(self._words[:, :, 2 * half : 2 * half + 2])
            target = np.empty((count, 2), np.uint64)
            native.kernels.palette_decode(packed, self._params.bits, words, ids, self._run, phase, target)
            halves[:, half] = target
        out.view(np.uint64)[...] = halves.reshape(-1)

    def all(self, packed: Array, out: Array, workers: int | None = 1) -> None:
        """Fill the flat ``out`` from a complete stream, with several threads."""
        size, bits = self._params.vector_size, self._params.bits
        count = out.size // size
        step = STEP // 8 * 8

        def run(start: int, stop: int) -> None:
            self(packed[start * bits // 8 : -(-stop * bits // 8)], start, out[start * size : stop * size])

        for_ranges(count, step, run, 1 if count < 4 * STEP else workers)


class HighFirst(PartReader):
    """A reader of bytes whose high bits contain the first of two codes; it exchanges the two codes of each byte."""

    def readinto(self, out: memoryview) -> None:
        super().readinto(out)
        codes = np.frombuffer(out, np.uint8)
        codes[:] = codes >> 4 | codes << 4


class BitReader:
    """A sequential reader of a part that is one stream of codes of ``bits`` bits.

    If ``high_first`` is set, codes have 4 bits, the first code of a byte is in its high bits, and unused bits after the
    last code are not checked.
    """

    def __init__(self, part: Part, bits: int, rule: str, location: str, *, high_first: bool = False) -> None:
        self._bits = bits
        self._rule = rule
        self._location = location
        self._high = high_first
        self._reader = HighFirst(part) if high_first else part.reader()
        # if not 0, the next code begins at this bit of the last byte that was read
        self._bit = 0
        self._last = 0

    def next(self, count: int) -> Array:
        """Return the next ``count`` codes as a stream that begins at a byte, padded with zeros."""
        carry = self._bit > 0
        end = self._bit + count * self._bits
        packed = np.empty(-(-end // 8), np.uint8)
        packed[:carry] = self._last
        self._reader.readinto(packed[carry:].data)
        first = self._bit
        self._bit = end % 8
        self._last = int(packed[-1]) if packed.size else 0
        if first and count:
            return align_rows(packed, first, (1, count * self._bits))
        packed = packed[: -(-count * self._bits // 8)]
        if self._bit and count:
            packed[-1] &= (1 << self._bit) - 1
        return packed

    def skip(self, count: int) -> None:
        """Skip the next ``count`` codes."""
        self._bit, self._last = skip_bits(self._reader, self._bit, self._last, count * self._bits)

    def finish(self) -> None:
        """Check the bits after the last code, and the digest; called after all codes were read or skipped."""
        if self._bit and not self._high:
            require_padding(self._last, self._bit, self._rule, self._location)
        self._reader.finish()


def require_padding(last: int, used: int, rule: str, location: str) -> None:
    """Raise ``CodecError`` with ``rule`` if a bit after the first ``used`` bits of the last byte is set."""
    if last >> used:
        raise CodecError(rule, "expected zero bits after the last code, found others", where=location)


def chunk_step(rows: int, cols: int, params: PaletteLayout) -> int:
    """Return the number of rows at whose multiples chunks may begin.

    It is a multiple of ``rows`` for which the packed indices begin at a byte.
    """
    unit = 8 * params.vector_size
    return lcm(max(rows, 1), unit // gcd(unit, max(cols, 1) * params.bits))


def expand_vectors(entries: Array, axis: int) -> Array:
    """Return values from entries [shape of indices, values]; dimension ``axis`` grows by the length of a vector."""
    moved = np.ascontiguousarray(np.moveaxis(entries, -1, axis + 1))
    shape = moved.shape
    return moved.reshape(*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :])


def pack(codes: Array, bits: int) -> Array:
    """Return u8 codes as one stream."""
    flat = np.ascontiguousarray(codes).reshape(-1)
    if bits == 8:
        return flat
    out = np.empty(-(-flat.size * bits // 8), np.uint8)
    native.kernels.palette_pack(flat, bits, out)
    return out


def unpack(packed: Array, bits: int, count: int) -> Array:
    """Return a stream of ``count`` codes as u8."""
    if bits == 8:
        return packed
    out = np.empty(count, np.uint8)
    native.kernels.palette_unpack(packed, bits, out)
    return out
