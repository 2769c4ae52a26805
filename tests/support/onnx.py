"""ONNX models made by hand, well-formed or not: for tests and fuzzing."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ingot.core.parsing.wire import FIXED32, bytes_field, number_field, varint
from ingot.formats.onnx.forms import operator
from ingot.formats.onnx.graph import (
    ATTRIBUTES,
    GRAPH,
    INITIALIZERS,
    INTEGERS,
    MICROSOFT,
    NODES,
    OPSETS,
    PRODUCER,
    SPARSE,
    SUBGRAPH,
    TENSOR,
)
from ingot.formats.onnx.tensors import External, dims_field, external_fields
from ingot.formats.onnx.types import BY_NAME

Shape = tuple[int, ...]


def tensor(name: str, kind: str, shape: Shape, data: bytes | None, extra: bytes = b"") -> bytes:
    """Return a TensorProto with its numbers in ``raw_data``; None for none there."""
    head = dims_field(shape) + number_field(2, BY_NAME[kind].code) + bytes_field(8, name)
    return head + (b"" if data is None else bytes_field(9, data)) + extra


def outside(name: str, kind: str, shape: Shape, location: str, offset: int, length: int) -> bytes:
    """Return a TensorProto with its numbers in another file."""
    return tensor(name, kind, shape, None, external_fields(External(location, offset, length)))


def value(name: str, kind: str | None = None) -> bytes:
    """Return a ValueInfoProto that tells a name, and a type of elements where there is one, of any shape."""
    if kind is None:
        return bytes_field(1, name)
    return bytes_field(1, name) + bytes_field(2, bytes_field(1, number_field(1, BY_NAME[kind].code)))


@dataclass
class Graph:
    """A model, as it grows: operators and constants in the order in which they are added."""

    opsets: Mapping[str, int] = field(default_factory=lambda: {"": 21})
    inputs: Sequence[str] = ("x",)
    outputs: Sequence[str] = ("y",)
    ir_version: int = 10
    types: Mapping[str, str] = field(default_factory=dict)
    fields: list[bytes] = field(default_factory=list)

    def constant(self, name: str, array: np.ndarray[tuple[int, ...], np.dtype[np.generic]], kind: str) -> None:
        """Add an initializer; ``array`` has the bytes that ``kind`` has."""
        self.raw(name, kind, array.shape, np.ascontiguousarray(array).tobytes())

    def raw(self, name: str, kind: str, shape: Shape, data: bytes) -> None:
        """Add an initializer by its bytes."""
        self.fields.append(bytes_field(INITIALIZERS, tensor(name, kind, shape, data)))

    def node(
        self,
        type: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        attributes: Collection[tuple[str, int | Sequence[int]]] = (),
        domain: str = "",
        name: str = "",
        more: Sequence[bytes] = (),
    ) -> None:
        """Add an operator; an attribute is a whole number, or several. ``more`` are AttributeProtos."""
        single = [(key, number) for key, number in attributes if isinstance(number, int)]
        lists = [(key, numbers) for key, numbers in attributes if not isinstance(numbers, int)]
        extra = b"".join(bytes_field(ATTRIBUTES, _integers(key, numbers)) for key, numbers in lists)
        extra += b"".join(bytes_field(ATTRIBUTES, item) for item in more)
        made = operator((domain, type), name or f"/{outputs[0]}/{type}", inputs, outputs, single, extra)
        self.fields.append(bytes_field(NODES, made))

    def graph(self) -> bytes:
        """Return the graph's bytes."""
        graph = b"".join(self.fields) + bytes_field(2, "graph")
        graph += b"".join(bytes_field(11, value(name, self.types.get(name))) for name in self.inputs)
        return graph + b"".join(bytes_field(12, value(name, self.types.get(name))) for name in self.outputs)

    def model(self, extra: bytes = b"") -> bytes:
        """Return the model's bytes; ``extra`` are fields behind its graph."""
        made = number_field(1, self.ir_version) + bytes_field(PRODUCER, "by hand")
        made += bytes_field(GRAPH, self.graph()) + extra
        for domain, version in self.opsets.items():
            made += bytes_field(OPSETS, (bytes_field(1, domain) if domain else b"") + number_field(2, version))
        return made


def graph_attribute(key: str, graph: Graph) -> bytes:
    """Return an AttributeProto of a graph."""
    return bytes_field(1, key) + bytes_field(SUBGRAPH, graph.graph()) + number_field(20, 5)


def tensor_attribute(key: str, item: bytes) -> bytes:
    """Return an AttributeProto of a TensorProto."""
    return bytes_field(1, key) + bytes_field(TENSOR, item) + number_field(20, 4)


def floats_attribute(key: str, values: Sequence[float], *, packed: bool = False) -> bytes:
    """Return an AttributeProto of floats, one field each as onnx's own library writes them, or one for all."""
    data = np.array(values, "<f4").tobytes()
    single = b"".join(varint(7 << 3 | FIXED32) + data[at : at + 4] for at in range(0, len(data), 4))
    return bytes_field(1, key) + (bytes_field(7, data) if packed else single) + number_field(20, 6)


