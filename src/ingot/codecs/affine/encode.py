"""Encoding of the affine family: options, and quantization of chunks of rows (``spec/affine.md``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

import numpy as np

from ingot.codecs.affine.options import parse
from ingot.codecs.affine.rows import align_rows, decode_rows, join_rows, layout
from ingot.codecs.affine.sign import SIGNS, sign_codes, sign_scales, unbiased_scales
from ingot.codecs.base import Encoder
from ingot.codecs.range_probe import RangeProbe
from ingot.core.numeric.dtypes import FLOATS, as_bits, float_name, numpy_dtype
from ingot.core.numeric.dtypes import dtype as resolve_dtype
from ingot.core.runtime import native
from ingot.errors import CodecError, UnsupportedError
from ingot.model.layouts.affine import ROWS_LSB, AffineLayout
from ingot.model.spec import PartSpec
from ingot.model.tensor import Array


class TensorFit:
    """A search for the scale of a tensor that has only one scale.

    The first pass finds the range of the values. If ``search`` is set, a second pass measures squared errors.

    Parameters
    ----------
    settings : AffineLayout
    search : bool
        Whether to choose among ``AFFINE_CANDIDATES`` smaller ranges by squared error. Errors are added row by row in
        f64, so that the result does not depend on chunks.
    rows : int
        Rows of the tensor; each pass processes all of them.

    Attributes
    ----------
    seen : int
        Rows processed in the current pass.
    scales, zeros : arrays of one element
        The result; 1 and ``settings.no_zero`` for an empty tensor.
    """

    def __init__(self, settings: AffineLayout, search: bool, rows: int) -> None:
        self._search = search
        self._rows = rows
        self._low = np.inf
        self._high = -np.inf
        self.seen = 0
        self._codes = settings.bits, settings.signed, not settings.zeros  # arguments of the kernels
        self._candidates: tuple[Array, Array, Array] | None = None  # steps, offsets, sums of squared errors
        self.scales = np.ones(1, numpy_dtype(settings.scales))
        self.zeros = np.full(1, settings.no_zero, numpy_dtype(settings.scales))
        self._scale_dtype = settings.scales

    @property
    def fit_passes(self) -> int:
        """The number of passes over all rows."""
        return 2 if self._search else 1

    def add(self, rows: Array) -> int | None:
        """Process the next rows; return the index of the first NaN or infinity, else None.

        Raises ``CodecError`` ``affine.scale-overflow`` at the end of a pass.
        """
        values = as_bits(rows)
        dtype = float_name(rows)
        if self._candidates is None:
            low, high, bad = native.kernels.affine_range(values, dtype)
            if bad < rows.size:
                return int(bad)
            self._low, self._high = min(self._low, low), max(self._high, high)
        else:
            native.kernels.affine_errors(values, dtype, *self._codes, *self._candidates)
        self.seen += len(rows)
        if self.seen == self._rows:
            self.seen = 0
            self._end_of_pass()
        return None

    def _end_of_pass(self) -> None:
        if self._candidates is None:
            self._candidates = self._propose()
        steps, offsets, totals = self._candidates
        best = int(np.argmin(totals))
        self.scales[0], self.zeros[0] = steps[best], offsets[best]

    def _propose(self) -> tuple[Array, Array, Array]:
        steps, offsets = (np.empty(native.kernels.AFFINE_CANDIDATES, np.float32) for _ in range(2))
        native.kernels.affine_candidates(self._low, self._high, *self._codes, self._scale_dtype, steps, offsets)
        fits = np.flatnonzero(np.isfinite(steps if self._search else steps[:1]))
        if not len(fits):
            raise CodecError(
                "affine.scale-overflow",
                f"{self._scale_dtype} cannot represent the scale of the entire tensor; use scales=bf16 or scales=f32",
            )
        return steps[fits], offsets[fits], np.zeros(len(fits))


_NON_FINITE = 1
_SCALE_OVERFLOW = 2


@dataclass(frozen=True, slots=True)
class AffineEncoder(Encoder):
    """An encoder for chunks of rows.

    If the entire tensor has one scale, fit passes determine it (``fit``), and ``encode`` returns it with row 0. A
    tensor's rows have ``width`` columns. Codes are packed in rows of ``cols`` columns, and a chunk has full packed rows
    (``step``). If ``flat`` is set, the packed rows, which ``settings`` describe, are joined to one bit stream.
    """

    settings: AffineLayout
    quantizer: str
    cols: int
    width: int
    params: Mapping[str, Any]
    parts: tuple[PartSpec, ...]
    reach: RangeProbe
    fit: TensorFit | None = None
    unbiased: bool = False
    flat: bool = False
    codec: str = AffineLayout.codec
    step: int = 1
    single_chunk: bool = False
    lossless: bool = False

    @property
    def fit_passes(self) -> int:
        return self.fit.fit_passes if self.fit else 0

    def range_probe(self) -> RangeProbe:
        return self.reach

    def fit_pass(self, rows: Array) -> None:
        """Process rows in a fit pass, which only a scale of the entire tensor needs."""
        if self.fit is not None:
            bad = self.fit.add(rows)
            if bad is not None:
                raise self._non_finite(rows, bad, self.fit.seen)

    def encode(self, rows: Array, start: int = 0) -> dict[str, Array]:
        """Return each part's bytes for ``rows``.

        Raises
        ------
        CodecError
            ``affine.non-finite``: a value is NaN or infinite, or an f64 beyond the range of f32.
            ``affine.scale-overflow``: a group's scale exceeds the range of the scale type.
        """
        if rows.ndim != 2 or rows.shape[1] != self.width:
            raise ValueError(f"expected rows of {self.width} columns, found {rows.shape}")
        if self.width != self.cols:
            start = start * self.width // self.cols
            rows = rows.reshape(-1, self.cols)
        if self.quantizer in SIGNS:
            return self._join_if_flat(self._signs(rows, start))
        packed = np.empty((len(rows), self.settings.row_bytes(self.cols)), np.uint8)
        scales, zeros = self._scales(len(rows))
        if rows.size:
            method = "given" if self.fit else "mse" if self.quantizer == "mse" else "range"
            self._quantize(rows, packed, scales, zeros, method, start)
            if self.unbiased:
                decoded = np.empty(rows.shape, np.float32)
                decode_rows(self.settings, packed, scales, zeros, decoded)
                group = self.settings.group_columns(self.cols)
                scales = unbiased_scales(rows, decoded, group, scales)
        if self.fit and start:
            scales = scales[:0]
            zeros = None if zeros is None else zeros[:0]
        parts = {"packed_weight": packed, "scales": scales}
        return self._join_if_flat(parts if zeros is None else {**parts, "zeros": zeros})

    def _join_if_flat(self, parts: dict[str, Array]) -> dict[str, Array]:
        """Return ``parts``; for a flat layout, join the rows of codes to one bit stream."""
        packed = parts["packed_weight"]
        if not self.flat or not packed.size:
            return parts
        return {**parts, "packed_weight": join_rows(packed, self.cols * self.settings.bits)}

    def decode(self, parts: Mapping[str, Array], out: Array) -> None:
        scales, zeros = (self.fit.scales, self.fit.zeros) if self.fit else (parts["scales"], parts.get("zeros"))
        if self.width != self.cols:
            out = out.reshape(-1, self.cols)
        packed = parts["packed_weight"]
        if self.flat and out.size:
            packed = align_rows(packed, 0, (len(out), self.cols * self.settings.bits))
        decode_rows(self.settings, packed, scales, zeros if self.settings.zeros else None, out)

    def _scales(self, count: int) -> tuple[Array, Array | None]:
        """Return scales and zero points for ``count`` rows: the fitted ones, else initial values for the kernel to
        replace.
        """
        if self.fit is not None:
            return self.fit.scales.copy(), self.fit.zeros.copy() if self.settings.zeros else None
        shape = self.settings.scale_shape(count, self.cols)
        scales = np.ones(shape, numpy_dtype(self.settings.scales))
        return scales, np.full_like(scales, self.settings.no_zero) if self.settings.zeros else None

    def _signs(self, rows: Array, start: int) -> dict[str, Array]:
        scales, zeros = self._scales(len(rows))
        assert zeros is not None
        zeros[...] = 0.5
        if rows.size:
            bad = native.kernels.affine_range(as_bits(rows), float_name(rows))[2]
            if bad < rows.size:
                raise self._non_finite(rows, bad, start)
            group = self.settings.group_columns(self.cols)
            scales[...] = sign_scales(rows, group, self.quantizer, self.settings.scales).reshape(scales.shape)
            over = np.flatnonzero(~np.isfinite(scales.astype(np.float32)))
            if over.size:
                row, column = divmod(int(over[0]), scales.size // len(rows))
                raise self._overflow(start + row, column * group)
        return {"packed_weight": sign_codes(rows, self.settings.msb), "scales": scales, "zeros": zeros}

    def _quantize(
        self, rows: Array, packed: Array, scales: Array, zeros: Array | None, method: str, start: int
    ) -> None:
        status, index = native.kernels.affine_quantize(
            as_bits(rows),
            float_name(rows),
            packed.reshape(-1),
            as_bits(scales).reshape(-1),
            None if zeros is None else as_bits(zeros).reshape(-1),
            layout(self.settings, self.cols),
            self.settings.scales,
            method,
            -1 if self.settings.zero_point is None else self.settings.zero_point,
        )
        if status == _NON_FINITE:
            raise self._non_finite(rows, index, start)
        if status == _SCALE_OVERFLOW:
            row, column = divmod(index, self.cols)
            raise self._overflow(start + row, column)

    def _overflow(self, row: int, column: int) -> CodecError:
        return CodecError(
            "affine.scale-overflow",
            f"{self.settings.scales} cannot represent the scale or the offset of the group at "
            f"row {row}, column {column}; use scales=bf16 or scales=f32",
        )

    def _non_finite(self, rows: Array, index: int, start: int) -> CodecError:
        row, column = divmod(index, self.cols)
        return CodecError(
            "affine.non-finite",
            f"expected finite weights, found {float(rows[row, column]):g} at row {start + row}, column {column}; "
            "keep this tensor dense",
        )


def prepare(shape: tuple[int, ...], dtype: str, options: Mapping[str, Any]) -> AffineEncoder:
    """Return the encoder for a tensor of ``shape`` and source ``dtype``; see ``AffineCodec.encoder``."""
    source = resolve_dtype(dtype).name
    if source not in FLOATS:
        raise UnsupportedError(
            f"expected weights of type {', '.join(FLOATS)} to quantize, found {source}; keep this tensor dense",
            rule="affine.dtype",
        )
    chosen = parse(options, shape, source)
    settings = chosen.settings
    rows, cols = settings.matrix_of(shape)
    width = shape[-1] if shape else 1
    flat = not settings.in_rows(cols)
    stored = settings
    settings = replace(settings, packing=ROWS_LSB) if flat else settings
    fit = TensorFit(settings, chosen.quantizer == "mse", rows) if settings.per_tensor else None
    return AffineEncoder(
        settings=settings,
        quantizer=chosen.quantizer,
        unbiased=chosen.unbiased,
        cols=cols,
        width=width,
        flat=flat,
        params=stored.attributes(),
        parts=stored.part_specs(shape),
        reach=RangeProbe("scales", settings.scales, ("bf16", "f32") if chosen.auto else (), chosen.levels, source),
        fit=fit,
        step=8 // gcd(cols * settings.bits, 8) if flat else cols // gcd(cols, width) if cols else 1,
    )
