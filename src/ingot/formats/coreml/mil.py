"""The program of a model: functions, blocks and operations, as far as they concern constants.

Source: ``Model.proto`` and ``MIL.proto`` of coremltools. A program is a list of operations per block. An operation has
a type, named inputs (values, or names of earlier outputs), named outputs and attributes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from ingot.core.parsing.wire import Field, Node, Rules
from ingot.errors import FormatError, UnsupportedError
from ingot.formats.coreml.values import Value, parse_type, parse_value

_SPECIFICATION = 1
_PROGRAM = 502
# other model types, by their field in Model.proto
_OTHERS = {200: "a pipeline classifier", 201: "a pipeline regressor", 202: "a pipeline", 500: "a neural network"}
_OTHERS |= {303: "a neural network regressor", 403: "a neural network classifier"}

_FUNCTIONS = 2
_OPSET = 2
_SPECIALIZATIONS = 3
OPERATIONS = 3
TYPE = 1
INPUTS = 2
OUTPUTS = 3
BLOCKS = 4
ATTRIBUTES = 5

CONSTEXPR = "constexpr_"
RULES = Rules("coreml.wire", "coreml.depth", "coreml.repeated-field", "coreml.utf8")
Param = Value | str | None


@dataclass(frozen=True, slots=True)
class Output:
    """An output of an operation: its name, and its type and shape if it is a tensor of known shape."""

    name: str
    code: int
    dims: tuple[int, ...] | None


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """An operation of a MIL program.

    ``inputs`` and ``attributes`` map each key to a constant value, to the name of an earlier output, or to None for
    other contents (a list). ``node`` is the operation's message. ``fields`` are the fields of this message for inputs
    and attributes, with their keys. ``block`` is the message of the block that contains the operation.
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
        """Yield the constant values among the parameters."""
        for param in (*self.inputs.values(), *self.attributes.values()):
            if isinstance(param, Value):
                yield param

    @property
    def constant(self) -> bool:
        """Whether the operation is a ``const``, or another operation that computes a constant."""
        return self.type == "const" or self.type.startswith(CONSTEXPR)

    @property
    def location(self) -> str:
        name = self.outputs[0].name if self.outputs else "?"
        return f"{self.node.location}: {self.type} {name!r}"


@dataclass(slots=True)
class Program:
    """The operations and values of an ML program, and the names that it defines and uses.

    ``operations`` are the operations of all blocks in order. Three mappings are keyed by function. ``uses`` has the
    number of uses of each name, ``defined`` the set of defined names, and ``active`` the operations of the
    specialization that runs. ``stray`` are values outside of operations.
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
        """Yield every value of the program."""
        yield from self.stray
        for operation in self.operations:
            yield from operation.values


def parse_model(data: bytes, location: str) -> Program:
    """Parse ``model.mlmodel`` into its program.

    Raises
    ------
    FormatError
        ``coreml.wire``, ``coreml.utf8``, ``coreml.repeated-field``, ``coreml.depth``, ``coreml.value``,
        ``coreml.duplicate-name``, ``coreml.operation``.
    UnsupportedError
        ``coreml.model-kind``: a model other than an ML program.
    """
    root = Node.root(data, location, RULES)
    fields = root.select((_SPECIFICATION, _PROGRAM))
    if not fields[_PROGRAM]:
        types = [_OTHERS[item.number] for item in root.fields() if item.number in _OTHERS]
        raise UnsupportedError(
            f"expected an ML program, found {types[0] if types else 'another type of model'}; convert it with "
            'convert_to="mlprogram"',
            rule="coreml.model-kind",
            where=location,
        )
    version = root.number(fields[_SPECIFICATION][0]) if fields[_SPECIFICATION] else 0
    program = Program(root, version)
    body = root.child(fields[_PROGRAM][0])
    for item in body.select((), (_FUNCTIONS, 4))[_FUNCTIONS]:
        name, function = _entry(body.child(item))
        if name in program.uses:
            raise _duplicate_name(name, location)
        _function(program, name, function)
    _stray(program, body, 4)
    return program


def _function(program: Program, name: str, node: Node | None) -> None:
    program.uses[name], program.defined[name], program.active[name] = Counter(), set(), []
    if node is None:
        return
    fields = node.select((_OPSET,), (1, _SPECIALIZATIONS))
    opset = node.text(fields[_OPSET][0]) if fields[_OPSET] else ""
    program.opsets[name] = opset
    _stray(program, node, 4)
    visible = {text for field in fields[1] if (text := _name_of(node.child(field)))}
    for item in fields[_SPECIALIZATIONS]:
        key, block = _entry(node.child(item))
        if block is None:
            continue
        begin = len(program.operations)
        _block(program, block, name, set(visible))
        if key == opset:
            program.active[name] = program.operations[begin:]


def _block(program: Program, node: Node, function: str, visible: set[str]) -> None:
    """Read a block; ``visible`` are the names that the block's operations may use."""
    fields = node.select((), (1, 2, OPERATIONS))
    visible |= {text for item in fields[1] if (text := _name_of(node.child(item)))}
    _stray(program, node, 4)
    for item in fields[OPERATIONS]:
        _operation(program, node, node.child(item), function, visible)
    program.defined[function] |= visible
    program.uses[function].update(node.text(item) for item in fields[2])


def _operation(program: Program, block: Node, node: Node, function: str, visible: set[str]) -> None:
    node_fields = node.select((TYPE,))
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
                raise FormatError("coreml.operation", f"expected {key!r} once, found it again", where=node.location)
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
        _block(program, inner, function, set(visible))
    for output in outputs:
        if output.name in visible:
            raise _duplicate_name(output.name, node.location)
        visible.add(output.name)


def _param(program: Program, node: Node | None, number: int, uses: Counter[str]) -> Param:
    """Return the value of an attribute or input: a constant, a name, or None for several bindings.

    The values of several bindings are added to ``Program.stray``.
    """
    if node is None:
        return None
    if number == ATTRIBUTES:
        return parse_value(node)
    bindings: list[Param] = []
    for item in node.select((), (1,))[1]:
        inner = node.child(item)
        fields = inner.select((1, 2))
        if fields[1] and fields[2]:
            raise FormatError("coreml.operation", "expected a name or a value, found both", where=node.location)
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
    """Add the values among the attributes of a program, function or block to ``Program.stray``."""
    for item in node.select((), (number,))[number]:
        _, value = _entry(node.child(item))
        if value is not None:
            program.stray.append(parse_value(value))


def _entry(node: Node) -> tuple[str, Node | None]:
    """Return the key and the message of a map's entry."""
    fields = node.select((1, 2))
    key = node.text(fields[1][0]) if fields[1] else ""
    return key, node.child(fields[2][0]) if fields[2] else None


def _name_of(node: Node) -> str:
    name = node.select((1,))[1]
    return node.text(name[0]) if name else ""


def _output(node: Node) -> Output:
    fields = node.select((1, 2))
    name = node.text(fields[1][0]) if fields[1] else ""
    code, dims = parse_type(node.child(fields[2][0])) if fields[2] else (0, None)
    return Output(name, code, dims)


def _duplicate_name(name: str, location: str) -> FormatError:
    return FormatError("coreml.duplicate-name", f"expected each name once, found {name[:200]!r} again", where=location)
