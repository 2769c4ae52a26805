"""Constants that a program computes from other constants: types, shapes and values.

The values equal those of coremltools' ``decompress_weights`` bit for bit. An expression is built and checked when a
package is opened; its numbers are read and computed on access.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod

import numpy as np

from ingot.core.numeric.dtypes import element_count
from ingot.formats.coreml.graph import Graph, check_output, expect
from ingot.formats.coreml.mil import Operation
from ingot.formats.coreml.site import Expression, LeftError
from ingot.formats.coreml.types import BY_NAME, MilType
from ingot.formats.coreml.weights import Shape, to_numbers
from ingot.model.tensor import Array

MAX_DEPTH = 8
"""Maximum length of a chain of operations that compute one constant."""
_COMPUTED = ("fp16", "fp32")
_CODES = (*_COMPUTED, "int4", "uint4", "int8", "uint8")
_INDICES = ("uint1", "uint2", "uint3", "uint4", "uint6", "uint8")
_ALL_BITS = {1, 2, 4, 6, 8}


def expression_of(graph: Graph, operation: Operation, index: int = 0, depth: int = 0) -> Expression:
    """Return the expression for an output of an operation; types and shapes are checked, no weights are read.

    Raises ``FormatError`` ``coreml.operation``, ``coreml.reference``; ``LeftError`` if the operation, or an operation
    that feeds it, is unknown.
    """
    outputs = graph.expressions.get(id(operation))
    if outputs is None:
        outputs = graph.expressions[id(operation)] = _build(graph, operation, depth)
    if isinstance(outputs, LeftError):
        raise LeftError(str(outputs))
    if not 0 <= index < len(outputs):
        raise LeftError(f"{operation.type} has no output {index}")
    return outputs[index]


def _build(graph: Graph, operation: Operation, depth: int) -> tuple[Expression, ...] | LeftError:
    """Return the expressions for the outputs of an operation, or the reason why they cannot be computed."""
    build = _BUILDERS.get(operation.type)
    if build is None:
        return LeftError(f"Ingot does not support {operation.type}")
    if depth >= MAX_DEPTH:
        return LeftError(f"more than {MAX_DEPTH} operations feed each other")
    try:
        outputs = build(_Params(graph, operation, depth))
    except LeftError as reason:
        return reason
    for index, item in enumerate(outputs):
        element_count(item.dims, "coreml.value", operation.location)
        check_output(operation, index, item.type, item.dims)
    if max(item.level for item in outputs) > MAX_DEPTH:
        return LeftError(f"more than {MAX_DEPTH} operations feed each other")
    return outputs


class _Params:
    """Access to the parameters of an operation as expressions, with checks of their types."""

    def __init__(self, graph: Graph, operation: Operation, depth: int) -> None:
        self._graph = graph
        self.operation = operation
        self._depth = depth
        self.location = operation.location
        self.ios16 = "shape" in operation.attributes

    def get(self, key: str, types: tuple[str, ...]) -> Expression:
        """Return the parameter ``key``, which must have one of ``types``.

        Raises ``LeftError`` for another type, ``FormatError`` ``coreml.operation`` if the parameter is missing, and the
        errors of ``expression_of``.
        """
        param = self._graph.param(self.operation, key)
        if isinstance(param, tuple):
            result = expression_of(self._graph, *param, self._depth + 1)
        else:
            value = self._graph.value(self.operation, key)
            type, dims = value.shaped()
            result = Expression(type, dims, value)
        if result.type.name not in types:
            raise LeftError(f"{key} of {result.type.name}")
        return result

    def has(self, key: str) -> bool:
        return self._graph.param(self.operation, key) is not None

    def integer(self, key: str) -> int | None:
        return self._graph.integer(self.operation, key)

    def require(self, met: bool, expected: str, actual: object) -> None:
        expect(self.operation, met, expected, actual)

    def shape(self) -> Shape:
        """Return the attribute ``shape`` of the operation, which operations of iOS 16 have."""
        return self._graph.declared_shape(self.operation)

    def make(
        self, type: MilType, dims: Shape, operands: Mapping[str, Expression], compute: Callable[..., Array]
    ) -> Expression:
        """Return an expression that calls ``compute`` with the operands as keywords."""
        level = 1 + max(operand.level for operand in operands.values())
        return Expression(type, dims, None, operands, lambda values: compute(**values), self.location, level)


def _cast(params: _Params) -> tuple[Expression, ...]:
    source = params.get("source_val", ("fp16",))
    declared = params.operation.outputs[0].code if params.operation.outputs else 0
    type = BY_NAME["fp32"]
    params.require(declared == type.code, "an output of fp32", f"type {declared}")
    return (params.make(type, source.dims, {"source": source}, lambda source: source.astype(np.float32)),)


def _affine(params: _Params) -> tuple[Expression, ...]:
    data, scale = params.get("quantized_data", ("int8", "uint8")), params.get("scale", _COMPUTED)
    rank = len(data.dims)
    axis = params.integer("axis") or 0
    params.require(-rank <= axis < max(rank, 1), f"an axis of {rank} dimensions", axis)
    operands = {"data": data, "scale": scale}
    if params.has("zero_point"):
        operands["zero"] = params.get("zero_point", ("int8", "uint8", *_COMPUTED))
    for key in ("scale", "zero"):
        dims = operands[key].dims if key in operands else ()
        params.require(not dims or dims == (data.dims[axis],), f"a {key} per index of dimension {axis}", list(dims))
    scale_shape = [1] * rank
    if rank:
        scale_shape[axis] = -1

    def compute(data: Array, scale: Array, zero: Array | None = None) -> Array:
        result = data.astype(np.float32)
        if zero is not None:
            result -= zero.astype(np.float32).reshape(scale_shape if zero.ndim else ())
        values: Array = (result * scale.reshape(scale_shape if scale.ndim else ())).astype(scale.dtype)
        return values

    return (params.make(scale.type, data.dims, operands, compute),)


def _shift_scale(params: _Params, dims: Shape) -> dict[str, Expression]:
    """Return the parameter ``scale`` and, if it exists, ``offset``, checked against data of shape ``dims``."""
    operands = {"scale": params.get("scale", _COMPUTED)}
    if params.has("offset"):
        operands["offset"] = params.get("offset", _CODES)
    for key, operand in operands.items():
        fits = len(operand.dims) == len(dims) and all(
            blocks > 0 and size % blocks == 0 for size, blocks in zip(dims, operand.dims, strict=False)
        )
        params.require(fits, f"{key} whose sizes divide those of {list(dims)}", list(operand.dims))
    if "offset" in operands and operands["offset"].dims != operands["scale"].dims:
        raise LeftError("scales and zero points of different shapes")
    return operands


def shift_and_scale(data: Array, scale: Array, offset: Array | None = None) -> Array:
    """Return ``scale * (data - offset)`` in the type of the scales; each scale applies to a block."""
    result = data.astype(scale.dtype)
    if offset is not None:
        result = result - _repeat(offset, data.shape)
    values: Array = (_repeat(scale, data.shape) * result).astype(scale.dtype)
    return values


def _repeat(values: Array, shape: Shape) -> Array:
    for axis, size in enumerate(shape):
        if values.shape[axis] not in (0, size):
            values = np.repeat(values, size // values.shape[axis], axis)
    return values


def _blockwise(params: _Params) -> tuple[Expression, ...]:
    data = params.get("data", _CODES)
    operands = _shift_scale(params, data.dims)
    return (params.make(operands["scale"].type, data.dims, {"data": data, **operands}, shift_and_scale),)


def _lookup(params: _Params, key: str, dims: Shape, type: MilType) -> tuple[Expression, int, int]:
    """Return the palettes for indices of shape ``dims``, the number of values per entry, and the values' axis."""
    params.require(type.name in _INDICES, "indices of 1, 2, 3, 4, 6 or 8 bits", type.name)
    lut = params.get(key, _CODES)
    groups, entries = lut.dims[:-2], lut.dims[-2:]
    fits = len(groups) == len(dims) and all(g > 0 and n % g == 0 for n, g in zip(dims, groups, strict=True))
    params.require(fits, f"palettes per group of indices {list(dims)}", list(lut.dims))
    params.require(
        len(entries) == 2 and entries[0] == 1 << type.bits and entries[1] > 0, "2**bits entries", list(lut.dims)
    )
    axis = params.integer("vector_axis") if entries[1] > 1 else 0
    params.require(axis is not None and (not dims or -len(dims) <= axis < len(dims)), "a vector axis", axis)
    params.require(entries[1] == 1 or bool(dims), "indices with a dimension for vectors", list(dims))
    return lut, entries[1], (axis or 0) % max(len(dims), 1)


