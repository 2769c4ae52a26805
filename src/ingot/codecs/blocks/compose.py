"""Blocks whose numbers are chosen elsewhere: what a search gives each group, and blocks put together from numbers."""

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
    """What a block of nested scales has beside its codes: f32 [rows, groups] each, products of f16 and an integer.

    ``d`` and ``least`` are the block's own scale and minimum, for each of its groups.
    """

    scales: Array
    minima: Array | None
    d: Array
    least: Array | None


def numbers_of(kind: str, values: Array, importance: Array) -> Numbers | int:
    """Search the scales of values, f32 [rows, columns of whole blocks], of a type with nested scales.

    ``importance`` is what squared errors of the columns weigh. Returns the index of the first value of a block for
    whose scale f16 has no room, if there is one.
    """
    elements, nbytes, wide = TYPES[kind]
    blocks = np.empty(values.size // elements * nbytes, np.uint8)
    status, index = native.kernels.ggml_encode(kind, values, "f32", importance, True, blocks)
    if status:
        return int(index)
    parts, rows = unpack(kind, blocks), len(values)
    scales = parts[SCALES].reshape(rows, -1)
    minima = parts[ZEROS].reshape(rows, -1) if ZEROS in parts else None
    table = blocks.reshape(-1, nbytes)

    def own(at: int) -> Array:
        halves = np.ascontiguousarray(table[:, at : at + 2]).view("<f2").astype(np.float32).reshape(rows, -1)
        return np.repeat(halves, scales.shape[1] // halves.shape[1], axis=1)

    return Numbers(scales, minima, own(wide[0][0]), None if minima is None else own(wide[1][0]))


def composed(kind: str, codes: Array, numbers: Numbers) -> Array:
    """Return blocks (u8) of codes, u8 [rows, columns], and the numbers that stand beside them.

    Of types without nested scales ``d`` and ``least`` are the scales and minima themselves.
    """
    elements, nbytes, _ = TYPES[kind]
    blocks = np.empty(codes.size // elements * nbytes, np.uint8)
    groups = numbers.scales.size * elements // max(codes.size, 1)
    native.kernels.ggml_compose(
        kind,
        np.ascontiguousarray(codes).reshape(-1),
        _bits(numbers.d, groups),
        None if numbers.least is None else _bits(numbers.least, groups),
        _integers(numbers.scales, numbers.d) if groups > 1 else None,
        _integers(-numbers.minima, numbers.least) if groups > 1 and numbers.minima is not None else None,
        blocks,
    )
    return blocks


def _bits(values: Array, groups: int) -> Array:
    """Return a block's own number, which stands with each of its groups, as bits of f16."""
    return np.ascontiguousarray(values.reshape(-1, groups)[:, 0]).astype(np.float16).view(np.uint16)


def _integers(products: Array, units: Array | None) -> Array:
    assert units is not None
    found = np.zeros(products.shape, np.float32)
    np.divide(products, units, out=found, where=units != 0)
    return np.rint(found).reshape(-1)
