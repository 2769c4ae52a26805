"""Offsets as zero points: ``s * q + o`` read as ``s * (q - z)`` where ``z = -o / s`` is an integer for every scale.

What was made with zero points and packed for MLX, or ggml's Q4_1, goes on into GPTQ, AWQ and their like so.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ingot.codecs.affine.repack import pieces
from ingot.codecs.affine.windows import Windows, made_part
from ingot.core.numeric.dtypes import file_bytes, from_file
from ingot.core.numeric.floats import as_bits, float_name, written
from ingot.core.runtime import native
from ingot.errors import IntegrityError
from ingot.model.layouts.affine import NO_ZERO, POINTS, SCALES, ZEROS, AffineLayout, Constant
from ingot.model.tensor import Array, Tensor

WHY_NOT = "an offset is no -scale * zero point with an integer that a code could be"


def as_points(tensor: Tensor, stored: AffineLayout) -> Tensor | None:
    """Return a checked tensor with offsets as one with zero points, which are made as they are read, or with none
    where all are the middle one.

    None unless every value keeps its bits but for the sign of a zero; reads scales and offsets, and checks their
    digests.
    """
    if stored.block is not None or stored.matrix is not None:
        return None
    fits = same = True
    middle = 0 if stored.signed else 1 << (stored.bits - 1)
    for scales, zeros in zip(pieces(tensor.parts[SCALES]), pieces(tensor.parts[ZEROS]), strict=True):
        found = points_of(scales, zeros, stored)  # to the end, for the digests
        fits = fits and found is not None
        same = same and found is not None and native.kernels.affine_equal(as_bits(found), float_name(found), middle)
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
        some = slice(first, last)
        steps, shifts = (
            from_file(np.ascontiguousarray(part.read(some, 0, width)).reshape(-1), stored.scales) for part in windows
        )
        found = points_of(steps, shifts, stored)
        if found is None:
            raise IntegrityError(
                "store.changed",
                "expected the offsets that were read before, found others: the source changed",
                where=tensor.name,
            )
        return np.frombuffer(file_bytes(found), np.uint8)

    made = made_part(tensor.parts[ZEROS], stored.scales, lines, width, make)
    layout = replace(stored, zero=POINTS)
    return replace(tensor, parts={**tensor.parts, ZEROS: made}, params=layout.attributes())


def points_of(scales: Array, zeros: Array, layout: AffineLayout) -> Array | None:
    """Return the zero points that stand for offsets, in their type; None unless every value stays equal."""
    lowest = -(1 << (layout.bits - 1)) if layout.signed else 0
    highest, found = lowest + (1 << layout.bits) - 1, np.empty_like(scales)
    fits = native.kernels.affine_points(
        as_bits(scales), as_bits(zeros), lowest, highest, written(found), float_name(scales)
    )
    return found if fits else None
