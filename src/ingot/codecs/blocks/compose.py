"""A search for the scales of each group of a block, and blocks built from scales and codes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ingot.codecs.blocks.apart import unpack
from ingot.core.runtime import native
from ingot.model.layouts.affine import SCALES, ZEROS
from ingot.model.layouts.ggml import TYPES
from ingot.model.tensor import Array


@dataclass(frozen=True, slots=True)
class Numbers:
    """The scales and minima of groups in blocks with nested scales: f32 [rows, groups].

    Each scale is the product of the block's f16 number ``d`` and an integer of the group; each minimum is the product
    of ``dmin`` and an integer. ``d`` and ``dmin`` are repeated for each group.
    """

    scales: Array
    minima: Array | None
    d: Array
    dmin: Array | None


def numbers_of(block_type: str, values: Array, importance: Array) -> Numbers | int:
    """Return the scales and minima of least error for a type with nested scales.

    ``values`` is f32 [rows, columns of full blocks]. ``importance`` weights the squared errors of the columns. If f16
    cannot represent the scale of a block, return the index of the block's first value instead.
    """
    elements, nbytes, wide = TYPES[block_type]
    blocks = np.empty(values.size // elements * nbytes, np.uint8)
    status, index = native.kernels.ggml_encode(block_type, values, "f32", importance, True, None, blocks)
    if status:
        return int(index)
    parts = unpack(block_type, blocks)
    rows = len(values)
    scales = parts[SCALES].reshape(rows, -1)
    minima = parts[ZEROS].reshape(rows, -1) if ZEROS in parts else None
    table = blocks.reshape(-1, nbytes)

    def repeat_halves(offset: int) -> Array:
        halves = np.ascontiguousarray(table[:, offset : offset + 2]).view("<f2").astype(np.float32).reshape(rows, -1)
        return np.repeat(halves, scales.shape[1] // halves.shape[1], axis=1)

    return Numbers(scales, minima, repeat_halves(wide[0][0]), None if minima is None else repeat_halves(wide[1][0]))


def compose_blocks(block_type: str, codes: Array, numbers: Numbers) -> Array:
    """Build blocks (u8) that store ``codes``, u8 [rows, columns], with the scales and minima of ``numbers``.

    For types without nested scales, ``d`` and ``dmin`` are the scales and minima.
    """
    elements, nbytes, _ = TYPES[block_type]
    blocks = np.empty(codes.size // elements * nbytes, np.uint8)
    groups = numbers.scales.size * elements // max(codes.size, 1)
    native.kernels.ggml_compose(
        block_type,
        np.ascontiguousarray(codes).reshape(-1),
        _bits(numbers.d, groups),
        None if numbers.dmin is None else _bits(numbers.dmin, groups),
        _integers(numbers.scales, numbers.d) if groups > 1 else None,
        _integers(-numbers.minima, numbers.dmin) if groups > 1 and numbers.minima is not None else None,
        blocks,
    )
    return blocks


def _bits(values: Array, groups: int) -> Array:
    """Return one f16 number per block as bits, from ``values``, which repeat it for each group of the block."""
    return np.ascontiguousarray(values.reshape(-1, groups)[:, 0]).astype(np.float16).view(np.uint16)


def _integers(products: Array, units: Array | None) -> Array:
    assert units is not None
    ratios = np.zeros(products.shape, np.float32)
    np.divide(products, units, out=ratios, where=units != 0)
    return np.rint(ratios).reshape(-1)
