"""Integers in words as rows: codes, scales and zero points of some rows of a tensor, whatever form they are packed in.

Forms: ``spec/affine_words.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from ingot.codecs.affine.marlin import BLOCK, marlin_codes, marlin_scales
from ingot.codecs.affine.windows import Windows, made_part
from ingot.codecs.affine.word_codes import joined_planes, points_of, stream, unpacked
from ingot.core.numeric.buffers import scratch, transposed
from ingot.core.numeric.dtypes import DTYPES, file_bytes, from_file, little_endian, numpy_dtype
from ingot.core.numeric.floats import written
from ingot.core.runtime import native
from ingot.errors import CodecError
from ingot.model.layouts.affine import CODES, SCALES, ZEROS, Points
from ingot.model.layouts.packed_words import (
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
    WordsLayout,
    words,
)
from ingot.model.part import Part
from ingot.model.tensor import Array, Tensor

_TURNED = (GPTQ, GPTQ_V1, GPTQ_PLANES, AWQ)
_CODES = 1 << 19  # that are taken apart at a time where each takes bytes of its own
_STRIP = 1 << 20  # bytes of lines that are turned at a time
_LINES = 64  # at whose multiples they begin: of so many words a row is written to in whole cache lines
_NARROW = 1 << 18  # bytes of a line beside those asked for, for which it is not read whole: a read costs that much


class WordRows:
    """Reads a checked tensor some rows at a time."""

    def __init__(self, tensor: Tensor, layout: WordsLayout) -> None:
        self._layout, (self.rows, self.cols), self._where = layout, tensor.matrix_shape, tensor.name
        self._row_bytes = layout.rows.row_bytes(self.cols)
        self._groups = layout.groups(self.cols)
        parts = tensor.parts
        integer, scale = DTYPES[layout.integers].bits // 8, DTYPES[layout.scales].bits // 8
        lines, across = layout.code_shape(tensor.shape)
        self._codes = Windows(parts[CODES], lines, across * integer)
        lines, across = layout.scale_shape(tensor.shape)
        self._scales = Windows(parts[SCALES], lines, across * scale)
        self._zeros: Windows | None = None
        if isinstance(layout.zero, Points):
            lines, across = layout.zero_shape(tensor.shape)
            self._zeros = Windows(parts[ZEROS], lines, across * DTYPES[layout.points].bits // 8)
        self._meta = Windows(parts[META], self.cols // 32, 4 * self.rows) if layout.form == MARLIN_24 else None

    def codes(self, first: int, last: int) -> Array:
        """Return the codes of rows ``first`` to ``last`` as a bit stream each, low bits first, u8 [rows, bytes]."""
        forms: Mapping[str, Callable[[int, int], Array]] = {
            **dict.fromkeys((GPTQ, GPTQ_V1), self._turned),
            GPTQ_PLANES: self._planes,
            **dict.fromkeys((HQQ, QUANTO), self._stacked),
            AWQ: self._awq,
            HQQ_COLUMNS: self._strided,
            MARLIN_24: self._marlin,
            MODELOPT: self._pairs,
            PACKED_LOOSE: self._loose,
        }
        form = self._layout.form
        if form in _TURNED:
            return forms[form](first, last)
        if form in forms:
            return self._in_strips(last - first, lambda start, stop: forms[form](first + start, first + stop))
        return self._codes.read(slice(first, last), 0, self._codes.width)[:, : self._row_bytes]

    def _planes(self, first: int, last: int) -> Array:
        bits, turned = self._layout.bits, self._turned(first, last)
        return self._in_strips(
            len(turned), lambda start, stop: stream(joined_planes(_words(turned[start:stop]), bits), bits)
        )

    def _in_strips(self, rows: int, make: Callable[[int, int], Array]) -> Array:
        """Return what ``make`` makes of some rows after others: on the way it takes many bytes for a code."""
        step = max(1, _CODES // max(1, self.cols) // BLOCK) * BLOCK
        if rows <= step:
            return make(0, rows)
        out = scratch((rows, self._row_bytes), np.uint8)
        for start in range(0, rows, step):
            out[start : start + step] = make(start, min(start + step, rows))
        return out

    def _loose(self, first: int, last: int) -> Array:
        bits, stored = self._layout.bits, self._codes.read(slice(first, last), 0, self._codes.width)
        count = 32 // bits * (stored.shape[1] // 4)
        return stream(unpacked(_words(stored), bits, count, loose=True)[:, : self.cols], bits)

    def scales(self, first: int, last: int) -> Array:
        """Return the scales, [rows, groups], as they lie in files."""
        if self._layout.form == MARLIN_24:
            begin, end = first // BLOCK * BLOCK, -(-last // BLOCK) * BLOCK
            grouped = 2 * (self._layout.group or self.cols) < self.cols
            some = marlin_scales(self._numbers(self._scales, begin, end), grouped=grouped)
            return np.ascontiguousarray(some[first - begin : last - begin])
        return self._numbers(self._scales, first, last)

    def _numbers(self, window: Windows, first: int, last: int) -> Array:
        """Return numbers of the scales' type that belong to groups, [rows, groups]."""
        size = DTYPES[self._layout.scales].bits // 8
        kind = little_endian(f"u{8 * size}")
        if self._layout.form == HQQ_COLUMNS:
            return self._repeated(window, first, last, size).view(kind)
        if not self._layout.turned:
            stored = window.read(slice(first, last), 0, self._groups * size)
            return np.ascontiguousarray(stored).view(kind)
        stored = window.read(slice(0, self._groups), first * size, last * size)
        return transposed(np.ascontiguousarray(stored).view(kind))

    def _repeated(self, window: Windows, first: int, last: int, size: int) -> Array:
        """Return the numbers of every code of some rows, bytes [rows, columns]: all of them recur again and again."""
        out = np.empty((last - first) * self.cols * size, np.uint8)
        at, done = first * self.cols * size % window.width, 0
        while done < out.size:
            piece = window.read(slice(0, 1), at, min(window.width, at + out.size - done)).reshape(-1)
            out[done : done + piece.size] = piece
            at, done = 0, done + piece.size
        return out.reshape(last - first, -1)

    def points(self, first: int, last: int) -> Array:
        """Return the zero points as integers, [rows, groups]."""
        layout, zeros = self._layout, self._zeros
        assert zeros is not None
        if layout.form == INTS:
            return np.ascontiguousarray(zeros.read(slice(first, last), 0, self._groups)).view(np.int8)
        if layout.form == AWQ_GEMV:
            return unpacked(_words(zeros.read(slice(first, last), 0, zeros.width)), 4, self._groups)
        start = first // 32 * 32  # where a row's bits begin a word
        begin, end = start * layout.bits // 32, words(last, layout.bits)
        if layout.form == GPTQ_PLANES:
            end = words(-(-last // 32) * 32, layout.bits)
        if layout.turned:
            packed = _words(zeros.read(slice(0, self._groups), 4 * begin, 4 * end))
        else:
            packed = np.ascontiguousarray(_words(zeros.read(slice(begin, end), 0, 4 * self._groups)).T)
        return transposed(points_of(packed, layout)[:, first - start : last - start])

    def float_points(self, first: int, last: int) -> Array:
        """Return the zero points, or the offsets, as the type of the scales has them, as they lie in files."""
        if self._layout.known.zeros != INTEGERS:
            assert self._zeros is not None
            size = DTYPES[self._layout.scales].bits // 8
            stored = self._numbers(self._zeros, first, last).reshape(-1).view(np.uint8).copy()
            if self._layout.known.zeros == SUBTRACTED:
                stored[size - 1 :: size] ^= 0x80  # another sign
            return stored
        points = self.points(first, last)
        numbers = np.empty(points.shape, numpy_dtype(self._layout.scales))
        signed = points.dtype == np.int8
        native.kernels.affine_numbers(points.view(np.uint8).reshape(-1), signed, written(numbers), self._layout.scales)
        return np.frombuffer(file_bytes(numbers), np.uint8)

    def _stacked(self, first: int, last: int) -> Array:
        begin, end = first * self._groups, last * self._groups
        codes = self._lines(begin, end, 0, self._layout.group or self.cols)
        return stream(codes.reshape(last - first, self.cols), self._layout.bits)

    def _strided(self, first: int, last: int) -> Array:
        """Lines are no groups, and rows may begin and end within them."""
        width, codes = self._layout.lines((self.rows, self.cols))[1], np.empty((last - first) * self.cols, np.uint8)
        at, done = first * self.cols, 0
        while done < codes.size:
            line, start = divmod(at + done, width)
            whole = (codes.size - done) // width if not start else 0
            if whole:
                piece = self._lines(line, line + whole, 0, width)
            else:
                piece = self._lines(line, line + 1, start, min(width, start + codes.size - done))
            codes[done : done + piece.size] = piece.reshape(-1)
            done += piece.size
        return stream(codes.reshape(last - first, self.cols), self._layout.bits)

    def _lines(self, begin: int, end: int, left: int, right: int) -> Array:
        """Return codes ``left`` to ``right`` of some lines of a stacked form."""
        layout = self._layout
        size = 4 if layout.bits == 3 else 1
        step, across = self._codes.rows, slice(size * left, size * right)
        codes = np.empty((end - begin, right - left), np.uint8)
        for lane in range(layout.lanes):
            start, stop = max(begin, lane * step), min(end, (lane + 1) * step)
            if start >= stop:
                continue
            stored = self._codes.read(slice(start - lane * step, stop - lane * step), across.start, across.stop)
            held = _words(stored) if layout.bits == 3 else stored
            place = lane if layout.form == QUANTO else layout.lanes - 1 - lane
            mask = held.dtype.type((1 << layout.bits) - 1)
            codes[start - begin : stop - begin] = held >> held.dtype.type(layout.bits * place) & mask
        return codes

    def _pairs(self, first: int, last: int) -> Array:
        """Bytes have a code of two rows each, the first in the low bits."""
        begin, end = first // 2, -(-last // 2)
        stored = self._codes.read(slice(begin, end), 0, self.cols)
        codes = np.empty((end - begin, 2, self.cols), np.uint8)
        codes[:, 0], codes[:, 1] = stored & 15, stored >> 4
        return stream(codes.reshape(-1, self.cols)[first - 2 * begin : last - 2 * begin], 4)

    def _marlin(self, first: int, last: int) -> Array:
        assert self._meta is not None
        bits, begin, end = self._layout.bits, first // BLOCK * BLOCK, -(-last // BLOCK) * BLOCK
        lines = slice(0, self.cols // 32)
        packed = _words(self._codes.read(lines, 2 * bits * begin, 2 * bits * end))
        stored = unpacked(packed, bits, 16 * (end - begin))
        meta = np.ascontiguousarray(self._meta.read(lines, 4 * begin, 4 * end)).view("<u2")
        return stream(marlin_codes(stored, meta, bits, self._where)[first - begin : last - begin], bits)

    def _turned(self, first: int, last: int) -> Array:
        lines = self._codes.rows
        out = scratch((last - first, 4 * lines), np.uint8)
        for line, held, start, stride in self._windows(4 * first, 4 * last):
            count = len(held) // stride
            turn = native.kernels.words_turn
            turn(held, start, stride, count, last - first, out.reshape(-1), 4 * line, 4 * lines)
        return out[:, : self._row_bytes]

    def _awq(self, first: int, last: int) -> Array:
        begin, end = first // 8, -(-last // 8)
        out = scratch((8 * (end - begin), self.cols // 2), np.uint8)
        for line, held, start, stride in self._windows(4 * begin, 4 * end):
            count = len(held) // stride
            turn = native.kernels.words_from_awq
            turn(held, start, stride, count, end - begin, out.reshape(-1), line // 2, self.cols // 2)
        return out[first - 8 * begin : last - 8 * begin]

    def _windows(self, start: int, stop: int) -> Iterator[tuple[int, Array, int, int]]:
        """Yield lines of codes, of which bytes ``start`` to ``stop`` are asked for.

        The first line's number, bytes with whole lines in them, where the first of those asked for lies, and the
        distance from line to line. Where few bytes of a line are asked for, only these are read; else so many lines
        at a time as stay in a cache until they are turned.
        """
        codes = self._codes
        whole = codes.whole()
        if whole is not None:
            yield 0, whole, start, codes.width
        elif codes.width - (stop - start) > _NARROW:
            yield 0, codes.read(slice(0, codes.rows), start, stop).reshape(-1), 0, stop - start
        else:
            step = max(1, _STRIP // codes.width // _LINES) * _LINES
            for line in range(0, codes.rows, step):
                some = slice(line, min(line + step, codes.rows))
                yield line, codes.read(some, 0, codes.width).reshape(-1), start, codes.width


def rows_tensor(tensor: Tensor, layout: WordsLayout) -> Tensor:
    """Return a checked tensor without ``order`` as one of the codec ``affine``, whose parts are made as they are read.

    Parts that lie row by row already are those of the tensor.
    """
    source, rows = WordRows(tensor, layout), layout.rows
    count, made = tensor.matrix_shape[0], {}
    for spec in rows.part_specs(tensor.shape):
        part = tensor.parts[spec.role]
        if spec.role in layout.known.same and part.nbytes == spec.length:
            made[spec.role] = _retyped(tensor, spec.role, spec.dtype)
            continue
        make = {CODES: source.codes, SCALES: source.scales, ZEROS: source.float_points}[spec.role]
        width, again = (spec.length or 0) // max(count, 1), layout.turned and spec.role == CODES
        made[spec.role] = made_part(part, spec.dtype, count, width, make, again=again)
    return Tensor(tensor.name, tensor.shape, tensor.dtype, rows.codec, made, rows.attributes())


def _retyped(tensor: Tensor, role: str, dtype: str) -> Part:
    return replace(tensor.parts[role], dtype=dtype, type=None)


def order_of(tensor: Tensor, layout: WordsLayout) -> Array:
    """Return of which group each column is.

    Raises ``CodecError`` ``affine_words.order``: there is no such group.
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


def _words(stored: Array) -> Array:
    """View bytes, [rows, 4 * words], as words in native order."""
    return from_file(np.ascontiguousarray(stored).reshape(-1), "u32").reshape(len(stored), -1)
