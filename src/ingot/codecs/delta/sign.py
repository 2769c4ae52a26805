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
    BATCH,
    Addition,
    BatchAddingReader,
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
from ingot.codecs.delta.readers import Codes, ElementReader, cast_like
from ingot.codecs.range_probe import RangeProbe
from ingot.core.numeric.dtypes import as_bits, written
from ingot.core.runtime import native
from ingot.model.layouts.delta import SignDeltaLayout
from ingot.model.part import Part
from ingot.model.spec import PartSpec
from ingot.model.tensor import Array, Tensor

PARTS = {"scales": ("f16", "f32"), "packed_signs": ("u8",)}


def scale_rows(shape: tuple[int, ...]) -> int:
    """Return the number of scales of a tensor: its first dimension, or 1 for at most one dimension."""
    return shape[0] if len(shape) > 1 else 1


@dataclass(kw_only=True, eq=False)
class SignEncoder(F16Scales, PairEncoder):
    """An encoder of signs and scales; a scale applies to ``per_scale`` rows of ``cols`` columns of the matrix."""

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

    def fit_differences(self, differences: Differences) -> None:
        """Do nothing: there is no fit pass."""

    def encode_differences(self, differences: Differences, rows: int, start: int) -> dict[str, Array]:
        """Return the parts of these rows.

        Raises ``CodecError`` ``delta_sign.non-finite``, or ``delta_sign.overflow`` for a mean beyond the range of f16.
        """
        length = self.per_scale * self.cols
        # If a later dimension is 0, there may be scales without rows of the matrix.
        count = rows // self.per_scale if prod(self.shape[:-1]) else scale_rows(self.shape)
        sums = np.zeros(count, np.float32)
        signs = np.empty(-(-differences.size // 8), np.uint8)
        if differences.size:
            if length % 8:
                differences = Differences.from_rows(differences.array())
            bad = native.kernels.sign_encode(*differences, sums, signs)
            if bad < differences.size:
                raise non_finite(self.codec, differences.value_at(bad), start * self.cols + bad)
        means = (sums.astype(np.float64) / max(length, 1)).astype(np.float32)
        return {"scales": to_f16(means, self.codec), "packed_signs": signs}

    def decode(self, parts: Mapping[str, Array], out: Array) -> None:
        if out.size:
            scales = np.repeat(cast_like(parts["scales"], out), self.per_scale)
            native.kernels.sign_decode(parts["packed_signs"], 0, as_bits(scales), written(flat(out)))

    def add_decoded(self, parts: Mapping[str, Array], base: Array, out: Array) -> None:
        if out.size:
            scales = np.repeat(parts["scales"].astype(np.float32), self.per_scale)
            target = Addition(base.reshape(-1), flat(out), None, less=False)
            native.kernels.sign_add(parts["packed_signs"], 0, scales, *target.arguments)


class RowScales:
    """A sequential reader of scales that repeats each for the matrix rows that share it."""

    def __init__(self, part: Part, per_scale: int) -> None:
        self._values = ElementReader(part)
        self._per_scale = per_scale
        self._position = 0
        self._last = np.empty(0, np.float16)

    def next(self, rows: int) -> Array:
        """Return an f16 scale for each of the next ``rows`` rows."""
        first = self._position // self._per_scale
        stop = -(-(self._position + rows) // self._per_scale)
        carried = self._last[: 1 if self._position % self._per_scale else 0]
        scales = np.concatenate([carried, self._values.next(stop - first - carried.size)])
        skipped = self._position % self._per_scale
        self._position += rows
        self._last = scales[-1:]
        return np.repeat(scales, self._per_scale)[skipped : skipped + rows]

    def skip(self, rows: int) -> None:
        """Skip the scales of the next ``rows`` rows.

        If the last skipped row and the following row share a scale, that scale is read.
        """
        stop = self._position + rows
        seen = -(-self._position // self._per_scale)  # scales already read
        if stop // self._per_scale >= seen:
            self._values.skip(stop // self._per_scale - seen)
            self._last = self._values.next(1 if stop % self._per_scale else 0)
        self._position = stop

    def finish(self) -> None:
        self._values.finish()


class SignReader(BatchAddingReader):
    """A sequential reader that buffers about ``BATCH`` signs, at least a row."""

    by_rows: ClassVar[bool] = True

    def __init__(self, tensor: Tensor) -> None:
        self._name = tensor.name
        rows, self._cols = tensor.matrix_shape
        per_scale = max(1, rows // max(1, scale_rows(tensor.shape)))
        self._scales = RowScales(tensor.parts["scales"], per_scale)
        self._signs = Codes(tensor.parts["packed_signs"], 1)

    def fill(self, out: Array) -> None:
        if not out.size:  # ``finish`` reads the scales of rows without columns
            return
        step = max(1, BATCH // self._cols)
        for start in range(0, len(out), step):
            target = out[start : start + step]
            scales = cast_like(self._scales.next(len(target)), out, self._name)
            signs, first = self._signs.next(target.size)
            native.kernels.sign_decode(signs, first, as_bits(scales), written(target.reshape(-1)))

    def add(self, addition: Addition) -> None:
        scales = self._scales.next(addition.base.size // self._cols).astype(np.float32)
        signs, first = self._signs.next(addition.base.size)
        native.kernels.sign_add(signs, first, scales, *addition.arguments)

    def skip(self, count: int) -> None:
        """Skip ``count`` differences, which must be full rows."""
        self._scales.skip(count // max(self._cols, 1))
        self._signs.skip(count)

    def finish(self) -> None:
        self._scales.finish()
        self._signs.finish()


class DeltaSign(Codec):
    """One sign bit per value and the mean magnitude per row; 0 counts as positive."""

    id: ClassVar[str] = SignDeltaLayout.codec
    lossless: ClassVar[bool] = False
    elementwise: ClassVar[bool] = False
    streams: ClassVar[bool] = True

    def check(self, tensor: Tensor) -> None:
        """Check parameters, parts and shape of ``tensor``; rules ``delta_sign.dtype``, ``.parts``, ``.part-dtype``,
        ``.size``.
        """
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
        """Return the encoder, which has no options."""
        require_options(self.id, options, ())
        require_source(self.id, dtype)
        scales = scale_rows(shape)
        rows, cols = matrix_rows(shape)
        per_scale = max(1, rows // max(1, scales))
        parts = (PartSpec("scales", "f16", 2 * scales), PartSpec("packed_signs", "u8", -(-prod(shape) // 8)))
        step = lcm(per_scale, 8 // gcd(8, max(cols, 1)))
        return SignEncoder(parts=parts, shape=shape, per_scale=per_scale, cols=cols, step=step)
