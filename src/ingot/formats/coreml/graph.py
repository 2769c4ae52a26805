"""Queries of a program: which operation defines a name, and the numbers of a parameter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from ingot.core.numeric.dtypes import element_count, numpy_dtype
from ingot.core.parsing.wire import Node
from ingot.errors import FormatError
from ingot.formats.coreml.blob import check_last_byte
from ingot.formats.coreml.mil import Operation, Param, Program
from ingot.formats.coreml.site import Expression, LeftError, Slot
from ingot.formats.coreml.types import MilType
from ingot.formats.coreml.values import Value
from ingot.formats.coreml.weights import Shape, Weights

# maximum number of zero points to read when a package is opened, to check whether all are equal
SMALL = 1 << 16
MAX_FEEDERS = 64
"""Maximum number of constants from which one constant is computed."""


class Graph:
    """The operations of one function, by the names of their outputs.

    ``expressions`` caches the computed outputs of each operation, or the reason why they cannot be computed; see
    ``expression_of``.
    """

    def __init__(self, program: Program, function: str, weights: Weights) -> None:
        self.weights = weights
        self.expressions: dict[int, tuple[Expression, ...] | LeftError] = {}
        self._operations: dict[tuple[int, str], tuple[Operation, int]] = {}
        self._defined = program.defined[function]
        self._uses = program.uses[function]
        self._all = {
            (id(operation.block), output.name) for operation in program.active[function] for output in operation.outputs
        }

    def add(self, operation: Operation) -> None:
        """Register an operation's outputs for later operations."""
        for index, output in enumerate(operation.outputs):
            self._operations[id(operation.block), output.name] = (operation, index)

    def _find(self, operation: Operation, name: str) -> tuple[Operation, int] | None:
        """Return the earlier operation that defines a name, in the same block or an outer one, and the output's index.

        Return None if the name is defined otherwise, for example as an input of the model. Raises ``FormatError``
        ``coreml.reference`` if it is defined only later or not at all.
        """
        later = False
        block: Node | None = operation.block
        while block is not None:
            key = (id(block), name)
            if key in self._operations:
                return self._operations[key]
            later |= key in self._all
            block = block.parent
        if later or name not in self._defined:
            position = "later, or in a circle" if later else "nowhere"
            raise FormatError(
                "coreml.reference",
                f"expected {name[:200]!r} to be defined before, but it is defined {position}",
                where=operation.location,
            )
        return None

    def feeders(self, operation: Operation) -> list[Operation]:
        """Return the constants that feed an operation, directly or through others, in the program's order.

        Raises ``FormatError`` ``coreml.reference``; ``LeftError`` if there are too many.
        """
        waiting = [operation]
        feeders = dict[int, Operation]()
        while waiting:
            item = waiting.pop()
            for name in item.inputs.values():
                source = self._find(item, name) if isinstance(name, str) else None
                if source is not None and source[0].constant and id(source[0]) not in feeders:
                    feeders[id(source[0])] = source[0]
                    waiting.append(source[0])
            if len(feeders) > MAX_FEEDERS:
                raise LeftError(f"more than {MAX_FEEDERS} constants feed it")
        return sorted(feeders.values(), key=lambda item: item.node.tag)

    def exclusive(self, operation: Operation, chain: Sequence[Operation]) -> list[Operation]:
        """Return the constants of ``chain`` that feed only ``operation``, directly or through other constants."""
        chosen = list(chain)
        while True:
            counts = Counter(
                name for item in (*chosen, operation) for name in item.inputs.values() if isinstance(name, str)
            )
            fewer = [
                item
                for item in chosen
                if all(self._uses[output.name] == counts[output.name] for output in item.outputs)
            ]
            if len(fewer) == len(chosen):
                return chosen
            chosen = fewer

    def param(self, operation: Operation, key: str) -> Value | tuple[Operation, int] | None:
        """Return a parameter of ``operation``: a value, or the earlier operation that computes it and the index of its
        output.

        Returns None if the parameter is absent. The output of a ``const`` is returned as its value.

        Raises ``FormatError`` ``coreml.reference``: no earlier operation defines the name; ``LeftError``: its source is
        not constant.
        """
        value: Param = operation.inputs.get(key) or operation.attributes.get(key)
        if not isinstance(value, str):
            if key in operation.inputs and value is None:
                raise LeftError(f"{key} has several values")
            return value
        source = self._find(operation, value)
        if source is None:
            raise LeftError(f"{key} is an input of its block")
        constant = source[0].attributes.get("val") if source[0].type == "const" else None
        return constant if isinstance(constant, Value) else source

    def value(self, operation: Operation, key: str) -> Value:
        """Return a parameter that must consist of stored numbers.

        Raises ``FormatError`` ``coreml.operation`` if it is missing, ``LeftError`` if another operation computes it.
        """
        param = self.param(operation, key)
        if param is None:
            raise FormatError(
                "coreml.operation", f"expected a parameter {key!r}, but it is missing", where=operation.location
            )
        if not isinstance(param, Value):
            raise LeftError(f"{key} is the result of {param[0].type}")
        self.weights.check(param)
        return param

    def slot(self, operation: Operation, key: str, dtype: str | None = None) -> Slot:
        """Return a parameter's numbers as a slot whose part has type ``dtype``, by default the parameter's type.

        Raises the errors of ``value``.
        """
        value = self.value(operation, key)
        type, dims = value.shaped()
        return Slot((value,), type, dims, dtype or type.dtype or "u8")

    def check_last(self, slot: Slot, spare: int) -> None:
        """Raise an error if one of the last ``spare`` bits of the slot's bytes, which are padding, is set.

        Raises ``FormatError`` ``coreml.padding-bits``.
        """
        if not spare:
            return
        value = slot.values[0]
        if value.blob is None:
            last = value.bytes()[-1]
        else:
            file, blob = self.weights.locate(value)
            last = file.last_byte(blob)
        check_last_byte(last, spare, value.location)

    def integer(self, operation: Operation, key: str) -> int | None:
        """Return a parameter that is a single integer; None if it is absent."""
        if self.param(operation, key) is None:
            return None
        value = self.value(operation, key)
        type, dims = value.shaped()
        if not type.integer or type.dtype is None or element_count(dims, "coreml.value", value.location) != 1:
            raise FormatError("coreml.operation", f"expected a single integer as {key!r}", where=operation.location)
        return int.from_bytes(self.weights.read(value), "little", signed=type.signed)

    def declared_shape(self, operation: Operation) -> Shape:
        """Return the attribute ``shape`` of an operation of iOS 16; raise ``FormatError`` ``coreml.operation``."""
        value = self.value(operation, "shape")
        type, dims = value.shaped()
        expect(operation, type.name in ("uint32", "int32") and len(dims) == 1, "a shape of uint32", type.name)
        data = self.weights.read(value)
        shape = tuple(np.frombuffer(data, numpy_dtype(str(type.dtype))).tolist())
        expect(operation, all(size >= 0 for size in shape), "a shape", list(shape))
        element_count(shape, "coreml.value", operation.location)
        return shape


