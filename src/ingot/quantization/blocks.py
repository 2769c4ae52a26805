"""Bands and blocks of rows, and spans of columns, of a matrix that is being rounded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ingot.model.tensor import Array
from ingot.quantization.grid import Rounded

BLOCK = 128
"""The number of rows that are rounded together and that descent changes together; products in bf16 need an even number.
"""


def rows_of(bands: Sequence[Rounded]) -> Iterator[slice]:
    """Yield the rows of each band as a slice of the matrix."""
    first = 0
    for band in bands:
        yield slice(first, first + len(band.codes))
        first += len(band.codes)


def blocks_of(bands: Sequence[Rounded], rows: int = BLOCK) -> list[tuple[Rounded, slice]]:
    """Return the bands in blocks of at most ``rows`` rows, each with its rows as a slice of the matrix.

    A block is a view: it shares the arrays of its band.
    """
    blocks = []
    for band, span in zip(bands, rows_of(bands), strict=True):
        for first in range(span.start, span.stop, rows):
            block = slice(first, min(first + rows, span.stop))
            inner = slice(block.start - span.start, block.stop - span.start)
            cut = replace(
                band,
                codes=band.codes[inner],
                scales=band.scales[inner],
                zeros=_cut(band.zeros, inner),
                units=_cut(band.units, inner),
                zero_units=_cut(band.zero_units, inner),
            )
            blocks.append((cut, block))
    return blocks


def _cut(numbers: Array | None, rows: slice) -> Array | None:
    return None if numbers is None else numbers[rows]


def spans_between(span: int, first: int, last: int) -> Iterator[tuple[int, int]]:
    """Yield the first column of each span, and the column after its last one.

    All spans have ``span`` columns, except that the last one ends at ``last``.
    """
    for start in range(first, last, span):
        yield start, min(start + span, last)
