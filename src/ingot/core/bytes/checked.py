"""Arithmetic on numbers that came out of a file: nothing overflows, nothing is negative, nothing is allocated first."""

from __future__ import annotations

from collections.abc import Sequence

from ingot.errors import FormatError, IntegrityError

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


def require_inside(offset: int, length: int, size: int, where: str) -> None:
    """Refuse a range that does not lie in a source of ``size`` bytes: ``IntegrityError``, rule ``store.short-read``."""
    if offset < 0 or length < 0 or offset + length > size:
        raise IntegrityError(
            "store.short-read", f"expected {length} bytes at {offset}, found {size} in all", where=where
        )