def look_up(indices: Array, lut: Array, axis: int) -> Array:
    """Return the palette entries at ``indices``; the values of an entry are consecutive along ``axis``."""
    positions = np.ogrid[tuple(slice(size) for size in indices.shape)]
    groups = [
        position // max(1, size // count)
        for position, size, count in zip(positions, indices.shape, lut.shape, strict=False)
    ]
    entries: Array = lut[(*groups, indices)]
    if not indices.ndim:
        return entries.reshape(())
    moved = np.moveaxis(entries, -1, axis + 1)
    shape = list(indices.shape)
    shape[axis] *= lut.shape[-1]
    return np.ascontiguousarray(moved).reshape(shape)


def _longer(dims: Shape, axis: int, vector: int) -> Shape:
    return tuple(size * vector if dimension == axis else size for dimension, size in enumerate(dims))


def _lut(params: _Params) -> tuple[Expression, ...]:
    if params.ios16:
        return _lut_ios16(params)
    indices = params.get("indices", _INDICES)
    lut, vector, axis = _lookup(params, "lut", indices.dims, indices.type)
    operands = {"indices": indices, "lut": lut}
    return (
        params.make(
            lut.type,
            _longer(indices.dims, axis, vector),
            operands,
            lambda indices, lut: look_up(indices, lut, axis),
        ),
    )


