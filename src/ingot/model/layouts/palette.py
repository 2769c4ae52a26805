"""Layouts of palettes, ``w = codebook[group][index]``. Attributes: ``spec/palette.md``."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

from ingot.core.numeric.dtypes import DTYPES, FLOATS
from ingot.errors import CodecError
from ingot.model.layouts.base import Attributes, LayoutSource, Shape
from ingot.model.spec import PartSpec

VERSION = 1
RULE = "palette.params"
BITS = (1, 2, 3, 4, 6, 8)
VECTOR_SIZES = (1, 2, 4)
ENTRY_DTYPES = ("f16", "f32", "bf16", "i8", "u8")
SCALE_DTYPES = ("f16", "f32")
INDICES = "indices"
CODEBOOK = "codebook"
SCALES = "codebook_scales"

# Bit v is set for each vector size v that the Neural Engine's compiler accepts: 1, 2, 4 and 5. The hardware field
# contains the binary logarithm, so 5 cannot be encoded.
LEGAL_VECTORS = 0x36


@dataclass(frozen=True, slots=True)
class PaletteLayout:
    """The arrangement of indices and codebooks.

    Parameters
    ----------
    bits : int
        Bits of an index: 1, 2, 3, 4, 6 or 8.
    groups : tuple of int
        The number of codebooks along each dimension of the indices; it divides the dimension.
    vector_size : int
        Values of an entry: 1, 2 or 4.
    vector_axis : int
        The dimension along which the values of an entry are consecutive; the indices are ``vector_size`` times shorter
        along it.
    dtype : str
        Logical element type.
    codebook : str
        Storage type of the codebooks' values.
    scales : str or None
        Storage type of the part ``codebook_scales``, one factor for each codebook; None if there is no such part.
    """

    bits: int
    groups: tuple[int, ...]
    vector_size: int
    vector_axis: int
    dtype: str
    codebook: str = "f16"
    scales: str | None = None
    codec: ClassVar[str] = "palette"

    @property
    def entries(self) -> int:
        """The number of entries of a codebook."""
        return 1 << self.bits

    @property
    def codebooks(self) -> int:
        """The number of codebooks."""
        return prod(self.groups)

    def index_shape(self, shape: Shape) -> Shape:
        """Return the shape of the indices of a tensor of ``shape``."""
        if self.vector_size == 1:
            return shape
        axis = self.vector_axis
        return (*shape[:axis], shape[axis] // self.vector_size, *shape[axis + 1 :])

    def index_bytes(self, shape: Shape) -> int:
        """Return the number of bytes of ``indices``, which are one bit stream."""
        return -(-prod(self.index_shape(shape)) * self.bits // 8)

    def codebook_shape(self) -> tuple[int, int, int]:
        """Return the shape of ``codebook``: codebooks, entries, values of an entry."""
        return (self.codebooks, self.entries, self.vector_size)

    def part_specs(self, shape: Shape) -> tuple[PartSpec, ...]:
        """Return the raw parts of a tensor of ``shape``."""
        parts = (
            PartSpec(INDICES, "u8", self.index_bytes(shape)),
            PartSpec(CODEBOOK, self.codebook, DTYPES[self.codebook].nbytes(prod(self.codebook_shape()))),
        )
        if self.scales is None:
            return parts
        return (*parts, PartSpec(SCALES, self.scales, DTYPES[self.scales].nbytes(self.codebooks)))

    def attributes(self) -> dict[str, Any]:
        """Return the attributes from which ``from_tensor`` reads the layout."""
        return {
            "codec_version": VERSION,
            "bits": self.bits,
            "groups": list(self.groups),
            "vector_size": self.vector_size,
            "vector_axis": self.vector_axis,
            "dtype": self.dtype,
            "scales": self.scales is not None,
        }

    @classmethod
    def from_tensor(cls, tensor: LayoutSource) -> PaletteLayout:
        """Return the layout from a tensor's attributes.

        Raises
        ------
        CodecError
            ``palette.params``, ``palette.vector-size``, ``palette.groups``, ``palette.parts``.
        """
        reader = Attributes(tensor.params, RULE, tensor.name)
        location = tensor.name
        shape = tensor.shape
        reader.integer("codec_version", VERSION, VERSION)
        bits = reader.integer("bits", 1, 8)
        if bits not in BITS:
            raise reader.refuse(f"bits {', '.join(map(str, BITS))}", bits)
        size = require_vector_size(tensor.params.get("vector_size"), location)
        axis = reader.integer("vector_axis", 0, max(len(shape), 1) - 1)
        if size > 1 and (not shape or shape[axis] % size):
            raise CodecError(
                "palette.vector-size",
                f"expected a vector_size that divides dimension {axis} of {list(shape)}, found {size}",
                where=location,
            )
        dtype = reader.choice("dtype", FLOATS)
        groups = reader.integers("groups", 1, 2**63 - 1)
        parts = tensor.part_dtypes
        scaled = tensor.params.get("scales", SCALES in parts)
        if type(scaled) is not bool or scaled != (SCALES in parts):
            raise CodecError(
                "palette.parts",
                f"expected a part {SCALES} where attribute scales is true, and none where it is false",
                where=location,
            )
        layout = cls(bits, groups, size, axis, dtype, parts.get(CODEBOOK, "f16"), parts.get(SCALES))
        index = layout.index_shape(shape)
        if len(groups) != len(shape) or any(length % count for length, count in zip(index, groups, strict=True)):
            raise CodecError(
                "palette.groups",
                f"expected groups that divide the indices' shape {list(index)}, found {list(groups)!s:.80}",
                where=location,
            )
        return layout


def require_vector_size(value: object, location: str | None = None) -> int:
    """Return ``value`` if it is 1, 2 or 4. Raises ``CodecError`` ``palette.vector-size`` otherwise."""
    if type(value) is int and value in VECTOR_SIZES:
        return value
    legal = type(value) is int and 0 <= value < 8 and bool(LEGAL_VECTORS >> value & 1)
    why = "; the compiler's mask 0x36 accepts 5, but a descriptor cannot encode it" if legal else ""
    raise CodecError("palette.vector-size", f"expected vector_size 1, 2 or 4, found {value!r:.80}{why}", where=location)
