"""Arithmetic on numbers that came out of a file: nothing overflows, nothing is negative, nothing is allocated first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ingot.errors import FormatError

U64_MAX = 2**64 - 1
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


def span_end(offset: int, length: int, limit: int, rule: str, where: str) -> int:
    """Return ``offset + length``; refuse negative numbers and an end past ``limit``."""
    if offset < 0 or length < 0 or offset + length > limit:
        raise FormatError(rule, f"bytes {offset}..{offset + length} lie outside the file's {limit} bytes", where=where)
    return offset + length


def first_overlap(spans: Iterable[tuple[int, int, str]]) -> tuple[str, str] | None:
    """Return the labels of the first two ``(start, end, label)`` spans that share a byte, in file order; else None."""
    end, last = 0, ""
    for start, stop, label in sorted(span for span in spans if span[1] > span[0]):
        if start < end:
            return last, label
        end, last = stop, label
    return None
