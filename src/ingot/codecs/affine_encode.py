"""Encoding of the affine family: options, and quantizers over slabs of rows (``spec/affine.md``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from ingot.codecs.affine_fit import TensorFit
from ingot.codecs.affine_params import SCALE_DTYPES, AffineParams
from ingot.codecs.affine_rows import decode_rows, layout
from ingot.codecs.affine_sign import SIGNS, sign_codes, sign_scales, unbiased_scales
from ingot.core import native
from ingot.core.dtypes import dtype as resolve_dtype
from ingot.core.dtypes import numpy_dtype
from ingot.core.floats import FLOATS, as_bits, float_name
from ingot.errors import CodecError, UnsupportedError, UsageError
from ingot.model.spec import PartSpec
from ingot.model.tensor import Array

QUANTIZERS = ("absmax", "minmax", "mse", *SIGNS)
OPTIONS = ("bits", "group", "symmetric", "signed", "scales", "bit_order", "quantizer", "unbiased")

_NON_FINITE, _SCALE_OVERFLOW = 1, 2


@dataclass(frozen=True, slots=True)
class AffineEncoder:
    """Quantizes slabs of rows. One scale for a whole tensor (``fit``) is learnt in scans and stored with row 0."""

    settings: AffineParams
    scale_dtype: str
    quantizer: str
    cols: int
    params: Mapping[str, Any]
    parts: tuple[PartSpec, ...]
    fit: TensorFit | None = None
    unbiased: bool = False
    codec: str = "quantized_group"
    step: int = 1
    whole: bool = False
    lossless: bool = False

    @property
    def scans(self) -> int:
        return self.fit.scans if self.fit else 0

    def scan(self, rows: Array) -> None:
        """Learn the tensor's scale; groups and rows lie within a slab and need nothing."""
        if self.fit is not None:
            bad = self.fit.take(rows)
            if bad is not None:
                raise self._non_finite(rows, bad, self.fit.seen)

    def encode(self, rows: Array, start: int = 0) -> dict[str, Array]:
        """Return the parts of these rows.

        Raises
        ------
        CodecError
            ``affine.non-finite``: a value is NaN or infinite (a float64 past the range of float32 too).
            ``affine.scale-overflow``: the scale type cannot hold a group's scale.
        """
        if rows.ndim != 2 or rows.shape[1] != self.cols:
            raise ValueError(f"expected rows of {self.cols} columns, found {rows.shape}")
        if self.quantizer in SIGNS:
            return self._signs(rows, start)
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
        return parts if zeros is None else {**parts, "zeros": zeros}

    def decode(self, parts: Mapping[str, Array], out: Array) -> None:
        scales, zeros = (self.fit.scales, self.fit.zeros) if self.fit else (parts["scales"], parts.get("zeros"))
        decode_rows(self.settings, parts["packed_weight"], scales, zeros if self.settings.zeros else None, out)

    def _scales(self, count: int) -> tuple[Array, Array | None]:
        """Return scales and zero points for so many rows: the fitted ones, or ones to be filled in."""
        if self.fit is not None:
            return self.fit.scales.copy(), self.fit.zeros.copy() if self.settings.zeros else None
        shape = self.settings.scale_shape(count, self.cols)
        scales = np.ones(shape, numpy_dtype(self.scale_dtype))
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
            scales[...] = sign_scales(rows, group, self.quantizer, self.scale_dtype).reshape(scales.shape)
            over = np.flatnonzero(~np.isfinite(scales.astype(np.float32)))
            if over.size:
                row, column = divmod(int(over[0]), scales.size // len(rows))
                raise self._overflow(start + row, column * group)
        return {"packed_weight": sign_codes(rows, self.settings.msb), "scales": scales, "zeros": zeros}

    def _quantize(
        self, rows: Array, packed: Array, scales: Array, zeros: Array | None, method: str, start: int
    ) -> None:
        kind, index = native.kernels.affine_quantize(
            as_bits(rows),
            float_name(rows),
            packed.reshape(-1),
            as_bits(scales).reshape(-1),
            None if zeros is None else as_bits(zeros).reshape(-1),
            layout(self.settings, self.cols),
            self.scale_dtype,
            method,
        )
        if kind == _NON_FINITE:
            raise self._non_finite(rows, index, start)
        if kind == _SCALE_OVERFLOW:
            row, column = divmod(index, self.cols)
            raise self._overflow(start + row, column)

    def _overflow(self, row: int, column: int) -> CodecError:
        return CodecError(
            "affine.scale-overflow",
            f"expected a scale that {self.scale_dtype} can hold, found a larger one for the group at row {row}, "
            f"column {column}; use scales=bf16 or scales=f32",
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
    unknown = sorted(str(key) for key in options if key not in OPTIONS)
    if unknown:
        raise _wrong(f"the options {', '.join(OPTIONS)}", unknown[0])
    bits, (granularity, group_size) = _bits(options), _grouping(options)
    symmetric, quantizer = _quantizer(options)
    if symmetric and bits < 2:
        raise _wrong("bits of at least 2 for a symmetric quantizer", bits)
    signed = options.get("signed", symmetric)
    if not isinstance(signed, bool) or (symmetric and not signed):
        raise _wrong("signed true or false, and true where symmetric", signed)
    scale_dtype = _choice(options, "scales", SCALE_DTYPES, "f16" if granularity == "group" else "f32")
    order = _choice(options, "bit_order", ("lsb", "msb"), "lsb")
    settings = AffineParams(bits, granularity, group_size, f"rows_{order}", signed, not symmetric, source)
    rows, cols = (prod(shape[:-1]), shape[-1]) if shape else (1, 1)
    search = quantizer == "mse"
    if quantizer in SIGNS and (bits != 1 or signed or granularity == "tensor"):
        raise _wrong(
            f"1 bit, unsigned, and a scale per group or row, for quantizer {quantizer}", (bits, signed, granularity)
        )
    unbiased = options.get("unbiased", False)
    if not isinstance(unbiased, bool) or (unbiased and (granularity == "tensor" or quantizer in SIGNS)):
        raise _wrong("unbiased true or false, and false for one scale per tensor and for signs", unbiased)
    return AffineEncoder(
        settings=settings,
        scale_dtype=scale_dtype,
        quantizer=quantizer,
        unbiased=unbiased,
        cols=cols,
        params=settings.attributes(),
        parts=part_specs(settings, scale_dtype, rows, cols),
        fit=TensorFit(settings, scale_dtype, search, rows) if granularity == "tensor" else None,
    )


def part_specs(settings: AffineParams, scale_dtype: str, rows: int, cols: int) -> tuple[PartSpec, ...]:
    """Return the raw parts of a matrix in one of Ingot's own packings."""
    scale_bytes = prod(settings.scale_shape(rows, cols)) * numpy_dtype(scale_dtype).itemsize
    packed = PartSpec("packed_weight", "u8", settings.packed_bytes(rows, cols))
    scales = PartSpec("scales", scale_dtype, scale_bytes)
    zeros = (PartSpec("zeros", scale_dtype, scale_bytes),) if settings.zeros else ()
    return (packed, scales, *zeros)


def _wrong(expected: str, found: object) -> UsageError:
    return UsageError(f"codec quantized_group expects {expected}, found {found!r}", rule="affine.option")


def _choice(options: Mapping[str, Any], key: str, known: tuple[str, ...], default: str) -> str:
    value = options.get(key, default)
    if not isinstance(value, str) or value not in known:
        raise _wrong(f"{key} {' or '.join(known)}", value)
    return value


def _bits(options: Mapping[str, Any]) -> int:
    bits = options.get("bits", 4)
    if not isinstance(bits, int) or isinstance(bits, bool) or not 1 <= bits <= 8:
        raise _wrong("bits from 1 to 8", bits)
    return bits


def _grouping(options: Mapping[str, Any]) -> tuple[str, int | None]:
    group = options.get("group", "row" if options.get("bits") == 8 else 128)
    if isinstance(group, str) and group in ("row", "tensor"):
        return group, None
    if not isinstance(group, int) or isinstance(group, bool) or not 1 <= group <= 2**31:
        raise _wrong("group 'row', 'tensor' or a positive number of columns", group)
    return "group", group


def _quantizer(options: Mapping[str, Any]) -> tuple[bool, str]:
    """Return whether codes are symmetric, and the quantizer; each has its default from the other."""
    if "quantizer" in options:
        quantizer = _choice(options, "quantizer", QUANTIZERS, "absmax")
        symmetric = options.get("symmetric", quantizer not in ("minmax", *SIGNS))
    else:
        symmetric = options.get("symmetric", True)
        quantizer = "absmax" if symmetric else "minmax"
    if not isinstance(symmetric, bool):
        raise _wrong("symmetric true or false", symmetric)
    if quantizer != "mse" and symmetric != (quantizer == "absmax"):
        raise _wrong("quantizer absmax where symmetric, minmax or signs where not, or mse", quantizer)
    return symmetric, quantizer
