"""Convert ``const`` and ``constexpr`` operations to tensors (spec/coreml.md, "Operations")."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod

from ingot.core.numeric.dtypes import element_count
from ingot.formats.coreml.expressions import expression_of
from ingot.formats.coreml.graph import SMALL, Graph, check_output, expect, float_type, is_same_blob
from ingot.formats.coreml.mil import Operation
from ingot.formats.coreml.site import Expression, LeftError, Slot
from ingot.formats.coreml.types import BY_NAME, MilType
from ingot.formats.coreml.values import Value
from ingot.formats.coreml.weights import Shape, to_numbers
from ingot.model.layouts.affine import CODES as CODES_PART
from ingot.model.layouts.affine import NO_ZERO, POINTS, SCALES, ZEROS, AffineLayout, Constant, Zero
from ingot.model.layouts.base import Layout
from ingot.model.layouts.dense import DATA, DenseLayout
from ingot.model.layouts.grid import on_grid
from ingot.model.layouts.palette import CODEBOOK, INDICES, VECTOR_SIZES, PaletteLayout
from ingot.model.layouts.palette import SCALES as FACTORS
from ingot.model.layouts.sparse import MASK, NONZEROS, MaskLayout

CODES = ("int8", "uint8", "int4", "uint4")
LUT_BITS = (1, 2, 3, 4, 6, 8)


@dataclass(frozen=True, slots=True)
class ConstantTensor:
    """The tensor that an operation computes from its inputs: type, shape, layout, and the stored numbers by role."""

    type: MilType
    shape: Shape
    layout: Layout
    slots: Mapping[str, Slot]


def dense(graph: Graph, operation: Operation) -> ConstantTensor | None:
    """Return the tensor of a ``const`` operation; None if its value is a setting.

    Settings are text, scalars, and integers and bools that the program itself contains.
    """
    value = operation.attributes.get("val")
    if not isinstance(value, Value) or (value.blob is None and not is_array(value)):
        return None
    slot = graph.slot(operation, "val")
    if slot.type.dtype is None or slot.type.name.startswith("fp8"):
        raise LeftError(f"Ingot has no element type for {slot.type.name}")
    check_output(operation, 0, slot.type, slot.dims)
    return ConstantTensor(slot.type, slot.dims, DenseLayout(str(slot.type.dtype)), {DATA: slot})


def is_array(value: Value) -> bool:
    """Return whether a value is a float array, like weights; settings have other types."""
    floats = value.type is not None and not value.type.integer
    return floats and value.dims is not None and len(value.dims) > 0 and prod(value.dims) > 0


def computed_tensor(graph: Graph, operation: Operation) -> ConstantTensor:
    """Return the computed values of any constexpr operation as a dense tensor."""
    expression = expression_of(graph, operation)
    if len(operation.outputs) != 1:
        raise LeftError(f"{operation.type} has {len(operation.outputs)} outputs instead of one")
    dtype = float_type(expression.type, "values")
    slots = {DATA: _computed_slot(expression, dtype)}
    return ConstantTensor(expression.type, expression.dims, DenseLayout(dtype), slots)


def _computed_slot(expression: Expression, dtype: str) -> Slot:
    return Slot((), expression.type, expression.dims, dtype, computed=expression)


def affine_dequantize(graph: Graph, operation: Operation) -> ConstantTensor:
    """Return a tensor of iOS 16: ``scale * (quantized_data - zero_point)``.

    Scale and zero point are scalars, or vectors along ``axis``.
    """
    data = graph.slot(operation, "quantized_data", "u8")
    scale = graph.slot(operation, "scale")
    expect(operation, data.type.name in CODES[:2], "codes of int8 or uint8", data.type.name)
    dtype = float_type(scale.type, "scales")
    rank = len(data.dims)
    axis = graph.integer(operation, "axis") or 0
    expect(operation, -rank <= axis < max(rank, 1), f"an axis of {rank} dimensions", axis)
    scale_grid = [1] * rank
    if scale.dims:
        expect(
            operation,
            len(scale.dims) == 1 and rank > 0 and 0 < scale.dims[0] == data.dims[axis],
            "a scale per index",
            scale.dims,
        )
        scale_grid[axis] = scale.dims[0]
    zeros, zero = _zeros(graph, operation, "zero_point", data.type, scale)
    check_output(operation, 0, scale.type, data.dims)
    layout = on_grid(data.dims, tuple(scale_grid), (data.type.bits, data.type.signed), zero, dtype)
    return ConstantTensor(scale.type, data.dims, layout, {CODES_PART: data, SCALES: scale, **zeros})


def blockwise_shift_scale(graph: Graph, operation: Operation) -> ConstantTensor:
    """Return a tensor of iOS 18: ``scale * (data - offset)``, with scales of the data's rank over blocks."""
    data = graph.slot(operation, "data", "u8")
    slots, layout, scale = _blockwise(graph, operation, data.type, data.dims)
    check_output(operation, 0, scale.type, data.dims)
    return ConstantTensor(scale.type, data.dims, layout, {CODES_PART: data, **slots})


