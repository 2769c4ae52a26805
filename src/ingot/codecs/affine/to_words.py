"""Conversion of integers of the affine family to the packings of other programs (``spec/affine_words.md``)."""

from __future__ import annotations

from collections.abc import Callable
from math import lcm

import numpy as np

from ingot.codecs.affine.repack import AffineRepack, difference, number_chunks, shift
from ingot.codecs.affine.word_codes import pack_planes, pack_points, pack_words, unpack_codes
from ingot.codecs.base import Repacked, RepackReader, cannot
from ingot.core.numeric.buffers import scratch, transpose_into
from ingot.core.numeric.dtypes import as_bits, file_bytes, float_name, from_file, numpy_dtype
from ingot.core.runtime import native
from ingot.errors import IntegrityError
from ingot.model.layouts.affine import CODES, SCALES, ZEROS, AffineLayout, Points
from ingot.model.layouts.packed_ints import AWQ, AWQ_GEMV, GPTQ_PLANES, GPTQ_V1, MODELOPT, PackedIntLayout, word_count
from ingot.model.tensor import Array, Tensor

_STRIP = 1 << 20  # bytes of rows that are transposed at a time
_LARGE_STRIP = 1 << 22  # the same, if each strip reads the entire source again
_PLANES_MEMORY = 24  # bytes per code to pack planes: a byte for each of its bits, in two copies, and words
_PAIRS_MEMORY = 3  # bytes per code to pack two rows in a byte


def to_words(tensor: Tensor, stored: AffineLayout, target: PackedIntLayout) -> Repacked:
    """Return the repacking of a checked tensor from the layout ``stored`` into ``target``."""
    rows, cols = tensor.matrix_shape
    reason = "its columns have an order or factors" if target.scattered else difference(stored, target.rows)
    if len(tensor.shape) != 2 or not rows or not cols:
        reason = f"words need a matrix that is not empty, not shape {list(tensor.shape)}"
    elif target.packing == AWQ and (rows % 8 or cols % 8):
        reason = f"AWQ needs rows and columns in multiples of 8, not {rows} x {cols}"
    elif target.packing == GPTQ_PLANES and (rows % 32 or cols % 32):
        reason = f"planes need rows and columns in multiples of 32, not {rows} x {cols}"
    elif target.packing == MODELOPT and rows % 2:
        reason = f"ModelOpt packs two rows in a byte, so it needs an even number, not {rows} rows"
    elif not target.packing_form.written:
        reason = f"Ingot reads the form {target.packing} but does not write it"
    if reason is not None:
        return cannot(target, reason)
    plain = AffineRepack(tensor, stored, target.rows)
    why_not = plain.why_not() or _why_not(plain, target)
    return in_words(plain, plain.reusing_reader if target.transposed else plain.reader, target, why_not)


