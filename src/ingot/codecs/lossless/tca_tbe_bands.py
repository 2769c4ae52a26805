"""Bands of the triple-bitmap encoding: 64 rows, which are one row of global tiles (``spec/tca_tbe.md``)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ingot.codecs.cast import cast_into
from ingot.core.numeric.dtypes import as_bits, numpy_dtype
from ingot.core.runtime import native
from ingot.core.runtime.parallel import for_ranges
from ingot.errors import CodecError
from ingot.model.tensor import Array

SIDE = 64
TILE = SIDE * SIDE
WORDS = 64
HIGH_UNIT = 16
FALLBACK_UNIT = 8
BITMAPS = ("bitmap1", "bitmap2", "bitmap3")
ROLES = {"counts": "u16", **dict.fromkeys(BITMAPS, "u64"), "high": "u8", "fallback": "u16"}
FIRST, LAST = -1, 248
"""The smallest and the largest published ``start_exp``, of the lowest and the highest window of seven exponents."""

# Elements per call: enough that the call's cost is negligible, few enough to use all threads.
STEP = 1 << 20


def grid(rows: int, cols: int) -> tuple[int, int]:
    """Return the number of bands, and of global tiles per band; both are 0 if the matrix is empty."""
    return (-(-rows // SIDE), -(-cols // SIDE)) if rows and cols else (0, 0)


def bands_per_call(cols: int) -> int:
    """Return how many bands to process in one call: about ``STEP`` elements, at least one band."""
    return max(1, STEP // (SIDE * max(cols, 1)))


def totals(counts: Array, bands: int, location: str | None) -> Array:
    """Return the offsets of each band's high bytes and fallback elements: [bands + 1, 2].

    The last row contains the total numbers of both.

    Raises ``CodecError`` ``tca_tbe.counts`` if a tile's count exceeds its elements.
    """
    if counts.size and int(counts.max()) > TILE:
        raise CodecError(
            "tca_tbe.counts", f"expected at most {TILE} elements in a tile, found {int(counts.max())}", where=location
        )
    sums = np.zeros((bands + 1, 2), np.int64)
    np.cumsum(counts.reshape(bands, -1, 2).sum(axis=1, dtype=np.int64), axis=0, out=sums[1:])
    return sums


def encode_rows(rows: Array, start: int) -> dict[str, Array]:
    """Return the parts of full bands of a bf16 matrix; the last one may be short."""
    bands, across = grid(*rows.shape)
    tiles = bands * across
    parts: dict[str, Array] = {
        "counts": np.empty(2 * tiles, np.uint16),
        **{role: np.empty(WORDS * tiles, np.uint64) for role in BITMAPS},
    }
    # enough for any values and a vector beyond the end; pages that are not written to use no memory
    high = np.empty(TILE * tiles + 64, np.uint8)
    fallback = np.empty(TILE * tiles + 32, np.uint16)
    sizes = native.kernels.tca_tbe_encode(as_bits(rows), start, **parts, high=high, fallback=fallback)
    return {**parts, "high": high[: sizes[0]], "fallback": fallback[: sizes[1]].copy()}


def decode_rows(
    parts: Mapping[str, Array], start: int, out: Array, location: str | None = None, workers: int | None = 1
) -> None:
    """Decode full bands, of which the last may be short, into ``out`` of any float type, C order.

    Parameters
    ----------
    parts : the flat data of exactly these bands, by role
    start : int
        Codes 1 to 7 represent the exponents ``start`` + 1 to ``start`` + 7.
    workers : int, optional
        The number of threads; None for the number of processors. Small matrices use one.

    Raises
    ------
    CodecError
        ``tca_tbe.counts``: the counts contradict the bitmaps or the parts. Nothing is read beyond a part.
        ``dense.overflow``: a value beyond the range of f16.
    """
    bands, across = grid(*out.shape)
    if not bands:
        return
    ends = totals(parts["counts"], bands, location)
    sizes = (parts["high"].size, parts["fallback"].size)
    if tuple(ends[-1]) != sizes:
        raise CodecError(
            "tca_tbe.counts",
            f"expected {ends[-1][0]} high bytes and {ends[-1][1]} fallback elements by the counts, found {sizes[0]} "
            f"and {sizes[1]}",
            where=location,
        )
    per_band = {"counts": 2 * across, **dict.fromkeys(BITMAPS, WORDS * across)}

    def run(first: int, last: int) -> None:
        run_parts = {role: parts[role].reshape(-1)[first * size : last * size] for role, size in per_band.items()}
        run_parts["high"] = parts["high"][ends[first, 0] : ends[last, 0]]
        run_parts["fallback"] = parts["fallback"][ends[first, 1] : ends[last, 1]]
        run_parts = {role: np.require(array, requirements="A") for role, array in run_parts.items()}
        target = out[first * SIDE : last * SIDE]
        bf16 = numpy_dtype("bf16")
        values = target if target.dtype == bf16 else np.empty(target.shape, bf16)
        decoded = native.kernels.tca_tbe_decode(**run_parts, start=start, out=as_bits(values))
        if decoded < (last - first) * across:
            raise CodecError(
                "tca_tbe.counts",
                f"expected counts that match the bitmaps, found others in tile {first * across + decoded}",
                where=location,
            )
        if values is not target:
            cast_into(values, target, location)

    for_ranges(bands, bands_per_call(out.shape[1]), run, 1 if out.size < 4 * STEP else workers)
