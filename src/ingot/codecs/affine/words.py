"""``affine_words``: affine integers in the packings of other programs; see ``spec/affine_words.md``.

Rows of codec ``affine`` are computed on access; that codec decodes and repacks them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import lcm
from typing import Any, ClassVar, NoReturn

import numpy as np

from ingot.codecs.affine.codec import AffineCodec, AffineReader
from ingot.codecs.affine.repack import number_chunks
from ingot.codecs.affine.rows import decode_rows
from ingot.codecs.affine.to_words import point_range
from ingot.codecs.affine.word_codes import pack_points, points_of, sign_extend, unpack_codes
from ingot.codecs.affine.word_rows import WordRows, order_of, rows_tensor
from ingot.codecs.base import Codec, Repacked, Rows, cannot, decode_by_rows
from ingot.core.numeric.buffers import scratch
from ingot.core.numeric.dtypes import DTYPES, cast, from_file
from ingot.core.runtime import native
from ingot.errors import CodecError, UnsupportedError
from ingot.model.layouts.affine import (
    CODES,
    ROWS_LSB,
    SCALE_DTYPES,
    SCALES,
    ZEROS,
    AffineLayout,
    Constant,
    Group,
    Points,
)
from ingot.model.layouts.base import Layout
from ingot.model.layouts.packed_ints import (
    AWQ,
    FACTORS,
    GPTQ,
    GPTQ_PLANES,
    GPTQ_V1,
    HQQ_COLUMNS,
    INTEGERS,
    MARLIN_24,
    MODELOPT,
    TORCHAO,
    PackedIntLayout,
)
from ingot.model.part import PartReader
from ingot.model.tensor import Array, Tensor

_SUPPORTED = (GPTQ, GPTQ_V1, AWQ)


def with_one_point(tensor: Tensor, stored: PackedIntLayout) -> tuple[Tensor, PackedIntLayout]:
    """Return a checked tensor and its layout, without zero points if all of them equal the middle code.

    Otherwise both are returned unchanged. Zero points are read; if they are omitted, their digest is checked.
    """
    rows = tensor.matrix_shape[0]
    packed = stored.packing in _SUPPORTED and 32 % stored.bits == 0 and rows * stored.bits % 32 == 0
    if not packed or not isinstance(stored.zero, Points) or not tensor.size:
        return tensor, stored
    code = stored.point - (stored.packing == GPTQ_V1)
    word = np.uint32(sum(code << shift for shift in range(0, 32, stored.bits)))
    if not all(bool((chunk.view(np.uint32) == word).all()) for chunk in number_chunks(tensor.parts[ZEROS])):
        return tensor, stored
    layout = replace(stored, zero=Constant(stored.point))
    parts = {role: part for role, part in tensor.parts.items() if role != ZEROS}
    return replace(tensor, parts=parts, params=layout.attributes()), layout


def between_lines(tensor: Tensor, stored: PackedIntLayout, target: PackedIntLayout) -> Repacked | None:
    """Return the repacking of a checked tensor between packings of GPTQ and AWQ, without unpacking codes to rows.

    Returns None if more than the arrangement of words and the storage of zero points would change. Also returns None if
    the shape does not consist of full words and groups.
    """
    rows, cols = tensor.matrix_shape
    unit = lcm(32, stored.group or 32)
    if not {stored.packing, target.packing} <= set(_SUPPORTED) or not tensor.size or rows % 32 or cols % unit:
        return None
    if target != replace(stored, packing=target.packing, zero=target.zero):
        return None
    if target.zero != stored.zero and target.zero == Constant(target.point):
        return None
    low, high = point_range(target)
    if isinstance(stored.zero, Points):
        packed = from_file(np.frombuffer(tensor.parts[ZEROS].view(), np.uint8), "u32")
        points = points_of(packed.reshape(-1, rows * stored.bits // 32), stored)
        if int(points.min()) < low or int(points.max()) > high:
            return None
    unit_bytes = unit * rows * stored.bits // 8
    group_bytes = DTYPES[stored.scales].bits // 8 + 8
    parts = target.part_specs(tensor.shape)
    memory = 2 * unit_bytes + stored.groups(unit) * rows * group_bytes
    extra = 0 if stored.group else rows * group_bytes
    return Repacked(
        target, parts, cols // unit, 1, memory, None, lambda: _Lines(tensor, stored, target, unit), extra_memory=extra
    )


class _Lines:
    """A sequential reader that returns a tensor's parts, by runs of columns, with words arranged as in the target."""

    def __init__(self, tensor: Tensor, stored: PackedIntLayout, target: PackedIntLayout, unit: int) -> None:
        self._stored = stored
        self._target = target
        self._unit = unit
        self._rows = tensor.matrix_shape[0]
        self._readers = {role: part.reader() for role, part in tensor.parts.items()}
        self._has_begun = False

    def read(self, units: int) -> dict[str, Array]:
        """Return each part's bytes for the next ``units`` units of columns."""
        stored = self._stored
        target = self._target
        rows = self._rows
        cols = units * self._unit
        groups = stored.groups(cols) if stored.group or not self._has_begun else 0
        self._has_begun = True
        size = DTYPES[stored.scales].bits // 8
        parts = {
            CODES: self._codes(_next(self._readers[CODES], cols * rows * stored.bits // 8), cols),
            SCALES: from_file(_next(self._readers[SCALES], groups * rows * size), stored.scales),
        }
        if isinstance(target.zero, Points) and groups:
            parts[ZEROS] = pack_points(self._points(groups), target)
        return parts

    def _codes(self, stored: Array, cols: int) -> Array:
        to_awq = self._target.packing == AWQ
        if to_awq == (self._stored.packing == AWQ):
            return stored
        lines, words = (cols // 8, self._rows) if to_awq else (cols, self._rows // 8)
        out = scratch(stored.shape, np.uint8)
        native.kernels.lines_turn(stored, lines, words, to_awq, out)
        return out

    def _points(self, groups: int) -> Array:
        """Return the zero points of the next groups: [groups, rows]."""
        if isinstance(self._stored.zero, Constant):
            return np.full((groups, self._rows), self._stored.zero.point, np.uint8)
        width = self._rows * self._stored.bits // 32
        packed = from_file(_next(self._readers[ZEROS], 4 * groups * width), "u32")
        return points_of(packed.reshape(groups, width), self._stored)

    def finish(self) -> None:
        for reader in self._readers.values():
            reader.finish()


def _next(reader: PartReader, nbytes: int) -> Array:
    raw = scratch((nbytes,), np.uint8)
    reader.readinto(raw.data)
    return raw


ID = PackedIntLayout.codec
_STEP = 1 << 18  # codes that are decoded at a time if each column has a separate group


_STEPS: Mapping[str, tuple[int, int]] = {
    AWQ: (8, 8),
    GPTQ_PLANES: (32, 32),
    MARLIN_24: (64, 32),
    MODELOPT: (2, 1),
    TORCHAO: (1, 2),
}
"""For each packing, the numbers of which rows and columns must be multiples."""


class ScatteredReader(Rows):
    """A sequential reader of tensors whose neighbouring columns may have different scales and zero points.

    Each column uses the scale and zero point of its group, and the scale is multiplied by the column's factor if there
    is one.
    """

    def __init__(self, tensor: Tensor, layout: PackedIntLayout) -> None:
        self._rows = WordRows(tensor, layout)
        self._layout = layout
        self._next = 0
        self._order = order_of(tensor, layout) if layout.order else None
        self._factors = cast(tensor.parts[FACTORS].array(), "f32") if layout.factors else None
        scale_dtype = layout.scales if self._factors is None else "f32"
        self._single = AffineLayout(8, Group(1), ROWS_LSB, layout.signed, layout.zero, layout.dtype, scale_dtype)

    def fill(self, out: Array) -> None:
        step = max(1, _STEP // max(1, self._rows.cols))
        for start in range(0, len(out), step):
            self._fill(out[start : start + step])

    def _fill(self, out: Array) -> None:
        first = self._next
        last = self._next + len(out)
        self._next = last
        if not out.size:
            return
        packed = self._rows.codes(first, last)
        padded = np.zeros((len(packed), -(-packed.shape[1] // 4) * 4), np.uint8)
        padded[:, : packed.shape[1]] = packed
        words = from_file(padded.reshape(-1), "u32").reshape(len(packed), -1)
        codes = unpack_codes(words, self._layout.bits, self._rows.cols)
        if self._layout.signed:
            codes = sign_extend(codes, self._layout.bits)
        scales = self._expand(self._rows.scales(first, last).view(np.uint8), len(out))
        zeros = None
        if isinstance(self._layout.zero, Points):
            zeros = self._zeros(first, last, scales.dtype)
        if self._factors is not None:
            scales = cast(scales, "f32") * self._factors
        decode_rows(self._single, codes.reshape(-1), scales, zeros, out)

    def _zeros(self, first: int, last: int, dtype: np.dtype[np.generic]) -> Array:
        if self._layout.packing_form.zeros == INTEGERS:
            points = self._rows.points(first, last).astype(dtype)
            return points if self._order is None else points[:, self._order]
        return self._expand(self._rows.float_points(first, last), last - first)

    def _expand(self, stored: Array, rows: int) -> Array:
        """Return ``stored``, the encoded numbers of groups, as an array [rows, columns] in the type of the scales."""
        numbers = from_file(stored.reshape(-1), self._layout.scales).reshape(rows, -1)
        if self._order is not None:
            return numbers[:, self._order]
        if self._layout.packing == HQQ_COLUMNS:
            return numbers
        return np.repeat(numbers, self._layout.group or self._rows.cols, axis=1)[:, : self._rows.cols]

    def skip(self, count: int) -> None:
        """Skip ``count`` values, which must be full rows."""
        self._next += count // max(1, self._rows.cols)

    def finish(self) -> None:
        """Do nothing: digests are checked when parts are read."""


class WordsCodec(Codec):
    """Integers of 1 to 8 bits in the packings of GPTQ, AWQ, compressed-tensors, ModelOpt, HQQ, torchao and quanto."""

    id: ClassVar[str] = ID
    lossless: ClassVar[bool] = False
    elementwise: ClassVar[bool] = False
    streams: ClassVar[bool] = True

    def check(self, tensor: Tensor) -> None:
        """Check parameters, parts and shape of ``tensor``; rules ``affine_words.params``, ``.shape``, ``.parts``,
        ``.dtype`` and ``.size``.
        """
        _checked(tensor)

    def decode(self, tensor: Tensor, dtype: str, out: Array | None = None) -> Array:
        """Return the values in f32, f16 or bf16, rounded once from f32, or in f64; errors of codec ``affine``."""
        layout = _checked(tensor)
        if layout.scattered:
            return decode_by_rows(self, tensor, dtype, out)
        return AffineCodec().decode(rows_tensor(*with_one_point(tensor, layout)), dtype, out)

    def reader(self, tensor: Tensor) -> ScatteredReader | AffineReader:
        layout = _checked(tensor)
        if layout.scattered:
            return ScatteredReader(tensor, layout)
        reader = AffineCodec().reader(rows_tensor(tensor, layout))
        assert isinstance(reader, AffineReader)
        return reader

    def to_runs(self, tensor: Tensor) -> Tensor | None:
        """Return the same integers as a tensor of codec ``affine``, row by row.

        Returns None if the tensor is empty or no matrix, or if values depend on properties of single columns
        (``PackedIntLayout.scattered``).
        """
        stored = _checked(tensor)
        if stored.scattered or len(tensor.shape) != 2 or not tensor.size:
            return None
        return replace(rows_tensor(tensor, stored), decoder=AffineCodec())

    def repack(self, tensor: Tensor, layout: Layout) -> Repacked:
        """Return the repacking into a layout of codec ``affine``, or into another packing."""
        stored = _checked(tensor)
        if stored.scattered:
            return cannot(layout, "its columns have an order or factors, which only this layout stores")
        tensor, stored = with_one_point(tensor, stored)
        direct = between_lines(tensor, stored, layout) if isinstance(layout, PackedIntLayout) else None
        return direct or AffineCodec().repack(rows_tensor(tensor, stored), layout)

    def encoder(self, shape: tuple[int, ...], dtype: str, options: Mapping[str, Any]) -> NoReturn:
        """Raise ``UnsupportedError`` ``affine_words.encoder``: results of codec ``affine`` are repacked instead."""
        raise UnsupportedError(
            f"codec {ID} has no encoder: encode with affine; a conversion repacks the result",
            rule=f"{ID}.encoder",
        )


def _checked(tensor: Tensor) -> PackedIntLayout:
    layout = PackedIntLayout.from_tensor(tensor)
    specs = {spec.role: spec for spec in layout.part_specs(tensor.shape)}
    if set(tensor.parts) != set(specs):
        roles = ", ".join(specs)
        raise CodecError(
            f"{ID}.parts",
            f"expected the parts {roles}, found {', '.join(sorted(tensor.parts)) or 'none'}",
            where=tensor.name,
        )
    rows, cols = tensor.matrix_shape
    tall, wide = _STEPS.get(layout.packing, (1, 1))
    if rows % tall or cols % wide:
        raise CodecError(
            f"{ID}.shape",
            f"expected rows in multiples of {tall} and columns in multiples of {wide}, found {rows} x {cols}",
            where=tensor.name,
        )
    _check_zeros(tensor, layout)
    if layout.scales not in SCALE_DTYPES:
        raise _dtype_error(tensor, SCALES, " or ".join(SCALE_DTYPES))
    for role, spec in specs.items():
        part = tensor.parts[role]
        if part.dtype != spec.dtype or part.type not in (None, spec.dtype):
            raise _dtype_error(tensor, role, spec.dtype)
        if part.nbytes != spec.length:
            raise CodecError(
                f"{ID}.size",
                f"expected {spec.length} bytes for shape {list(tensor.shape)}, found {part.nbytes}",
                where=f"{tensor.name}.{role}",
            )
    return layout


def _check_zeros(tensor: Tensor, layout: PackedIntLayout) -> None:
    """Raise ``CodecError`` ``affine_words.shape`` unless the packing supports the layout.

    The packing must support the zero points, and the parts with group indices or factors of columns. The groups must
    divide the shape.
    """
    zeros, (rows, cols) = layout.packing_form.zeros, tensor.matrix_shape
    down = layout.packing == HQQ_COLUMNS
    deep = layout.group or (rows if down else cols) or 1
    integers = zeros == INTEGERS
    divides = integers or zeros is None or (rows * cols if down else cols) % deep == 0
    points = layout.zero == Constant(layout.point) if zeros is None else integers or isinstance(layout.zero, Points)
    columns = (integers or not layout.order) and (not layout.factors or layout.packing == MODELOPT)
    if not (divides and points and columns):
        raise CodecError(
            f"{ID}.shape",
            f"expected groups that divide {rows} x {cols}, and zero points and parts of columns that the form "
            f"{layout.packing} supports",
            where=tensor.name,
        )


def _dtype_error(tensor: Tensor, role: str, expected: str) -> CodecError:
    part = tensor.parts[role]
    return CodecError(
        f"{ID}.dtype", f"expected {expected}, found {part.type or part.dtype}", where=f"{tensor.name}.{role}"
    )
