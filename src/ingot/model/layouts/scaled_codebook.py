"""Layouts of scaled codebooks, ``w = scale * value[index]``. Attributes: ``spec/scaled_codebook.md``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ingot.core.numeric.dtypes import DTYPES
from ingot.errors import CodecError
from ingot.model.layouts.affine import PER_TENSOR, ROW, Group, PerTensor, Row
from ingot.model.layouts.base import Attributes, LayoutSource, Shape, element_count, matrix_shape
from ingot.model.spec import PartSpec

VERSION = 1
VERSION_2 = 2
RULE = "scaled_codebook.params"
BITS = (1, 2, 3, 4, 6, 8)
DTYPES_OF_VALUES = ("f32", "f16", "bf16")
NUMBERS = ("f4_e2m1fn", "f6_e2m3fn", "f6_e3m2fn", "f8_e4m3fn", "f8_e5m2", "i8")
"""Element types whose bit patterns the indices may be."""
SMALL_SCALES = ("f8_e8m0fnu", "f8_e4m3fn", "f8_e5m2")
LOW_FIRST, HIGH_FIRST = ORDERS = ("low_first", "high_first")
MULTIPLY, DIVIDE = SECONDS = ("multiply", "divide")
INDICES = "indices"
CODEBOOK = "codebook"
SCALES = "scales"
SCALE_CODEBOOK = "scale_codebook"
SCALE_SCALES = "scale_scales"
SECOND = "second_scale"

NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""NormalFloat of 4 bits: quantiles of a normal distribution (Dettmers et al., "QLoRA", 2023, appendix E); f32."""

