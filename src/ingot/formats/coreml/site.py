"""A constant of a program as a tensor: its codec and parts, and the references to their bytes in the program."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod

import numpy as np

from ingot.core.numeric.dtypes import DTYPES
from ingot.errors import FormatError
from ingot.formats.coreml.mil import Operation
from ingot.formats.coreml.types import MilType
from ingot.formats.coreml.values import Value
from ingot.formats.coreml.weights import Shape, Weights, as_file, to_numbers
from ingot.model.layouts.base import Layout
from ingot.model.spec import PartSpec, TensorSpec
from ingot.model.tensor import Array

_BYTES_PER_ELEMENT = 24  # values, indices and what NumPy makes on the way


class LeftError(Exception):
    """The reason why operations do not form a tensor, which the reader lists. Used only in this package."""


@dataclass(frozen=True, slots=True, eq=False)
class Expression:
    """Numbers of a program: a stored value, or the output of an operation on other expressions.

    Parameters
    ----------
    type, dims : MilType, tuple of int
        Element type and shape.
    value : Value or None
        The stored value; None for a computed value.
    operands : mapping of str to Expression
        The inputs of the operation by key.
    compute : callable or None
        Returns the values, given the values of ``operands``.
    location : str
        Location in error messages.
    level : int
        Number of operations between stored values and this expression.
    """

    type: MilType
    dims: Shape
    value: Value | None = None
    operands: Mapping[str, Expression] = field(default_factory=dict)
    compute: Callable[[Mapping[str, Array]], Array] | None = None
    location: str = ""
    level: int = 0

    @property
    def stored(self) -> int:
        """The number of stored bytes from which this expression is computed."""
        return sum(item.type.nbytes(prod(item.dims)) for item in self._parts() if item.value is not None)

    @property
    def memory(self) -> int:
        """Maximum bytes of memory for the computation."""
        return sum(_BYTES_PER_ELEMENT * prod(item.dims) for item in self._parts())

    def _parts(self) -> Iterable[Expression]:
        """Return this expression and all expressions from which it is computed, each once."""
        parts: dict[int, Expression] = {}
        waiting = [self]
        while waiting:
            item = waiting.pop()
            if id(item) not in parts:
                parts[id(item)] = item
                waiting += item.operands.values()
        return parts.values()

    def values(self, weights: Weights, computed: dict[int, Array] | None = None) -> Array:
        """Return the values; integers of less than a byte become int8 or uint8. ``computed`` caches computed values.

        Raises ``FormatError`` ``coreml.operation`` if the stored numbers contradict each other.
        """
        computed = {} if computed is None else computed
        if id(self) in computed:
            return computed[id(self)]
        if self.compute is None:
            assert self.value is not None
            result = to_numbers(weights.read(self.value), self.type, prod(self.dims), _array_dtype(self.type))
            result = result.reshape(self.dims)
        else:
            operands = {key: operand.values(weights, computed) for key, operand in self.operands.items()}
            with np.errstate(all="ignore"):
                result = self.compute(operands)
        if result.shape != self.dims:
            raise FormatError(
                "coreml.operation",
                f"expected values of shape {list(self.dims)}, found {list(result.shape)}",
                where=self.location,
            )
        computed[id(self)] = result
        return result


def _array_dtype(type: MilType) -> str:
    return type.dtype or ("i8" if type.signed else "u8")


@dataclass(frozen=True, slots=True)
class Slot:
    """The numbers in the program from which a part is read, and their conversion to the part.

    Parameters
    ----------
    values : tuple of Value
        All references to the numbers in the program: none for computed numbers, several only for a mask that is bound
        twice.
    type, dims : MilType, tuple of int
        Type and shape as declared in the program.
    dtype : str
        Storage type of the part.
    spread : tuple of int or None
        If set, the part contains the numbers as ``dtype``, repeated to this shape: zero points, which the affine codec
        stores as floats, and one scale for several palettes. If None, the part's bytes are the stored bytes.
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
        """The number of stored elements."""
        return prod(self.dims)

    @property
    def stored(self) -> int:
        """The number of bytes in the program or weight file."""
        if self.computed is not None:
            return self.computed.stored
        return self.type.nbytes(self.count)

    @property
    def length(self) -> int:
        """The number of bytes of the part."""
        return self.type.nbytes(self.count) if self.spread is None else prod(self.spread) * DTYPES[self.dtype].bits // 8

    def to_part(self, data: bytes) -> bytes:
        """Convert ``data``, the contents in the program or weight file, to the part's contents."""
        if self.spread is None:
            return data
        numbers = to_numbers(data, self.type, self.count, self.dtype).reshape(self.dims)
        return as_file(np.broadcast_to(numbers, self.spread))


@dataclass(frozen=True, slots=True)
class Site:
    """A tensor and the operations that compute it.

    The tensor is the output of the last of ``operations``; the other ``operations`` feed only this tensor. ``shared``
    are operations that feed this tensor and others. ``feeds`` is true if other tensors are computed from this one.
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
        """Whether the tensor's numbers are in the program itself, not in a weight file."""
        return self.first_offset == ("", 0)

    @property
    def first_offset(self) -> tuple[str, int]:
        """File and offset of the first blob of the tensor."""
        values = (value for operation in self.operations for value in operation.values)
        return min(((value.blob.file, value.blob.offset) for value in values if value.blob), default=("", 0))

    def is_fixed(self, slot: Slot) -> bool:
        """Return whether a slot's numbers must not change.

        Numbers must not change if the program computes them, or if other constants use them too.
        """
        values = {id(value) for operation in self.shared for value in operation.values}
        return slot.computed is not None or any(id(value) in values for value in slot.values)

    @property
    def shares(self) -> tuple[tuple[str, str, int], ...]:
        """Roles, files and offsets of the tensor's blobs; tensors with equal values of this property share blobs."""
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
