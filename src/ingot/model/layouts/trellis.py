"""Layouts of trellises, ``w = scale * value[window of a bit stream]``; attributes as in ``spec/trellis.md``."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

from ingot.core.numeric.dtypes import DTYPES
from ingot.errors import CodecError
from ingot.model.layouts.base import Attributes, Described, Shape, matrix_shape
from ingot.model.spec import PartSpec

VERSION = 1
RULE = "trellis.params"
BITS = (2, 3, 4)
DTYPES_OF_VALUES = ("f32", "f16", "bf16")
STREAMS = "streams"
SCALES = "scales"
GAUSSIAN = "gaussian"
WORD = 16
"""Bits of a word of the streams, and what rows of a band are a multiple of."""
MOST_BAND = 4096


@dataclass(frozen=True, slots=True)
class TrellisLayout:
    """How streams and scales lie.

    Parameters
    ----------
    bits : int
        Of a weight: 2, 3 or 4.
    group : int
        Columns that share a scale; it divides a row's.
    band : int
        Rows, a multiple of 16, whose weights of a column are one stream; the last band of a matrix may be lower.
    dtype : str
        Logical element type.
    scales : str
        Storage type of the scales: f32, f16 or bf16.
    """

    bits: int
    group: int
    band: int
    dtype: str
    scales: str = "f16"
    codec: ClassVar[str] = "trellis"

    def places(self, rows: int) -> int:
        """Words of a stream of so many weights."""
        return -(-rows * self.bits // WORD)

    def words(self, shape: Shape) -> int:
        """Words of all streams of a tensor of ``shape``: bands belong to each matrix of the last two dimensions."""
        rows, cols = matrix_shape(shape)
        inner = inner_rows(shape)
        if not rows * cols:
            return 0
        whole, rest = divmod(inner, self.band)
        return rows // inner * cols * (whole * self.places(self.band) + self.places(rest))

    def part_specs(self, shape: Shape) -> tuple[PartSpec, ...]:
        """Return the raw parts of a tensor of ``shape``, in order."""
        return (
            PartSpec(STREAMS, "u8", 2 * self.words(shape)),
            PartSpec(SCALES, self.scales, DTYPES[self.scales].nbytes(prod(shape) // self.group)),
        )

    def attributes(self) -> dict[str, Any]:
        """Return the attributes that ``of`` takes back."""
        return {
            "codec_version": VERSION,
            "bits": self.bits,
            "group_size": self.group,
            "band": self.band,
            "table": GAUSSIAN,
            "dtype": self.dtype,
        }

    @classmethod
    def of(cls, tensor: Described) -> TrellisLayout:
        """Read a tensor's attributes.

        Raises
        ------
        CodecError
            ``trellis.params``, ``trellis.group``.
        """
        reader = Attributes(tensor.params, RULE, tensor.name)
        reader.integer("codec_version", VERSION, VERSION)
        bits = reader.integer("bits", BITS[0], BITS[-1])
        group = reader.integer("group_size", 1, 2**31)
        band = reader.integer("band", WORD, MOST_BAND)
        if band % WORD:
            raise reader.refuse(f"attribute band as a multiple of {WORD}", band)
        reader.choice("table", (GAUSSIAN,))
        cols = matrix_shape(tensor.shape)[1]
        if cols % group:
            raise CodecError(
                "trellis.group", f"expected a group_size that divides {cols} columns, found {group}", where=tensor.name
            )
        dtype = reader.choice("dtype", DTYPES_OF_VALUES)
        return cls(bits, group, band, dtype, tensor.part_dtypes.get(SCALES, "f16"))


def inner_rows(shape: Shape) -> int:
    """Return the rows of one matrix of the last two dimensions."""
    return shape[-2] if len(shape) > 1 else 1
