"""The tensors of a model: unchanged constants, and codes with their ``DequantizeLinear`` or ``MatMulNBits``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from ingot.formats.onnx.graph import MICROSOFT, Graph, Model, Operator, SparseConstant, matrix_uses
from ingot.formats.onnx.integers import scale_source, takes_codes
from ingot.formats.onnx.slots import Coordinates, DequantizedValues, Padded, Points, Slot
from ingot.formats.onnx.tensors import Constant
from ingot.formats.onnx.types import BY_CODE, FLOATING
from ingot.model.layouts.affine import (
    CODES,
    NO_ZERO,
    PER_TENSOR,
    POINTS,
    ROW,
    ROWS_LSB,
    SCALES,
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
from ingot.model.layouts.sparse import CooLayout
from ingot.model.spec import PartSpec, TensorSpec
from ingot.naming.names import role_of

DEQUANTIZE = (("", "DequantizeLinear"), (MICROSOFT, "DequantizeLinear"))
NBITS = (MICROSOFT, "MatMulNBits")
IN_ATTRIBUTE = "it is in an attribute of an operator"
VALUES = "values"
COORDS = "coords"
_DEQUANTIZE_DEFAULTS = {"axis": 1, "block_size": 0, "output_dtype": 0}
_NBITS_DEFAULTS = {"K": 0, "N": 0, "bits": 4, "block_size": 0}
BITS = (2, 4, 8)
_FP8 = ("f8_e4m3fn", "f8_e5m2")
_LARGEST_POINTS = 1 << 20
_NODE_END = re.compile(r"\.(?:MatMul|Gemm|Gather|MatMulNBits)(?:_[A-Za-z0-9]+)*$")
_LONGEST_NAME = 1024


class LeftError(Exception):
    """The reason why an operator does not form a tensor, or cannot be written; internal to this package."""


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """A tensor, and the constants of its parts.

    Parameters
    ----------
    name, local : str
        The tensor's name, and its name in its graph, without the graph's path.
    graph : Graph
        The graph that contains the tensor's constant, or the constants of its codes.
    operators : tuple of Operator
        Operators that compute the values from codes, or multiply by codes (``MatMulNBits``); empty for a plain
        constant.
    matmuls : tuple of Operator
        The ``MatMul`` operators that use the values; empty if the values have uses other than as second operand.
    alias : str
        A name that reveals the tensor's role, if ``name`` does not.
    stays : str
        Why the tensor is always written unchanged; empty if it may change.
    """

    name: str
    local: str
    graph: Graph
    shape: Shape
    dtype: str
    layout: Layout
    slots: Mapping[str, Slot]
    operators: tuple[Operator, ...] = ()
    matmuls: tuple[Operator, ...] = ()
    alias: str = ""
    stays: str = ""

    @property
    def transposed(self) -> bool:
        """Whether rows are outputs, as ``MatMulNBits`` requires, or inputs, as ``MatMul`` requires."""
        return any(operator.key == NBITS for operator in self.operators)

    def spec(self) -> TensorSpec:
        """Return the spec of the stored tensor."""
        parts = tuple(
            PartSpec(role, slot.dtype, slot.length, slot.logical or None) for role, slot in self.slots.items()
        )
        return TensorSpec(self.name, self.shape, self.dtype, self.layout.codec, parts, self.layout.attributes())


@dataclass(slots=True)
class ModelTensors:
    """The tensors of a model in the order of its constants, and why other constants are not read, by name."""

    sites: list[Site] = field(default_factory=list)
    unread: dict[str, str] = field(default_factory=dict)


def find_sites(model: Model) -> ModelTensors:
    """Return the tensors of a model; repeated names get the suffixes ``~2`` and so on."""
    return _Finder(model).find()


class _Finder:
    """A finder of the tensors of all graphs of a model."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._result = ModelTensors(unread=dict(model.unread))
        self._owners = {id(constant): graph for graph in model.graphs for constant in graph.constants.values()}
        self._names: dict[str, int] = {}
        self._values: set[tuple[int, str]] = set()
        self._coded: dict[int, Site] = {}
        self._computed: dict[int, list[Site]] = {}

    def find(self) -> ModelTensors:
        for graph in self._model.graphs:
            for name, constant in graph.constants.items():
                self._read_codes(graph, name, constant)
        parts = {id(slot.constant) for site in self._coded.values() for slot in site.slots.values()}
        for graph in self._model.graphs:
            for name, constant in graph.constants.items():
                if id(constant) in self._coded:
                    self._add(self._coded[id(constant)])
                elif id(constant) not in parts:
                    self._add(self._dense(graph, name, constant))
                for site in self._computed.get(id(constant), ()):
                    self._add(site)
            for name, constant in graph.attribute_constants.items():
                site = replace(self._dense(graph, name, constant), matmuls=(), alias="", stays=IN_ATTRIBUTE)
                self._add(site)
            for item in graph.sparse.values():
                self._add_sparse(graph, item)
        return self._result

    def _add(self, site: Site) -> None:
        name = site.name
        while name in self._names:
            self._names[site.name] += 1
            name = f"{site.name}~{self._names[site.name]}"
        self._names[name] = 1
        self._result.sites.append(site if name == site.name else replace(site, name=name))

    def _read_codes(self, graph: Graph, name: str, constant: Constant) -> None:
        """Add the tensor that operators compute from the codes ``constant``.

        If no codec can represent the codes, the values that ``DequantizeLinear`` computes are added; without that
        operator, the codes are listed as unread.
        """
        uses = graph.uses.get(name, [])
        try:
            site = (
                self._dequantized(graph, constant, uses)
                or self._packed(graph, constant, uses)
                or self._multiplied(graph, constant, uses)
            )
        except LeftError as reason:
            operators = [use for use, index in uses if use.key in DEQUANTIZE and index == 0]
            try:
                self._computed[id(constant)] = [self._values_of(use) for use in operators]
            except LeftError as other:
                both = f"{reason}; {other}" if str(reason) != str(other) else str(reason)
                self._result.unread[graph.path + name] = both
            else:
                if not operators:
                    self._result.unread[graph.path + name] = str(reason)
            return
        if site is not None:
            self._coded[id(constant)] = site

    def _dense(self, graph: Graph, name: str, constant: Constant) -> Site:
        type = constant.type
        logical = "" if type.dtype == type.storage else type.dtype
        slots = {DATA: Slot(constant, type.storage, logical)}
        matmuls = tuple(matrix_uses(graph, name)) if len(constant.dims) == 2 and name not in graph.makers else ()
        return Site(
            graph.path + name,
            name,
            graph,
            constant.dims,
            type.dtype,
            DenseLayout(type.dtype),
            slots,
            (),
            matmuls,
            self._alias(graph, name, constant.dims),
            self._why_kept([constant]),
        )

    def _alias(self, graph: Graph, name: str, shape: Shape) -> str:
        """Return another name of a matrix, which reveals the matrix's role.

        The result is empty if there is no such name, or if the matrix's name already reveals the role.

        The other name is ``name`` without the path of the graph, or the name of the only operator that uses the matrix.
        """
        uses = graph.uses.get(name, [])
        if role_of(graph.path + name) != "other":
            return ""
        if role_of(name) != "other":
            return name
        if len(shape) != 2 or len(uses) != 1:
            return ""
        path = uses[0][0].name.strip("/").replace("/", ".")
        label = f"{_NODE_END.sub('', path)}.weight"
        return label if 0 < len(path) <= _LONGEST_NAME and role_of(label) != "other" else ""

    def _why_kept(self, constants: Sequence[Constant], operators: Sequence[Operator] = ()) -> str:
        """Return why a tensor with these constants is always written unchanged; empty if it may change."""
        for constant in constants:
            graph = self._owners.get(id(constant))
            if graph is None:
                continue
            if graph.stays:
                return graph.stays
            if constant.name in graph.makers:
                return IN_ATTRIBUTE
            if constant.name in graph.fixed:
                return "it is an input or output of a graph"
        if any(item.graph.stays for item in operators):
            return next(item.graph.stays for item in operators if item.graph.stays)
        owner = self._owners.get(id(constants[0])) if constants else None
        if any(item.key in DEQUANTIZE and item.graph is not owner for item in operators):
            return "operators of an inner graph compute its values"
        return ""

    def _constant(self, operator: Operator, index: int, role: str) -> Constant:
        """Return the constant that is an operator's input; raise ``LeftError`` if the input is no constant."""
        name = operator.input(index)
        owner = operator.graph.owner(name)
        if owner is None or name not in owner.constants:
            raise LeftError(f"its {role} are not constant")
        return owner.constants[name]

    def _dequantized(self, graph: Graph, constant: Constant, uses: Sequence[tuple[Operator, int]]) -> Site | None:
        """Return the tensor whose codes are an input of ``DequantizeLinear``; None without such an operator.

        Raises ``LeftError`` if the codes have other uses, or if operators decode them differently.
        """
        operators = [use for use, index in uses if use.key in DEQUANTIZE and index == 0]
        if not operators:
            return None
        if len(operators) != len(uses) or constant.name in graph.fixed:
            raise LeftError("its codes have other uses")
        first = operators[0]
        if any(not _read_alike(first, operator, _DEQUANTIZE_DEFAULTS, 1) for operator in operators):
            raise LeftError("several operators read its codes in different ways")
        scales = self._constant(first, 1, "scales")
        dtype = scales.type.dtype
        if dtype not in FLOATING or _attributes(first, _DEQUANTIZE_DEFAULTS)["output_dtype"] not in (
            0,
            scales.type.code,
        ):
            raise LeftError(f"its scales are {dtype}, or its values have another type than its scales")
        dims = _scale_dims(constant.dims, scales.dims, first)
        name = self._value_name(first)
        zero = self._constant(first, 2, "zero points") if first.input(2) else None
        if zero is not None and (zero.type is not constant.type or prod(zero.dims) != prod(scales.dims)):
            raise LeftError("its zero points do not fit its scales")
        slots, layout = _codes_on_grid(constant, scales, zero, dims)
        local = first.graph
        matmuls = tuple(matrix_uses(local, name)) if len(constant.dims) == 2 and len(operators) == 1 else ()
        self._values.add((id(local), name))
        return Site(
            local.path + name,
            name,
            local,
            constant.dims,
            dtype,
            layout,
            slots,
            tuple(operators),
            matmuls,
            self._alias(local, name, constant.dims),
            self._why_kept([slot.constant for slot in slots.values()], operators),
        )

    def _multiplied(self, graph: Graph, constant: Constant, uses: Sequence[tuple[Operator, int]]) -> Site | None:
        """Return the tensor whose codes are an input of operators such as ``QLinearConv``; None without such operators.

        Raises the errors of ``_dequantized``.
        """
        takers = [(use, index) for use, index in uses if takes_codes(use, index)]
        if not takers or not constant.type.integer:
            return None
        if len(takers) != len(uses) or constant.name in graph.fixed:
            raise LeftError("its codes have other uses")
        scalings = [self._scales_of(use, index) for use, index in takers]
        if any(scaling != scalings[0] for scaling in scalings):
            raise LeftError("several operators read its codes in different ways")
        scales, zero, factor, axis = scalings[0]
        type = takers[0][0].type
        rank = len(constant.dims)
        stays = f"{type} computes with its integers"
        name = constant.name
        alias = self._alias(graph, constant.name, constant.dims)
        dtype = scales.type.dtype
        site = (graph.path + name, name, graph, constant.dims)
        if dtype not in FLOATING or (zero is not None and zero.type is not constant.type):
            raise LeftError(f"its scales are {dtype}, or its zero points have another type than its codes")
        single = prod(scales.dims) == 1
        if factor is not None or constant.type.bits > 8:
            values = replace(dequantized_values(constant, scales, zero, (axis, 0), 0), factor=factor)
            slots = {DATA: Slot(constant, dtype, values=values)}
            return Site(*site, dtype, DenseLayout(dtype), slots, (), (), alias, stays)
        axis += rank if axis < 0 else 0
        if not single and (not 0 <= axis < rank or scales.dims != (constant.dims[axis],)):
            raise LeftError(f"its scales are {list(scales.dims)}, for {list(constant.dims)}")
        if zero is not None and prod(zero.dims) != prod(scales.dims):
            raise LeftError("its zero points do not fit its scales")
        dims = tuple(size if index == axis and not single else 1 for index, size in enumerate(constant.dims))
        slots, layout = _codes_on_grid(constant, scales, zero, dims)
        return Site(*site, dtype, layout, slots, (), (), alias, stays)

    def _scales_of(self, operator: Operator, index: int) -> tuple[Constant, Constant | None, Constant | None, int]:
        """Return scales, zero points, a factor of the scales, and the axis of the codes; raises ``LeftError``."""
        source = scale_source(operator, index)
        if source is None:
            raise LeftError(f"{operator.type} takes its codes, but their scales are unknown")
        zero = None if source.zero is None else self._constant(*source.zero, "zero points")
        factor = None if source.factor is None else self._constant(*source.factor, "scales")
        if factor is not None and prod(factor.dims) != 1:
            raise LeftError("its scales are products of several")
        return self._constant(*source.scales, "scales"), zero, factor, source.axis

    def _value_name(self, operator: Operator) -> str:
        """Return the name of the values that an operator computes; raise ``LeftError`` if it is not unique."""
        name = operator.outputs[0] if operator.outputs else ""
        if not name or name in operator.graph.constants or (id(operator.graph), name) in self._values:
            raise LeftError("its values have no unique name")
        return name

    def _values_of(self, operator: Operator) -> Site:
        """Return the dense tensor that a ``DequantizeLinear`` computes from codes that no codec can represent.

        Raises ``LeftError``.
        """
        codes = self._constant(operator, 0, "codes")
        scales = self._constant(operator, 1, "scales")
        zero = self._constant(operator, 2, "zero points") if operator.input(2) else None
        attributes = _attributes(operator, _DEQUANTIZE_DEFAULTS)
        values = dequantized_values(
            codes, scales, zero, (attributes["axis"], attributes["block_size"]), attributes["output_dtype"]
        )
        name = self._value_name(operator)
        self._values.add((id(operator.graph), name))
        path = operator.graph.path
        dtype = values.type.dtype
        slots = {DATA: Slot(codes, dtype, values=values)}
        alias = self._alias(operator.graph, name, codes.dims)
        stays = "its operator computes it from codes without a codec"
        layout = DenseLayout(dtype)
        return Site(path + name, name, operator.graph, codes.dims, dtype, layout, slots, (), (), alias, stays)

    def _add_sparse(self, graph: Graph, item: SparseConstant) -> None:
        """Add a sparse constant as coordinates and values."""
        name = graph.path + item.name
        values = item.values
        indices = item.indices
        count = values.count
        rank = len(item.dims)
        linear = indices.dims == (count,)
        fits = len(values.dims) == 1 and (linear or indices.dims == (count, rank)) and indices.type.dtype == "i64"
        if not fits or not rank or values.type.bits < 8 or values.type.dtype != values.type.storage:
            self._result.unread[name] = (
                f"it contains {count} values of {values.type.name} in a sparse form without a codec"
            )
            return
        order = Coordinates(item.dims, count, linear)
        slots = {VALUES: Slot(values, values.type.storage), COORDS: Slot(indices, "u64", conversion=order)}
        dtype = values.type.dtype
        layout = CooLayout(dtype, "u64", count * rank)
        self._add(Site(name, item.name, graph, item.dims, dtype, layout, slots, stays="it is stored in sparse form"))

    def _packed(self, graph: Graph, constant: Constant, uses: Sequence[tuple[Operator, int]]) -> Site | None:
        """Return the quantized tensor whose codes are an input of ``MatMulNBits``; None without such an operator.

        Raises the errors of ``_dequantized``.
        """
        operators = [use for use, index in uses if use.key == NBITS and index == 1]
        if not operators:
            return None
        first = operators[0]
        if len(operators) != len(uses) or constant.name in graph.fixed:
            raise LeftError("its codes have other uses")
        if any(not _read_alike(first, operator, _NBITS_DEFAULTS, 2) for operator in operators):
            raise LeftError("several operators read its codes in different ways")
        cols, rows, bits, block = _attributes(first, _NBITS_DEFAULTS).values()
        if bits not in BITS or block < 16 or block & (block - 1) or cols < 1 or rows < 1:
            raise LeftError(f"it has {bits} bits in blocks of {block}")
        if any(first.input(index) for index in (4, 6)):
            raise LeftError("its columns are reordered, or its scales are quantized")
        scales = self._constant(first, 2, "scales")
        dtype = scales.type.dtype
        groups = -(-cols // block)
        width = groups * block * bits // 8
        if constant.type.dtype != "u8" or constant.nbytes != rows * width:
            raise LeftError(f"its size is not {rows * width} bytes for {rows} rows of {groups} blocks")
        if dtype not in FLOATING or scales.count != rows * groups:
            raise LeftError(f"its scales do not match {groups} blocks of {rows} rows")
        zero = self._constant(first, 3, "zero points") if first.input(3) else None
        row_bytes = -(-cols * bits // 8)
        padding = None if row_bytes == width else Padded(rows, row_bytes, width)
        slots = {CODES: Slot(constant, "u8", conversion=padding), SCALES: Slot(scales, dtype)}
        if zero is not None:
            slots[ZEROS] = _point_slot(zero, rows, groups, bits, dtype)
        zero_layout: Zero = OnePoint(1 << (bits - 1)) if zero is None else POINTS
        layout = AffineLayout(bits, Group(block), ROWS_LSB, False, zero_layout, dtype, dtype)
        return Site(
            graph.path + constant.name,
            constant.name,
            graph,
            (rows, cols),
            dtype,
            layout,
            slots,
            tuple(operators),
            (),
            self._alias(graph, constant.name, (rows, cols)),
            self._why_kept([slot.constant for slot in slots.values()], operators),
        )


def dequantized_values(
    codes: Constant, scales: Constant, zero: Constant | None, grid: tuple[int, int], output_dtype: int
) -> DequantizedValues:
    """Return the values that ``DequantizeLinear`` computes from constants.

    Parameters
    ----------
    codes, scales, zero : Constant
    grid : (int, int)
        The operator's ``axis`` and ``block_size``.
    output_dtype : int
        The operator's ``output_dtype``; 0 for the type of the scales.

    Raises ``LeftError`` if the operator does not accept these constants, or Ingot does not support their types.
    """
    shape, (axis, block) = codes.dims, grid
    has_codes = (codes.type.integer and codes.type.bits <= 32) or codes.type.dtype in _FP8
    if not has_codes or scales.type.dtype not in FLOATING:
        raise LeftError(f"its codes are {codes.type.name}, its scales {scales.type.name}")
    type = BY_CODE.get(output_dtype, scales.type) if output_dtype else scales.type
    if type.dtype not in FLOATING or (output_dtype and output_dtype not in BY_CODE):
        raise LeftError(f"its values have element type {output_dtype}")
    if zero is not None and (zero.type is not codes.type or prod(zero.dims) != prod(scales.dims)):
        raise LeftError("its zero points do not fit its scales")
    if zero is not None and not codes.type.integer and (zero.nbytes > _LARGEST_POINTS or any(_raw_bytes(zero))):
        raise LeftError("its zero points are not all 0")
    if zero is not None and not codes.type.integer:
        zero = None
    if prod(scales.dims) == 1 and len(scales.dims) <= 1 and not block:
        return DequantizedValues(codes, scales, zero, type)
    axis += len(shape) if axis < 0 else 0
    if not 0 <= axis < len(shape) or block < 0:
        raise LeftError(f"it has no dimension {axis} with blocks of {block}")
    expected = (shape[axis],) if not block else (*shape[:axis], -(-shape[axis] // block), *shape[axis + 1 :])
    if scales.dims != expected or (zero is not None and zero.dims != expected):
        raise LeftError(f"its scales are {list(scales.dims)}, for {list(shape)}")
    return DequantizedValues(codes, scales, zero, type, axis, block)


def _codes_on_grid(
    constant: Constant, scales: Constant, zero: Constant | None, dims: Shape
) -> tuple[dict[str, Slot], Layout]:
    """Return the parts and the layout of codes with scales of shape ``dims``, one per block of the codes."""
    type = constant.type
    dtype = scales.type.dtype
    if not prod(constant.dims) and prod(dims) != 1:
        raise LeftError("it is empty")
    if type.integer and type.bits <= 8:
        zero_layout: Zero = NO_ZERO if zero is None else POINTS
        layout = on_grid(constant.dims, dims, (type.bits, type.signed), zero_layout, dtype)
        slots = {CODES: Slot(constant, "u8"), SCALES: Slot(scales, dtype)}
        if zero is not None:
            points = Points(1, prod(zero.dims), type.bits, type.signed, dtype)
            slots[ZEROS] = Slot(zero, dtype, conversion=points)
        return slots, layout
    if type.dtype not in _FP8:
        raise LeftError(f"its codes are {type.name}")
    if zero is not None and (zero.nbytes > _LARGEST_POINTS or any(_raw_bytes(zero))):
        raise LeftError("its zero points are not all 0")
    if len(constant.dims) != 2 or not prod(constant.dims):
        raise LeftError("it is not a matrix")
    small = ScaledCodebookLayout(8, _tiles(constant.dims, dims), dtype, scales=dtype, values=type.dtype)
    return {INDICES: Slot(constant, "u8"), SCALES: Slot(scales, dtype)}, small


def _tiles(shape: Shape, dims: Shape) -> Grid:
    """Return the grid of scales of shape ``dims`` for a matrix of ``shape``."""
    tile_rows, tile_columns = (-(-size // count) for size, count in zip(shape, dims, strict=True))
    if prod(dims) == 1:
        return PER_TENSOR
    if tile_rows == 1 and shape[1] % tile_columns == 0:
        return ROW if tile_columns == shape[1] else Group(tile_columns)
    return Tiles(tile_rows, tile_columns)


def _raw_bytes(constant: Constant) -> bytes:
    """Return the contents of a small constant.

    Raises ``LeftError`` if the numbers are in another file or are encoded one by one.
    """
    if constant.raw is None:
        raise LeftError("its zero points are not in the model's file")
    return bytes(constant.message.data[constant.raw.start : constant.raw.end])


def _scale_dims(shape: Shape, scales: Shape, operator: Operator) -> Shape:
    """Return the scales' shape, extended to the tensor's rank; raises ``LeftError``."""
    rank = len(shape)
    attributes = _attributes(operator, _DEQUANTIZE_DEFAULTS)
    axis = attributes["axis"]
    block = attributes["block_size"]
    if prod(scales) == 1 and len(scales) <= 1 and not block:
        return (1,) * rank
    axis += rank if axis < 0 else 0
    if not 0 <= axis < rank:
        raise LeftError(f"it has no dimension {axis}")
    if block > 0:
        expected = (*shape[:axis], -(-shape[axis] // block), *shape[axis + 1 :])
        if scales != expected:
            raise LeftError(f"its scales are {list(scales)}, for blocks of {block} of {list(shape)}")
        if shape[axis] % block and expected[axis] > 1:
            raise LeftError(f"blocks of {block} do not divide {list(shape)}")
        return expected
    if block or scales != (shape[axis],):
        raise LeftError(f"its scales are {list(scales)}, for {list(shape)}")
    return (*(1,) * axis, shape[axis], *(1,) * (rank - axis - 1))


def _point_slot(zero: Constant, rows: int, groups: int, bits: int, dtype: str) -> Slot:
    if zero.type.dtype == "u8":
        points = Points(rows, groups, bits, False, dtype)
        if zero.nbytes == points.stored_bytes:
            return Slot(zero, dtype, conversion=points)
    elif zero.type.dtype == dtype and zero.count == rows * groups:
        return Slot(zero, dtype)
    raise LeftError(f"its zero points do not match {groups} blocks of {rows} rows")


def _attributes(operator: Operator, defaults: Mapping[str, int]) -> dict[str, int]:
    """Return the integer attributes of an operator, or their defaults."""
    return {key: operator.integer(key, default) for key, default in defaults.items()}


def _read_alike(first: Operator, second: Operator, defaults: Mapping[str, int], start: int) -> bool:
    """Return whether two operators have equal attributes, and equal inputs from input ``start`` on."""
    return first is second or (
        first.inputs[start:] == second.inputs[start:] and _attributes(first, defaults) == _attributes(second, defaults)
    )
