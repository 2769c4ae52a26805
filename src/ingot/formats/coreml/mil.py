"""The program of a model: functions, blocks, operations, as far as constants are concerned.

Source: ``Model.proto`` and ``MIL.proto`` of coremltools. A program is a list of operations per block; an operation has
a type, named inputs (values, or names of what earlier operations gave), named outputs and attributes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from ingot.core.parsing.wire import Field, Node, Rules
from ingot.errors import FormatError, UnsupportedError
from ingot.formats.coreml.values import Value, parse_type, parse_value

_SPECIFICATION, _PROGRAM = 1, 502
# Other kinds of model, by their field in Model.proto.
_OTHERS = {200: "a pipeline classifier", 201: "a pipeline regressor", 202: "a pipeline", 500: "a neural network"}
_OTHERS |= {303: "a neural network regressor", 403: "a neural network classifier"}

_FUNCTIONS = 2
_OPSET, _SPECIALIZATIONS = 2, 3
OPERATIONS = 3
TYPE, INPUTS, OUTPUTS, BLOCKS, ATTRIBUTES = 1, 2, 3, 4, 5

CONSTEXPR = "constexpr_"
RULES = Rules("coreml.wire", "coreml.depth", "coreml.repeated-field", "coreml.utf8")
Param = Value | str | None


@dataclass(frozen=True, slots=True)
class Output:
    """What an operation gives: a name, and the type as far as it is a tensor of known shape."""

    name: str
    code: int
    dims: tuple[int, ...] | None


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """One operation.

    ``inputs`` and ``attributes`` map keys to a value, the name of an earlier output, or None where it is neither (a
    list of several). ``fields`` are the message's fields with the key of each input and attribute. ``block`` is the
    message of the block that it stands in.
    """

    type: str
    node: Node
    block: Node
    outputs: tuple[Output, ...]
    inputs: dict[str, Param]
    attributes: dict[str, Param]
    fields: tuple[tuple[Field, str], ...]
    function: str

    @property
    def values(self) -> Iterator[Value]:
        """Yield the values among the parameters."""
        for param in (*self.inputs.values(), *self.attributes.values()):
            if isinstance(param, Value):
                yield param

    @property
    def constant(self) -> bool:
        """Whether this is a ``const``, or an operation that computes a constant."""
        return self.type == "const" or self.type.startswith(CONSTEXPR)

    @property
    def where(self) -> str:
        name = self.outputs[0].name if self.outputs else "?"
        return f"{self.node.where}: {self.type} {name!r}"


@dataclass(slots=True)
class Program:
    """The constants' side of a model.

    ``operations`` are those of every block in order; ``uses`` counts by function how often a name is used, ``defined``
    has every name that is given; ``active`` tells which operations belong to the specialization that a function runs.
    ``stray`` are values outside operations.
    """

    root: Node
    specification: int
    operations: list[Operation] = field(default_factory=list)
    stray: list[Value] = field(default_factory=list)
    uses: dict[str, Counter[str]] = field(default_factory=dict)
    defined: dict[str, set[str]] = field(default_factory=dict)
    opsets: dict[str, str] = field(default_factory=dict)
    active: dict[str, list[Operation]] = field(default_factory=dict)

    def values(self) -> Iterator[Value]:
        """Yield every value that was found."""
        yield from self.stray
        for operation in self.operations:
            yield from operation.values


def parse_model(data: bytes, where: str) -> Program:
    """Read the bytes of ``model.mlmodel``.

    Raises
    ------
    FormatError
        ``coreml.wire``, ``coreml.utf8``, ``coreml.repeated-field``, ``coreml.depth``, ``coreml.value``,
        ``coreml.duplicate-name``, ``coreml.operation``.
    UnsupportedError
        ``coreml.model-kind``: a model of another kind than an ML program.
    """
    root = Node.root(data, where, RULES)
    fields = root.known((_SPECIFICATION, _PROGRAM))
    if not fields[_PROGRAM]:
        kinds = [_OTHERS[item.number] for item in root.fields() if item.number in _OTHERS]
        raise UnsupportedError(
            f"expected an ML program, found {kinds[0] if kinds else 'a model of another kind'}; convert it with "
            'convert_to="mlprogram"',
            rule="coreml.model-kind",
            where=where,
        )
    version = root.number(fields[_SPECIFICATION][0]) if fields[_SPECIFICATION] else 0
    program = Program(root, version)
    body = root.child(fields[_PROGRAM][0])
    for item in body.known((), (_FUNCTIONS, 4))[_FUNCTIONS]:
        name, function = _entry(body.child(item))
        if name in program.uses:
            raise _twice(name, where)
        _function(program, name, function)
    _stray(program, body, 4)
    return program


def _function(program: Program, name: str, node: Node | None) -> None:
    program.uses[name], program.defined[name], program.active[name] = Counter(), set(), []
    if node is None:
        return
    fields = node.known((_OPSET,), (1, _SPECIALIZATIONS))
    opset = node.text(fields[_OPSET][0]) if fields[_OPSET] else ""
    program.opsets[name] = opset
    _stray(program, node, 4)
    given = {text for field in fields[1] if (text := _name_of(node.child(field)))}
    for item in fields[_SPECIALIZATIONS]:
        key, block = _entry(node.child(item))
        if block is None:
            continue
        begin = len(program.operations)
        _block(program, block, name, set(given))
        if key == opset:
            program.active[name] = program.operations[begin:]


def _block(program: Program, node: Node, function: str, given: set[str]) -> None:
    """Read a block; ``given`` are the names that it may use."""
    fields = node.known((), (1, 2, OPERATIONS))
    given |= {text for item in fields[1] if (text := _name_of(node.child(item)))}
    _stray(program, node, 4)
    for item in fields[OPERATIONS]:
        _operation(program, node, node.child(item), function, given)
    program.defined[function] |= given
    program.uses[function].update(node.text(item) for item in fields[2])


def _operation(program: Program, block: Node, node: Node, function: str, given: set[str]) -> None:
    node_fields = node.known((TYPE,))
    type = node.text(node_fields[TYPE][0]) if node_fields[TYPE] else ""
    outputs: list[Output] = []
    params: dict[int, dict[str, Param]] = {INPUTS: {}, ATTRIBUTES: {}}
    fields: list[tuple[Field, str]] = []
    blocks: list[Node] = []
    for item in node.fields():
        key = ""
        if item.number in params:
            key, inner = _entry(node.child(item))
            if key in params[item.number]:
                raise FormatError("coreml.operation", f"expected {key!r} once, found it again", where=node.where)
            params[item.number][key] = _param(program, inner, item.number, program.uses[function])
        elif item.number == OUTPUTS:
            outputs.append(_output(node.child(item)))
        elif item.number == BLOCKS:
            blocks.append(node.child(item))
        fields.append((item, key))
    program.operations.append(
        Operation(type, node, block, tuple(outputs), params[INPUTS], params[ATTRIBUTES], tuple(fields), function)
    )
    for inner in blocks:
        _block(program, inner, function, set(given))
    for output in outputs:
        if output.name in given:
            raise _twice(output.name, node.where)
        given.add(output.name)


def _param(program: Program, node: Node | None, number: int, uses: Counter[str]) -> Param:
    """Read the value of an attribute, or the one binding of an input; other bindings' values are strays."""
    if node is None:
        return None
    if number == ATTRIBUTES:
        return parse_value(node)
    bindings: list[Param] = []
    for item in node.known((), (1,))[1]:
        inner = node.child(item)
        fields = inner.known((1, 2))
        if fields[1] and fields[2]:
            raise FormatError("coreml.operation", "expected a name or a value, found both", where=node.where)
        if fields[2]:
            bindings.append(parse_value(inner.child(fields[2][0])))
        elif fields[1]:
            name = inner.text(fields[1][0])
            uses[name] += 1
            bindings.append(name)
    if len(bindings) == 1:
        return bindings[0]
    program.stray += [binding for binding in bindings if isinstance(binding, Value)]
    return None


def _stray(program: Program, node: Node, number: int) -> None:
    """Note the values among the attributes of a program, function or block."""
    for item in node.known((), (number,))[number]:
        _, value = _entry(node.child(item))
        if value is not None:
            program.stray.append(parse_value(value))


def _entry(node: Node) -> tuple[str, Node | None]:
    """Return key and message of a map's entry."""
    fields = node.known((1, 2))
    key = node.text(fields[1][0]) if fields[1] else ""
    return key, node.child(fields[2][0]) if fields[2] else None


def _name_of(node: Node) -> str:
    name = node.known((1,))[1]
    return node.text(name[0]) if name else ""


def _output(node: Node) -> Output:
    fields = node.known((1, 2))
    name = node.text(fields[1][0]) if fields[1] else ""
    code, dims = parse_type(node.child(fields[2][0])) if fields[2] else (0, None)
    return Output(name, code, dims)


def _twice(name: str, where: str) -> FormatError:
    return FormatError("coreml.duplicate-name", f"expected each name once, found {name[:200]!r} again", where=where)
