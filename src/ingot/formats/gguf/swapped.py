"""Big-endian files: parts are always little-endian, so that bytes are swapped when they are read."""

from __future__ import annotations

import numpy as np

from ingot.core.numeric.dtypes import STORAGE_DTYPES
from ingot.model.bytesource import ByteSource
from ingot.model.layouts.ggml import TYPES
from ingot.model.tensor import Array

_MAX_RUNS = 1 << 16  # elements or blocks that are swapped at a time


def order_of(type: str) -> Array:
    """Return for each byte of an element or block of this type its index in a big-endian file."""
    if type in TYPES:
        order = np.arange(TYPES[type].nbytes)
        for offset, size in TYPES[type].wide:
            order[offset : offset + size] = order[offset : offset + size][::-1]
        return order
    return np.arange(STORAGE_DTYPES[type].bits // 8)[::-1]


class SwappedSource:
    """The bytes of one tensor in little-endian order, read from a big-endian source that the caller closes."""

    mapped = False

    def __init__(self, source: ByteSource, offset: int, size: int, type: str) -> None:
        self._source, self._offset, self._order = source, offset, order_of(type)
        self.name, self.size = source.name, size

    def view(self, offset: int, length: int) -> memoryview:
        """Return a fresh copy of a range."""
        if offset < 0 or length < 0 or offset + length > self.size:
            return self._source.view(self._source.size + 1, length)  # raises the error for a range outside
        out = np.empty(length, np.uint8).data
        self.readinto(offset, out)
        return out

    def readinto(self, offset: int, out: memoryview) -> None:
        """Fill ``out``, in complete elements or blocks."""
        run = len(self._order)
        target = np.frombuffer(out, np.uint8)
        done = 0
        while done < target.size:
            first, within = divmod(offset + done, run)
            runs = min(-(-(within + target.size - done) // run), _MAX_RUNS)
            raw = np.empty((runs, run), np.uint8)
            self._source.readinto(self._offset + first * run, raw.reshape(-1).data)
            swapped = raw[:, self._order].reshape(-1)[within : within + target.size - done]
            target[done : done + swapped.size] = swapped
            done += swapped.size

    def changed(self) -> bool:
        return self._source.changed()

    def close(self) -> None:
        """Do nothing: the source belongs to the file."""
