"""Zero points as offsets: ``s * (q - z)`` repacked as ``s * q + o``, ``o = -s * z`` (``spec/affine.md``, "Repacking").

What computes with offsets (MLX) takes integers that were made with zero points, or with signed codes, as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ingot.codecs.affine.repack import AffineRepack, AffineRepackReader, difference, pieces
from ingot.codecs.base import Repacked, RepackReader, cannot
from ingot.core.numeric.floats import as_bits, cast, float_name, written
from ingot.core.runtime import native
from ingot.errors import IntegrityError
from ingot.model.layouts.affine import POINTS, ROWS_LSB, SCALES, ZEROS, AffineLayout
from ingot.model.tensor import Array, Tensor


def repack(tensor: Tensor, stored: AffineLayout, target: AffineLayout) -> Repacked:
    """Return a checked tensor of layout ``stored`` in the layout ``target``."""
    reason = difference(stored, target)
    if reason is not None:
        return cannot(target, reason)
    if not target.offset or stored.offset:
        plain = AffineRepack(tensor, stored, target)
        return _repacked(plain, target, plain.why_not(), plain.reader)
    points = AffineRepack(tensor, stored, replace(target, zero=POINTS))
    if target.packing != ROWS_LSB or target.signed:
        return cannot(target, f"offsets belong to unsigned codes in {ROWS_LSB}")
    return _repacked(points, target, points.why_not() or _why_no_offsets(points), lambda: OffsetRepackReader(points))


def _repacked(
    points: AffineRepack, target: AffineLayout, why_not: str | None, reader: Callable[[], RepackReader]
) -> Repacked:
    parts = target.part_specs(points.tensor.shape)
    return Repacked(target, parts, points.rows, points.step, points.memory, why_not, reader, again=points.again)


def _why_no_offsets(points: AffineRepack) -> str | None:
    """Why not every value has the same bits in f32; reads scales and zero points, and checks their digests."""
    tensor, fits = points.tensor, True
    zeros = pieces(tensor.parts[ZEROS]) if points.stored.zeros else None
    for scales in pieces(tensor.parts[SCALES]):
        shifted = points.new_zeros(scales.size) if zeros is None else points.shift(next(zeros))
        fits = fits and offsets(cast(scales, points.target.scales), shifted) is not None
    for _ in zeros or ():  # to the end, where the digest is checked
        pass
    return None if fits else f"an offset, -scale * zero point, is no number of {points.target.scales}"


class OffsetRepackReader:
    """One pass over a tensor's parts."""

    def __init__(self, points: AffineRepack) -> None:
        self._inner: AffineRepackReader = points.reader()
        self._where = points.tensor.name

    def read(self, rows: int) -> dict[str, Array]:
        parts = self._inner.read(rows)
        offset = offsets(parts[SCALES], parts[ZEROS])
        if offset is None:  # ``why_not`` saw others
            raise IntegrityError(
                "store.changed",
                "expected the scales that were read before, found others: the source changed",
                where=self._where,
            )
        return {**parts, ZEROS: offset}

    def finish(self) -> None:
        self._inner.finish()


def offsets(scales: Array, zeros: Array) -> Array | None:
    """Return ``-scales * zeros`` in their type; None unless every value that they give stays equal.

    With at most 11 bits of a scale and 9 of an integer, every product and difference is a number of float32; what is
    left to prove is that the offset is one of the scales' type. Scales in f32 may have no more bits than that: those
    that were f16 or bf16 have not. A value of zero may change its sign where a scale is zero or negative: what was
    ``s * (q - z)``, -0 for q = z, is ``s * q - s * z``, which is +0.
    """
    found = np.empty_like(scales)
    fits = native.kernels.affine_offsets(as_bits(scales), as_bits(zeros), written(found), float_name(scales))
    return found if fits else None
