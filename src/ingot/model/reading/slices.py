"""Pieces of a tensor: ``tensor[rows, cols]`` decodes the run of rows that is asked for, and reads little more.

A tensor lies in row-major order, so what an index selects lies in one run of rows. A codec's sequential reader decodes
it and passes over what comes before: by arithmetic where it can tell where a row's bytes lie (``Skipping``), by
decoding otherwise.
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

_PIECE = 1 << 20  # elements that are decoded at a time to pass over them


class Reader(Protocol):
    """What a piece needs of a codec's reader."""

    def read_into(self, out: Array) -> None:
        """Decode the next ``len(out)`` rows."""
        ...


@runtime_checkable
class Skipping(Protocol):
    """A reader that can pass over rows without reading them."""

    def skip(self, count: int) -> None:
        """Pass over the next ``count`` elements: whole rows, or any number where the codec is elementwise."""
        ...


@dataclass(frozen=True, slots=True)
class RunLayout:
    """Where runs of elements lie in a tensor's parts.

    Parameters
    ----------
    elements : int
        The fewest elements, in row-major order from the first on, that take whole bytes of every part.
    nbytes : mapping of role to int
        The bytes that so many take of each part; 0 for one that belongs to all elements alike.
    """

    elements: int
    nbytes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Piece:
    """What an index selects of a tensor.

    Parameters
    ----------
    start : int
        Elements before the run, in row-major order.
    shape : tuple of int
        Of the run: as many dimensions as the tensor.
    inner : tuple of int and slice
        NumPy's index of the selection in the run.
    """

    start: int
    shape: tuple[int, ...]
    inner: tuple[Key, ...]


def piece_of(shape: tuple[int, ...], index: Index, *, elementwise: bool) -> Piece:
    """Return the run that an index of integers, slices and at most one ellipsis lies in.

    Parameters
    ----------
    shape : tuple of int
    index
        As NumPy's basic indexing, without new axes.
    elementwise : bool
        Whether a run may begin and end within a row.

    Raises
    ------
    UsageError
        ``tensor.index``: another kind of index, more of them than dimensions, an integer out of range.
    """
    keys = _complete(shape, index)
    picked = [_range(size, key) for size, key in zip(shape, keys, strict=True)]
    run = [(0, size) for size in shape]
    for axis in range(len(shape) if elementwise else len(shape) - 1):
        run[axis] = _bounds(picked[axis])
        if run[axis][1] - run[axis][0] != 1:  # what follows a range lies in it whole
            break
    start = sum(first * prod(shape[axis + 1 :]) for axis, (first, _) in enumerate(run))
    inner = tuple(
        spots[0] - first if isinstance(key, int | np.integer) else _slice(spots, first)
        for key, spots, (first, _) in zip(keys, picked, run, strict=True)
    )
    return Piece(start, tuple(stop - first for first, stop in run), inner)


def read_piece(reader: Reader, piece: Piece, shape: tuple[int, ...], dtype: str, *, elementwise: bool) -> Array:
    """Decode a piece of a tensor of ``shape`` with a fresh reader of it."""
    run = np.empty(piece.shape, numpy_dtype(dtype))
    if run.size:
        cols = 1 if elementwise or not shape else shape[-1]
        pass_over(reader, piece.start, cols, run.dtype)
        reader.read_into(run.reshape(-1, cols))
    values: Array = run[piece.inner]
    return values


def pass_over(reader: Reader, count: int, cols: int, dtype: np.dtype[Any]) -> None:
    """Leave out the next ``count`` elements, rows of ``cols``: by ``skip`` where the reader has it, else decoded."""
    if not count:
        return
    if isinstance(reader, Skipping):
        reader.skip(count)
        return
    step = max(1, _PIECE // cols) * cols
    scratch = np.empty((min(step, count) // cols, cols), dtype)
    for done in range(0, count, step):
        reader.read_into(scratch[: min(step, count - done) // cols])


def _complete(shape: tuple[int, ...], index: Index) -> Sequence[Key]:
    """Return one integer or slice per dimension."""
    given = index if isinstance(index, tuple) else (index,)
    keys: list[Key] = [key for key in given if isinstance(key, int | slice | np.integer) and not isinstance(key, bool)]
    dots = sum(key is Ellipsis for key in given)
    if len(keys) + dots != len(given) or dots > 1 or len(keys) > len(shape):
        raise UsageError(
            f"expected at most {len(shape)} integers and slices for shape {list(shape)}, found {str(index)[:80]}",
            rule="tensor.index",
        )
    position = next((position for position, key in enumerate(given) if key is Ellipsis), len(keys))
    return [*keys[:position], *[slice(None)] * (len(shape) - len(keys)), *keys[position:]]


def _range(size: int, key: Key) -> range:
    if isinstance(key, slice):
        return range(size)[key]
    if not -size <= key < size:
        raise UsageError(f"expected an index from {-size} to {size - 1}, found {key}", rule="tensor.index")
    return range(key % size, key % size + 1)


def _bounds(picked: range) -> tuple[int, int]:
    """Return the first of the numbers, and what follows the last; without a walk over all of them."""
    return (min(picked[0], picked[-1]), max(picked[0], picked[-1]) + 1) if picked else (0, 0)


def _slice(picked: range, first: int) -> slice:
    """Return the slice that takes ``picked`` of what begins at ``first``."""
    if not picked:
        return slice(0, 0)
    stop = picked[-1] - first + (1 if picked.step > 0 else -1)
    return slice(picked[0] - first, None if stop < 0 else stop, picked.step)