def _blockwise(
    graph: Graph, operation: Operation, type: MilType, shape: Shape
) -> tuple[dict[str, Slot], AffineLayout, Slot]:
    """Return, for the ``operation`` on codes with ``type`` and ``shape``: the other parts, the layout, and the slot of
    the scales.
    """
    if type.name not in CODES:
        raise LeftError(f"codes of {type.name}")
    scale = graph.slot(operation, "scale")
    dtype = float_type(scale.type, "scales")
    fits = len(scale.dims) == len(shape) and all(
        count > 0 and size % count == 0 for size, count in zip(shape, scale.dims, strict=False)
    )
    expect(operation, fits, f"scales whose sizes divide those of {list(shape)}", list(scale.dims))
    zeros, zero = _zeros(graph, operation, "offset", type, scale)
    layout = on_grid(shape, scale.dims, (type.bits, type.signed), zero, dtype)
    return {SCALES: scale, **zeros}, layout, scale


def _zeros(graph: Graph, operation: Operation, key: str, type: MilType, scale: Slot) -> tuple[dict[str, Slot], Zero]:
    """Return the part ``zeros``, keyed by its role, and the zero points of the layout.

    The mapping is empty if the layout needs no such part.

    Equal zero points become a constant of the layout, because coremltools writes a vector of zeros for symmetric
    scales.
    """
    if graph.param(operation, key) is None:
        return {}, NO_ZERO
    slot = graph.slot(operation, key)
    if slot.type.name not in (type.name, "fp32", "fp16"):
        expect(operation, False, f"zero points of {type.name} or floats", slot.type.name)
    if slot.dims != scale.dims and slot.count != 1:
        expect(operation, scale.count == 1 or len(slot.dims) == len(scale.dims), "a zero point per scale", slot.dims)
        raise LeftError("scales and zero points of different shapes")
    if slot.count <= SMALL:
        zero_point = _common_zero_point(graph.weights.read(slot.values[0]), slot, type)
        if zero_point is not None:
            return {}, Constant(zero_point) if zero_point else NO_ZERO
    if not slot.type.integer:
        raise LeftError("zero points that are not integers in the range of the codes")
    if slot.count != scale.count:
        raise LeftError("scales and zero points of different shapes")
    return {ZEROS: replace(slot, dtype=str(scale.type.dtype), spread=slot.dims)}, POINTS


def _common_zero_point(data: bytes, slot: Slot, type: MilType) -> int | None:
    """Return the common value of all zero points in ``data`` if it is in the range of the codes; else None."""
    numbers = to_numbers(data, slot.type, slot.count, "f32")
    first = float(numbers[0]) if numbers.size else 0.0
    lowest = -(1 << (type.bits - 1)) if type.signed else 0
    is_valid = lowest <= first < lowest + (1 << type.bits) and first == int(first)
    return int(first) if is_valid and bool((numbers == first).all()) else None


def lut_to_dense(graph: Graph, operation: Operation) -> ConstantTensor:
    """Return the tensor of a lookup ``constexpr_lut_to_dense``.

    An operation of iOS 16 declares the shape, and its indices are packed into bytes.
    """
    if "shape" in operation.attributes:
        return _lut_ios16(graph, operation)
    indices = graph.slot(operation, "indices", "u8")
    slots, layout, type = _codebooks(graph, operation, indices.type, indices.dims)
    shape = list(indices.dims)
    if shape:
        shape[layout.vector_axis] *= layout.vector_size
    element_count(shape, "coreml.value", operation.location)
    check_output(operation, 0, type, tuple(shape))
    return ConstantTensor(type, tuple(shape), layout, {INDICES: indices, **slots})


