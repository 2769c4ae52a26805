"""The tensors of a graph: constants as they are, and codes with what ``DequantizeLinear`` and ``MatMulNBits`` say."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from ingot.core.names import role_of
from ingot.formats.onnx.graph import MICROSOFT, Model, Operator, matrix_uses
from ingot.formats.onnx.slots import Padded, Points, Slot
from ingot.formats.onnx.tensors import Constant
from ingot.formats.onnx.types import FLOATING
from ingot.model.layouts.affine import (
    CODES,
    NO_ZERO,
    POINTS,
    ROW,
    ROWS_LSB,
    SCALES,
    WHOLE,
    ZEROS,
    AffineLayout,
    Group,
    Zero,
)
from ingot.model.layouts.affine import Constant as OnePoint
from ingot.model.layouts.base import Layout, Shape
from ingot.model.layouts.dense import DATA, DenseLayout
from ingot.model.layouts.grid import on_grid
from ingot.model.layouts.scaled_codebook import INDICES, Grid, ScaledCodebookLayout, Tiles
from ingot.model.spec import PartSpec, TensorSpec

LEFT_RULE = "onnx.left"
DEQUANTIZE, NBITS = ("", "DequantizeLinear"), (MICROSOFT, "MatMulNBits")
_DEQUANTIZE_DEFAULTS = {"axis": 1, "block_size": 0, "output_dtype": 0}
_NBITS_DEFAULTS = {"K": 0, "N": 0, "bits": 4, "block_size": 0}
BITS = (2, 4, 8)
_FP8 = ("f8_e4m3fn", "f8_e5m2")
_LARGEST_POINTS = 1 << 20
# Operators that take codes which no codec of ours says the same as; their constants stay as they are.
_CODED = {
    ("", "ConvInteger"),
    ("", "MatMulInteger"),
    ("", "QLinearConv"),
    ("", "QLinearMatMul"),
    *((MICROSOFT, kind) for kind in ("DequantizeLinear", "DynamicQuantizeMatMul", "GatherBlockQuantized")),
    *((MICROSOFT, kind) for kind in ("MatMulBnb4", "MatMulFpQ4", "MatMulInteger16", "MatMulIntegerToFloat")),
    *((MICROSOFT, kind) for kind in ("QAttention", "QEmbedLayerNormalization", "QGemm", "QLinearConv", "QMoE")),
}
_NODE_END = re.compile(r"\.(?:MatMul|Gemm|Gather|MatMulNBits)(?:_[A-Za-z0-9]+)*$")
_LONGEST_NAME = 1024


class LeftError(Exception):
    """No codec says what this operator says: its constants stay as they are. Told as a note, never to a caller."""


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """One tensor, and where its parts lie.

    ``operators`` make its values of codes, or multiply with them (``MatMulNBits``); none for a constant as it is.
    ``matmuls`` are the operators ``MatMul`` that are all who use the values, as what they multiply with.
    """

    name: str
    shape: Shape
    dtype: str
    layout: Layout
    slots: Mapping[str, Slot]
    operators: tuple[Operator, ...] = ()
    matmuls: tuple[Operator, ...] = ()
    called: str = ""

    @property
    def turned(self) -> bool:
        """Whether rows are outputs, as ``MatMulNBits`` has them, and not inputs, as ``MatMul`` has them."""
        return any(operator.key == NBITS for operator in self.operators)

    def spec(self) -> TensorSpec:
        """What a writer is told of the tensor where it is kept as it is stored."""
        parts = tuple(
            PartSpec(role, slot.dtype, slot.length, slot.logical or None) for role, slot in self.slots.items()
        )
        return TensorSpec(self.name, self.shape, self.dtype, self.layout.codec, parts, self.layout.attributes())


@dataclass(slots=True)
class Found:
    """The tensors of a model in the order of its constants, and remarks on what stays as it is."""

    sites: list[Site] = field(default_factory=list)
    notes: list[tuple[str, str]] = field(default_factory=list)


def find_sites(model: Model) -> Found:
    """Return the tensors of a model."""
    found, coded, outputs = Found(), dict[str, Site](), set[str]()
    for name, constant in model.constants.items():
        uses = model.uses.get(name, [])
        try:
            site = _dequantized(model, constant, uses, outputs) or _packed(model, constant, uses)
        except LeftError as reason:
            found.notes.append((LEFT_RULE, f"{name} stays as it is: {reason}"))
            continue
        if site is not None:
            coded[name] = site
            outputs.add(site.name)
        elif constant.type.integer and (kind := next((use.type for use, _ in uses if use.key in _CODED), "")):
            found.notes.append((LEFT_RULE, f"{name} stays as it is: {kind} reads it in a way of its own"))
    parts = {slot.constant.name for site in coded.values() for slot in site.slots.values()}
    for name, constant in model.constants.items():
        if name in coded:
            found.sites.append(coded[name])
        elif name not in parts:
            found.sites.append(_dense(model, constant))
    if model.texts:
        found.notes.append((LEFT_RULE, f"{model.texts} constants hold text, and are no tensors"))
    if model.inner:
        found.notes.append((LEFT_RULE, f"{model.inner} constants of graphs within the graph are no tensors"))
    return found


def _dense(model: Model, constant: Constant) -> Site:
    type, name = constant.type, constant.name
    logical = "" if type.dtype == type.storage else type.dtype
    slots = {DATA: Slot(constant, type.storage, logical)}
    matmuls = tuple(matrix_uses(model, name)) if len(constant.dims) == 2 and name not in model.makers else ()
    layout = DenseLayout(type.dtype)
    return Site(name, constant.dims, type.dtype, layout, slots, (), matmuls, _called(model, name, constant.dims))


def _called(model: Model, name: str, shape: Shape) -> str:
    """Return a name that tells the role of a matrix whose own says nothing: that of the operator which uses it."""
    uses = model.uses.get(name, [])
    if len(shape) != 2 or len(uses) != 1 or role_of(name) != "other":
        return ""
    path = uses[0][0].name.strip("/").replace("/", ".")
    told = f"{_NODE_END.sub('', path)}.weight"
    return told if 0 < len(path) <= _LONGEST_NAME and role_of(told) != "other" else ""


def _dequantized(
    model: Model, constant: Constant, uses: Sequence[tuple[Operator, int]], taken: Collection[str]
) -> Site | None:
    """Return the tensor of codes that ``DequantizeLinear`` takes; raises ``LeftError``."""
    operators = [use for use, at in uses if use.key == DEQUANTIZE and at == 0]
    if not operators:
        return None
    if len(operators) != len(uses) or constant.name in model.fixed:
        raise LeftError("its codes are used elsewhere too")
    first = operators[0]
    if any(not _same(first, other, _DEQUANTIZE_DEFAULTS, 1) for other in operators):
        raise LeftError("several operators read its codes in different ways")
    scales = _constant(model, first.input(1), "scales")
    dtype = scales.type.dtype
    if dtype not in FLOATING or _stated(first, _DEQUANTIZE_DEFAULTS)["output_dtype"] not in (0, scales.type.code):
        raise LeftError(f"its scales are of {dtype}, or its values of another type than these")
    dims = _scale_dims(constant.dims, scales.dims, first)
    name = first.outputs[0] if first.outputs else ""
    if not name or name in model.constants or name in taken:
        raise LeftError("its values have no name of their own")
    zero = _constant(model, first.input(2), "zero points") if first.input(2) else None
    if zero is not None and (zero.type is not constant.type or prod(zero.dims) != prod(scales.dims)):
        raise LeftError("its zero points do not fit its scales")
    slots, layout = _coded(constant, scales, zero, dims)
    matmuls = tuple(matrix_uses(model, name)) if len(constant.dims) == 2 and len(operators) == 1 else ()
    called = _called(model, name, constant.dims)
    return Site(name, constant.dims, dtype, layout, slots, tuple(operators), matmuls, called)


def _coded(constant: Constant, scales: Constant, zero: Constant | None, dims: Shape) -> tuple[dict[str, Slot], Layout]:
    """Return the parts and the layout of codes on a grid of scales."""
    type, dtype = constant.type, scales.type.dtype
    if not prod(constant.dims) and prod(dims) != 1:
        raise LeftError("it is empty")
    if type.integer and type.bits <= 8:
        kind: Zero = NO_ZERO if zero is None else POINTS
        layout = on_grid(constant.dims, dims, (type.bits, type.signed), kind, dtype)
        slots = {CODES: Slot(constant, "u8"), SCALES: Slot(scales, dtype)}
        if zero is not None:
            points = Points(1, prod(zero.dims), type.bits, type.signed, dtype)
            slots[ZEROS] = Slot(zero, dtype, conversion=points)
        return slots, layout
    if type.dtype not in _FP8:
        raise LeftError(f"its codes are of {type.name}")
    if zero is not None and (zero.nbytes > _LARGEST_POINTS or any(_raw_bytes(zero))):
        raise LeftError("its zero points are not all 0")
    if len(constant.dims) != 2 or not prod(constant.dims):
        raise LeftError("it is no matrix")
    small = ScaledCodebookLayout(8, _tiles(constant.dims, dims), dtype, scales=dtype, values=type.dtype)
    return {INDICES: Slot(constant, "u8"), SCALES: Slot(scales, dtype)}, small


def _tiles(shape: Shape, dims: Shape) -> Grid:
    """Return what shares one of ``dims`` scales of a matrix."""
    tall, wide = (-(-size // own) for size, own in zip(shape, dims, strict=True))
    if prod(dims) == 1:
        return WHOLE
    if tall == 1 and shape[1] % wide == 0:
        return ROW if wide == shape[1] else Group(wide)
    return Tiles(tall, wide)


def _raw_bytes(constant: Constant) -> bytes:
    """Return the bytes of a small constant; raises ``LeftError`` where they lie in another file or one by one."""
    if constant.raw is None:
        raise LeftError("its zero points do not stand in the model")
    return bytes(constant.message.data[constant.raw.start : constant.raw.end])


def _scale_dims(shape: Shape, scales: Shape, operator: Operator) -> Shape:
    """Return the scales' shape with the tensor's rank; raises ``LeftError``."""
    rank, stated = len(shape), _stated(operator, _DEQUANTIZE_DEFAULTS)
    axis, block = stated["axis"], stated["block_size"]
    if prod(scales) == 1 and len(scales) <= 1 and not block:
        return (1,) * rank
    axis += rank if axis < 0 else 0
    if not 0 <= axis < rank:
        raise LeftError(f"it has no dimension {axis}")
    if block > 0:
        wanted = (*shape[:axis], -(-shape[axis] // block), *shape[axis + 1 :])
        if scales != wanted:
            raise LeftError(f"its scales are {list(scales)}, for blocks of {block} of {list(shape)}")
        if shape[axis] % block and wanted[axis] > 1:
            raise LeftError(f"blocks of {block} do not divide {list(shape)}")
        return wanted
    if block or scales != (shape[axis],):
        raise LeftError(f"its scales are {list(scales)}, for {list(shape)}")
    return (*(1,) * axis, shape[axis], *(1,) * (rank - axis - 1))


def _packed(model: Model, constant: Constant, uses: Sequence[tuple[Operator, int]]) -> Site | None:
    """Return the tensor of codes that ``MatMulNBits`` multiplies with; raises ``LeftError``."""
    operators = [use for use, at in uses if use.key == NBITS and at == 1]
    if not operators:
        return None
    first = operators[0]
    if len(operators) != len(uses) or constant.name in model.fixed:
        raise LeftError("its codes are used elsewhere too")
    if any(not _same(first, other, _NBITS_DEFAULTS, 2) for other in operators):
        raise LeftError("several operators read its codes in different ways")
    cols, rows, bits, block = _stated(first, _NBITS_DEFAULTS).values()
    if bits not in BITS or block < 16 or block & (block - 1) or cols < 1 or rows < 1:
        raise LeftError(f"it has {bits} bits in blocks of {block}")
    if any(first.input(index) for index in (4, 6)):
        raise LeftError("its columns have an order of their own, or its scales have scales")
    scales = _constant(model, first.input(2), "scales")
    dtype, groups = scales.type.dtype, -(-cols // block)
    width = groups * block * bits // 8
    if constant.type.dtype != "u8" or constant.nbytes != rows * width:
        raise LeftError(f"it has not the {rows * width} bytes of {rows} rows of {groups} blocks")
    if dtype not in FLOATING or scales.count != rows * groups:
        raise LeftError(f"it has not a scale for each of {groups} blocks of {rows} rows")
    zero = _constant(model, first.input(3), "zero points") if first.input(3) else None
    own = -(-cols * bits // 8)
    padding = None if own == width else Padded(rows, own, width)
    slots = {CODES: Slot(constant, "u8", conversion=padding), SCALES: Slot(scales, dtype)}
    if zero is not None:
        slots[ZEROS] = _point_slot(zero, rows, groups, bits, dtype)
    kind: Zero = OnePoint(1 << (bits - 1)) if zero is None else POINTS
    layout = AffineLayout(bits, Group(block), ROWS_LSB, False, kind, dtype, dtype)
    called = _called(model, constant.name, (rows, cols))
    return Site(constant.name, (rows, cols), dtype, layout, slots, tuple(operators), (), called)


def _point_slot(zero: Constant, rows: int, groups: int, bits: int, dtype: str) -> Slot:
    if zero.type.dtype == "u8":
        points = Points(rows, groups, bits, False, dtype)
        if zero.nbytes == points.stored_bytes:
            return Slot(zero, dtype, conversion=points)
    elif zero.type.dtype == dtype and zero.count == rows * groups:
        return Slot(zero, dtype)
    raise LeftError(f"it has not a zero point for each of {groups} blocks of {rows} rows")


def _constant(model: Model, name: str, what: str) -> Constant:
    if name not in model.constants or name in model.fixed:
        raise LeftError(f"its {what} are no constants")
    return model.constants[name]


def _stated(operator: Operator, defaults: Mapping[str, int]) -> dict[str, int]:
    """Return attributes that are whole numbers, as stated or by default."""
    return {key: operator.integer(key, default) for key, default in defaults.items()}


def _same(one: Operator, other: Operator, defaults: Mapping[str, int], start: int) -> bool:
    """Whether two operators read the same codes in the same way; inputs from ``start`` on."""
    return one is other or (
        one.inputs[start:] == other.inputs[start:] and _stated(one, defaults) == _stated(other, defaults)
    )
