"""NumPy references of palettes and masks: one step after another, as ``spec/palette.md`` puts it."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


def unpack(stream: Array, bits: int, count: int) -> Array:
    """Return ``count`` codes of a stream, first in the low bits, as u8."""
    flat = np.unpackbits(stream, bitorder="little")[: count * bits].reshape(count, bits)
    return np.packbits(flat, axis=1, bitorder="little").reshape(-1) if count else np.zeros(0, np.uint8)


def pack(codes: Array, bits: int) -> Array:
    """Return u8 codes as one stream, first in the low bits; bits behind the last are 0."""
    return np.packbits(np.unpackbits(codes.reshape(-1, 1), axis=1, count=bits, bitorder="little"), bitorder="little")


def decode(parts: Mapping[str, Array], params: Mapping[str, Any], shape: tuple[int, ...]) -> Array:
    """Return the values of a palette in f32."""
    size, axis, groups = params["vector_size"], params["vector_axis"], tuple(params["groups"])
    index = tuple(length // size if size > 1 and at == axis else length for at, length in enumerate(shape))
    codes = unpack(parts["indices"], params["bits"], prod(index)).reshape(index)
    book = parts["codebook"].astype(np.float32).reshape(*groups, 2 ** params["bits"], size)
    if "codebook_scales" in parts:
        book = book * parts["codebook_scales"].astype(np.float32).reshape(*groups, 1, 1)
    which = np.ix_(*(np.arange(length) // max(length // count, 1) for length, count in zip(index, groups, strict=True)))
    values: Array = book[(*which, codes)]
    out: Array = np.moveaxis(values, -1, axis + 1 if shape else 0).reshape(shape)
    return out


def least_error(values: Array, weights: Array, count: int) -> float:
    """Return the least weighted squared error of ``count`` centroids, by trying all beginnings of the last cluster."""
    order = np.argsort(values.astype(np.float64), kind="stable")
    x, w = values.astype(np.float64)[order], weights[order]
    n = len(x)

    def cost(first: int, stop: int) -> float:
        some, mass = x[first:stop], w[first:stop]
        mean = (some * mass).sum() / mass.sum()
        return float((mass * (some - mean) ** 2).sum())

    best = [0.0] + [np.inf] * n
    for _ in range(count):
        best = [0.0] + [min(best[at] + cost(at, stop) for at in range(stop)) for stop in range(1, n + 1)]
    return best[n]


def expand(mask: Array, kept: Array, count: int) -> Array:
    """Place values where the mask has a bit, bit 0 of a byte first; 0 elsewhere."""
    out = np.zeros(count, kept.dtype)
    there = np.unpackbits(mask, bitorder="little")[:count].astype(bool)
    out[there] = kept[: int(there.sum())]
    return out


def spread_out(points: Array, first: int, draws: Array) -> Array:
    """Return the numbers of points that k-means++ chooses: after the first each by its squared distance and a draw."""
    wide, chosen = points.astype(np.float64), [first]
    distance = np.full(len(points), np.inf)
    for draw in draws:
        distance = np.minimum(distance, ((wide - wide[chosen[-1]]) ** 2).sum(axis=1))
        upto = np.cumsum(distance)
        chosen.append(min(int(np.searchsorted(upto, draw * upto[-1], "right")), len(points) - 1))
    return np.array(chosen)
