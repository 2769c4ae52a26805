"""Encoding of scaled codebooks: a scale from each group's largest magnitude, then the nearest table entries."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd, lcm, log2
from typing import Any

import numpy as np

from ingot.codecs.base import Encoder
from ingot.codecs.palette.rows import chunk_step, pack
from ingot.codecs.range_probe import RangeProbe
from ingot.codecs.scaled_codebook.decode import ArrayWindow, Decoder, Scales
from ingot.codecs.scaled_codebook.tables import Nearest, codes_of, largest, numbers
from ingot.core.numeric.dtypes import LARGEST, cast, numpy_dtype
from ingot.errors import CodecError
from ingot.model.layouts.affine import PerTensor
from ingot.model.layouts.base import Shape, matrix_shape
from ingot.model.layouts.palette import PaletteLayout
from ingot.model.layouts.scaled_codebook import (
    CODEBOOK,
    DIVIDE,
    HIGH_FIRST,
    INDICES,
    SCALES,
    SECOND,
    SMALL_SCALES,
    Run,
    ScaledCodebookLayout,
    Tiles,
)
from ingot.model.spec import PartSpec
from ingot.model.tensor import Array

ID = ScaledCodebookLayout.codec
_POWERS = "f8_e8m0fnu"


class ScaledEncoder(Encoder):
    """An encoder that divides each group by its scale and stores the nearest table entries.

    The scale is the group's largest magnitude divided by the largest table value, rounded to the type of the scales. If
    that type has only powers of two, the scale is ``2 ** (floor(log2(magnitude)) - floor(log2(largest value)))`` (OCP
    Microscaling Formats 1.0, section 6.3).
    """

    codec: str = ID
    fit_passes: int
    single_chunk: bool = False
    lossless: bool = False

    def __init__(self, shape: Shape, layout: ScaledCodebookLayout, name: str, amax: float | None = None) -> None:
        self._layout = layout
        self._shape = layout.stored_shape(shape)
        self._codebook = numbers(name)
        self._top = np.float32(largest(name))
        self._nearest = Nearest(layout.values, self._codebook)
        reach = "f32" if layout.second or layout.scales == _POWERS else layout.scales
        self._reach = RangeProbe("scales", reach, (), float(self._top), layout.dtype)
        self._inner = self._shape[-2] if len(shape) > 1 else 1
        self._per_tensor = isinstance(layout.grid, PerTensor)
        self.fit_passes = int(self._per_tensor or (layout.second is not None and amax is None))
        self._amax = np.float32(amax or 0)
        self.params: Mapping[str, Any] = layout.attributes()
        self.parts: tuple[PartSpec, ...] = layout.part_specs(shape)
        self.step = _step(layout, self._shape)
        if layout.transposed:  # full matrices
            self.step = lcm(self.step, max(self._inner, 1)) // max(self._inner, 1) * max(self._shape[-1], 1)

    def range_probe(self) -> RangeProbe:
        return self._reach

    def fit_pass(self, rows: Array) -> None:
        self._amax = max(self._amax, np.abs(_finite(rows)).max(initial=0))

    def encode(self, rows: Array, start: int = 0) -> dict[str, Array]:
        """Return each part's bytes for ``rows``.

        Raises ``CodecError`` ``scaled_codebook.non-finite``, or ``scaled_codebook.scale-overflow`` if a group's scale
        exceeds the range of its type.
        """
        wide = _finite(rows)
        if self._layout.transposed and wide.size:
            transposed = wide.reshape(-1, self._shape[-1], self._inner).swapaxes(1, 2)
            wide = np.ascontiguousarray(transposed).reshape(-1, self._shape[-1])
        once: dict[str, Array] = {} if self._layout.values else {CODEBOOK: self._codebook[: None if start == 0 else 0]}
        if self._layout.second:
            once[SECOND] = np.full(int(start == 0), self._second(), np.float32)
        if not wide.size:
            scale_dtype = (
                np.dtype(np.uint8) if self._layout.scales in SMALL_SCALES else numpy_dtype(self._layout.scales)
            )
            return {INDICES: np.empty(0, np.uint8), SCALES: np.empty(0, scale_dtype), **once}
        grouped, magnitudes, group_index = self._groups(wide)
        stored, used = self._scales(magnitudes)
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            codes = self._nearest(grouped / used[group_index])
        packed = pack(codes[: wide.size], self._layout.bits)
        if self._layout.order == HIGH_FIRST:
            packed = packed >> 4 | packed << 4
        return {INDICES: packed, SCALES: stored[: 0 if self._per_tensor and start else None], **once}

    def decode(self, parts: Mapping[str, Array], out: Array) -> None:
        if not out.size:
            return
        stored = self._scales(np.full(1, self._amax, np.float32))[0] if self._per_tensor else parts[SCALES]
        second = self._second() if self._layout.second else None
        scales = Scales(self._layout, ArrayWindow(stored), None, second)
        cols = self._shape[-1] if self._shape else 1
        decoder = Decoder(self._layout, (-1, self._inner, cols), self._codebook, scales)
        if not self._layout.transposed:
            decoder.decode(parts[INDICES], 0, out, self._layout.order)
            return
        stored = np.empty((out.size // cols, cols), out.dtype)
        decoder.decode(parts[INDICES], 0, stored, self._layout.order)
        out[...] = stored.reshape(-1, self._inner, cols).swapaxes(1, 2).reshape(out.shape)

    def _second(self) -> np.float32:
        """Return the second scale with which the group of largest magnitude gets the largest possible scale."""
        top = largest(self._layout.scales) if self._layout.scales in SMALL_SCALES else 1.0
        amax = float(self._amax)
        limit = float(self._top) * top
        if not amax:
            return np.float32(1)
        return np.float32(min(limit / amax, LARGEST["f32"]) if self._layout.second == DIVIDE else amax / limit)

    def _groups(self, wide: Array) -> tuple[Array, Array, Any]:
        """Return the values in groups, the largest magnitude of each group, and an index from values to groups.

        The first value of ``wide`` must be the first value of a group. It is, because chunks begin at multiples of
        ``step``.
        """
        grid, (rows, cols) = self._layout.grid, wide.shape
        if isinstance(grid, Tiles):
            lines = np.arange(rows)
            lines = lines // self._inner * -(-self._inner // grid.rows) + lines % self._inner // grid.rows
            first = np.flatnonzero(np.diff(lines, prepend=-1))
            across = np.maximum.reduceat(np.abs(wide), np.arange(0, cols, grid.columns), axis=1)
            magnitudes = np.maximum.reduceat(across, first, axis=0)
            index = lines[:, None] * magnitudes.shape[1] + np.arange(cols) // grid.columns
            return wide, magnitudes.reshape(-1), index
        if isinstance(grid, Run):
            flat = wide.reshape(-1)
            grouped = np.pad(flat, (0, -flat.size % grid.elements)).reshape(-1, grid.elements)
        else:
            grouped = wide.reshape(1, -1) if self._per_tensor else wide.reshape(rows * self._layout.groups(cols), -1)
        magnitudes = np.abs(grouped).max(axis=1, initial=0)
        if self._per_tensor:
            magnitudes = np.full(1, self._amax, np.float32)
        return grouped, magnitudes, (slice(None), None)

    def _scales(self, magnitudes: Array) -> tuple[Array, Array]:
        """Return the scales as stored, and the divisors of the values."""
        layout = self._layout
        second = self._second() if layout.second else np.float32(1)
        if layout.scales == _POWERS:
            exponent = np.frexp(magnitudes)[1] - 1 - int(np.floor(log2(float(self._top))))
            stored: Array = np.where(magnitudes > 0, np.clip(exponent + 127, 0, 254), 127).astype(np.uint8)
            return stored, numbers(_POWERS)[stored]
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            scales = magnitudes / self._top
            if layout.second:
                scales = scales * second if layout.second == DIVIDE else scales / second
            small = layout.scales in SMALL_SCALES
            if small and not layout.second and (scales > largest(layout.scales)).any():
                raise self._overflow()
            # A group of zeros, or of values that would get the scale 0, gets the scale 1.
            rounded = numbers(layout.scales)[codes_of(scales, layout.scales)] if small else _wide(scales, layout.scales)
            if not np.isfinite(rounded).all():
                raise self._overflow()
            rounded = np.where(rounded == 0, np.float32(1), rounded)
            stored = codes_of(rounded, layout.scales) if small else cast(rounded, layout.scales)
            if layout.second:
                rounded = rounded / second if layout.second == DIVIDE else rounded * second
        return stored, rounded

    def _overflow(self) -> CodecError:
        return CodecError(f"{ID}.scale-overflow", f"{self._layout.scales} cannot represent the scale of a group")


def _wide(values: Array, dtype: str) -> Array:
    return cast(cast(values, dtype), "f32")


def _finite(rows: Array) -> Array:
    wide = cast(rows, "f32")
    if not np.isfinite(wide).all():
        raise CodecError(f"{ID}.non-finite", "expected finite values, found NaN or infinity; keep this tensor dense")
    return wide


def _step(layout: ScaledCodebookLayout, shape: Shape) -> int:
    """Return the row alignment of chunks: each chunk must begin at a multiple of this number of rows.

    At these rows the indices begin at a byte, and a block or run of scales begins.
    """
    cols = matrix_shape(shape)[1]
    grid = layout.grid
    step = chunk_step(1, cols, PaletteLayout(layout.bits, (1,), 1, 0, "f32", "f32"))
    if isinstance(grid, Run):
        return lcm(step, grid.elements // gcd(grid.elements, max(cols, 1)))
    if isinstance(grid, Tiles):
        inner = shape[-2] if len(shape) > 1 else 1
        several = len(shape) > 2 and inner % grid.rows
        return lcm(step, max(inner, 1) if several else grid.rows)
    return step