def _lut_ios16(graph: Graph, operation: Operation) -> ConstantTensor:
    indices = graph.slot(operation, "indices")
    lut = graph.slot(operation, "lut")
    shape = graph.declared_shape(operation)
    dtype = float_type(lut.type, "a palette")
    bits = lut.count.bit_length() - 1
    expect(
        operation,
        len(lut.dims) == 1 and lut.count == 1 << bits and bits in LUT_BITS and bits != 3,
        "a palette of 2, 4, 16, 64 or 256 entries",
        list(lut.dims),
    )
    _packed(graph, operation, indices, prod(shape), bits)
    check_output(operation, 0, lut.type, shape)
    layout = PaletteLayout(bits, (1,) * len(shape), 1, 0, dtype, dtype)
    return ConstantTensor(lut.type, shape, layout, {INDICES: indices, CODEBOOK: lut})


def _codebooks(
    graph: Graph, operation: Operation, type: MilType, shape: Shape
) -> tuple[dict[str, Slot], PaletteLayout, MilType]:
    """Return parts, layout and element type of the palettes that ``operation`` applies to indices."""
    expect(operation, not type.signed and type.bits in LUT_BITS, "indices of 1, 2, 3, 4, 6 or 8 bits", type.name)
    lut, scales, out = _codebook(graph, operation)
    dtype = float_type(out, "a palette")
    groups, entries, vector = lut.dims[:-2], lut.dims[-2:-1], lut.dims[-1:]
    fits = len(groups) == len(shape) and all(g > 0 and n % g == 0 for n, g in zip(shape, groups, strict=True))
    expect(operation, fits, f"palettes per group of indices {list(shape)}", list(lut.dims))
    expect(operation, entries == (1 << type.bits,) and vector[0] > 0, f"{1 << type.bits} entries", list(lut.dims))
    if vector[0] not in VECTOR_SIZES:
        raise LeftError(f"entries of {vector[0]} numbers")
    slots = {CODEBOOK: lut}
    if scales is not None:
        slots[FACTORS] = scales if scales.dims == (*groups, 1, 1) else replace(scales, spread=(*groups, 1, 1))
    axis = graph.integer(operation, "vector_axis") if vector[0] > 1 else 0
    expect(operation, axis is not None and (not shape or -len(shape) <= axis < len(shape)), "a vector axis", axis)
    axis = axis % len(shape) if shape and axis else 0
    factors = None if scales is None else scales.dtype
    return slots, PaletteLayout(type.bits, groups, vector[0], axis, dtype, lut.dtype, factors), out


def _codebook(graph: Graph, operation: Operation) -> tuple[Slot, Slot | None, MilType]:
    """Return the slot of an operation's palettes, the slot of their scales or None, and the type of decoded values.

    If a scaling operation has one scale per palette, the parts are the numbers in the package. If the program computes
    the palettes in another way, the part contains the computed values.
    """
    table = graph.param(operation, "lut")
    if not isinstance(table, tuple):
        lut = graph.slot(operation, "lut")
        return lut, None, lut.type
    try:
        return _scaled_codebook(graph, *table)
    except LeftError:
        expression = expression_of(graph, *table)
        return _computed_slot(expression, float_type(expression.type, "a palette")), None, expression.type


def _scaled_codebook(graph: Graph, operation: Operation, index: int) -> tuple[Slot, Slot, MilType]:
    if operation.type != "constexpr_blockwise_shift_scale" or index or graph.param(operation, "offset") is not None:
        raise LeftError("palettes that are computed in another way than scaling")
    lut = graph.slot(operation, "data")
    scales = graph.slot(operation, "scale")
    exact = lut.type.name in ("int8", "uint8", "fp16", scales.type.name)
    if not exact or scales.type.name not in ("fp16", "fp32"):
        raise LeftError(f"palettes of {lut.type.name} with scales of {scales.type.name}")
    check_output(operation, 0, scales.type, lut.dims)
    groups = (*lut.dims[:-2], 1, 1)
    if len(scales.dims) != len(lut.dims) or any(n not in (1, g) for n, g in zip(scales.dims, groups, strict=True)):
        raise LeftError("palettes without exactly one scale each")
    return lut, scales, scales.type


