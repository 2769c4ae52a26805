"""The parts of a model that concern weights: graphs, their operators and constants, and where names are used
(onnx.proto3).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ingot.core.numeric.dtypes import element_count
from ingot.core.parsing.wire import Bytes, Field, Node, Rules
from ingot.errors import FormatError, UnsupportedError
from ingot.formats.onnx.tensors import Constant, read_constant, read_numbers
from ingot.formats.onnx.types import BY_NAME

RULES = Rules("onnx.wire", "onnx.depth", "onnx.repeated-field", "onnx.utf8")
MICROSOFT = "com.microsoft"
MAX_ITEMS = 1 << 20
"""Maximum number of operators or constants of a graph, which limits memory."""
MAX_GRAPHS = 1 << 16

# ModelProto
_IR_VERSION = 1
PRODUCER = 2
GRAPH = 7
OPSETS = 8
_PROPERTIES = 14
TRAINING = 20
FUNCTIONS = 25
# GraphProto
NODES = 1
INITIALIZERS = 5
_GRAPH_INPUTS = 11
_GRAPH_OUTPUTS = 12
SPARSE = 15
# FunctionProto
_FUNCTION_NAME = 1
_FUNCTION_INPUTS = 4
_FUNCTION_OUTPUTS = 5
_FUNCTION_NODES = 7
_FUNCTION_DOMAIN = 10
_FUNCTION_DEFAULTS = 11
_FUNCTION_OVERLOAD = 13
# TrainingInfoProto
_INITIALIZATION = 1
_ALGORITHM = 2
_BINDINGS = (3, 4)
# NodeProto
INPUTS = 1
OUTPUTS = 2
NODE_NAME = 3
OP_TYPE = 4
ATTRIBUTES = 5
DOMAIN = 7
# AttributeProto
_ATTRIBUTE_NAME = 1
_FLOAT = 2
INTEGER = 3
TEXT = 4
TENSOR = 5
SUBGRAPH = 6
_FLOATS = 7
INTEGERS = 8
_TEXTS = 9
_TENSORS = 10
_SUBGRAPHS = 11
_SPARSE_TENSOR = 22
_SPARSE_TENSORS = 23
_NUMBERS = (TENSOR, _TENSORS, _SPARSE_TENSOR, _SPARSE_TENSORS, _FLOATS)
# SparseTensorProto
_VALUES = 1
_INDICES = 2
_SPARSE_DIMS = 3

CONSTANT = ("", "Constant")
_FILLED = ("", "ConstantOfShape")
_COMPILED = (MICROSOFT, "EPContext")
IN_FUNCTION = "it is in a function of the model"
IN_TRAINING = "it is in a training graph of the model"
TEXT_REASON = "it contains text instead of numbers"


@dataclass(frozen=True, slots=True, eq=False)
class Operator:
    """A NodeProto: the operator's type, and the names of its inputs and outputs.

    ``attributes`` are AttributeProtos by name.
    """

    index: int
    graph: Graph
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

    @property
    def label(self) -> str:
        """The name of the operator's first named output, which is unique in its graph, or a text with its index."""
        return next((name for name in self.outputs if name), f"operator {self.index}")

    def input(self, index: int) -> str:
        """Return the name of an input; empty if it is omitted."""
        return self.inputs[index] if index < len(self.inputs) else ""

    def integer(self, name: str, default: int) -> int:
        """Return an integer attribute; raises the errors of ``Node.number``."""
        if name not in self.attributes:
            return default
        fields = self.attributes[name].select((INTEGER,))[INTEGER]
        value = self.attributes[name].number(fields[0]) if fields else 0
        return _signed(value)

    def integers(self, name: str) -> tuple[int, ...]:
        """Return an attribute of integers; empty if it is omitted. Raises the errors of ``Node.varints``."""
        if name not in self.attributes:
            return ()
        attribute = self.attributes[name]
        fields = attribute.select((), (INTEGERS,))[INTEGERS]
        return tuple(_signed(value) for field in fields for value in attribute.varints(field))


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


@dataclass(frozen=True, slots=True, eq=False)
class SparseConstant:
    """A SparseTensorProto: values, and their positions in an array of ``dims``."""

    name: str
    dims: tuple[int, ...]
    values: Constant
    indices: Constant