def _lut_ios16(params: _Params) -> tuple[Expression, ...]:
    indices, lut, shape = params.get("indices", ("uint8",)), params.get("lut", _CODES), params.shape()
    count, bits = prod(shape), prod(lut.dims).bit_length() - 1
    params.require(
        len(lut.dims) == 1 and lut.dims[0] == 1 << bits and bits in _ALL_BITS, "2**bits entries", list(lut.dims)
    )
    params.require(indices.dims == ((count * bits + 7) // 8,), f"{(count * bits + 7) // 8} bytes", list(indices.dims))
    packed = MilType("", 0, 0, bits, None)

    def compute(indices: Array, lut: Array) -> Array:
        values: Array = lut[to_numbers(indices.tobytes(), packed, count, "u8")].reshape(shape)
        return values

    return (params.make(lut.type, shape, {"indices": indices, "lut": lut}, compute),)


def _scatter(params: _Params, values: Array, mask: Array) -> Array:
    """Return an array with ``values``, in order, at the positions where ``mask`` is not 0, and zeros elsewhere."""
    chosen = mask != 0
    params.require(int(chosen.sum()) == values.size, f"a mask with {values.size} bits set", int(chosen.sum()))
    result = np.zeros(mask.shape, values.dtype)
    result[chosen] = values
    return result


def _sparse(params: _Params) -> tuple[Expression, ...]:
    nonzeros = params.get("nonzero_data", _CODES)
    params.require(len(nonzeros.dims) == 1, "kept values in one dimension", list(nonzeros.dims))
    if not params.ios16:
        mask = params.get("mask", ("uint1",))
        return (
            params.make(
                nonzeros.type,
                mask.dims,
                {"values": nonzeros, "mask": mask},
                lambda values, mask: _scatter(params, values, mask),
            ),
        )
    mask, shape = params.get("mask", ("uint8",)), params.shape()
    count = prod(shape)
    params.require(mask.dims == ((count + 7) // 8,), f"{(count + 7) // 8} bytes", list(mask.dims))

    def compute(values: Array, mask: Array) -> Array:
        bits = np.unpackbits(mask, count=count, bitorder="little")
        return _scatter(params, values, bits).reshape(shape)

    return (params.make(nonzeros.type, shape, {"values": nonzeros, "mask": mask}, compute),)


def _sparse_outputs(
    params: _Params,
    operands: Mapping[str, Expression],
    type: MilType,
    compute: Callable[..., tuple[Array, Array]],
    vector: tuple[int, int] = (0, 1),
) -> tuple[Expression, ...]:
    """Return the two outputs of an operation on sparse data: the mask, and the values at its set bits."""
    mask = operands["mask"]
    nonzeros = operands["values"]
    params.require(len(nonzeros.dims) == 1, "kept values in one dimension", list(nonzeros.dims))
    axis, length = vector
    return (
        params.make(mask.type, _longer(mask.dims, axis, length), operands, lambda **values: compute(**values)[0]),
        params.make(type, (nonzeros.dims[0] * length,), operands, lambda **values: compute(**values)[1]),
    )


def _lut_to_sparse(params: _Params) -> tuple[Expression, ...]:
    mask, nonzeros = params.get("indices_mask", ("uint1",)), params.get("indices_nonzero_data", _INDICES)
    lut, vector, axis = _lookup(params, "lut", mask.dims, nonzeros.type)

    def compute(mask: Array, values: Array, lut: Array) -> tuple[Array, Array]:
        dense = look_up(_scatter(params, values, mask), lut, axis)
        longer = np.repeat(mask, vector, axis) if vector > 1 else mask
        return longer, dense[longer != 0]

    return _sparse_outputs(params, {"mask": mask, "values": nonzeros, "lut": lut}, lut.type, compute, (axis, vector))


def _sparse_blockwise(params: _Params) -> tuple[Expression, ...]:
    mask, nonzeros = params.get("data_mask", ("uint1",)), params.get("nonzero_data", _CODES)
    operands = _shift_scale(params, mask.dims)

    def compute(mask: Array, values: Array, scale: Array, offset: Array | None = None) -> tuple[Array, Array]:
        dense = shift_and_scale(_scatter(params, values, mask), scale, offset)
        return mask, dense[mask != 0]

    type = operands["scale"].type
    return _sparse_outputs(params, {"mask": mask, "values": nonzeros, **operands}, type, compute)


_BUILDERS: Mapping[str, Callable[[_Params], tuple[Expression, ...]]] = {
    "constexpr_cast": _cast,
    "constexpr_affine_dequantize": _affine,
    "constexpr_blockwise_shift_scale": _blockwise,
    "constexpr_lut_to_dense": _lut,
    "constexpr_sparse_to_dense": _sparse,
    "constexpr_lut_to_sparse": _lut_to_sparse,
    "constexpr_sparse_blockwise_shift_scale": _sparse_blockwise,
}
