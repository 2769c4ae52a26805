"""Operators that compute with integers: which inputs are codes, and where the scales of these codes are.

Sources: the pages of ``QLinearConv``, ``QLinearMatMul``, ``MatMulInteger`` and ``ConvInteger`` of onnx 1.23, and of
onnxruntime's contributed operators. ``MatMulInteger`` and ``ConvInteger`` have no scales: dynamic quantization
multiplies their result by the product of both scales, so these are searched after the operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ingot.formats.onnx.graph import MICROSOFT, Operator

_CAST = ("", "Cast")
_MUL = ("", "Mul")
_PRODUCTS = (("", "MatMulInteger"), ("", "ConvInteger"))


@dataclass(frozen=True, slots=True)
class Codes:
    """The indices of related inputs of an operator type: codes, scales and zero points.

    ``axis`` is the dimension of the codes along which there are several scales. ``zero`` is None if the codes have no
    zero points. ``factor`` is set only for codes of a bias: the index of the input whose scale multiplies these scales.
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
# operators whose codes have no codec, with the indices of the inputs that are codes
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
    """The locations of the scales and zero points of an operator's codes: operators and indices of their inputs.

    Parameters
    ----------
    scales : (Operator, int)
    zero : (Operator, int) or None
    axis : int
        The dimension of the codes along which there are several scales.
    factor : (Operator, int) or None
        A scale that multiplies these scales.
    """

    scales: tuple[Operator, int]
    zero: tuple[Operator, int] | None
    axis: int
    factor: tuple[Operator, int] | None = None


def takes_codes(operator: Operator, index: int) -> bool:
    """Return whether an input of an operator is codes, even if their scales are unknown."""
    if operator.key in _PRODUCTS:
        return index < 2
    if index in _OTHERS.get(operator.key, ()):
        return True
    return any(item.codes == index for item in _TABLE.get(operator.key, ()))


def scale_source(operator: Operator, index: int) -> Scaled | None:
    """Return the locations of the scales and zero points of an operator's codes; None if they are unknown."""
    if operator.key in _PRODUCTS:
        scales = _scale_after(operator)
        axis = 0 if operator.type == "ConvInteger" else (-2, -1)[index]
        return None if scales is None else Scaled(scales, _optional_input(operator, index + 2), axis)
    for item in _TABLE.get(operator.key, ()):
        if item.codes == index:
            zero = None if item.zero is None else _optional_input(operator, item.zero)
            factor = None if item.factor is None else (operator, item.factor)
            transposed = operator.type == "QGemm" and item.factor is None and _is_transposed(operator, index)
            return Scaled((operator, item.scales), zero, (-3 - item.axis) if transposed else item.axis, factor)
    return None


def _is_transposed(operator: Operator, index: int) -> bool:
    return operator.integer("transB" if index else "transA", 0) != 0


def _optional_input(operator: Operator, index: int) -> tuple[Operator, int] | None:
    return (operator, index) if operator.input(index) else None


def _scale_after(operator: Operator) -> tuple[Operator, int] | None:
    """Return the location of the scale of weights in ``Cast(product) * (scale of inputs * scale of weights)``.

    ``operator`` computes the product. The result is None unless these operators follow and exactly one scale is
    constant.
    """
    cast = _only_use(operator)
    product = None if cast is None or cast.key != _CAST else _only_use(cast)
    if cast is None or product is None or product.key != _MUL:
        return None
    scale_names = [name for name in product.inputs if name not in cast.outputs]
    scales = operator.graph.producers.get(scale_names[0]) if len(scale_names) == 1 else None
    if scales is None or scales.key != _MUL:
        return None
    constants = [index for index, name in enumerate(scales.inputs) if _is_constant(scales, name)]
    return (scales, constants[0]) if len(constants) == 1 else None


def _is_constant(operator: Operator, name: str) -> bool:
    owner = operator.graph.owner(name)
    return owner is not None and name in owner.constants


def _only_use(operator: Operator) -> Operator | None:
    """Return the operator that uses an operator's output; None unless there is exactly one output with one use."""
    uses: Sequence[tuple[Operator, int]] = operator.graph.uses.get(operator.outputs[0], ()) if operator.outputs else ()
    return uses[0][0] if len(operator.outputs) == 1 and len(uses) == 1 else None
