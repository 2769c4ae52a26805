"""Pickles as plain data: no class is imported, and nothing is called.

``torch.load(weights_only=True)`` cannot replace this module. It reads a complete file at once, and refuses trainers'
classes and pickles of protocol 4, such as the metadata of torch's distributed checkpoints.

The functions here interpret the operations that ``pickletools`` lists. An object that a pickle would construct becomes
a ``Record`` with the class's name, its arguments and its state. An object that is stored outside the pickle becomes a
``Reference``.
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ingot.errors import FormatError

MAX_PICKLE = 1 << 28
"""The maximum size of a pickle in bytes."""
RULE = "torchfile.pickle"
_ORDERED_DICT = "collections.OrderedDict"


class Name(NamedTuple):
    """The module and name of a class or function, such as ``torch.float32``, which is not imported."""

    text: str


class Reference(NamedTuple):
    """A reference to an object outside the pickle; torch's files refer to the storages of tensors in this way."""

    id: Any


@dataclass(eq=False, slots=True)
class Record:
    """An object that the pickle would construct: the name of its class or function, arguments and state.

    ``items`` are the key-value pairs, and ``elements`` the values, that are added to an object after its construction.
    """

    name: str
    args: tuple[Any, ...] = ()
    state: Any = None
    items: list[tuple[Any, Any]] = field(default_factory=list)
    elements: list[Any] = field(default_factory=list)

    def get(self, key: str) -> Any:
        """Return a field of the state; None if the state has no such field."""
        return self.state.get(key) if isinstance(self.state, dict) else None


def load(data: bytes, location: str) -> Any:
    """Return the content of a pickle as dict, list, tuple, str, numbers, ``Record``, ``Name`` and ``Reference``.

    Raises ``FormatError`` ``torchfile.pickle``: an unknown operation, a damaged pickle, or more than ``MAX_PICKLE``
    bytes.
    """
    if len(data) > MAX_PICKLE:
        raise FormatError(RULE, f"expected at most {MAX_PICKLE} bytes, found {len(data)}", where=location)
    machine = _Machine()
    try:
        for operation, argument, _ in pickletools.genops(data):
            if operation.name == "STOP":
                return machine.pop()
            machine.run(operation.name, argument)
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, struct.error, OverflowError) as error:
        message = f"expected a pickle of plain data: {type(error).__name__} {error}"[:200]
        raise FormatError(RULE, message, where=location) from error
    raise FormatError(RULE, "expected the end of a pickle, found the end of the data", where=location)


class _Mark:
    """A marker on the stack, which separates the operands of a later operation from the values below."""


_MARK = _Mark()
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_SET": lambda: Record("builtins.set"),
    "MARK": lambda: _MARK,
}
_VALUES = frozenset(
    (
        *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
        *("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
        *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
    )
)
_IGNORED = frozenset(("PROTO", "FRAME"))
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _Machine:
    """The stack and the memo of a pickle."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def pop(self) -> Any:
        value = self._stack.pop()
        if value is _MARK:
            raise ValueError("a mark instead of a value")
        return value

    def run(self, operation: str, argument: Any) -> None:
        """Execute one operation."""
        stack = self._stack
        if operation in _VALUES:
            stack.append(argument)
        elif operation in _CONSTANTS:
            stack.append(_CONSTANTS[operation]())
        elif operation in _TUPLES:
            stack.append(self._take(_TUPLES[operation]))
        elif operation in ("PUT", "BINPUT", "LONG_BINPUT"):
            self._memo[argument] = self._top()
        elif operation == "MEMOIZE":
            self._memo[len(self._memo)] = self._top()
        elif operation in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(self._memo[argument])
        elif operation not in _IGNORED:
            method = getattr(self, f"_{operation.lower()}", None)
            if method is None:
                raise ValueError(f"the operation {operation}")
            method(argument)

    def _top(self) -> Any:
        if self._stack[-1] is _MARK:
            raise ValueError("a mark instead of a value")
        return self._stack[-1]

    def _take(self, count: int) -> tuple[Any, ...]:
        """Remove and return the last ``count`` values."""
        values = [self.pop() for _ in range(count)]
        return tuple(reversed(values))

    def _to_mark(self) -> list[Any]:
        """Remove and return all values after the last mark, and the mark."""
        position = len(self._stack) - 1
        while self._stack[position] is not _MARK:
            position -= 1
            if position < 0:
                raise ValueError("no mark")
        values = self._stack[position + 1 :]
        del self._stack[position:]
        return values

    def _pop(self, _: Any) -> None:
        self._stack.pop()

    def _pop_mark(self, _: Any) -> None:
        self._to_mark()

    def _dup(self, _: Any) -> None:
        self._stack.append(self._top())

    def _tuple(self, _: Any) -> None:
        self._stack.append(tuple(self._to_mark()))

    def _list(self, _: Any) -> None:
        self._stack.append(self._to_mark())

    def _frozenset(self, _: Any) -> None:
        self._stack.append(Record("builtins.frozenset", elements=self._to_mark()))

    def _dict(self, _: Any) -> None:
        self._stack.append(dict(_pairs(self._to_mark())))

    def _append(self, _: Any) -> None:
        self._extend([self.pop()])

    def _appends(self, _: Any) -> None:
        self._extend(self._to_mark())

    def _additems(self, _: Any) -> None:
        values = self._to_mark()
        self._top().elements.extend(values)

    def _extend(self, values: list[Any]) -> None:
        target = self._top()
        (target if isinstance(target, list) else target.elements).extend(values)

    def _setitem(self, _: Any) -> None:
        self._set_items(self._take(2))

    def _setitems(self, _: Any) -> None:
        self._set_items(self._to_mark())

    def _set_items(self, values: Any) -> None:
        target = self._top()
        if isinstance(target, dict):
            target.update(_pairs(values))
        else:
            target.items.extend(_pairs(values))

    def _global(self, argument: str) -> None:
        module, _, name = argument.partition(" ")
        self._stack.append(Name(f"{module}.{name}"))

    def _stack_global(self, _: Any) -> None:
        module, name = self._take(2)
        if not (isinstance(module, str) and isinstance(name, str)):
            raise TypeError("a class whose name is not text")
        self._stack.append(Name(f"{module}.{name}"))

    def _reduce(self, _: Any) -> None:
        function, arguments = self._take(2)
        self._construct(function, arguments)

    def _newobj(self, _: Any) -> None:
        self._reduce(_)

    def _newobj_ex(self, _: Any) -> None:
        function, arguments, keywords = self._take(3)
        self._construct(function, (*arguments, keywords) if keywords else arguments)

    def _construct(self, function: Any, arguments: Any) -> None:
        if not isinstance(function, Name | Record) or not isinstance(arguments, tuple):
            raise TypeError("a call of an object that is not a class")
        name = function.text if isinstance(function, Name) else f"{function.name}()"
        self._stack.append({} if name == _ORDERED_DICT and not arguments else Record(name, arguments))

    def _build(self, _: Any) -> None:
        state = self.pop()
        target = self._top()
        if isinstance(target, Record):
            target.state = state
        elif not isinstance(target, dict):  # torch adds attributes to state dicts (_metadata): ignored
            raise TypeError("a state for a value that is not an object")

    def _persid(self, argument: str) -> None:
        self._stack.append(Reference(argument))

    def _binpersid(self, _: Any) -> None:
        self._stack.append(Reference(self.pop()))


def _pairs(values: Any) -> Iterator[tuple[Any, Any]]:
    if len(values) % 2:
        raise ValueError("a key without a value")
    for position in range(0, len(values), 2):
        yield values[position], values[position + 1]
