"""Large blocks of memory that are used again while a pipeline runs.

The system clears every fresh page when it is first touched, which costs more than most kernels take for it; the
allocator gives large blocks back as soon as they are freed.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import numpy as np

from ingot.core import native

Array = np.ndarray[Any, np.dtype[Any]]

LEAST = 1 << 18
"""Smaller arrays are left to the allocator, which keeps them at hand."""
# A block may be larger than what is asked for by so much: chunks of one tensor are of one size, but for the last.
_SLACK = 1.25


class Pool:
    """Blocks that nobody uses any more, the oldest first; at most ``limit`` bytes of them."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._free: list[Array] = []
        self._out: dict[int, tuple[weakref.ref[Any], Array]] = {}
        # Arrays may die anywhere, so that a block may come back while its own thread takes another.
        self._lock = threading.RLock()

    def take(self, nbytes: int) -> Array:
        """Return writable bytes; when the last array over them is gone, they are free again."""
        with self._lock:
            fit = min(
                (item for item in self._free if nbytes <= item.nbytes <= nbytes * _SLACK),
                key=lambda item: item.nbytes,
                default=None,
            )
            if fit is not None:
                self._free = [item for item in self._free if item is not fit]
        block = np.empty(nbytes, np.uint8) if fit is None else fit
        # Views of views keep the outermost array alive, whose base is no array: this one.
        root = np.frombuffer(block.data, np.uint8)
        key = id(root)
        reference = weakref.ref(root, lambda _: self._give(key))
        with self._lock:
            self._out[key] = (reference, block)
        return root[:nbytes]

    def close(self) -> None:
        """Let go of all free blocks, and of others when they come back."""
        with self._lock:
            self.limit = 0
            self._free.clear()

    @property
    def free(self) -> int:
        """Bytes that are kept and not used."""
        with self._lock:
            return sum(block.nbytes for block in self._free)

    def _give(self, key: int) -> None:
        with self._lock:
            _, block = self._out.pop(key)
            if block.nbytes > self.limit:
                return
            self._free.append(block)
            while self.free > self.limit:
                self._free.pop(0)


_open: list[Pool] = []


@contextmanager
def recycling(limit: int) -> Iterator[Pool]:
    """While this block runs, ``scratch`` takes memory from a pool that keeps at most ``limit`` unused bytes."""
    pool = Pool(limit)
    if limit:
        _open.append(pool)
    try:
        yield pool
    finally:
        if limit:
            _open.remove(pool)
        pool.close()


def scratch(shape: tuple[int, ...], dtype: Any) -> Array:
    """Return an array as ``numpy.empty`` does, where a pipeline runs in memory that was used before."""
    kind = np.dtype(dtype)
    nbytes = prod(shape) * kind.itemsize
    pool = _open[-1] if _open and nbytes >= LEAST else None
    if pool is None:
        return np.empty(shape, kind)
    array: Array = pool.take(nbytes).view(kind).reshape(shape)
    return array


HUGE = 1 << 21
"""Bytes of a page of the larger kind, which Linux gives where it is asked for and a block holds all of it."""


_ROOMY = 1 << 25  # arrays from here on may take part of such a page more than they need
_FIRST: weakref.WeakValueDictionary[int, Array] = weakref.WeakValueDictionary()


def fresh(shape: tuple[int, ...], dtype: Any) -> Array:
    """Return an array as ``numpy.empty`` does; a large one begins where a large page does, so that it has no others."""
    kind = np.dtype(dtype)
    nbytes = prod(shape) * kind.itemsize
    if nbytes < _ROOMY:
        return np.empty(shape, kind)
    block = np.empty(nbytes + HUGE, np.uint8)  # what is never touched takes no memory
    start = -block.ctypes.data % HUGE
    array: Array = block[start : start + nbytes].view(kind).reshape(shape)
    _FIRST[id(array)] = array
    return array


def is_own(array: Array) -> bool:
    """Whether ``array`` may be written to and is what its memory belongs to, as NumPy or ``fresh`` knows."""
    return bool(array.flags.writeable) and (bool(array.flags.owndata) or _FIRST.get(id(array)) is array)


def enter(array: Array, nbytes: int) -> None:
    """Have the system clear the large pages of the first ``nbytes`` of an array (C order), before they are written.

    Nothing was written there yet. A page whose last byte is touched first is cleared from its beginning on, in half the
    time that it takes from its end.
    """
    flat = array.reshape(-1).view(np.uint8)[:nbytes]
    flat[-(flat.ctypes.data + 1) % HUGE :: HUGE] = 0


def transposed(matrix: Array) -> Array:
    """Return a matrix of elements of 1, 2 or 4 bytes with rows and columns in each other's place, in C order."""
    found = np.empty(matrix.shape[::-1], matrix.dtype)
    turn_into(matrix, found, 0)
    return found


def turn_into(matrix: Array, out: Array, column: int) -> None:
    """Write the rows of a matrix as columns of ``out`` (C order, as many rows as ``matrix`` has columns, of its type),
    from ``column`` on. Elements have 1, 2 or 4 bytes.
    """
    each, (rows, cols), width = matrix.dtype.itemsize, matrix.shape, out.strides[0]
    given, target = (np.ascontiguousarray(one).reshape(-1).view(np.uint8) for one in (matrix, out))
    if each == 4:
        native.kernels.words_turn(given, 0, 4 * cols, rows, cols, target, 4 * column, width)
    else:
        native.kernels.short_turn(given, each, rows, cols, target, each * column, width)
