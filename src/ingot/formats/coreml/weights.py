"""The weight files of a package, and the encoding of numbers in these files."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ingot.core.numeric.dtypes import dtype as dtype_of
from ingot.core.numeric.dtypes import element_count, from_file, numpy_dtype
from ingot.errors import CodecError
from ingot.formats.coreml.blob import Blob, BlobFile, check_last_byte
from ingot.formats.coreml.types import MilType
from ingot.formats.coreml.values import Value
from ingot.formats.shared.numbers import pack_rows, unpack_rows
from ingot.model.part import memory_part
from ingot.model.reading.ranges import read_bytes
from ingot.model.tensor import Array

Shape = tuple[int, ...]


class Weights:
    """The weight files of a package, opened on first use."""

    def __init__(self, open_file: Callable[[str, str], BlobFile]) -> None:
        self._open = open_file
        self.files: dict[str, BlobFile] = {}
        self._located: dict[Value, Blob] = {}

    def file(self, value: Value) -> BlobFile:
        """Return the file that contains a value's blob."""
        assert value.blob is not None
        name = value.blob.file
        if name not in self.files:
            self.files[name] = self._open(name, value.location)
        return self.files[name]

    def locate(self, value: Value) -> tuple[BlobFile, Blob]:
        """Return the location of a value's blob; raises the errors of ``BlobFile.blob``."""
        assert value.blob is not None
        type, dims = value.shaped()
        count = element_count(dims, "coreml.value", value.location)
        file = self.file(value)
        if value not in self._located:
            self._located[value] = file.blob(value.blob.offset, type, count)
        return file, self._located[value]

    def read(self, value: Value) -> bytes:
        """Return the bytes of a value's numbers, from the program or from a weight file."""
        if value.blob is None:
            return value.bytes()
        file, blob = self.locate(value)
        return read_bytes(file.source, blob.offset, blob.length)

    def check(self, value: Value) -> None:
        """Check the location of a value's numbers, and the padding bits after the last number."""
        if value.blob is not None:
            self.locate(value)
            return
        type, dims = value.shaped()
        data = value.bytes()
        spare = -element_count(dims, "coreml.value", value.location) * type.bits % 8
        if spare and data:
            check_last_byte(data[-1], spare, value.location)


def to_numbers(data: bytes, type: MilType, count: int, dtype: str) -> Array:
    """Return the numbers of a blob as an array of ``dtype``."""
    if type.dtype is None:
        return unpack_rows(data, 1, count, type.bits, signed=type.signed).reshape(-1).astype(numpy_dtype(dtype))
    return from_file(np.frombuffer(data, np.uint8), type.dtype).astype(numpy_dtype(dtype))


def as_file(array: Array) -> bytes:
    """Return an array's contents in the byte order of files."""
    return bytes(memory_part(array, dtype_of(array.dtype).name).view())


def from_numbers(data: bytes, dtype: str, spread: Shape, type: MilType, dims: Shape, location: str) -> bytes:
    """Return numbers of a part in the encoding of a blob of ``type`` and ``dims``.

    ``data`` are numbers of ``dtype`` and shape ``spread``, in which each number of the blob is repeated. Raises
    ``CodecError`` ``coreml.zero-point`` if repeated numbers differ, or if the type cannot represent one.
    """
    numbers = from_file(np.frombuffer(data, np.uint8), dtype).reshape(spread)
    first = numbers[tuple(slice(0, size) for size in dims)] if len(dims) == len(spread) else numbers.reshape(dims)
    values = first.astype(np.float64)
    is_integer = type.integer
    low = -(1 << (type.bits - 1)) if type.signed else 0
    high = (1 << (type.bits - type.signed)) - 1
    same = bool((np.broadcast_to(first, spread) == numbers).all()) if len(dims) == len(spread) else True
    if not same or (is_integer and not bool(((values == np.rint(values)) & (values >= low) & (values <= high)).all())):
        raise CodecError(
            "coreml.zero-point",
            f"expected numbers that fit {type.name} of shape {list(dims)}, found other numbers; choose symmetric "
            "scales",
            where=location,
        )
    if type.dtype is None:
        return pack_rows(values.astype(np.int16).reshape(1, -1), type.bits)
    return as_file(first.astype(numpy_dtype(type.dtype)))
