"""A base tensor's values as a difference takes them: with the rows of the fine-tune, in the difference's element type.

Rows that the base does not have are zeros. Values are cast as every cast here: rounded once to nearest even, so that
the result is the same wherever a delta is made or applied.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import numpy as np

from ingot.codecs.table import CODECS
from ingot.core.numeric.buffers import scratch
from ingot.core.numeric.dtypes import DTYPES, FLOATS, cast_into, numpy_dtype
from ingot.core.numeric.dtypes import dtype as element_type
from ingot.engine.chunks import chunks
from ingot.model.layouts.dense import DenseLayout
from ingot.model.tensor import Array, Tensor

Shape = tuple[int, ...]


def is_opaque(tensor: Tensor) -> bool:
    """Whether these are dense values that only move: packed below a byte, or of a type not known here."""
    return tensor.codec == DenseLayout.codec and (tensor.dtype not in DTYPES or DTYPES[tensor.dtype].bits < 8)


def why_incomparable(base: Tensor, tuned: Tensor) -> str | None:
    """Return why no difference is taken between two tensors; None if a difference leads from one to the other.

    Their shapes may differ in the number of rows (the first dimension), their element types if both are floats.
    """
    if is_opaque(base) or is_opaque(tuned):
        return f"element type {base.dtype} -> {tuned.dtype}" if base.dtype != tuned.dtype else "packed values"
    if base.dtype != tuned.dtype and not {base.dtype, tuned.dtype} <= set(FLOATS):
        return f"element type {base.dtype} -> {tuned.dtype}"
    if base.shape != tuned.shape:
        rows_differ = differ_in_rows(base.shape, tuned.shape)
        cut_anywhere = len(base.shape) > 1 or all(CODECS[item.codec].elementwise for item in (base, tuned))
        if not rows_differ or not cut_anywhere:
            return f"shape {list(base.shape)} -> {list(tuned.shape)}"
    return None


def differ_in_rows(first: Shape, other: Shape) -> bool:
    """Whether two shapes differ in their first dimension alone, and share rows with values."""
    return (
        len(first) == len(other) > 0
        and first[1:] == other[1:]
        and first[0] != other[0]
        and min(prod(first), prod(other)) > 0
    )


def rows_of(shape: Shape, cols: int) -> int:
    """Return the rows of a tensor that is cut by rows of ``cols`` values (1: by single values)."""
    return prod(shape) // cols if cols else prod(shape[:-1])


def window(start: int, stop: int, rows: int) -> int:
    """Return how many of the rows from ``start`` to ``stop`` a tensor of ``rows`` rows has."""
    return max(min(stop, rows) - start, 0)


def fitted(values: Array, rows: int, dtype: str | None) -> Array:
    """Return ``rows`` rows of the element type ``dtype`` (None: unchanged): cut, or extended by zeros, then cast."""
    target = values.dtype if dtype is None else numpy_dtype(dtype)
    if len(values) == rows and values.dtype == target:
        return values
    shared = values[:rows]
    out = scratch((rows, *values.shape[1:]), target)
    if shared.dtype == target:
        out[: len(shared)] = shared
    elif shared.size:
        cast_into(shared, out[: len(shared)])
    out[len(shared) :] = np.zeros((), target)
    return out


def narrowed(values: Array, dtype: str) -> Array | None:
    """Return values rounded to the element type ``dtype``; None unless a cast back gives every bit of them."""
    coarse = fitted(values, len(values), dtype)
    back = fitted(coarse, len(coarse), element_type(values.dtype).name)
    word = f"u{values.dtype.itemsize}"
    return coarse if np.array_equal(back.view(word), values.view(word)) else None


def paired_chunks(
    base: Tensor, tuned: Tensor, matrix: tuple[int, int], chunk_rows: int, dtype: str | None
) -> Iterator[tuple[Array, Array]]:
    """Yield rows of the base, fitted to those of the fine-tune, and these; digests of both are checked at the end."""
    cols = matrix[1]
    olds = chunks(base, (rows_of(base.shape, cols), cols), chunk_rows)
    for new in chunks(tuned, matrix, chunk_rows):
        old = next(olds, None)
        yield fitted(_none_of(new, base) if old is None else old, len(new), dtype), new
    for _ in olds:  # to the end, where digests are checked
        pass


def _none_of(rows: Array, base: Tensor) -> Array:
    return scratch((0, *rows.shape[1:]), numpy_dtype(base.dtype))
