"""Storage of tensors as inputs of operators: codes for ``DequantizeLinear`` or ``MatMulNBits``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from ingot.core.numeric.dtypes import DTYPES
from ingot.core.parsing.wire import bytes_field, number_field
from ingot.errors import CodecError
from ingot.formats.onnx.graph import ATTRIBUTES, DOMAIN, INPUTS, MICROSOFT, NODE_NAME, OP_TYPE, OUTPUTS
from ingot.formats.onnx.sites import LeftError
from ingot.formats.onnx.slots import ConstantPoint, Conversion, Padded, Points, Repeated
from ingot.formats.onnx.types import BY_DTYPE, BY_NAME, FLOATING, OnnxType
from ingot.model.layouts.affine import (
    CODES,
    ROWS_LSB,
    SCALES,
    ZEROS,
    AffineLayout,
    Constant,
    Group,
    Offsets,
    PerTensor,
    Row,
)
from ingot.model.layouts.affine import Points as PointsPart
from ingot.model.layouts.base import Shape
from ingot.model.layouts.dense import DATA, DenseLayout
from ingot.model.layouts.grid import scale_dims
from ingot.model.layouts.scaled_codebook import INDICES, LOW_FIRST, ScaledCodebookLayout, Tiles
from ingot.model.spec import TensorSpec

CODED = "_quantized"
BLOCKS = (256, 128, 64, 32, 16)
_FP8 = ("f8_e4m3fn", "f8_e5m2")
_MODERN = 99
# AttributeProto: name, i, type; INT of AttributeType.
_ATTRIBUTE_NAME = 1
_INTEGER = 3
_ATTRIBUTE_TYPE = 20
_INT = 2


@dataclass(frozen=True, slots=True)
class NewConstant:
    """A constant to write: the suffix of its name, its type and dimensions, and the source of its numbers.

    The source is the part ``role``, converted if ``conversion`` is set, or a repeated zero point.
    """

    suffix: str
    type: OnnxType
    dims: Shape
    role: str = ""
    conversion: Conversion | None = None
    point: ConstantPoint | None = None

    @property
    def nbytes(self) -> int:
        return self.type.nbytes(prod(self.dims))


@dataclass(frozen=True, slots=True)
class StorageForm:
    """The constants that store a tensor, and the type and attributes of the operator that uses them.

    ``key`` is None for dense values, which need no operator.
    """

    numbers: tuple[NewConstant, ...]
    key: tuple[str, str] | None = None
    attributes: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Versions:
    """The versions of ONNX's operators and of the file format in a model."""

    opset: int = _MODERN
    ir: int = _MODERN


def dense_form(spec: TensorSpec) -> StorageForm:
    """Return the storage of a dense constant; raises ``LeftError``."""
    layout = DenseLayout.from_tensor(spec)
    type = BY_DTYPE.get(spec.dtype)
    if type is None or layout.holder is not None or any(part.encoding != "raw" for part in spec.parts):
        raise LeftError(f"a constant stores uncompressed values of a type of ONNX, found {spec.dtype}")
    if type.nbytes(spec.size) != spec.nbytes:
        raise LeftError("its number of bytes does not fit its shape")
    return StorageForm((NewConstant("", type, spec.shape, DATA),))


def dequantize_form(spec: TensorSpec, versions: Versions) -> StorageForm:
    """Return the storage of codes for ``DequantizeLinear``; raises ``LeftError``."""
    if spec.codec == AffineLayout.codec:
        constants, dims = _integers(spec)
    elif spec.codec == ScaledCodebookLayout.codec:
        constants, dims = _small_floats(spec)
    else:
        raise LeftError(f"no operator of ONNX can express codec {spec.codec}")
    attributes, scales, opset = _grid(spec.shape, dims)
    codes = constants[0].type
    opset = max(opset, 21 if codes.bits < 8 else 19 if not codes.integer else 10)
    opset = max(opset, 10 if spec.dtype == "f32" else 19)
    if versions.opset < opset or (codes.bits < 8 and versions.ir < 10):
        raise LeftError(
            f"DequantizeLinear of {codes.name} on this grid needs opset {opset}, the model has {versions.opset} "
            f"(version {versions.ir} of ONNX): convert the model to a later opset first"
        )
    fixed = tuple(item if item.suffix == CODED else replace(item, dims=scales) for item in constants)
    return StorageForm(fixed, ("", "DequantizeLinear"), attributes)


