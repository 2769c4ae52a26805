"""Codes, scales and zero points of runs of rows, unpacked from the packings of other programs.

The packings: ``spec/affine_words.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache

import numpy as np

from ingot.codecs.affine.windows import Windows, computed_part
from ingot.codecs.affine.word_codes import join_planes, points_of, stream, unpack_codes
from ingot.core.numeric.buffers import scratch, transposed
from ingot.core.numeric.dtypes import DTYPES, file_bytes, from_file, little_endian, numpy_dtype, written
from ingot.core.runtime import native
from ingot.errors import CodecError
from ingot.model.layouts.affine import CODES, SCALES, ZEROS, Points
from ingot.model.layouts.packed_ints import (
    AWQ,
    AWQ_GEMV,
    GPTQ,
    GPTQ_PLANES,
    GPTQ_V1,
    HQQ,
    HQQ_COLUMNS,
    INTEGERS,
    INTS,
    MARLIN_24,
    META,
    MODELOPT,
    ORDER,
    PACKED_LOOSE,
    QUANTO,
    SUBTRACTED,
    PackedIntLayout,
    word_count,
)
from ingot.model.part import Part
from ingot.model.tensor import Array, Tensor

BLOCK = 64
_TILE = 16  # words cover tiles of 16 inputs and 16 outputs
_INTERLEAVE = {4: (0, 2, 4, 6, 1, 3, 5, 7), 8: (0, 2, 1, 3)}
_PAIRS = np.array([low | high << 2 for low in range(4) for high in range(low + 1, 4)], np.uint8)
_SCALES = np.array([8 * row + offset for row in range(8) for offset in (0, 4, 1, 5, 2, 6, 3, 7)])


@cache
def _code_positions(bits: int) -> Array:
    """Return the stored position of each code, for 16 columns of 64 rows, in tiles of 16 x 16."""
    order = []
    for lane in range(32):
        column = lane // 4
        inputs = [2 * (lane % 4) + step for step in (0, 1, 8, 9)]
        first = [16 * row + column // 2 * 256 + 8 * (column % 2) + 4 * half for half in (0, 1) for row in inputs]
        for more in range(4):
            order += [position + more for position in first]
    stored = np.array(order).reshape(-1, len(_INTERLEAVE[bits]))[:, _INTERLEAVE[bits]].reshape(-1)
    positions: Array = np.argsort(stored)
    return positions


@cache
def _meta_positions() -> Array:
    """Return the positions of the metadata of 64 rows and two columns within 128 entries; [rows, 2]."""
    row, column = np.meshgrid(np.arange(BLOCK), np.arange(2), indexing="ij")
    to = row % 2 * 2 + row % 8 // 4 + row % 4 // 2 * 32 + row // 8 * 4
    swap = ((to % 2 == 0) & (column == 1)).astype(np.int64) - ((to % 2 == 1) & (column == 0))
    positions: Array = (to + swap) * 2 + (column - swap)
    return positions


def marlin_codes(stored: Array, meta: Array, bits: int, location: str) -> Array:
    """Return codes, u8 [rows, columns], of blocks of 64 rows; omitted codes are the middle code, whose value is 0.

    ``stored`` are the codes in the order of the words, u8 [columns / 32, 16 * rows]; ``meta`` is u16 [columns / 32, 2 *
    rows]. Raises ``CodecError`` ``affine_words.meta`` unless each four columns have two ascending positions.
    """
    lines = len(stored)
    rows = meta.shape[1] // 2
    tiles = stored.reshape(lines, rows // BLOCK, -1)[:, :, _code_positions(bits)].reshape(
        lines, rows // _TILE, _TILE, _TILE
    )
    selected = tiles.transpose(1, 3, 0, 2).reshape(rows, -1, 2)
    entries = meta.reshape(lines, rows // BLOCK, 2 * BLOCK)[:, :, _meta_positions()]
    positions = entries.transpose(1, 2, 0, 3).reshape(rows, -1)
    fours = (positions[:, :, None] >> np.arange(0, 16, 4, dtype=np.uint16) & np.uint16(15)).astype(np.uint8)
    fours = fours.reshape(rows, -1)
    if not np.isin(fours, _PAIRS).all():
        raise CodecError("affine_words.meta", "expected two ascending positions for each four columns", where=location)
    codes = np.full((rows, fours.shape[1], 4), 1 << (bits - 1), np.uint8)
    np.put_along_axis(codes, np.stack([fours & 3, fours >> 2], axis=2).astype(np.intp), selected, axis=2)
    return codes.reshape(rows, -1)


def marlin_scales(stored: Array, *, grouped: bool) -> Array:
    """Return Marlin's stored scales [rows, groups] in the order of the matrix rows.

    If ``grouped`` is false, they are stored in this order and are returned unchanged.
    """
    if not grouped:
        return stored
    out = np.empty_like(stored).reshape(-1, BLOCK, stored.shape[1])
    out[:, _SCALES] = stored.reshape(out.shape)
    return out.reshape(stored.shape)


_TRANSPOSED = (GPTQ, GPTQ_V1, GPTQ_PLANES, AWQ)
_CODES = 1 << 19  # codes that are unpacked at a time if each needs several bytes
_STRIP = 1 << 20  # bytes of lines that are transposed at a time
_LINES = 64  # strips begin at multiples of this number of lines, so that writes to a row fill cache lines
_NARROW = 1 << 18  # a line is read completely if that costs at most this many further bytes, the cost of a read


class WordRows:
    """A reader of runs of rows of a checked tensor."""

    def __init__(self, tensor: Tensor, layout: PackedIntLayout) -> None:
        self._layout, (self.rows, self.cols), self._tensor_name = layout, tensor.matrix_shape, tensor.name
        self._row_bytes = layout.rows.row_bytes(self.cols)
        self._groups = layout.groups(self.cols)
        parts = tensor.parts
        integer = DTYPES[layout.integers].bits // 8
        scale = DTYPES[layout.scales].bits // 8
        lines, across = layout.code_shape(tensor.shape)
        self._codes = Windows(parts[CODES], lines, across * integer)
        lines, across = layout.scale_shape(tensor.shape)
        self._scales = Windows(parts[SCALES], lines, across * scale)
        self._zeros: Windows | None = None
        if isinstance(layout.zero, Points):
            lines, across = layout.zero_shape(tensor.shape)
            self._zeros = Windows(parts[ZEROS], lines, across * DTYPES[layout.points].bits // 8)
        self._meta = Windows(parts[META], self.cols // 32, 4 * self.rows) if layout.packing == MARLIN_24 else None

    def codes(self, first: int, last: int) -> Array:
        """Return the codes of rows ``first`` to ``last``, each row a bit stream, low bits first: u8 [rows, bytes]."""
        readers: Mapping[str, Callable[[int, int], Array]] = {
            **dict.fromkeys((GPTQ, GPTQ_V1), self._transposed),
            GPTQ_PLANES: self._planes,
            **dict.fromkeys((HQQ, QUANTO), self._stacked),
            AWQ: self._awq,
            HQQ_COLUMNS: self._strided,
            MARLIN_24: self._marlin,
            MODELOPT: self._pairs,
            PACKED_LOOSE: self._loose,
        }
        name = self._layout.packing
        if name in _TRANSPOSED:
            return readers[name](first, last)
        if name in readers:
            return self._in_strips(last - first, lambda start, stop: readers[name](first + start, first + stop))
        return self._codes.read(slice(first, last), 0, self._codes.width)[:, : self._row_bytes]

    def _planes(self, first: int, last: int) -> Array:
        bits, transposed_words = self._layout.bits, self._transposed(first, last)
        return self._in_strips(
            len(transposed_words),
            lambda start, stop: stream(join_planes(_as_words(transposed_words[start:stop]), bits), bits),
        )

    def _in_strips(self, rows: int, make: Callable[[int, int], Array]) -> Array:
        """Call ``make(first, last)`` for consecutive strips of rows, and join the results.

        Strips limit memory, because ``make`` needs many bytes per code.
        """
        step = max(1, _CODES // max(1, self.cols) // BLOCK) * BLOCK
        if rows <= step:
            return make(0, rows)
        out = scratch((rows, self._row_bytes), np.uint8)
        for start in range(0, rows, step):
            out[start : start + step] = make(start, min(start + step, rows))
        return out

    def _loose(self, first: int, last: int) -> Array:
        bits = self._layout.bits
        stored = self._codes.read(slice(first, last), 0, self._codes.width)
        count = 32 // bits * (stored.shape[1] // 4)
        return stream(unpack_codes(_as_words(stored), bits, count, loose=True)[:, : self.cols], bits)

    def scales(self, first: int, last: int) -> Array:
        """Return the scales [rows, groups] in the byte order of files."""
        if self._layout.packing == MARLIN_24:
            begin = first // BLOCK * BLOCK
            end = -(-last // BLOCK) * BLOCK
            grouped = 2 * (self._layout.group or self.cols) < self.cols
            scales = marlin_scales(self._numbers(self._scales, begin, end), grouped=grouped)
            return np.ascontiguousarray(scales[first - begin : last - begin])
        return self._numbers(self._scales, first, last)

    def _numbers(self, window: Windows, first: int, last: int) -> Array:
        """Return numbers of groups, such as scales, in the type of the scales: [rows, groups]."""
        size = DTYPES[self._layout.scales].bits // 8
        dtype = little_endian(f"u{8 * size}")
        if self._layout.packing == HQQ_COLUMNS:
            return self._cycle(window, first, last, size).view(dtype)
        if not self._layout.transposed:
            stored = window.read(slice(first, last), 0, self._groups * size)
            return np.ascontiguousarray(stored).view(dtype)
        stored = window.read(slice(0, self._groups), first * size, last * size)
        return transposed(np.ascontiguousarray(stored).view(dtype))

    def _cycle(self, window: Windows, first: int, last: int, size: int) -> Array:
        """Return the scale or zero point of every code of rows ``first`` to ``last``: u8 [rows, columns * size].

        A number has ``size`` bytes. The part contains a sequence of numbers, which repeats along the codes in row-major
        order.
        """
        out = np.empty((last - first) * self.cols * size, np.uint8)
        start = first * self.cols * size % window.width
        filled = 0
        while filled < out.size:
            chunk = window.read(slice(0, 1), start, min(window.width, start + out.size - filled)).reshape(-1)
            out[filled : filled + chunk.size] = chunk
            start = 0
            filled = filled + chunk.size
        return out.reshape(last - first, -1)

    def points(self, first: int, last: int) -> Array:
        """Return the zero points as integers [rows, groups]."""
        layout = self._layout
        zeros = self._zeros
        assert zeros is not None
        if layout.packing == INTS:
            return np.ascontiguousarray(zeros.read(slice(first, last), 0, self._groups)).view(np.int8)
        if layout.packing == AWQ_GEMV:
            return unpack_codes(_as_words(zeros.read(slice(first, last), 0, zeros.width)), 4, self._groups)
        start = first // 32 * 32  # a row whose bits begin at a word
        begin = start * layout.bits // 32
        end = word_count(last, layout.bits)
        if layout.packing == GPTQ_PLANES:
            end = word_count(-(-last // 32) * 32, layout.bits)
        if layout.transposed:
            packed = _as_words(zeros.read(slice(0, self._groups), 4 * begin, 4 * end))
        else:
            packed = np.ascontiguousarray(_as_words(zeros.read(slice(begin, end), 0, 4 * self._groups)).T)
        return transposed(points_of(packed, layout)[:, first - start : last - start])

    def float_points(self, first: int, last: int) -> Array:
        """Return the zero points, or the offsets, in the type of the scales and the byte order of files."""
        if self._layout.packing_form.zeros != INTEGERS:
            assert self._zeros is not None
            size = DTYPES[self._layout.scales].bits // 8
            stored = self._numbers(self._zeros, first, last).reshape(-1).view(np.uint8).copy()
            if self._layout.packing_form.zeros == SUBTRACTED:
                stored[size - 1 :: size] ^= 0x80  # flips the sign
            return stored
        points = self.points(first, last)
        numbers = np.empty(points.shape, numpy_dtype(self._layout.scales))
        signed = points.dtype == np.int8
        native.kernels.affine_numbers(points.view(np.uint8).reshape(-1), signed, written(numbers), self._layout.scales)
        return np.frombuffer(file_bytes(numbers), np.uint8)

    def _stacked(self, first: int, last: int) -> Array:
        begin = first * self._groups
        end = last * self._groups
        codes = self._lines(begin, end, 0, self._layout.group or self.cols)
        return stream(codes.reshape(last - first, self.cols), self._layout.bits)

    def _strided(self, first: int, last: int) -> Array:
        """Return the codes of rows ``first`` to ``last`` of a packing whose lines are not groups.

        ``PackedIntLayout.lines`` defines lines. The rows may begin and end within lines.
        """
        width = self._layout.lines((self.rows, self.cols))[1]
        codes = np.empty((last - first) * self.cols, np.uint8)
        begin = first * self.cols
        filled = 0
        while filled < codes.size:
            line, start = divmod(begin + filled, width)
            full_lines = (codes.size - filled) // width if not start else 0
            if full_lines:
                chunk = self._lines(line, line + full_lines, 0, width)
            else:
                chunk = self._lines(line, line + 1, start, min(width, start + codes.size - filled))
            codes[filled : filled + chunk.size] = chunk.reshape(-1)
            filled += chunk.size
        return stream(codes.reshape(last - first, self.cols), self._layout.bits)

    def _lines(self, begin: int, end: int, first: int, last: int) -> Array:
        """Return codes ``first`` to ``last`` (u8) of lines ``begin`` to ``end``.

        ``PackedIntLayout.lines`` defines lines. All lines are divided into ``lanes`` equal ranges. A word contains one
        code of each range.
        """
        layout = self._layout
        size = 4 if layout.bits == 3 else 1
        step = self._codes.rows
        across = slice(size * first, size * last)
        codes = np.empty((end - begin, last - first), np.uint8)
        for lane in range(layout.lanes):
            start = max(begin, lane * step)
            stop = min(end, (lane + 1) * step)
            if start >= stop:
                continue
            stored = self._codes.read(slice(start - lane * step, stop - lane * step), across.start, across.stop)
            packed = _as_words(stored) if layout.bits == 3 else stored
            shift = layout.bits * (lane if layout.packing == QUANTO else layout.lanes - 1 - lane)
            mask = packed.dtype.type((1 << layout.bits) - 1)
            codes[start - begin : stop - begin] = packed >> packed.dtype.type(shift) & mask
        return codes

    def _pairs(self, first: int, last: int) -> Array:
        """Return the codes of rows, packed with two rows per byte: the first row is in the low bits."""
        begin = first // 2
        end = -(-last // 2)
        stored = self._codes.read(slice(begin, end), 0, self.cols)
        codes = np.empty((end - begin, 2, self.cols), np.uint8)
        codes[:, 0], codes[:, 1] = stored & 15, stored >> 4
        return stream(codes.reshape(-1, self.cols)[first - 2 * begin : last - 2 * begin], 4)

    def _marlin(self, first: int, last: int) -> Array:
        assert self._meta is not None
        bits = self._layout.bits
        begin = first // BLOCK * BLOCK
        end = -(-last // BLOCK) * BLOCK
        lines = slice(0, self.cols // 32)
        packed = _as_words(self._codes.read(lines, 2 * bits * begin, 2 * bits * end))
        stored = unpack_codes(packed, bits, 16 * (end - begin))
        meta = np.ascontiguousarray(self._meta.read(lines, 4 * begin, 4 * end)).view("<u2")
        return stream(marlin_codes(stored, meta, bits, self._tensor_name)[first - begin : last - begin], bits)

    def _transposed(self, first: int, last: int) -> Array:
        lines = self._codes.rows
        out = scratch((last - first, 4 * lines), np.uint8)
        for line, data, start, stride in self._windows(4 * first, 4 * last):
            count = len(data) // stride
            transpose = native.kernels.words_turn
            transpose(data, start, stride, count, last - first, out.reshape(-1), 4 * line, 4 * lines)
        return out[:, : self._row_bytes]

    def _awq(self, first: int, last: int) -> Array:
        begin = first // 8
        end = -(-last // 8)
        out = scratch((8 * (end - begin), self.cols // 2), np.uint8)
        for line, data, start, stride in self._windows(4 * begin, 4 * end):
            count = len(data) // stride
            transpose = native.kernels.words_from_awq
            transpose(data, start, stride, count, end - begin, out.reshape(-1), line // 2, self.cols // 2)
        return out[first - 8 * begin : last - 8 * begin]

    def _windows(self, start: int, stop: int) -> Iterator[tuple[int, Array, int, int]]:
        """Yield runs of lines of words, which contain bytes ``start`` to ``stop`` of every line.

        An item is the index of the first line, a buffer, the buffer's offset of the first requested byte, and the
        distance in bytes between lines. If few bytes of a line are requested, only they are read; otherwise a run has
        as many lines as fit in a cache.
        """
        codes = self._codes
        data = codes.all_bytes()
        if data is not None:
            yield 0, data, start, codes.width
        elif codes.width - (stop - start) > _NARROW:
            yield 0, codes.read(slice(0, codes.rows), start, stop).reshape(-1), 0, stop - start
        else:
            step = max(1, _STRIP // codes.width // _LINES) * _LINES
            for line in range(0, codes.rows, step):
                lines = slice(line, min(line + step, codes.rows))
                yield line, codes.read(lines, 0, codes.width).reshape(-1), start, codes.width


def rows_tensor(tensor: Tensor, layout: PackedIntLayout) -> Tensor:
    """Return a checked tensor without ``order`` as a tensor of codec ``affine``, whose parts are computed on access.

    Parts that are already stored row by row are unchanged.
    """
    source = WordRows(tensor, layout)
    rows = layout.rows
    count = tensor.matrix_shape[0]
    parts = {}
    for spec in rows.part_specs(tensor.shape):
        part = tensor.parts[spec.role]
        if spec.role in layout.packing_form.same_as_affine and part.nbytes == spec.length:
            parts[spec.role] = _retype(tensor, spec.role, spec.dtype)
            continue
        make = {CODES: source.codes, SCALES: source.scales, ZEROS: source.float_points}[spec.role]
        width = (spec.length or 0) // max(count, 1)
        again = layout.transposed and spec.role == CODES
        parts[spec.role] = computed_part(part, spec.dtype, count, width, make, again=again)
    return Tensor(tensor.name, tensor.shape, tensor.dtype, rows.codec, parts, rows.attributes())


def _retype(tensor: Tensor, role: str, dtype: str) -> Part:
    return replace(tensor.parts[role], dtype=dtype, type=None)


def order_of(tensor: Tensor, layout: PackedIntLayout) -> Array:
    """Return the group index of each column.

    Raises ``CodecError`` ``affine_words.order`` if an index is out of range.
    """
    order = tensor.parts[ORDER].array()
    groups = layout.groups(tensor.matrix_shape[1])
    if order.size and not (int(order.min()) >= 0 and int(order.max()) < groups):
        raise CodecError(
            "affine_words.order",
            f"expected groups from 0 to {groups - 1}, found {int(order.min())} to {int(order.max())}",
            where=f"{tensor.name}.{ORDER}",
        )
    return order


def _as_words(stored: Array) -> Array:
    """Convert little-endian bytes [rows, 4 * words] to u32 words in native byte order."""
    return from_file(np.ascontiguousarray(stored).reshape(-1), "u32").reshape(len(stored), -1)