@dataclass(slots=True, eq=False)
class Graph:
    """A graph of operators: the model's graph, a graph in an attribute of an operator, or the body of a function.

    Parameters
    ----------
    message : Node
        The GraphProto or FunctionProto.
    path : str
        Prefix of the names of its tensors; empty for the graph of the model.
    parent : Graph or None
        The graph that contains it, whose names it may use.
    stays : str
        Why the graph's constants must not change; empty if they may.
    constants : mapping of str to Constant
        Constants by name in file order, including the values of ``Constant`` operators, which ``makers`` lists.
    attribute_constants : mapping of str to Constant
        Constants in attributes of other operators, by the names of their tensors; operators do not use them by name.
    uses : mapping of str to list
        For each name of this graph, the operators that use it, also in inner graphs, with the index of the input.
    fixed : set of str
        Names that are inputs or outputs of a graph, or that the model's training uses.
    defined : set of str
        Every name that this graph defines.
    producers : mapping of str to Operator
        The operator that computes a name.
    """

    message: Node
    path: str = ""
    parent: Graph | None = None
    stays: str = ""
    operators: list[Operator] = field(default_factory=list)
    constants: dict[str, Constant] = field(default_factory=dict)
    attribute_constants: dict[str, Constant] = field(default_factory=dict)
    sparse: dict[str, SparseConstant] = field(default_factory=dict)
    makers: dict[str, Operator] = field(default_factory=dict)
    uses: dict[str, list[tuple[Operator, int]]] = field(default_factory=dict)
    fixed: set[str] = field(default_factory=set)
    defined: set[str] = field(default_factory=set)
    producers: dict[str, Operator] = field(default_factory=dict)

    def owner(self, name: str) -> Graph | None:
        """Return the graph that defines a name: this graph, or one that contains it."""
        graph: Graph | None = self
        while graph is not None and name not in graph.defined:
            graph = graph.parent
        return graph


@dataclass(slots=True)
class Model:
    """A parsed model: its graphs, versions and metadata.

    ``graphs`` begins with the model's graph; inner graphs follow the graph that contains them. ``names`` are all names
    used in any graph. ``unread`` maps names of constants that are no tensors to the reason.
    """

    root: Node
    ir_version: int = 0
    producer: str = ""
    opsets: dict[str, int] = field(default_factory=dict)
    properties: dict[str, str] = field(default_factory=dict)
    graphs: list[Graph] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    unread: dict[str, str] = field(default_factory=dict)

    @property
    def opset(self) -> int:
        """Version of ONNX's own operators; 0 if the model states none."""
        return self.opsets.get("", 0)

    @property
    def main(self) -> Graph:
        """The graph of the model."""
        return self.graphs[0]

    @property
    def constants(self) -> Iterator[Constant]:
        """Yield the constants of all graphs, in the file's order of the graphs."""
        for graph in self.graphs:
            yield from graph.constants.values()
            yield from graph.attribute_constants.values()
            for item in graph.sparse.values():
                yield from (item.values, item.indices)


def parse_model(data: Bytes, location: str) -> Model:
    """Parse a model; of its constants, only the locations of their numbers are read.

    Raises
    ------
    FormatError
        ``onnx.wire``, ``onnx.utf8``, ``onnx.repeated-field``, ``onnx.depth``, ``onnx.count``, ``onnx.duplicate-name``,
        ``onnx.opset``, and the errors of ``read_constant``.
    UnsupportedError
        ``onnx.no-graph``.
    """
    root = Node.root(data, location, RULES)
    fields = root.select((_IR_VERSION, PRODUCER, GRAPH), (OPSETS, _PROPERTIES, TRAINING, FUNCTIONS))
    if not fields[GRAPH]:
        raise UnsupportedError(
            "expected an ONNX model with a graph, but it has none", rule="onnx.no-graph", where=location
        )
    model = Model(root)
    model.ir_version = root.number(fields[_IR_VERSION][0]) if fields[_IR_VERSION] else 0
    model.producer = root.text(fields[PRODUCER][0]) if fields[PRODUCER] else ""
    for item in fields[OPSETS]:
        domain, version = _pair(root.child(item))
        domain = "" if domain == "ai.onnx" else domain
        if domain in model.opsets:
            raise FormatError("onnx.opset", f"expected one version of {domain!r}, found two", where=location)
        model.opsets[domain] = version
    for item in fields[_PROPERTIES]:
        key, value = _entry(root.child(item))
        model.properties[key] = value
    _read_graph(model, Graph(root.child(fields[GRAPH][0])))
    for item in fields[FUNCTIONS]:
        _read_function(model, root.child(item))
    for index, item in enumerate(fields[TRAINING]):
        _read_training(model, root.child(item), index)
    return model


