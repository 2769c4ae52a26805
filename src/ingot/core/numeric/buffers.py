"""Reuse of large blocks of memory while a pipeline runs.

The system clears each new page at its first use, which takes longer than most kernels spend on the page. The allocator
returns large blocks to the system as soon as they are freed, so that later blocks consist of new pages.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import numpy as np

from ingot.core.runtime import native

Array = np.ndarray[Any, np.dtype[Any]]

MIN_POOLED = 1 << 18
"""Minimum bytes of an array from the pool; the allocator reuses the memory of smaller arrays."""
# A block may be larger than requested by this factor: all chunks of a tensor have one size, except for the last.
_SLACK = 1.25


class Pool:
    """Free blocks of memory, the oldest first; at most ``limit`` bytes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._free: list[Array] = []
        self._out: dict[int, tuple[weakref.ref[Any], Array]] = {}
        # The garbage collector may return a block while the same thread is in ``take``.
        self._lock = threading.RLock()

    def take(self, nbytes: int) -> Array:
        """Return writable bytes; when the last array over them is collected, the block is free again."""
        with self._lock:
            fit = min(
                (item for item in self._free if nbytes <= item.nbytes <= nbytes * _SLACK),
                key=lambda item: item.nbytes,
                default=None,
            )
            if fit is not None:
                self._free = [item for item in self._free if item is not fit]
        block = np.empty(nbytes, np.uint8) if fit is None else fit
        # Every view keeps this array alive, because the base of this array is no array.
        root = np.frombuffer(block.data, np.uint8)
        key = id(root)
        reference = weakref.ref(root, lambda _: self._give(key))
        with self._lock:
            self._out[key] = (reference, block)
        return root[:nbytes]

    def close(self) -> None:
        """Release all free blocks, and the used ones as soon as they are returned."""
        with self._lock:
            self.limit = 0
            self._free.clear()

    @property
    def free(self) -> int:
        """The number of bytes of all free blocks."""
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
    """During this context, ``scratch`` takes memory from a pool that keeps at most ``limit`` free bytes."""
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
    """Return an uninitialized array; while a pipeline runs, in reused memory."""
    element_type = np.dtype(dtype)
    nbytes = prod(shape) * element_type.itemsize
    pool = _open[-1] if _open and nbytes >= MIN_POOLED else None
    if pool is None:
        return np.empty(shape, element_type)
    array: Array = pool.take(nbytes).view(element_type).reshape(shape)
    return array


HUGE_PAGE = 1 << 21
"""Bytes of a huge page, which Linux uses on request for aligned blocks of this size."""


_MIN_ALIGNED = 1 << 25  # for arrays of at least this size, aligning to huge pages wastes little memory
_ALIGNED: weakref.WeakValueDictionary[int, Array] = weakref.WeakValueDictionary()


def fresh(shape: tuple[int, ...], dtype: Any) -> Array:
    """Return an uninitialized array; a large one begins at a huge page."""
    element_type = np.dtype(dtype)
    nbytes = prod(shape) * element_type.itemsize
    if nbytes < _MIN_ALIGNED:
        return np.empty(shape, element_type)
    block = np.empty(nbytes + HUGE_PAGE, np.uint8)  # pages that are never used take no memory
    start = -block.ctypes.data % HUGE_PAGE
    array: Array = block[start : start + nbytes].view(element_type).reshape(shape)
    _ALIGNED[id(array)] = array
    return array


def owns_memory(array: Array) -> bool:
    """Return whether ``array`` is writable and the owner of its memory, as created by NumPy or ``fresh``."""
    return bool(array.flags.writeable) and (bool(array.flags.owndata) or _ALIGNED.get(id(array)) is array)


def prefault(array: Array, nbytes: int) -> None:
    """Have the system clear the huge pages of the first ``nbytes`` of a new array (C order), before it is written.

    The function writes the last byte of each page: then Linux clears the page from its beginning, in half the time.
    """
    flat = array.reshape(-1).view(np.uint8)[:nbytes]
    flat[-(flat.ctypes.data + 1) % HUGE_PAGE :: HUGE_PAGE] = 0


def transposed(matrix: Array) -> Array:
    """Return the transpose of a matrix in C order; elements have 1, 2 or 4 bytes."""
    result = np.empty(matrix.shape[::-1], matrix.dtype)
    transpose_into(matrix, result, 0)
    return result


def transpose_into(matrix: Array, out: Array, column: int) -> None:
    """Write the rows of ``matrix`` [rows, cols] as columns of ``out`` [cols, columns], from ``column`` on.

    Both are in C order and have the same element type, of 1, 2 or 4 bytes.
    """
    itemsize = matrix.dtype.itemsize
    rows, cols = matrix.shape
    stride = out.strides[0]
    source, target = (np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in (matrix, out))
    if itemsize == 4:
        native.kernels.words_turn(source, 0, 4 * cols, rows, cols, target, 4 * column, stride)
    else:
        native.kernels.short_turn(source, itemsize, rows, cols, target, itemsize * column, stride)
