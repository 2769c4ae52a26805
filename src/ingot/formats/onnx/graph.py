"""A model as far as its weights go: operators with the names they use, constants, and who uses what (onnx.proto3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ingot.core.wire import Bytes, Field, Node, Rules
from ingot.errors import FormatError, UnsupportedError
from ingot.formats.onnx.tensors import Constant, read_constant

RULES = Rules("onnx.wire", "onnx.depth", "onnx.repeated-field", "onnx.utf8")
MICROSOFT = "com.microsoft"
MAX_ITEMS = 1 << 20
"""Operators or constants of a model, at most: each takes memory beside its bytes."""

# ModelProto
_IR_VERSION, PRODUCER, GRAPH, OPSETS, _PROPERTIES = 1, 2, 7, 8, 14
# GraphProto
NODES, INITIALIZERS, _GRAPH_INPUTS, _GRAPH_OUTPUTS, _SPARSE = 1, 5, 11, 12, 15
# NodeProto
INPUTS, OUTPUTS, NODE_NAME, OP_TYPE, ATTRIBUTES, NODE_DOC, DOMAIN = 1, 2, 3, 4, 5, 6, 7
# AttributeProto
_ATTRIBUTE_NAME, _FLOAT, INTEGER, TEXT, TENSOR, SUBGRAPH, INTEGERS, _SUBGRAPHS = 1, 2, 3, 4, 5, 6, 8, 11


@dataclass(frozen=True, slots=True, eq=False)
class Operator:
    """A NodeProto: which operator, the names of what it takes and gives; ``attributes`` are AttributeProtos by name."""

    index: int
    message: Node
    type: str
    domain: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Node]

    @property
    def key(self) -> tuple[str, str]:
        """Domain and type; the domain of ONNX itself is empty."""
        return self.domain, self.type

    def input(self, index: int) -> str:
        """Return the name of an input; empty where it is left out."""
        return self.inputs[index] if index < len(self.inputs) else ""

    def integer(self, name: str, default: int) -> int:
        """Return an attribute that is a whole number; errors as ``Node.number``."""
        if name not in self.attributes:
            return default
        found = self.attributes[name].known((INTEGER,))[INTEGER]
        value = self.attributes[name].number(found[0]) if found else 0
        return _signed(value)

    def integers(self, name: str) -> tuple[int, ...]:
        """Return an attribute of whole numbers; none where it is left out. Errors as ``Node.varints``."""
        if name not in self.attributes:
            return ()
        attribute = self.attributes[name]
        fields = attribute.known((), (INTEGERS,))[INTEGERS]
        return tuple(_signed(value) for field in fields for value in attribute.varints(field))


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


@dataclass(slots=True)
class Model:
    """What was found in a model.

    ``uses`` are the operators that take a name, each with the number of the input. ``fixed`` are names that are more
    than constants of this graph: inputs or outputs of it, or used by graphs within it. ``constants`` are by name, in
    the file's order; the value of an operator ``Constant`` is one too, and its operator is in ``makers``. ``texts`` is
    the number of constants that hold text, ``inner`` of those in graphs within this one and of sparse ones;
    ``inner_external`` tells whether one of these has its numbers in another file.
    """

    root: Node
    graph: Node
    ir_version: int = 0
    producer: str = ""
    opsets: dict[str, int] = field(default_factory=dict)
    properties: dict[str, str] = field(default_factory=dict)
    operators: list[Operator] = field(default_factory=list)
    constants: dict[str, Constant] = field(default_factory=dict)
    makers: dict[str, Operator] = field(default_factory=dict)
    uses: dict[str, list[tuple[Operator, int]]] = field(default_factory=dict)
    fixed: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    texts: int = 0
    inner: int = 0
    inner_external: bool = False

    @property
    def opset(self) -> int:
        """Version of ONNX's own operators; 0 where the model states none."""
        return self.opsets.get("", 0)


def parse_model(data: Bytes, where: str) -> Model:
    """Read a model; of its constants, where their numbers lie.

    Raises
    ------
    FormatError
        ``onnx.wire``, ``onnx.utf8``, ``onnx.repeated-field``, ``onnx.depth``, ``onnx.count``, ``onnx.duplicate-name``,
        ``onnx.opset``, and those of ``read_constant``.
    UnsupportedError
        ``onnx.no-graph``.
    """
    root = Node.root(data, where, RULES)
    fields = root.known((_IR_VERSION, PRODUCER, GRAPH), (OPSETS, _PROPERTIES))
    if not fields[GRAPH]:
        raise UnsupportedError("expected an ONNX model, found none: no graph", rule="onnx.no-graph", where=where)
    model = Model(root, root.child(fields[GRAPH][0]))
    model.ir_version = root.number(fields[_IR_VERSION][0]) if fields[_IR_VERSION] else 0
    model.producer = root.text(fields[PRODUCER][0]) if fields[PRODUCER] else ""
    for item in fields[OPSETS]:
        domain, version = _pair(root.child(item))
        domain = "" if domain == "ai.onnx" else domain
        if domain in model.opsets:
            raise FormatError("onnx.opset", f"expected one version of {domain!r}, found two", where=where)
        model.opsets[domain] = version
    for item in fields[_PROPERTIES]:
        entry = root.child(item)
        pair = entry.known((1, 2))
        key, value = (entry.text(pair[number][0]) if pair[number] else "" for number in (1, 2))
        model.properties[key] = value
    _read_graph(model)
    return model


