"""Bands of the triple-bitmap encoding: 64 rows, one row of global tiles (``spec/tca_tbe.md``)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ingot.codecs.cast import cast_into
from ingot.core.numeric.dtypes import numpy_dtype
from ingot.core.numeric.floats import as_bits
from ingot.core.runtime import native
from ingot.core.runtime.parallel import for_ranges
from ingot.errors import CodecError
from ingot.model.tensor import Array

SIDE = 64
TILE = SIDE * SIDE
WORDS = 64
HIGH_UNIT, FALLBACK_UNIT = 16, 8
BITMAPS = ("bitmap1", "bitmap2", "bitmap3")
ROLES = {"counts": "u16", **dict.fromkeys(BITMAPS, "u64"), "high": "u8", "fallback": "u16"}
FIRST, LAST = -1, 248
"""The published ``start_exp`` of the lowest and of the highest window of seven exponents."""

# Elements per call: enough to make a call's cost vanish, few enough to spread over threads.
STEP = 1 << 20


def grid(rows: int, cols: int) -> tuple[int, int]:
    """Return bands and global tiles per band; no tiles where there are no elements."""
    return (-(-rows // SIDE), -(-cols // SIDE)) if rows and cols else (0, 0)


def bands_per_call(cols: int) -> int:
    """Return the bands that make about ``STEP`` elements, at least 1."""
    return max(1, STEP // (SIDE * max(cols, 1)))


def totals(counts: Array, bands: int, where: str | None) -> Array:
    """Return [bands + 1, 2]: where each band's high bytes and fallback elements begin, and their sums.

    Raises ``CodecError`` ``tca_tbe.counts`` where a tile would hold more than it has elements.
    """
    if counts.size and int(counts.max()) > TILE:
        raise CodecError(
            "tca_tbe.counts", f"expected at most {TILE} elements in a tile, found {int(counts.max())}", where=where
        )
    sums = np.zeros((bands + 1, 2), np.int64)
    np.cumsum(counts.reshape(bands, -1, 2).sum(axis=1, dtype=np.int64), axis=0, out=sums[1:])
    return sums


def encode_rows(rows: Array, start: int) -> dict[str, Array]:
    """Return the parts of whole bands (the last one may be short) of a bf16 matrix."""
    bands, across = grid(*rows.shape)
    tiles = bands * across
    parts: dict[str, Array] = {
        "counts": np.empty(2 * tiles, np.uint16),
        **{role: np.empty(WORDS * tiles, np.uint64) for role in BITMAPS},
    }
    # Room for any values, and for a vector behind the last; pages that stay untouched take no memory.
    high, fallback = np.empty(TILE * tiles + 64, np.uint8), np.empty(TILE * tiles + 32, np.uint16)
    sizes = native.kernels.tca_tbe_encode(as_bits(rows), start, **parts, high=high, fallback=fallback)
    return {**parts, "high": high[: sizes[0]], "fallback": fallback[: sizes[1]].copy()}


def decode_rows(
    parts: Mapping[str, Array], start: int, out: Array, where: str | None = None, workers: int | None = 1
) -> None:
    """Decode whole bands (the last one may be short) into ``out`` of any float type, C order.

    Parameters
    ----------
    parts : exactly what these bands have of each part, flat
    start : int
        Codes 1 to 7 stand for the exponents ``start`` + 1 to ``start`` + 7.
    workers : int, optional
        Threads; None for as many as there are processors. Small matrices take one.

    Raises
    ------
    CodecError
        ``tca_tbe.counts``: the counts are not those of the bitmaps or of the parts. Nothing is read past a part.
        ``dense.overflow``: a value past the range of f16.
    """
    bands, across = grid(*out.shape)
    if not bands:
        return
    ends = totals(parts["counts"], bands, where)
    sizes = (parts["high"].size, parts["fallback"].size)
    if tuple(ends[-1]) != sizes:
        raise CodecError(
            "tca_tbe.counts",
            f"expected {ends[-1][0]} high bytes and {ends[-1][1]} fallback elements by the counts, found {sizes[0]} "
            f"and {sizes[1]}",
            where=where,
        )
    per_band = {"counts": 2 * across, **dict.fromkeys(BITMAPS, WORDS * across)}

    def run(first: int, last: int) -> None:
        some = {role: parts[role].reshape(-1)[first * size : last * size] for role, size in per_band.items()}
        some["high"] = parts["high"][ends[first, 0] : ends[last, 0]]
        some["fallback"] = parts["fallback"][ends[first, 1] : ends[last, 1]]
        some = {role: np.require(array, requirements="A") for role, array in some.items()}
        target = out[first * SIDE : last * SIDE]
        own = numpy_dtype("bf16")
        values = target if target.dtype == own else np.empty(target.shape, own)
        done = native.kernels.tca_tbe_decode(**some, start=start, out=as_bits(values))
        if done < (last - first) * across:
            raise CodecError(
                "tca_tbe.counts",
                f"expected counts as of the bitmaps, found others in tile {first * across + done}",
                where=where,
            )
        if values is not target:
            cast_into(values, target, where)

    for_ranges(bands, bands_per_call(out.shape[1]), run, 1 if out.size < 4 * STEP else workers)
