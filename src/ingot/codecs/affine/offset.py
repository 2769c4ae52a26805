"""Zero points as offsets: ``s * (q - z)`` repacked as ``s * q + o``, ``o = -s * z`` (``spec/affine.md``, "Repacking").

A runtime that computes with offsets (MLX) then accepts integers with zero points, and signed codes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ingot.codecs.affine.repack import AffineRepack, AffineRepackReader, difference, number_chunks
from ingot.codecs.base import Repacked, RepackReader, cannot
from ingot.core.numeric.dtypes import as_bits, cast, float_name, written
from ingot.core.runtime import native
from ingot.errors import IntegrityError
from ingot.model.layouts.affine import POINTS, ROWS_LSB, SCALES, ZEROS, AffineLayout
from ingot.model.tensor import Array, Tensor


def repack(tensor: Tensor, stored: AffineLayout, target: AffineLayout) -> Repacked:
    """Return the repacking of a checked tensor from the layout ``stored`` into ``target``."""
    reason = difference(stored, target)
    if reason is not None:
        return cannot(target, reason)
    if not target.offset or stored.offset:
        plain = AffineRepack(tensor, stored, target)
        return _with_reader(plain, target, plain.why_not(), plain.reader)
    points = AffineRepack(tensor, stored, replace(target, zero=POINTS))
    if target.packing != ROWS_LSB or target.signed:
        return cannot(target, f"offsets belong to unsigned codes in {ROWS_LSB}")
    return _with_reader(points, target, points.why_not() or _why_no_offsets(points), lambda: OffsetRepackReader(points))


def _with_reader(
    points: AffineRepack, target: AffineLayout, why_not: str | None, reader: Callable[[], RepackReader]
) -> Repacked:
    parts = target.part_specs(points.tensor.shape)
    return Repacked(target, parts, points.rows, points.step, points.memory, why_not, reader, again=points.again)


def _why_no_offsets(points: AffineRepack) -> str | None:
    """Return why an f32 value would change in the repacking; None if no value changes.

    Scales and zero points are read, and their digests checked.
    """
    tensor = points.tensor
    fits = True
    zeros = number_chunks(tensor.parts[ZEROS]) if points.stored.zeros else None
    for scales in number_chunks(tensor.parts[SCALES]):
        shifted = points.new_zeros(scales.size) if zeros is None else points.shift(next(zeros))
        fits = fits and offsets(cast(scales, points.target.scales), shifted) is not None
    for _ in zeros or ():  # to the end, where the digest is checked
        pass
    return None if fits else f"{points.target.scales} cannot represent an offset, -scale * zero point, exactly"


class OffsetRepackReader:
    """A sequential reader of a tensor with zero points that returns its parts with offsets instead."""

    def __init__(self, points: AffineRepack) -> None:
        self._inner: AffineRepackReader = points.reader()
        self._tensor_name = points.tensor.name

    def read(self, rows: int) -> dict[str, Array]:
        parts = self._inner.read(rows)
        offset = offsets(parts[SCALES], parts[ZEROS])
        if offset is None:  # other values than ``why_not`` checked
            raise IntegrityError(
                "store.changed",
                "the scales differ from an earlier read: the source changed meanwhile; run again",
                where=self._tensor_name,
            )
        return {**parts, ZEROS: offset}

    def finish(self) -> None:
        self._inner.finish()


def offsets(scales: Array, zeros: Array) -> Array | None:
    """Return the offsets ``-scales * zeros`` in the type of the scales; None if a decoded value would change.

    f32 represents every product and difference exactly if scales have at most 11 significant bits and zero points at
    most 9. Then only the type of the scales can be insufficient for an offset. Scales in f32 qualify if they were cast
    from f16 or bf16. The sign of a zero may change if a scale is zero or negative: for q = z, ``s * (q - z)`` is -0,
    and ``s * q - s * z`` is +0.
    """
    result = np.empty_like(scales)
    fits = native.kernels.affine_offsets(as_bits(scales), as_bits(zeros), written(result), float_name(scales))
    return result if fits else None