def _entry(message: Node) -> tuple[str, str]:
    """Return the key and value of a StringStringEntryProto."""
    fields = message.select((1, 2))
    key, value = (message.text(fields[field][0]) if fields[field] else "" for field in (1, 2))
    return key, value


def _pair(message: Node) -> tuple[str, int]:
    """Return the domain and version of an OperatorSetIdProto."""
    fields = message.select((1, 2))
    domain = message.text(fields[1][0]) if fields[1] else ""
    return domain, message.number(fields[2][0]) if fields[2] else 0


def _read_function(model: Model, message: Node) -> None:
    """Read a FunctionProto: its operators, and the default values of its attributes."""
    single = (_FUNCTION_NAME, _FUNCTION_DOMAIN, _FUNCTION_OVERLOAD)
    repeated = (_FUNCTION_INPUTS, _FUNCTION_OUTPUTS, _FUNCTION_NODES, _FUNCTION_DEFAULTS)
    fields = message.select(single, repeated)
    name, domain, overload = (message.text(fields[field][0]) if fields[field] else "" for field in single)
    path = f"{domain}.{name}{':' if overload else ''}{overload}/"
    graph = Graph(message, path, stays=IN_FUNCTION)
    inputs = {message.text(item) for item in fields[_FUNCTION_INPUTS]}
    graph.fixed |= inputs | {message.text(item) for item in fields[_FUNCTION_OUTPUTS]}
    graph.defined |= inputs
    _append(model, graph)
    for item in fields[_FUNCTION_DEFAULTS]:
        attribute = message.child(item)
        named = attribute.select((_ATTRIBUTE_NAME,))[_ATTRIBUTE_NAME]
        _add_attribute_constants(model, graph, attribute, attribute.text(named[0]) if named else "", ("", ""))
    _read_operators(model, graph, fields[_FUNCTION_NODES])


def _read_training(model: Model, message: Node, index: int) -> None:
    """Read the graphs of a TrainingInfoProto, which may use names of the model's graph."""
    fields = message.select((_INITIALIZATION, _ALGORITHM), _BINDINGS)
    for item in (*fields[_BINDINGS[0]], *fields[_BINDINGS[1]]):
        model.main.fixed.update(_entry(message.child(item)))
    for part_field, part in ((_INITIALIZATION, "initialization"), (_ALGORITHM, "algorithm")):
        for item in fields[part_field]:
            path = f"training_info.{index}.{part}/"
            _read_graph(model, Graph(message.child(item), path, model.main, IN_TRAINING))
    used = model.main.uses.items()
    model.main.fixed |= {name for name, users in used if any(user.graph.stays == IN_TRAINING for user, _ in users)}


def _append(model: Model, graph: Graph) -> None:
    if len(model.graphs) >= MAX_GRAPHS:
        raise FormatError(
            "onnx.count", f"expected at most {MAX_GRAPHS} graphs, found more", where=graph.message.location
        )
    model.graphs.append(graph)


def _read_graph(model: Model, graph: Graph) -> None:
    """Read a graph and its inner graphs."""
    message = graph.message
    items: dict[int, list[Field]] = {NODES: [], INITIALIZERS: [], _GRAPH_INPUTS: [], _GRAPH_OUTPUTS: [], SPARSE: []}
    for item in message.fields():
        collected = items.get(item.number)
        if collected is None:
            continue
        if len(collected) >= MAX_ITEMS:
            raise FormatError(
                "onnx.count",
                f"expected at most {MAX_ITEMS} operators and constants, found more",
                where=message.location,
            )
        collected.append(item)
    _append(model, graph)
    inputs, outputs = (
        [_value_name(message.child(item)) for item in items[field_number]]
        for field_number in (_GRAPH_INPUTS, _GRAPH_OUTPUTS)
    )
    graph.fixed.update(inputs)
    graph.defined.update(inputs)
    for item in items[INITIALIZERS]:
        _add(model, graph, message.child(item), None)
    for item in items[SPARSE]:
        _add_sparse(model, graph, message.child(item))
    _read_operators(model, graph, items[NODES])
    for name in outputs:
        (graph.owner(name) or graph).fixed.add(name)
    model.names.update(outputs)


