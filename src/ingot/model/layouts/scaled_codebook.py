"""Layouts of scaled codebooks, ``w = scale[group] * codebook[index]``; attributes as in ``spec/scaled_codebook.md``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ingot.core.dtypes import DTYPES
from ingot.errors import CodecError
from ingot.model.layouts.base import Attributes, Described, Shape, element_count, matrix_shape
from ingot.model.spec import PartSpec

VERSION = 1
RULE = "scaled_codebook.params"
BITS = (1, 2, 3, 4, 6, 8)
DTYPES_OF_VALUES = ("f32", "f16", "bf16")
INDICES, CODEBOOK, SCALES = ROLES = ("indices", "codebook", "scales")

NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""NormalFloat of 4 bits: quantiles of a normal distribution (Dettmers et al., "QLoRA", 2023, appendix E); f32."""


@dataclass(frozen=True, slots=True)
class ScaledCodebookLayout:
    """How indices, one codebook and the scales lie.

    Parameters
    ----------
    bits : int
        Of one index: 1, 2, 3, 4, 6 or 8. The codebook has ``2**bits`` entries.
    group : int or None
        Columns that share a scale, which divide a row's; None for one scale per row.
    dtype : str
        Logical element type.
    codebook, scales : str
        Storage types: f32, f16 or bf16.
    """

    bits: int
    group: int | None
    dtype: str
    codebook: str = "f32"
    scales: str = "f32"
    codec: ClassVar[str] = "scaled_codebook"

    def groups(self, cols: int) -> int:
        """Scales of a row of ``cols`` columns."""
        return cols // self.group if self.group else 1

    def part_specs(self, shape: Shape) -> tuple[PartSpec, ...]:
        """Return the raw parts of a tensor of ``shape``."""
        rows, cols = matrix_shape(shape)
        return (
            PartSpec(INDICES, "u8", -(-element_count(shape) * self.bits // 8)),
            PartSpec(CODEBOOK, self.codebook, DTYPES[self.codebook].nbytes(1 << self.bits)),
            PartSpec(SCALES, self.scales, DTYPES[self.scales].nbytes(rows * self.groups(cols) if cols else 0)),
        )

    def attributes(self) -> dict[str, Any]:
        """Return the attributes that ``of`` takes back."""
        group = {"group_size": self.group} if self.group else {}
        granularity = "group" if self.group else "row"
        return {"codec_version": VERSION, "bits": self.bits, "granularity": granularity, **group, "dtype": self.dtype}

    @classmethod
    def of(cls, tensor: Described) -> ScaledCodebookLayout:
        """Read a tensor's attributes.

        Raises
        ------
        CodecError
            ``scaled_codebook.params``, ``scaled_codebook.group``.
        """
        reader = Attributes(tensor.params, RULE, tensor.name)
        reader.integer("codec_version", VERSION, VERSION)
        bits = reader.integer("bits", 1, 8)
        if bits not in BITS:
            raise reader.refuse(f"bits {', '.join(map(str, BITS))}", bits)
        grouped = reader.choice("granularity", ("group", "row")) == "group"
        if not grouped and reader.has("group_size"):
            raise reader.refuse("group_size for granularity group only", "row")
        group = reader.integer("group_size", 1, 2**62) if grouped else None
        cols = matrix_shape(tensor.shape)[1]
        if group and cols % group:
            raise CodecError(
                "scaled_codebook.group",
                f"expected a group_size that divides {cols} columns, found {group}",
                where=tensor.name,
            )
        parts = tensor.part_dtypes
        dtype = reader.choice("dtype", DTYPES_OF_VALUES)
        return cls(bits, group, dtype, parts.get(CODEBOOK, "f32"), parts.get(SCALES, "f32"))
