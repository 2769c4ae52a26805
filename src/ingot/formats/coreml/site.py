"""One constant of a program: a tensor's codec and parts, and where the program names the parts' bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

import numpy as np

from ingot.core.dtypes import DTYPES, from_file, numpy_dtype
from ingot.core.dtypes import dtype as dtype_of
from ingot.errors import CodecError
from ingot.formats.coreml.mil import Operation
from ingot.formats.coreml.types import MilType
from ingot.formats.coreml.values import Value
from ingot.formats.numbers import packed_rows, unpacked_rows
from ingot.model.layouts.base import Layout
from ingot.model.part import memory_part
from ingot.model.spec import PartSpec, TensorSpec
from ingot.model.tensor import Array

Shape = tuple[int, ...]


class LeftError(Exception):
    """No codec says what these operations say: they stay as they are. Told as a note, never to a caller."""


@dataclass(frozen=True, slots=True)
class Slot:
    """The stored numbers behind one part.

    Parameters
    ----------
    values : tuple of Value
        All places of the program that name them: more than one only for a mask that is bound twice.
    type, dims : MilType, tuple of int
        As the program declares them.
    dtype : str
        Storage type of the part.
    spread : tuple of int or None
        The part holds the numbers as ``dtype``, repeated to this shape: zero points, which the affine codec keeps as
        floats, and one scale for several palettes. None where the part's bytes are those that are stored.
    """

    values: tuple[Value, ...]
    type: MilType
    dims: Shape
    dtype: str
    spread: Shape | None = None

    @property
    def count(self) -> int:
        """Number of stored elements."""
        return prod(self.dims)

    @property
    def stored(self) -> int:
        """Bytes in the program or weight file."""
        return self.type.nbytes(self.count)

    @property
    def length(self) -> int:
        """Bytes of the part."""
        return self.stored if self.spread is None else prod(self.spread) * DTYPES[self.dtype].bits // 8

    def to_part(self, data: bytes) -> bytes:
        """Return stored bytes as the part has them."""
        if self.spread is None:
            return data
        numbers = to_numbers(data, self.type, self.count, self.dtype).reshape(self.dims)
        return as_file(np.broadcast_to(numbers, self.spread))


@dataclass(frozen=True, slots=True)
class Site:
    """One tensor and the operations that make it; ``operations`` end with the one whose output it is."""

    name: str
    shape: Shape
    dtype: str
    layout: Layout
    slots: Mapping[str, Slot]
    operations: tuple[Operation, ...] = field(repr=False)

    @property
    def last(self) -> Operation:
        return self.operations[-1]

    @property
    def first_offset(self) -> tuple[str, int]:
        """File and offset of the first of its blobs."""
        places = [
            (value.blob.file, value.blob.offset) for slot in self.slots.values() for value in slot.values if value.blob
        ]
        return min(places, default=("", 0))

    @property
    def shares(self) -> tuple[tuple[str, str, int], ...]:
        """Roles and places of its blobs: two constants with the same are stored once."""
        shared = []
        for role, slot in self.slots.items():
            blob = slot.values[0].blob
            if blob is not None:
                shared.append((role, blob.file, blob.offset))
        return tuple(sorted(shared))

    def spec(self) -> TensorSpec:
        """What a writer is told of the tensor where it is kept as it is stored."""
        parts = tuple(PartSpec(role, slot.dtype, slot.length) for role, slot in self.slots.items())
        return TensorSpec(self.name, self.shape, self.dtype, self.layout.codec, parts, self.layout.attributes())


def to_numbers(data: bytes, type: MilType, count: int, dtype: str) -> Array:
    """Return numbers as they lie in a blob as an array of ``dtype``."""
    if type.dtype is None:
        return unpacked_rows(data, 1, count, type.bits, signed=type.signed).reshape(-1).astype(numpy_dtype(dtype))
    return from_file(np.frombuffer(data, np.uint8), type.dtype).astype(numpy_dtype(dtype))


def as_file(array: Array) -> bytes:
    """Return an array's bytes as they lie in a file."""
    return bytes(memory_part(array, dtype_of(array.dtype).name).view())


def from_numbers(data: bytes, dtype: str, spread: Shape, type: MilType, dims: Shape, where: str) -> bytes:
    """Return a part's numbers, [spread] of ``dtype``, as they lie in a blob of ``type`` and ``dims``.

    Raises ``CodecError`` ``coreml.zero-point``.
    """
    numbers = from_file(np.frombuffer(data, np.uint8), dtype).reshape(spread)
    first = numbers[tuple(slice(0, size) for size in dims)] if len(dims) == len(spread) else numbers.reshape(dims)
    values = first.astype(np.float64)
    whole = type.integer
    low, high = (-(1 << (type.bits - 1)) if type.signed else 0), (1 << (type.bits - type.signed)) - 1
    same = bool((np.broadcast_to(first, spread) == numbers).all()) if len(dims) == len(spread) else True
    if not same or (whole and not bool(((values == np.rint(values)) & (values >= low) & (values <= high)).all())):
        raise CodecError(
            "coreml.zero-point",
            f"expected numbers that {type.name} of shape {list(dims)} can hold, found others; choose symmetric scales",
            where=where,
        )
    if type.dtype is None:
        return packed_rows(values.astype(np.int16).reshape(1, -1), type.bits)
    return as_file(first.astype(numpy_dtype(type.dtype)))
