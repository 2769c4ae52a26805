"""Encoding of the affine family: options, and quantizers over slabs of rows (``spec/affine.md``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from ingot.codecs.affine_params import SCALE_DTYPES, AffineParams
from ingot.codecs.affine_rows import decode_rows, layout, storage_array
from ingot.core import native
from ingot.core.dtypes import dtype as resolve_dtype
from ingot.core.dtypes import numpy_dtype
from ingot.core.floats import FLOATS, as_bits, float_name
from ingot.errors import CodecError, UnsupportedError, UsageError
from ingot.model.spec import PartSpec
from ingot.model.tensor import Array

QUANTIZERS = ("absmax", "minmax", "mse")
OPTIONS = ("bits", "group", "symmetric", "scales", "bit_order", "quantizer")

_NON_FINITE, _SCALE_OVERFLOW = 1, 2


@dataclass(frozen=True, slots=True)
class AffineEncoder:
    """Quantizes slabs of rows; one scale for a whole tensor needs it in one slab (``whole``)."""

    settings: AffineParams
    scale_dtype: str
    search: bool
    cols: int
    params: Mapping[str, Any]
    parts: tuple[PartSpec, ...]
    codec: str = "quantized_group"
    scans: int = 0
    lossless: bool = False

    @property
    def whole(self) -> bool:
        return self.settings.granularity == "tensor"

    def scan(self, rows: Array) -> None:
        """Nothing to learn beforehand: a group lies within a slab."""

    def encode(self, rows: Array) -> dict[str, Array]:
        """Return the parts of these rows.

        Raises
        ------
        CodecError
            ``affine.non-finite``: a value is NaN or infinite (a float64 past the range of float32 too).
            ``affine.scale-overflow``: the scale type cannot hold a group's scale.
        """
        if rows.ndim != 2 or rows.shape[1] != self.cols:
            raise ValueError(f"expected rows of {self.cols} columns, found {rows.shape}")
        settings = self.settings
        count = len(rows)
        packed = np.empty((count, settings.row_bytes(self.cols)), np.uint8)
        scales = storage_array(settings.scale_shape(count, self.cols), self.scale_dtype)
        zeros = np.empty_like(scales) if settings.zeros else None
        method = "mse" if self.search else "range"
        if not rows.size:
            scales.fill(1)
            if zeros is not None:
                zeros.fill(0)
        elif self.whole:
            self._fit_tensor(rows, scales, zeros)
            method = "given"
        if rows.size:
            self._quantize(rows, packed, scales, zeros, method)
        parts = {"packed_weight": packed, "scales": scales}
        return parts if zeros is None else {**parts, "zeros": zeros}

    def decode(self, parts: Mapping[str, Array], out: Array) -> None:
        decode_rows(self.settings, parts["packed_weight"], parts["scales"], parts.get("zeros"), out)

    def _quantize(self, rows: Array, packed: Array, scales: Array, zeros: Array | None, method: str) -> None:
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
            raise self._non_finite(rows, index)
        if kind == _SCALE_OVERFLOW:
            raise self._overflow(index)

    def _fit_tensor(self, rows: Array, scales: Array, zeros: Array | None) -> None:
        """Choose the one scale and zero point of a tensor."""
        kernels = native.kernels
        values, kind, symmetric = as_bits(rows), float_name(rows), self.settings.signed
        low, high, bad = kernels.affine_range(values, kind)
        if bad < rows.size:
            raise self._non_finite(rows, bad)
        steps, offsets = (np.empty(kernels.AFFINE_CANDIDATES, np.float32) for _ in range(2))
        kernels.affine_candidates(low, high, self.settings.bits, symmetric, self.scale_dtype, steps, offsets)
        best = 0
        if self.search:
            fits = np.flatnonzero(np.isfinite(steps))
            steps, offsets = steps[fits], offsets[fits]
            totals = np.zeros(len(steps))
            kernels.affine_errors(values, kind, self.settings.bits, symmetric, steps, offsets, totals)
            best = int(np.argmin(totals)) if len(totals) else 0
        if not len(steps) or not np.isfinite(steps[best]):
            raise self._overflow(0)
        scales[0] = steps[best]
        if zeros is not None:
            zeros[0] = offsets[best]

    def _non_finite(self, rows: Array, index: int) -> CodecError:
        row, column = divmod(index, self.cols)
        found = float(rows[row, column])
        return CodecError(
            "affine.non-finite",
            f"expected finite weights, found {found:g} at row {row}, column {column} of the {len(rows)} rows in hand; "
            "keep this tensor dense",
        )

    def _overflow(self, index: int) -> CodecError:
        row, column = divmod(index, self.cols)
        return CodecError(
            "affine.scale-overflow",
            f"expected a scale that {self.scale_dtype} can hold, found a larger one for the group at row {row}, column "
            f"{column} of the rows in hand; use scales=bf16 or scales=f32",
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
    scale_dtype = _choice(options, "scales", SCALE_DTYPES, "f16" if granularity == "group" else "f32")
    order = _choice(options, "bit_order", ("lsb", "msb"), "lsb")
    settings = AffineParams(bits, granularity, group_size, f"rows_{order}", symmetric, not symmetric, source)
    rows, cols = (prod(shape[:-1]), shape[-1]) if shape else (1, 1)
    return AffineEncoder(
        settings=settings,
        scale_dtype=scale_dtype,
        search=quantizer == "mse",
        cols=cols,
        params=settings.attributes(),
        parts=_parts(settings, scale_dtype, rows, cols),
    )


def _parts(settings: AffineParams, scale_dtype: str, rows: int, cols: int) -> tuple[PartSpec, ...]:
    scale_bytes = prod(settings.scale_shape(rows, cols)) * numpy_dtype(scale_dtype).itemsize
    packed = PartSpec("packed_weight", "u8", rows * settings.row_bytes(cols))
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
        symmetric = options.get("symmetric", quantizer != "minmax")
    else:
        symmetric = options.get("symmetric", True)
        quantizer = "absmax" if symmetric else "minmax"
    if not isinstance(symmetric, bool):
        raise _wrong("symmetric true or false", symmetric)
    if quantizer in ("absmax", "minmax") and symmetric != (quantizer == "absmax"):
        raise _wrong("quantizer absmax where symmetric, minmax where not, or mse", quantizer)
    return symmetric, quantizer
