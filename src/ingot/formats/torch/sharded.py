"""Tensors that are stored as chunks in the files of several ranks, and assembled in bands of rows on reading."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from ingot.core.numeric.dtypes import DType, element_count, require_inside
from ingot.errors import FormatError
from ingot.formats.torch.saved_tensors import SavedTensor
from ingot.model.bytesource import ByteSource, DerivedSource
from ingot.model.layouts.dense import DATA, DenseLayout
from ingot.model.part import Part
from ingot.model.tensor import Tensor

RULE = "torchfile.shards"
_MAX_CHUNKS = 1 << 14
_BAND = 8 << 20


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor's elements: its offsets and sizes along each axis.

    ``locate`` returns the saved tensor that contains the elements; it may read the header of a file.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    locate: Callable[[], SavedTensor]


def sharded_tensor(
    name: str, dtype: DType, shape: tuple[int, ...], chunks: Sequence[Chunk], files: Sequence[ByteSource], location: str
) -> Tensor:
    """Return a tensor that is assembled from chunks when it is read.

    Raises ``FormatError`` ``torchfile.shards`` if the chunks overlap, exceed the shape or leave elements out.
    """
    _require_cover(shape, chunks, location)
    nbytes = element_count(shape, RULE, location) * (dtype.bits // 8)
    source = _ShardedSource(f"{location}: data", dtype, shape, chunks, nbytes, files)
    part = Part(dtype.storage, nbytes, source, 0, type=None if dtype.is_storage else dtype.name, where=source.name)
    return Tensor(name, shape, dtype.name, DenseLayout.codec, {DATA: part})


def _require_cover(shape: tuple[int, ...], chunks: Sequence[Chunk], location: str) -> None:
    """Raise an error unless each element is in exactly one chunk."""
    if len(chunks) > _MAX_CHUNKS:
        raise FormatError(RULE, f"expected at most {_MAX_CHUNKS} chunks, found {len(chunks)}", where=location)
    total = element_count(shape, RULE, location)
    for chunk in chunks:
        if len(chunk.offsets) != len(shape) or len(chunk.sizes) != len(shape):
            raise FormatError(RULE, f"expected chunks of {len(shape)} axes, found {len(chunk.sizes)}", where=location)
        ends = (offset + size for offset, size in zip(chunk.offsets, chunk.sizes, strict=True))
        if any(end > limit for end, limit in zip(ends, shape, strict=True)):
            raise FormatError(
                RULE, f"expected chunks inside {list(shape)}, found {chunk.sizes} at {chunk.offsets}", where=location
            )
    covered = sum(prod(chunk.sizes) for chunk in chunks)
    if covered != total:
        raise FormatError(
            RULE,
            f"expected {total} elements in the chunks, found {covered}; is the file of a rank missing?",
            where=location,
        )
    if shape and total and len(chunks) > 1:
        _require_disjoint(chunks, location)


def _require_disjoint(chunks: Sequence[Chunk], location: str) -> None:
    boxes = [chunk for chunk in chunks if prod(chunk.sizes)]
    starts = np.array([chunk.offsets for chunk in boxes], np.int64)
    ends = starts + np.array([chunk.sizes for chunk in boxes], np.int64)
    for index in range(1, len(boxes)):
        overlap = (starts[:index] < ends[index]) & (ends[:index] > starts[index])
        if overlap.all(axis=1).any():
            raise FormatError(RULE, f"two chunks contain the elements at {boxes[index].offsets}", where=location)


class _ShardedSource(DerivedSource):
    """The bytes of a tensor in row-major order, assembled from its chunks on reading."""

    mapped = False

    def __init__(
        self,
        name: str,
        dtype: DType,
        shape: tuple[int, ...],
        chunks: Sequence[Chunk],
        nbytes: int,
        files: Sequence[ByteSource],
    ) -> None:
        self.name = name
        self.size = nbytes
        self._dtype = dtype
        self._shape = shape or (1,)
        self._chunks = chunks
        self._files = files
        self._row_bytes = prod(self._shape[1:]) * (dtype.bits // 8)

    def working_bytes(self) -> int:
        return min(self.size, max(_BAND, self._row_bytes)) * 2

    def view(self, offset: int, length: int) -> memoryview:
        out = memoryview(bytearray(length))
        self.readinto(offset, out)
        return out

    def readinto(self, offset: int, out: memoryview) -> None:
        require_inside(offset, out.nbytes, self.size, self.name)
        out = out.cast("B")
        rows = max(1, _BAND // max(1, self._row_bytes))
        while out.nbytes:
            first, skipped = divmod(offset, self._row_bytes)
            count = min(rows, -(-(skipped + out.nbytes) // self._row_bytes))
            band = self._read_band(first, count).reshape(-1)[skipped:]
            size = min(band.size, out.nbytes)
            out[:size] = band[:size].data
            out = out[size:]
            offset += size

    def changed(self) -> bool:
        return any(file.changed() for file in self._files)

    def close(self) -> None: ...

    def _read_band(self, first: int, count: int) -> NDArray[np.uint8]:
        """Return ``count`` rows of the first axis as bytes."""
        itemsize = self._dtype.bits // 8
        band = np.empty((count, *self._shape[1:], itemsize), np.uint8)
        for chunk in self._chunks:
            offsets = chunk.offsets or (0,)
            sizes = chunk.sizes or (1,)
            start = max(first, offsets[0])
            stop = min(first + count, offsets[0] + sizes[0])
            if start >= stop or not prod(sizes):
                continue
            saved = chunk.locate()
            if saved.dtype is not self._dtype or saved.shape != chunk.sizes:
                raise FormatError(
                    RULE,
                    f"expected a chunk of {self._dtype.name} {list(chunk.sizes)}, found {saved.dtype.name} "
                    f"{list(saved.shape)}",
                    where=self.name,
                )
            box = tuple(slice(low, low + size) for low, size in zip(offsets[1:], sizes[1:], strict=True))
            band[(slice(start - first, stop - first), *box)] = saved.read_rows(start - offsets[0], stop - start)
        return band