def expect(operation: Operation, met: bool, expected: str, actual: object) -> None:
    """Raise ``FormatError`` ``coreml.operation`` with ``expected`` and ``actual`` unless the condition ``met``
    is true.
    """
    if not met:
        raise FormatError("coreml.operation", f"expected {expected}, found {actual}", where=operation.location)


def float_type(type: MilType, description: str) -> str:
    """Return Ingot's name of a float type that codecs support; raises ``LeftError`` for any other type."""
    if type.name not in ("fp16", "fp32", "bf16"):
        raise LeftError(f"expected {description} of fp16, fp32 or bf16, found {type.name}")
    return str(type.dtype)


def is_same_blob(first: Value, second: Value) -> bool:
    """Return whether two values are the same blob."""
    if first.blob is None or second.blob is None:
        return False
    return (first.blob.file, first.blob.offset, first.dims) == (second.blob.file, second.blob.offset, second.dims)


def check_output(operation: Operation, index: int, dtype: MilType, shape: Shape) -> None:
    """Compare an operation's declared output with the type and shape that follow from its parameters."""
    expect(operation, index < len(operation.outputs), "an output", "none")
    output = operation.outputs[index]
    expect(
        operation,
        (output.code, output.dims) == (dtype.code, shape),
        f"an output of {dtype.name} {list(shape)}",
        f"type {output.code} {output.dims}",
    )