def sparse_to_dense(graph: Graph, operation: Operation) -> ConstantTensor:
    """Return the tensor that consists of a bit mask and the values at its set bits.

    The values may be the output of another operation.
    """
    values = graph.param(operation, "nonzero_data")
    if isinstance(values, tuple):
        return _sparse_chain(graph, operation, values[0])
    nonzeros = graph.slot(operation, "nonzero_data")
    mask = graph.slot(operation, "mask")
    dtype = float_type(nonzeros.type, "kept values")
    if "shape" in operation.attributes:
        shape = graph.declared_shape(operation)
        _packed(graph, operation, mask, prod(shape), 1)
    else:
        shape = mask.dims
    _check_mask(operation, mask, nonzeros, shape)
    check_output(operation, 0, nonzeros.type, shape)
    layout = MaskLayout(dtype, nonzeros.count, DenseLayout(dtype))
    return ConstantTensor(nonzeros.type, shape, layout, {MASK: replace(mask, dtype="u8"), NONZEROS: nonzeros})


def _sparse_chain(graph: Graph, operation: Operation, inner: Operation) -> ConstantTensor:
    """Return a pruned tensor whose nonzero values are palette indices, or affine codes with scales.

    ``inner`` decodes the nonzero values; ``operation`` puts them into the dense shape.
    """
    if inner.type == "constexpr_lut_to_sparse":
        mask = graph.slot(inner, "indices_mask", "u8")
        nonzeros = graph.slot(inner, "indices_nonzero_data", "u8")
        slots, palette, type = _codebooks(graph, inner, nonzeros.type, mask.dims)
        if palette.vector_size != 1:
            raise LeftError("kept vectors")
        layout: Layout = palette
    elif inner.type == "constexpr_sparse_blockwise_shift_scale":
        mask = graph.slot(inner, "data_mask", "u8")
        nonzeros = graph.slot(inner, "nonzero_data", "u8")
        slots, layout, scale = _blockwise(graph, inner, nonzeros.type, mask.dims)
        type = scale.type
    else:
        raise LeftError(f"kept values from {inner.type}")
    declared_mask = graph.param(operation, "mask")
    dtype = str(type.dtype)
    if isinstance(declared_mask, Value):
        if not is_same_blob(declared_mask, mask.values[0]):
            raise LeftError("two masks")
        mask = replace(mask, values=(*mask.values, declared_mask))
    elif declared_mask is None or declared_mask[0] is not inner:
        raise LeftError("the mask of another operation")
    _check_mask(operation, mask, nonzeros, mask.dims)
    check_output(operation, 0, type, mask.dims)
    return ConstantTensor(
        type,
        mask.dims,
        MaskLayout(dtype, nonzeros.count, layout),
        {MASK: mask, NONZEROS: nonzeros, **slots},
    )


def _check_mask(operation: Operation, mask: Slot, nonzeros: Slot, shape: Shape) -> None:
    one_bit = mask.type.name == "uint1" or "shape" in operation.attributes
    expect(operation, one_bit, "a mask of uint1", mask.type.name)
    fits = len(nonzeros.dims) == 1 and nonzeros.count <= prod(shape)
    expect(operation, fits, f"at most {prod(shape)} kept values", list(nonzeros.dims))


def _packed(graph: Graph, operation: Operation, slot: Slot, count: int, bits: int) -> None:
    """Raise an error unless a slot contains bytes with ``count`` packed numbers, and zeros after the last number."""
    expected = (count * bits + 7) // 8
    expect(operation, slot.type is BY_NAME["uint8"] and slot.dims == (expected,), f"{expected} bytes", list(slot.dims))
    graph.check_last(slot, -count * bits % 8)


MAPPED: Mapping[str, Callable[[Graph, Operation], ConstantTensor | None]] = {
    "const": dense,
    "constexpr_affine_dequantize": affine_dequantize,
    "constexpr_blockwise_shift_scale": blockwise_shift_scale,
    "constexpr_lut_to_dense": lut_to_dense,
    "constexpr_sparse_to_dense": sparse_to_dense,
}
