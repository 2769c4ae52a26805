"""Layouts of affine integers as GPTQ, AWQ, compressed-tensors and others pack them; attributes as in
``spec/affine_words.md``.

The values are those of the affine family, ``w = s * (q - z)``: where codes, scales and zero points lie differs.
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
from ingot.model.layouts.base import Attributes, Described, Shape, matrix_shape
from ingot.model.spec import PartSpec

VERSION = 1
RULE = "affine_words.params"
ORDER = "order"
"""The part that says of which group each column is, where groups are not runs of columns; i32 [columns]."""
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
"""The part that says which two of four neighbouring columns have codes; i16 [cols / 32, 2 * rows]."""
FACTORS = "factors"
"""The part with a number by which every value of a column is multiplied; type of the logical values, [columns]."""
INTEGERS, NUMBERS, SUBTRACTED, ADDED = "integers", "numbers", "subtracted", "added"
"""What zero points are: packed integers, numbers of the scales' type, such that are subtracted from, or added to, the
product of scale and code."""


PLANES: Mapping[int, tuple[tuple[int, int], ...]] = {
    3: ((2, 0), (1, 2)),
    5: ((4, 0), (1, 4)),
    6: ((4, 0), (2, 4)),
    7: ((4, 0), (2, 4), (1, 6)),
}
"""How many bits of a code lie together in a plane, and at which of its bits they begin; planes in order of words."""


class Form(NamedTuple):
    """How a program packs: bits that it has, and where codes and zero points lie.

    ``turned``: scales are [groups, rows], and codes of one word may belong to several columns of one row, or to several
    rows of one column; else everything goes row by row. ``signed``: codes, and zero points that are integers, are in
    two's complement. ``stacked``: all groups one after the other are cut into as many runs as a byte (of 3 bits: a
    word) has codes, and hold one code of each. ``zeros``: what zero points are; None where codes are symmetric.
    ``same``: the parts that lie as ``affine`` has them in rows. ``written``: whether integers are packed so, and not
    only read.
    """

    bits: tuple[int, ...]
    turned: bool = False
    signed: bool = False
    stacked: bool = False
    zeros: str | None = INTEGERS
    same: tuple[str, ...] = (CODES, SCALES)
    integers: str = "i32"
    written: bool = True


_TURNED = Form((2, 3, 4, 8), turned=True, same=())
_READ = Form((), integers="u8", written=False)
FORMS: Mapping[str, Form] = {
    GPTQ: _TURNED,
    GPTQ_V1: _TURNED,  # as gptq, zero points less by one
    GPTQ_PLANES: _TURNED._replace(bits=tuple(PLANES)),
    AWQ: _TURNED._replace(bits=(4,)),
    AWQ_GEMV: Form((4,)),
    PACKED: Form((1, 2, 3, 4, 5, 6, 7, 8)),
    PACKED_LOOSE: Form((3, 5, 6, 7), same=(SCALES,), written=False),  # whole codes in each word, spare bits on top
    INTS: Form((8,), signed=True, integers="i8"),
    # The first code in the high bits.
    HQQ: _READ._replace(bits=(1, 2, 3, 4, 8), stacked=True, zeros=NUMBERS, same=(SCALES,)),
    HQQ_COLUMNS: _READ._replace(bits=(1, 2, 3, 4, 8), stacked=True, zeros=NUMBERS, same=()),
    QUANTO: _READ._replace(bits=(2, 4), stacked=True, zeros=SUBTRACTED, same=(SCALES,)),
    MARLIN_24: Form((4, 8), turned=True, zeros=None, same=(), written=False),
    # Two rows in a byte.
    MODELOPT: Form((4,), signed=True, zeros=None, same=(SCALES,), integers="u8"),
    TORCHAO: Form((4,), turned=True, signed=True, zeros=ADDED, same=(CODES,), integers="i8", written=False),
}


@dataclass(frozen=True, slots=True)
class WordsLayout:
    """How integers, scales and zero points lie in words.

    Parameters
    ----------
    form : str
        One of ``FORMS``.
    bits : int
        Of one code.
    group : int or None
        Columns that share a scale, the last group may be shorter; None for a scale per row.
    zero : Constant or Points
        Points are a part of packed integers.
    dtype : str
        Logical element type.
    scales : str
        Storage type of ``scales``.
    order : bool
        Whether the part ``order`` says of which group each column is.
    factors : bool
        Whether the part ``factors`` has a number by which every value of a column is multiplied.
    """

    form: str
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
    def known(self) -> Form:
        """How the form packs."""
        return FORMS[self.form]

    @property
    def turned(self) -> bool:
        """Whether scales are [groups, rows]."""
        return self.known.turned

    @property
    def signed(self) -> bool:
        """Whether codes and zero points are in two's complement."""
        return self.known.signed

    @property
    def stacked(self) -> bool:
        """Whether a byte or word holds codes of several groups."""
        return self.known.stacked

    @property
    def scattered(self) -> bool:
        """Whether values are made of their columns' numbers one by one: no other layout says the same."""
        return self.order or self.factors or self.form == HQQ_COLUMNS

    @property
    def lanes(self) -> int:
        """Codes of a byte, or of a word of 3 bits, of a stacked form."""
        return 10 if self.bits == 3 else 8 // self.bits

    @property
    def integers(self) -> str:
        """Storage type of ``packed_weight``."""
        return "i32" if self.stacked and self.bits == 3 else self.known.integers

    @property
    def points(self) -> str:
        """Storage type of ``zeros``."""
        return self.integers if self.known.zeros in (None, INTEGERS) else self.scales

    @property
    def point(self) -> int:
        """The zero point of codes that are symmetric around it."""
        return 0 if self.signed else 1 << (self.bits - 1)

    @property
    def rows(self) -> AffineLayout:
        """The same integers row by row (``affine``)."""
        grid = ROW if self.group is None else Group(self.group)
        zero = OFFSETS if self.known.zeros in (SUBTRACTED, ADDED) else self.zero
        return AffineLayout(self.bits, grid, ROWS_LSB, self.signed, zero, self.dtype, self.scales)

    def groups(self, cols: int) -> int:
        """Groups of a row."""
        return 1 if self.group is None else -(-cols // self.group)

    def lines(self, shape: Shape) -> tuple[int, int]:
        """Return how many rows of codes a stacked form has, and their length: groups, or one code of every group."""
        rows, cols = matrix_shape(shape)
        if self.form == HQQ_COLUMNS:
            deep = self.group or max(rows, 1)
            return deep, rows * cols // deep
        return rows * self.groups(cols), self.group or cols

    def code_shape(self, shape: Shape) -> Shape:
        """Shape of ``packed_weight``."""
        rows, cols = matrix_shape(shape)
        if self.stacked:
            count, width = self.lines(shape)
            return (-(-count // self.lanes), width)
        down = (words(cols, self.bits), rows)
        shapes: dict[str, Shape] = {
            **dict.fromkeys((GPTQ, GPTQ_V1, GPTQ_PLANES), down),
            AWQ: (cols, words(rows, self.bits)),
            MARLIN_24: (cols // 32, words(16 * rows, self.bits)),
            MODELOPT: (rows // 2, cols),
            TORCHAO: (rows, -(-cols // 2)),
            INTS: (rows, cols),
            PACKED_LOOSE: (rows, -(-cols // (32 // self.bits))),
        }
        return shapes.get(self.form, (rows, words(cols, self.bits)))

    def scale_shape(self, shape: Shape) -> Shape:
        """Shape of ``scales``."""
        rows, cols = matrix_shape(shape)
        if self.form == AWQ_GEMV:
            return (rows, 8 * self._padded(cols))
        if self.form == HQQ_COLUMNS:
            return (1, self.lines(shape)[1])
        return (self.groups(cols), rows) if self.turned else (rows, self.groups(cols))

    def zero_shape(self, shape: Shape) -> Shape:
        """Shape of ``zeros``, which need not be there."""
        rows, cols = matrix_shape(shape)
        groups = self.groups(cols)
        if self.form == AWQ_GEMV:
            return (rows, self._padded(cols))
        if self.form == INTS or self.known.zeros != INTEGERS:
            return self.scale_shape(shape)
        return (groups, words(rows, self.bits)) if self.turned else (words(rows, self.bits), groups)

    def _padded(self, cols: int) -> int:
        """Words of a row's zero points as AutoAWQ pads them (``calculate_zeros_width``)."""
        multiple = {32: 4, 64: 2}.get(self.group or cols, 1)
        return -(-words(self.groups(cols), 4) // multiple) * multiple

    def part_specs(self, shape: Shape) -> tuple[PartSpec, ...]:
        """Return the raw parts of a tensor of ``shape``."""
        rows, cols = matrix_shape(shape)
        parts = [
            PartSpec(CODES, self.integers, DTYPES[self.integers].nbytes(prod(self.code_shape(shape)))),
            PartSpec(SCALES, self.scales, DTYPES[self.scales].nbytes(prod(self.scale_shape(shape)))),
        ]
        if isinstance(self.zero, Points):
            parts.append(PartSpec(ZEROS, self.points, DTYPES[self.points].nbytes(prod(self.zero_shape(shape)))))
        if self.order:
            parts.append(PartSpec(ORDER, "i32", 4 * cols))
        if self.form == MARLIN_24:
            parts.append(PartSpec(META, "i16", rows * cols // 8))
        if self.factors:
            parts.append(PartSpec(FACTORS, self.dtype, DTYPES[self.dtype].nbytes(cols)))
        return tuple(parts)

    def attributes(self) -> dict[str, Any]:
        """Return the attributes that ``of`` takes back."""
        return {
            "codec_version": VERSION,
            "form": self.form,
            "bits": self.bits,
            **({} if self.group is None else {"group_size": self.group}),
            **({"zero_point": self.zero.point} if isinstance(self.zero, Constant) else {}),
            "order": self.order,
            **({"factors": True} if self.factors else {}),
            "dtype": self.dtype,
        }

    @classmethod
    def of(cls, tensor: Described) -> WordsLayout:
        """Read a tensor's attributes; raises ``CodecError`` ``affine_words.params``, ``affine_words.shape``."""
        reader = Attributes(tensor.params, RULE, tensor.name)
        reader.integer("codec_version", VERSION, VERSION)
        form = reader.choice("form", tuple(FORMS))
        bits = reader.integer("bits", 1, 8)
        if bits not in FORMS[form].bits:
            raise reader.refuse(f"bits {', '.join(map(str, FORMS[form].bits))} in the form {form}", bits)
        if len(tensor.shape) != 2:
            raise CodecError(
                "affine_words.shape", f"expected a matrix, found shape {list(tensor.shape)}", where=tensor.name
            )
        zero: Constant | Points = POINTS
        if reader.has("zero_point"):
            lowest = -(1 << (bits - 1)) if FORMS[form].signed else 0
            zero = Constant(reader.integer("zero_point", lowest, lowest + (1 << bits) - 1))
        return cls(
            form=form,
            bits=bits,
            group=reader.integer("group_size", 1, 2**31 - 1) if reader.has("group_size") else None,
            zero=zero,
            dtype=reader.choice("dtype", FLOATS),
            scales=tensor.part_dtypes.get(SCALES, "f16"),
            order=reader.boolean("order"),
            factors=reader.has("factors") and reader.boolean("factors"),
        )


def words(codes: int, bits: int) -> int:
    """Return how many words of 32 bits hold so many codes, one after the other."""
    return -(-codes * bits // 32)
