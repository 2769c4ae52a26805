"""Layouts of the affine family, ``w = s * (q - z)`` or ``w = s * q + z``. Attributes: ``spec/affine.md``."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from math import prod
from typing import Any, ClassVar

from ingot.core.numeric.dtypes import DTYPES, FLOATS
from ingot.model.layouts.base import Attributes, LayoutSource, Shape, matrix_shape
from ingot.model.layouts.orientation import AXIS, require_last_axis
from ingot.model.spec import PartSpec

VERSION = 1
RULE = "affine.params"
SCALE_DTYPES = ("f32", "f16", "bf16")
CODES, SCALES, ZEROS = ROLES = ("packed_weight", "scales", "zeros")
ROWS_LSB, ROWS_MSB, FLAT_LSB = STREAMS = ("rows_lsb", "rows_msb", "flat_lsb")

_WORDS = re.compile(r"([1-9][0-9]?)_per_([iu])(8|16|32|64)\Z")
# The attributes of zTensor 1.2, section 3; ``dtype``, which Ingot's writer adds; and ``axis``.
_ZTENSOR_ATTRIBUTES = frozenset(("bits", "group_size", "packing", "dtype", AXIS))


@dataclass(frozen=True, slots=True)
class Group:
    """A scale for each group of ``columns`` columns of a row; the last group of a row may be shorter."""

    columns: int


@dataclass(frozen=True, slots=True)
class Row:
    """A scale for each row."""


@dataclass(frozen=True, slots=True)
class PerTensor:
    """One scale for the tensor."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """A scale for each block of ``shape``, in row-major order. ``shape`` divides the tensor's shape."""

    shape: Shape


Grid = Group | Row | PerTensor | Blocks
"""The granularity of scales."""
ROW = Row()
PER_TENSOR = PerTensor()


@dataclass(frozen=True, slots=True)
class NoZero:
    """``w = s * q``."""


@dataclass(frozen=True, slots=True)
class Constant:
    """``w = s * (q - point)`` with one zero point for all codes, which is not stored in a part."""

    point: int


@dataclass(frozen=True, slots=True)
class Points:
    """``w = s * (q - z)``, one z per scale in the part ``zeros``."""


@dataclass(frozen=True, slots=True)
class Offsets:
    """``w = s * q + z``, one z per scale in the part ``zeros``."""


Zero = NoZero | Constant | Points | Offsets
NO_ZERO = NoZero()
POINTS = Points()
OFFSETS = Offsets()