def _integers(spec: TensorSpec) -> tuple[tuple[NewConstant, ...], Shape]:
    layout = _affine(spec)
    dims = scale_dims(layout, spec.shape)
    if dims is None:
        raise LeftError("its scales form no grid")
    if layout.bits not in (4, 8):
        raise LeftError(f"integers of DequantizeLinear have 4 or 8 bits, found {layout.bits}")
    if not layout.is_flat(spec.shape):
        raise LeftError("its codes are not a single stream of bits")
    type = BY_NAME[f"{'' if layout.signed else 'u'}int{layout.bits}"]
    numbers = [NewConstant(CODED, type, spec.shape, CODES), NewConstant("_scale", BY_DTYPE[layout.scales], (), SCALES)]
    count = prod(dims)
    if isinstance(layout.zero, PointsPart):
        points = Points(1, count, layout.bits, layout.signed, layout.scales)
        numbers.append(NewConstant("_zero_point", type, (), ZEROS, points))
    elif isinstance(layout.zero, Constant):
        numbers.append(
            NewConstant("_zero_point", type, (), point=ConstantPoint(layout.zero.point, 1, count, layout.bits))
        )
    return tuple(numbers), dims


def _small_floats(spec: TensorSpec) -> tuple[tuple[NewConstant, ...], Shape]:
    layout = ScaledCodebookLayout.from_tensor(spec)
    shape = spec.shape
    is_plain = layout.second is None and layout.nested is None and layout.factor is None and not layout.transposed
    if layout.values not in _FP8 or not is_plain or layout.order != LOW_FIRST or len(shape) != 2:
        raise LeftError("small floats of DequantizeLinear are matrices of float8e4m3fn or float8e5m2")
    if layout.scales != spec.dtype or layout.scales not in FLOATING:
        raise LeftError(_scale_type(layout.scales, spec.dtype))
    rows, cols = shape
    match layout.grid:
        case PerTensor():
            dims = (1, 1)
        case Row():
            dims = (rows, 1)
        case Group(columns):
            dims = (rows, cols // columns)
        case Tiles(tall, wide) if not (rows % tall and tall < rows) and not (cols % wide and wide < cols):
            dims = (-(-rows // tall), -(-cols // wide))
        case _:
            raise LeftError("its blocks do not divide it")
    numbers = NewConstant(CODED, BY_DTYPE[layout.values], shape, INDICES)
    return (numbers, NewConstant("_scale", BY_DTYPE[layout.scales], (), SCALES)), dims


def _scale_type(scale_type: str, expected: str) -> str:
    return f'its scales must be {expected} like the values, found {scale_type}; set scales = "source" in the rule'


def _affine(spec: TensorSpec) -> AffineLayout:
    try:
        layout = AffineLayout.from_tensor(spec)
    except CodecError as error:
        raise LeftError(error.message) from error
    if layout.scales != spec.dtype:
        raise LeftError(_scale_type(layout.scales, spec.dtype))
    if isinstance(layout.zero, Offsets):
        raise LeftError("its zero points must be integers, found offsets")
    if any(part.encoding != "raw" for part in spec.parts) or not spec.size:
        raise LeftError("its constants must be uncompressed and not empty")
    return layout


def _grid(shape: Shape, dims: Shape) -> tuple[tuple[tuple[str, int], ...], Shape, int]:
    """Return, for scales of shape ``dims``: the attributes of ``DequantizeLinear``, the shape to write, and the lowest
    opset.
    """
    if prod(dims) == 1:
        return (), (), 10
    varying = [axis for axis, count in enumerate(dims) if count != 1]
    if len(varying) == 1 and dims[varying[0]] == shape[varying[0]]:
        return (("axis", varying[0]),), (dims[varying[0]],), 13
    blocked = [axis for axis, (size, count) in enumerate(zip(shape, dims, strict=True)) if size != count]
    if len(blocked) != 1:
        raise LeftError(f"its blocks must be along one dimension, found scales {list(dims)} for {list(shape)}")
    return (("axis", blocked[0]), ("block_size", shape[blocked[0]] // dims[blocked[0]])), dims, 21


def nbits_form(spec: TensorSpec) -> StorageForm:
    """Return the storage of codes for ``MatMulNBits``; raises ``LeftError``."""
    if spec.codec != AffineLayout.codec or len(spec.shape) != 2:
        raise LeftError("MatMulNBits multiplies with integers in groups")
    layout, (rows, cols) = _affine(spec), spec.shape
    if layout.bits not in (4, 8) or layout.signed or layout.packing != ROWS_LSB or layout.matrix is not None:
        raise LeftError(f"MatMulNBits has unsigned codes of 4 or 8 bits row by row, found {layout.bits} bits")
    size = DTYPES[layout.scales].bits // 8
    repeats = 1
    if isinstance(layout.grid, Row):
        block = next((block for block in BLOCKS if cols % block == 0), 32)
        repeats = -(-cols // block)
    elif isinstance(layout.grid, Group) and layout.grid.columns in BLOCKS:
        block = layout.grid.columns
    else:
        raise LeftError(f"MatMulNBits has a scale for a row or for {', '.join(map(str, BLOCKS))} columns")
    groups = -(-cols // block)
    row_bytes = -(-cols * layout.bits // 8)
    blob = block * layout.bits // 8
    padded = None if row_bytes == groups * blob else Padded(rows, row_bytes, groups * blob)
    repeated = Repeated(rows, repeats, size) if repeats > 1 else None
    numbers = [
        NewConstant("", BY_NAME["uint8"], (rows, groups, blob), CODES, padded),
        NewConstant("_scales", BY_DTYPE[layout.scales], (rows, groups), SCALES, repeated),
    ]
    width = -(-groups * layout.bits // 8)
    if isinstance(layout.zero, PointsPart):
        if repeats > 1:
            raise LeftError("MatMulNBits has zero points for groups, not for rows: choose a group")
        points = Points(rows, groups, layout.bits, False, layout.scales)
        numbers.append(NewConstant("_zero_points", BY_NAME["uint8"], (rows, width), ZEROS, points))
    elif not isinstance(layout.zero, Constant) or layout.zero.point != 1 << (layout.bits - 1):
        point = layout.zero.point if isinstance(layout.zero, Constant) else 0
        same = ConstantPoint(point, rows, groups, layout.bits)
        numbers.append(NewConstant("_zero_points", BY_NAME["uint8"], (rows, width), point=same))
    attributes = (("K", cols), ("N", rows), ("bits", layout.bits), ("block_size", block))
    return StorageForm(tuple(numbers), (MICROSOFT, "MatMulNBits"), attributes)


def operator(
    key: tuple[str, str],
    name: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    attributes: Sequence[tuple[str, int]] = (),
    extra: bytes = b"",
) -> bytes:
    """Return a NodeProto; ``extra`` are additional encoded fields."""
    domain, type = key
    message = b"".join(bytes_field(INPUTS, item) for item in inputs)
    message += b"".join(bytes_field(OUTPUTS, item) for item in outputs)
    message += bytes_field(NODE_NAME, name) + bytes_field(OP_TYPE, type)
    for label, value in attributes:
        content = bytes_field(_ATTRIBUTE_NAME, label) + number_field(_INTEGER, value)
        message += bytes_field(ATTRIBUTES, content + number_field(_ATTRIBUTE_TYPE, _INT))
    return message + (bytes_field(DOMAIN, domain) if domain else b"") + extra
