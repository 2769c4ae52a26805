"""``affine_words``: affine integers as GPTQ, AWQ and compressed-tensors pack them; see ``spec/affine_words.md``.

Their rows are made as they are read, and decoded and repacked as those of the codec ``affine``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, NoReturn

import numpy as np

from ingot.codecs.affine.codec import AffineCodec, AffineReader
from ingot.codecs.affine.rows import decode_rows
from ingot.codecs.affine.word_rows import WordRows, order_of, rows_tensor, unpacked
from ingot.codecs.base import Repacked, Rows, cannot, decode_by_rows
from ingot.core.dtypes import from_file
from ingot.errors import CodecError, UnsupportedError
from ingot.model.layouts.affine import ROWS_LSB, SCALE_DTYPES, SCALES, AffineLayout, Group, Points
from ingot.model.layouts.base import Layout
from ingot.model.layouts.words import AWQ, GPTQ_PLANES, WordsLayout
from ingot.model.tensor import Array, Tensor

ID = WordsLayout.codec
_STEP = 1 << 18  # codes that are decoded at a time where each column has a group of its own


class OrderedReader(Rows):
    """Sequential decoding where columns of a group lie apart: each code with the scale of its column's group."""

    def __init__(self, tensor: Tensor, layout: WordsLayout) -> None:
        self._rows, self._layout = WordRows(tensor, layout), layout
        self._order, self._next = order_of(tensor, layout), 0
        self._single = AffineLayout(8, Group(1), ROWS_LSB, False, layout.zero, layout.dtype, layout.scales)

    def fill(self, out: Array) -> None:
        step = max(1, _STEP // max(1, self._rows.cols))
        for start in range(0, len(out), step):
            self._fill(out[start : start + step])

    def _fill(self, out: Array) -> None:
        first, last = self._next, self._next + len(out)
        self._next = last
        if not out.size:
            return
        packed = self._rows.codes(first, last)
        padded = np.zeros((len(packed), -(-packed.shape[1] // 4) * 4), np.uint8)
        padded[:, : packed.shape[1]] = packed
        words = from_file(padded.reshape(-1), "u32").reshape(len(packed), -1)
        codes = unpacked(words, self._layout.bits, self._rows.cols)
        kind = self._layout.scales
        scales = from_file(self._rows.scales(first, last).view(np.uint8).reshape(-1), kind).reshape(len(out), -1)
        zeros = None
        if isinstance(self._layout.zero, Points):
            zeros = self._rows.points(first, last).astype(scales.dtype)[:, self._order]
        decode_rows(self._single, codes.reshape(-1), scales[:, self._order], zeros, out)

    def skip(self, count: int) -> None:
        """Pass over ``count`` values, whole rows of them."""
        self._next += count // max(1, self._rows.cols)

    def finish(self) -> None:
        """Digests are checked where parts are looked into."""


class WordsCodec:
    """GPTQ, AWQ and compressed-tensors: integers of 1 to 8 bits in words of 32."""

    id: ClassVar[str] = ID
    lossless: ClassVar[bool] = False
    elementwise: ClassVar[bool] = False
    streams: ClassVar[bool] = True

    def check(self, tensor: Tensor) -> None:
        """Rules ``affine_words.params``, ``.shape``, ``.parts``, ``.dtype`` and ``.size``."""
        _checked(tensor)

    def decode(self, tensor: Tensor, dtype: str, out: Array | None = None) -> Array:
        """Return the values in f32, f16 or bf16, rounded once from f32, or in f64; errors as the codec ``affine``."""
        layout = _checked(tensor)
        if layout.order:
            return decode_by_rows(self, tensor, dtype, out)
        return AffineCodec().decode(rows_tensor(tensor, layout), dtype, out)

    def reader(self, tensor: Tensor) -> OrderedReader | AffineReader:
        layout = _checked(tensor)
        if layout.order:
            return OrderedReader(tensor, layout)
        reader = AffineCodec().reader(rows_tensor(tensor, layout))
        assert isinstance(reader, AffineReader)
        return reader

    def to_runs(self, tensor: Tensor) -> Tensor | None:
        """Return the same integers as ``affine`` has them, row by row; None where columns of a group lie apart."""
        stored = _checked(tensor)
        if stored.order or len(tensor.shape) != 2 or not tensor.size:
            return None
        return replace(rows_tensor(tensor, stored), decoder=AffineCodec())

    def repack(self, tensor: Tensor, layout: Layout) -> Repacked:
        """Return the same integers in a layout of ``affine``, or in another form of words."""
        stored = _checked(tensor)
        if stored.order:
            return cannot(layout, "columns of a group lie apart, and only this layout says where")
        return AffineCodec().repack(rows_tensor(tensor, stored), layout)

    def encoder(self, shape: tuple[int, ...], dtype: str, options: Mapping[str, Any]) -> NoReturn:
        """Raise ``UnsupportedError`` ``affine_words.encoder``: what ``affine`` has encoded is repacked."""
        raise UnsupportedError(
            f"codec {ID} has no encoder: expected affine to encode with; a conversion repacks what it made",
            rule=f"{ID}.encoder",
        )


def _checked(tensor: Tensor) -> WordsLayout:
    layout = WordsLayout.of(tensor)
    specs = {spec.role: spec for spec in layout.part_specs(tensor.shape)}
    if set(tensor.parts) != set(specs):
        known = ", ".join(specs)
        raise CodecError(
            f"{ID}.parts",
            f"expected the parts {known}, found {', '.join(sorted(tensor.parts)) or 'none'}",
            where=tensor.name,
        )
    rows, cols = tensor.matrix_shape
    step = {AWQ: 8, GPTQ_PLANES: 32}.get(layout.form, 1)
    if rows % step or cols % step:
        raise CodecError(
            f"{ID}.shape", f"expected rows and columns in {step}s, found {rows} x {cols}", where=tensor.name
        )
    if layout.stacked and (not isinstance(layout.zero, Points) or layout.order or cols % (layout.group or cols or 1)):
        raise CodecError(
            f"{ID}.shape", f"expected groups that divide {cols} columns, with zero points", where=tensor.name
        )
    if layout.scales not in SCALE_DTYPES:
        raise _wrong_type(tensor, SCALES, " or ".join(SCALE_DTYPES))
    for role, spec in specs.items():
        part = tensor.parts[role]
        if part.dtype != spec.dtype or part.type not in (None, spec.dtype):
            raise _wrong_type(tensor, role, spec.dtype)
        if part.nbytes != spec.length:
            raise CodecError(
                f"{ID}.size",
                f"expected {spec.length} bytes for shape {list(tensor.shape)}, found {part.nbytes}",
                where=f"{tensor.name}.{role}",
            )
    return layout


def _wrong_type(tensor: Tensor, role: str, expected: str) -> CodecError:
    part = tensor.parts[role]
    return CodecError(
        f"{ID}.dtype", f"expected {expected}, found {part.type or part.dtype}", where=f"{tensor.name}.{role}"
    )
