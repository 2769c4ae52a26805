"""Arrays of element types that the document does not list but ``deltatensors.read_wdelta`` reads with ``numpy.dtype``.

A part has the type of its codec, or a wider one. Arrays of any other type are converted when they are read, with
NumPy's conversion, which ``deltatensors.decompress`` uses.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from ingot.core.numeric.dtypes import little_endian, numpy_dtype
from ingot.model.bytesource import ByteSource

LONGEST = 16
"""Maximum length of the name of an element type."""

Dtype = np.dtype[Any]
_SPELLING = re.compile(r"(?:[<>=|]?[fiu][1248]|float(?:16|32|64)|u?int(?:8|16|32|64)|half|single|double|bfloat16)\Z")
_CHUNK = 1 << 16
_INDICES = ("indices", "outlier_idx")
_CODES = ("packed_signs", "packed")
_SINGLE = ("scale", "zero_point")


def dtype_of(spelling: str) -> Dtype | None:
    """Return the NumPy type for the name of a numeric type; None for any other text."""
    if _SPELLING.match(spelling) is None:
        return None
    try:
        return numpy_dtype("bf16") if spelling == "bfloat16" else np.dtype(spelling)
    except TypeError:  # such as "f1"
        return None


def part_dtype(field: str, stored: Dtype) -> str | None:
    """Return the type of the part for the array of ``field``; None if this array must not have the type ``stored``."""
    if field in _CODES:
        return "u8" if stored == np.uint8 else None
    if field in _INDICES:
        return "i64" if stored.kind in "iu" else None
    return "f64" if field in _SINGLE and stored == np.float64 else "f32"


class ConvertedSource:
    """An array of a file, converted to the type of its part.

    Parameters
    ----------
    source : ByteSource
        The file, which the caller closes.
    offset, count : int
        Offset of the array, and number of its elements.
    stored : dtype
    dtype : str
        Type of the part.
    through : str or None
        A type to which values are rounded first.
    """

    mapped = False

    def __init__(
        self, source: ByteSource, offset: int, count: int, stored: Dtype, dtype: str, through: str | None = None
    ) -> None:
        self.name = source.name
        self._source = source
        self._offset = offset
        self._stored = stored
        self._target = little_endian(dtype)
        self._through = None if through is None else numpy_dtype(through)
        self.size = count * self._target.itemsize

    def view(self, offset: int, length: int) -> memoryview:
        """Return converted bytes in newly allocated memory."""
        out = np.empty(length, np.uint8)
        self.readinto(offset, out.data)
        return out.data

    def readinto(self, offset: int, out: memoryview) -> None:
        """Fill ``out`` with the converted bytes from ``offset`` on."""
        item = self._target.itemsize
        target = np.frombuffer(out, np.uint8)
        filled = 0
        while filled < target.size:
            first, skip = divmod(offset + filled, item)
            count = min(_CHUNK, -(-(target.size - filled + skip) // item))
            values = self._values(first, count).view(np.uint8)[skip:]
            size = min(values.size, target.size - filled)
            target[filled : filled + size] = values[:size]
            filled += size

    def changed(self) -> bool:
        return self._source.changed()

    def close(self) -> None:
        pass

    def _values(self, first: int, count: int) -> np.ndarray[Any, Any]:
        raw = np.empty(count * self._stored.itemsize, np.uint8)
        self._source.readinto(self._offset + first * self._stored.itemsize, raw.data)
        values = raw.view(self._stored)
        with np.errstate(all="ignore"):
            if self._through is not None:
                values = values.astype(np.float32).astype(self._through)
            return values.astype(self._target)
