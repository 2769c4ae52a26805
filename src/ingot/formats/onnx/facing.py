"""Which way round the operators of a graph take a matrix, told by those that use it."""

from __future__ import annotations

from functools import cached_property
from typing import Literal

from ingot.formats.onnx.graph import Graph, Model, Operator

Face = Literal["outputs", "inputs", "any"]
OUTPUTS: Face = "outputs"
"""[outputs, inputs]: a row for each output."""
INPUTS: Face = "inputs"
"""[inputs, outputs]: a row for each input."""
AS_IT_LIES: Face = "any"
"""Neither: a table, or numbers that are added, which lie the same way round wherever they are held."""

_PRODUCT, _GEMM, _TRANSPOSE = ("", "MatMul"), ("", "Gemm"), ("", "Transpose")
_TURNED: dict[Face, Face] = {INPUTS: OUTPUTS, OUTPUTS: INPUTS, AS_IT_LIES: AS_IT_LIES}
# Operators of one operand that give it with its axes as they were.
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
_MOST_STEPS = 64


class Faces:
    """Which way round matrices lie in a graph: what its operators make of their last two axes."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def of(self, graph: Graph, name: str, rank: int = 2) -> Face | None:
        """Return which way round the operators take the matrix ``name``; None where one of them does not tell.

        A value that is cast, turned or made of constants alone is followed to the operators that take it.
        """
        found, waiting, seen = set[Face](), [(graph, name, False)], set[tuple[int, str, bool]]()
        while waiting:
            graph, value, turned = waiting.pop()
            if (id(graph), value, turned) in seen:
                continue
            seen.add((id(graph), value, turned))
            uses = graph.uses.get(value, [])
            if not uses or value in graph.fixed or len(seen) > _MOST_STEPS:
                return None
            for operator, at in uses:
                face = self._face(operator, at)
                if face is not None:
                    found.add(_TURNED[face] if turned else face)
                    continue
                turns = _turns(operator, at, rank)
                if turns is None:
                    return None
                waiting += [(operator.graph, output, turned ^ turns) for output in operator.outputs if output]
        if len(found) > 1:
            found.discard(AS_IT_LIES)  # a table that is multiplied with too
        return found.pop() if len(found) == 1 else None

    def _face(self, operator: Operator, at: int) -> Face | None:
        """Return which way round an operator takes its input number ``at``; None where it does not tell."""
        if operator.key in (_PRODUCT, _GEMM) and at < 2:
            turned = operator.integer("transB" if at else "transA", 0) if operator.key == _GEMM else 0
            return INPUTS if bool(at) ^ bool(turned) else OUTPUTS
        table = operator.key == ("", "Gather") and at == 0 and operator.integer("axis", 0) == 0
        added = operator.key == _GEMM or (operator.key in _ELEMENTWISE and self._meets_values(operator, at))
        return AS_IT_LIES if table or added or (operator.key in _KERNELS and at == 1) else None

    def _meets_values(self, operator: Operator, at: int) -> bool:
        """Whether another operand is none of constants: else the result is a matrix of weights, too."""
        names = (name for index, name in enumerate(operator.inputs) if index != at)
        return any((id(operator.graph.owner(name)), name) in self._values for name in names)

    @cached_property
    def _values(self) -> set[tuple[int, str]]:
        """Names, with their graphs, that depend on inputs; operators come after those whose outputs they take."""
        values: set[tuple[int, str]] = set()
        for graph in self._model.graphs:  # each after the one around it
            values |= {(id(graph), name) for name in graph.fixed - graph.constants.keys()}
            for operator in graph.operators:
                plain = operator.key not in _WITH_GRAPHS
                if not plain or any((id(graph.owner(name)), name) in values for name in operator.inputs):
                    values |= {(id(graph), name) for name in operator.outputs}
        return values


def _turns(operator: Operator, at: int, rank: int) -> bool | None:
    """Return whether an operator gives a matrix turned; None where it gives something else."""
    if operator.key != _TRANSPOSE:
        return False if (operator.key in _THROUGH and at == 0) or operator.key in _ELEMENTWISE else None
    order = operator.integers("perm") or tuple(reversed(range(rank)))
    kept = tuple(range(len(order)))
    if order == kept:
        return False
    return True if order == (*kept[:-2], *kept[:-3:-1]) else None
