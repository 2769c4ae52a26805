"""Values that were stored in a wider type because ``.npy`` has no name for their own, as the bytes they were."""

from __future__ import annotations

import numpy as np

from ingot.core.numeric.dtypes import from_file, numpy_dtype
from ingot.core.numeric.retype import narrow
from ingot.errors import FormatError
from ingot.model.bytesource import ByteSource

_PIECE = 1 << 18


class NarrowedSource:
    """The values of an array, each as the element type that ``ingot.json`` says they had.

    Parameters
    ----------
    source, offset : where the array's values begin
    count : int
        Elements.
    stored, dtype : str
        Element types in the file (f16 or f32) and of the tensor.
    where : str

    Raises
    ------
    FormatError
        On reading, ``npydir.narrowed``: a value that the tensor's type does not hold.
    """

    mapped = False

    def __init__(self, source: ByteSource, offset: int, count: int, types: tuple[str, str], where: str) -> None:
        self._source, self._offset, self._where = source, offset, where
        self._stored, self._dtype = types
        self._wide, self._item = numpy_dtype(self._stored).itemsize, numpy_dtype(self._dtype).itemsize
        self.name, self.size = source.name, count * self._item

    def view(self, offset: int, length: int) -> memoryview:
        """Return the bytes in fresh memory."""
        out = np.empty(length, np.uint8).data
        self.readinto(offset, out)
        return out

    def readinto(self, offset: int, out: memoryview) -> None:
        """Fill ``out`` with bytes from ``offset`` on."""
        target = np.frombuffer(out, np.uint8)
        done = 0
        while done < target.size:
            first, skip = divmod(offset + done, self._item)
            count = min(_PIECE, -(-(target.size - done + skip) // self._item))
            piece = self._values(first, count)[skip : skip + target.size - done]
            target[done : done + piece.size] = piece
            done += piece.size

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
                f"expected {self._stored} values that are {self._dtype}, as ingot.json says, found others",
                where=self._where,
            )
        return values.view(np.uint8)