def in_words(
    plain: AffineRepack,
    begin: Callable[[], RepackReader],
    target: PackedIntLayout,
    why_not: str | None,
    extra_row_bytes: int = 0,
) -> Repacked:
    """Return the repacking of a matrix into ``target``.

    ``plain`` repacks the same matrix into rows of codes, from which the words are packed. ``begin`` returns a new
    reader of these rows. Each row needs ``extra_row_bytes`` of memory in addition. Packings that are stored row by row
    are packed in chunks of rows. Transposed packings are packed in ranges of columns, as large as memory allows; each
    range reads all rows.
    """
    tensor = plain.tensor
    (rows, cols), parts = tensor.matrix_shape, target.part_specs(tensor.shape)
    memory = plain.memory + extra_row_bytes + 4 * word_count(cols, target.bits) + 16 * target.groups(cols)
    memory += {GPTQ_PLANES: _PLANES_MEMORY, MODELOPT: _PAIRS_MEMORY}.get(target.packing, 0) * cols
    if not target.transposed:
        return Repacked(
            target,
            parts,
            rows,
            32,
            memory,
            why_not,
            lambda: RowsReader(_Rows(begin(), tensor, target), target, cols),
            again=plain.again,
        )
    unit = lcm(32, target.group or 32)  # columns at which both a word and a group begin
    unit_bytes = rows * (4 * word_count(unit, target.bits) + 8 * (unit // (target.group or unit)))
    size = _LARGE_STRIP if plain.again else _STRIP
    strip = max(1, size // (4 * word_count(cols, target.bits)) // 32) * 32
    return Repacked(
        target,
        parts,
        -(-cols // unit),
        1,
        unit_bytes,
        why_not,
        lambda: TransposedReader(lambda: _Rows(begin(), tensor, target), target, (rows, cols), strip),
        extra_memory=min(strip, rows) * memory,
        again=True,
    )


def point_range(target: PackedIntLayout) -> tuple[int, int]:
    """Return the smallest and the largest zero point that a packing can store."""
    if target.signed:
        return -128, 127
    return int(target.packing == GPTQ_V1), (1 << target.bits) - 1


def _why_not(plain: AffineRepack, target: PackedIntLayout) -> str | None:
    """Return why the target cannot store a zero point; None if it can store all of them.

    If the answer depends on zero points, they are read and their digest checked.
    """
    if not isinstance(target.zero, Points):
        return None
    low, high = point_range(target)
    bounds = plain.tensor.parts[ZEROS].integers if plain.stored.zeros else None
    if bounds is not None:
        delta = shift(plain.stored, target.rows)
        fits = low <= bounds[0] + delta and bounds[1] + delta <= high
    else:
        fits = True
        chunks = number_chunks(plain.tensor.parts[ZEROS]) if plain.stored.zeros else iter((plain.new_zeros(1),))
        for zeros in chunks:
            shifted = plain.shift(zeros) if plain.stored.zeros else zeros
            fits = fits and _integers(shifted, target) is not None
    return None if fits else f"the form {target.packing} needs zero points that are integers from {low} to {high}"


def _integers(zeros: Array, target: PackedIntLayout) -> Array | None:
    """Return zero points as u8, in two's complement for signed codes; None if one is no integer in range."""
    low, high = point_range(target)
    integers = np.empty(zeros.shape, np.uint8)
    fits = native.kernels.affine_integers(as_bits(zeros), float_name(zeros), low, high, integers.reshape(-1))
    return integers if fits else None


class _Rows:
    """A sequential reader of a tensor's rows that packs each row into full words."""

    def __init__(self, inner: RepackReader, tensor: Tensor, target: PackedIntLayout) -> None:
        self._inner = inner
        self._target = target
        self._tensor_name = tensor.name

    def finish(self) -> None:
        self._inner.finish()

    def read(self, rows: int) -> tuple[Array, Array, Array | None]:
        """Return the next rows: codes [rows, bytes], scales and zero points [rows, groups]."""
        parts = self._inner.read(rows)
        padded = codes = parts[CODES].reshape(rows, -1)
        if codes.shape[1] % 4:
            padded = np.zeros((rows, -(-codes.shape[1] // 4) * 4), np.uint8)
            padded[:, : codes.shape[1]] = codes
        zeros = None
        if ZEROS in parts:
            zeros = _integers(parts[ZEROS].reshape(rows, -1), self._target)
            if zeros is None:  # other values than ``_why_not`` checked
                raise IntegrityError(
                    "store.changed",
                    "the zero points differ from an earlier read: the source changed meanwhile; run again",
                    where=self._tensor_name,
                )
        return padded, parts[SCALES].reshape(rows, -1), zeros


class RowsReader:
    """A packer for packings that are stored row by row."""

    def __init__(self, source: _Rows, target: PackedIntLayout, cols: int) -> None:
        self._source = source
        self._target = target
        self._cols = cols
        self._groups = target.groups(cols)

    def finish(self) -> None:
        self._source.finish()

    def read(self, rows: int) -> dict[str, Array]:
        target = self._target
        codes, scales, zeros = self._source.read(rows)
        if target.packing == MODELOPT:
            return {CODES: self._in_pairs(codes), SCALES: scales}
        if target.signed:
            codes = codes[:, : self._cols].view(np.int8)
        if target.packing != AWQ_GEMV:
            parts = {CODES: codes, SCALES: scales}
            if zeros is not None:
                packed = zeros.view(np.int8) if target.signed else pack_words(zeros.T, target.bits).T
                parts[ZEROS] = np.ascontiguousarray(packed)
            return parts
        return self._for_gemv(codes, scales, zeros)

    def _in_pairs(self, codes: Array) -> Array:
        """Return rows of codes as bytes with codes of two rows each, the first row's in the low bits."""
        rows = unpack_codes(from_file(codes.reshape(-1), "u32").reshape(len(codes), -1), 4, self._cols)
        pairs: Array = rows[0::2] | rows[1::2] << 4
        return pairs

    def _for_gemv(self, codes: Array, scales: Array, zeros: Array | None) -> dict[str, Array]:
        target = self._target
        rows = len(codes)
        width = target.zero_shape((rows, self._cols))[1]
        wide = np.zeros((rows, 8 * width), scales.dtype)
        wide[:, : self._groups] = scales
        parts = {CODES: codes, SCALES: wide}
        if zeros is not None:
            points = np.zeros((rows, 8 * width), np.uint8)
            points[:, : self._groups] = zeros
            parts[ZEROS] = pack_words(points, target.bits)
        return parts


class TransposedReader:
    """A packer for words that contain several columns of one row, or several rows of one column.

    For each run of columns it reads all rows of the tensor.
    """

    def __init__(
        self, begin: Callable[[], _Rows], target: PackedIntLayout, matrix: tuple[int, int], strip: int
    ) -> None:
        self._begin = begin
        self._target = target
        self._strip = strip
        self._height, self._cols = matrix
        self._unit = lcm(32, target.group or 32)
        self._next = 0

    def read(self, units: int) -> dict[str, Array]:
        """Return each part's bytes for the next ``units`` units of columns."""
        first = self._next * self._unit
        last = min((self._next + units) * self._unit, self._cols)
        self._next += units
        target = self._target
        height = self._height
        source = self._begin()
        line = word_count(first, target.bits)
        end = word_count(last, target.bits)
        size = target.group or self._cols
        groups = slice(first // size if target.group else int(first > 0), -(-last // size))
        transposed = scratch((4 * (end - line) * height,), np.uint8)
        scales = np.empty((groups.stop - groups.start, height), numpy_dtype(target.scales))
        zeros = np.empty(scales.shape, np.uint8) if isinstance(target.zero, Points) else None
        for row in range(0, height, self._strip):
            rows = slice(row, min(row + self._strip, height))
            codes, steps, points = source.read(rows.stop - row)
            self._transpose(codes, line, end, row, transposed)
            transpose_into(steps[:, groups], scales, row)
            if zeros is not None and points is not None:
                transpose_into(points[:, groups], zeros, row)
        source.finish()
        parts = {CODES: transposed, SCALES: scales}
        if zeros is not None and len(zeros):  # parts per row come with the first columns
            parts[ZEROS] = pack_points(zeros, target)
        return parts

    def finish(self) -> None:
        """Do nothing: ``read`` finishes its source at the end of each pass."""

    def _transpose(self, codes: Array, line: int, end: int, row: int, out: Array) -> None:
        """Write words ``line`` to ``end`` of each row of ``codes`` to ``out``, transposed.

        ``row`` is the index in the matrix of the first row of ``codes``.
        """
        if self._target.packing == GPTQ_PLANES:
            codes = self._in_planes(codes)
        source = (codes.reshape(-1), 4 * line, codes.shape[1], len(codes), end - line, out)
        if self._target.packing == AWQ:
            native.kernels.words_to_awq(*source, row // 2, self._height // 2)
        else:
            native.kernels.words_turn(*source, 4 * row, 4 * self._height)

    def _in_planes(self, rows: Array) -> Array:
        """Convert rows of codes from bit streams to bit planes, both as little-endian words."""
        stored = from_file(rows.reshape(-1), "u32").reshape(len(rows), -1)
        packed = pack_planes(unpack_codes(stored, self._target.bits, self._cols), self._target.bits)
        return np.frombuffer(file_bytes(packed), np.uint8).reshape(len(rows), -1)
