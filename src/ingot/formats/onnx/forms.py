"""What operators can say of a tensor's codes: ``DequantizeLinear`` in front of any, ``MatMulNBits`` of a MatMul."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from ingot.core.numeric.dtypes import DTYPES
from ingot.core.parsing.wire import bytes_field, number_field
from ingot.errors import CodecError
from ingot.formats.onnx.graph import ATTRIBUTES, DOMAIN, INPUTS, MICROSOFT, NODE_NAME, OP_TYPE, OUTPUTS
from ingot.formats.onnx.sites import LeftError
from ingot.formats.onnx.slots import Conversion, Padded, Points, Repeated, Same
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
    Row,
    Whole,
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
_ATTRIBUTE_NAME, _INTEGER, _ATTRIBUTE_TYPE, _INT = 1, 3, 20, 2


@dataclass(frozen=True, slots=True)
class Numbers:
    """A constant to be written: ``suffix`` of its name, type and dimensions, and what it is made of.

    That is the part ``role``, converted where there is a ``conversion``, or one number again and again.
    """

    suffix: str
    type: OnnxType
    dims: Shape
    role: str = ""
    conversion: Conversion | None = None
    same: Same | None = None

    @property
    def nbytes(self) -> int:
        return self.type.nbytes(prod(self.dims))


@dataclass(frozen=True, slots=True)
class Form:
    """Constants to be written, and what the operator that takes them says: its key and attributes; none for dense."""

    numbers: tuple[Numbers, ...]
    key: tuple[str, str] | None = None
    attributes: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Versions:
    """What a model states: of ONNX's operators, and of the format itself."""

    opset: int = _MODERN
    ir: int = _MODERN


def dense_form(spec: TensorSpec) -> Form:
    """Return a dense constant; raises ``LeftError``."""
    layout = DenseLayout.of(spec)
    type = BY_DTYPE.get(spec.dtype)
    if type is None or layout.holder is not None or any(part.encoding != "raw" for part in spec.parts):
        raise LeftError(f"a constant holds uncompressed values of a type of ONNX, not {spec.dtype}")
    if type.nbytes(spec.size) != spec.nbytes:
        raise LeftError("its values take another number of bytes")
    return Form((Numbers("", type, spec.shape, DATA),))


def dequantize_form(spec: TensorSpec, versions: Versions) -> Form:
    """Return codes for ``DequantizeLinear``; raises ``LeftError``."""
    if spec.codec == AffineLayout.codec:
        form, dims = _integers(spec)
    elif spec.codec == ScaledCodebookLayout.codec:
        form, dims = _small_floats(spec)
    else:
        raise LeftError(f"no operator says what codec {spec.codec} says")
    attributes, scales, wanted = _grid(spec.shape, dims)
    codes = form[0].type
    wanted = max(wanted, 21 if codes.bits < 8 else 19 if not codes.integer else 10)
    wanted = max(wanted, 10 if spec.dtype == "f32" else 19)
    if versions.opset < wanted or (codes.bits < 8 and versions.ir < 10):
        raise LeftError(
            f"DequantizeLinear of {codes.name} on this grid is of opset {wanted}, the model of {versions.opset} "
            f"(version {versions.ir} of ONNX): convert the model to a later one first"
        )
    fixed = tuple(item if item.suffix == CODED else replace(item, dims=scales) for item in form)
    return Form(fixed, ("", "DequantizeLinear"), attributes)


def _integers(spec: TensorSpec) -> tuple[tuple[Numbers, ...], Shape]:
    layout = _affine(spec)
    dims = scale_dims(layout, spec.shape)
    if dims is None:
        raise LeftError("its scales do not lie on a grid")
    if layout.bits not in (4, 8):
        raise LeftError(f"integers of DequantizeLinear have 4 or 8 bits, not {layout.bits}")
    if not layout.is_flat(spec.shape):
        raise LeftError("its codes are not one stream of bits")
    type = BY_NAME[f"{'' if layout.signed else 'u'}int{layout.bits}"]
    numbers = [Numbers(CODED, type, spec.shape, CODES), Numbers("_scale", BY_DTYPE[layout.scales], (), SCALES)]
    count = prod(dims)
    if isinstance(layout.zero, PointsPart):
        points = Points(1, count, layout.bits, layout.signed, layout.scales)
        numbers.append(Numbers("_zero_point", type, (), ZEROS, points))
    elif isinstance(layout.zero, Constant):
        numbers.append(Numbers("_zero_point", type, (), same=Same(layout.zero.point, 1, count, layout.bits)))
    return tuple(numbers), dims


