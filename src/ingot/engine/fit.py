"""Conversion of a base tensor for a difference: to the rows of the fine-tune and the element type of the difference.

Rows that the base lacks are zeros. Values are rounded once to nearest even, so that the result does not depend on the
machine that creates or applies a delta.
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
    """Return whether Ingot cannot compute with the values of a dense tensor.

    Its elements are smaller than a byte, or their type is unsupported.
    """
    return tensor.codec == DenseLayout.codec and (tensor.dtype not in DTYPES or DTYPES[tensor.dtype].bits < 8)


def why_incomparable(base: Tensor, tuned: Tensor) -> str | None:
    """Return the reason why no difference of two tensors can be computed, or None if one can.

    Their shapes may differ in the first dimension (rows). Their element types may differ if both are floats.
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


def differ_in_rows(first: Shape, second: Shape) -> bool:
    """Return whether two shapes differ only in their first dimension, and both tensors have elements."""
    return (
        len(first) == len(second) > 0
        and first[1:] == second[1:]
        and first[0] != second[0]
        and min(prod(first), prod(second)) > 0
    )


def rows_of(shape: Shape, cols: int) -> int:
    """Return the rows of a tensor of ``shape``, seen as a matrix of ``cols`` columns."""
    return prod(shape) // cols if cols else prod(shape[:-1])


def window(start: int, stop: int, rows: int) -> int:
    """Return how many of the rows ``start`` to ``stop`` exist in a tensor of ``rows`` rows."""
    return max(min(stop, rows) - start, 0)


def fit_rows(values: Array, rows: int, dtype: str | None) -> Array:
    """Return ``values`` with ``rows`` rows, truncated or padded with zeros, and cast to the element type ``dtype``.

    If ``dtype`` is None, the element type does not change.
    """
    target = values.dtype if dtype is None else numpy_dtype(dtype)
    if len(values) == rows and values.dtype == target:
        return values
    kept_rows = values[:rows]
    out = scratch((rows, *values.shape[1:]), target)
    if kept_rows.dtype == target:
        out[: len(kept_rows)] = kept_rows
    elif kept_rows.size:
        cast_into(kept_rows, out[: len(kept_rows)])
    out[len(kept_rows) :] = np.zeros((), target)
    return out


def cast_exactly(values: Array, dtype: str) -> Array | None:
    """Return values cast to the element type ``dtype``, or None if a cast back does not restore every bit."""
    coarse = fit_rows(values, len(values), dtype)
    back = fit_rows(coarse, len(coarse), element_type(values.dtype).name)
    word = f"u{values.dtype.itemsize}"
    return coarse if np.array_equal(back.view(word), values.view(word)) else None


def paired_chunks(
    base: Tensor, tuned: Tensor, matrix: tuple[int, int], chunk_rows: int, dtype: str | None
) -> Iterator[tuple[Array, Array]]:
    """Yield pairs of chunks: rows of the base, converted by ``fit_rows`` to ``dtype``, and rows of the fine-tune.

    ``matrix`` are the rows and columns as which the fine-tune is read. The digests of both tensors are checked at the
    end.
    """
    cols = matrix[1]
    olds = chunks(base, (rows_of(base.shape, cols), cols), chunk_rows)
    for new in chunks(tuned, matrix, chunk_rows):
        old = next(olds, None)
        yield fit_rows(_none_of(new, base) if old is None else old, len(new), dtype), new
    for _ in olds:  # the end of the iteration checks the digest
        pass


def _none_of(rows: Array, base: Tensor) -> Array:
    return scratch((0, *rows.shape[1:]), numpy_dtype(base.dtype))