def _value_name(message: Node) -> str:
    """Return the name in a ValueInfoProto."""
    fields = message.select((1,))[1]
    return message.text(fields[0]) if fields else ""


def _read_operators(model: Model, graph: Graph, fields: Sequence[Field]) -> None:
    inner: list[tuple[Operator, str, Node]] = []
    for index, item in enumerate(fields):
        operator, graphs, attributes = _read_operator(graph, graph.message.child(item), index)
        graph.operators.append(operator)
        graph.defined.update(operator.outputs)
        graph.producers.update(dict.fromkeys(operator.outputs, operator))
        inner += [(operator, key, message) for key, message in graphs]
        _constants_of(model, graph, operator, attributes)
    for operator in graph.operators:
        for position, name in enumerate(operator.inputs):
            if name:
                (graph.owner(name) or graph).uses.setdefault(name, []).append((operator, position))
    model.names |= graph.defined
    model.names.update(name for operator in graph.operators for name in operator.inputs)
    for operator, key, message in inner:
        path = f"{graph.path}{operator.label}.{key}/"
        _read_graph(model, Graph(message, path, graph, graph.stays))


def _constants_of(model: Model, graph: Graph, operator: Operator, keys: Sequence[str]) -> None:
    """Add the constants in the attributes ``keys`` of an operator."""
    if operator.key == _COMPILED:
        reason = "a provider of onnxruntime compiled it, including its weights, for a device"
        model.unread[f"{graph.path}{operator.label}"] = reason
    if operator.key == CONSTANT and len(operator.outputs) == 1:
        for key, attribute in operator.attributes.items():
            _constant_value(model, graph, operator, key, attribute)
    elif operator.key != _FILLED:
        for key in keys:
            _add_attribute_constants(model, graph, operator.attributes[key], f"{operator.label}.{key}", operator.key)


def _constant_value(model: Model, graph: Graph, operator: Operator, key: str, attribute: Node) -> None:
    """Add the constant that a ``Constant`` operator defines in an attribute."""
    name = operator.outputs[0]
    fields = attribute.select((TENSOR, _SPARSE_TENSOR), (_FLOATS, INTEGERS, _TEXTS))
    if key == "value" and fields[TENSOR]:
        _add(model, graph, attribute.child(fields[TENSOR][0]), operator)
    elif key == "sparse_value" and fields[_SPARSE_TENSOR]:
        _add_sparse(model, graph, attribute.child(fields[_SPARSE_TENSOR][0]), name)
    elif key in _VALUE_FIELDS:
        type, field, scalar = _VALUE_FIELDS[key]
        if attribute.select((), (field,))[field]:
            _put(graph, read_numbers(attribute, name, BY_NAME[type], field, scalar), operator)
    elif key in ("value_string", "value_strings"):
        model.unread[graph.path + name] = TEXT_REASON


_VALUE_FIELDS = {
    "value_float": ("float", _FLOAT, True),
    "value_floats": ("float", _FLOATS, False),
    "value_int": ("int64", INTEGER, True),
    "value_ints": ("int64", INTEGERS, False),
}


def _add_attribute_constants(model: Model, graph: Graph, attribute: Node, name: str, key: tuple[str, str]) -> None:
    """Add the tensors in an attribute of an operator other than ``Constant``.

    Lists of floats are weights in operators of other domains (``LinearClassifier``), but settings in ONNX's operators.
    """
    fields = attribute.select((), _NUMBERS)
    tensors = fields[TENSOR] + fields[_TENSORS]
    sparse = fields[_SPARSE_TENSOR] + fields[_SPARSE_TENSORS]
    while name in graph.attribute_constants or name in graph.sparse:  # only if outputs share a name
        name += "~"
    for index, item in enumerate(tensors):
        local = name if len(tensors) == 1 else f"{name}.{index}"
        constant = read_constant(attribute.child(item), local)
        if constant is None:
            model.unread[graph.path + local] = TEXT_REASON
        else:
            graph.attribute_constants[local] = constant
    for index, item in enumerate(sparse):
        _add_sparse(model, graph, attribute.child(item), f"{name}.{index}" if len(sparse) > 1 else name)
    if fields[_FLOATS] and key[0] not in ("", MICROSOFT):
        graph.attribute_constants[name] = read_numbers(attribute, name, BY_NAME["float"], _FLOATS, False)


