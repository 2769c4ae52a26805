"""Read an array that was stored in a wider element type, because ``.npy`` lacks the tensor's type, as bytes of that
type."""

from __future__ import annotations

import numpy as np

from ingot.core.numeric.dtypes import from_file, numpy_dtype
from ingot.core.numeric.retype import narrow
from ingot.errors import FormatError
from ingot.model.bytesource import ByteSource

_CHUNK = 1 << 18


class NarrowedSource:
    """Byte source of an array's values, each converted to the element type that ``ingot.json`` declares.

    Parameters
    ----------
    source : ByteSource
        The array file.
    offset : int
        Byte offset of the values in the file.
    count : int
        Number of elements.
    types : tuple of str
        Element type in the file (f16 or f32) and element type of the tensor.
    location : str
        File name for error messages.

    Raises
    ------
    FormatError
        When bytes are read: ``npydir.narrowed`` for a value that the tensor's type cannot represent.
    """

    mapped = False

    def __init__(self, source: ByteSource, offset: int, count: int, types: tuple[str, str], location: str) -> None:
        self._source, self._offset, self._location = source, offset, location
        self._stored, self._dtype = types
        self._wide, self._item = numpy_dtype(self._stored).itemsize, numpy_dtype(self._dtype).itemsize
        self.name, self.size = source.name, count * self._item

    def view(self, offset: int, length: int) -> memoryview:
        """Return a copy of the bytes."""
        out = np.empty(length, np.uint8).data
        self.readinto(offset, out)
        return out

    def readinto(self, offset: int, out: memoryview) -> None:
        """Fill ``out`` with the bytes that start at ``offset``."""
        target = np.frombuffer(out, np.uint8)
        done = 0
        while done < target.size:
            first, skip = divmod(offset + done, self._item)
            count = min(_CHUNK, -(-(target.size - done + skip) // self._item))
            chunk = self._values(first, count)[skip : skip + target.size - done]
            target[done : done + chunk.size] = chunk
            done += chunk.size

    def changed(self) -> bool:
        return self._source.changed()

    def close(self) -> None:
        self._source.close()

    def _values(self, first: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        raw = np.empty(count * self._wide, np.uint8)
        self._source.readinto(self._offset + first * self._wide, raw.data)
        values = narrow(from_file(raw, self._stored), self._dtype)
        if values is None:
            raise FormatError(
                "npydir.narrowed",
                f"expected {self._stored} values that {self._dtype} can represent, as ingot.json declares, found "
                "others",
                where=self._location,
            )
        return values.view(np.uint8)