@dataclass(frozen=True, slots=True)
class AffineLayout:
    """The arrangement of integer codes, scales and zero points.

    Parameters
    ----------
    bits : int
        Bits of a code, 1 to 8.
    grid : Group, Row, PerTensor or Blocks
        The elements that share a scale.
    packing : str
        ``rows_lsb`` or ``rows_msb``: each row is a bit stream, padded to whole bytes. ``flat_lsb``: the matrix is one
        bit stream, and a row may begin within a byte; no encoder writes it. ``8_per_i32`` and other ``N_per_iW``
        (zTensor 1.2, section 3): each row consists of little-endian integers with the first code in the low bits.
    signed : bool
        Whether codes are in two's complement.
    zero : NoZero, Constant, Points or Offsets
    dtype : str
        Logical element type.
    scales : str
        Storage type of the parts ``scales`` and ``zeros``.
    matrix : (rows, columns) or None
        The matrix shape for packing and scales, if it differs from the tensor's matrix shape; else None.
    """

    bits: int
    grid: Grid
    packing: str
    signed: bool
    zero: Zero
    dtype: str
    scales: str = "f32"
    matrix: tuple[int, int] | None = None
    codec: ClassVar[str] = "affine"

    @property
    def zeros(self) -> bool:
        """Whether the layout has a part ``zeros``."""
        return isinstance(self.zero, Points | Offsets)

    @property
    def offset(self) -> bool:
        """Whether ``zeros`` are offsets: ``w = s * q + z``."""
        return isinstance(self.zero, Offsets)

    @property
    def rounds_products(self) -> bool:
        """Whether ``s * q`` is rounded to the type of the scales before ``z`` is added.

        Runtimes that use this layout do so too.
        """
        return self.offset and self.scales != "f32"

    @property
    def zero_point(self) -> int | None:
        """The zero point of all codes if it is constant; else None."""
        return self.zero.point if isinstance(self.zero, Constant) else None

    @property
    def group_size(self) -> int | None:
        """Columns of a group; None for another grid."""
        return self.grid.columns if isinstance(self.grid, Group) else None

    @property
    def block(self) -> Shape | None:
        """Elements of a block along each dimension; None for another grid."""
        return self.grid.shape if isinstance(self.grid, Blocks) else None

    @property
    def per_tensor(self) -> bool:
        """Whether the tensor has one scale."""
        return isinstance(self.grid, PerTensor)

    @property
    def per_row(self) -> bool:
        """Whether each row has one scale."""
        return isinstance(self.grid, Row)

    @property
    def granularity(self) -> str:
        """The name of ``grid`` in the attribute ``granularity``: ``group``, ``row``, ``tensor`` or ``blocks``."""
        return {Group: "group", Row: "row", PerTensor: "tensor", Blocks: "blocks"}[type(self.grid)]

    @property
    def msb(self) -> bool:
        """Whether the first code is in the high bits."""
        return self.packing == ROWS_MSB

    @property
    def stream(self) -> bool:
        """Whether codes are packed as bit streams, not as the integer words of zTensor 1.2."""
        return self.packing in STREAMS

    @property
    def packed_dtype(self) -> str:
        """Storage type of ``packed_weight``."""
        match = _WORDS.match(self.packing)
        return f"{match[2]}{match[3]}" if match else "u8"

    @property
    def no_zero(self) -> float:
        """The zero point that is stored for groups without elements and for groups of zeros: the lowest code."""
        return -(2.0 ** (self.bits - 1)) if self.signed else 0.0

    def in_rows(self, cols: int) -> bool:
        """Return whether every row begins at a byte; rows of ``flat_lsb`` do if they fill whole bytes."""
        return self.packing != FLAT_LSB or cols * self.bits % 8 == 0

    def is_flat(self, shape: Shape) -> bool:
        """Return whether the codes are one bit stream, first code in the low bits, without padding between rows."""
        cols = self.matrix_of(shape)[1]
        return self.packing == FLAT_LSB or (self.packing == ROWS_LSB and cols * self.bits % 8 == 0)

    def packed_bytes(self, rows: int, cols: int) -> int:
        """Return the number of bytes of ``packed_weight`` for a matrix of ``rows`` x ``cols``."""
        return rows * self.row_bytes(cols) if self.in_rows(cols) else -(-rows * cols * self.bits // 8)

    def row_bytes(self, cols: int) -> int:
        """Return the number of bytes of a packed row that begins at a byte."""
        match = _WORDS.match(self.packing)
        if match:
            return -(-cols // int(match[1])) * int(match[3]) // 8
        return -(-cols * self.bits // 8)

    def matrix_of(self, shape: Shape) -> tuple[int, int]:
        """Return the rows and columns for packing: ``matrix``, or the matrix shape of a tensor of ``shape``."""
        return self.matrix or matrix_shape(shape)

    def group_columns(self, cols: int) -> int:
        """Return the number of columns that share a scale, at least 1."""
        if isinstance(self.grid, Blocks):
            return max(self.grid.shape[-1], 1) if self.grid.shape else 1
        return self.grid.columns if isinstance(self.grid, Group) else max(cols, 1)

    def scale_count(self, shape: Shape) -> int:
        """Return the number of elements of ``scales`` (and of ``zeros``) for a tensor of ``shape``."""
        if isinstance(self.grid, Blocks):
            return prod(size // step for size, step in zip(shape, self.grid.shape, strict=True))
        return prod(self.scale_shape(*self.matrix_of(shape)))

    def scale_shape(self, rows: int, cols: int) -> Shape:
        """Return the shape of ``scales`` (and ``zeros``) for a matrix of ``rows`` x ``cols``.

        For blocks it is the shape after repeating the scales of a block for each of its rows.
        """
        if isinstance(self.grid, Blocks):
            return (rows, cols // self.group_columns(cols))
        if isinstance(self.grid, Group):
            return (rows, -(-cols // self.grid.columns))
        return (1,) if self.per_tensor else (rows,)

    def part_specs(self, shape: Shape) -> tuple[PartSpec, ...]:
        """Return the raw parts of a tensor of ``shape``."""
        scale_bytes = self.scale_count(shape) * DTYPES[self.scales].bits // 8
        packed = PartSpec(CODES, self.packed_dtype, self.packed_bytes(*self.matrix_of(shape)))
        scales = PartSpec(SCALES, self.scales, scale_bytes)
        return (packed, scales, PartSpec(ZEROS, self.scales, scale_bytes)) if self.zeros else (packed, scales)

    def attributes(self) -> dict[str, Any]:
        """Return the attributes from which ``from_tensor`` reads the layout.

        If codes are packed in integer words, these are the attributes of zTensor 1.2.
        """
        if not self.stream:
            dtype = {} if self.dtype == self.scales else {"dtype": self.dtype}
            return {"bits": self.bits, "group_size": self.group_size, "packing": self.packing, **dtype}
        return {
            "codec_version": VERSION,
            "bits": self.bits,
            "granularity": self.granularity,
            **({"group_size": self.grid.columns} if isinstance(self.grid, Group) else {}),
            "axis": -1,
            "packing": self.packing,
            "signed": self.signed,
            "zeros": self.zeros,
            "dtype": self.dtype,
            **({"zero_kind": "offset"} if self.offset else {}),
            **({"zero_point": self.zero.point} if isinstance(self.zero, Constant) else {}),
            **({"matrix": list(self.matrix)} if self.matrix is not None else {}),
            **({"block": list(self.grid.shape)} if isinstance(self.grid, Blocks) else {}),
        }

    @classmethod
    def from_tensor(cls, tensor: LayoutSource) -> AffineLayout:
        """Return the layout from a tensor's attributes.

        Attributes with ``codec_version`` are Ingot's attributes, which describe the full layout. Otherwise, attributes
        are those of zTensor 1.2, section 3: ``bits``, ``group_size`` and ``packing``, and optionally ``dtype`` and
        ``axis``. Codes are then unsigned, groups are along the last dimension, and the default of ``dtype`` is the type
        of the scales. There are zero points if the tensor has a part ``zeros``.

        Raises
        ------
        CodecError
            ``affine.params``: an attribute is missing, unknown, of the wrong type or out of range. ``affine.axis``:
            codes are packed along another dimension than the last, as in GPTQ files.
        """
        reader = Attributes(tensor.params, RULE, tensor.name)
        return (
            _parse_attributes(reader, tensor)
            if reader.has("codec_version")
            else _parse_ztensor_attributes(reader, tensor)
        )


def _parse_ztensor_attributes(reader: Attributes, tensor: LayoutSource) -> AffineLayout:
    require_last_axis(reader, tensor)
    strange = sorted(str(key) for key in tensor.params if key not in _ZTENSOR_ATTRIBUTES)
    if strange:
        raise reader.refuse(
            "only bits, group_size, packing, dtype and axis where there is no codec_version", strange[0]
        )
    bits = reader.integer("bits", 1, 8)
    packing = reader.text("packing")
    match = _WORDS.match(packing)
    if not match or int(match[1]) * bits != int(match[3]):
        raise reader.refuse(f"packing N_per_iW with N * {bits} = W", packing)
    parts = tensor.part_dtypes
    scales = parts.get(SCALES, "f32")
    dtype = reader.choice("dtype", FLOATS) if reader.has("dtype") else scales
    group = Group(reader.integer("group_size", 1, 2**62))
    return AffineLayout(bits, group, packing, False, POINTS if ZEROS in parts else NO_ZERO, dtype, scales)


def _parse_attributes(reader: Attributes, tensor: LayoutSource) -> AffineLayout:
    reader.integer("codec_version", VERSION, VERSION)
    reader.integer("axis", -1, -1)
    granularity = reader.choice("granularity", ("group", "row", "tensor", "blocks"))
    bits = reader.integer("bits", 1, 8)
    signed = reader.boolean("signed")
    zero = _zero(reader, bits, signed=signed)
    if granularity != "blocks" and reader.has("block"):
        raise reader.refuse("block for granularity blocks only", granularity)
    grid: Grid = ROW if granularity == "row" else PER_TENSOR
    if granularity == "group":
        grid = Group(reader.integer("group_size", 1, 2**62))
    elif granularity == "blocks":
        grid = Blocks(_block(reader, tensor.shape))
    return AffineLayout(
        bits=bits,
        grid=grid,
        packing=reader.choice("packing", STREAMS),
        signed=signed,
        zero=zero,
        dtype=reader.choice("dtype", FLOATS),
        scales=tensor.part_dtypes.get(SCALES, "f32"),
        matrix=_matrix(reader, tensor.shape, granularity) if reader.has("matrix") else None,
    )


def _zero(reader: Attributes, bits: int, *, signed: bool) -> Zero:
    zeros = reader.boolean("zeros")
    zero_kind = reader.choice("zero_kind", ("point", "offset")) if reader.has("zero_kind") else "point"
    if zero_kind == "offset" and not zeros:
        raise reader.refuse("zeros = true where zero_kind is offset", zeros)
    if not reader.has("zero_point"):
        return (OFFSETS if zero_kind == "offset" else POINTS) if zeros else NO_ZERO
    if zeros:
        raise reader.refuse("zero_point only where zeros is false", zeros)
    lowest = -(1 << (bits - 1)) if signed else 0
    return Constant(reader.integer("zero_point", lowest, lowest + (1 << bits) - 1))


def _matrix(reader: Attributes, shape: Shape, granularity: str) -> tuple[int, int]:
    sizes = reader.integers("matrix", 0, 2**62)
    if granularity == "blocks":
        raise reader.refuse("no matrix beside granularity blocks", list(sizes))
    if len(sizes) != 2 or sizes[0] * sizes[1] != prod(shape):
        raise reader.refuse(f"a matrix of rows and columns with {prod(shape)} elements", list(sizes))
    return sizes[0], sizes[1]


def _block(reader: Attributes, shape: Shape) -> Shape:
    steps = reader.integers("block", 1, 2**62)
    if len(steps) != len(shape) or any(size % step for size, step in zip(shape, steps, strict=True)):
        raise reader.refuse(f"a block that divides each dimension of {list(shape)}", list(steps))
    return steps


def canonical(layout: AffineLayout, shape: Shape) -> AffineLayout:
    """Return an equivalent layout of the same bytes without ``matrix``, or ``layout`` if there is none.

    The codes must be one bit stream in both layouts. A scale per group of ``n`` columns of ``matrix`` is then a scale
    per group of ``n`` columns of the tensor, if ``n`` divides both numbers of columns.
    """
    if layout.matrix is None:
        return layout
    stored_matrix = layout.matrix
    without_matrix = replace(layout, matrix=None)
    tensor_matrix = without_matrix.matrix_of(shape)
    if stored_matrix == tensor_matrix:
        return without_matrix
    streams = all(
        layout.packing == FLAT_LSB or cols * layout.bits % 8 == 0 for cols in (stored_matrix[1], tensor_matrix[1])
    )
    run = min(layout.group_columns(stored_matrix[1]), stored_matrix[1])
    if not streams or not prod(tensor_matrix):
        return layout
    if layout.per_tensor:
        return without_matrix
    if stored_matrix[1] % run or tensor_matrix[1] % run:
        return layout
    return replace(without_matrix, grid=ROW if run == tensor_matrix[1] else Group(run))