def _pair(message: Node) -> tuple[str, int]:
    """Return the domain and version of an OperatorSetIdProto."""
    fields = message.known((1, 2))
    domain = message.text(fields[1][0]) if fields[1] else ""
    return domain, message.number(fields[2][0]) if fields[2] else 0


def _read_graph(model: Model) -> None:
    graph = model.graph
    items: dict[int, list[Field]] = {NODES: [], INITIALIZERS: [], _GRAPH_INPUTS: [], _GRAPH_OUTPUTS: [], _SPARSE: []}
    for item in graph.fields():
        kept = items.get(item.number)
        if kept is None:
            continue
        if len(kept) >= MAX_ITEMS:
            raise FormatError(
                "onnx.count", f"expected at most {MAX_ITEMS} operators and constants, found more", where=graph.where
            )
        kept.append(item)
    for number in (_GRAPH_INPUTS, _GRAPH_OUTPUTS):
        for item in items[number]:
            value = graph.child(item)
            named = value.known((1,))[1]
            model.fixed.add(value.text(named[0]) if named else "")
    model.inner += len(items[_SPARSE])
    for item in items[INITIALIZERS]:
        _add(model, read_constant(graph.child(item)), None)
    for index, item in enumerate(items[NODES]):
        _operator(model, index, graph.child(item))
    model.names |= model.fixed | set(model.constants) | set(model.uses)
    model.names |= {name for operator in model.operators for name in operator.outputs}


def _operator(model: Model, index: int, message: Node) -> None:
    operator, graphs = _read_operator(message, index)
    model.operators.append(operator)
    for position, name in enumerate(operator.inputs):
        if name:
            model.uses.setdefault(name, []).append((operator, position))
    for graph in graphs:
        _within(model, graph)
    if operator.key == ("", "Constant") and "value" in operator.attributes and len(operator.outputs) == 1:
        attribute = operator.attributes["value"]
        held = attribute.known((TENSOR,))[TENSOR]
        if held:
            _add(model, read_constant(attribute.child(held[0]), operator.outputs[0]), operator)


def _add(model: Model, constant: Constant | None, maker: Operator | None) -> None:
    if constant is None:
        model.texts += 1
        return
    if constant.name in model.constants:
        raise FormatError(
            "onnx.duplicate-name",
            f"expected each name once, found {constant.name[:200]!r} again",
            where=model.graph.where,
        )
    model.constants[constant.name] = constant
    if maker is not None:
        model.makers[constant.name] = maker


def _read_operator(message: Node, index: int) -> tuple[Operator, list[Node]]:
    """Return an operator, and the graphs in its attributes."""
    single, repeated = (NODE_NAME, OP_TYPE, DOMAIN), (INPUTS, OUTPUTS, ATTRIBUTES)
    fields = message.known(single, repeated)
    name, type, domain = (message.text(fields[number][0]) if fields[number] else "" for number in single)
    inputs, outputs = (tuple(message.text(item) for item in fields[number]) for number in (INPUTS, OUTPUTS))
    attributes: dict[str, Node] = {}
    graphs: list[Node] = []
    for item in fields[ATTRIBUTES]:
        attribute = message.child(item)
        found = attribute.known((_ATTRIBUTE_NAME,), (SUBGRAPH, _SUBGRAPHS))
        named = found[_ATTRIBUTE_NAME]
        graphs += [attribute.child(inner) for inner in (*found[SUBGRAPH], *found[_SUBGRAPHS])]
        key = attribute.text(named[0]) if named else ""
        if key in attributes:
            raise FormatError("onnx.repeated-field", f"expected attribute {key[:80]!r} once", where=message.where)
        attributes[key] = attribute
    domain = "" if domain == "ai.onnx" else domain
    return Operator(index, message, type, domain, name, inputs, outputs, attributes), graphs


def _within(model: Model, graph: Node) -> None:
    """Note every name that a graph within the graph uses: it may be one of the graph around it."""
    for item in graph.fields():
        if item.number == INITIALIZERS:
            model.inner += 1
            constant = read_constant(graph.child(item))
            model.inner_external |= constant is not None and constant.external is not None
        if item.number == _GRAPH_OUTPUTS:
            value = graph.child(item)
            model.fixed.update(value.text(named) for named in value.known((1,))[1])
        if item.number == NODES:
            operator, graphs = _read_operator(graph.child(item), 0)
            model.fixed.update(operator.inputs)
            model.names.update(operator.outputs)
            for inner in graphs:
                _within(model, inner)


def matrix_uses(model: Model, name: str) -> Sequence[Operator]:
    """Return the operators ``MatMul`` that take a name as what they multiply with; none where anything else uses it."""
    uses = model.uses.get(name, [])
    if name in model.fixed or not uses or any(use.key != ("", "MatMul") or at != 1 for use, at in uses):
        return ()
    return [use for use, _ in uses]
