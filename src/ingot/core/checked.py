"""Arithmetic on numbers that came out of a file: nothing overflows, nothing is negative, nothing is allocated first."""

from __future__ import annotations

from collections.abc import Sequence

from ingot.errors import FormatError

MAX_RANK = 64


def element_count(shape: Sequence[int], rule: str, where: str) -> int:
    """Return the product of ``shape``; refuse a product, or a product of the non-zero sizes, past 2**63 - 1.

    The second condition keeps shapes such as ``[2**62, 2**62, 0]`` out: NumPy and torch cannot make strides for them.
    """
    if len(shape) > MAX_RANK:
        raise FormatError(rule, f"expected at most {MAX_RANK} dimensions, found {len(shape)}", where=where)
    count, nonzero = 1, 1
    for size in shape:
        count *= size
        nonzero *= size or 1
        if nonzero > 2**63 - 1:
            raise FormatError(rule, f"the product of shape {list(shape)} passes 2**63", where=where)
    return count
