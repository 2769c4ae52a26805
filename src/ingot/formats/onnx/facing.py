"""The orientation of matrices in a graph, which follows from the operators that use them."""

from __future__ import annotations

from functools import cached_property
from typing import Literal

from ingot.formats.onnx.graph import Graph, Model, Operator

Orientation = Literal["outputs", "inputs", "any"]
OUTPUTS: Orientation = "outputs"
"""[outputs, inputs]: a row for each output."""
INPUTS: Orientation = "inputs"
"""[inputs, outputs]: a row for each input."""
EITHER: Orientation = "any"
"""A matrix without an orientation: a lookup table or a summand, which is stored in the same way in every checkpoint."""

_PRODUCT = ("", "MatMul")
_GEMM = ("", "Gemm")
_TRANSPOSE = ("", "Transpose")
_OPPOSITE: dict[Orientation, Orientation] = {INPUTS: OUTPUTS, OUTPUTS: INPUTS, EITHER: EITHER}
# operators of one operand that preserve its axes
_THROUGH = {("", "Cast"), ("", "Identity"), ("", "Slice"), ("", "DequantizeLinear"), ("", "QuantizeLinear")}
_ELEMENTWISE = {
    ("", type)
    for type in (
        *("Add", "Sub", "Mul", "Div", "Pow", "Mod", "Min", "Max", "Mean", "Sum", "PRelu", "Where"),
        *("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "And", "Or", "Xor"),
    )
}
_WITH_GRAPHS = {("", type) for type in ("If", "Loop", "Scan", "SequenceMap")}
_KERNELS = {("", "Conv"), ("", "ConvTranspose")}
_MAX_STEPS = 64


class OrientationFinder:
    """A finder of the orientation of matrices, from the operators that use them."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def find(self, graph: Graph, name: str, rank: int = 2) -> Orientation | None:
        """Return the orientation of the matrix ``name``; None if no operator defines it.

        If the matrix is cast, transposed, or used in computing other constants, the operators that use the result
        decide.
        """
        orientations = set[Orientation]()
        waiting = [(graph, name, False)]
        seen = set[tuple[int, str, bool]]()
        while waiting:
            graph, value, transposed = waiting.pop()
            if (id(graph), value, transposed) in seen:
                continue
            seen.add((id(graph), value, transposed))
            uses = graph.uses.get(value, [])
            if not uses or value in graph.fixed or len(seen) > _MAX_STEPS:
                return None
            for operator, index in uses:
                face = self._face(operator, index)
                if face is not None:
                    orientations.add(_OPPOSITE[face] if transposed else face)
                    continue
                transposes = _transposes(operator, index, rank)
                if transposes is None:
                    return None
                waiting += [(operator.graph, output, transposed ^ transposes) for output in operator.outputs if output]
        if len(orientations) > 1:
            orientations.discard(EITHER)  # a lookup table that is also a factor of a product
        return orientations.pop() if len(orientations) == 1 else None

    def _face(self, operator: Operator, index: int) -> Orientation | None:
        """Return the orientation of an operator's input ``index``; None if the operator does not define it."""
        if operator.key in (_PRODUCT, _GEMM) and index < 2:
            transposed = operator.integer("transB" if index else "transA", 0) if operator.key == _GEMM else 0
            return INPUTS if bool(index) ^ bool(transposed) else OUTPUTS
        table = operator.key == ("", "Gather") and index == 0 and operator.integer("axis", 0) == 0
        added = operator.key == _GEMM or (operator.key in _ELEMENTWISE and self._meets_values(operator, index))
        return EITHER if table or added or (operator.key in _KERNELS and index == 1) else None

    def _meets_values(self, operator: Operator, index: int) -> bool:
        """Return whether an operand of ``operator`` other than number ``index`` depends on the model's inputs.

        If none does, the result is computed from weights only.
        """
        names = (name for other_index, name in enumerate(operator.inputs) if other_index != index)
        return any((id(operator.graph.owner(name)), name) in self._values for name in names)

    @cached_property
    def _values(self) -> set[tuple[int, str]]:
        """The values that depend on the model's inputs, by graph and name.

        One pass suffices, because operators follow those that compute their inputs.
        """
        values: set[tuple[int, str]] = set()
        for graph in self._model.graphs:  # inner graphs follow the graph that contains them
            values |= {(id(graph), name) for name in graph.fixed - graph.constants.keys()}
            for operator in graph.operators:
                plain = operator.key not in _WITH_GRAPHS
                if not plain or any((id(graph.owner(name)), name) in values for name in operator.inputs):
                    values |= {(id(graph), name) for name in operator.outputs}
        return values


def _transposes(operator: Operator, index: int, rank: int) -> bool | None:
    """Return True if an operator transposes a matrix, False if it keeps the orientation, and None otherwise."""
    if operator.key != _TRANSPOSE:
        return False if (operator.key in _THROUGH and index == 0) or operator.key in _ELEMENTWISE else None
    order = operator.integers("perm") or tuple(reversed(range(rank)))
    identity = tuple(range(len(order)))
    if order == identity:
        return False
    return True if order == (*identity[:-2], *identity[:-3:-1]) else None
