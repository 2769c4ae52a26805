"""A constant of a program: a tensor's codec and parts, and the references to the parts' bytes in the program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from ingot.core.numeric.dtypes import DTYPES, from_file, numpy_dtype
from ingot.core.numeric.dtypes import dtype as dtype_of
from ingot.errors import CodecError
from ingot.formats.coreml.mil import Operation
from ingot.formats.coreml.types import MilType
from ingot.formats.coreml.values import Value
from ingot.formats.shared.numbers import pack_rows, unpack_rows
from ingot.model.layouts.base import Layout
from ingot.model.part import memory_part
from ingot.model.spec import PartSpec, TensorSpec
from ingot.model.tensor import Array

if TYPE_CHECKING:
    from ingot.formats.coreml.expressions import Expression

Shape = tuple[int, ...]


class LeftError(Exception):
    """The reason why operations are no tensor; readers list it. Internal to this package."""


@dataclass(frozen=True, slots=True)
class Slot:
    """The stored numbers of a part.

    Parameters
    ----------
    values : tuple of Value
        All references to them in the program: more than one only for a mask that is bound twice, none for computed
        numbers.
    type, dims : MilType, tuple of int
        Type and shape that the program declares.
    dtype : str
        Storage type of the part.
    spread : tuple of int or None
        If set, the part contains the numbers as ``dtype``, repeated to this shape: zero points, which the affine codec
        stores as floats, and one scale for several palettes. None if the part's bytes are the stored bytes.
    computed : Expression or None
        The numbers, if the program computes them from others.
    """

    values: tuple[Value, ...]
    type: MilType
    dims: Shape
    dtype: str
    spread: Shape | None = None
    computed: Expression | None = None

    @property
    def count(self) -> int:
        """Number of stored elements."""
        return prod(self.dims)

    @property
    def stored(self) -> int:
        """Number of bytes in the program or weight file."""
        if self.computed is not None:
            return self.computed.stored
        return self.type.nbytes(self.count)

    @property
    def length(self) -> int:
        """Number of bytes of the part."""
        return self.type.nbytes(self.count) if self.spread is None else prod(self.spread) * DTYPES[self.dtype].bits // 8

    def to_part(self, data: bytes) -> bytes:
        """Return the bytes of the part for stored bytes."""
        if self.spread is None:
            return data
        numbers = to_numbers(data, self.type, self.count, self.dtype).reshape(self.dims)
        return as_file(np.broadcast_to(numbers, self.spread))


@dataclass(frozen=True, slots=True)
class Site:
    """A tensor and the operations that compute it.

    ``operations`` end with the operation whose output it is; the operations before it feed nothing else. ``shared`` are
    operations that also feed something else. ``feeds`` is true if other tensors are computed from this tensor.
    """

    name: str
    shape: Shape
    dtype: str
    layout: Layout
    slots: Mapping[str, Slot]
    operations: tuple[Operation, ...] = field(repr=False)
    shared: tuple[Operation, ...] = field(default=(), repr=False)
    feeds: bool = False

    @property
    def last(self) -> Operation:
        return self.operations[-1]

    @property
    def inline(self) -> bool:
        """Whether the numbers are in the program itself, not in a weight file."""
        return self.first_offset == ("", 0)

    @property
    def first_offset(self) -> tuple[str, int]:
        """File and offset of the first blob that nothing else uses."""
        values = (value for operation in self.operations for value in operation.values)
        return min(((value.blob.file, value.blob.offset) for value in values if value.blob), default=("", 0))

    def is_fixed(self, slot: Slot) -> bool:
        """Return whether a slot's numbers must stay unchanged: they are computed, or other constants use them too."""
        values = {id(value) for operation in self.shared for value in operation.values}
        return slot.computed is not None or any(id(value) in values for value in slot.values)

    @property
    def shares(self) -> tuple[tuple[str, str, int], ...]:
        """Roles and offsets of its blobs: constants with equal values of this property are stored once."""
        shared = []
        for role, slot in self.slots.items():
            blob = slot.values[0].blob if slot.values else None
            if blob is not None:
                shared.append((role, blob.file, blob.offset))
        return tuple(sorted(shared))

    def spec(self) -> TensorSpec:
        """Return the spec of the tensor as it is stored."""
        parts = tuple(PartSpec(role, slot.dtype, slot.length) for role, slot in self.slots.items())
        return TensorSpec(self.name, self.shape, self.dtype, self.layout.codec, parts, self.layout.attributes())


def to_numbers(data: bytes, type: MilType, count: int, dtype: str) -> Array:
    """Return the numbers of a blob as an array of ``dtype``."""
    if type.dtype is None:
        return unpack_rows(data, 1, count, type.bits, signed=type.signed).reshape(-1).astype(numpy_dtype(dtype))
    return from_file(np.frombuffer(data, np.uint8), type.dtype).astype(numpy_dtype(dtype))


def as_file(array: Array) -> bytes:
    """Return an array's bytes in file order."""
    return bytes(memory_part(array, dtype_of(array.dtype).name).view())


def from_numbers(data: bytes, dtype: str, spread: Shape, type: MilType, dims: Shape, location: str) -> bytes:
    """Return a part's numbers, [spread] of ``dtype``, in the encoding of a blob of ``type`` and ``dims``.

    Raises ``CodecError`` ``coreml.zero-point``.
    """
    numbers = from_file(np.frombuffer(data, np.uint8), dtype).reshape(spread)
    first = numbers[tuple(slice(0, size) for size in dims)] if len(dims) == len(spread) else numbers.reshape(dims)
    values = first.astype(np.float64)
    is_integer = type.integer
    low, high = (-(1 << (type.bits - 1)) if type.signed else 0), (1 << (type.bits - type.signed)) - 1
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
