"""Layouts of trellis codes, ``w = scale * value[window of a bit stream]``. Attributes: ``spec/trellis.md``."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

from ingot.core.numeric.dtypes import DTYPES
from ingot.errors import CodecError
from ingot.model.layouts.base import Attributes, LayoutSource, Shape, matrix_shape
from ingot.model.spec import PartSpec

VERSION = 1
RULE = "trellis.params"
BITS = (2, 3, 4)
DTYPES_OF_VALUES = ("f32", "f16", "bf16")
STREAMS = "streams"
SCALES = "scales"
GAUSSIAN = "gaussian"
WORD = 16
"""Bits of a word of the streams. The rows of a band are a multiple of it."""
MAX_BAND = 4096


@dataclass(frozen=True, slots=True)
class TrellisLayout:
    """The arrangement of bit streams and scales.

    Parameters
    ----------
    bits : int
        Bits of a weight: 2, 3 or 4.
    group : int
        Columns that share a scale; divides the columns of a row.
    band : int
        Rows of a band, a multiple of 16. Each column of a band is one stream. The last band of a matrix may be smaller.
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

    def stream_words(self, rows: int) -> int:
        """Return the number of words of a stream of ``rows`` weights."""
        return -(-rows * self.bits // WORD)

    def words(self, shape: Shape) -> int:
        """Return the number of words of all streams. Each matrix of the last two dimensions has separate bands."""
        rows, cols = matrix_shape(shape)
        inner = inner_rows(shape)
        if not rows * cols:
            return 0
        full_bands, last_rows = divmod(inner, self.band)
        return rows // inner * cols * (full_bands * self.stream_words(self.band) + self.stream_words(last_rows))

    def part_specs(self, shape: Shape) -> tuple[PartSpec, ...]:
        """Return the raw parts of a tensor of ``shape``, in order."""
        return (
            PartSpec(STREAMS, "u8", 2 * self.words(shape)),
            PartSpec(SCALES, self.scales, DTYPES[self.scales].nbytes(prod(shape) // self.group)),
        )

    def attributes(self) -> dict[str, Any]:
        """Return the attributes from which ``from_tensor`` reads the layout."""
        return {
            "codec_version": VERSION,
            "bits": self.bits,
            "group_size": self.group,
            "band": self.band,
            "table": GAUSSIAN,
            "dtype": self.dtype,
        }

    @classmethod
    def from_tensor(cls, tensor: LayoutSource) -> TrellisLayout:
        """Return the layout from a tensor's attributes.

        Raises
        ------
        CodecError
            ``trellis.params``, ``trellis.group``.
        """
        reader = Attributes(tensor.params, RULE, tensor.name)
        reader.integer("codec_version", VERSION, VERSION)
        bits = reader.integer("bits", BITS[0], BITS[-1])
        group = reader.integer("group_size", 1, 2**31)
        band = reader.integer("band", WORD, MAX_BAND)
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
