"""Layouts of affine integers in the packings of GPTQ, AWQ, compressed-tensors and others.

The values are those of the affine family, ``w = s * (q - z)``. The arrangement of codes, scales and zero points
differs. Attributes: ``spec/affine_words.md``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, NamedTuple

from ingot.core.numeric.dtypes import DTYPES, FLOATS
from ingot.errors import CodecError
from ingot.model.layouts.affine import (
    CODES,
    OFFSETS,
    POINTS,
    ROW,
    ROWS_LSB,
    SCALES,
    ZEROS,
    AffineLayout,
    Constant,
    Group,
    Points,
)
from ingot.model.layouts.base import Attributes, LayoutSource, Shape, matrix_shape
from ingot.model.spec import PartSpec

VERSION = 1
RULE = "affine_words.params"
ORDER = "order"
"""The part with the group index of each column, if groups are not runs of columns; i32 [columns]."""
GPTQ = "gptq"
GPTQ_V1 = "gptq_v1"
GPTQ_PLANES = "gptq_planes"
AWQ = "awq"
AWQ_GEMV = "awq_gemv"
PACKED = "pack_quantized"
PACKED_LOOSE = "pack_quantized_loose"
INTS = "int_quantized"
HQQ = "hqq"
HQQ_COLUMNS = "hqq_columns"
QUANTO = "quanto"
MARLIN_24 = "marlin_24"
MODELOPT = "modelopt_int4"
TORCHAO = "torchao_int4"
META = "meta"
"""The part that selects, of every four adjacent columns, the two that have codes; i16 [cols / 32, 2 * rows]."""
FACTORS = "factors"
"""The part with a factor for every column, in the logical element type; [columns]."""
INTEGERS, NUMBERS, SUBTRACTED, ADDED = "integers", "numbers", "subtracted", "added"
"""Forms of zero points. ``INTEGERS`` are packed integers, ``NUMBERS`` numbers in the type of the scales. The other two
are offsets in the type of the scales, which are subtracted from or added to the product of scale and code."""


PLANES: Mapping[int, tuple[tuple[int, int], ...]] = {
    3: ((2, 0), (1, 2)),
    5: ((4, 0), (1, 4)),
    6: ((4, 0), (2, 4)),
    7: ((4, 0), (2, 4), (1, 6)),
}
"""The bit planes of codes, by bits of a code, in the order in which their words are stored.