def function(name: str, domain: str, inputs: Sequence[str], outputs: Sequence[str], graph: Graph) -> bytes:
    """Return the field of a model that holds a FunctionProto with the operators of a graph."""
    nodes = b"".join(b"\x3a" + field[1:] for field in graph.fields)  # field 7 there, 1 in a graph
    names = b"".join(bytes_field(4, item) for item in inputs) + b"".join(bytes_field(5, item) for item in outputs)
    return bytes_field(25, bytes_field(1, name) + names + nodes + bytes_field(10, domain))


def _integers(key: str, values: Sequence[int]) -> bytes:
    """Return an AttributeProto of whole numbers."""
    return bytes_field(1, key) + b"".join(number_field(INTEGERS, value) for value in values) + number_field(20, 7)


def numbers(shape: Shape, seed: int = 0) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """Return random f32."""
    return (np.random.default_rng(seed).standard_normal(shape) * 0.1).astype(np.float32)


def sample(cols: int = 64, rows: int = 32) -> Graph:
    """Return a graph with an embedding, two products, one of them square, and a product of another kind."""
    graph = Graph()
    graph.constant("emb", numbers((16, cols), 1), "float")
    graph.constant("model.layers.0.mlp.up_proj.weight", numbers((cols, rows), 2), "float")
    graph.constant("onnx::MatMul_7", numbers((rows, rows), 3), "float")
    graph.constant("lm_head.weight", numbers((8, rows), 4), "float")
    graph.constant("shape", np.array([-1, rows], "<i8"), "int64")
    graph.node("Gather", ["emb", "x"], ["e"])
    graph.node("MatMul", ["e", "model.layers.0.mlp.up_proj.weight"], ["u"], name="/model/layers.0/mlp/up_proj/MatMul")
    graph.node("MatMul", ["u", "onnx::MatMul_7"], ["d"], name="/model/layers.0/mlp/down_proj/MatMul")
    graph.node("Reshape", ["d", "shape"], ["s"])
    graph.node("Gemm", ["s", "lm_head.weight"], ["y"], [("transB", 1)])
    return graph


def packed(rows: int = 8, cols: int = 48, bits: int = 4, block: int = 32, *, zeros: bool = False) -> Graph:
    """Return a graph with one ``MatMulNBits``."""
    random, groups = np.random.default_rng(5), -(-cols // block)
    graph = Graph({"": 14, MICROSOFT: 1})
    codes = random.integers(0, 256, (rows, groups, block * bits // 8), np.uint8)
    graph.constant("w_Q4", codes, "uint8")
    graph.constant("w_scales", random.random((rows, groups), np.float32), "float")
    inputs = ["x", "w_Q4", "w_scales"]
    if zeros:
        graph.constant("w_zero_points", random.integers(0, 256, (rows, -(-groups * bits // 8)), np.uint8), "uint8")
        inputs.append("w_zero_points")
    attributes = [("K", cols), ("N", rows), ("bits", bits), ("block_size", block)]
    graph.node("MatMulNBits", inputs, ["y"], attributes, MICROSOFT)
    return graph


def within(cols: int = 32) -> Graph:
    """Return a graph with constants in branches, in a loop within one of them, sparse ones and ones in attributes."""
    loop = Graph(inputs=("i", "go", "s"), outputs=("go", "t"))
    loop.constant("deep", numbers((cols, cols), 1), "float")
    loop.node("MatMul", ["s", "deep"], ["u"])
    loop.node("MatMul", ["u", "shared"], ["t"])
    then = Graph(inputs=(), outputs=("a",))
    then.constant("w", numbers((cols, cols), 2), "float")
    then.constant("q", np.arange(cols * cols).reshape(cols, cols).astype(np.int8), "int8")
    then.node("DequantizeLinear", ["q", "scale"], ["v"])
    then.node("MatMul", ["x", "w"], ["b"])
    then.node("MatMul", ["b", "v"], ["c"])
    then.node("Loop", ["count", "", "c"], ["a"], more=[graph_attribute("body", loop)])
    other = Graph(inputs=(), outputs=("d",))
    other.constant("w", numbers((cols, cols), 3), "float")
    other.node("MatMul", ["x", "w"], ["d"])
    main = Graph(inputs=("x", "flag"))
    main.constant("shared", numbers((cols, cols), 4), "float")
    main.constant("scale", np.array(0.01, "<f4"), "float")
    main.constant("count", np.array(2, "<i8"), "int64")
    branches = [graph_attribute("then_branch", then), graph_attribute("else_branch", other)]
    main.node("If", ["flag"], ["h"], more=branches)
    main.node("Constant", [], ["half"], more=[floats_attribute("value_floats", [0.5, 1.5])])
    attribute = tensor_attribute("table", tensor("", "float", (2, 2), numbers((2, 2), 5).tobytes()))
    main.node("Lookup", ["h"], ["k"], domain="other", more=[attribute])
    main.node("LinearRegressor", ["k"], ["y"], domain="ai.onnx.ml", more=[floats_attribute("coefficients", [1, 2, 3])])
    places = tensor("", "int64", (2,), np.array([1, 33], "<i8").tobytes())
    values = tensor("few", "float", (2,), np.array([2, 3], "<f4").tobytes())
    sparse = bytes_field(1, values) + bytes_field(2, places) + number_field(3, 4) + number_field(3, 16)
    main.fields.append(bytes_field(SPARSE, sparse))
    return main
