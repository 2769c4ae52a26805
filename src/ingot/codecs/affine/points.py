"""Offsets as zero points: ``s * q + o`` read as ``s * (q - z)`` if ``z = -o / s`` is an integer for every scale.

So tensors that were quantized with zero points and packed for MLX, or as ggml's Q4_1, convert to GPTQ and AWQ.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ingot.codecs.affine.repack import number_chunks
from ingot.codecs.affine.windows import Windows, computed_part
from ingot.core.numeric.dtypes import file_bytes, from_file
from ingot.core.numeric.floats import as_bits, float_name, written
from ingot.core.runtime import native
from ingot.errors import IntegrityError
from ingot.model.layouts.affine import NO_ZERO, POINTS, SCALES, ZEROS, AffineLayout, Constant
from ingot.model.tensor import Array, Tensor

WHY_NOT = "for some scale, the zero point -offset / scale is no integer in the range of the codes"


def as_points(tensor: Tensor, stored: AffineLayout) -> Tensor | None:
    """Return a checked tensor with offsets as a tensor with zero points, computed on demand.

    If every zero point is the middle code, the result has no zero points. None unless every value keeps its bits but
    for the sign of a zero. Reads scales and offsets, and checks their digests.
    """
    if stored.block is not None or stored.matrix is not None:
        return None
    fits = same = True
    middle = 0 if stored.signed else 1 << (stored.bits - 1)
    for scales, zeros in zip(number_chunks(tensor.parts[SCALES]), number_chunks(tensor.parts[ZEROS]), strict=True):
        points = points_of(scales, zeros, stored)  # reads to the end, for the digests
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
    """Return the zero points that are equivalent to offsets, in their type; None unless every value stays equal."""
    lowest = -(1 << (layout.bits - 1)) if layout.signed else 0
    highest, points = lowest + (1 << layout.bits) - 1, np.empty_like(scales)
    fits = native.kernels.affine_points(
        as_bits(scales), as_bits(zeros), lowest, highest, written(points), float_name(scales)
    )
    return points if fits else None