Each plane is a pair: its number of bits, and the position of its lowest bit in the code."""


class PackingForm(NamedTuple):
    """The packing of a tool: the supported bits, and the arrangement of codes and zero points.

    If ``transposed``, scales are [groups, rows], and a word contains codes of several columns of a row or of several
    rows of a column. Otherwise all parts are stored row by row. If ``signed``, codes and integer zero points are in
    two's complement. If ``stacked``, the groups are split into ``n`` runs, where ``n`` is the number of codes in a byte
    (for 3 bits: in a word). Each byte then contains one code of each run.

    ``zeros`` is the form of zero points, or None if codes are symmetric. ``same_as_affine`` are the parts whose bytes
    are the same in an ``affine`` layout packed by rows. ``integers`` is the storage type of the codes. ``written``
    states whether Ingot also writes this packing.
    """

    bits: tuple[int, ...]
    transposed: bool = False
    signed: bool = False
    stacked: bool = False
    zeros: str | None = INTEGERS
    same_as_affine: tuple[str, ...] = (CODES, SCALES)
    integers: str = "i32"
    written: bool = True


_TRANSPOSED = PackingForm((2, 3, 4, 8), transposed=True, same_as_affine=())
_READ_ONLY = PackingForm((), integers="u8", written=False)
PACKING_FORMS: Mapping[str, PackingForm] = {
    GPTQ: _TRANSPOSED,
    GPTQ_V1: _TRANSPOSED,  # as gptq, with zero points decreased by 1
    GPTQ_PLANES: _TRANSPOSED._replace(bits=tuple(PLANES)),
    AWQ: _TRANSPOSED._replace(bits=(4,)),
    AWQ_GEMV: PackingForm((4,)),
    PACKED: PackingForm((1, 2, 3, 4, 5, 6, 7, 8)),
    # Codes do not cross words; the spare bits are the highest bits of a word.
    PACKED_LOOSE: PackingForm((3, 5, 6, 7), same_as_affine=(SCALES,), written=False),
    INTS: PackingForm((8,), signed=True, integers="i8"),
    # The first code is in the high bits.
    HQQ: _READ_ONLY._replace(bits=(1, 2, 3, 4, 8), stacked=True, zeros=NUMBERS, same_as_affine=(SCALES,)),
    HQQ_COLUMNS: _READ_ONLY._replace(bits=(1, 2, 3, 4, 8), stacked=True, zeros=NUMBERS, same_as_affine=()),
    QUANTO: _READ_ONLY._replace(bits=(2, 4), stacked=True, zeros=SUBTRACTED, same_as_affine=(SCALES,)),
    MARLIN_24: PackingForm((4, 8), transposed=True, zeros=None, same_as_affine=(), written=False),
    # A byte contains codes of two rows.
    MODELOPT: PackingForm((4,), signed=True, zeros=None, same_as_affine=(SCALES,), integers="u8"),
    TORCHAO: PackingForm(
        (4,), transposed=True, signed=True, zeros=ADDED, same_as_affine=(CODES,), integers="i8", written=False
    ),
}


@dataclass(frozen=True, slots=True)
class PackedIntLayout:
    """The arrangement of integers, scales and zero points in packed words.

    Parameters
    ----------
    packing : str
        A key of ``PACKING_FORMS``.
    bits : int
        Bits of a code.
    group : int or None
        Columns that share a scale; the last group may be shorter. None for a scale per row.
    zero : Constant or Points
        A constant zero point, or zero points in a part.
    dtype : str
        Logical element type.
    scales : str
        Storage type of ``scales``.
    order : bool
        Whether the part ``order`` has the group index of each column.
    factors : bool
        Whether the part ``factors`` has a factor for every column.
    """

    packing: str
    bits: int
    group: int | None
    zero: Constant | Points
    dtype: str
    scales: str = "f16"
    order: bool = False
    factors: bool = False
    codec: ClassVar[str] = "affine_words"
    rows_first: ClassVar[bool] = True

    @property
    def packing_form(self) -> PackingForm:
        """The properties of ``packing``, from ``PACKING_FORMS``."""
        return PACKING_FORMS[self.packing]

    @property
    def transposed(self) -> bool:
        """Whether the scales have the shape [groups, rows]."""
        return self.packing_form.transposed

    @property
    def signed(self) -> bool:
        """Whether codes and zero points are in two's complement."""
        return self.packing_form.signed

    @property
    def stacked(self) -> bool:
        """Whether a byte or word contains codes of several groups; see ``PackingForm``."""
        return self.packing_form.stacked

    @property
    def scattered(self) -> bool:
        """Whether columns have separate group indices or factors, or groups are not runs of columns.

        No other layout is then equivalent.
        """
        return self.order or self.factors or self.packing == HQQ_COLUMNS

    @property
    def lanes(self) -> int:
        """The number of codes in a byte of a stacked packing; for 3 bits, the number of codes in a 32-bit word."""
        return 10 if self.bits == 3 else 8 // self.bits

    @property
    def integers(self) -> str:
        """Storage type of ``packed_weight``."""
        return "i32" if self.stacked and self.bits == 3 else self.packing_form.integers

    @property
    def points(self) -> str:
        """The storage type of the part ``zeros``."""
        return self.integers if self.packing_form.zeros in (None, INTEGERS) else self.scales

    @property
    def point(self) -> int:
        """The zero point of symmetric codes."""
        return 0 if self.signed else 1 << (self.bits - 1)

    @property
    def rows(self) -> AffineLayout:
        """The ``affine`` layout of the same integers, row by row."""
        grid = ROW if self.group is None else Group(self.group)
        zero = OFFSETS if self.packing_form.zeros in (SUBTRACTED, ADDED) else self.zero
        return AffineLayout(self.bits, grid, ROWS_LSB, self.signed, zero, self.dtype, self.scales)

    def groups(self, cols: int) -> int:
        """Return the number of groups of a row."""
        return 1 if self.group is None else -(-cols // self.group)

    def lines(self, shape: Shape) -> tuple[int, int]:
        """Return the number and the length of the lines of a stacked packing.

        A line consists of the codes of a group; for ``HQQ_COLUMNS``, of the codes with the same position in their
        groups. A byte or word contains codes of several lines.
        """
        rows, cols = matrix_shape(shape)
        if self.packing == HQQ_COLUMNS:
            deep = self.group or max(rows, 1)
            return deep, rows * cols // deep
        return rows * self.groups(cols), self.group or cols

    def code_shape(self, shape: Shape) -> Shape:
        """Return the shape of ``packed_weight``."""
        rows, cols = matrix_shape(shape)
        if self.stacked:
            count, width = self.lines(shape)
            return (-(-count // self.lanes), width)
        down = (word_count(cols, self.bits), rows)
        shapes: dict[str, Shape] = {
            **dict.fromkeys((GPTQ, GPTQ_V1, GPTQ_PLANES), down),
            AWQ: (cols, word_count(rows, self.bits)),
            MARLIN_24: (cols // 32, word_count(16 * rows, self.bits)),
            MODELOPT: (rows // 2, cols),
            TORCHAO: (rows, -(-cols // 2)),
            INTS: (rows, cols),
            PACKED_LOOSE: (rows, -(-cols // (32 // self.bits))),
        }
        return shapes.get(self.packing, (rows, word_count(cols, self.bits)))

    def scale_shape(self, shape: Shape) -> Shape:
        """Return the shape of ``scales``."""
        rows, cols = matrix_shape(shape)
        if self.packing == AWQ_GEMV:
            return (rows, 8 * self._padded(cols))
        if self.packing == HQQ_COLUMNS:
            return (1, self.lines(shape)[1])
        return (self.groups(cols), rows) if self.transposed else (rows, self.groups(cols))

    def zero_shape(self, shape: Shape) -> Shape:
        """Return the shape of ``zeros``. If the layout has no such part, it is the shape that the part would have."""
        rows, cols = matrix_shape(shape)
        groups = self.groups(cols)
        if self.packing == AWQ_GEMV:
            return (rows, self._padded(cols))
        if self.packing == INTS or self.packing_form.zeros != INTEGERS:
            return self.scale_shape(shape)
        return (groups, word_count(rows, self.bits)) if self.transposed else (word_count(rows, self.bits), groups)

    def _padded(self, cols: int) -> int:
        """Return the number of words of a row of zero points, padded as in AutoAWQ (``calculate_zeros_width``)."""
        multiple = {32: 4, 64: 2}.get(self.group or cols, 1)
        return -(-word_count(self.groups(cols), 4) // multiple) * multiple

    def part_specs(self, shape: Shape) -> tuple[PartSpec, ...]:
        """Return the specs of the parts of a tensor of ``shape``; all parts are uncompressed."""
        rows, cols = matrix_shape(shape)
        parts = [
            PartSpec(CODES, self.integers, DTYPES[self.integers].nbytes(prod(self.code_shape(shape)))),
            PartSpec(SCALES, self.scales, DTYPES[self.scales].nbytes(prod(self.scale_shape(shape)))),
        ]
        if isinstance(self.zero, Points):
            parts.append(PartSpec(ZEROS, self.points, DTYPES[self.points].nbytes(prod(self.zero_shape(shape)))))
        if self.order:
            parts.append(PartSpec(ORDER, "i32", 4 * cols))
        if self.packing == MARLIN_24:
            parts.append(PartSpec(META, "i16", rows * cols // 8))
        if self.factors:
            parts.append(PartSpec(FACTORS, self.dtype, DTYPES[self.dtype].nbytes(cols)))
        return tuple(parts)

    def attributes(self) -> dict[str, Any]:
        """Return the attributes from which ``from_tensor`` reads the layout."""
        return {
            "codec_version": VERSION,
            "form": self.packing,
            "bits": self.bits,
            **({} if self.group is None else {"group_size": self.group}),
            **({"zero_point": self.zero.point} if isinstance(self.zero, Constant) else {}),
            "order": self.order,
            **({"factors": True} if self.factors else {}),
            "dtype": self.dtype,
        }

    @classmethod
    def from_tensor(cls, tensor: LayoutSource) -> PackedIntLayout:
        """Return the layout from a tensor's attributes.

        Raises ``CodecError`` ``affine_words.params`` or ``affine_words.shape``.
        """
        reader = Attributes(tensor.params, RULE, tensor.name)
        reader.integer("codec_version", VERSION, VERSION)
        packing = reader.choice("form", tuple(PACKING_FORMS))
        bits = reader.integer("bits", 1, 8)
        if bits not in PACKING_FORMS[packing].bits:
            raise reader.refuse(f"bits {', '.join(map(str, PACKING_FORMS[packing].bits))} in the form {packing}", bits)
        if len(tensor.shape) != 2:
            raise CodecError(
                "affine_words.shape", f"expected a matrix, found shape {list(tensor.shape)}", where=tensor.name
            )
        zero: Constant | Points = POINTS
        if reader.has("zero_point"):
            lowest = -(1 << (bits - 1)) if PACKING_FORMS[packing].signed else 0
            zero = Constant(reader.integer("zero_point", lowest, lowest + (1 << bits) - 1))
        return cls(
            packing=packing,
            bits=bits,
            group=reader.integer("group_size", 1, 2**31 - 1) if reader.has("group_size") else None,
            zero=zero,
            dtype=reader.choice("dtype", FLOATS),
            scales=tensor.part_dtypes.get(SCALES, "f16"),
            order=reader.boolean("order"),
            factors=reader.has("factors") and reader.boolean("factors"),
        )


def word_count(codes: int, bits: int) -> int:
    """Return the number of 32-bit words that contain ``codes`` consecutive codes."""
    return -(-codes * bits // 32)
