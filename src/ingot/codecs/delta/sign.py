"""``delta_sign``: a sign per value and a scale per row (``.wdelta`` strategy ``quantized``; ``spec/wdelta.md``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import gcd, lcm, prod
from typing import Any, ClassVar

import numpy as np

from ingot.codecs.base import Codec, decode_by_rows
from ingot.codecs.cast import flat
from ingot.codecs.delta.flat import (
    PIECE,
    Addition,
    AddsByPieces,
    Differences,
    F16Scales,
    PairEncoder,
    check_parts,
    matrix_rows,
    non_finite,
    require_count,
    require_options,
    require_source,
    scale_reach,
    to_f16,
)
from ingot.codecs.delta.readers import Codes, Values, rounded
from ingot.codecs.range_probe import RangeProbe
from ingot.core.numeric.floats import as_bits, written
from ingot.core.runtime import native
from ingot.model.layouts.delta import SignDeltaLayout
from ingot.model.part import Part
from ingot.model.spec import PartSpec
from ingot.model.tensor import Array, Tensor

PARTS = {"scales": ("f16", "f32"), "packed_signs": ("u8",)}


def scale_rows(shape: tuple[int, ...]) -> int:
    """Return how many scales a tensor has: its first dimension, or 1 where it has no other."""
    return shape[0] if len(shape) > 1 else 1


@dataclass(kw_only=True, eq=False)
class SignEncoder(F16Scales, PairEncoder):
    """Encodes whole scale rows, of ``per_scale`` rows and ``cols`` columns of the matrix each."""

    parts: tuple[PartSpec, ...]
    shape: tuple[int, ...]
    per_scale: int
    cols: int
    step: int
    params: Mapping[str, Any] = field(default_factory=dict)
    codec: str = SignDeltaLayout.codec
    fit_passes: int = 0
    single_chunk: bool = False
    lossless: bool = False
    reach: RangeProbe = field(default_factory=scale_reach)

    def fit_of(self, of: Differences) -> None:
        """Nothing to learn beforehand."""

    def encode_of(self, of: Differences, rows: int, start: int) -> dict[str, Array]:
        """Return the parts of these rows.

        Raises ``CodecError``: ``delta_sign.non-finite``, ``delta_sign.overflow`` (a mean past the range of float16).
        """
        length = self.per_scale * self.cols
        # Where a later dimension is 0 there may be scales and no row of the matrix.
        count = rows // self.per_scale if prod(self.shape[:-1]) else scale_rows(self.shape)
        sums = np.zeros(count, np.float32)
        signs = np.empty(-(-of.size // 8), np.uint8)
        if of.size:
            of = of if length % 8 == 0 else Differences.given(of.array())
            bad = native.kernels.sign_encode(*of, sums, signs)
            if bad < of.size:
                raise non_finite(self.codec, of.at(bad), start * self.cols + bad)
        means = (sums.astype(np.float64) / max(length, 1)).astype(np.float32)
        return {"scales": to_f16(means, self.codec), "packed_signs": signs}

    def decode(self, parts: Mapping[str, Array], out: Array) -> None:
        if out.size:
            scales = np.repeat(rounded(parts["scales"], out), self.per_scale)
            native.kernels.sign_decode(parts["packed_signs"], 0, as_bits(scales), written(flat(out)))

    def add_decoded(self, parts: Mapping[str, Array], base: Array, out: Array) -> None:
        if out.size:
            scales = np.repeat(parts["scales"].astype(np.float32), self.per_scale)
            target = Addition(base.reshape(-1), flat(out), None, less=False)
            native.kernels.sign_add(parts["packed_signs"], 0, scales, *target.arguments)


class RowScales:
    """Sequential reading of scales, each repeated for the rows of the matrix that it serves."""

    def __init__(self, part: Part, per_scale: int) -> None:
        self._values, self._per_scale = Values(part), per_scale
        self._position = 0
        self._last = np.empty(0, np.float16)

    def next(self, rows: int) -> Array:
        """Return a float16 scale for each of the next ``rows`` rows."""
        first, stop = self._position // self._per_scale, -(-(self._position + rows) // self._per_scale)
        carried = self._last[: 1 if self._position % self._per_scale else 0]
        scales = np.concatenate([carried, self._values.next(stop - first - carried.size)])
        skipped = self._position % self._per_scale
        self._position += rows
        self._last = scales[-1:]
        return np.repeat(scales, self._per_scale)[skipped : skipped + rows]

    def skip(self, rows: int) -> None:
        """Pass over the scales of the next ``rows`` rows; one that serves the row behind them too is read."""
        stop = self._position + rows
        seen = -(-self._position // self._per_scale)  # scales that were read
        if stop // self._per_scale >= seen:
            self._values.skip(stop // self._per_scale - seen)
            self._last = self._values.next(1 if stop % self._per_scale else 0)
        self._position = stop

    def finish(self) -> None:
        self._values.finish()


class SignReader(AddsByPieces):
    """Sequential decoding through a buffer of about ``PIECE`` signs (never less than a row's)."""

    by_rows: ClassVar[bool] = True

    def __init__(self, tensor: Tensor) -> None:
        self._name = tensor.name
        rows, self._cols = tensor.matrix_shape
        per_scale = max(1, rows // max(1, scale_rows(tensor.shape)))
        self._scales = RowScales(tensor.parts["scales"], per_scale)
        self._signs = Codes(tensor.parts["packed_signs"], 1)

    def fill(self, out: Array) -> None:
        if not out.size:  # scales of rows without columns are read by finish
            return
        step = max(1, PIECE // self._cols)
        for start in range(0, len(out), step):
            target = out[start : start + step]
            scales = rounded(self._scales.next(len(target)), out, self._name)
            signs, first = self._signs.next(target.size)
            native.kernels.sign_decode(signs, first, as_bits(scales), written(target.reshape(-1)))

    def add(self, piece: Addition) -> None:
        scales = self._scales.next(piece.base.size // self._cols).astype(np.float32)
        signs, first = self._signs.next(piece.base.size)
        native.kernels.sign_add(signs, first, scales, *piece.arguments)

    def skip(self, count: int) -> None:
        """Pass over ``count`` differences, whole rows of them."""
        self._scales.skip(count // max(self._cols, 1))
        self._signs.skip(count)

    def finish(self) -> None:
        self._scales.finish()
        self._signs.finish()


class DeltaSign(Codec):
    """One bit per value, the mean magnitude per row; 0 counts as positive."""

    id: ClassVar[str] = SignDeltaLayout.codec
    lossless: ClassVar[bool] = False
    elementwise: ClassVar[bool] = False
    streams: ClassVar[bool] = True

    def check(self, tensor: Tensor) -> None:
        """Rules ``delta_sign.dtype``, ``.parts``, ``.part-dtype``, ``.size``."""
        counts = check_parts(tensor, PARTS)
        require_count(tensor, "scales", counts["scales"], scale_rows(tensor.shape))
        require_count(tensor, "packed_signs", counts["packed_signs"], -(-tensor.size // 8))

    def decode(self, tensor: Tensor, dtype: str, out: Array | None = None) -> Array:
        """Return the differences in f32, f16 or bf16, rounded once."""
        return decode_by_rows(self, tensor, dtype, out)

    def reader(self, tensor: Tensor) -> SignReader:
        self.check(tensor)
        return SignReader(tensor)

    def encoder(self, shape: tuple[int, ...], dtype: str, options: Mapping[str, Any]) -> SignEncoder:
        """Prepare to encode; there are no options."""
        require_options(self.id, options, ())
        require_source(self.id, dtype)
        scales = scale_rows(shape)
        rows, cols = matrix_rows(shape)
        per_scale = max(1, rows // max(1, scales))
        parts = (PartSpec("scales", "f16", 2 * scales), PartSpec("packed_signs", "u8", -(-prod(shape) // 8)))
        step = lcm(per_scale, 8 // gcd(8, max(cols, 1)))
        return SignEncoder(parts=parts, shape=shape, per_scale=per_scale, cols=cols, step=step)