def _add(model: Model, graph: Graph, message: Node, maker: Operator | None) -> None:
    constant = read_constant(message, None if maker is None else maker.outputs[0])
    if constant is None:
        name = maker.outputs[0] if maker is not None else _tensor_name(message)
        model.unread[graph.path + name] = TEXT_REASON
        graph.defined.add(name)
    else:
        _put(graph, constant, maker)


def _put(graph: Graph, constant: Constant, maker: Operator | None) -> None:
    if constant.name in graph.constants or constant.name in graph.sparse:
        raise FormatError(
            "onnx.duplicate-name",
            f"expected each name once, found {constant.name[:200]!r} again",
            where=graph.message.location,
        )
    graph.constants[constant.name] = constant
    graph.defined.add(constant.name)
    if maker is not None:
        graph.makers[constant.name] = maker


def _tensor_name(message: Node) -> str:
    fields = message.select((8,))[8]
    return message.text(fields[0]) if fields else ""


def _add_sparse(model: Model, graph: Graph, message: Node, name: str | None = None) -> None:
    """Add a SparseTensorProto; by default it has the name of its values."""
    fields = message.select((_VALUES, _INDICES), (_SPARSE_DIMS,))
    if not fields[_VALUES] or not fields[_INDICES]:
        raise FormatError("onnx.data", "expected values and indices of a sparse constant", where=message.location)
    inner = message.child(fields[_VALUES][0])
    name = name or _tensor_name(inner)
    values = read_constant(inner, name or None)
    indices = read_constant(message.child(fields[_INDICES][0]), f"{name}_indices")
    dims = tuple(size for field in fields[_SPARSE_DIMS] for size in message.varints(field))
    if name in graph.constants or name in graph.sparse:
        raise FormatError(
            "onnx.duplicate-name", f"expected each name once, found {name[:200]!r} again", where=message.location
        )
    graph.defined.add(name)
    if values is None or indices is None:
        model.unread[graph.path + name] = TEXT_REASON
        return
    element_count(dims, "onnx.shape", f"{message.location}: {name[:200]}")
    graph.sparse[name] = SparseConstant(name, dims, values, indices)


def _read_operator(graph: Graph, message: Node, index: int) -> tuple[Operator, list[tuple[str, Node]], list[str]]:
    """Return an operator, the graphs in its attributes by attribute name, and the attributes with constants."""
    single = (NODE_NAME, OP_TYPE, DOMAIN)
    repeated = (INPUTS, OUTPUTS, ATTRIBUTES)
    fields = message.select(single, repeated)
    name, type, domain = (message.text(fields[field][0]) if fields[field] else "" for field in single)
    inputs, outputs = (tuple(message.text(item) for item in fields[field]) for field in (INPUTS, OUTPUTS))
    attributes: dict[str, Node] = {}
    graphs: list[tuple[str, Node]] = []
    with_numbers: list[str] = []
    for item in fields[ATTRIBUTES]:
        attribute = message.child(item)
        parts = attribute.select((_ATTRIBUTE_NAME,), (SUBGRAPH, _SUBGRAPHS, *_NUMBERS))
        key = attribute.text(parts[_ATTRIBUTE_NAME][0]) if parts[_ATTRIBUTE_NAME] else ""
        if key in attributes:
            raise FormatError("onnx.repeated-field", f"expected attribute {key[:80]!r} once", where=message.location)
        attributes[key] = attribute
        if any(parts[field] for field in _NUMBERS):
            with_numbers.append(key)
        subgraphs = (*parts[SUBGRAPH], *parts[_SUBGRAPHS])
        for position, inner in enumerate(subgraphs):
            graphs.append((key if len(subgraphs) == 1 else f"{key}.{position}", attribute.child(inner)))
    domain = "" if domain == "ai.onnx" else domain
    return Operator(index, graph, message, type, domain, name, inputs, outputs, attributes), graphs, with_numbers


def matrix_uses(graph: Graph, name: str) -> Sequence[Operator]:
    """Return the ``MatMul`` operators that multiply by a name; empty if it has other uses."""
    uses = graph.uses.get(name, [])
    if name in graph.fixed or not uses or any(use.key != ("", "MatMul") or index != 1 for use, index in uses):
        return ()
    return [use for use, _ in uses]
