"""``affine``: the affine family, ``w = s * (q - z)`` or ``w = s * q + z``; see ``spec/affine.md``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from ingot.codecs.affine.encode import AffineEncoder, prepare
from ingot.codecs.affine.offset import repack
from ingot.codecs.affine.parts import BlockScales, PackedReader, ScalesReader
from ingot.codecs.affine.repack import number_chunks
from ingot.codecs.affine.rows import STEP, add_rows, decode_rows
from ingot.codecs.affine.to_words import to_words
from ingot.codecs.affine.windows import Windows, computed_part
from ingot.codecs.base import AddingReader, Codec, Repacked, Rows, cannot, result
from ingot.codecs.blocks.repack import to_blocks
from ingot.core.numeric.dtypes import DTYPES, FLOATS, as_bits, file_bytes, float_name, from_file, written
from ingot.core.runtime import native
from ingot.errors import CodecError, IntegrityError, UnsupportedError
from ingot.model.layouts.affine import (
    CODES,
    NO_ZERO,
    POINTS,
    ROLES,
    SCALE_DTYPES,
    SCALES,
    ZEROS,
    AffineLayout,
    Constant,
    canonical,
)
from ingot.model.layouts.base import Layout
from ingot.model.layouts.ggml import GgmlBlocksLayout
from ingot.model.layouts.packed_ints import PackedIntLayout
from ingot.model.reading.slices import RunLayout
from ingot.model.tensor import Array, Tensor

WHY_NOT = "for some scale, the zero point -offset / scale is no integer in the range of the codes"


def as_points(tensor: Tensor, stored: AffineLayout) -> Tensor | None:
    """Return ``tensor``, which has offsets, with zero points in place of them; None if a decoded value would change.

    The zero points are computed when they are read. If every zero point is the middle code, the result has none. The
    sign of a zero may change. Scales and offsets are read here, and their digests are checked. The result is also None
    for scales of blocks, and for codes that are packed as a matrix of another shape.
    """
    if stored.block is not None or stored.matrix is not None:
        return None
    fits = same = True
    middle = 0 if stored.signed else 1 << (stored.bits - 1)
    for scales, zeros in zip(number_chunks(tensor.parts[SCALES]), number_chunks(tensor.parts[ZEROS]), strict=True):
        points = points_of(scales, zeros, stored)  # reads to the end, where digests are checked
        fits = fits and points is not None
        same = same and points is not None and native.kernels.affine_equal(as_bits(points), float_name(points), middle)
    if not fits:
        return None
    if same:
        layout = replace(stored, zero=Constant(middle) if middle else NO_ZERO)
        parts = {role: part for role, part in tensor.parts.items() if role != ZEROS}
        return replace(tensor, parts=parts, params=layout.attributes())
    rows = tensor.matrix_shape[0]
    lines = 1 if stored.per_tensor else rows
    width = tensor.parts[SCALES].nbytes // max(lines, 1)
    windows = [Windows(tensor.parts[role], lines, width) for role in (SCALES, ZEROS)]

    def make(first: int, last: int) -> Array:
        rows = slice(first, last)
        steps, shifts = (
            from_file(np.ascontiguousarray(part.read(rows, 0, width)).reshape(-1), stored.scales) for part in windows
        )
        points = points_of(steps, shifts, stored)
        if points is None:
            raise IntegrityError(
                "store.changed",
                "the offsets differ from an earlier read: the source changed meanwhile; run again",
                where=tensor.name,
            )
        return np.frombuffer(file_bytes(points), np.uint8)

    computed = computed_part(tensor.parts[ZEROS], stored.scales, lines, width, make)
    layout = replace(stored, zero=POINTS)
    return replace(tensor, parts={**tensor.parts, ZEROS: computed}, params=layout.attributes())


def points_of(scales: Array, zeros: Array, layout: AffineLayout) -> Array | None:
    """Return zero points for which ``s * (q - z)`` equals ``s * q + zeros``, in the type of ``scales``.

    Return None if a decoded value would change.
    """
    lowest = -(1 << (layout.bits - 1)) if layout.signed else 0
    highest = lowest + (1 << layout.bits) - 1
    points = np.empty_like(scales)
    fits = native.kernels.affine_points(
        as_bits(scales), as_bits(zeros), lowest, highest, written(points), float_name(scales)
    )
    return points if fits else None


class AffineReader(AddingReader):
    """A sequential reader of rows that buffers packed codes.

    A buffer contains about ``STEP`` codes, with several threads eight times ``STEP``, and at least one row.
    """

    def __init__(self, tensor: Tensor, params: AffineLayout, workers: int | None = 1) -> None:
        self._params = params
        self._workers = workers
        self._rows, self._cols = params.matrix_of(tensor.shape)
        self._row = 0
        self._packed = PackedReader(tensor.parts["packed_weight"], params, self._cols)
        self._scales = _scales_reader(tensor, "scales", params)
        self._zeros = _scales_reader(tensor, "zeros", params) if params.zeros else None
        self._step = max(1, STEP * (1 if workers == 1 else 8) // max(self._cols, 1))

    def fill(self, out: Array) -> None:
        for target, packed, scales, zeros in self._runs(out):
            decode_rows(self._params, packed, scales, zeros, out[target], self._workers)

    def add_into(self, base: Array, out: Array) -> None:
        if base.dtype != out.dtype or base.shape != out.shape or not (base.flags.c_contiguous and base.flags.aligned):
            raise ValueError(f"expected an aligned base like the output in C order, found {base.dtype} {base.shape}")
        for target, packed, scales, zeros in self._runs(out):
            add_rows(self._params, packed, scales, zeros, base[target], out[target])

    def skip(self, count: int) -> None:
        """Skip ``count`` codes, which must be full rows."""
        rows = count // max(self._cols, 1)
        self._row += rows
        self._packed.skip(rows)
        self._scales.skip(rows, self._cols)
        if self._zeros:
            self._zeros.skip(rows, self._cols)

    def _runs(self, out: Array) -> Iterator[tuple[slice, Array, Array, Array | None]]:
        """Yield slices of ``out``, each with the packed codes, scales and zero points of its rows."""
        if out.ndim != 2 or out.shape[1] != self._cols or len(out) > self._rows - self._row:
            raise ValueError(f"expected at most {self._rows - self._row} rows of {self._cols}, found {out.shape}")
        self._row += len(out)
        if not out.size:  # there may be any number of empty rows; ``finish`` reads their scales
            return
        for start in range(0, len(out), self._step):
            target = slice(start, min(start + self._step, len(out)))
            count = target.stop - start
            packed = self._packed.borrow(count)
            scales = self._scales.next(count, self._cols)
            zeros = self._zeros.next(count, self._cols) if self._zeros else None
            yield target, packed, scales, zeros

    def finish(self) -> None:
        self._packed.finish()
        self._scales.finish()
        if self._zeros:
            self._zeros.finish()


class CutReader(Rows):
    """A sequential reader of a tensor whose codes are packed as a matrix of another shape.

    It returns rows of the tensor. If they end within a row of the packed matrix, it buffers the remaining values of
    that row.
    """

    def __init__(self, tensor: Tensor, params: AffineLayout) -> None:
        self._inner = AffineReader(tensor, params)
        self._cols = params.matrix_of(tensor.shape)[1]
        self._row_tail: Array = np.empty(0, np.float32)
        self._passed = 0  # values of the next row to skip

    def fill(self, out: Array) -> None:
        if not out.flags.c_contiguous or (self._row_tail.size and self._row_tail.dtype != out.dtype):
            raise ValueError(f"expected an output in C order, of one type, found {out.dtype}")
        flat = out.reshape(-1)
        if self._passed and flat.size:
            self._row_tail = self._next_row(out.dtype)[self._passed :]
            self._passed = 0
        buffered = min(self._row_tail.size, flat.size)
        flat[:buffered], self._row_tail = self._row_tail[:buffered], self._row_tail[buffered:]
        if buffered == flat.size:
            return
        count = (flat.size - buffered) // self._cols
        end = buffered + count * self._cols
        self._inner.read_into(flat[buffered:end].reshape(count, self._cols))
        if end < flat.size:
            row = self._next_row(out.dtype)
            flat[end:], self._row_tail = row[: flat.size - end], row[flat.size - end :]

    def skip(self, count: int) -> None:
        """Skip ``count`` values."""
        buffered = min(self._row_tail.size, count)
        self._row_tail = self._row_tail[buffered:]
        rows, self._passed = divmod(self._passed + count - buffered, max(self._cols, 1))
        self._inner.skip(rows * self._cols)

    def _next_row(self, dtype: np.dtype[Any]) -> Array:
        row: Array = np.empty(self._cols, dtype)
        self._inner.read_into(row.reshape(1, -1))
        return row

    def finish(self) -> None:
        self._inner.finish()


class AffineCodec(Codec):
    """Integers with scales and zero points: from INT8 per row to INT4, INT3 and INT2 in groups."""

    id: ClassVar[str] = AffineLayout.codec
    lossless: ClassVar[bool] = False
    elementwise: ClassVar[bool] = False
    streams: ClassVar[bool] = True

    def check(self, tensor: Tensor) -> None:
        """Check parameters, parts and shape of ``tensor``; rules ``affine.params``, ``affine.parts``, ``affine.dtype``,
        ``affine.size``.
        """
        _checked(tensor)

    def decode(self, tensor: Tensor, dtype: str, out: Array | None = None) -> Array:
        """Return the values in f32, f16 or bf16, rounded once from f32; or in f64, without rounding.

        Raw codes in a mapped file are not copied if each row begins at a byte. Large tensors use several threads
        (``core.runtime.parallel.default_workers``).
        """
        params = _checked(tensor)
        if dtype not in FLOATS:
            raise UnsupportedError(
                f"expected a target dtype {', '.join(FLOATS)}, found {dtype}", rule="affine.dtype", where=tensor.name
            )
        new = out is None
        out = result(tensor, dtype, out)
        matrix = out.reshape(params.matrix_of(tensor.shape))
        codes = tensor.parts["packed_weight"]
        in_place = codes.encoding == "raw" and codes.source.mapped and params.in_rows(matrix.shape[1])
        if in_place and params.block is None:
            arrays = {role: part.array() for role, part in tensor.parts.items()}
            packed = np.frombuffer(codes.view(), np.uint8)
            decode_rows(params, packed, arrays["scales"], arrays.get("zeros"), matrix, None, new)
            return out
        reader = AffineReader(tensor, params, workers=None)
        reader.read_into(matrix)
        reader.finish()
        return out

    def reader(self, tensor: Tensor) -> AffineReader | CutReader:
        params = _checked(tensor)
        return AffineReader(tensor, params) if params.matrix is None else CutReader(tensor, params)

    def runs(self, tensor: Tensor, shape: tuple[int, ...]) -> RunLayout | None:
        """Return how many bytes of each part belong to a row, so that single rows can be read.

        The number is 0 for scales of the full tensor. Return None if rows do not begin at bytes, or if they share
        scales.
        """
        params = _checked(tensor)
        cols = tensor.matrix_shape[1]
        if params.matrix is not None or "matrix" in tensor.params or params.block is not None:
            return None
        if not cols or not shape or shape[-1] != cols or not params.in_rows(cols):
            return None
        scales = 0 if params.per_tensor else params.scale_count((cols,)) * DTYPES[params.scales].bits // 8
        return RunLayout(cols, {**dict.fromkeys(tensor.parts, scales), CODES: params.row_bytes(cols)})

    def columns(self, tensor: Tensor, count: int) -> Mapping[str, int] | None:
        """Return the bytes of codes, scales and zero points for ``count`` columns of a row.

        Return None if the columns would begin within a byte, a word or a group; see ``Decoder.columns``.
        """
        params = _checked(tensor)
        cols = tensor.matrix_shape[1]
        if params.matrix is not None or "matrix" in tensor.params or params.block is not None:
            return None
        if (
            not count
            or cols % count
            or not params.in_rows(cols)
            or params.row_bytes(count) * (cols // count) != (params.row_bytes(cols))
            or params.row_bytes(count) * 8 != count * params.bits
        ):
            return None
        if params.group_size is not None and count % params.group_size:
            return None
        scales = 0 if params.group_size is None else count // params.group_size * DTYPES[params.scales].bits // 8
        return {**dict.fromkeys(tensor.parts, scales), CODES: params.row_bytes(count)}

    def repack(self, tensor: Tensor, layout: Layout) -> Repacked:
        """Return the same integers in another layout of the family, or in ggml's blocks.

        See ``spec/affine.md``, "Repacking". If exactness depends on scales and zero points, they are read and their
        digests checked.
        """
        stored = _checked(tensor)
        if isinstance(layout, GgmlBlocksLayout):
            return to_blocks(tensor, stored, layout)
        if not isinstance(layout, AffineLayout | PackedIntLayout):
            return cannot(layout, f"affine integers cannot be stored in {layout.codec}")
        if stored.offset and not (isinstance(layout, AffineLayout) and layout.offset):
            points = as_points(tensor, stored)
            if points is None:
                return cannot(layout, WHY_NOT)
            tensor = points
            stored = AffineLayout.from_tensor(points)
        if isinstance(layout, PackedIntLayout):
            return to_words(tensor, replace(stored, dtype=tensor.dtype), layout)
        return repack(tensor, replace(stored, dtype=tensor.dtype), layout)

    def encoder(self, shape: tuple[int, ...], dtype: str, options: Mapping[str, Any]) -> AffineEncoder:
        """Return the encoder. Options, all with defaults (``spec/affine.md``, "Options"):

        ``bits`` 1 to 8 (4); ``group`` columns per group, ``"row"`` or ``"tensor"`` (128; ``"row"`` at 8 bits);
        ``symmetric`` (true); ``signed`` (as ``symmetric``): two's complement codes; ``scales`` auto, f16, bf16,
        f32 or source (auto: f16, or what small values need; f32 where a scale serves a whole row or tensor);
        ``bit_order`` lsb or msb (lsb);
        ``quantizer`` absmax, minmax, mse, or, for one bit, sign or sign-rms (absmax; minmax if not symmetric);
        ``unbiased`` scales (false); ``zero_kind`` point or offset (point); ``zero_point``, a single point for all
        unsigned codes of a symmetric quantizer (none); ``cut`` rows, axis0 or flat (rows).
        """
        return prepare(shape, dtype, options)


def _checked(tensor: Tensor) -> AffineLayout:
    """Check the parts of a tensor, and return its layout.

    The result is the equivalent layout without ``matrix``, if there is one; see ``model.layouts.affine.canonical``.
    """
    layout = AffineLayout.from_tensor(tensor)
    expected = ROLES if layout.zeros else ROLES[:2]
    if set(tensor.parts) != set(expected):
        raise CodecError(
            "affine.parts",
            f"expected the parts {', '.join(expected)}, found {', '.join(sorted(tensor.parts)) or 'none'}",
            where=tensor.name,
        )
    if layout.scales not in SCALE_DTYPES:
        raise _dtype_error(tensor, SCALES, " or ".join(SCALE_DTYPES))
    for spec in layout.part_specs(tensor.shape):
        part = tensor.parts[spec.role]
        if part.dtype != spec.dtype or part.type not in (None, spec.dtype):
            raise _dtype_error(tensor, spec.role, spec.dtype)
        if part.nbytes != spec.length:
            raise CodecError(
                "affine.size",
                f"expected {spec.length} bytes for shape {list(tensor.shape)}, found {part.nbytes}",
                where=f"{tensor.name}.{spec.role}",
            )
    return canonical(layout, tensor.shape)


def _dtype_error(tensor: Tensor, role: str, expected: str) -> CodecError:
    part = tensor.parts[role]
    return CodecError(
        "affine.dtype", f"expected {expected}, found {part.type or part.dtype}", where=f"{tensor.name}.{role}"
    )


def _scales_reader(tensor: Tensor, role: str, params: AffineLayout) -> ScalesReader | BlockScales:
    part = tensor.parts[role]
    return ScalesReader(part, params) if params.block is None else BlockScales(part, params, tensor.shape)
