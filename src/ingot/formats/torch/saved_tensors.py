"""Tensors in archives of ``torch.save``, located from the pickle as plain data: types, shapes and byte ranges.

The layout is that of ``torch.serialization``: a zip archive without compression, ``data.pkl`` with the names, and a
file ``data/KEY`` for each storage. Only the pickle is loaded; torch is not needed.
"""

from __future__ import annotations

import io
import zipfile
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingot.core.files.archive import ArchiveFile
from ingot.core.numeric.dtypes import DType
from ingot.core.numeric.dtypes import dtype as resolve_dtype
from ingot.errors import FormatError, UnsupportedError
from ingot.formats.torch.inert_pickle import MAX_PICKLE, Name, Record, Reference, load
from ingot.model.bytesource import ByteSource
from ingot.model.reading.ranges import read_bytes

_REBUILD = ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor")
_REBUILD_UNTYPED = "torch._utils._rebuild_tensor_v3"  # types without a storage class, such as 8-bit floats
_PARAMETERS = ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state")
_STORAGES = {
    "DoubleStorage": "f64",
    "FloatStorage": "f32",
    "HalfStorage": "f16",
    "BFloat16Storage": "bf16",
    "LongStorage": "i64",
    "IntStorage": "i32",
    "ShortStorage": "i16",
    "CharStorage": "i8",
    "ByteStorage": "u8",
    "BoolStorage": "bool",
}
_LOCAL_HEADER = 30
_MAX_AXES = 64


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A dense tensor in a file: its type, its shape, and the storage that contains its elements.

    ``start`` is the storage's offset in ``source`` in bytes. ``first`` is the index of the first element in the
    storage, and ``stride`` is the distance of neighbours along each axis, in elements.
    """

    dtype: DType
    shape: tuple[int, ...]
    source: ByteSource
    start: int
    first: int
    stride: tuple[int, ...]

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements are stored in row-major order without gaps."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size > 1 and stride != expected:
                return False
            expected *= max(size, 1)
        return True

    @property
    def itemsize(self) -> int:
        """The size of an element in bytes; no type of torch has elements smaller than a byte."""
        return self.dtype.bits // 8

    def read_rows(self, first: int, count: int) -> NDArray[np.uint8]:
        """Return ``count`` rows of the first axis as bytes, [count, ``*shape[1:]``, itemsize], from the row ``first``
        on.

        A tensor without axes has one row.
        """
        shape = self.shape or (1,)
        itemsize = self.itemsize
        row_shape = shape[1:]
        if self.is_contiguous:
            row_bytes = prod(row_shape) * itemsize
            offset = self.start + self.first * itemsize + first * row_bytes
            data = read_bytes(self.source, offset, count * row_bytes)
            return np.frombuffer(data, np.uint8).reshape(count, *row_shape, itemsize)
        extent = sum((size - 1) * stride for size, stride in zip(shape, self.stride, strict=True)) + 1
        data = read_bytes(self.source, self.start + self.first * itemsize, extent * itemsize)
        strides = tuple(step * itemsize for step in self.stride)
        elements = np.frombuffer(data, np.uint8)
        view = np.lib.stride_tricks.as_strided(elements, (*shape, itemsize), (*strides, 1), writeable=False)
        return np.ascontiguousarray(view[first : first + count])


class SavedFile:
    """An archive of ``torch.save`` in a range of bytes of a source.

    ``content`` is the pickle's content as plain data. ``pickle`` is the pickle itself, for fingerprints.

    Raises
    ------
    FormatError
        ``torchfile.zip``, ``torchfile.pickle-size``, ``torchfile.pickle``.
    """

    def __init__(self, source: ByteSource, location: str, start: int = 0, length: int | None = None) -> None:
        self._source = source
        self._location = location
        self._start = start
        self._length = source.size - start if length is None else length
        self._entries: dict[str, zipfile.ZipInfo] = {}
        self._folder = ""
        self.pickle = self._read_pickle()
        self.content = load(self.pickle, location)

    def tensor(self, value: Any, name: str) -> SavedTensor | None:
        """Return the dense tensor that a value of ``content`` describes; None if it describes no tensor.

        Raises
        ------
        UnsupportedError
            ``torchfile.tensor``: an element type that Ingot does not support.
        FormatError
            ``torchfile.damaged``: shape, strides and storage contradict each other.
        """
        while isinstance(value, Record) and value.name in _PARAMETERS and value.args:
            value = value.args[0]
        if not isinstance(value, Record) or value.name not in (*_REBUILD, _REBUILD_UNTYPED) or len(value.args) < 4:
            return None
        location = f"{self._location}: {name[:200]}"
        row = None
        if value.name == _REBUILD_UNTYPED:
            row = type_of(value.args[6] if len(value.args) > 6 else "", location)
        reference, first, shape, stride = value.args[:4]
        shape = _sizes(shape, location)
        stride = _sizes(stride, location)
        row, start, count = self._storage(reference, row, location)
        if type(first) is not int or first < 0 or len(shape) != len(stride):
            raise FormatError("torchfile.damaged", "expected offset, shape and strides of a tensor", where=location)
        last = first + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        if prod(shape) and last >= count:
            raise FormatError(
                "torchfile.damaged", f"expected {last + 1} elements in the storage, found {count}", where=location
            )
        if prod(shape) > count:
            raise UnsupportedError(
                f"expected stored elements, found {list(shape)} repeated from {count}",
                rule="torchfile.tensor",
                where=location,
            )
        return SavedTensor(row, shape, self._source, start, first, stride)

    def _storage(self, reference: Any, untyped: DType | None, location: str) -> tuple[DType, int, int]:
        """Return the element type of a storage, its offset in the source in bytes, and its number of elements.

        An untyped storage declares its size in bytes; ``untyped`` is the type of its elements.
        """
        parts = reference.id if isinstance(reference, Reference) else None
        if not (isinstance(parts, tuple) and len(parts) >= 5 and parts[0] == "storage" and isinstance(parts[1], Name)):
            raise FormatError("torchfile.damaged", "expected a reference to a storage", where=location)
        type_name = parts[1].text.removeprefix("torch.").removeprefix("storage.")
        key = parts[2]
        count = parts[4]
        if type(count) is not int or count < 0:
            raise FormatError("torchfile.damaged", "expected the size of a storage", where=location)
        if untyped is None and type_name not in _STORAGES:
            raise UnsupportedError(
                f"expected an element type that Ingot supports, found {type_name[:80]}",
                rule="torchfile.tensor",
                where=location,
            )
        entry = self._entries.get(f"{self._folder}data/{key}")
        row = resolve_dtype(_STORAGES[type_name]) if untyped is None else untyped
        nbytes = count * (row.bits // 8 if untyped is None else 1)
        if entry is None or entry.file_size < nbytes:
            actual = "none" if entry is None else f"{entry.file_size}"
            raise FormatError(
                "torchfile.damaged", f"expected {nbytes} bytes of a storage, found {actual}", where=location
            )
        return row, self._data_start(entry), nbytes // (row.bits // 8)

    def _data_start(self, entry: zipfile.ZipInfo) -> int:
        """Return the offset in the source of an entry's data, which follows the entry's local header."""
        position = self._start + entry.header_offset
        header = read_bytes(self._source, position, _LOCAL_HEADER)
        sizes = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        start = position + _LOCAL_HEADER + sizes
        if header[:4] != b"PK\x03\x04" or start + entry.file_size > self._start + self._length:
            raise FormatError("torchfile.zip", "expected the data of an entry inside the archive", where=self._location)
        return start

    def _read_pickle(self) -> bytes:
        source = self._source
        if self._length < 22 or self._start < 0 or self._start + self._length > source.size:
            raise FormatError(
                "torchfile.zip",
                f"expected an archive of {self._length} bytes at {self._start}, found {source.size} in the file; "
                "was the copy cut off?",
                where=self._location,
            )

        def read_at(offset: int, out: memoryview) -> None:
            source.readinto(self._start + offset, out)

        try:
            with zipfile.ZipFile(io.BufferedReader(ArchiveFile(read_at, self._length))) as archive:
                self._entries = {entry.filename: entry for entry in archive.infolist()}
                name = next((name for name in self._entries if name.rpartition("/")[2] == "data.pkl"), None)
                if name is None or any(entry.compress_type for entry in self._entries.values()):
                    raise FormatError(
                        "torchfile.zip",
                        "expected the uncompressed entries that torch.save writes, data.pkl among them",
                        where=self._location,
                    )
                self._folder = name.removesuffix("data.pkl")
                order = self._entries.get(f"{self._folder}byteorder")
                if order is not None and archive.read(order)[:16] != b"little":
                    raise UnsupportedError(
                        "expected little-endian elements, found others", rule="torchfile.tensor", where=self._location
                    )
                if self._entries[name].file_size > MAX_PICKLE:
                    raise FormatError(
                        "torchfile.pickle-size",
                        f"expected at most {MAX_PICKLE} bytes of names and shapes, found more",
                        where=self._location,
                    )
                return archive.read(name)
        except (zipfile.BadZipFile, ValueError, OSError, EOFError, NotImplementedError, RuntimeError) as error:
            raise FormatError(
                "torchfile.zip", f"expected an archive of torch.save: {error}", where=self._location
            ) from error


def type_of(value: Any, location: str) -> DType:
    """Return the element type of a name such as ``torch.float32``; raises ``UnsupportedError`` ``torchfile.tensor``."""
    name = value.text.removeprefix("torch.") if isinstance(value, Name) else str(value)
    try:
        return resolve_dtype(name)
    except UnsupportedError as error:
        raise UnsupportedError(error.message, rule="torchfile.tensor", where=location) from None


def size_of(value: Any, location: str) -> tuple[int, ...]:
    """Return the sizes of a ``torch.Size`` or of a tuple; raises ``FormatError`` ``torchfile.damaged``."""
    if isinstance(value, Record) and value.name == "torch.Size" and len(value.args) == 1:
        value = value.args[0]
    return _sizes(value, location)


def _sizes(value: Any, location: str) -> tuple[int, ...]:
    if not isinstance(value, tuple | list) or len(value) > _MAX_AXES:
        raise FormatError("torchfile.damaged", "expected a shape", where=location)
    if not all(type(size) is int and 0 <= size < 1 << 62 for size in value):
        raise FormatError("torchfile.damaged", "expected a shape of whole numbers", where=location)
    return tuple(value)
