"""Operators that compute with integers: which of their inputs are codes, and where the scales of these stand.

Sources: the pages of ``QLinearConv``, ``QLinearMatMul``, ``MatMulInteger`` and ``ConvInteger`` of onnx 1.23, and those
of onnxruntime's contributed operators. ``MatMulInteger`` and ``ConvInteger`` have no scales: dynamic quantization
multiplies their result with the product of both scales, so that these are found after the operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ingot.formats.onnx.graph import MICROSOFT, Operator

_CAST, _MUL = ("", "Cast"), ("", "Mul")
_PRODUCTS = (("", "MatMulInteger"), ("", "ConvInteger"))


@dataclass(frozen=True, slots=True)
class Codes:
    """One input of codes: the numbers of the inputs with codes, scales and zero points; ``axis`` of several scales.

    ``factor`` is the input whose scale is multiplied with these, for a bias; None for others.
    """

    codes: int
    scales: int
    zero: int | None
    axis: int
    factor: int | None = None


_TABLE: dict[tuple[str, str], tuple[Codes, ...]] = {
    ("", "QLinearConv"): (Codes(3, 4, 5, 0), Codes(8, 4, None, 0, 1)),
    (MICROSOFT, "QLinearConv"): (Codes(3, 4, 5, 0), Codes(8, 4, None, 0, 1)),
    ("", "QLinearMatMul"): (Codes(0, 1, 2, -2), Codes(3, 4, 5, -1)),
    (MICROSOFT, "QGemm"): (Codes(0, 1, 2, -2), Codes(3, 4, 5, -1), Codes(6, 4, None, -1, 1)),
    (MICROSOFT, "MatMulIntegerToFloat"): (Codes(0, 2, 4, -2), Codes(1, 3, 5, -1)),
    (MICROSOFT, "DynamicQuantizeMatMul"): (Codes(1, 2, 3, -1),),
}
# Operators whose codes have no codec; the numbers of the inputs that are codes.
_OTHERS: dict[tuple[str, str], tuple[int, ...]] = {
    (MICROSOFT, "GatherBlockQuantized"): (0,),
    (MICROSOFT, "MatMulBnb4"): (1,),
    (MICROSOFT, "MatMulFpQ4"): (1,),
    (MICROSOFT, "MatMulInteger16"): (0, 1),
    (MICROSOFT, "QAttention"): (1,),
    (MICROSOFT, "QEmbedLayerNormalization"): (2, 3, 4, 5, 6),
    (MICROSOFT, "QMoE"): (2, 5, 8),
}


@dataclass(frozen=True, slots=True)
class Scaled:
    """Where the scales of an operator's codes stand: operators and the numbers of their inputs.

    Parameters
    ----------
    scales : (Operator, int)
    zero : (Operator, int) or None
    axis : int
        The dimension of the codes along which there are several scales.
    factor : (Operator, int) or None
        A scale that is multiplied with these.
    """

    scales: tuple[Operator, int]
    zero: tuple[Operator, int] | None
    axis: int
    factor: tuple[Operator, int] | None = None


def takes_codes(operator: Operator, index: int) -> bool:
    """Whether an input of an operator is codes whose values the operator's scales tell, or nothing does."""
    if operator.key in _PRODUCTS:
        return index < 2
    if index in _OTHERS.get(operator.key, ()):
        return True
    return any(item.codes == index for item in _TABLE.get(operator.key, ()))


def scaled(operator: Operator, index: int) -> Scaled | None:
    """Return where the scales of an operator's codes stand; None if nothing tells."""
    if operator.key in _PRODUCTS:
        scales = _scale_after(operator)
        axis = 0 if operator.type == "ConvInteger" else (-2, -1)[index]
        return None if scales is None else Scaled(scales, _given(operator, index + 2), axis)
    for item in _TABLE.get(operator.key, ()):
        if item.codes == index:
            zero = None if item.zero is None else _given(operator, item.zero)
            factor = None if item.factor is None else (operator, item.factor)
            turned = operator.type == "QGemm" and item.factor is None and _is_turned(operator, index)
            return Scaled((operator, item.scales), zero, (-3 - item.axis) if turned else item.axis, factor)
    return None


def _is_turned(operator: Operator, index: int) -> bool:
    return operator.integer("transB" if index else "transA", 0) != 0


def _given(operator: Operator, index: int) -> tuple[Operator, int] | None:
    return (operator, index) if operator.input(index) else None


def _scale_after(operator: Operator) -> tuple[Operator, int] | None:
    """Return the constant scale in ``Cast(product) * (scale of inputs * scale of weights)``; None if there is none."""
    cast = _only_use(operator)
    product = None if cast is None or cast.key != _CAST else _only_use(cast)
    if cast is None or product is None or product.key != _MUL:
        return None
    other = [name for name in product.inputs if name not in cast.outputs]
    scales = operator.graph.producers.get(other[0]) if len(other) == 1 else None
    if scales is None or scales.key != _MUL:
        return None
    constants = [at for at, name in enumerate(scales.inputs) if _is_constant(scales, name)]
    return (scales, constants[0]) if len(constants) == 1 else None


def _is_constant(operator: Operator, name: str) -> bool:
    owner = operator.graph.owner(name)
    return owner is not None and name in owner.constants


def _only_use(operator: Operator) -> Operator | None:
    """Return the one operator that uses the one output of another."""
    uses: Sequence[tuple[Operator, int]] = operator.graph.uses.get(operator.outputs[0], ()) if operator.outputs else ()
    return uses[0][0] if len(operator.outputs) == 1 and len(uses) == 1 else None
