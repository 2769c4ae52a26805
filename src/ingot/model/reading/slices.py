"""Slices of tensors: ``tensor[rows, cols]`` decodes the selected run of rows and reads little more.

Tensors are stored in row-major order, so an index selects values within one run of rows. The codec's sequential reader
decodes the run. It skips earlier rows by arithmetic if it can compute the positions of rows (``SkippingReader``), else
by decoding them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import EllipsisType
from typing import Any, Protocol, runtime_checkable

import numpy as np

from ingot.core.numeric.dtypes import numpy_dtype
from ingot.errors import UsageError

Array = np.ndarray[Any, np.dtype[Any]]
Key = int | slice
Index = Key | EllipsisType | tuple[Key | EllipsisType, ...]

_SKIP_STEP = 1 << 20  # elements that are decoded at a time to pass over them


class Reader(Protocol):
    """A codec's sequential reader of rows."""

    def read_into(self, out: Array) -> None:
        """Decode the next ``len(out)`` rows into ``out``."""
        ...


@runtime_checkable
class SkippingReader(Protocol):
    """A reader that can skip rows without reading them."""

    def skip(self, count: int) -> None:
        """Skip the next ``count`` elements: full rows, or any number of elements if the codec is elementwise."""
        ...


@dataclass(frozen=True, slots=True)
class RunLayout:
    """The positions of runs of elements in a tensor's parts.

    Parameters
    ----------
    elements : int
        The smallest number of elements, in row-major order, that take whole bytes of every part.
    nbytes : mapping of role to int
        The bytes of ``elements`` elements in each part; 0 for a part that belongs to the tensor.
    """

    elements: int
    nbytes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Selection:
    """The run of elements that contains all values of an index.

    Parameters
    ----------
    start : int
        The number of elements before the run, in row-major order.
    shape : tuple of int
        The shape of the run; it has the rank of the tensor.
    inner : tuple of int and slice
        The NumPy index of the selected values in the run.
    """

    start: int
    shape: tuple[int, ...]
    inner: tuple[Key, ...]


def selection_of(shape: tuple[int, ...], index: Index, *, elementwise: bool) -> Selection:
    """Return the run that contains the values of an index of integers, slices and at most one ellipsis.

    Parameters
    ----------
    shape : tuple of int
    index
        An index of NumPy's basic indexing, without new axes.
    elementwise : bool
        Whether a run may begin and end within a row.

    Raises
    ------
    UsageError
        ``tensor.index``: another type of index, more items than dimensions, or an integer out of range.
    """
    keys = _one_key_per_axis(shape, index)
    ranges = [_range(size, key) for size, key in zip(shape, keys, strict=True)]
    run = [(0, size) for size in shape]
    for axis in range(len(shape) if elementwise else len(shape) - 1):
        run[axis] = _bounds(ranges[axis])
        if run[axis][1] - run[axis][0] != 1:  # the run contains the following dimensions in full
            break
    start = sum(first * prod(shape[axis + 1 :]) for axis, (first, _) in enumerate(run))
    inner = tuple(
        indices[0] - first if isinstance(key, int | np.integer) else _slice(indices, first)
        for key, indices, (first, _) in zip(keys, ranges, run, strict=True)
    )
    return Selection(start, tuple(stop - first for first, stop in run), inner)


def read_selection(
    reader: Reader, selection: Selection, shape: tuple[int, ...], dtype: str, *, elementwise: bool
) -> Array:
    """Return the selected values of a tensor of ``shape``, decoded by a new reader of the tensor."""
    run = np.empty(selection.shape, numpy_dtype(dtype))
    if run.size:
        cols = 1 if elementwise or not shape else shape[-1]
        skip_elements(reader, selection.start, cols, run.dtype)
        reader.read_into(run.reshape(-1, cols))
    values: Array = run[selection.inner]
    return values


def skip_elements(reader: Reader, count: int, cols: int, dtype: np.dtype[Any]) -> None:
    """Skip the next ``count`` elements in rows of ``cols``: by ``skip`` if the reader has it, else by decoding."""
    if not count:
        return
    if isinstance(reader, SkippingReader):
        reader.skip(count)
        return
    step = max(1, _SKIP_STEP // cols) * cols
    scratch = np.empty((min(step, count) // cols, cols), dtype)
    for skipped in range(0, count, step):
        reader.read_into(scratch[: min(step, count - skipped) // cols])


def _one_key_per_axis(shape: tuple[int, ...], index: Index) -> Sequence[Key]:
    """Return ``index`` as one integer or slice per dimension; an ellipsis becomes full slices."""
    items = index if isinstance(index, tuple) else (index,)
    keys: list[Key] = [key for key in items if isinstance(key, int | slice | np.integer) and not isinstance(key, bool)]
    dots = sum(key is Ellipsis for key in items)
    if len(keys) + dots != len(items) or dots > 1 or len(keys) > len(shape):
        raise UsageError(
            f"expected at most {len(shape)} integers and slices for shape {list(shape)}, found {str(index)[:80]}",
            rule="tensor.index",
        )
    position = next((position for position, key in enumerate(items) if key is Ellipsis), len(keys))
    return [*keys[:position], *[slice(None)] * (len(shape) - len(keys)), *keys[position:]]


def _range(size: int, key: Key) -> range:
    if isinstance(key, slice):
        return range(size)[key]
    if not -size <= key < size:
        raise UsageError(f"expected an index from {-size} to {size - 1}, found {key}", rule="tensor.index")
    return range(key % size, key % size + 1)


def _bounds(indices: range) -> tuple[int, int]:
    """Return the smallest index and the largest index plus 1, without iterating over the range."""
    return (min(indices[0], indices[-1]), max(indices[0], indices[-1]) + 1) if indices else (0, 0)


def _slice(indices: range, first: int) -> slice:
    """Return the slice that selects ``indices`` from a run that begins at index ``first``."""
    if not indices:
        return slice(0, 0)
    stop = indices[-1] - first + (1 if indices.step > 0 else -1)
    return slice(indices[0] - first, None if stop < 0 else stop, indices.step)