_FP4 = (0, 0.0625, 8, 12, 4, 6, 2, 3)
TABLES: Mapping[str, tuple[float, ...]] = {
    "nf4": NF4,
    "fp4": tuple(sign * entry / 12 for sign in (1, -1) for entry in _FP4),
    "iq4_nl": (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
}
"""Named tables of 16 f32 values: NormalFloat, FP4 in the order of bitsandbytes, IQ4_NL of ggml."""
VALUES = {**{name: DTYPES[name].bits for name in NUMBERS}, **dict.fromkeys(TABLES, 4)}
"""The bits of an index, by the name of an element type or table whose values need no codebook."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """A scale for each block of ``rows`` x ``columns`` of a matrix; blocks at the end of the matrix may be smaller."""

    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class Run:
    """A scale for ``elements`` consecutive elements in row-major order, across rows; the last run may be shorter."""

    elements: int


@dataclass(frozen=True, slots=True)
class Nested:
    """Quantized scales: codes for a table of 256 values, ``scale = scale_codebook[code] * scale_scales[run] + offset``.

    Parameters
    ----------
    run : int
        Consecutive scales that share an element of ``scale_scales``; the last run may be shorter.
    offset : float
        An f32.
    """

    run: int
    offset: float


Grid = Group | Row | PerTensor | Tiles | Run
"""The granularity of scales."""
_NAMES = {Group: "group", Row: "row", PerTensor: "tensor", Tiles: "blocks", Run: "flat"}


@dataclass(frozen=True, slots=True)
class ScaledCodebookLayout:
    """The arrangement of indices, the values that they select, and the scales.

    Parameters
    ----------
    bits : int
        Bits of an index: 1, 2, 3, 4, 6 or 8. A codebook has ``2**bits`` entries.
    grid : Group, Row, PerTensor, Tiles or Run
        The elements that share a scale. Groups divide the columns of a row.
    dtype : str
        Logical element type.
    codebook : str
        Storage type of the codebook: f32, f16 or bf16.
    scales : str
        Element type of the scales: f32, f16, bf16, f8_e8m0fnu, f8_e4m3fn or f8_e5m2; u8 if they are ``nested``.
    values : str or None
        A key of ``VALUES`` that determines the values; None if the layout has a codebook.
    order : str
        ``low_first``: one bit stream, first index in the low bits. ``high_first``: 4-bit indices, the first index of a
        byte in the high bits.
    second : str or None
        The operation that combines each scale with the f32 in the part ``second_scale``, ``multiply`` or ``divide``;
        the result is rounded to f32. None if there is no part ``second_scale``.
    nested : Nested or None
    factor : float or None
        An f32 by which each product of scale and value is multiplied.
    transposed : bool
        Whether the last two dimensions are stored in reverse order.
    """

    bits: int
    grid: Grid
    dtype: str
    codebook: str = "f32"
    scales: str = "f32"
    values: str | None = None
    order: str = LOW_FIRST
    second: str | None = None
    nested: Nested | None = None
    factor: float | None = None
    transposed: bool = False
    codec: ClassVar[str] = "scaled_codebook"

    def stored_shape(self, shape: Shape) -> Shape:
        """Return the shape in which a tensor of ``shape`` is stored in row-major order."""
        return (*shape[:-2], shape[-1], shape[-2]) if self.transposed else shape

    def groups(self, cols: int) -> int:
        """Return the number of scales along a row of ``cols`` stored columns."""
        if isinstance(self.grid, Group):
            return cols // self.grid.columns
        return -(-cols // self.grid.columns) if isinstance(self.grid, Tiles) else 1

    def scale_count(self, shape: Shape) -> int:
        """Return the number of scales of a tensor of ``shape``; 0 for an empty tensor."""
        if not element_count(shape):
            return 0
        shape = self.stored_shape(shape)
        rows, cols = matrix_shape(shape)
        match self.grid:
            case PerTensor():
                return 1
            case Run(elements):
                return -(-rows * cols // elements)
            case Tiles(tall, _):
                inner = shape[-2] if len(shape) > 1 else 1
                return rows // inner * -(-inner // tall) * self.groups(cols)
        return rows * self.groups(cols)

    def part_specs(self, shape: Shape) -> tuple[PartSpec, ...]:
        """Return the raw parts of a tensor of ``shape``, in order."""
        count = self.scale_count(shape)
        specs = [PartSpec(INDICES, "u8", -(-element_count(shape) * self.bits // 8))]
        if self.values is None:
            specs.append(PartSpec(CODEBOOK, self.codebook, DTYPES[self.codebook].nbytes(1 << self.bits)))
        row = DTYPES[self.scales]
        specs.append(PartSpec(SCALES, row.storage, row.nbytes(count), None if row.is_storage else row.name))
        if self.nested:
            specs.append(PartSpec(SCALE_CODEBOOK, "f32", 4 * 256))
            specs.append(PartSpec(SCALE_SCALES, "f32", 4 * -(-count // self.nested.run)))
        if self.second:
            specs.append(PartSpec(SECOND, "f32", 4))
        return tuple(specs)

    def attributes(self) -> dict[str, Any]:
        """Return the attributes from which ``from_tensor`` reads the layout, in version 1 if that is sufficient."""
        optional: dict[str, Any] = {}
        if isinstance(self.grid, Tiles):
            optional["block"] = [self.grid.rows, self.grid.columns]
        if self.values:
            optional["values"] = self.values
        if self.order != LOW_FIRST:
            optional["order"] = self.order
        if self.scales in SMALL_SCALES:
            optional["scale_dtype"] = self.scales
        if self.second:
            optional["second"] = self.second
        if self.nested:
            optional["nested"] = {"group_size": self.nested.run, "offset": self.nested.offset}
        if self.factor is not None:
            optional["factor"] = self.factor
        if self.transposed:
            optional["transposed"] = True
        columns = {Group: "columns", Run: "elements"}.get(type(self.grid))
        return {
            "codec_version": VERSION_2 if optional or not isinstance(self.grid, Group | Row) else VERSION,
            "bits": self.bits,
            "granularity": _NAMES[type(self.grid)],
            **({"group_size": getattr(self.grid, columns)} if columns else {}),
            "dtype": self.dtype,
            **optional,
        }

    @classmethod
    def from_tensor(cls, tensor: LayoutSource) -> ScaledCodebookLayout:
        """Return the layout from a tensor's attributes.

        Raises
        ------
        CodecError
            ``scaled_codebook.params``, ``scaled_codebook.group``.
        """
        reader = Attributes(tensor.params, RULE, tensor.name)
        version = reader.integer("codec_version", VERSION, VERSION_2)
        bits = reader.integer("bits", 1, 8)
        if bits not in BITS:
            raise reader.refuse(f"bits {', '.join(map(str, BITS))}", bits)
        grid = _grid(reader, version)
        later = _version_2_fields(reader, version, bits, tensor.name)
        if later.get("transposed") and len(tensor.shape) < 2:
            raise reader.refuse("transposed for two dimensions at least", list(tensor.shape))
        parts = tensor.part_dtypes
        dtype = reader.choice("dtype", DTYPES_OF_VALUES)
        later.setdefault("scales", parts.get(SCALES, "f32"))
        layout = cls(bits, grid, dtype, parts.get(CODEBOOK, "f32"), **later)
        cols = matrix_shape(layout.stored_shape(tensor.shape))[1]
        if isinstance(grid, Group) and cols % grid.columns:
            raise CodecError(
                "scaled_codebook.group",
                f"expected a group_size that divides {cols} columns, found {grid.columns}",
                where=tensor.name,
            )
        return layout


def _grid(reader: Attributes, version: int) -> Grid:
    name = reader.choice("granularity", tuple(_NAMES.values()) if version == VERSION_2 else ("group", "row"))
    if name not in ("group", "flat") and reader.has("group_size"):
        raise reader.refuse("group_size for granularity group or flat only", name)
    if name == "blocks":
        sizes = reader.integers("block", 1, 2**62)
        if len(sizes) != 2:
            raise reader.refuse("a block of rows and columns", list(sizes))
        return Tiles(*sizes)
    if name in ("group", "flat"):
        size = reader.integer("group_size", 1, 2**62)
        return Group(size) if name == "group" else Run(size)
    return ROW if name == "row" else PER_TENSOR


def _version_2_fields(reader: Attributes, version: int, bits: int, location: str) -> dict[str, Any]:
    """Return the fields of a layout that version 2 of the attributes adds.

    Raises ``CodecError`` if attributes of version 1 contain them.
    """
    keys = ("values", "order", "scale_dtype", "second", "nested", "factor", "transposed")
    fields: dict[str, Any] = {}
    if version == VERSION:
        unexpected = [key for key in (*keys, "block") if reader.has(key)]
        if unexpected:
            raise reader.refuse(f"codec_version {VERSION_2} beside attribute {unexpected[0]}", version)
        return fields
    if reader.has("values"):
        fields["values"] = reader.choice("values", tuple(VALUES))
        if VALUES[fields["values"]] != bits:
            raise reader.refuse(f"bits {VALUES[fields['values']]} for values {fields['values']}", bits)
    if reader.has("order"):
        fields["order"] = reader.choice("order", ORDERS)
        if fields["order"] == HIGH_FIRST and bits != 4:
            raise reader.refuse("4 bits where order is high_first", bits)
    if reader.has("scale_dtype"):
        fields["scales"] = reader.choice("scale_dtype", SMALL_SCALES)
    if reader.has("second"):
        fields["second"] = reader.choice("second", SECONDS)
    if reader.has("nested"):
        fields["nested"] = _nested(reader, location)
        fields["scales"] = "u8"
    if reader.has("factor"):
        fields["factor"] = reader.number("factor")
    if reader.has("transposed"):
        fields["transposed"] = reader.boolean("transposed")
    return fields


def _nested(reader: Attributes, location: str) -> Nested:
    fields = reader.mapping("nested")
    if reader.has("scale_dtype"):
        raise reader.refuse("no scale_dtype beside nested", fields)
    nested = Attributes(fields, RULE, location)
    return Nested(nested.integer("group_size", 1, 2**62), nested.number("offset"))