def _small_floats(spec: TensorSpec) -> tuple[tuple[Numbers, ...], Shape]:
    layout, shape = ScaledCodebookLayout.of(spec), spec.shape
    plain = layout.second is None and layout.nested is None and layout.factor is None and not layout.transposed
    if layout.values not in _FP8 or not plain or layout.order != LOW_FIRST or len(shape) != 2:
        raise LeftError("small floats of DequantizeLinear are matrices of float8e4m3fn or float8e5m2")
    if layout.scales != spec.dtype or layout.scales not in FLOATING:
        raise LeftError(_scale_type(layout.scales, spec.dtype))
    rows, cols = shape
    match layout.grid:
        case Whole():
            dims = (1, 1)
        case Row():
            dims = (rows, 1)
        case Group(columns):
            dims = (rows, cols // columns)
        case Tiles(tall, wide) if not (rows % tall and tall < rows) and not (cols % wide and wide < cols):
            dims = (-(-rows // tall), -(-cols // wide))
        case _:
            raise LeftError("its blocks do not divide it")
    numbers = Numbers(CODED, BY_DTYPE[layout.values], shape, INDICES)
    return (numbers, Numbers("_scale", BY_DTYPE[layout.scales], (), SCALES)), dims


def _scale_type(found: str, wanted: str) -> str:
    return f'its scales are of the values\' type {wanted} there, found {found}; give the rule scales = "source"'


def _affine(spec: TensorSpec) -> AffineLayout:
    try:
        layout = AffineLayout.of(spec)
    except CodecError as error:
        raise LeftError(error.message) from error
    if layout.scales != spec.dtype:
        raise LeftError(_scale_type(layout.scales, spec.dtype))
    if isinstance(layout.zero, Offsets):
        raise LeftError("its zero points are integers there, not offsets")
    if any(part.encoding != "raw" for part in spec.parts) or not spec.size:
        raise LeftError("its constants are uncompressed, and not empty")
    return layout


def _grid(shape: Shape, dims: Shape) -> tuple[tuple[tuple[str, int], ...], Shape, int]:
    """Return the attributes for scales on a grid, the dimensions of the scales, and the opset."""
    if prod(dims) == 1:
        return (), (), 10
    alone = [axis for axis, own in enumerate(dims) if own != 1]
    if len(alone) == 1 and dims[alone[0]] == shape[alone[0]]:
        return (("axis", alone[0]),), (dims[alone[0]],), 13
    cut = [axis for axis, (size, own) in enumerate(zip(shape, dims, strict=True)) if size != own]
    if len(cut) != 1:
        raise LeftError(f"blocks lie along one dimension there, not as {list(dims)} of {list(shape)}")
    return (("axis", cut[0]), ("block_size", shape[cut[0]] // dims[cut[0]])), dims, 21


def nbits_form(spec: TensorSpec) -> Form:
    """Return codes for ``MatMulNBits``; raises ``LeftError``."""
    if spec.codec != AffineLayout.codec or len(spec.shape) != 2:
        raise LeftError("MatMulNBits multiplies with integers in groups")
    layout, (rows, cols) = _affine(spec), spec.shape
    if layout.bits not in (4, 8) or layout.signed or layout.packing != ROWS_LSB or layout.matrix is not None:
        raise LeftError(f"MatMulNBits has unsigned codes of 4 or 8 bits row by row, not {layout.bits} bits")
    size, times = DTYPES[layout.scales].bits // 8, 1
    if isinstance(layout.grid, Row):
        block = next((block for block in BLOCKS if cols % block == 0), 32)
        times = -(-cols // block)
    elif isinstance(layout.grid, Group) and layout.grid.columns in BLOCKS:
        block = layout.grid.columns
    else:
        raise LeftError(f"MatMulNBits has a scale for {', '.join(map(str, BLOCKS))} columns or a row")
    groups, own = -(-cols // block), -(-cols * layout.bits // 8)
    blob = block * layout.bits // 8
    padded = None if own == groups * blob else Padded(rows, own, groups * blob)
    repeated = Repeated(rows, times, size) if times > 1 else None
    numbers = [
        Numbers("", BY_NAME["uint8"], (rows, groups, blob), CODES, padded),
        Numbers("_scales", BY_DTYPE[layout.scales], (rows, groups), SCALES, repeated),
    ]
    width = -(-groups * layout.bits // 8)
    if isinstance(layout.zero, PointsPart):
        if times > 1:
            raise LeftError("MatMulNBits has zero points for groups, not for rows: choose a group")
        points = Points(rows, groups, layout.bits, False, layout.scales)
        numbers.append(Numbers("_zero_points", BY_NAME["uint8"], (rows, width), ZEROS, points))
    elif not isinstance(layout.zero, Constant) or layout.zero.point != 1 << (layout.bits - 1):
        point = layout.zero.point if isinstance(layout.zero, Constant) else 0
        same = Same(point, rows, groups, layout.bits)
        numbers.append(Numbers("_zero_points", BY_NAME["uint8"], (rows, width), same=same))
    attributes = (("K", cols), ("N", rows), ("bits", layout.bits), ("block_size", block))
    return Form(tuple(numbers), (MICROSOFT, "MatMulNBits"), attributes)


def operator(
    key: tuple[str, str],
    name: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    attributes: Sequence[tuple[str, int]] = (),
    extra: bytes = b"",
) -> bytes:
    """Return a NodeProto; ``extra`` are further fields of it."""
    domain, type = key
    made = b"".join(bytes_field(INPUTS, item) for item in inputs)
    made += b"".join(bytes_field(OUTPUTS, item) for item in outputs)
    made += bytes_field(NODE_NAME, name) + bytes_field(OP_TYPE, type)
    for label, value in attributes:
        content = bytes_field(_ATTRIBUTE_NAME, label) + number_field(_INTEGER, value)
        made += bytes_field(ATTRIBUTES, content + number_field(_ATTRIBUTE_TYPE, _INT))
    return made + (bytes_field(DOMAIN, domain) if domain else b"") + extra
